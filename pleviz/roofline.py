"""The roofline model: whether reading memory or arithmetic bounds an operation on a machine.

Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

from pleviz.arithmetic import embedding_row_intensity, matmul_intensity
from pleviz.specs import Spec, find_spec


@dataclass(frozen=True)
class Machine:
    """What a data sheet says about a GPU."""

    name: str
    flop_per_s: float
    """Dense 16-bit matrix products."""
    bytes_per_s: float
    """Memory bandwidth."""
    source: str

    @property
    def balance(self) -> float:
        """FLOP per byte at which arithmetic takes as long as reading memory does."""
        return self.flop_per_s / self.bytes_per_s

    def reachable(self, intensity: float) -> float:
        """The most FLOP/s an operation of this intensity (FLOP per byte) can reach."""
        return min(self.flop_per_s, self.bytes_per_s * intensity)


MACHINES = (
    Machine("NVIDIA H200", 989e12, 4.8e12, "NVIDIA H200 data sheet (SXM, bf16, without sparsity)"),
    Machine("NVIDIA T4", 65e12, 320e9, "NVIDIA T4 data sheet (fp16)"),
)
"""The GPU that the records were made on, and the one that Colab lends for nothing."""


@dataclass(frozen=True)
class Operation:
    """Something done with one weight, or one row, for ``tokens`` tokens at once."""

    label: str
    tokens: int
    intensity: float
    """FLOP per byte of memory traffic."""


def operations(
    name_or_spec: str | Spec, tokens: tuple[int, ...] = (1, 16, 256, 4096)
) -> tuple[Operation, ...]:
    """A PLE row, a feed-forward weight and an attention weight of the first layer.

    Each for several numbers of tokens that share one reading of the weight; each token reads a row
    of its own, so the row's intensity does not depend on them. The attention weight is the key
    projection, the smallest that is read at every token.
    """
    spec = find_spec(name_or_spec)
    weights = {
        "feed-forward weight": (spec.intermediate_sizes[0], spec.hidden_size),
        "attention weight (keys)": (spec.kv_heads[0] * spec.head_dims[0], spec.hidden_size),
    }
    rows = (Operation("PLE row", count, embedding_row_intensity()) for count in tokens)
    matrices = (
        Operation(label, count, matmul_intensity(*shape, batch=count))
        for label, shape in weights.items()
        for count in tokens
    )
    return (*rows, *matrices)


def tokens_to_reach(name_or_spec: str | Spec, machine: Machine) -> int:
    """The fewest tokens at once for which the first feed-forward weight is bound by arithmetic.

    Raises:
        ValueError: it never is: the machine's balance is beyond what the shape can reach.
    """
    spec = find_spec(name_or_spec)
    shape = spec.intermediate_sizes[0], spec.hidden_size
    for tokens in range(1, 10**5):
        if matmul_intensity(*shape, batch=tokens) >= machine.balance:
            return tokens
    raise ValueError(
        f"a {shape[0]} × {shape[1]} weight stays below {machine.balance:.0f} FLOP per byte, the "
        f"balance of {machine.name}, however many tokens share it"
    )
