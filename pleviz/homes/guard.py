"""Check token ids before any kernel sees them.

On a GPU an id outside an embedding table is not a Python error but a device-side assert that
ends the CUDA context. While a table is offloaded, ids are checked on the host at the start of a
forward pass. Single-token steps that continue a cache are not checked: their ids are the model's
own output, and reading them on the host would add a synchronisation to every step. Only where the
table has fewer rows than the model has output ids, each lookup in it is checked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pleviz.homes.embedding import HostEmbedding
from pleviz.homes.gather import check_ids
from pleviz.table import TABLE_NAME, wrapper_of


class IdGuard:
    """A forward pre-hook on a module that takes ``input_ids``. Holds modules, so it copies with them.

    Args:
        embedding: the token embedding, which sees every id first.
        table: the PLE table's module. Once it is no longer offloaded, the guard takes itself off.
        limits: whether an id outside the table is an error; otherwise the model has a rule for it.

    Raises:
        IndexError: an id is outside the token embedding.
    """

    def __init__(self, embedding: nn.Module, table: nn.Module, *, limits: bool) -> None:
        self.embedding = embedding
        self.table = table
        self.limits = limits

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        if not isinstance(self.table, HostEmbedding):  # restored through a part of the model
            remove_guards(module, self)
            return
        _refuse_trainable_tokens(module)
        rows = rows_of(self.embedding)
        # no match for the model's own output, then: the home checks each lookup
        self.table._home.checks_ids = self.limits and self.table.num_embeddings < rows
        ids = kwargs.get("input_ids", args[0] if args else None)
        # not a subclass: a FakeTensor has no values to look at
        if type(ids) is not torch.Tensor or ids.dtype.is_floating_point:
            return
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if ids.shape[-1] == 1 and cache is not None and not _is_empty(cache):
            return
        for placeholder in _placeholders(module):
            ids = ids.masked_fill(ids == placeholder, 0)
        check_ids(ids, rows, "the token embedding")


def _is_empty(cache: Any) -> bool:
    """Whether a cache holds nothing yet. A length on the GPU is not read: then it holds something."""
    length = cache.get_seq_length()
    return isinstance(length, int) and length == 0


def _placeholders(module: nn.Module) -> list[int]:
    """Ids that stand for an image or a sound, which Gemma 4 replaces before it looks them up."""
    config = module.config
    if not config.model_type.startswith("gemma4"):
        return []
    names = ("image_token_id", "video_token_id", "audio_token_id")
    return [getattr(config, name) for name in names if getattr(config, name, None) is not None]


def _refuse_trainable_tokens(owner: nn.Module) -> None:
    """PEFT's trainable tokens copy the whole table at each step: that is no offload any more."""
    place = getattr(owner, TABLE_NAME, None)
    if place is not None and wrapper_of(place) == "trainable_tokens":
        raise RuntimeError(
            "trainable tokens were put on the offloaded PLE table: each step would copy all of it. "
            "Call pleviz.restore(model) to train them."
        )


def rows_of(embedding: nn.Module) -> int:
    """How many ids an embedding knows. The shape of its weight may be that of 4-bit packed bytes."""
    rows = getattr(embedding, "num_embeddings", None)
    return embedding.weight.shape[0] if rows is None else rows


def add_guards(owner: nn.Module, root: nn.Module, table: nn.Module, *, limits: bool) -> None:
    """Guard every module between ``root`` and the text model that looks ids up itself."""
    guard = IdGuard(owner.get_input_embeddings(), table, limits=limits)
    for module in root.modules():
        if module is owner or getattr(module, "language_model", None) is owner:
            module.register_forward_pre_hook(guard, with_kwargs=True)


def remove_guards(root: nn.Module, only: IdGuard | None = None) -> None:
    """Remove every guard below ``root``, or ``only`` one."""
    for module in root.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, IdGuard) and hook is (only or hook):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
