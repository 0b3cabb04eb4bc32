"""The tensors of the vision and audio towers, kept as data so that arithmetic needs no torch.

``data/towers.json`` lists, per family, every parameter and buffer outside the text model, read once
off the real transformers classes on the meta device. ``python -m pleviz.towers`` writes it anew
(Gemma 3n's vision tower needs the packages timm and pillow); a test compares it with the classes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pleviz.tensors import TensorShape

if TYPE_CHECKING:
    from torch import nn

    from pleviz.specs import Spec

DATA = "towers.json"
TEXT_WIDTH = "hidden_size"
"""Stands in the data for the text model's hidden size, to which each tower is projected."""
_INDEX = re.compile(r"\.(\d+)\.")


def tower_tensors(spec: Spec, kind: str) -> Iterator[TensorShape]:
    """The towers' tensors of a published model; ``kind`` is ``"parameters"`` or ``"buffers"``."""
    for entry in _data()[spec.family][kind]:
        yield from _expand(entry, spec.hidden_size)


@cache
def _data() -> dict[str, Any]:
    return json.loads(resources.files("pleviz.data").joinpath(DATA).read_text("utf-8"))


def _expand(entry: dict[str, Any], hidden_size: int) -> Iterator[TensorShape]:
    shape = tuple(hidden_size if size == TEXT_WIDTH else size for size in entry["shape"])
    first, count = entry.get("from", 0), entry.get("count", 1)
    for index in range(first, first + count):
        yield TensorShape(
            entry["name"].replace("*", str(index)),
            shape,
            linear=entry.get("linear", False),
            itemsize=entry.get("itemsize"),
        )


def read_towers(model: nn.Module, hidden_size: int) -> dict[str, list[dict[str, Any]]]:
    """The entries of ``data/towers.json`` for this multimodal model (made on the meta device).

    Args:
        model: a ``…ForConditionalGeneration`` in a 16-bit dtype, so that float32 stands out.
        hidden_size: of the text model. Must differ from the towers' own widths.
    """
    from torch import nn

    linears = {f"{n}.weight" for n, m in model.named_modules() if type(m) is nn.Linear}
    groups = {"parameters": model.named_parameters(), "buffers": model.named_buffers()}
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, named in groups.items():
        entries = []
        for name, tensor in named:
            if "language_model" in name or name.startswith("lm_head"):
                continue
            shape = [TEXT_WIDTH if size == hidden_size else size for size in tensor.shape]
            entry: dict[str, Any] = {"name": name, "shape": shape}
            if name in linears:
                entry["linear"] = True
            if tensor.dtype != model.dtype:
                entry["itemsize"] = tensor.element_size()
            entries.append(entry)
        found[kind] = list(_collapse(entries))
    return found


def _collapse(entries: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Merge entries that differ only in the last index of their names into one with a ``*``."""
    groups: dict[str, list[tuple[int | None, dict[str, Any]]]] = {}
    for entry in entries:
        matches = list(_INDEX.finditer(entry["name"]))
        if matches:
            start, end = matches[-1].span(1)
            pattern, index = entry["name"][:start] + "*" + entry["name"][end:], int(matches[-1][1])
        else:
            pattern, index = entry["name"], None
        groups.setdefault(json.dumps(entry | {"name": pattern}), []).append((index, entry))
    for key, members in groups.items():
        merged, indices = json.loads(key), [index for index, _ in members]
        if len(members) == 1:
            yield members[0][1]
        elif indices == list(range(indices[0], indices[0] + len(indices))):
            yield merged | {"from": indices[0], "count": len(indices)}
        else:
            yield from (entry for _, entry in members)


def main() -> None:
    """Write ``data/towers.json`` from the installed transformers classes."""
    import torch

    from pleviz.building import empty_model
    from pleviz.specs import SPECS

    families = {}
    for name in ("gemma-3n-E2B", "gemma-4-E4B"):
        spec = SPECS[name]
        # a text width that no tower has, so that the projections to it can be told apart
        model = empty_model(
            dataclasses.replace(spec, hidden_size=8 * 331), towers=True, dtype=torch.bfloat16
        )
        families[spec.family] = read_towers(model, 8 * 331)
    path = Path(__file__).parent / "data" / DATA
    new = path.with_suffix(".tmp")
    new.write_text(_text(families), "utf-8")
    new.replace(path)


def _text(families: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """JSON with one tensor per line, so that a change is one line in a diff."""
    blocks = []
    for family, kinds in families.items():
        parts = (
            f'  "{kind}": [\n    ' + ",\n    ".join(map(json.dumps, entries)) + "\n  ]"
            for kind, entries in kinds.items()
        )
        blocks.append(f' "{family}": {{\n' + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    main()
