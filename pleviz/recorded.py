"""What the records say about homes and about parity, ready for a figure or a table.

Each function returns what it found and a line that says where that comes from; both are empty where
this copy of pleviz has no such record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pleviz.format import fmt_bytes, text_table
from pleviz.lookups import Lookup
from pleviz.records import Record, load_records
from pleviz.specs import SPECS

Row = Mapping[str, Any]

_MOVED = ("mapped", "file", "cpu", "workaround", "device_map")
"""Ways to have the table off the GPU, in the order of columns."""


def speed_by_home(precision: str = "bf16") -> tuple[dict[str, tuple[Row, ...]], str]:
    """Model -> its eager rows at real shapes on a GPU, from the newest record that has them all."""
    found: dict[str, tuple[tuple[Row, ...], Record]] = {}
    for record in _on_gpu("speed"):
        if record.arguments.get("scale") != "real":
            continue
        for model in SPECS:
            rows = record.select(model=model, precision=precision, status="ok", compiled=False)
            if any(row["home"] == "gpu" and "decode_tok_s" in row for row in rows):
                found[model] = rows, record
    views = {model: found[model][0] for model in reversed(SPECS) if model in found}
    return views, _sources(found[model][1] for model in views)


def prefill_changes(views: Mapping[str, tuple[Row, ...]]) -> str:
    """How much longer than ``gpu`` each home takes for the prompt, as a text table.

    Args:
        views: from :func:`speed_by_home`.
    """
    there = {row["home"] for rows in views.values() for row in rows}
    homes = [home for home in _MOVED if home in there]
    lines = []
    for model, rows in views.items():
        ratio = {row["home"]: row.get("prefill_ratio_to_gpu") for row in rows}
        lines.append([model, *(_percent(ratio.get(home)) for home in homes)])
    return text_table(("prefill, against gpu", *homes), lines) if lines else ""


def compiled_decoding() -> tuple[str, str]:
    """Compiled decoding with the table on the GPU and mapped, as text; the newest of each model."""
    found: dict[tuple[str, int], tuple[dict[str, float], Record]] = {}
    for record in _on_gpu("speed"):
        for row in record.select(precision="bf16", status="ok", compiled=True):
            for entry in row["decode"]:
                key = row["model"], entry["batch"]
                if key not in found or found[key][1] is not record:
                    found[key] = {}, record
                found[key][0][row["home"]] = entry["tok_s"]
    whole = {key: pair for key, pair in found.items() if {"gpu", "mapped"} <= pair[0].keys()}
    lines = [
        (f"{model}, batch {batch}", f"{gpu:,.0f}", f"{mapped:,.0f}", f"{mapped / gpu:.3f}")
        for (model, batch), (speed, _) in whole.items()
        for gpu, mapped in [(speed["gpu"], speed["mapped"])]
    ]
    header = ("compiled, tokens/s", "gpu", "mapped", "ratio")
    text = text_table(header, lines) if lines else ""
    return text, _sources(record for _, record in whole.values())


def lookups_by_home(model: str) -> tuple[list[Lookup], str]:
    """Times of the table's lookup alone, by home and number of tokens; the newest for the model."""
    rows, source = _details(model, "gather")
    return [Lookup(r["home"], r["ids"], r["seconds"], r["bytes"]) for r in rows], source


def attaching(model: str) -> tuple[str, str]:
    """Time and private RAM that moving the table to each home takes, as a text table."""
    rows, source = _details(model, "attach")
    lines = [
        (
            row["home"],
            f"{row['attach_s']:.2f} s",
            fmt_bytes(row["table_bytes"]),
            fmt_bytes(max(0, row["added_anonymous_bytes"])),
        )
        for row in rows
    ]
    header = ("home", "attached in", "table", "private RAM added")
    return (text_table(header, lines) if lines else ""), source


def short_parity() -> tuple[str, str]:
    """Verdict on each home against ``gpu`` at real shapes, by model and precision, as text."""
    found: dict[tuple[str, str], tuple[dict[str, Row], Record]] = {}
    for record in _on_gpu("speed"):
        for row in record.select(status="ok", compiled=False):
            if "verdict" in row.get("parity", {}) and row["home"] != "gpu":
                key = row["model"], row["precision"]
                if key not in found or found[key][1] is not record:
                    found[key] = {}, record
                found[key][0][row["home"]] = row["parity"]
    homes = [home for home in _MOVED if any(home in seen for seen, _ in found.values())]
    lines = [
        (f"{model}, {precision}", *(_verdict(seen.get(home)) for home in homes))
        for (model, precision), (seen, _) in found.items()
    ]
    text = text_table(("against gpu", *homes), lines) if lines else ""
    return text, _sources(record for _, record in found.values())


def long_parity() -> tuple[str, str]:
    """Greedy tokens of each model with its table in another home against ``gpu``, as text."""
    found = {row["model"]: (row, record) for record in _on_gpu("greedy") for row in _moved(record)}
    lines = [
        (
            model,
            row["home"],
            f"{row['tokens']:,}",
            f"{row['distinct_tokens']:,}",
            _yes(row["tokens_equal"]),
            _yes(row["checksums_equal"]),
        )
        for model, (row, _) in sorted(found.items(), key=lambda item: list(SPECS).index(item[0]))
    ]
    header = ("model", "home", "tokens", "distinct", "tokens equal", "logits equal")
    text = text_table(header, lines) if lines else ""
    return text, _sources(record for _, record in found.values())


def _moved(record: Record) -> Iterator[Row]:
    return (row for row in record.rows if row["home"] != "gpu")


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{round(100 * (ratio - 1)):+d} %"


def _verdict(parity: Row | None) -> str:
    return "" if parity is None else str(parity["verdict"])


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _details(model: str, kind: str) -> tuple[list[Row], str]:
    """Rows of one kind from the newest record of a model's homes in detail."""
    for record in reversed(_on_gpu("homes")):
        rows = [row for row in record.rows if row.get("kind") == kind]
        if rows and record.arguments.get("model") == model:
            return rows, record.provenance
    return [], ""


def _on_gpu(kind: str) -> list[Record]:
    """Records of a kind that were made on a GPU, oldest first."""
    return [r for r in load_records() if r.kind == kind and r.hardware.get("gpu")]


def _sources(records: Iterator[Record]) -> str:
    return "; ".join(dict.fromkeys(record.provenance for record in records))
