"""Bytes of one tensor in each precision, as transformers and bitsandbytes store it. No torch.

``nf4`` and ``int8`` are ``BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")`` and
``load_in_8bit=True``: only ``nn.Linear`` weights are quantised, everything else, the PLE table
included, stays at 16 bits. Of the ``nn.Linear`` weights, transformers skips the tied output head,
and whatever module holds the model's *last* parameter (``get_keys_to_not_convert``), which in
Gemma 3n is one AltUp projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pleviz.tensors import TensorShape

PRECISIONS = ("bf16", "fp16", "fp32", "nf4", "int8")

NF4_BLOCK = 64
"""Weights that share one absmax (bitsandbytes' ``blocksize``)."""
NESTED_BLOCK = 256
"""Absmax values that share one second-level absmax, with double quantisation."""


def plain_itemsize(precision: str) -> int:
    """Bytes per element of a tensor that is not quantised."""
    return 4 if precision == "fp32" else 2


def tensor_bytes(
    tensor: TensorShape, precision: str, *, quantised: bool, double_quant: bool = True
) -> int:
    """Bytes of ``tensor``; ``quantised`` says whether bitsandbytes converts it."""
    if tensor.float32:
        return 4 * tensor.numel
    if not quantised:
        return plain_itemsize(precision) * tensor.numel
    if precision == "int8":
        return tensor.numel + 4 * tensor.shape[0]  # one byte each, and a float32 scale per row
    return nf4_bytes(tensor.numel, double_quant=double_quant)


def nf4_bytes(numel: int, *, double_quant: bool = True) -> int:
    """Bytes of ``numel`` weights in NF4, with all that is needed to read them back.

    Two weights per byte; per block of 64 one absmax (float32); a code book of 16 float32. Double
    quantisation stores the absmax as one byte each, with a float32 per 256 of them, one float32
    offset and a second code book of 256 float32.

    >>> 8 * nf4_bytes(2560 * 10240) / (2560 * 10240), 8 * nf4_bytes(
    ...     2560 * 10240, double_quant=False
    ... ) / (2560 * 10240)  # bits per weight
    (4.127285766601562, 4.50001953125)
    """
    blocks = _ceil_div(numel, NF4_BLOCK)
    packed, code = _ceil_div(numel, 2), 16 * 4
    if not double_quant:
        return packed + code + 4 * blocks
    nested = 4 * _ceil_div(blocks, NESTED_BLOCK) + 4 + 256 * 4
    return packed + code + blocks + nested


def quantised_names(parameters: Sequence[TensorShape], precision: str) -> frozenset[str]:
    """Names of the parameters that bitsandbytes converts.

    Args:
        parameters: all of them, in the order of ``named_parameters()``.
        precision: nothing is converted unless it is ``"nf4"`` or ``"int8"``.
    """
    if precision not in ("nf4", "int8"):
        return frozenset()
    skipped = {"lm_head", parameters[-1].name.removesuffix(".weight")}
    return frozenset(_names(parameters, skipped))


def _names(parameters: Iterable[TensorShape], skipped: set[str]) -> Iterable[str]:
    for tensor in parameters:
        module = tensor.name.removesuffix(".weight")
        # transformers matches a skipped name as a prefix at a dot, and as a plain suffix
        inside = any(
            module == name or module.startswith(f"{name}.") or module.endswith(name)
            for name in skipped
        )
        if tensor.linear and not inside:
            yield tensor.name


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
