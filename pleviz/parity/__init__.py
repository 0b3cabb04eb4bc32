"""Prove that two models, or one model before and after its table moved, compute the same bits.

:func:`diff` runs both on one input and compares the forward pass stage by stage, then the weights
and, if asked, greedy tokens. "Identical" means equal in every bit, finite, and shown to depend on
the PLE table: two models full of NaN agree too, and so do two models that ignore their tables.
"""

from pleviz.parity.bits import Comparison, bit_equal, max_ulp
from pleviz.parity.compare import diff
from pleviz.parity.report import Parity
from pleviz.parity.tokens import Tokens

__all__ = ["Comparison", "Parity", "Tokens", "bit_equal", "diff", "max_ulp"]
