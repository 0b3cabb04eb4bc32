"""Check token ids before any kernel sees them.

On a GPU an id outside an embedding table is not a Python error but a device-side assert that
ends the CUDA context. While a table is offloaded, ids are checked on the host at the start of a
forward pass. Single-token steps that continue a cache are not checked: their ids are the model's
own output, and reading them on the host would add a synchronisation to every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pleviz.homes.gather import check_ids


class IdGuard:
    """A forward pre-hook on a module that takes ``input_ids``. Holds modules, so it copies with them.

    Args:
        embedding: the token embedding, which sees every id first.
        table: the PLE table's module, or ``None`` where the model itself handles ids outside it.
    """

    def __init__(self, embedding: nn.Module, table: nn.Module | None) -> None:
        self.embedding = embedding
        self.table = table

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor) or ids.dtype.is_floating_point:
            return
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if ids.shape[-1] == 1 and cache is not None:
            return
        rows, what = self.embedding.weight.shape[0], "the token embedding"
        if self.table is not None and self.table.num_embeddings < rows:
            rows, what = self.table.num_embeddings, "the PLE table"
        check_ids(ids, rows, what)


def add_guards(owner: nn.Module, root: nn.Module, table: nn.Module | None) -> None:
    """Guard every module between ``root`` and the text model that looks ids up itself."""
    guard = IdGuard(owner.get_input_embeddings(), table)
    for module in root.modules():
        if module is owner or getattr(module, "language_model", None) is owner:
            module.register_forward_pre_hook(guard, with_kwargs=True)


def remove_guards(root: nn.Module) -> None:
    """Remove every guard below ``root``."""
    for module in root.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, IdGuard):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
