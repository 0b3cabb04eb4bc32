"""The homes themselves: where the bytes of an offloaded table are and how a lookup reaches them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pleviz.homes import gather
from pleviz.homes.atomic import set_trainable
from pleviz.homes.embedding import HostEmbedding, host_class, original_class
from pleviz.homes.registration import (
    RegistrationError,
    empty_pages,
    is_file_backed,
    map_to_device,
)
from pleviz.homes.shard import TableInShard, map_table, same_bits


class Home:
    """What an offloaded embedding module knows about its table.

    ``host`` is the table as a CPU tensor; ``device`` is where the rows are needed. With a
    ``shard``, ``host`` is the read-only map of a checkpoint file: home ``file``.
    """

    kind: str

    def __init__(
        self, host: torch.Tensor, device: torch.device, shard: TableInShard | None = None
    ) -> None:
        self.host = host
        self.device = device
        self.shard = shard
        self.move = object()  # which call of offload() this home comes from
        self.was_device = host.device
        self.joins_model = True  # restored onto the model's device, rather than to was_device
        self.was_trainable = False
        self.neighbour_trained = False  # whether the rest of the text model was trainable, too
        self.parameter = nn.Parameter(host.new_empty(0), requires_grad=False)  # the module's own
        self.accelerate_hook: Any = None  # taken off the module while it is offloaded
        self.hooked_since = False  # the hook came when the table was in this home
        self.checks_ids = False  # whether the model may ask for rows that the table has not
        self.row_zero_outside = False  # Gemma 3n: an id without a row reads row 0
        self.rows_moved = 0
        self.address = 0

    @property
    def name(self) -> str:
        """The home's public name."""
        return self.kind if self.shard is None else "file"

    @staticmethod
    def map_shard(shard: TableInShard) -> torch.Tensor:
        """The file's table as this kind of home wants it mapped."""
        return map_table(shard)

    def weight_data(self) -> torch.Tensor:
        """The tensor that the module's parameter points at. Remembers its address."""
        data = self._place()
        self.address = data.data_ptr()
        return data

    def _place(self) -> torch.Tensor:
        return self.host

    def lookup(self, module: HostEmbedding, ids: torch.Tensor) -> torch.Tensor:
        """Unscaled rows for ``ids`` ``[…]``: ``[…, width]`` on the device of ``ids``."""
        raise NotImplementedError

    def bytes_moved(self) -> int:
        """Bytes of rows brought to the accelerator so far."""
        raise NotImplementedError

    def in_table(self, ids: torch.Tensor) -> torch.Tensor:
        """Apply the model's own rule for ids without a row, where it has one."""
        if not self.row_zero_outside:
            return ids
        return torch.where((ids >= 0) & (ids < self.host.shape[0]), ids, 0)

    @torch.inference_mode(False)  # the table outlives a caller's block
    def follow(self, module: HostEmbedding, dtype: torch.dtype, device: torch.device) -> None:
        """The model was cast or moved: cast the table where it is, and serve the new device."""
        if dtype == self.host.dtype and device in (self.device, torch.device("meta")):
            return
        if device.type != "meta":
            self.device = device
        if dtype != self.host.dtype:
            self.host, self.shard = self.host.to(dtype), None
        self._point(module)

    @torch.inference_mode(False)  # the table outlives a caller's block
    def adopt(self, module: HostEmbedding) -> None:
        """Another tensor was put in the table's place: take it home."""
        weight = module._parameters["weight"]
        if weight.is_meta:  # accelerate emptied it; the values are here
            module._parameters["weight"] = self.parameter
            return
        self.host, self.shard = weight.detach().to("cpu").contiguous(), None
        self.parameter = weight
        self.was_trainable |= weight.requires_grad  # a new parameter brings its own flag
        set_trainable(weight, False)
        self._point(module)

    @torch.inference_mode(False)  # the table outlives a caller's block
    def make_writable(self, module: HostEmbedding) -> None:
        """Called before values are written into the table: leave a read-only file for RAM."""
        if self.shard is not None:
            self.host, self.shard = _own_copy(self.host), None
            self._point(module)

    def _point(self, module: HostEmbedding) -> None:
        """Point the parameter at ``host``; if that cannot be page-locked, gather rows on the CPU."""
        try:
            self.parameter.data = self.weight_data()
        except RegistrationError as error:
            instead = CpuHome(self.host if self.shard is None else _own_copy(self.host), self.device)
            instead.__dict__.update(self.settings())
            for name in ("move", "parameter", "accelerate_hook", "hooked_since"):
                instead.__dict__[name] = self.__dict__[name]
            module.__dict__["_home"] = instead
            self.parameter.data = instead.weight_data()
            warnings.warn(
                f"pleviz: rows of the table are gathered on the CPU: {error}", stacklevel=2
            )

    def settings(self) -> dict[str, Any]:
        """What a copy of the model needs to know to be restored like this one."""
        names = ("was_device", "joins_model", "was_trainable", "neighbour_trained", "row_zero_outside")
        return {name: self.__dict__[name] for name in names}

    @torch.inference_mode(False)  # the table outlives a caller's block
    def twin(self) -> Home:
        """An independent home with the same values, for a deep copy of the module."""
        host, shard = self._mapped_again(), self.shard
        if host is None:
            host, shard = _own_copy(self.host), None
        other = type(self)(host, self.device, shard)
        other.__dict__.update(self.settings())
        return other

    def _mapped_again(self) -> torch.Tensor | None:
        """A second map of the file; ``None`` without a file or if it no longer holds these values."""
        if self.shard is None:
            return None
        try:
            host = self.map_shard(self.shard)
        except (OSError, ValueError):  # deleted, or another file by now
            return None
        return host if same_bits(host, self.host) else None


class CpuHome(Home):
    """The table stays an ordinary CPU tensor; rows are gathered there and sent up."""

    kind = "cpu"

    @staticmethod
    def map_shard(shard: TableInShard) -> torch.Tensor:
        return map_table(shard, copy_on_write=True)  # no driver minds, and a stray write cannot crash

    def weight_data(self) -> torch.Tensor:
        data = super().weight_data()
        self._moved_before = gather.bytes_moved[self.address]
        return data

    def lookup(self, module: HostEmbedding, ids: torch.Tensor) -> torch.Tensor:
        return gather.gather_rows(module.weight, self.in_table(ids))

    def bytes_moved(self) -> int:
        return gather.bytes_moved[self.address] - self._moved_before


class MappedHome(Home):
    """The table stays in host RAM, page-locked in place; the GPU reads single rows over the bus."""

    kind = "mapped"

    def _place(self) -> torch.Tensor:
        if self.device.type != "cuda":  # the model was moved off the GPU: look up where it is now
            return self.host
        if self.shard is None and is_file_backed(self.host):
            self.host = _own_copy(self.host)
        return map_to_device(self.host, self.device, read_only=self.shard is not None)

    def lookup(self, module: HostEmbedding, ids: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():  # a compiled graph must not count: it would recompile
            self.rows_moved += ids.numel()
            if self.checks_ids:
                gather.check_ids(ids, self.host.shape[0])
        return F.embedding(self.in_table(ids), module.weight)

    def bytes_moved(self) -> int:
        if self.device.type != "cuda":
            return 0
        return self.rows_moved * self.host.shape[1] * self.host.element_size()


def _own_copy(host: torch.Tensor) -> torch.Tensor:
    return empty_pages(host.shape, host.dtype).copy_(host)


HOMES: dict[str, type[Home]] = {home.kind: home for home in (CpuHome, MappedHome)}


def attach(
    module: nn.Embedding, kind: str, device: torch.device, shard: TableInShard | None = None
) -> Home:
    """Give ``module`` a home of the ``kind`` ``"cpu"`` or ``"mapped"``; its rows are used on ``device``.

    With a ``shard`` the table's own memory is let go and the file's is used; the caller has made
    sure that both hold the same bits.

    Raises:
        RegistrationError: the memory cannot be page-locked. The module is unchanged, as it is after
            any other exception.
    """
    weight, original = module.weight, module.weight.data
    on_accelerator = original.device.type != "cpu"
    if shard is not None:
        host = HOMES[kind].map_shard(shard)
    elif on_accelerator:
        # touched here, by all cores: the driver would fault the pages in one by one
        host = empty_pages(original.shape, original.dtype).zero_()
    else:
        host = original.contiguous()
    home = HOMES[kind](host, device, shard)
    home.was_device, home.joins_model = original.device, original.device == device
    home.was_trainable, home.parameter = weight.requires_grad, weight
    data = home.weight_data()
    if on_accelerator and shard is None:
        home.host.copy_(original)  # after registering: page-locked memory is copied to faster
    cls = type(module)
    try:
        set_trainable(weight, False)
        weight.data = data
        module.__dict__["_home"] = home
        module.__class__ = host_class(cls)
    except BaseException:  # KeyboardInterrupt too: never half-moved
        module.__class__ = cls
        module.__dict__.pop("_home", None)
        weight.data = original
        set_trainable(weight, home.was_trainable)
        raise
    return home


def detach(module: HostEmbedding, device: torch.device) -> None:
    """Undo :func:`attach`: the weight becomes an ordinary tensor on ``device``."""
    module._adopt_if_replaced()
    home = module._home
    # the step that can fail (out of memory) comes first; a read-only map must not be handed out
    data = home.host.to(device, copy=home.shard is not None)
    module.__class__ = original_class(module)
    del module.__dict__["_home"]
    module.weight.data = data
    set_trainable(module.weight, home.was_trainable or module.weight.requires_grad)
