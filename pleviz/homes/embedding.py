"""The embedding module of an offloaded table: same class name, same weights, another place.

While a table is offloaded, its module's class is a subclass made on the fly, in which
:class:`HostEmbedding` stands between the model's own embedding class and ``nn.Embedding``. The
model's class keeps its ``forward`` (and so its scale); only the lookup beneath it changes. The
``weight`` parameter stays the same object throughout; only its ``data`` is pointed elsewhere.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from pleviz.homes.home import Home


class HostEmbedding(nn.Embedding):
    """``nn.Embedding`` whose rows are looked up, moved, saved and copied by a home."""

    _home: Home

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        home = self._home
        if not torch.compiler.is_compiling():
            self._adopt_if_replaced()
        return home.lookup(self, input)

    def _adopt_if_replaced(self) -> None:
        # resizing, load_state_dict(assign=True) and accelerate put another tensor in our place
        if self.weight.data_ptr() != self._home.address:
            self._home.adopt(self)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "num_embeddings" and "_home" in self.__dict__:
            self._adopt_if_replaced()  # the last thing transformers does when it resizes a table

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """``.to()``, ``.half()``, ``.cuda()`` …: casts reach the table, moves do not."""
        weight = self._parameters.pop("weight")
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"] = weight
        probe = fn(torch.empty(0, dtype=weight.dtype, device=self._home.device))
        self._home.follow(self, probe.dtype, probe.device)
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        if f"{prefix}weight" in state_dict:
            self._home.make_writable(self)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._adopt_if_replaced()

    def __deepcopy__(self, memo: dict) -> HostEmbedding:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        home = self._home.twin()
        weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
        weight.data = home.weight_data()
        memo[id(self.weight)] = weight
        state = {k: v for k, v in self.__dict__.items() if k != "_home"}
        twin.__dict__.update(copy.deepcopy(state, memo))
        twin.__dict__["_home"] = home
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickled as the original class with an ordinary weight, and the name of its home."""
        state = {k: v for k, v in self.__dict__.items() if k != "_home"}
        weight = nn.Parameter(self._home.host, requires_grad=self._home.was_trainable)
        state["_parameters"] = {**self._parameters, "weight": weight}
        return _unpickle, (original_class(self), state, self._home.kind, str(self._home.device))


def _unpickle(cls: type[nn.Embedding], state: dict, kind: str, device: str) -> nn.Embedding:
    from pleviz.homes.home import attach  # not at import: home.py needs this module

    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module.__dict__.update(state)
    there = torch.device(device)
    if there.type == "cuda" and not torch.cuda.is_available():
        there = torch.device("cpu")
    attach(module, "cpu" if there.type == "cpu" else kind, there)
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
