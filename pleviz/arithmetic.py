"""Memory and traffic of a PLE model as pure functions of its spec. No torch, no transformers.

Bytes are exact integers. What a model *holds* (weights, buffers, quantisation state) follows from
its tensors, so it is exact; what a forward pass needs *on top* is an estimate, marked as such.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pleviz.components import COMPONENTS
from pleviz.format import fmt_bytes, html_table, text_table
from pleviz.precision import PRECISIONS, plain_itemsize, tensor_bytes
from pleviz.specs import SLIDING, Spec, find_spec

HOMES = ("gpu", "cpu", "mapped", "file", "device_map")
"""Where the table can live. ``device_map`` is accelerate's hook: on the host, copied whole to the
accelerator in each forward pass."""


def row_bytes(spec: Spec, itemsize: int = 2) -> int:
    """Bytes of one token's row of the PLE table: all layers' vectors.

    >>> row_bytes(find_spec("gemma-4-E4B"))
    21504
    """
    return spec.table_shape[1] * itemsize


def table_bytes(spec: Spec, itemsize: int = 2) -> int:
    """Bytes of the whole PLE table.

    >>> table_bytes(find_spec("gemma-4-E4B"))
    5637144576
    """
    return spec.table_shape[0] * row_bytes(spec, itemsize)


def kv_cache_bytes(spec: Spec, context: int, batch: int = 1, itemsize: int = 2) -> int:
    """Bytes of the dynamic KV cache after ``context`` tokens, once decoding has begun.

    A full-attention layer holds every token. A sliding layer's tensors show ``window - 1`` tokens,
    a view of the ``window`` tokens that it concatenated last, so it holds up to ``window``. Layers
    that share keys and values hold none.
    """
    elements = 0
    for index in range(spec.first_kv_shared_layer):
        sliding = spec.layer_types[index] == SLIDING
        tokens = min(context, spec.sliding_window) if sliding else context
        elements += 2 * tokens * spec.kv_heads[index] * spec.head_dims[index]
    return elements * batch * itemsize


@dataclass(frozen=True)
class Budget:
    """Bytes that a model needs, by component. Made by :func:`budget`."""

    model: str
    home: str
    precision: str
    towers: bool
    context: int
    batch: int
    components: Mapping[str, int]
    """Bytes on the accelerator by component; they add up to ``resident_bytes + kv_cache_bytes``."""
    host_components: Mapping[str, int]
    """Bytes in host RAM by component."""
    table_bytes: int
    row_bytes: int

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the KV cache for ``context`` tokens of ``batch`` sequences."""
        return self.components["kv_cache"]

    @property
    def resident_bytes(self) -> int:
        """Bytes the loaded model holds on the accelerator before any token: exact."""
        return sum(self.components.values()) - self.kv_cache_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, ready for JSON."""
        return asdict(self) | {
            "components": dict(self.components),
            "host_components": dict(self.host_components),
            "resident_bytes": self.resident_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
        }

    def to_json(self) -> str:
        """JSON text of :meth:`to_dict`."""
        return json.dumps(self.to_dict(), indent=2)

    def _rows(self) -> list[tuple[str, str, str]]:
        names = [
            n for n in (*COMPONENTS, "kv_cache") if n in {*self.components, *self.host_components}
        ]
        rows = []
        for name in names:
            on_gpu, on_host = self.components.get(name, 0), self.host_components.get(name, 0)
            rows.append((name, *(fmt_bytes(n) if n else "" for n in (on_gpu, on_host))))
        rows.append(("resident", fmt_bytes(self.resident_bytes), ""))
        return rows

    def __str__(self) -> str:
        return text_table(("component", "accelerator", "host"), self._rows())

    def _repr_html_(self) -> str:
        return html_table(("component", "accelerator", "host"), self._rows(), caption=self.model)


def budget(
    name_or_spec: str | Spec,
    *,
    home: str = "gpu",
    precision: str = "bf16",
    towers: bool = False,
    context: int = 0,
    batch: int = 1,
    double_quant: bool = True,
) -> Budget:
    """What a model needs on the accelerator and on the host.

    Raises:
        ValueError: unknown name, home or precision; the message lists the valid ones.
    """
    spec = find_spec(name_or_spec)
    for value, valid, what in ((home, HOMES, "home"), (precision, PRECISIONS, "precision")):
        if value not in valid:
            raise ValueError(f"there is no {what} {value!r}. Valid: {', '.join(valid)}.")
    parameters = spec.tensors(towers)
    components = dict.fromkeys((*COMPONENTS, "kv_cache"), 0)
    for tensor in parameters:
        components[tensor.component] += tensor_bytes(tensor, precision, double_quant=double_quant)
    components["buffers"] = sum(tensor_bytes(tensor, precision) for tensor in spec.buffers(towers))
    itemsize = plain_itemsize(precision)
    components["kv_cache"] = kv_cache_bytes(spec, context, batch, itemsize)
    host = {}
    if home != "gpu":
        host["ple_table"] = components["ple_table"]
        components["ple_table"] = 0
    return Budget(
        model=spec.name,
        home=home,
        precision=precision,
        towers=towers,
        context=context,
        batch=batch,
        components=components,
        host_components=host,
        table_bytes=table_bytes(spec, itemsize),
        row_bytes=row_bytes(spec, itemsize),
    )
