"""All of a move or nothing of it: whatever stops it in the middle, the model is as it was before."""

from __future__ import annotations

import threading

import torch
from torch import nn

ONE_MOVE_AT_A_TIME = threading.RLock()


class AllOrNothing:
    """A block that, if it fails, undoes what it did to ``modules`` and to the hooks below ``model``.

    Any exception counts, also a KeyboardInterrupt between two statements. (Not a generator-based
    context manager: interrupted at the very end, that would undo the finished block much later, when
    it is collected.)
    """

    def __init__(self, model: nn.Module, *modules: nn.Embedding) -> None:
        self.hooks = [
            (owned, dict(owned))
            for child in model.modules()
            for owned in (child._forward_pre_hooks, child._forward_pre_hooks_with_kwargs)
        ]
        self.modules = [_Before(module) for module in modules]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        for module in self.modules:
            module.put_back()
        _refill(self.hooks)


class _Before:
    """What there is of an embedding module before a move."""

    def __init__(self, module: nn.Embedding) -> None:
        self.module, self.cls = module, type(module)
        self.contents = [
            (owned, dict(owned)) for owned in (module.__dict__, module._parameters, module._buffers)
        ]
        self.weight = module._parameters["weight"]
        self.data, self.trainable = self.weight.data, self.weight.requires_grad

    def put_back(self) -> None:
        self.module.__class__ = self.cls
        _refill(self.contents)
        self.weight.data = self.data
        set_trainable(self.weight, self.trainable)


def _refill(contents: list[tuple[dict, dict]]) -> None:
    for now, before in contents:
        now.clear()
        now.update(before)


def set_trainable(weight: torch.Tensor, flag: bool) -> None:
    """``requires_grad``, also of a weight that was made under ``torch.inference_mode``."""
    if weight.requires_grad != flag:
        with torch.inference_mode(weight.is_inference()):
            weight.requires_grad_(flag)
