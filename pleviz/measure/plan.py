"""What to measure: the options of a run, and the rows that they ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from pleviz.specs import SPECS

HOMES = ("gpu", "cpu", "mapped", "file", "device_map", "workaround")
"""The homes of :func:`pleviz.offload`, and two rows to compare them with."""
PRECISIONS = ("bf16", "fp16", "fp32", "nf4", "int8")
SCALES = ("real", "tiny")

DECODE_PROMPT = 64
"""Tokens of the prompt that decoding starts from: short, so that decoding is what is timed."""
REFERENCE_PROMPT = 48
"""Tokens of the prompt whose logits are compared with the ``gpu`` row's."""
REFERENCE_STEPS = 16
"""Greedy tokens compared with the ``gpu`` row's."""
SEGMENTS = 3
"""Timed stretches of decoding; their median counts."""
PREFILLS = (3, 7)
"""Least and most timed prefills; between the two, as many as fit in the time for one segment."""


@dataclass(frozen=True)
class Options:
    """Everything that decides what a run measures. Checked when it is made.

    Raises:
        ValueError: an unknown or impossible value; the message lists what is possible.
    """

    models: tuple[str, ...]
    """Names in :data:`pleviz.SPECS`. With a checkpoint: at most one, which it must then be."""
    homes: tuple[str, ...] = HOMES
    precisions: tuple[str, ...] = ("bf16",)
    prefill: int = 8500
    """Tokens of the prompt whose prefill is timed."""
    decode: int = 128
    """Steps to time at most for each batch size."""
    batches: tuple[int, ...] = (1,)
    compiled: bool = False
    """Time compiled decoding with a static cache instead of eager rows."""
    only_memory: bool = False
    """Load and measure what is held, nothing else."""
    scale: str = "real"
    device: str = "auto"
    checkpoint: str | None = None
    """A folder (or a name on the Hub) to load instead of random weights."""
    segment_seconds: float = 2.0
    """A timed segment ends after about this long, at three segments per batch size."""
    row_timeout: float = 600.0
    """Seconds after which a row is given up."""
    compile_backend: str = "inductor"

    def __post_init__(self) -> None:
        if not self.models and self.checkpoint is None:
            raise ValueError(f"name a model to measure: {', '.join(SPECS)}")
        if self.checkpoint is not None and len(self.models) > 1:
            raise ValueError(f"a checkpoint is one model; {len(self.models)} were named")
        for what, values, known in (
            ("model", self.models, tuple(SPECS)),
            ("home", self.homes, HOMES),
            ("precision", self.precisions, PRECISIONS),
            ("scale", (self.scale,), SCALES),
        ):
            for value in values:
                if value not in known:
                    raise ValueError(f"unknown {what} {value!r}; choose from {', '.join(known)}")
        for what, number in (
            ("prefill", self.prefill),
            ("decode", self.decode),
            *(("batch", batch) for batch in self.batches),
            ("segment_seconds", self.segment_seconds),
            ("row_timeout", self.row_timeout),
        ):
            if not number > 0:
                raise ValueError(f"{what} must be more than 0, not {number}")
        if not (self.homes and self.precisions and self.batches):
            raise ValueError("name at least one home, one precision and one batch size")
        if self.compiled and self.only_memory:
            raise ValueError("compiled decoding and memory alone are two measurements: ask for one")

    @property
    def kind(self) -> str:
        """The ``kind`` of the record."""
        return "vram" if self.only_memory else "speed"

    def shared(self, device: str) -> dict[str, Any]:
        """The conditions that all rows of one record share. Models, homes and precisions may grow.

        Args:
            device: what ``"auto"`` turned out to be.
        """
        conditions: dict[str, Any] = {
            "scale": self.scale if self.checkpoint is None else "checkpoint",
            "device": device,
        }
        if self.only_memory:
            return conditions
        conditions |= {
            "mode": "compiled" if self.compiled else "eager",
            "decode_steps": self.decode,
            "batches": list(self.batches),
            "decode_prompt_tokens": DECODE_PROMPT,
            "segment_s": self.segment_seconds,
        }
        return conditions if self.compiled else conditions | {"prefill_tokens": self.prefill}

    def command(self) -> str:
        """The command line of this run, without paths."""
        words = ["pleviz measure"]
        if self.models:
            words.append(f"--model {','.join(self.models)}")
        words += [f"--homes {','.join(self.homes)}", f"--precision {','.join(self.precisions)}"]
        if self.only_memory:
            words.append("--only-memory")
        else:
            batches = ",".join(map(str, self.batches))
            words += [f"--prefill {self.prefill}", f"--decode {self.decode}", f"--batch {batches}"]
            words += ["--compiled"] * self.compiled
            words.append(f"--segment-seconds {self.segment_seconds:g}")
        if self.checkpoint is not None:
            words.append("--checkpoint CHECKPOINT")
        else:
            words.append(f"--scale {self.scale}")
        return " ".join([*words, f"--device {self.device}", "--out FILE.json"])

    def rows(self, models: tuple[str, ...]) -> Iterator[Row]:
        """The rows to measure, grouped by model and precision, ``gpu`` (the reference) first."""
        homes = sorted(dict.fromkeys(self.homes), key=HOMES.index)
        for model in dict.fromkeys(models):
            for precision in dict.fromkeys(self.precisions):
                for home in homes:
                    yield Row(model, precision, home, self.compiled)


@dataclass(frozen=True)
class Row:
    """The identity of a row: what makes it another measurement."""

    model: str
    precision: str
    home: str
    compiled: bool

    def fields(self) -> dict[str, Any]:
        """As they stand in the record."""
        return {
            "model": self.model,
            "precision": self.precision,
            "home": self.home,
            "compiled": self.compiled,
        }

    def __str__(self) -> str:
        return " ".join(
            [self.model, self.precision, self.home, *(["compiled"] if self.compiled else [])]
        )


@dataclass(frozen=True)
class BuildJob:
    """A checkpoint of random weights to make."""

    model: str
    scale: str
    device: str
    folder: str


@dataclass(frozen=True)
class RowJob:
    """A row to measure."""

    row: Row
    checkpoint: str
    device: str
    options: Options
    reference: str | None = None
    """File of the reference. The ``gpu`` row writes it, the others compare with it."""


@dataclass(frozen=True)
class Machine:
    """What a measurement runs on."""

    device: str
    """Where the rows compute: ``"cuda:0"``, ``"mps"``, ``"cpu"``."""
    hardware: dict[str, Any]
    versions: dict[str, str | None]
    link_bytes_per_s: float | None


def ram_bytes() -> int:
    """Size of the memory. Some virtual machines grow it as it is used, so ask again at the end."""
    return psutil.virtual_memory().total


def row_of(stored: Mapping[str, Any]) -> Row:
    """The identity of a row read from a record."""
    return Row(stored["model"], stored["precision"], stored["home"], stored["compiled"])


def with_ratios(rows: tuple[Mapping[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The rows with their ratios to the ``gpu`` row of the same model, precision and mode.

    ``prefill_ratio_to_gpu`` is of seconds (1.02: 2 % slower), ``ratio_to_gpu`` in each entry of
    ``decode`` of tokens per second (0.99: 1 % slower).
    """
    reference = {
        (row["model"], row["precision"], row["compiled"]): row
        for row in rows
        if row["home"] == "gpu"
    }
    out = []
    for row in rows:
        gpu = reference.get((row["model"], row["precision"], row["compiled"]), {})
        new = {k: v for k, v in row.items() if k != "prefill_ratio_to_gpu"}
        if row.get("prefill_s") and gpu.get("prefill_s"):
            new["prefill_ratio_to_gpu"] = round(row["prefill_s"] / gpu["prefill_s"], 4)
        speeds = {entry["batch"]: entry["tok_s"] for entry in gpu.get("decode", ())}
        if "decode" in row:
            new["decode"] = [
                {k: v for k, v in entry.items() if k != "ratio_to_gpu"}
                | (
                    {"ratio_to_gpu": round(entry["tok_s"] / speeds[entry["batch"]], 4)}
                    if speeds.get(entry["batch"])
                    else {}
                )
                for entry in row["decode"]
            ]
        out.append(new)
    return tuple(out)
