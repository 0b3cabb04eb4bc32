"""What an exercise can be: a question with a number, or with a word, for an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that has a reason."""

    answer: Callable[[], float]
    hint: str


@dataclass(frozen=True)
class Exercise:
    """A question with a number for an answer. Sizes are in bytes inside, whatever their unit."""

    unit: str
    """``"GB"``, ``"MB"``, ``"kB"``, ``"%"`` or the thing that is counted."""
    answer: Callable[[], float]
    because: str
    """Said after a right answer."""
    hint: str
    """Said after a wrong answer that no mistake explains."""
    mistakes: tuple[Mistake, ...]
    tolerance: float = 0.01
    """Relative: what rounding to two or three digits may cost."""


@dataclass(frozen=True)
class Choice:
    """A question with a word for an answer."""

    answer: Callable[[], str]
    options: tuple[str, ...]
    because: str
    hints: Mapping[str, str]
    """Wrong option -> hint."""
