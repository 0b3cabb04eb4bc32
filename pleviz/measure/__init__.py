"""Measure memory, speed and parity of models with their table in different homes: :func:`measure`.

Every row (a model, a precision, a home) runs in a process of its own, so that no row inherits
another's memory, allocator cache or compiled code, and a row that crashes takes nothing with it.
"""

from pleviz.measure.driver import MeasureError, measure
from pleviz.measure.plan import HOMES, PRECISIONS, Options

__all__ = ["HOMES", "PRECISIONS", "MeasureError", "Options", "measure"]
