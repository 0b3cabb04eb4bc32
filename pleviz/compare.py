"""Prediction beside measurement: a model's bytes before and after its table moves, live or recorded."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pleviz.budgets import Budget, budget
from pleviz.format import fmt_bytes, text_table
from pleviz.records import Record, load_records
from pleviz.specs import SPECS, Scale, find_spec, spec_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOMENTS = {"before": "gpu", "after": "mapped"}
"""When a model was looked at -> the home its table was in."""


@dataclass(frozen=True)
class Comparison:
    """What a model should hold where it computes, and what it held."""

    model: str
    moment: str
    """``"before"`` or ``"after"`` the move."""
    predicted: Budget
    measured: int
    """Bytes: growth of torch's ``memory_allocated`` on CUDA, the sum of the tensors elsewhere."""
    source: str
    """Where the measurement comes from: ``"live …"`` or ``"recorded: …"``."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The record's row, with all else that it holds."""

    @property
    def label(self) -> str:
        """Name of the bar in a figure."""
        return f"{self.model}, {self.moment}"

    @property
    def difference(self) -> float:
        """Measured less predicted, relative to predicted."""
        return self.measured / self.predicted.resident_bytes - 1


def live(names: Sequence[str], *, scale: Scale, device: str) -> list[Comparison]:
    """Build each model, count, move its table (home ``mapped`` on CUDA, else ``cpu``), count again.

    Raises:
        ValueError: unknown name or scale.
    """
    return [seen for name in names for seen in _before_and_after(name, scale, device)]


def _before_and_after(name: str, scale: Scale, device: str) -> list[Comparison]:
    from pleviz.building import build
    from pleviz.homes import offload

    gc.collect()
    base = _allocated(device)
    model = build(find_spec(name), scale=scale, device=device)
    spec, home = spec_of(model), "mapped" if device == "cuda" else "cpu"
    source = f"live, {scale} shapes on {device}"
    before = Comparison(name, "before", budget(spec), _held(model, device, base), source)
    with offload(model, home):
        held = _held(model, device, base)
    return [before, Comparison(name, "after", budget(spec, home=home), held, source)]


def _allocated(device: str) -> int:
    import torch

    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _held(model: PreTrainedModel, device: str, base: int) -> int:
    from pleviz.homes import home_of
    from pleviz.ledger import ledger
    from pleviz.table import find_table

    if device == "cuda":
        return _allocated(device) - base
    return ledger(model).total - (0 if home_of(model) == "gpu" else find_table(model).nbytes)


def recorded(precision: str = "bf16") -> list[Comparison]:
    """The same from the records: the newest rows at real shapes on a GPU; models that lack one are
    left out.
    """
    found = _newest(precision)
    return [
        Comparison(
            name,
            moment,
            budget(name, home=home, precision=precision),
            found[name, home][0]["resident_bytes"],
            f"recorded: {found[name, home][1].provenance}",
            found[name, home][0],
        )
        for name in SPECS
        if all((name, home) in found for home in MOMENTS.values())
        for moment, home in MOMENTS.items()
    ]


def _newest(
    precision: str, *, compiled: bool = False
) -> dict[tuple[str, str], tuple[Mapping[str, Any], Record]]:
    """(model, home) -> its row and record. A row with speeds beats one with memory alone."""
    found: dict[tuple[str, str], tuple[Mapping[str, Any], Record]] = {}
    for record in load_records():  # oldest first
        if not record.hardware.get("gpu") or record.arguments.get("scale") != "real":
            continue
        for row in record.select(precision=precision, status="ok", compiled=compiled):
            key = row["model"], row["home"]
            if "decode_tok_s" in row or "decode_tok_s" not in found.get(key, ({},))[0]:
                found[key] = row, record
    return found


def table(comparisons: Sequence[Comparison], title: str = "") -> str:
    """Predicted and measured bytes, and how far apart they are, as text; ``title`` heads it."""
    rows = [
        (
            seen.label,
            f"{seen.predicted.resident_bytes:,}",
            f"{seen.measured:,}",
            f"{100 * seen.difference:+.3f} %",
        )
        for seen in comparisons
    ]
    return text_table((title, "predicted bytes", "measured bytes", "difference"), rows)


def costs(model: str, precision: str = "bf16") -> str:
    """Recorded memory and speed of one model in every home, as text; says so if there is nothing.

    Each speed is followed by its ratio to the home ``gpu``.
    """

    def of_model(compiled: bool) -> dict[str, Mapping[str, Any]]:
        rows = _newest(precision, compiled=compiled).items()
        return {home: row for (name, home), (row, _) in rows if name == model}

    eager, compiled = of_model(False), of_model(True)
    lines = [
        [
            home,
            *(fmt_bytes(row[key]) for key in ("resident_bytes", "peak_prefill_bytes")),
            *_with_ratio(eager, home, "prefill_s", 3),
            *_with_ratio(eager, home, "decode_tok_s", 1),
            *_with_ratio(compiled, home, "decode_tok_s", 1),
        ]
        for home, row in eager.items()
        if "prefill_s" in row
    ]
    if not lines:
        return f"No speeds of {model} in {precision} are recorded here."
    speeds = [column for name in ("prefill s", "eager tok/s", "compiled") for column in (name, "×")]
    return text_table((f"{model}, {precision}", "resident", "peak", *speeds), lines)


def _with_ratio(
    rows: Mapping[str, Mapping[str, Any]], home: str, key: str, digits: int
) -> tuple[str, str]:
    """A row's number and its ratio to the ``gpu`` row's; empty where there is none."""
    value, reference = (rows.get(name, {}).get(key) for name in (home, "gpu"))
    if value is None:
        return "", ""
    return f"{value:.{digits}f}", f"{value / reference:.2f}" if reference else ""
