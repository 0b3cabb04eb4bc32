"""Hypothesis strategies: random small but valid configs of both PLE families."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from transformers import PreTrainedConfig
from transformers.models.gemma3n import Gemma3nTextConfig
from transformers.models.gemma4 import Gemma4TextConfig

SLIDING, FULL = "sliding_attention", "full_attention"


@st.composite
def text_configs(draw: st.DrawFn, family: str | None = None) -> PreTrainedConfig:
    """A text config that transformers accepts, with every field that decides a shape drawn."""
    family = family or draw(st.sampled_from(("gemma3n", "gemma4")))
    fields = _common(draw)
    return _gemma3n(draw, fields) if family == "gemma3n" else _gemma4(draw, fields)


def _common(draw: st.DrawFn) -> dict[str, Any]:
    own = draw(st.lists(st.sampled_from((SLIDING, FULL)), min_size=1, max_size=3))
    # layers that share keys and values need an earlier layer of their kind
    shared = draw(st.lists(st.sampled_from(sorted(set(own))), max_size=2))
    types = own + shared
    if types[-1] != FULL:  # Gemma 4 demands it, and forces it otherwise
        own = [FULL, *own]
        shared = [*shared, FULL] if shared else shared
        types = own + shared if shared else [*own, FULL]
    heads = draw(st.sampled_from((2, 4)))
    return {
        "vocab_size": draw(st.integers(40, 90)),
        "vocab_size_per_layer_input": draw(st.integers(30, 80)),
        "hidden_size": heads * draw(st.integers(3, 9)),
        "hidden_size_per_layer_input": draw(st.integers(1, 9)),
        "num_hidden_layers": len(types),
        "layer_types": types,
        "num_kv_shared_layers": len(shared),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from((1, 2))),
        "head_dim": 2 * draw(st.integers(2, 6)),
        "sliding_window": draw(st.integers(2, 12)),
        "max_position_embeddings": draw(st.sampled_from((64, 128))),
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
    }


def _gemma3n(draw: st.DrawFn, fields: dict[str, Any]) -> Gemma3nTextConfig:
    layers = fields["num_hidden_layers"]
    widths = st.lists(st.integers(4, 20), min_size=layers, max_size=layers)
    return Gemma3nTextConfig(
        **fields,
        intermediate_size=draw(st.one_of(st.integers(4, 20), widths)),
        altup_num_inputs=draw(st.integers(1, 4)),
        laurel_rank=draw(st.integers(1, 5)),
        activation_sparsity_pattern=[draw(st.sampled_from((0.0, 0.5)))] * layers,
    )


def _gemma4(draw: st.DrawFn, fields: dict[str, Any]) -> Gemma4TextConfig:
    experts = draw(st.booleans())
    one_for_both = draw(st.booleans())  # older versions then need the number of heads spelled out
    moe = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": draw(st.integers(2, 8))}
    return Gemma4TextConfig(
        **fields,
        intermediate_size=draw(st.integers(4, 20)),
        use_double_wide_mlp=draw(st.booleans()),
        global_head_dim=8 * draw(st.integers(1, 2)),
        num_global_key_value_heads=draw(st.sampled_from((1, 2) if one_for_both else (None, 1, 2))),
        attention_k_eq_v=one_for_both,
        enable_moe_block=experts,
        **(moe if experts else {}),
    )
