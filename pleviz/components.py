"""Which part of a PLE model a parameter belongs to, told from its name alone. No torch."""

from __future__ import annotations

COMPONENTS = (
    "ple_table",
    "token_embedding",
    "attention",
    "ffn",
    "ple_projections",
    "altup",
    "laurel",
    "norms",
    "towers",
    "buffers",
    "other",
)
"""In the order reports list them. ``buffers`` is for tensors that are not parameters."""

_TOWERS = {"vision_tower", "audio_tower", "embed_vision", "embed_audio"}
_PLE = {"per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"}


def component_of(parameter_name: str) -> str:
    """The component of the parameter with this dotted name; wrappers' prefixes do not matter.

    A norm inside AltUp or LAuReL belongs to those; adapters of PEFT are ``other``.

    >>> component_of("model.language_model.layers.3.per_layer_input_gate.weight")
    'ple_projections'
    >>> component_of("model.layers.0.self_attn.q_norm.weight")
    'norms'
    >>> component_of("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'other'
    """
    parts = parameter_name.split(".")
    names = set(parts)
    if names & _TOWERS:
        return "towers"
    if any(part.startswith(("lora_", "trainable_tokens_")) for part in parts):
        return "other"
    if "embed_tokens_per_layer" in names:
        return "ple_table"
    if names & _PLE:
        return "ple_projections"
    if any(part.startswith("altup") for part in parts):
        return "altup"
    if "laurel" in names:
        return "laurel"
    if any("norm" in part for part in parts):
        return "norms"
    if "self_attn" in names:
        return "attention"
    if names & {"mlp", "experts", "router"}:
        return "ffn"
    if names & {"embed_tokens", "lm_head"}:
        return "token_embedding"
    return "other"
