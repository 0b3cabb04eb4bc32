"""Gather rows of a table in host memory and bring them to the ids' device.

The gather is a registered custom operator with a fake implementation, so ``torch.compile`` keeps
it as one node in the graph instead of breaking the graph there, for any number of tokens.
"""

from __future__ import annotations

import threading
from collections import Counter

import torch

STAGING_BYTES = 32 * 2**20  # per half of the pinned double buffer
_DEDUPLICATE_FROM = 256  # ids; below this, finding duplicates costs more than it saves

bytes_moved: Counter[int] = Counter()
"""Bytes of rows brought to an accelerator, by the table's address."""

_counting = threading.Lock()
_per_thread = threading.local()


def check_ids(ids: torch.Tensor, rows: int, what: str = "the PLE table") -> None:
    """Raise ``IndexError`` unless every id is a row number. Reads ``ids`` on the host.

    Raises:
        IndexError: names the first id that is outside ``0 … rows - 1``.
    """
    if ids.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(ids)).tolist()  # one synchronisation, not two
    if low < 0 or high >= rows:
        raise IndexError(
            f"token id {low if low < 0 else high} is outside {what}, which has rows 0…{rows - 1}. "
            "Check the tokenizer, or resize the model's embeddings."
        )


class _Staging:
    """Two pinned buffers: the CPU fills one while the other is copied to the GPU."""

    def __init__(self) -> None:
        self.halves = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in range(2)]

    def upload(self, table: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        """``out[i] = table[index[i]]`` for a CUDA ``out``, chunk by chunk."""
        row_bytes = table.shape[1] * table.element_size()
        step = max(1, STAGING_BYTES // row_bytes)
        if row_bytes > STAGING_BYTES:
            raise ValueError(f"a row of {row_bytes:,} bytes does not fit {STAGING_BYTES:,} of staging")
        for turn, start in enumerate(range(0, index.numel(), step)):
            half, copied = self.halves[turn % 2], self.copied[turn % 2]
            part = index[start : start + step]
            copied.synchronize()  # the copy that last used this half
            rows = half[: part.numel() * row_bytes].view(table.dtype).view(part.numel(), -1)
            torch.index_select(table, 0, part, out=rows)
            out[start : start + step].copy_(rows, non_blocking=True)
            copied.record()


def _staging(device: torch.device) -> _Staging:
    buffers = _per_thread.__dict__.setdefault("buffers", {})
    if device not in buffers:
        with torch.cuda.device(device):
            buffers[device] = _Staging()
    return buffers[device]


@torch.library.custom_op("pleviz::gather_rows", mutates_args=())
def gather_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a host ``table`` ``[rows, width]`` for ``ids`` ``[…]``: ``[…, width]`` on ids' device.

    Raises:
        IndexError: an id has no row.
    """
    index = ids.reshape(-1).to("cpu")
    check_ids(index, table.shape[0])
    table = table.detach()
    shape = (*ids.shape, table.shape[1])
    if ids.device.type == "cpu":
        return table.index_select(0, index).view(shape)
    places = None
    if index.numel() >= _DEDUPLICATE_FROM:
        distinct, inverse = torch.unique(index, return_inverse=True)
        if 4 * distinct.numel() <= 3 * index.numel():
            index, places = distinct, inverse
    with _counting:
        bytes_moved[table.data_ptr()] += index.numel() * table.shape[1] * table.element_size()
    if ids.device.type == "cuda":
        rows = torch.empty((index.numel(), table.shape[1]), dtype=table.dtype, device=ids.device)
        with torch.cuda.device(ids.device):
            _staging(ids.device).upload(table, index, rows)
    else:
        rows = table.index_select(0, index).to(ids.device)
    if places is not None:
        rows = rows.index_select(0, places.to(ids.device, non_blocking=True))
    return rows.view(shape)


@gather_rows.register_fake
def _(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return ids.new_empty((*ids.shape, table.shape[1]), dtype=table.dtype)
