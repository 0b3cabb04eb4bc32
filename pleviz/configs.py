"""Between specs and ``transformers`` configs: read a spec off a config, write a config for a spec."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pleviz.specs import FULL, SPECS, Family, NoTableError, Scale, Spec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TINY_ROWS = 1024
TINY_PLE = 32
TINY_HIDDEN = 48
"""Not a square: sqrt(48) is inexact in bfloat16, so a lost or twice rounded scale shows."""

_FAMILIES: dict[str, Family] = {"gemma3n_text": "gemma3n", "gemma4_text": "gemma4"}
_NO_TABLE = {
    "embedding_gemma2": "its per-layer inputs are projected from the token embedding alone; "
    "there is no per-token table",
    "diffusion_gemma": "its decoder is Gemma 4's without per-layer embeddings",
    "gemma4_unified": "it is Gemma 4's decoder without per-layer embeddings",
    "gemma4_assistant": "a Gemma 4 assistant must have hidden_size_per_layer_input 0; "
    "the table is in the model that it assists",
    "gemma4_unified_assistant": "a Gemma 4 assistant has no per-layer embeddings",
    "qwen4_exp": "its n-gram table is looked up by hashes of several tokens, "
    "not one row per token and layer",
}


def read_spec(config_or_model: Any) -> Spec:
    """The spec of a ``transformers`` config or model; see :func:`pleviz.specs.spec_of`."""
    config = getattr(config_or_model, "config", config_or_model)
    if not hasattr(config, "model_type"):
        raise TypeError(
            f"spec_of takes a transformers config or a model that has one, not "
            f"{type(config_or_model).__name__}. A published model's spec is SPECS[name]."
        )
    text = getattr(config, "text_config", None) or config
    if not getattr(text, "hidden_size_per_layer_input", 0) or text.model_type not in _FAMILIES:
        raise _no_table(config, text)
    read = {"gemma3n": _read_gemma3n, "gemma4": _read_gemma4}[_FAMILIES[text.model_type]]
    spec = read(text)
    if spec.num_kv_shared_layers >= spec.num_hidden_layers:
        raise ValueError(
            f"num_kv_shared_layers={spec.num_kv_shared_layers} leaves none of the "
            f"{spec.num_hidden_layers} layers to make keys and values."
        )
    for known in SPECS.values():
        if dataclasses.replace(spec, name=known.name) == known:
            return known
    return spec


def _no_table(config: Any, text: Any) -> ValueError:
    kind = config.model_type
    reason = next((why for name, why in _NO_TABLE.items() if kind in (name, f"{name}_text")), None)
    width = getattr(text, "hidden_size_per_layer_input", None)
    if reason is None and width and getattr(text, "vocab_size_per_layer_input", 0):
        return ValueError(
            f"'{kind}' has a per-layer table ({text.vocab_size_per_layer_input} rows), but pleviz "
            f"knows the other tensors only of {', '.join(_FAMILIES)}. pleviz.find_table(model) and "
            "pleviz.offload(model) may still work."
        )
    if reason is None and width == 0:
        reason = "its config has hidden_size_per_layer_input=0, which turns per-layer inputs off"
    if reason is None:
        reason = "its config has no hidden_size_per_layer_input"
    return NoTableError(
        f"'{kind}' has no PLE table: {reason}. Models with one: Gemma 3n and Gemma 4 E2B/E4B "
        f"({', '.join(SPECS)})."
    )


def _common(text: Any) -> dict[str, Any]:
    return {
        "name": getattr(text, "name_or_path", "") or text.model_type,
        "family": _FAMILIES[text.model_type],
        "vocab_size": text.vocab_size,
        "vocab_size_per_layer_input": text.vocab_size_per_layer_input,
        "hidden_size": text.hidden_size,
        "hidden_size_per_layer_input": text.hidden_size_per_layer_input,
        "layer_types": tuple(text.layer_types),
        "num_attention_heads": text.num_attention_heads,
        "num_kv_shared_layers": text.num_kv_shared_layers,
        "sliding_window": text.sliding_window,
        "max_position_embeddings": text.max_position_embeddings,
        "final_logit_softcapping": text.final_logit_softcapping,
        "tie_word_embeddings": text.tie_word_embeddings,
        "attention_bias": bool(text.attention_bias),
        "initializer_range": text.initializer_range,
    }


def _read_gemma3n(text: Any) -> Spec:
    return Spec(
        **_common(text),
        intermediate_sizes=tuple(text.intermediate_size),
        num_key_value_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        global_head_dim=text.head_dim,
        num_global_key_value_heads=text.num_key_value_heads,
        altup_num_inputs=text.altup_num_inputs,
        laurel_rank=text.laurel_rank,
        activation_sparsity_pattern=tuple(text.activation_sparsity_pattern),
    )


def _read_gemma4(text: Any) -> Spec:
    layers = text.num_hidden_layers
    first_shared = layers - text.num_kv_shared_layers
    doubled = text.use_double_wide_mlp
    heads = {kind: _heads(text, kind) for kind in set(text.layer_types)}
    wide = heads.get(FULL) or next(iter(heads.values()))
    narrow = next((h for kind, h in heads.items() if kind != FULL), wide)
    experts = text.enable_moe_block
    return Spec(
        **_common(text),
        intermediate_sizes=tuple(
            text.intermediate_size * (2 if doubled and i >= first_shared else 1)
            for i in range(layers)
        ),
        head_dim=narrow[0],
        num_key_value_heads=narrow[1],
        global_head_dim=wide[0],
        num_global_key_value_heads=wide[1],
        attention_k_eq_v=text.attention_k_eq_v,
        num_experts=text.num_experts if experts else 0,
        top_k_experts=text.top_k_experts if experts else 0,
        moe_intermediate_size=text.moe_intermediate_size if experts else 0,
    )


def _heads(text: Any, kind: str) -> tuple[int, int]:
    """(head_dim, key/value heads) of the layers of one kind.

    Newer versions of transformers keep them in ``per_layer_config``, older ones in
    ``global_head_dim`` and ``num_global_key_value_heads``.
    """
    at = [i for i, layer_type in enumerate(text.layer_types) if layer_type == kind]
    if hasattr(text, "per_layer_config"):
        found = {
            (layer.head_dim, layer.num_key_value_heads)
            for layer in (text.per_layer_config[i] for i in at)
        }
        if len(found) > 1:
            raise ValueError(f"{kind} layers differ in head_dim or key/value heads: {found}")
        return found.pop()
    if kind != FULL:
        return text.head_dim, text.num_key_value_heads
    shared = text.num_global_key_value_heads if text.attention_k_eq_v else None
    return text.global_head_dim, shared or text.num_key_value_heads


def shrink(spec: Spec) -> Spec:
    """A tiny spec of the same structure: runs in milliseconds, and the table is still most of it.

    Kept: the family, one period of the layer pattern at each end (so both kinds of layer occur
    with their own and with shared keys and values), double-wide FFNs, wider global heads, sparsity,
    a vocabulary larger than the table, tied head, experts. Shrunk: every width.
    """
    kinds = set(spec.layer_types)
    period = next(
        n for n in range(1, spec.num_hidden_layers + 1) if set(spec.layer_types[:n]) == kinds
    )
    ends = spec.num_hidden_layers > 2 * period
    layers = spec.num_hidden_layers
    keep = [*range(period), *range(layers - period, layers)] if ends else list(range(layers))
    narrowest = min(spec.intermediate_sizes)
    kv_heads = min(spec.num_key_value_heads, 2)
    return dataclasses.replace(
        spec,
        name=f"{spec.name} (tiny)",
        vocab_size=TINY_ROWS + (16 if spec.vocab_size > spec.vocab_size_per_layer_input else 0),
        vocab_size_per_layer_input=TINY_ROWS,
        hidden_size=TINY_HIDDEN,
        hidden_size_per_layer_input=TINY_PLE,
        intermediate_sizes=tuple(64 * spec.intermediate_sizes[i] // narrowest for i in keep),
        layer_types=tuple(spec.layer_types[i] for i in keep),
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        global_head_dim=8 if spec.global_head_dim == spec.head_dim else 16,
        num_global_key_value_heads=(
            kv_heads if spec.num_global_key_value_heads == spec.num_key_value_heads else 1
        ),
        num_kv_shared_layers=min(spec.num_kv_shared_layers, period if ends else layers),
        sliding_window=8,
        max_position_embeddings=512,
        num_experts=min(spec.num_experts, 4),
        top_k_experts=min(spec.top_k_experts, 2),
        moe_intermediate_size=16 if spec.num_experts else 0,  # kernels want 16-byte strides
        laurel_rank=min(spec.laurel_rank, 4),
        activation_sparsity_pattern=tuple(
            spec.activation_sparsity_pattern[i] for i in keep if spec.activation_sparsity_pattern
        ),
    )


def transformers_config(spec: Spec, scale: Scale, *, towers: bool = False) -> PreTrainedConfig:
    """The ``transformers`` config of ``spec``; see :meth:`pleviz.specs.Spec.config`."""
    if scale not in ("real", "tiny"):
        raise ValueError(f"scale must be 'real' or 'tiny', not {scale!r}")
    if scale == "tiny":
        spec = shrink(spec)
    text = _gemma3n_config(spec) if spec.family == "gemma3n" else _gemma4_config(spec)
    if not towers:
        return text
    add_towers = _gemma3n_towers if spec.family == "gemma3n" else _gemma4_towers
    return add_towers(text, tiny=scale == "tiny")


def _gemma4_towers(text: Any, *, tiny: bool) -> PreTrainedConfig:
    """The class defaults are the published towers of both E2B and E4B."""
    from transformers.models.gemma4 import Gemma4AudioConfig, Gemma4Config, Gemma4VisionConfig

    if not tiny:
        return Gemma4Config(
            text_config=text, vision_config=Gemma4VisionConfig(), audio_config=Gemma4AudioConfig()
        )
    vision = Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        patch_size=4,
        position_embedding_size=16,
    )
    audio = Gemma4AudioConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        subsampling_conv_channels=[4, 4],
        output_proj_dims=16,
    )
    first = text.vocab_size - 8  # the special ids are the last of the vocabulary
    names = ("boi", "eoi", "image", "video", "boa", "audio")
    ids = {f"{name}_token_id": first + i for i, name in enumerate(names)}
    return Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        eoa_token_index=first + len(names),
        **ids,
    )


def _gemma3n_towers(text: Any, *, tiny: bool) -> PreTrainedConfig:
    """Gemma 3n numbers its soft image and audio tokens after the rows of the PLE table."""
    from transformers.models.gemma3n import Gemma3nAudioConfig, Gemma3nConfig, Gemma3nVisionConfig

    if not tiny:
        return Gemma3nConfig(
            text_config=text, vision_config=Gemma3nVisionConfig(), audio_config=Gemma3nAudioConfig()
        )
    rows = text.vocab_size_per_layer_input
    soft = (text.vocab_size - rows) // 2
    vision = Gemma3nVisionConfig(
        architecture="test_efficientnet_gn", hidden_size=256, vocab_size=soft, vocab_offset=rows
    )
    audio = Gemma3nAudioConfig(
        hidden_size=16,
        conf_num_attention_heads=2,
        conf_num_hidden_layers=1,
        sscp_conv_channel_size=[4, 4],
        vocab_size=soft,
        vocab_offset=rows + soft,
    )
    return Gemma3nConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        vision_soft_tokens_per_image=4,  # a 64 × 64 image
        boi_token_id=rows - 2,
        boa_token_id=rows - 1,
        eoi_token_id=rows,
        image_token_id=rows + 1,
        eoa_token_id=rows + soft,
        audio_token_id=rows + soft + 1,
    )


def _shared_fields(spec: Spec) -> dict[str, Any]:
    names = (
        "vocab_size",
        "vocab_size_per_layer_input",
        "hidden_size",
        "hidden_size_per_layer_input",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_kv_shared_layers",
        "sliding_window",
        "max_position_embeddings",
        "final_logit_softcapping",
        "tie_word_embeddings",
        "attention_bias",
        "initializer_range",
    )
    return {name: getattr(spec, name) for name in names} | {"layer_types": list(spec.layer_types)}


def _gemma3n_config(spec: Spec) -> PreTrainedConfig:
    from transformers.models.gemma3n import Gemma3nTextConfig

    return Gemma3nTextConfig(
        **_shared_fields(spec),
        intermediate_size=list(spec.intermediate_sizes),
        altup_num_inputs=spec.altup_num_inputs,
        laurel_rank=spec.laurel_rank,
        activation_sparsity_pattern=list(spec.activation_sparsity_pattern),
    )


def _gemma4_config(spec: Spec) -> PreTrainedConfig:
    from transformers.models.gemma4 import Gemma4TextConfig

    single, shared_from = spec.intermediate_sizes[0], spec.first_kv_shared_layer
    doubled = spec.num_kv_shared_layers > 0 and spec.intermediate_sizes[-1] == 2 * single
    expected = tuple(
        single * (2 if doubled and i >= shared_from else 1) for i in range(spec.num_hidden_layers)
    )
    if spec.intermediate_sizes != expected:
        raise ValueError(
            "transformers' Gemma 4 has one FFN width, optionally doubled in the layers with shared "
            f"keys and values: {expected}, not {spec.intermediate_sizes}."
        )
    return Gemma4TextConfig(
        **_shared_fields(spec),
        intermediate_size=single,
        use_double_wide_mlp=doubled,
        global_head_dim=spec.global_head_dim,
        num_global_key_value_heads=spec.num_global_key_value_heads,
        attention_k_eq_v=spec.attention_k_eq_v,
        enable_moe_block=spec.num_experts > 0,
        num_experts=spec.num_experts or None,
        top_k_experts=spec.top_k_experts or None,
        moe_intermediate_size=spec.moe_intermediate_size or None,
    )
