"""accelerate's hooks on the table: taken off while it is offloaded, put back when it is restored.

``device_map={…: "cpu"}``, ``cpu_offload`` and ``dispatch_model`` hang an ``AlignDevicesHook`` on a
module. For a table it would copy all of it to the GPU at every forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.hooks import add_hook_to_module
from torch import nn

from pleviz.homes.shard import same_bits


def drop_own_forward(module: nn.Module) -> None:
    """Undo what accelerate leaves when its hook is removed: the class's own forward on the instance."""
    forward = module.__dict__.get("forward")
    if getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module:
        del module.forward


def take_hook_off(module: nn.Embedding, device: torch.device) -> Any:
    """Take accelerate's hook off a table that is used on ``device``, and give it its values back.

    Nothing is copied to ``device`` but the scale. Returns the hook, ``None`` where there is none.
    """
    hook = module.__dict__.get("_hf_hook")
    if hook is None:
        return None
    for name in ("_hf_hook", "_old_forward", "forward"):
        module.__dict__.pop(name, None)
    copier = copier_in(hook)
    if module.weight.is_meta and copier is not None:  # on the CPU or on disk: the hook has the values
        values = copier.weights_map["weight"]
        module.weight = nn.Parameter(values, requires_grad=module.weight.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = buffer.to(device)
    return hook


def put_hook_back(module: nn.Embedding, hook: Any) -> None:
    """Undo :func:`take_hook_off`. Values that were changed meanwhile are the ones to stay."""
    copier = copier_in(hook)
    devices = getattr(copier, "original_devices", None)
    if copier is not None and not same_bits(copier.weights_map["weight"], module.weight.data):
        copier.weights_map = {"weight": module.weight.data}
    add_hook_to_module(module, hook)
    if devices is not None:
        copier.original_devices = devices


def copier_in(hook: Any) -> Any:
    """The hook, or the one in a chain of hooks, that copies weights in and out; ``None`` without."""
    parts = getattr(hook, "hooks", (hook,))
    return next((part for part in parts if getattr(part, "offload", False)), None)


def is_wrapper(forward: Any) -> bool:
    """Whether ``forward`` is what accelerate sets on a module that it hangs a hook on."""
    return "add_hook_to_module" in getattr(getattr(forward, "func", None), "__qualname__", "")
