"""Compare two tensors bit by bit, in chunks, and say how far apart they are in ULPs.

A ULP (unit in the last place) is one step to the next representable number of a dtype. Read as
integers, the bit patterns of IEEE numbers of one sign are in the order of their values, so once
negative patterns are mirrored, the distance in ULPs is a subtraction (Bruce Dawson, "Comparing
Floating Point Numbers", 2012).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

CHUNK = 1 << 22
"""Elements compared at once: bounds the temporary memory to about 200 MB, for any tensor."""

OK, DIFF, SHAPE, DTYPE, MISSING, NONFINITE = "OK", "DIFF", "SHAPE", "DTYPE", "MISSING", "NONFINITE"

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOP_BIT = -(1 << 63)


@dataclass(frozen=True)
class Comparison:
    """How one tensor of A compares with its counterpart in B."""

    name: str
    kind: str
    """``"stage"``, ``"parameter"``, ``"buffer"`` or ``"quantisation"``."""
    status: str
    """``OK``: equal in every bit (and, for a stage, finite); ``DIFF``; ``SHAPE`` or ``DTYPE``: they
    cannot be equal; ``MISSING``: only one side has it; ``NONFINITE``: a NaN or infinity in either.
    """
    layer: int | None = None
    """Index of the decoder layer it belongs to."""
    total: int = 0
    """Elements compared."""
    differing: int = 0
    """Elements whose bits differ."""
    max_ulp: int | None = None
    """Largest distance in ULPs, NaNs left out; ``None`` where there is no common scale."""
    max_abs: float | None = None
    """Largest absolute difference of finite values."""
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def compare(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    kind: str = "stage",
    layer: int | None = None,
    finite: bool = True,
) -> Comparison:
    """Compare two tensors of any dtype and device, without copying them whole.

    Args:
        name: name of the result, as are ``kind`` and ``layer``.
        a: a tensor.
        b: its counterpart. Chunks of ``a`` are brought to its device.
        kind: see ``name``.
        layer: see ``name``.
        finite: report NaNs and infinities, also where both sides have the same ones.
    """
    if a.shape != b.shape:
        detail = f"A {list(a.shape)}, B {list(b.shape)}"
        return Comparison(name, kind, SHAPE, layer, detail=detail)
    numbers = a.is_floating_point() and b.is_floating_point()
    differing, ulp, gap, bad_a, bad_b = 0, 0, 0.0, 0, 0
    for x, y in _chunks(a, b):
        if finite and numbers:
            bad_a += _nonfinite(x)
            bad_b += _nonfinite(y)
        if a.dtype != b.dtype:
            differing += int((x.double() != y.double()).sum())
        elif _bits_equal(x, y):
            continue
        else:
            differing += int((_bits(x) != _bits(y)).sum())
            ulp = max(ulp, max_ulp(x, y)) if numbers else 0
        gap = max(gap, _max_abs(x, y))

    status, detail = DIFF if differing else OK, ""
    if a.dtype != b.dtype:
        status, detail = DTYPE, f"A {a.dtype}, B {b.dtype}"
    if bad_a or bad_b:
        status, detail = NONFINITE, f"NaN or infinity: {bad_a} in A, {bad_b} in B"
    comparable = numbers and a.dtype == b.dtype
    return Comparison(
        name=name,
        kind=kind,
        status=status,
        layer=layer,
        total=a.numel(),
        differing=differing,
        max_ulp=ulp if comparable else None,
        max_abs=gap,
        detail=detail,
    )


def bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits: NaN equals NaN, -0 is not 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return all(_bits_equal(x, y) for x, y in _chunks(a, b))


def max_ulp(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance in ULPs between elements of two tensors of one floating-point dtype.

    Pairs with a NaN are left out; infinity is one step after the largest number; -0 and 0 are 0
    apart. Works for every dtype from 8 to 64 bits.

    >>> max_ulp(torch.tensor([1.0, -2.0]), torch.tensor([1.0 + 2**-23, -2.0]))
    1
    """
    x, y = _ordered(a), _ordered(b)
    distance = torch.maximum(x, y) - torch.minimum(
        x, y
    )  # 64-bit dtypes: as if unsigned, modulo 2⁶⁴
    distance = distance[~(_wide(a).isnan() | _wide(b).isnan())]
    if distance.numel() == 0:
        return 0
    # torch has no unsigned maximum: flipping the top bit keeps the unsigned order
    return (int((distance ^ _TOP_BIT).max()) ^ _TOP_BIT) % (1 << 64)


def _chunks(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors, flat, :data:`CHUNK` elements at a time, on one device."""
    device = "cpu" if b.device.type == "mps" else b.device  # MPS has no 64-bit floats
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    for start in range(0, a.numel(), CHUNK):
        yield a[start : start + CHUNK].to(device), b[start : start + CHUNK].to(device)


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(_INTEGER[t.element_size()])


def _bits_equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(_bits(x), _bits(y))


def _ordered(t: torch.Tensor) -> torch.Tensor:
    """Integers (int64) in the order of the values: neighbours differ by one."""
    width = 8 * t.element_size()
    bits = _bits(t).long()
    magnitude = bits & ((1 << (width - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def _wide(t: torch.Tensor) -> torch.Tensor:
    """``t`` in a dtype that every operator exists for, without loss."""
    return t if t.dtype == torch.float64 else t.float()


def _nonfinite(t: torch.Tensor) -> int:
    return t.numel() - int(_wide(t).isfinite().sum())


def _max_abs(x: torch.Tensor, y: torch.Tensor) -> float:
    if not (x.is_floating_point() and y.is_floating_point()):
        x, y = x.double(), y.double()
    gaps = (_wide(x) - _wide(y)).abs()
    gaps = gaps[gaps.isfinite()]
    return float(gaps.max()) if gaps.numel() else 0.0
