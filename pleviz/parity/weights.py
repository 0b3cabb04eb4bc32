"""Compare what two models hold: every parameter and buffer by name, bit for bit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pleviz.ledger import Entry, entries
from pleviz.parity.bits import MISSING, OK, Comparison, compare

if TYPE_CHECKING:
    import torch
    from torch import nn

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_WRAPPERS = re.compile(
    r"^(?:base_model\.model\.|_orig_mod\.)+|\.(?:base_layer|_orig_mod|language_model)(?=\.)"
)
_TOWERS = re.compile(r"(?:^|\.)(?:vision|audio)_tower\.")


def compare_weights(a: nn.Module, b: nn.Module) -> tuple[tuple[Comparison, ...], int, list[str]]:
    """Every difference between the tensors of two models.

    Counterparts are found by name, with the parts that wrappers add taken off: PEFT,
    ``torch.compile``, a multimodal model around the text model. Tensors that both models share are
    not read. Values that are not there (meta device) cannot be compared.

    Returns:
        The comparisons that are not OK, in the order of A; how many tensors were compared; the
        names of those that could not be.
    """
    left, right = _by_name(a), _by_name(b)
    found, compared, unreadable = [], 0, []
    for key, entry in left.items():
        other, name = right.pop(key, None), entry.name
        if other is None:
            found.append(_missing(entry, "only in A"))
            continue
        x, y = entry.tensor, other.tensor
        if _shared(x, y):
            compared += 1
            continue
        if (x.is_meta or y.is_meta) and x.shape == y.shape:
            unreadable.append(name)
            continue
        compared += 1
        result = compare(name, x, y, kind=entry.kind, layer=layer_of(name), finite=False)
        if result.status != OK:
            found.append(result)
    found += [_missing(entry, "only in B") for entry in right.values()]
    return tuple(found), compared, unreadable


def layer_of(name: str) -> int | None:
    """Index of the decoder layer a tensor's name says it is in; layers of towers do not count.

    >>> layer_of("model.language_model.layers.12.mlp.up_proj.weight")
    12
    """
    match = _LAYER.search(name)
    return int(match[1]) if match and not _TOWERS.search(name) else None


def _by_name(model: nn.Module) -> dict[str, Entry]:
    return {_WRAPPERS.sub("", entry.name): entry for entry in entries(model, tied=True)}


def _missing(entry: Entry, where: str) -> Comparison:
    layer, total = layer_of(entry.name), entry.tensor.numel()
    return Comparison(entry.name, entry.kind, MISSING, layer, total=total, detail=where)


def _shared(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are the same memory."""
    if x.is_meta or y.is_meta:
        return x is y
    return (x.data_ptr(), x.device, x.dtype, x.shape, x.stride()) == (
        y.data_ptr(),
        y.device,
        y.dtype,
        y.shape,
        y.stride(),
    )
