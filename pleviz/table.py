"""Find the PLE table inside a model: bare, multimodal, dispatched, quantised or wrapped by PEFT.

The table is the module that transformers names ``embed_tokens_per_layer``. It sits in the *text
model*, the module that also owns ``per_layer_model_projection``. Wrappers change the path to it
(``base_model.model.…``) and PEFT may put its own module in its place, so it is looked up by the
exact last component of its name, never by a prefix: ``embed_tokens`` is another table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pleviz.specs import NoTableError

if TYPE_CHECKING:
    import torch
    from torch import nn

TABLE_NAME = "embed_tokens_per_layer"
PROJECTION_NAME = "per_layer_model_projection"


@dataclass(frozen=True, eq=False)
class Table:
    """Where the PLE table of a model is. Sizes are read from the live module, never cached."""

    name: str
    """Dotted path, from the model that was searched, of the live embedding module."""
    module: nn.Embedding
    """The embedding whose ``weight`` is looked up, with wrappers of PEFT taken off."""
    owner: nn.Module
    """The text model: the module that has the table and the projection."""
    wrapper: str
    """``"none"``, or how PEFT wraps the table: ``"lora"``, ``"modules_to_save"``, ``"trainable_tokens"``."""

    @property
    def weight(self) -> torch.Tensor:
        """The table, ``[rows, num_layers × dim]``; layer ``i`` owns columns ``i·dim … (i+1)·dim``."""
        return self.module.weight

    @property
    def rows(self) -> int:
        """Number of token ids the table has a row for."""
        return self.module.num_embeddings

    @property
    def width(self) -> int:
        """Channels in one row, all layers together."""
        return self.module.embedding_dim

    @property
    def dim(self) -> int:
        """Channels of one layer's vector (``hidden_size_per_layer_input``)."""
        return self.owner.config.hidden_size_per_layer_input

    @property
    def num_layers(self) -> int:
        """How many layers' vectors are packed in a row."""
        return self.width // self.dim

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table."""
        return self.weight.numel() * self.weight.element_size()

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token's row: what one token needs from the table per forward pass."""
        return self.width * self.weight.element_size()

    def layer(self, index: int) -> torch.Tensor:
        """The slice of one layer, ``[rows, dim]`` (a view; unscaled, as stored)."""
        if not 0 <= index < self.num_layers:
            raise IndexError(f"layer {index} is not in 0…{self.num_layers - 1}")
        return self.weight[:, index * self.dim : (index + 1) * self.dim]


def compute_device(owner: nn.Module) -> torch.device:
    """The device on which the text model uses the looked-up rows: that of the PLE projection."""
    projection = getattr(owner, PROJECTION_NAME)
    device = next(projection.parameters()).device
    if device.type == "meta":  # accelerate brings the values to its execution device
        for module in projection.modules():
            device = hook_device(module.__dict__.get("_hf_hook")) or device
    return device


def hook_device(hook: object) -> torch.device | None:
    """Where a hook of accelerate, or a chain of them, has a module compute; ``None`` if it is open."""
    import torch

    for part in getattr(hook, "hooks", (hook,)):
        place = getattr(part, "execution_device", None)
        if place is not None:
            return torch.device(place)
    return None


def find_table(model: nn.Module) -> Table:
    """The one live PLE table of ``model``.

    Args:
        model: any ``nn.Module``: a bare text model, a causal LM, a multimodal model, a PEFT model.

    Raises:
        NoTableError: there is no table: no PLE at all, or PLE without a per-token table.
        ValueError: there is more than one text model with a table; pass the one you mean.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == TABLE_NAME
    ]
    if not found:
        raise NoTableError(_why_none(model))
    if len(found) > 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(found)} PLE tables: {', '.join(n for n, _ in found)}. "
            "Pass the sub-model whose table you mean."
        )
    path, module = found[0]
    owner = model.get_submodule(path.rpartition(".")[0])
    path, module, wrapper = _unwrap(path, module)
    if not hasattr(module, "num_embeddings"):
        raise NoTableError(
            f"{path} is a {type(module).__name__}, not an embedding: it has no rows to look up."
        )
    return Table(name=path, module=module, owner=owner, wrapper=wrapper)


def _unwrap(path: str, module: nn.Module) -> tuple[str, nn.Module, str]:
    """Take PEFT's wrappers off: follow the module that a forward pass really reads."""
    wrapper = "none"
    while True:
        copies = getattr(module, "modules_to_save", None)
        if copies:  # ModulesToSaveWrapper: a frozen original and one trainable copy per adapter
            active = [name for name in module.active_adapters if name in copies]
            wrapper = "modules_to_save"
            if active and not module.disable_adapters:
                path, module = f"{path}.modules_to_save.{active[0]}", copies[active[0]]
            else:
                path, module = f"{path}.original_module", module.original_module
        elif hasattr(module, "token_adapter"):  # TrainableTokensWrapper
            wrapper = "trainable_tokens"
            path, module = f"{path}.token_adapter.base_layer", module.token_adapter.base_layer
        elif "base_layer" in getattr(module, "_modules", {}):  # a LoRA layer, or trainable tokens
            wrapper = "trainable_tokens" if hasattr(module, "trainable_tokens_delta") else "lora"
            path, module = f"{path}.base_layer", module.base_layer
        else:
            return path, module, wrapper


def wrapper_of(module: nn.Module) -> str:
    """How PEFT wraps an embedding: :attr:`Table.wrapper` of the module in the table's place."""
    return _unwrap("", module)[2]


def _why_none(model: nn.Module) -> str:
    kind = type(model).__name__
    if any(name.rpartition(".")[2] == PROJECTION_NAME for name, _ in model.named_modules()):
        reason = (
            "it projects its input to per-layer vectors but has no per-token table "
            f"(no module named '{TABLE_NAME}')"
        )
    else:
        reason = f"no module in it is named '{TABLE_NAME}'"
    return (
        f"{kind} has no PLE table: {reason}. Models with one: Gemma 3n and Gemma 4 E2B/E4B "
        "(config.hidden_size_per_layer_input > 0)."
    )
