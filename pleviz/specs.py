"""The PLE models as data: shapes of Gemma 3n and Gemma 4 E2B/E4B, and of any config like them.

A :class:`Spec` holds just what decides the size of every tensor, under the names of the
``transformers`` configs. ``SPECS`` has the four published models, :func:`spec_of` reads a spec off
any config or model, :func:`build` makes the real transformers class with random weights. Importing
this module loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from pleviz import tensors
from pleviz.format import fmt_count, html_table, text_table

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

Family = Literal["gemma3n", "gemma4"]
Scale = Literal["tiny", "real"]
SLIDING, FULL = "sliding_attention", "full_attention"


class NoTableError(ValueError):
    """The model has no per-layer embedding table. The message says what was looked for."""


@dataclass(frozen=True)
class Spec:
    """The shape of a PLE text model, under the field names of its ``transformers`` config."""

    name: str
    family: Family
    vocab_size: int
    vocab_size_per_layer_input: int
    """Rows of the PLE table. Gemma 3n's output vocabulary has 256 more ids than its table."""
    hidden_size: int
    hidden_size_per_layer_input: int
    """Width of one layer's vector in the PLE table."""
    intermediate_sizes: tuple[int, ...]
    """FFN width of each layer; Gemma 4 E2B doubles it in the layers that share keys and values."""
    layer_types: tuple[str, ...]
    """``"sliding_attention"`` or ``"full_attention"`` for each layer."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    global_head_dim: int
    """Head width in full-attention layers (Gemma 3n: the same as ``head_dim``)."""
    num_global_key_value_heads: int
    """Key/value heads in full-attention layers."""
    num_kv_shared_layers: int
    """The last this many layers reuse keys and values of earlier ones: no k/v weights, no cache."""
    sliding_window: int
    max_position_embeddings: int
    final_logit_softcapping: float | None = 30.0
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    initializer_range: float = 0.02
    attention_k_eq_v: bool = False
    num_experts: int = 0
    top_k_experts: int = 0
    moe_intermediate_size: int = 0
    altup_num_inputs: int = 1
    """AltUp's parallel copies of the hidden state (Gemma 3n)."""
    laurel_rank: int = 0
    activation_sparsity_pattern: tuple[float, ...] = ()
    """Per layer, the share of FFN activations set to zero (Gemma 3n)."""

    @property
    def num_hidden_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_types)

    @property
    def first_kv_shared_layer(self) -> int:
        """Index of the first layer that has no keys and values of its own."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Head width of each layer."""
        return tuple(self.global_head_dim if t == FULL else self.head_dim for t in self.layer_types)

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Key/value heads of each layer."""
        return tuple(
            self.num_global_key_value_heads if t == FULL else self.num_key_value_heads
            for t in self.layer_types
        )

    @property
    def table_shape(self) -> tuple[int, int]:
        """Shape of the PLE table, ``[rows, num_hidden_layers × hidden_size_per_layer_input]``."""
        width = self.num_hidden_layers * self.hidden_size_per_layer_input
        return self.vocab_size_per_layer_input, width

    def _rows(self) -> list[tuple[str, str]]:
        sliding, full = (self.layer_types.count(kind) for kind in (SLIDING, FULL))
        widths = sorted(set(self.intermediate_sizes))
        heads = sorted({*zip(self.head_dims, self.kv_heads, strict=True)})
        rows, width = self.table_shape
        return [
            ("parameters, text model", fmt_count(self.parameters())),
            ("PLE table", f"{rows:,} × {width:,}, {fmt_count(rows * width)}"),
            ("vocabulary", f"{self.vocab_size:,}"),
            ("hidden size", str(self.hidden_size)),
            ("layers", f"{sliding} sliding ({self.sliding_window} tokens), {full} full"),
            ("layers with shared keys and values", str(self.num_kv_shared_layers)),
            ("FFN widths", ", ".join(map(str, widths))),
            ("query heads", str(self.num_attention_heads)),
            ("key/value heads × width", ", ".join(f"{kv} × {dim}" for dim, kv in heads)),
        ]

    def __str__(self) -> str:
        return text_table((self.name, self.family), self._rows())

    def _repr_html_(self) -> str:
        return html_table((self.name, self.family), self._rows())

    def tensors(self, towers: bool = False) -> tuple[tensors.TensorShape, ...]:
        """Every parameter tensor, in the order of the model's ``named_parameters()``.

        With ``towers`` the text model's names begin with ``model.language_model.``, and the towers'
        tensors follow it (in the model they lie on both sides of it).
        """
        if not towers:
            return (*tensors.text_parameters(self), *tensors.head(self))
        text = tensors.text_parameters(self, "model.language_model.")
        return (*text, *self._towers("parameters"), *tensors.head(self))

    def buffers(self, towers: bool = False) -> tuple[tensors.TensorShape, ...]:
        """Every buffer: scales and rotary frequencies. A few kilobytes."""
        if not towers:
            return tuple(tensors.text_buffers(self))
        text = tensors.text_buffers(self, "model.language_model.")
        return (*text, *self._towers("buffers"))

    def _towers(self, kind: str) -> tuple[tensors.TensorShape, ...]:
        from pleviz import towers

        if self.name not in SPECS:
            raise ValueError(
                f"the vision and audio towers of '{self.name}' are not part of its spec; "
                f"towers=True is for the published models: {', '.join(SPECS)}."
            )
        return tuple(towers.tower_tensors(self, kind))

    def parameters(self, towers: bool = False) -> int:
        """Number of parameters, a tied head counted once."""
        return sum(t.numel for t in self.tensors(towers))

    def config(self, scale: Scale = "real", *, towers: bool = False) -> PreTrainedConfig:
        """The ``transformers`` config of this model, or of a tiny model of the same structure.

        ``"tiny"`` keeps the layer pattern, KV sharing, widths per layer kind and sparsity, and
        shrinks every size; see :func:`pleviz.configs.shrink`.
        """
        from pleviz import configs

        return configs.transformers_config(self, scale, towers=towers)


def _gemma3n(name: str, *, layers: int, intermediate: int, shared: int) -> Spec:
    return Spec(
        name=name,
        family="gemma3n",
        vocab_size=262_400,
        vocab_size_per_layer_input=262_144,
        hidden_size=2048,
        hidden_size_per_layer_input=256,
        intermediate_sizes=(intermediate,) * layers,
        layer_types=((SLIDING,) * 4 + (FULL,)) * (layers // 5),
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        global_head_dim=256,
        num_global_key_value_heads=2,
        num_kv_shared_layers=shared,
        sliding_window=512,
        max_position_embeddings=32_768,
        altup_num_inputs=4,
        laurel_rank=64,
        activation_sparsity_pattern=(0.95,) * 10 + (0.0,) * (layers - 10),
    )


def _gemma4(name: str, **fields: Any) -> Spec:
    return Spec(
        name=name,
        family="gemma4",
        vocab_size=262_144,
        vocab_size_per_layer_input=262_144,
        hidden_size_per_layer_input=256,
        num_attention_heads=8,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=fields["num_key_value_heads"],
        sliding_window=512,
        max_position_embeddings=131_072,
        **fields,
    )


SPECS: Mapping[str, Spec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            _gemma3n("gemma-3n-E2B", layers=30, intermediate=8192, shared=10),
            _gemma3n("gemma-3n-E4B", layers=35, intermediate=16_384, shared=15),
            _gemma4(
                "gemma-4-E2B",
                hidden_size=1536,
                intermediate_sizes=(6144,) * 15 + (12_288,) * 20,
                layer_types=((SLIDING,) * 4 + (FULL,)) * 7,
                num_key_value_heads=1,
                num_kv_shared_layers=20,
            ),
            _gemma4(
                "gemma-4-E4B",
                hidden_size=2560,
                intermediate_sizes=(10_240,) * 42,
                layer_types=((SLIDING,) * 5 + (FULL,)) * 7,
                num_key_value_heads=2,
                num_kv_shared_layers=18,
            ),
        )
    }
)
"""The four published PLE models. Text shapes; ``towers=True`` adds vision and audio."""


def find_spec(name_or_spec: str | Spec) -> Spec:
    """The spec with this name, or the spec itself.

    Raises:
        ValueError: no such name; the message lists the names.
    """
    if isinstance(name_or_spec, Spec):
        return name_or_spec
    if name_or_spec not in SPECS:
        raise ValueError(
            f"there is no spec named {name_or_spec!r}. Names: {', '.join(SPECS)}. "
            "For any other PLE model pass spec_of(config_or_model)."
        )
    return SPECS[name_or_spec]


def spec_of(config_or_model: Any) -> Spec:
    """Read the spec off a ``transformers`` config or model, text or multimodal, PEFT-wrapped or not.

    Raises:
        NoTableError: the model has no PLE table; the message says why.
        ValueError: it has one, in a model that this package does not know.
        TypeError: neither a config nor a model that has one.
    """
    from pleviz import configs

    return configs.read_spec(config_or_model)


def build(
    name_or_spec: str | Spec,
    *,
    scale: Scale = "tiny",
    towers: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """The real transformers class with random weights, made directly on ``device``, in eval mode.

    Args:
        name_or_spec: a name in :data:`SPECS`, or a spec.
        scale: ``"tiny"`` for a model of the same structure that runs in milliseconds, ``"real"``
            for the true shapes (memory and speed depend on shapes, not on the values).
        towers: also build the vision and audio towers (``…ForConditionalGeneration``).
        device: where the weights are created; nothing is made elsewhere and moved.
        dtype: of the parameters; bfloat16 by default.
        seed: a seed gives the same weights, bit by bit, on every device.

    Weights are nearly normal with the config's ``initializer_range``; norms and scales have the
    library's values, with one exception: Gemma 3n's ``altup.correct_output_scale`` is 1, because at
    the library's 0 a new Gemma 3n ignores its table. A padding row is as random as the others.

    Raises:
        ValueError: unknown name or scale.
        ImportError: Gemma 3n's vision tower needs the packages timm and pillow.
    """
    from pleviz import building

    return building.build(
        find_spec(name_or_spec), scale=scale, towers=towers, device=device, dtype=dtype, seed=seed
    )
