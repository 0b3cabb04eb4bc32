"""Build the real transformers class with random weights, straight on its device."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pleviz.specs import Scale, Spec

CHUNK = 1 << 22
"""Elements generated at a time. The temporaries take about 28 bytes each: 120 MB in all."""


def build(
    spec: Spec,
    *,
    scale: Scale,
    towers: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """See :func:`pleviz.specs.build`."""
    model = empty_model(spec, scale=scale, towers=towers, dtype=dtype or torch.bfloat16)
    _materialise(model, torch.device(device))
    random = _random_parameters(model)
    _initialise_rest(model, random)
    for name, parameter in random.items():
        fill_normal_(parameter.data, stream=_stream(name, seed), std=spec.initializer_range)
    for name, parameter in model.named_parameters():
        if name.endswith("altup.correct_output_scale"):
            parameter.data.fill_(1.0)  # the library's 0 makes a new Gemma 3n ignore its table
    return model.eval()


def empty_model(
    spec: Spec, *, scale: Scale = "real", towers: bool = False, dtype: torch.dtype
) -> PreTrainedModel:
    """The model on the meta device: every module and shape, no memory."""
    config = spec.config(scale, towers=towers)
    # On the meta device, as from_pretrained begins. Older transformers versions draw random numbers
    # for meta tensors too; the caller's generator is to stay as it is.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return _model_class(spec, towers)._from_config(config, dtype=dtype)


def _model_class(spec: Spec, towers: bool) -> type[PreTrainedModel]:
    if spec.family == "gemma3n":
        from transformers.models.gemma3n import (
            Gemma3nForCausalLM,
            Gemma3nForConditionalGeneration,
        )

        return Gemma3nForConditionalGeneration if towers else Gemma3nForCausalLM
    from transformers.models.gemma4 import Gemma4ForCausalLM, Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration if towers else Gemma4ForCausalLM


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give every meta tensor memory on ``device``. Tied tensors stay one tensor.

    (``module.to_empty`` would untie them and allocate the tied one twice.) Vectors begin as zeros
    if they are biases or buffers and as ones otherwise; matrices are left for the caller to fill.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _empty_like(name, tensor, device)
                tensors[name] = made[id(tensor)]


def _empty_like(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(tensor, device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty.zero_()
    if empty.dim() < 2:
        empty.fill_(0.0 if name == "bias" else 1.0)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad)


def _random_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are drawn at random: matrices, tables and kernels, not norms or biases."""
    return {name: p for name, p in model.named_parameters() if p.dim() > 1}


def _stream(name: str, seed: int) -> int:
    """The 64-bit random stream of one parameter.

    The text model has the same weights with towers and without.
    """
    key = f"{seed}:{name.replace('language_model.', '')}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)


def _initialise_rest(model: PreTrainedModel, random: dict[str, nn.Parameter]) -> None:
    """Give norms, scales and buffers the library's own values.

    By the code that ``from_pretrained`` runs for what a checkpoint lacks: it computes in float32
    and rounds once. It skips what is flagged as initialised, and so draws no random numbers.
    """
    for module in model.modules():
        # skipped whole, because older versions make a float32 copy of the weight before they look
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            module._is_hf_initialized = True
    for parameter in random.values():
        parameter._is_hf_initialized = True
    model.initialize_weights()
    for parameter in random.values():
        del parameter._is_hf_initialized


def fill_normal_(tensor: torch.Tensor, *, stream: int, std: float) -> None:
    """Fill ``tensor`` with nearly normal numbers of mean 0, equal on every device, bit by bit.

    torch's own generators give a seed different numbers on the CPU and on CUDA. Here element ``i``
    is a hash of ``i`` (SplitMix64 of stream + i·γ): the sum of its four 16-bit words, less the
    mean, is an exact integer (Irwin-Hall, within ±3.46 standard deviations); one float32
    multiplication scales it, one rounding makes it ``tensor.dtype``. Every step is either exact or
    rounded once in the way IEEE 754 prescribes, so devices cannot disagree.
    """
    flat = tensor.view(-1)
    scale = torch.tensor(std * math.sqrt(3) / 65536, dtype=torch.float32, device=tensor.device)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        words = _hash(start, part.numel(), stream, tensor.device)
        total = words.bitwise_and(0xFFFF)
        for shift in (16, 32, 48):
            total += (words >> shift).bitwise_and_(0xFFFF)
        part.copy_((total - 131_070).to(torch.float32).mul_(scale))


def _hash(start: int, count: int, stream: int, device: torch.device) -> torch.Tensor:
    """SplitMix64 of ``stream + (start + i)·γ`` for ``i`` in ``0…count-1``, as int64 bit patterns.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014. Integer
    products wrap modulo 2⁶⁴; shifts of int64 copy the sign, so the copies are masked off.
    """
    z = torch.arange(start, start + count, dtype=torch.int64, device=device)
    z.mul_(_signed(0x9E3779B97F4A7C15)).add_(stream)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def _signed(word: int) -> int:
    """The int64 with the bits of this unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word
