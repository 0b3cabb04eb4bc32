"""Every tensor of a PLE model, enumerated from its shape alone. No torch, no transformers.

The lists follow the modules of ``transformers`` (``Gemma3nForCausalLM``, ``Gemma4ForCausalLM``):
the same names as the state dict, in the order of ``named_parameters()``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pleviz.components import component_of

if TYPE_CHECKING:
    from pleviz.specs import Spec


@dataclass(frozen=True)
class TensorShape:
    """One tensor of a model: what it is called and how large it is."""

    name: str
    """Dotted name, as in the model's state dict."""
    shape: tuple[int, ...]
    linear: bool = False
    """Whether it is the weight of an ``nn.Linear``: the only tensors that bitsandbytes quantises."""
    itemsize: int | None = None
    """Bytes per element, where they do not follow the model's dtype (rotary frequencies: 4)."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def component(self) -> str:
        """Which part of the model it belongs to: one of :data:`pleviz.components.COMPONENTS`."""
        return component_of(self.name)


def text_parameters(spec: Spec, prefix: str = "model.") -> Iterator[TensorShape]:
    """The parameters of the text model, in the order of ``named_parameters()``.

    A tied output head is the token embedding, so it is listed once, as the embedding.
    """
    hidden, dim, layers = spec.hidden_size, spec.hidden_size_per_layer_input, spec.num_hidden_layers
    yield TensorShape(f"{prefix}embed_tokens.weight", (spec.vocab_size, hidden))
    for index in range(layers):
        yield from _layer(spec, index, f"{prefix}layers.{index}.")
    yield TensorShape(f"{prefix}norm.weight", (hidden,))
    yield TensorShape(
        f"{prefix}embed_tokens_per_layer.weight", (spec.vocab_size_per_layer_input, layers * dim)
    )
    yield from _linear(f"{prefix}per_layer_model_projection", layers * dim, hidden)
    yield TensorShape(f"{prefix}per_layer_projection_norm.weight", (dim,))
    if spec.family == "gemma3n":
        for name in ("altup_projections", "altup_unembed_projections"):
            for index in range(spec.altup_num_inputs - 1):
                yield from _linear(f"{prefix}{name}.{index}", hidden, hidden)


def head(spec: Spec) -> Iterator[TensorShape]:
    """The output head, where it is a tensor of its own."""
    if not spec.tie_word_embeddings:
        yield from _linear("lm_head", spec.vocab_size, spec.hidden_size)


def text_buffers(spec: Spec, prefix: str = "model.") -> Iterator[TensorShape]:
    """The buffers of the text model: scales in the model's dtype, rotary frequencies in float32."""
    for table in ("embed_tokens", "embed_tokens_per_layer"):
        yield TensorShape(f"{prefix}{table}.embed_scale", ())
    for index in range(spec.num_hidden_layers):
        layer = f"{prefix}layers.{index}."
        if spec.family == "gemma4":
            yield TensorShape(f"{layer}layer_scalar", (1,))
        else:
            yield TensorShape(f"{layer}altup.router_input_scale", ())
    for kind in sorted(set(spec.layer_types)):
        shape = (spec.head_dims[spec.layer_types.index(kind)] // 2,)
        for name in (f"{kind}_inv_freq", f"{kind}_original_inv_freq"):
            yield TensorShape(f"{prefix}rotary_emb.{name}", shape, itemsize=4)
    if spec.family == "gemma3n":
        for name in ("per_layer_projection_scale", "per_layer_input_scale"):
            yield TensorShape(f"{prefix}{name}", ())


def _linear(name: str, out_features: int, in_features: int, *, bias: bool = False) -> Iterator:
    yield TensorShape(f"{name}.weight", (out_features, in_features), linear=True)
    if bias:
        yield TensorShape(f"{name}.bias", (out_features,))


def _norm(name: str, size: int) -> TensorShape:
    return TensorShape(f"{name}.weight", (size,))


def _layer(spec: Spec, index: int, at: str) -> Iterator[TensorShape]:
    hidden, dim = spec.hidden_size, spec.hidden_size_per_layer_input
    yield from _attention(spec, index, f"{at}self_attn.")
    wide = spec.intermediate_sizes[index]
    yield from _linear(f"{at}mlp.gate_proj", wide, hidden)
    yield from _linear(f"{at}mlp.up_proj", wide, hidden)
    yield from _linear(f"{at}mlp.down_proj", hidden, wide)
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield _norm(f"{at}{name}_layernorm", hidden)
    if spec.family == "gemma3n":
        yield from _altup(spec, f"{at}altup.")
        yield from _linear(f"{at}laurel.linear_left", spec.laurel_rank, hidden)
        yield from _linear(f"{at}laurel.linear_right", hidden, spec.laurel_rank)
        yield _norm(f"{at}laurel.post_laurel_norm", hidden)
    yield from _linear(f"{at}per_layer_input_gate", dim, hidden)
    yield from _linear(f"{at}per_layer_projection", hidden, dim)
    yield _norm(f"{at}post_per_layer_input_norm", hidden)
    if spec.num_experts:
        yield from _experts(spec, at)


def _attention(spec: Spec, index: int, at: str) -> Iterator[TensorShape]:
    """Queries and output always; keys and values only where the layer makes its own.

    The value norm has no scale, hence no parameter.
    """
    hidden, head_dim, bias = spec.hidden_size, spec.head_dims[index], spec.attention_bias
    queries = spec.num_attention_heads * head_dim
    keys = spec.kv_heads[index] * head_dim
    projections = {"k_proj": keys}
    if not (spec.attention_k_eq_v and spec.layer_types[index] == "full_attention"):
        projections["v_proj"] = keys
    yield from _linear(f"{at}q_proj", queries, hidden, bias=bias)
    yield _norm(f"{at}q_norm", head_dim)
    if index < spec.first_kv_shared_layer:
        if spec.family == "gemma4":
            yield _norm(f"{at}k_norm", head_dim)
        for name, width in projections.items():
            yield from _linear(f"{at}{name}", width, hidden, bias=bias)
        if spec.family == "gemma3n":
            yield _norm(f"{at}k_norm", head_dim)
    yield from _linear(f"{at}o_proj", hidden, queries, bias=bias)


def _altup(spec: Spec, at: str) -> Iterator[TensorShape]:
    hidden, streams = spec.hidden_size, spec.altup_num_inputs
    yield TensorShape(f"{at}correct_output_scale", (hidden,))
    yield from _linear(f"{at}correction_coefs", streams, streams)
    yield from _linear(f"{at}prediction_coefs", streams**2, streams)
    yield from _linear(f"{at}modality_router", streams, hidden)
    yield _norm(f"{at}router_norm", hidden)


def _experts(spec: Spec, at: str) -> Iterator[TensorShape]:
    """A mixture-of-experts block beside the MLP. The experts are stacked, so not ``nn.Linear``."""
    hidden, experts, wide = spec.hidden_size, spec.num_experts, spec.moe_intermediate_size
    yield TensorShape(f"{at}router.scale", (hidden,))
    yield TensorShape(f"{at}router.per_expert_scale", (experts,))
    yield from _linear(f"{at}router.proj", experts, hidden)
    yield TensorShape(f"{at}experts.gate_up_proj", (experts, 2 * wide, hidden))
    yield TensorShape(f"{at}experts.down_proj", (experts, hidden, wide))
    for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
        yield _norm(f"{at}{name}", hidden)
    yield _norm(f"{at}pre_feedforward_layernorm_2", hidden)
