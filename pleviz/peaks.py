"""What one forward pass needs on top of the weights: an estimate, stage by stage. No torch.

The estimate follows the transformers code of both families: at each stage it adds up the tensors
that are alive at once. It takes attention to run in a fused kernel (``sdpa``), so scores are not
counted; prompts to be unpadded; and every prompt token to pass every layer. (Newer transformers
versions let only the last token into Gemma 4's KV-shared layers when only its logits are asked for,
and may stay below.) Mixtures of experts and the towers' own activations are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pleviz.specs import SLIDING, Spec

CUBLAS_WORKSPACE = 32 * 2**20
"""Bytes that torch gives cuBLAS at the first matrix product (Hopper; 8.1 MiB on older GPUs)."""


@dataclass(frozen=True)
class Pass:
    """One forward pass: ``tokens`` new tokens in each of ``batch`` sequences, after ``past``."""

    tokens: int
    past: int = 0
    batch: int = 1
    itemsize: int = 2
    """Bytes per activation."""
    logits: int = 1
    """Positions per sequence whose logits are computed (``generate`` asks for the last only)."""
    precision: str = "bf16"


def kv_bytes(spec: Spec, tokens: int, past: int, batch: int, itemsize: int) -> list[int]:
    """Bytes of each layer's keys and values after a pass of ``tokens`` on top of ``past``.

    A full-attention layer holds every token. A sliding one keeps the last ``window - 1`` before the
    pass and concatenates the new ones; its tensors then show ``window - 1`` tokens again, but as a
    view that keeps the whole concatenation in memory until the next pass. (transformers'
    ``DynamicSlidingWindowLayer``.) Layers that share keys and values hold none.
    """
    sizes = []
    for index in range(spec.first_kv_shared_layer):
        seen = min(past, spec.sliding_window - 1) if spec.layer_types[index] == SLIDING else past
        row = spec.kv_heads[index] * spec.head_dims[index]
        sizes.append(2 * batch * (seen + tokens) * row * itemsize)
    return sizes


def stages(spec: Spec, run: Pass) -> dict[str, int]:
    """Bytes alive on top of the weights, KV cache included, at each stage of a forward pass.

    ``lookup``: rows of the table as read and as scaled. ``project``: the context projection and its
    norm, which computes in float32. ``attention``, ``ffn``: in the widest layer. ``head``: logits
    before and after softcapping.
    """
    positions = run.batch * run.tokens
    hidden = positions * spec.hidden_size * run.itemsize
    elements = positions * spec.table_shape[1]
    per_layer_inputs = elements * run.itemsize
    kv = kv_bytes(spec, run.tokens, run.past, run.batch, run.itemsize)
    in_layer = per_layer_inputs + sum(kv) + _rotary(spec, run) + _masks(spec, run)
    logits = run.batch * min(run.logits, run.tokens) * spec.vocab_size * run.itemsize
    # two 16-bit tensors and two float32 ones; in float32 the norm's input needs no copy of its own
    norm = 12 if run.itemsize == 2 else 16
    return {
        "lookup": hidden + 2 * per_layer_inputs,
        "project": hidden + norm * elements + 8 * elements // spec.hidden_size_per_layer_input,
        "attention": in_layer + _streams(spec, 4) * hidden + _attention(spec, run, kv),
        "ffn": in_layer + _streams(spec, 7) * hidden + _ffn(spec, run),
        "head": sum(kv) + hidden + 2 * logits,
    }


def _streams(spec: Spec, temporaries: int) -> int:
    """Hidden-state-sized tensors alive in a layer: 4 in Gemma 4; in Gemma 3n AltUp's copies.

    Those are the ``n`` streams before and after prediction, the ``n + 1`` that the text model built
    the first ones from, and the layer's own.
    """
    if spec.family == "gemma4":
        return 4
    return 3 * spec.altup_num_inputs + 1 + temporaries


def _ffn(spec: Spec, run: Pass) -> int:
    """Gate, up and their product (Gemma 3n keeps the gate's input too), plus dequantised weights."""
    widest = max(spec.intermediate_sizes)
    live = 3 if spec.family == "gemma4" else 4
    positions = run.batch * run.tokens
    total = live * positions * widest * run.itemsize
    if run.precision == "nf4" and positions > 1:  # one token is multiplied straight from 4 bits
        total += widest * spec.hidden_size * run.itemsize
    if run.precision == "int8":  # the input in float16 and int8, the output in int32 and float16
        total += 3 * positions * widest + 6 * positions * spec.hidden_size
    return total


def _attention(spec: Spec, run: Pass, kv: list[int]) -> int:
    """Queries, output, and keys and values repeated for every head where the kernel needs that.

    Plus one layer's keys twice, while the cache concatenates old and new.
    """
    most = 0
    for index, head_dim in enumerate(spec.head_dims):
        row = run.batch * spec.num_attention_heads * head_dim * run.itemsize
        sliding = spec.layer_types[index] == SLIDING
        seen = min(run.past, spec.sliding_window - 1) if sliding else run.past
        masked = _masked(spec, run, sliding)
        total = 2 * row * run.tokens
        if masked or head_dim > 256:  # transformers' use_gqa_in_sdpa
            total += 2 * row * (seen + run.tokens)
        if masked:  # the kernel takes the mask in the activations' dtype
            total += run.batch * run.tokens * (seen + run.tokens) * run.itemsize
        most = max(most, total)
    return most + max(kv) // 2


def _masked(spec: Spec, run: Pass, sliding: bool) -> bool:
    """Whether layers of this kind get a mask tensor; a plain causal pass needs none."""
    if run.tokens == 1:
        return False
    return run.past > 0 or (sliding and run.tokens > spec.sliding_window)


def _masks(spec: Spec, run: Pass) -> int:
    """Boolean masks, one per kind of layer."""
    total = 0
    for kind in set(spec.layer_types):
        sliding = kind == SLIDING
        if _masked(spec, run, sliding):
            seen = min(run.past, spec.sliding_window - 1) if sliding else run.past
            total += run.batch * run.tokens * (seen + run.tokens)
    return total


def _rotary(spec: Spec, run: Pass) -> int:
    """Cosines and sines, one pair per kind of layer, shared by the sequences of a batch."""
    dims = sum(spec.head_dims[spec.layer_types.index(kind)] for kind in set(spec.layer_types))
    return 2 * run.tokens * dims * run.itemsize
