"""What :class:`pleviz.MemoryProbe` hands back, with a line on what each number counts."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, fields
from typing import Any

from pleviz.format import fmt_bytes, html_table, text_table
from pleviz.ledger import Ledger


@dataclass(frozen=True)
class Reading:
    """Memory at one moment, in bytes. ``None``: this system does not tell."""

    allocated: int
    """Accelerator: bytes of live tensors."""
    reserved: int
    """Accelerator: bytes torch's allocator took from the driver, in use or cached."""
    device_used: int | None
    """Accelerator: bytes in use as the driver sees it, all programs together."""
    rss: int
    """Process: resident bytes, shared and file-mapped pages included."""
    uss: int | None
    """Process: bytes no other process shares; they come free when it ends."""
    pss: int | None
    """Process: as ``rss``, shared pages divided among their sharers."""
    file_mapped: int | None
    """Process: the part of ``rss`` that is pages of files; the kernel can drop clean ones."""
    registered: int
    """Host bytes that pleviz has registered with CUDA (page-locked in place)."""


@dataclass(frozen=True)
class Sample:
    """One point of the timeline, in seconds since the block began and bytes."""

    seconds: float
    allocated: int
    reserved: int
    rss: int
    event: str | None = None
    """The name given to :meth:`pleviz.MemoryProbe.mark`, if this point is a mark."""


_ACCELERATOR = (
    ("allocated", "live tensors, as torch's allocator counts them (memory_allocated)"),
    ("reserved", "what the allocator holds from the driver: live tensors and cache"),
    ("device_used", "the driver's figure (nvidia-smi): reserved, CUDA contexts, other programs"),
)
_PROCESS = (
    ("rss", "resident pages of this process, shared and file-mapped ones too"),
    ("uss", "pages that only this process has: come free when it ends"),
    ("pss", "as rss, with shared pages divided among their sharers"),
    ("file_mapped", "part of rss: pages of files and libraries; the kernel can drop clean ones"),
    ("registered", "host memory page-locked in place by pleviz for the GPU to read"),
)


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one block of code, in bytes. Made by :class:`pleviz.MemoryProbe`.

    ``before`` was read as the block began, ``end`` when it was done (garbage collected), ``after``
    once the allocator's cache had been emptied too.
    """

    source: str
    """``"cuda"``, ``"mps"`` or ``"cpu"``: what :attr:`resident` and :attr:`peak` are read from."""
    reason: str
    device: str
    before: Reading
    end: Reading
    after: Reading
    peak_allocated: int
    peak_reserved: int
    peak_rss: int
    peak_source: str
    """How ``peak_allocated`` and ``peak_reserved`` were found."""
    peak_rss_source: str
    seconds: float
    timeline: tuple[Sample, ...]
    ledger_before: Ledger | None
    ledger: Ledger | None
    """What the model holds, after the block; ``None`` without a model."""

    @property
    def resident(self) -> int:
        """Bytes held after the block: allocated on an accelerator, RSS on the CPU."""
        return self._headline(self.after)

    @property
    def growth(self) -> int:
        """:attr:`resident` less the same figure before the block."""
        return self.resident - self._headline(self.before)

    @property
    def peak(self) -> int:
        """The most the block held at once: allocated on an accelerator, RSS on the CPU."""
        return self.peak_rss if self.source == "cpu" else self.peak_allocated

    @property
    def cached(self) -> int:
        """Bytes the allocator kept without use at the end of the block; emptying gave most back."""
        return self.end.reserved - self.end.allocated

    @property
    def context(self) -> int | None:
        """Device bytes outside torch's allocator: CUDA contexts, libraries, other programs."""
        if self.after.device_used is None:
            return None
        return self.after.device_used - self.after.reserved

    @property
    def marks(self) -> tuple[Sample, ...]:
        """The marked points of the timeline."""
        return tuple(sample for sample in self.timeline if sample.event is not None)

    def _headline(self, reading: Reading) -> int:
        return reading.rss if self.source == "cpu" else reading.allocated

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        plain: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("before", "end", "after"):
            plain[name] = asdict(plain[name])
        for name in ("ledger_before", "ledger"):
            plain[name] = plain[name].to_dict() if plain[name] is not None else None
        plain["timeline"] = [asdict(sample) for sample in self.timeline]
        derived = ("resident", "growth", "peak", "cached", "context")
        return plain | {name: getattr(self, name) for name in derived}

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows; the last column says what the number counts."""
        peaks = {
            "allocated": self.peak_allocated,
            "reserved": self.peak_reserved,
            "rss": self.peak_rss,
        }
        header = ["", "before", "peak", "end", "what it counts"]
        quantities = _PROCESS
        if self.source != "cpu":
            header.insert(4, "cache emptied")
            quantities = _ACCELERATOR + _PROCESS
        rows = []
        for name, counts in quantities:
            if getattr(self.after, name) is None:
                continue
            cells = [getattr(self.before, name), peaks.get(name), getattr(self.end, name)]
            if self.source != "cpu":
                cells.append(getattr(self.after, name))
            rows.append((name, *("" if n is None else fmt_bytes(n) for n in cells), counts))
        return tuple(header), rows

    def _remarks(self) -> list[str]:
        """The readings that are commonly mistaken for one another, spelled out."""
        remarks = []
        if self.source != "cpu":
            freed = self.end.reserved - self.after.reserved
            remarks.append(
                f"{fmt_bytes(self.cached)} of the reserved memory was cache at the end: free for "
                f"torch, not for other programs. empty_cache() gave {fmt_bytes(freed)} back."
            )
            remarks.append(f"peak of allocated and reserved: {self.peak_source}")
        if self.context is not None:
            remarks.append(
                f"{fmt_bytes(self.context)} of the device is outside torch's allocator: CUDA "
                "contexts, libraries, other programs. Nothing in Python gives a context back."
            )
        remarks.append(f"peak of rss: {self.peak_rss_source}")
        return remarks

    def _title(self) -> str:
        return f"memory of {self.device} over {self.seconds:.1f} s ({self.reason})"

    def __str__(self) -> str:
        header, rows = self._table()
        parts = [self._title(), text_table(header[:-1], [row[:-1] for row in rows])]
        width = max(len(row[0]) for row in rows)
        parts += ["what is counted:", *(f"  {row[0]:{width}}  {row[-1]}" for row in rows)]
        parts += [f"* {remark}" for remark in self._remarks()]
        if self.ledger is not None:
            parts += ["the model holds:", str(self.ledger)]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        remarks = "".join(f"<li>{html.escape(remark)}</li>" for remark in self._remarks())
        model = self.ledger._repr_html_() if self.ledger is not None else ""
        return html_table(*self._table(), caption=self._title()) + f"<ul>{remarks}</ul>{model}"
