"""Time a lookup in a host table, one way beside another, on the machine at hand.

With CUDA: rows read in place (``mapped``), rows gathered by pleviz' CPU home (``cpu``), rows
gathered the popular way (``workaround``), and the whole table copied first, as accelerate's hook
does (``device_map``). Without CUDA there is no bus to cross; what is left to compare is reading rows
(``cpu``) with copying the table (``device_map``) inside RAM.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pleviz.homes.gather import gather_rows
from pleviz.homes.registration import empty_pages, map_to_device

COUNTS = {True: (1, 64, 1000, 8500), False: (1, 16, 128, 1000)}
"""Tokens looked up at once, with CUDA and without: a decode step, a batch of them, and prompts."""
MID_SIZE = {True: 32_768, False: 4_096}
"""Rows of the table, with CUDA and without: 0.70 and 0.09 GB in bf16 at E4B's width."""


@dataclass(frozen=True)
class Lookup:
    """How long one way took for one number of tokens."""

    way: str
    """``mapped``, ``cpu``, ``workaround`` or ``device_map``."""
    tokens: int
    seconds: float
    """Median, from the call to the rows being where they are used."""
    moved_bytes: int
    """Bytes that had to be copied or read across."""


def time_lookups(
    *,
    width: int,
    device: str,
    rows: int | None = None,
    counts: Sequence[int] | None = None,
    repeats: int = 3,
) -> list[Lookup]:
    """Time every way that ``device`` has, for each of ``counts`` random tokens.

    Args:
        width: numbers in a row of the bf16 table.
        device: ``"cuda"`` or ``"cpu"``.
        rows: rows of the table; by default :data:`MID_SIZE`.
        counts: tokens per lookup; by default :data:`COUNTS`.
        repeats: timed runs after a warm-up; their median counts.

    Raises:
        ValueError: another device, or a size that is not positive.
        RegistrationError: the driver cannot page-lock the table.
    """
    cuda = device == "cuda"
    if device not in ("cuda", "cpu"):
        raise ValueError(f"lookups are timed on 'cuda' or 'cpu', not {device!r}")
    rows = MID_SIZE[cuda] if rows is None else rows
    counts = COUNTS[cuda] if counts is None else counts
    if min(width, rows, repeats, *counts) < 1:
        raise ValueError("width, rows, repeats and counts must be at least 1")
    table = empty_pages((rows, width), torch.bfloat16).fill_(1)  # touched: all of it is in RAM
    ways = _ways(table, cuda=cuda)
    generator = torch.Generator().manual_seed(0)
    found = []
    for tokens in counts:
        ids = torch.randint(0, rows, (tokens,), generator=generator).to(device)
        for way, lookup in ways.items():
            seconds = _median(lookup, ids, repeats, cuda=cuda)
            moved = table.nbytes if way == "device_map" else tokens * width * table.element_size()
            found.append(Lookup(way, tokens, seconds, moved))
    return found


def _ways(table: torch.Tensor, *, cuda: bool) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    if not cuda:
        return {
            "cpu": lambda ids: F.embedding(ids, table),
            "device_map": lambda ids: F.embedding(ids, table.clone()),
        }
    pageable = table.clone()  # the other ways must not profit from the page-locked memory
    seen = map_to_device(table, torch.device("cuda", torch.cuda.current_device()))
    return {
        "mapped": lambda ids: F.embedding(ids, seen),
        "cpu": lambda ids: gather_rows(pageable, ids),
        "workaround": lambda ids: F.embedding(ids.cpu(), pageable).to(ids.device),
        "device_map": lambda ids: F.embedding(ids, pageable.to(ids.device)),
    }


def _median(
    lookup: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, repeats: int, *, cuda: bool
) -> float:
    wait = torch.cuda.synchronize if cuda else lambda: None
    seconds = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        lookup(ids)
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
