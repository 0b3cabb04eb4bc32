"""Load a checkpoint the way a row stands for. Every row goes through ``from_pretrained``.

Rows are compared bit by bit, so they must be loaded alike: a model built in bfloat16 and one that
was loaded can differ in their buffers.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from pleviz.measure.runner import UnavailableError
from pleviz.measure.workaround import apply_workaround

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Of the parameters; what is quantised is computed in, and the rest stays in, bfloat16."""


def why_unavailable(home: str, device: torch.device) -> str | None:
    """Why a home cannot be measured on ``device``, told before anything is loaded."""
    from pleviz.homes.registration import why_not

    if home == "mapped":
        return why_not(device)
    if home in ("device_map", "workaround") and device.type == "cpu":
        return "it splits the model between an accelerator and the CPU, and there is no accelerator"
    return None


def load_row(
    checkpoint: str, home: str, precision: str, device: torch.device
) -> tuple[PreTrainedModel, str | None]:
    """The model with its table in ``home``, in eval mode, and a remark on how the home works here.

    Raises:
        UnavailableError: another home had to be used in its place.
    """
    from pleviz.homes import home_of
    from pleviz.homes.loading import load

    dtype = DTYPES.get(precision, torch.bfloat16)
    quantization = None if precision in DTYPES else precision
    if home in ("device_map", "workaround"):
        return _load_split(checkpoint, home, quantization, dtype, device), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = load(
            checkpoint, home=home, quantization=quantization, device=device, dtype=dtype
        )
    remarks = [str(w.message) for w in caught if str(w.message).startswith("pleviz: rows")]
    remark = "; ".join(remarks).replace("pleviz: ", "") or None
    if home_of(model) != home:
        raise UnavailableError(remark or f"the table went to '{home_of(model)}' instead")
    return model, remark


def _load_split(
    checkpoint: str, home: str, quantization: str | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The table on the CPU through the supported ``device_map``, and nothing of pleviz in the model."""
    from transformers import AutoConfig

    from pleviz.homes import loading

    config = AutoConfig.from_pretrained(checkpoint)
    cls, config, _ = loading.model_class(config, towers=True)
    model = cls.from_pretrained(
        checkpoint,
        config=config,
        dtype=dtype,
        device_map=loading.device_map(cls, config, device, "cpu"),
        quantization_config=loading.quantization_config(quantization, dtype, offloads=True),
    ).eval()
    if home == "workaround":
        loading.take_off_hooks(model, device)  # as in a model that was never dispatched
        apply_workaround(model)
    return model
