"""All of a move or nothing of it: whatever stops it in the middle, the model is as it was before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_ONE_MOVE_AT_A_TIME = threading.RLock()


@contextmanager
def all_or_nothing(model: nn.Module, module: nn.Embedding) -> Iterator[None]:
    """Undo in ``module``, its weight and the hooks below ``model`` all that a failed block did.

    Any exception counts, also a KeyboardInterrupt between two statements. One block runs at a time.
    Tensors made in it are ordinary ones, also under ``torch.inference_mode``: they stay afterwards.
    """
    with _ONE_MOVE_AT_A_TIME, torch.inference_mode(False):
        weight = module._parameters.get("weight")
        data, trainable = (None, False) if weight is None else (weight.data, weight.requires_grad)
        cls, state = type(module), dict(module.__dict__)
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        hooks = [
            (owned, dict(owned))
            for child in model.modules()
            for owned in (child._forward_pre_hooks, child._forward_pre_hooks_with_kwargs)
        ]
        try:
            yield
        except BaseException:
            module.__class__ = cls
            for now, before in (
                (module.__dict__, state),
                (module._parameters, parameters),
                (module._buffers, buffers),
                *hooks,
            ):
                now.clear()
                now.update(before)
            if weight is not None:
                weight.data = data
                set_trainable(weight, trainable)
            raise


def set_trainable(weight: torch.Tensor, flag: bool) -> None:
    """``requires_grad``, also of a weight that was made under ``torch.inference_mode``."""
    if weight.requires_grad != flag:
        with torch.inference_mode(weight.is_inference()):
            weight.requires_grad_(flag)
