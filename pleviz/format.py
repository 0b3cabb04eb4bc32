"""Numbers and small tables for people: bytes with their unit, HTML tables that follow the theme."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def fmt_bytes(n: int, *, binary: bool = False, digits: int = 2) -> str:
    """``n`` bytes as text with a unit.

    Decimal units by default (1 GB = 10⁹ bytes); ``binary=True`` gives 1 GiB = 2³⁰ bytes.

    >>> fmt_bytes(5_637_144_576), fmt_bytes(21_504), fmt_bytes(512)
    ('5.64 GB', '21.50 kB', '512 B')
    >>> fmt_bytes(5_637_144_576, binary=True)
    '5.25 GiB'
    """
    step = 1024 if binary else 1000
    units = ("B", "KiB", "MiB", "GiB", "TiB") if binary else ("B", "kB", "MB", "GB", "TB")
    size, unit = float(n), units[0]
    for unit in units:
        if abs(size) < step or unit == units[-1]:
            break
        size /= step
    return f"{n} B" if unit == "B" else f"{size:.{digits}f} {unit}"


def fmt_count(n: int, digits: int = 2) -> str:
    """A parameter count as text.

    >>> fmt_count(7_463_013_376), fmt_count(350_000_000), fmt_count(999)
    ('7.46 B', '350.00 M', '999')
    """
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(n) >= scale:
            return f"{n / scale:.{digits}f} {unit}"
    return str(n)


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain-text table: the first column left-aligned, the others right-aligned."""
    table = [tuple(map(str, header)), *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([line(table[0]), line(tuple("-" * w for w in widths)), *map(line, table[1:])])


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """The same table as HTML. No colours of its own, so it reads in light and dark themes."""
    right, left = ' style="text-align:right"', ' style="text-align:left"'

    def cells(tag: str, row: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{left if i == 0 else right}>{html.escape(str(cell))}</{tag}>"
            for i, cell in enumerate(row)
        )

    head = f"<caption{left}>{html.escape(caption)}</caption>" if caption else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f"<table>{head}<thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>"
    )
