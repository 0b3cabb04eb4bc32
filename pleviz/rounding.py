"""What rounding to 16 bits keeps and what it loses, counted over every number there is.

bfloat16 has 65,536 bit patterns, few enough to try them all: no sampling, no estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FP16_EXACT_FROM = 2.0**-17
"""From here up to 65,280 float16 holds every bfloat16 number; below, its steps are too coarse."""

_WIDTH = {  # dtype -> bits of exponent and mantissa, integer of the same size
    torch.bfloat16: (8, 7, torch.int16),
    torch.float16: (5, 10, torch.int16),
    torch.float32: (8, 23, torch.int32),
}


def bf16_numbers() -> torch.Tensor:
    """The 32,640 finite bfloat16 numbers that are not negative, ascending from 0."""
    return torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)


def bits(number: float, dtype: torch.dtype) -> str:
    """Sign, exponent and mantissa of ``number`` once rounded to ``dtype``.

    >>> bits(1.0, torch.bfloat16)
    '0 01111111 0000000'
    """
    exponent, mantissa, integer = _WIDTH[dtype]
    pattern = torch.tensor([number], dtype=dtype).view(integer).item()
    text = f"{pattern % (1 << (1 + exponent + mantissa)):0{1 + exponent + mantissa}b}"
    return f"{text[0]} {text[1 : 1 + exponent]} {text[1 + exponent :]}"


def next_up(numbers: torch.Tensor) -> torch.Tensor:
    """The next larger number of the same dtype for each of ``numbers``: one ULP up.

    Bit patterns of one sign are in the order of their values, so this is the next pattern, or for
    a negative number the one before.
    """
    patterns = numbers.view(_WIDTH[numbers.dtype][2])
    up = torch.where(patterns < 0, patterns - 1, patterns + 1)
    up = torch.where(numbers == 0, torch.ones_like(up), up)  # also from -0
    return up.view(numbers.dtype)


def step(number: float, dtype: torch.dtype) -> float:
    """One ULP at ``number``: the distance to the next larger number of ``dtype``.

    >>> step(1.0, torch.bfloat16), step(20.0, torch.bfloat16)
    (0.0078125, 0.125)
    """
    here = torch.tensor([number], dtype=dtype)
    return float(next_up(here).double() - here.double())


def numbers_between(low: float, high: float, dtype: torch.dtype) -> list[float]:
    """Every number of a 16-bit ``dtype`` in ``[low, high]``, ascending; ``low`` is not negative.

    Raises:
        ValueError: a dtype of another size, which has too many numbers to list.
    """
    if dtype.itemsize != 2 or low < 0:
        raise ValueError(f"can list 16-bit numbers from 0 on, not {dtype} from {low}")
    every = torch.arange(0x8000, dtype=torch.int32).to(torch.int16).view(dtype).double()
    return every[(every >= low) & (every <= high)].tolist()


def survives_fp16(numbers: torch.Tensor) -> torch.Tensor:
    """Which bfloat16 ``numbers`` come back the same from float16; bool, of the same shape."""
    return numbers.half().to(torch.bfloat16) == numbers


@dataclass(frozen=True)
class Binade:
    """Weights whose magnitude is in ``[2**exponent, 2**(exponent + 1))``."""

    exponent: int
    share: float
    """Part of all weights, 0…1."""
    changed: float
    """Part of all weights that are here and change on the way through float16."""


def fp16_round_trip(std: float) -> list[Binade]:
    """What bfloat16 → float16 → bfloat16 does to weights of N(0, ``std``²), exactly.

    Each bfloat16 number stands for all real numbers that round to it, so its weight is the normal
    distribution's mass between the midpoints to its neighbours.

    Raises:
        ValueError: ``std`` is not positive.
    """
    if not std > 0:
        raise ValueError(f"std must be positive, not {std}")
    numbers = bf16_numbers()
    exact = numbers.double()
    middles = (exact[1:] + exact[:-1]) / 2
    edges = torch.cat([exact[:1], middles, exact.new_tensor([math.inf])])
    mass = torch.erf(edges / (std * math.sqrt(2))).diff()  # both signs together
    changed = torch.where(survives_fp16(numbers), 0.0, mass)
    exponents = torch.frexp(exact).exponent - 1
    exponents[0] = exponents[1]  # zero, beside the smallest
    return [
        Binade(int(e), float(mass[exponents == e].sum()), float(changed[exponents == e].sum()))
        for e in exponents.unique()
    ]


def changed_by_fp16(std: float) -> float:
    """The part (0…1) of N(0, ``std``²) bfloat16 weights that a copy in float16 changes.

    >>> print(f"{changed_by_fp16(0.02):.4%}")
    0.0203%
    """
    return sum(binade.changed for binade in fp16_round_trip(std))
