"""Tiny random Gemma 3n and Gemma 4 models: the real transformers classes, in milliseconds.

Two choices are deliberate:

* ``hidden_size`` is 48, because sqrt(48) is not exact in bfloat16. At 16 or 64 a lost or twice
  rounded embedding scale would give the right numbers by accident.
* ``altup.correct_output_scale`` of Gemma 3n is set to 1. The library initialises it to 0, and then
  the per-layer embeddings have no influence on the logits at all, so any parity test would pass.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

from typing import Any, Literal

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.gemma3n import (
    Gemma3nAudioConfig,
    Gemma3nConfig,
    Gemma3nForCausalLM,
    Gemma3nForConditionalGeneration,
    Gemma3nTextConfig,
    Gemma3nVisionConfig,
)
from transformers.models.gemma4 import (
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
)

Kind = Literal["gemma3n", "gemma4"]
KINDS: tuple[Kind, ...] = ("gemma3n", "gemma4")
SLIDING, FULL = "sliding_attention", "full_attention"


class _TinyVisionConfig(Gemma3nVisionConfig):
    """Marks the stand-in below; the real vision tower of Gemma 3n lives in timm."""


class _TinyVision(PreTrainedModel):
    """Stand-in for Gemma 3n's timm vision tower: it has parameters and is never run."""

    config_class = _TinyVisionConfig

    def __init__(self, config: _TinyVisionConfig) -> None:
        super().__init__(config)
        self.stem = torch.nn.Linear(3, config.hidden_size)
        self.post_init()


AutoModel.register(_TinyVisionConfig, _TinyVision, exist_ok=True)


def tiny_config(
    kind: Kind = "gemma4", *, towers: bool = False, **overrides: Any
) -> PreTrainedConfig:
    """The config of :func:`tiny_model`; ``overrides`` are fields of the text config.

    ``layer_types`` and ``activation_sparsity_pattern`` follow an overridden ``num_hidden_layers``.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, not {kind!r}")
    layers = overrides.get("num_hidden_layers", 4)
    fields: dict[str, Any] = {
        "vocab_size": 128,
        "vocab_size_per_layer_input": 128,
        "hidden_size": 48,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_kv_shared_layers": 2,
        "layer_types": ([SLIDING, FULL] * layers)[: layers - 1] + [FULL],
        "sliding_window": 16,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    if kind == "gemma4":
        text = Gemma4TextConfig(**fields | {"global_head_dim": 8} | overrides)
        return _gemma4_with_towers(text) if towers else text
    extra = {
        "activation_sparsity_pattern": [0.0] * layers,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    }
    text = Gemma3nTextConfig(**fields | extra | overrides)
    return _gemma3n_with_towers(text) if towers else text


def _gemma4_with_towers(text: Gemma4TextConfig) -> Gemma4Config:
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
    return Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        boi_token_id=118,
        eoi_token_id=119,
        image_token_id=120,
        video_token_id=121,
        audio_token_id=122,
        boa_token_id=123,
        eoa_token_index=124,
    )


def _gemma3n_with_towers(text: Gemma3nTextConfig) -> Gemma3nConfig:
    # Gemma 3n numbers the vision and audio "soft" tokens after the text vocabulary
    vision = _TinyVisionConfig(hidden_size=16, vocab_size=2, vocab_offset=text.vocab_size - 4)
    audio = Gemma3nAudioConfig(
        hidden_size=16,
        conf_num_attention_heads=2,
        conf_num_hidden_layers=1,
        sscp_conv_channel_size=[4, 4],
        vocab_size=2,
        vocab_offset=text.vocab_size - 2,
    )
    return Gemma3nConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        boi_token_id=110,
        eoi_token_id=124,
        image_token_id=125,
        boa_token_id=111,
        eoa_token_id=126,
        audio_token_id=127,
    )


def tiny_model(
    kind: Kind = "gemma4",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    towers: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """A tiny random model on the CPU in eval mode; equal arguments give equal weights.

    Text only (``Gemma4ForCausalLM``, ``Gemma3nForCausalLM``) unless ``towers``, which gives the
    multimodal class with a one-layer vision and audio tower. ``overrides`` are fields of the text
    config, under transformers' names. Built directly in ``dtype`` and never cast, because
    ``model.to(bfloat16)`` would also round the rotary buffers.
    """
    config = tiny_config(kind, towers=towers, **overrides)
    classes = {
        ("gemma3n", False): Gemma3nForCausalLM,
        ("gemma3n", True): Gemma3nForConditionalGeneration,
        ("gemma4", False): Gemma4ForCausalLM,
        ("gemma4", True): Gemma4ForConditionalGeneration,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = classes[kind, towers]._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("altup.correct_output_scale"):
                parameter.fill_(1.0)
    return model
