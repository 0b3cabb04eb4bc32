"""Bytes of one tensor in each precision, as transformers and bitsandbytes store it. No torch.

``nf4`` and ``int8`` are ``BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")`` and
``load_in_8bit=True``. Both quantise the ``nn.Linear`` weights of the towers and of every layer, and
nothing else: the PLE table, the token embedding and the output head tied to it stay at 16 bits.
"""

from __future__ import annotations

from pleviz.tensors import TensorShape

PRECISIONS = ("bf16", "fp16", "fp32", "nf4", "int8")

NF4_BLOCK = 64
"""Weights that share one absmax (bitsandbytes' ``blocksize``)."""
NESTED_BLOCK = 256
"""Absmax values that share one second-level absmax, with double quantisation."""


def plain_itemsize(precision: str) -> int:
    """Bytes per element of a tensor that is not quantised."""
    return 4 if precision == "fp32" else 2


def tensor_bytes(tensor: TensorShape, precision: str, *, double_quant: bool = True) -> int:
    """Bytes of ``tensor`` and of what is needed to read it back."""
    if tensor.itemsize is not None:
        return tensor.itemsize * tensor.numel
    if not is_quantised(tensor, precision):
        return plain_itemsize(precision) * tensor.numel
    if precision == "int8":
        return tensor.numel + 4 * tensor.shape[0]  # one byte each, and a float32 scale per row
    return nf4_bytes(tensor.numel, double_quant=double_quant)


def nf4_bytes(numel: int, *, double_quant: bool = True) -> int:
    """Bytes of ``numel`` weights in NF4, with all that is needed to read them back.

    Two weights per byte; per block of 64 one absmax (float32); a code book of 16 float32. Double
    quantisation stores the absmax as one byte each, with a float32 per 256 of them, one float32
    offset and a second code book of 256 float32.

    >>> weights = 2560 * 10240
    >>> [round(8 * nf4_bytes(weights, double_quant=on) / weights, 3) for on in (False, True)]
    [4.5, 4.127]
    """
    blocks = _ceil_div(numel, NF4_BLOCK)
    packed, code = _ceil_div(numel, 2), 16 * 4
    if not double_quant:
        return packed + code + 4 * blocks
    nested = 4 * _ceil_div(blocks, NESTED_BLOCK) + 4 + 256 * 4
    return packed + code + blocks + nested


def is_quantised(parameter: TensorShape, precision: str) -> bool:
    """Whether bitsandbytes converts this parameter, as transformers calls it.

    transformers spares tied weights, the output head and the module of the last parameter
    (``get_keys_to_not_convert``). When it asks, nothing is tied yet, so in these models all three
    are ``lm_head`` and the token embedding.
    """
    return precision in ("nf4", "int8") and parameter.linear and parameter.name != "lm_head.weight"


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
