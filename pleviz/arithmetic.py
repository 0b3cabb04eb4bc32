"""Memory, traffic and parameter counts of a PLE model, as pure functions of its spec. No torch.

Everything here follows from the shapes of tensors, so it needs no model, no weights and no GPU.
Bytes are integers; GB means 10⁹ bytes. :func:`budget` puts the pieces together for one way of
running a model. Functions that take a spec take the name of a published model too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pleviz.budgets import HOMES, Budget, budget
from pleviz.components import COMPONENTS
from pleviz.format import fmt_count, html_table, text_table
from pleviz.peaks import kv_bytes
from pleviz.specs import Spec, find_spec

__all__ = [
    "HOMES",
    "PUBLISHED",
    "Budget",
    "Effective",
    "break_even_rank",
    "budget",
    "effective_parameters",
    "embedding_row_intensity",
    "factorised_table_parameters",
    "kv_cache_bytes",
    "matmul_intensity",
    "parameters_by_component",
    "row_bytes",
    "table_bytes",
    "unused_kv_parameters",
]


def row_bytes(name_or_spec: str | Spec, itemsize: int = 2) -> int:
    """Bytes of one token's row of the PLE table: what one token needs from it, all layers together.

    >>> row_bytes("gemma-4-E4B")
    21504
    """
    return find_spec(name_or_spec).table_shape[1] * itemsize


def table_bytes(name_or_spec: str | Spec, itemsize: int = 2) -> int:
    """Bytes of the whole PLE table: as many rows as the vocabulary has tokens.

    >>> table_bytes("gemma-4-E4B"), table_bytes("gemma-4-E4B") // row_bytes("gemma-4-E4B")
    (5637144576, 262144)
    """
    spec = find_spec(name_or_spec)
    return spec.table_shape[0] * row_bytes(spec, itemsize)


def kv_cache_bytes(
    name_or_spec: str | Spec, context: int, batch: int = 1, itemsize: int = 2
) -> int:
    """Bytes of the dynamic KV cache with ``context`` tokens in it, while decoding.

    Full-attention layers hold every token, sliding ones up to ``sliding_window``, layers that share
    keys and values none. Right after a prefill the sliding layers hold the whole prompt until the
    next token (:func:`pleviz.peaks.kv_bytes`); :func:`budget` counts that in the prefill's peak.

    >>> kv_cache_bytes("gemma-4-E4B", 8500) / 1e6
    160.23552
    """
    if context == 0:
        return 0
    return sum(kv_bytes(find_spec(name_or_spec), 1, context - 1, batch, itemsize))


def parameters_by_component(name_or_spec: str | Spec, *, towers: bool = False) -> dict[str, int]:
    """Parameters of each component, a tied head counted once; components with none are left out."""
    counts = dict.fromkeys(COMPONENTS, 0)
    for tensor in find_spec(name_or_spec).tensors(towers):
        counts[tensor.component] += tensor.numel
    return {name: count for name, count in counts.items() if count}


def unused_kv_parameters(name_or_spec: str | Spec) -> int:
    """Key and value weights that checkpoints carry for layers which never use them.

    Layers that share keys and values have no such weights in transformers, which drops them while
    loading, but the published checkpoints and Google's counts include them.
    """
    spec = find_spec(name_or_spec)
    count = 0
    for index in range(spec.first_kv_shared_layer, spec.num_hidden_layers):
        head_dim = spec.head_dims[index]
        count += 2 * spec.hidden_size * spec.kv_heads[index] * head_dim + head_dim  # k, v, key norm
    return count


@dataclass(frozen=True)
class Published:
    """What Google states about a model's size, and which parts one leaves out to arrive there."""

    total: str
    effective: str
    leave_out: tuple[str, ...]
    unused_kv: bool
    """Whether the total counts :func:`unused_kv_parameters`."""
    source: str


_3N_SOURCE = "https://ai.google.dev/gemma/docs/gemma-3n, Model parameters and effective parameters"
_4_SOURCE = "https://huggingface.co/google/gemma-4-E4B-it, model card"
_3N_PARTS = ("ple_table", "token_embedding", "towers")
_4_PARTS = ("ple_table", "token_embedding")

PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        "gemma-3n-E2B": Published("5.44 B", "1.91 B", _3N_PARTS, True, _3N_SOURCE),
        "gemma-3n-E4B": Published("7.85 B", "4 B", _3N_PARTS, True, _3N_SOURCE),
        "gemma-4-E2B": Published("5.1 B", "2.3 B", _4_PARTS, False, _4_SOURCE),
        "gemma-4-E4B": Published("8 B", "4.5 B", _4_PARTS, False, _4_SOURCE),
    }
)
"""The published sizes. Gemma 3n: "parameter skipping and PLE caching" leaves the towers and both
embedding tables out. Gemma 4: "effective" against "with embeddings", the towers stay in."""


@dataclass(frozen=True)
class Effective:
    """How a parameter total shrinks to an "effective" one. Made by :func:`effective_parameters`."""

    model: str
    total: int
    """All parameters of the checkpoint, vision and audio towers included."""
    left_out: Mapping[str, int]
    """Component -> parameters that are not counted."""
    published: Published

    @property
    def effective(self) -> int:
        """What is left."""
        return self.total - sum(self.left_out.values())

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("total", fmt_count(self.total))]
        rows += [(f"− {name}", fmt_count(count)) for name, count in self.left_out.items()]
        rows.append(("effective", fmt_count(self.effective)))
        rows.append(("published", self.published.effective))
        return rows

    def __str__(self) -> str:
        return text_table((self.model, "parameters"), self._rows())

    def _repr_html_(self) -> str:
        return html_table((self.model, "parameters"), self._rows())


def effective_parameters(name: str, leave_out: tuple[str, ...] | None = None) -> Effective:
    """The "effective" parameters of a published model: all but the components left out.

    Args:
        name: a name in ``SPECS``.
        leave_out: component names; by default those that lead to the published figure.

    Raises:
        ValueError: unknown name or component.

    >>> print(effective_parameters("gemma-3n-E2B"))
    gemma-3n-E2B       parameters
    -----------------  ----------
    total                  5.44 B
    − ple_table            2.01 B
    − token_embedding    537.40 M
    − towers             983.28 M
    effective              1.91 B
    published              1.91 B
    """
    spec = find_spec(name)
    published = PUBLISHED[spec.name]
    counts = parameters_by_component(spec, towers=True)
    parts = published.leave_out if leave_out is None else leave_out
    for part in parts:
        if part not in counts:
            raise ValueError(f"{name} has no component {part!r}. It has: {', '.join(counts)}.")
    unused = unused_kv_parameters(spec) if published.unused_kv else 0
    return Effective(
        model=spec.name,
        total=sum(counts.values()) + unused,
        left_out=MappingProxyType({part: counts[part] for part in parts}),
        published=published,
    )


def matmul_intensity(
    out_features: int, in_features: int, batch: int = 1, itemsize: float = 2
) -> float:
    """FLOPs per byte moved when a weight matrix multiplies ``batch`` tokens.

    Two FLOPs per weight and token; the weights are read once, activations are read and written.
    Near ``2·batch/itemsize`` for few tokens, so decoding is bound by memory and a prefill is not.

    >>> round(matmul_intensity(10240, 2560), 2), round(matmul_intensity(10240, 2560, batch=512))
    (1.0, 410)
    """
    flops = 2 * batch * out_features * in_features
    weights = out_features * in_features * itemsize
    return flops / (weights + 2 * batch * (out_features + in_features))


def embedding_row_intensity(itemsize: float = 2) -> float:
    """FLOPs per byte moved when a row of an embedding table is looked up and scaled.

    One multiplication per element, by the embedding scale, whatever the batch: each token reads a
    row of its own. That is why a table may live behind a slow bus, and a weight matrix may not.
    """
    return 1 / itemsize


def factorised_table_parameters(name_or_spec: str | Spec, rank: int) -> int:
    """Parameters of the PLE table factorised as in ALBERT: ``[rows, rank] @ [rank, width]``.

    Factorising makes the table smaller and changes the model, and each lookup becomes a matrix
    product of ``2·rank·width`` FLOPs. Relocating it keeps the model and moves one row per token.
    (Lan et al.: ALBERT, ICLR 2020, section 3.1.)

    Raises:
        ValueError: ``rank`` is not positive.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, not {rank}")
    return rank * sum(find_spec(name_or_spec).table_shape)


def break_even_rank(name_or_spec: str | Spec) -> int:
    """The largest rank at which the factorised table is no larger than the whole one.

    >>> break_even_rank("gemma-4-E4B")
    10328
    """
    rows, width = find_spec(name_or_spec).table_shape
    return rows * width // (rows + width)
