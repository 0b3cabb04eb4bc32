"""The embedding module of an offloaded table: same class name, same weights, another place.

While a table is offloaded, its module's class is a subclass made on the fly, in which
:class:`HostEmbedding` stands between the model's own embedding class and ``nn.Embedding``. The
model's class keeps its ``forward`` (and so its scale); only the lookup beneath it changes. The
``weight`` parameter stays the same object throughout; only its ``data`` is pointed elsewhere.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from pleviz.homes.dispatch import is_wrapper
from pleviz.homes.gather import gather_rows
from pleviz.homes.registration import RegistrationError
from pleviz.table import hook_device

if TYPE_CHECKING:
    from pleviz.homes.home import Home


class HostEmbedding(nn.Embedding):
    """``nn.Embedding`` whose rows are looked up, moved, saved and copied by a home."""

    _home: Home

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            weight = self._parameters.get("weight")
            if weight is not self._home.parameter:
                # a guest: torch.func.functional_call, or a replica made by DataParallel
                rows = self._home.in_table(input)
                if self.weight.device == input.device:
                    return F.embedding(rows, self.weight)
                return gather_rows(self.weight, rows)
            if weight.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    "the offloaded PLE table is read-only, and requires_grad was set on it. Freeze it "
                    "(pleviz.find_table(model).weight.requires_grad_(False)), or train it after "
                    "pleviz.restore(model)."
                )
            self._adopt_if_replaced()
        return self._home.lookup(self, input)

    def _adopt_if_replaced(self) -> None:
        # resizing, load_state_dict(assign=True) and merged adapters put other values in our place
        weight, home = self._parameters.get("weight"), self._home
        if weight is not None and (weight is not home.parameter or weight.data_ptr() != home.address):
            home.adopt(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_home" not in self.__dict__:
            super().__setattr__(name, value)
        elif name == "_old_forward":  # accelerate's first step to hang a hook on a module
            return
        elif name == "_hf_hook":  # it has put a tensor of its own in place: keep the table at home
            self._parameters["weight"] = self._home.parameter
            self._home.accelerate_hook, self._home.hooked_since = value, True
            place = hook_device(value)
            if place is not None:
                self._home.follow(self, self._home.host.dtype, place)
        elif name != "forward" or not is_wrapper(value):
            super().__setattr__(name, value)
            # the number of rows is the last thing that transformers sets when it resizes a table
            if name in ("weight", "num_embeddings"):
                self._adopt_if_replaced()

    def __getattr__(self, name: str) -> Any:
        if name == "base_layer" and self._home.kind == "mapped":
            # PEFT asks before it wraps an embedding. Merging the adapter will write into the weight,
            # and a GPU that writes to a file mapped read-only ends the CUDA context.
            self._home.make_writable(self)
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """``.to()``, ``.half()``, ``.cuda()`` …: casts reach the table, moves do not."""
        self._adopt_if_replaced()
        weight = self._parameters.pop("weight")
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"] = weight
        probe = fn(torch.empty(0, dtype=self._home.host.dtype, device=self._home.device))
        self._home.follow(self, probe.dtype, probe.device)
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        self._adopt_if_replaced()
        if f"{prefix}weight" in state_dict:
            self._home.make_writable(self)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._adopt_if_replaced()

    def __deepcopy__(self, memo: dict) -> HostEmbedding:
        self._adopt_if_replaced()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        home = self._home.twin()
        memo[id(self.weight)] = home.parameter
        state = {k: v for k, v in self.__dict__.items() if k != "_home"}
        twin.__dict__.update(copy.deepcopy(state, memo))
        twin.__dict__["_home"] = home
        home._point(twin)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickled as the original class with an ordinary weight, and the name of its home."""
        self._adopt_if_replaced()
        state = {k: v for k, v in self.__dict__.items() if k != "_home"}
        weight = nn.Parameter(self._home.host, requires_grad=self._home.was_trainable)
        state["_parameters"] = {**self._parameters, "weight": weight}
        home = self._home
        return _unpickle, (original_class(self), state, home.kind, str(home.device), home.settings())


def _unpickle(
    cls: type[nn.Embedding], state: dict, kind: str, device: str, settings: dict[str, Any]
) -> nn.Embedding:
    from pleviz.homes.home import attach  # not at import: home.py needs this module

    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module.__dict__.update(state)
    there = torch.device(device)
    for buffer in module._buffers.values():  # its scale; torch.load(map_location=…) moved it
        there = buffer.device
    if there.type == "cuda" and not torch.cuda.is_available():
        there = torch.device("cpu")
    try:
        home = attach(module, "cpu" if there.type == "cpu" else kind, there)
    except RegistrationError as error:
        home = attach(module, "cpu", there)
        warnings.warn(f"pleviz: rows of the table are gathered on the CPU: {error}", stacklevel=2)
    home.__dict__.update(settings)
    if there.type == "cpu":
        home.was_device = there
    return module


@functools.cache
def host_class(cls: type[nn.Embedding]) -> type[HostEmbedding]:
    """The subclass of ``cls`` and :class:`HostEmbedding` that an offloaded module gets."""
    bases = (HostEmbedding,) if cls is nn.Embedding else (cls, HostEmbedding)
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, bases, namespace | {"_original_class": cls})


def original_class(module: HostEmbedding) -> type[nn.Embedding]:
    """The class the module had before it was offloaded."""
    return type(module)._original_class
