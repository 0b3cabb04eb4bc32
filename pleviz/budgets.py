"""The memory budget of one way of running a model: weights by component, cache, and peaks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pleviz.components import COMPONENTS
from pleviz.format import fmt_bytes, html_table, text_table
from pleviz.peaks import CUBLAS_WORKSPACE, Pass, kv_bytes, stages
from pleviz.precision import PRECISIONS, plain_itemsize, tensor_bytes
from pleviz.specs import Spec, find_spec

HOMES = ("gpu", "cpu", "mapped", "file", "device_map")
"""Where the table lives. ``gpu``: on the accelerator. ``cpu``, ``mapped``, ``file``: on the host,
rows cross the bus. ``device_map``: on the host, and accelerate's hook copies the whole table to the
accelerator in each forward pass."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a model needs. Made by :func:`budget`.

    ``resident_bytes`` is exact: it equals what the loaded model's tensors take, quantisation state
    included. (torch rounds each CUDA tensor up to 512 bytes, less than 0.1 % at real shapes, and a
    first forward pass adds cuBLAS's workspace.) The stages, and the peaks made of them, are
    estimates: see :mod:`pleviz.peaks`.
    """

    model: str
    home: str
    precision: str
    towers: bool
    context: int
    batch: int
    components: Mapping[str, int]
    """Component -> bytes on the accelerator: the resident ones and ``kv_cache``."""
    host_components: Mapping[str, int]
    """Component -> bytes on the host; with the home ``file`` they are the page cache's."""
    table_bytes: int
    """The whole PLE table, wherever it lives."""
    row_bytes: int
    """One token's row of it."""
    prefill_stages: Mapping[str, int]
    """Stage -> bytes on top of the resident ones while the prompt is read; empty without context."""
    decode_stages: Mapping[str, int]
    """The same for one token after the context."""

    @property
    def kv_cache_bytes(self) -> int:
        """The KV cache of ``batch`` sequences of ``context`` tokens while decoding."""
        return self.components["kv_cache"]

    @property
    def resident_bytes(self) -> int:
        """What the loaded model holds on the accelerator before it has seen a token. Exact."""
        return sum(self.components.values()) - self.kv_cache_bytes

    @property
    def prefill_peak_bytes(self) -> int:
        """Estimated peak while the prompt is read, cuBLAS's workspace included."""
        return self._peak(self.prefill_stages)

    @property
    def decode_peak_bytes(self) -> int:
        """Estimated peak of one decoding step, cuBLAS's workspace included."""
        return self._peak(self.decode_stages)

    def _peak(self, parts: Mapping[str, int]) -> int:
        on_top = max(parts.values()) + CUBLAS_WORKSPACE if parts else 0
        return self.resident_bytes + on_top

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the table that cross the bus per decoded token of one sequence."""
        return {"gpu": 0, "device_map": self.table_bytes}.get(self.home, self.row_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, ready for JSON; derived figures included."""
        fields = {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in vars(self).items()
        }
        derived = (
            "resident_bytes",
            "kv_cache_bytes",
            "prefill_peak_bytes",
            "decode_peak_bytes",
            "bytes_per_token",
        )
        return fields | {name: getattr(self, name) for name in derived}

    def to_json(self) -> str:
        """:meth:`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def _title(self) -> str:
        parts = [self.model, f"table: {self.home}", self.precision]
        parts += ["with towers"] if self.towers else []
        parts += [f"{self.context} tokens × {self.batch}"] if self.context else []
        return ", ".join(parts)

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = []
        for name in (*COMPONENTS, "kv_cache"):
            sizes = self.components.get(name, 0), self.host_components.get(name, 0)
            if any(sizes) and name != "kv_cache":
                rows.append((name, *(fmt_bytes(size) if size else "" for size in sizes)))
        rows.append(("resident", fmt_bytes(self.resident_bytes), fmt_bytes(self._on_host())))
        if self.context:
            for name in ("kv_cache_bytes", "prefill_peak_bytes", "decode_peak_bytes"):
                label = name.removesuffix("_bytes").replace("_", " ")
                label += " (estimate)" if "peak" in name else ""
                rows.append((label, fmt_bytes(getattr(self, name)), ""))
        rows.append(("over the bus per token", fmt_bytes(self.bytes_per_token), ""))
        return rows

    def _on_host(self) -> int:
        return sum(self.host_components.values())

    def __str__(self) -> str:
        header = ("component", "accelerator", "host")
        return f"{self._title()}\n{text_table(header, self._rows())}"

    def _repr_html_(self) -> str:
        return html_table(("component", "accelerator", "host"), self._rows(), self._title())


def budget(
    name_or_spec: str | Spec,
    *,
    home: str = "gpu",
    precision: str = "bf16",
    towers: bool = False,
    context: int = 0,
    batch: int = 1,
    prefill_chunk: int | None = None,
    logits: int = 1,
    double_quant: bool = True,
) -> Budget:
    """What a model needs on the accelerator and on the host.

    Args:
        name_or_spec: a name in ``SPECS``, or a spec.
        home: one of :data:`HOMES`.
        precision: ``"bf16"``, ``"fp16"``, ``"fp32"``, or bitsandbytes' ``"nf4"`` or ``"int8"``.
        towers: count vision and audio too (published models only).
        context: tokens per sequence in the KV cache, read as one prompt.
        batch: sequences.
        prefill_chunk: tokens of the prompt per forward pass; all at once by default.
        logits: positions per sequence whose logits the prefill computes. ``generate`` asks for the
            last; a plain ``model(input_ids)`` computes them for all, which is 4.5 GB for 8,500.
        double_quant: with ``"nf4"``, quantise the block scales too
            (``bnb_4bit_use_double_quant=True``).

    Raises:
        ValueError: an unknown name, home or precision, or a number out of range.

    >>> b = budget("gemma-4-E4B", home="mapped", context=8500)
    >>> print(f"{b.resident_bytes / 1e9:.2f} GB resident, {b.prefill_peak_bytes / 1e9:.2f} GB peak")
    9.29 GB resident, 10.79 GB peak
    """
    spec = find_spec(name_or_spec)
    for value, valid, what in ((home, HOMES, "home"), (precision, PRECISIONS, "precision")):
        if value not in valid:
            raise ValueError(f"there is no {what} {value!r}. Valid: {', '.join(valid)}.")
    chunk = context if prefill_chunk is None else min(prefill_chunk, context)
    for what, value, least in (
        ("context", context, 0),
        ("batch", batch, 1),
        ("prefill_chunk", prefill_chunk, 1),
        ("logits", logits, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{what} must be at least {least}, not {value}")

    components = dict.fromkeys((*COMPONENTS, "kv_cache"), 0)
    for tensor in spec.tensors(towers):
        components[tensor.component] += tensor_bytes(tensor, precision, double_quant=double_quant)
    for tensor in spec.buffers(towers):
        components["buffers"] += tensor_bytes(tensor, precision)
    host = {}
    if home != "gpu":
        host["ple_table"], components["ple_table"] = components["ple_table"], 0

    itemsize = plain_itemsize(precision)
    row = spec.table_shape[1] * itemsize
    table = spec.table_shape[0] * row
    prefill: dict[str, int] = {}
    decode: dict[str, int] = {}
    if context:
        common = {"batch": batch, "itemsize": itemsize, "precision": precision}
        components["kv_cache"] = sum(kv_bytes(spec, 1, context - 1, batch, itemsize))
        prefill = stages(spec, Pass(chunk, context - chunk, logits=logits, **common))
        decode = stages(spec, Pass(1, context, **common))
        if home == "device_map":
            for parts in (prefill, decode):
                parts["lookup"] += table
    return Budget(
        model=spec.name,
        home=home,
        precision=precision,
        towers=towers,
        context=context,
        batch=batch,
        components=MappingProxyType({k: v for k, v in components.items() if v or k == "kv_cache"}),
        host_components=MappingProxyType(host),
        table_bytes=table,
        row_bytes=row,
        prefill_stages=MappingProxyType(prefill),
        decode_stages=MappingProxyType(decode),
    )
