"""A record of a measurement as a table to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pleviz.format import fmt_bytes, text_table
from pleviz.records import Record

Cell = Callable[[Mapping[str, Any]], str]


def _name(row: Mapping[str, Any]) -> str:
    words = [row["model"], row["precision"], row["home"], *["compiled"] * row["compiled"]]
    return " ".join(words)


def _bytes(key: str) -> Cell:
    return lambda row: fmt_bytes(row[key]) if key in row else ""


def _prefill(row: Mapping[str, Any]) -> str:
    if "prefill_s" not in row:
        return ""
    ratio = row.get("prefill_ratio_to_gpu")
    return f"{row['prefill_s']:.3f} s" + (f" ({ratio:.2f}×)" if ratio is not None else "")


def _decode(row: Mapping[str, Any]) -> str:
    parts = []
    for entry in row.get("decode", ()):
        ratio = entry.get("ratio_to_gpu")
        times = f" ({ratio:.2f}×)" if ratio is not None else ""
        parts.append(f"{entry['tok_s']:.1f}{times}")
    return ", ".join(parts)


def _same(row: Mapping[str, Any]) -> str:
    if "parity" in row:
        return row["parity"]["verdict"]
    told = [e["greedy_equal_to_gpu"] for e in row.get("decode", ()) if "greedy_equal_to_gpu" in e]
    return ("same tokens" if all(told) else "other tokens") if told else ""


_COLUMNS: dict[str, Cell] = {
    "row": _name,
    "status": lambda row: row["status"],
    "resident": _bytes("resident_bytes"),
    "predicted": lambda row: (
        _bytes("predicted_resident_bytes")(row) if "resident_ratio_to_predicted" in row else ""
    ),
    "ratio": lambda row: (
        f"{row['resident_ratio_to_predicted']:.4f}" if "resident_ratio_to_predicted" in row else ""
    ),
    "load peak": _bytes("load_peak_bytes"),
    "prefill peak": _bytes("peak_prefill_bytes"),
    "decode peak": _bytes("peak_decode_bytes"),
    "prefill": _prefill,
    "decode tok/s": _decode,
    "parity": _same,
}


def summary(record: Record) -> str:
    """All rows as a text table, columns without a value left out, and what they were measured on."""
    table = [[cell(row) for cell in _COLUMNS.values()] for row in record.rows]
    used = [i for i in range(len(_COLUMNS)) if any(cells[i] for cells in table)]
    names = list(_COLUMNS)
    text = text_table([names[i] for i in used], [[cells[i] for i in used] for cells in table])
    batches = record.arguments.get("batches")
    lines = [text]
    if batches:
        of = ", ".join(map(str, batches))
        lines.append(f"decode at batch {of}; × is relative to the gpu row")
    lines += [f"{_name(r)}: {r['reason']}" for r in record.rows if r["status"] != "ok"]
    return "\n".join([*lines, record.provenance])


def row_line(row: Mapping[str, Any]) -> str:
    """One row on one line, for while a measurement runs."""
    cells = [
        f"{name} {cell(row)}" for name, cell in _COLUMNS.items() if name != "row" and cell(row)
    ]
    reason = [row["reason"]] if "reason" in row else []
    return f"{_name(row)}: {', '.join(cells + reason)}"
