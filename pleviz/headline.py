"""The headline: GPU memory of each model with its table on the GPU and in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pleviz.format import fmt_bytes, text_table
from pleviz.records import Record, load_records

HOME = "mapped"
"""The home that is compared with ``gpu``."""
_PREDICTED = ("bf16", "nf4")


def headline(records: str | Path | None = None, *, markdown: bool = False) -> str:
    """The table as text or Markdown, with the machine, versions and date beneath.

    Measured on a GPU at real shapes, if there are such records; otherwise predictions, and it says
    so. Where several records have a row, the newest counts.

    Args:
        records: see :func:`pleviz.load_records`.
        markdown: a Markdown table rather than aligned text.

    Raises:
        RecordError: a record cannot be read.
    """
    measured, used = _measured(load_records(records))
    if not measured:
        header, rows = _predictions()
        notes = [
            "PREDICTED from the shapes: no measurement on a GPU is recorded yet. To make one:",
            f"pleviz measure --model … --homes gpu,{HOME} --out records/NAME.json",
        ]
    else:
        header = (
            "model",
            "precision",
            "on the GPU",
            f"table {HOME}",
            "saved",
            "ratio",
            "peak, on the GPU",
            f"peak, {HOME}",
        )
        rows = [_row(*key, *pair) for key, pair in measured.items()]
        tokens = {r.arguments.get("prefill_tokens") for r in used} - {None}
        of = f" of {', '.join(f'{n:,}' for n in sorted(tokens))} tokens" if tokens else ""
        notes = [f"GPU memory after loading, and peak during a prefill{of}; random weights."]
        notes += list(dict.fromkeys(f"Measured on {record.provenance}" for record in used))
    return _markdown(header, rows, notes) if markdown else _text(header, rows, notes)


_Pair = tuple[Mapping[str, Any], Mapping[str, Any]]


def _measured(
    records: Iterable[Record],
) -> tuple[dict[tuple[str, str], _Pair], list[Record]]:
    """Rows ``(gpu, moved)`` by model and precision, and the records they are from."""
    found: dict[tuple[str, str], tuple[_Pair, Record]] = {}
    for record in records:  # oldest first, so the newest stays; one with peaks beats one without
        if not record.hardware.get("gpu") or record.arguments.get("scale") != "real":
            continue
        for gpu in record.select(home="gpu", status="ok", compiled=False):
            key = gpu["model"], gpu["precision"]
            for moved in record.select(
                model=key[0], precision=key[1], home=HOME, status="ok", compiled=False
            ):
                if key in found and _has_peak(found[key][0]) and not _has_peak((gpu, moved)):
                    continue
                found[key] = (gpu, moved), record
    if any(_has_peak(pair) for pair, _ in found.values()):  # memory alone tells less
        found = {key: value for key, value in found.items() if _has_peak(value[0])}
    order = sorted(found, key=lambda key: (key[0], key[1]))
    used = list({id(found[key][1]): found[key][1] for key in order}.values())
    return {key: found[key][0] for key in order}, used


def _has_peak(pair: _Pair) -> bool:
    return all("peak_prefill_bytes" in row for row in pair)


def _row(model: str, precision: str, gpu: Mapping[str, Any], moved: Mapping[str, Any]) -> tuple:
    before, after = gpu["resident_bytes"], moved["resident_bytes"]
    peaks = [
        fmt_bytes(row["peak_prefill_bytes"]) if "peak_prefill_bytes" in row else ""
        for row in (gpu, moved)
    ]
    sizes = [fmt_bytes(n) for n in (before, after, before - after)]
    return (model, precision, *sizes, f"{after / before:.2f}", *peaks)


def _predictions() -> tuple[tuple[str, ...], list[tuple]]:
    from pleviz.arithmetic import budget
    from pleviz.specs import SPECS

    rows = []
    for name in SPECS:
        for precision in _PREDICTED:
            before = budget(name, home="gpu", precision=precision).resident_bytes
            after = budget(name, home=HOME, precision=precision).resident_bytes
            sizes = [fmt_bytes(n) for n in (before, after, before - after)]
            rows.append((name, precision, *sizes, f"{after / before:.2f}"))
    return ("model", "precision", "on the GPU", f"table {HOME}", "saved", "ratio"), rows


def _text(header: tuple[str, ...], rows: list[tuple], notes: list[str]) -> str:
    return "\n".join([text_table(header, rows), "", *notes])


def _markdown(header: tuple[str, ...], rows: list[tuple], notes: list[str]) -> str:
    def line(cells: Iterable[object]) -> str:
        return f"| {' | '.join(map(str, cells))} |"

    rule = ["---", "---", *["---:"] * (len(header) - 2)]
    return "\n".join([line(header), line(rule), *map(line, rows), "", *_paragraphs(notes)])


def _paragraphs(notes: list[str]) -> list[str]:
    return [f"{note}\\" for note in notes[:-1]] + notes[-1:]  # a backslash breaks the line
