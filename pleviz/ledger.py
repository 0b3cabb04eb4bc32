"""Where a model's bytes are: every parameter, buffer and quantisation state, by component and device.

The ledger reads tensors' shapes and addresses, never their values, so it works on any device, on
the meta device too, and costs no memory. Bytes that several tensors share (tied embeddings, views
of one storage) are counted once, for the tensor that is registered first.

It counts what the *model* holds. Activations, KV cache, gradients and the allocator's rounding (512
bytes per CUDA tensor) are not the model's: :class:`pleviz.MemoryProbe` measures those.
"""

from __future__ import annotations

import bisect
import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pleviz.components import COMPONENTS, component_of
from pleviz.format import fmt_bytes, html_table, text_table

if TYPE_CHECKING:
    import torch
    from torch import nn

MAPPED = "host (mapped)"
"""Device of a table in the home ``mapped``: a CUDA tensor whose bytes are in host RAM."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a model."""

    name: str
    """Dotted path; the parts of a quantised weight are ``<weight>.absmax``, ``<weight>.code``, …"""
    kind: str
    """``"parameter"``, ``"buffer"`` or ``"quantisation"``."""
    component: str
    """One of :data:`pleviz.components.COMPONENTS`."""
    tensor: torch.Tensor
    quantised: bool = False
    """Whether this is a weight that bitsandbytes packed."""


@dataclass(frozen=True)
class Ledger:
    """Bytes of a model by device and component. Made by :func:`ledger`."""

    by_device: Mapping[str, Mapping[str, int]]
    """device -> component -> bytes. Devices are torch's names, or :data:`MAPPED`."""
    not_quantised: tuple[tuple[str, int], ...]
    """Matrices that a quantised model keeps unquantised, with their bytes, largest first.

    Empty for a model that is not quantised.
    """

    @property
    def components(self) -> dict[str, int]:
        """Bytes of each component, all devices together."""
        sums = dict.fromkeys(COMPONENTS, 0)
        for parts in self.by_device.values():
            for name, nbytes in parts.items():
                sums[name] += nbytes
        return {name: nbytes for name, nbytes in sums.items() if nbytes}

    @property
    def total(self) -> int:
        """All bytes on all devices."""
        return sum(self.components.values())

    def on(self, device: str) -> int:
        """Bytes on one device; ``"cuda"`` sums all CUDA devices. 0 where there is none."""
        return sum(
            sum(parts.values())
            for name, parts in self.by_device.items()
            if name == device or name.split(":")[0] == device
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for JSON."""
        return {
            "by_device": {device: dict(parts) for device, parts in self.by_device.items()},
            "not_quantised": [[name, nbytes] for name, nbytes in self.not_quantised],
        }

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        devices = tuple(self.by_device)
        rows = []
        for name, nbytes in self.components.items():
            cells = [self.by_device[device].get(name, 0) for device in devices]
            if len(devices) > 1:
                cells.append(nbytes)
            rows.append((name, *(fmt_bytes(n) if n else "" for n in cells)))
        totals = [self.on(device) for device in devices]
        if len(devices) > 1:
            totals.append(self.total)
        rows.append(("total", *map(fmt_bytes, totals)))
        return ("component", *devices, *(("all",) if len(devices) > 1 else ())), rows

    def _left_out(self) -> str:
        if not self.not_quantised:
            return ""
        names = ", ".join(f"{name} ({fmt_bytes(nbytes)})" for name, nbytes in self.not_quantised)
        return f"not quantised: {names}"

    def __str__(self) -> str:
        left_out = self._left_out()
        return text_table(*self._table()) + (f"\n{left_out}" if left_out else "")

    def _repr_html_(self) -> str:
        left_out = self._left_out()
        tail = f"<p>{html.escape(left_out)}</p>" if left_out else ""
        return html_table(*self._table(), caption="bytes held by the model") + tail


def ledger(model: nn.Module) -> Ledger:
    """Add up what ``model`` holds, per device and component.

    >>> import torch
    >>> print(ledger(torch.nn.Embedding(4, 8)))
    component    cpu
    ---------  -----
    other      128 B
    total      128 B
    """
    by_device: dict[str, dict[str, int]] = {}
    seen: dict[Any, _Intervals] = {}
    unquantised: list[tuple[str, int]] = []
    any_quantised = False
    mapped = _mapped_address(model)
    for entry in entries(model):
        tensor = entry.tensor
        any_quantised |= entry.quantised
        space, start, extent = _extent(tensor)
        nbytes = seen.setdefault(space, _Intervals()).add(start, start + extent)
        if not nbytes:
            continue
        device = MAPPED if mapped is not None and start == mapped else str(tensor.device)
        parts = by_device.setdefault(device, {})
        parts[entry.component] = parts.get(entry.component, 0) + nbytes
        if entry.kind == "parameter" and not entry.quantised and tensor.dim() > 1:
            unquantised.append((entry.name, nbytes))
    unquantised.sort(key=lambda item: -item[1])
    return Ledger(
        by_device=MappingProxyType({k: MappingProxyType(v) for k, v in by_device.items()}),
        not_quantised=tuple(unquantised) if any_quantised else (),
    )


def entries(model: nn.Module, *, tied: bool = False) -> Iterator[Entry]:
    """Every tensor of ``model``: parameters, the parts of quantised ones, then buffers.

    With ``tied``, a tied tensor is yielded under its second name too.
    """
    for name, parameter in model.named_parameters(remove_duplicate=not tied):
        component = component_of(name)
        parts = dict(_quantisation_state(model, name, parameter))
        quantised = bool(parts)
        yield Entry(name, "parameter", component, parameter.data, quantised)
        for part, tensor in parts.items():
            yield Entry(f"{name}.{part}", "quantisation", component, tensor)
    for name, buffer in model.named_buffers(remove_duplicate=not tied):
        yield Entry(name, "buffer", "buffers", buffer)


def _quantisation_state(
    model: nn.Module, name: str, parameter: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """The scales and code books that bitsandbytes keeps as attributes of a packed weight."""
    kind = type(parameter).__name__
    if kind == "Params4bit" and parameter.quant_state is not None:
        state = parameter.quant_state
        for prefix, part in (("", state), ("nested_", state.state2)):
            for field in ("absmax", "code", "offset"):
                tensor = getattr(part, field, None)
                if tensor is not None:
                    yield prefix + field, tensor
    elif kind == "Int8Params" and not parameter.has_fp16_weights:
        # after the first forward pass bitsandbytes moves the scales from the weight to the module
        module = model.get_submodule(name.rpartition(".")[0])
        scales = parameter.SCB if parameter.SCB is not None else module.state.SCB
        if scales is not None:
            yield "SCB", scales


def _mapped_address(model: nn.Module) -> int | None:
    """Address of the PLE table if the home ``mapped`` shows it to the GPU from host RAM."""
    from pleviz.homes import home_of
    from pleviz.specs import NoTableError
    from pleviz.table import find_table

    try:
        weight = find_table(model).weight
        mapped = weight.is_cuda and home_of(model) not in ("gpu", "cpu")
    except (NoTableError, ValueError):  # no table, or several: none of them is at a home of ours
        return None
    return weight.data_ptr() if mapped else None


def _extent(tensor: torch.Tensor) -> tuple[Any, int, int]:
    """Address space, start and length in bytes of the memory a tensor reaches over."""
    itemsize = tensor.element_size()
    if tensor.numel() == 0:
        return tensor.device, 0, 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    extent = (last + 1) * itemsize
    if tensor.is_meta:  # no addresses there: tell storages apart by their identity
        return tensor.untyped_storage()._cdata, tensor.storage_offset() * itemsize, extent
    return tensor.device, tensor.data_ptr(), extent


class _Intervals:
    """Bytes of one address space that were already counted, as sorted disjoint intervals."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, start: int, end: int) -> int:
        """Mark ``[start, end)`` as counted; return how many of its bytes are new."""
        first = bisect.bisect_left(self.ends, start)
        last = bisect.bisect_right(self.starts, end)
        known = sum(
            max(0, min(end, e) - max(start, s))
            for s, e in zip(self.starts[first:last], self.ends[first:last], strict=True)
        )
        if first < last:
            merged = min(start, self.starts[first]), max(end, self.ends[last - 1])
        else:
            merged = start, end
        self.starts[first:last], self.ends[first:last] = [merged[0]], [merged[1]]
        return end - start - known
