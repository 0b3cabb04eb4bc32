"""Watch the table of a model move: memory over time, and three counters of it.

With a CUDA device this is the real thing: real shapes, random weights, the home ``mapped``. Without
one, shapes are shrunk and the table moves from the process' private memory to the memory map of a
checkpoint file (the home ``file``), which is what there is to see on such a machine.

``python -m pleviz.watch --out records/FILE.json`` keeps what was seen as a record.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pleviz.budgets import budget
from pleviz.building import build
from pleviz.homes import offload
from pleviz.measure.timing import prefill, random_ids
from pleviz.memory import MemoryProbe, MemoryReport, Reading, Sample
from pleviz.records import load_records, new_record, write_record
from pleviz.specs import SPECS, Spec, find_spec

COUNTERS = ("allocated", "reserved", "device_used")
MOMENTS = {
    "before": "before the move",
    "end": "after the move, prompt read",
    "after": "after empty_cache()",
}


PROMPT_TOKENS = {True: 8500, False: 16}
"""Tokens read while watching, with and without CUDA. Reading a row of a file may map 2 MB of it."""
PAUSE_S = 0.25
STRETCHES = 150
"""Of a timeline, at most its highest and lowest sample in each of this many stretches are kept."""


@dataclass(frozen=True)
class Move:
    """Memory of a model while a prompt is read, its table moves, and the prompt is read again."""

    model: str
    home: str
    table_bytes: int
    resident: tuple[int, int]
    """Predicted bytes before and after the move."""
    readings: Mapping[str, Mapping[str, int | None]]
    """Moment (see :data:`MOMENTS`) -> counter (see :data:`COUNTERS`) -> bytes."""
    timeline: tuple[Sample, ...]

    def parts(self, moment: str) -> dict[str, int]:
        """What ``nvidia-smi`` shows at that moment, in three parts: tensors, cache, the rest."""
        used = self.readings[moment]
        return {
            "allocated": used["allocated"],
            "cache": used["reserved"] - used["allocated"],
            "outside": used["device_used"] - used["reserved"],
        }

    def to_row(self) -> dict[str, Any]:
        """As it stands in a record: units in the names."""
        return {
            "model": self.model,
            "home": self.home,
            "table_bytes": self.table_bytes,
            "predicted_resident_bytes": list(self.resident),
            "readings": [
                {"moment": moment} | {f"{name}_bytes": value for name, value in values.items()}
                for moment, values in self.readings.items()
            ],
            "timeline": [
                {
                    "at_s": round(sample.seconds, 4),
                    "allocated_bytes": sample.allocated,
                    "reserved_bytes": sample.reserved,
                    "rss_bytes": sample.rss,
                    "event": sample.event,
                }
                for sample in self.timeline
            ],
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Move:
        """The move in a record's row."""
        return cls(
            model=row["model"],
            home=row["home"],
            table_bytes=row["table_bytes"],
            resident=tuple(row["predicted_resident_bytes"]),
            readings={
                entry["moment"]: {name: entry[f"{name}_bytes"] for name in COUNTERS}
                for entry in row["readings"]
            },
            timeline=tuple(
                Sample(
                    s["at_s"], s["allocated_bytes"], s["reserved_bytes"], s["rss_bytes"], s["event"]
                )
                for s in row["timeline"]
            ),
        )


def watch_move(name: str, *, device: str, interval_s: float = 0.01) -> Move:
    """Read a prompt, move the table, read the prompt again, under a probe's eyes.

    On CUDA at real shapes with 8,500 tokens; elsewhere the model is :func:`narrow` and reads 16. A
    moment passes after each step, so that its level can be seen.

    Raises:
        ValueError: unknown name.
    """
    cuda = device == "cuda"
    spec = find_spec(name) if cuda else narrow(find_spec(name))
    model = build(spec, scale="real", device=device)
    ids = random_ids(model, 1, PROMPT_TOKENS[cuda], torch.device(device))
    prefill(model, ids[:, :8])  # what the first pass sets up is not the prompt's
    with tempfile.TemporaryDirectory() as folder:
        if not cuda:
            model.save_pretrained(folder)
        with MemoryProbe(device=device, interval_s=interval_s) as probe:
            time.sleep(PAUSE_S)
            prefill(model, ids)
            probe.mark("prompt read")
            time.sleep(PAUSE_S)
            if cuda:
                moved = offload(model, "mapped")
            else:  # the file is new and right; comparing it would only read it all into memory
                moved = offload(model, "file", checkpoint=folder, verify=False)
            probe.mark("table moved")
            time.sleep(PAUSE_S)
            prefill(model, ids)
            probe.mark("read again")
            time.sleep(PAUSE_S)
    return _move(spec, moved.home, probe.report())


def narrow(spec: Spec) -> Spec:
    """The spec with all its layers and the whole vocabulary, but narrow: a table of 0.1 to 0.2 GB.

    The table is nearly all of such a model, as it must be to show in a process' memory.
    """
    layers = spec.num_hidden_layers
    return dataclasses.replace(
        spec,
        name=f"{spec.name} (narrow)",
        hidden_size=48,
        hidden_size_per_layer_input=8,
        intermediate_sizes=(64,) * layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_global_key_value_heads=1,
        head_dim=8,
        global_head_dim=8,
        laurel_rank=min(spec.laurel_rank, 4),
    )


def _move(spec: Spec, home: str, report: MemoryReport) -> Move:
    def counters(reading: Reading) -> dict[str, int | None]:
        return {name: getattr(reading, name) for name in COUNTERS}

    return Move(
        model=spec.name,
        home=home,
        table_bytes=budget(spec).table_bytes,
        resident=(budget(spec).resident_bytes, budget(spec, home=home).resident_bytes),
        readings={moment: counters(getattr(report, moment)) for moment in MOMENTS},
        timeline=_thinned(report.timeline),
    )


def _thinned(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """The marks, the ends, and of each stretch of time the samples with the most and the least."""
    stretches: dict[int, list[Sample]] = {}
    for sample in samples:
        stretches.setdefault(int(STRETCHES * sample.seconds / samples[-1].seconds), []).append(
            sample
        )

    def size(sample: Sample) -> tuple[int, int]:
        return sample.allocated, sample.rss

    kept = {samples[0], samples[-1], *(sample for sample in samples if sample.event is not None)}
    for some in stretches.values():
        kept |= {min(some, key=size), max(some, key=size)}
    return tuple(sorted(kept, key=lambda sample: sample.seconds))


def recorded_moves() -> list[tuple[Move, str]]:
    """Moves watched on a GPU, from the records, oldest first, and where they come from."""
    return [
        (Move.from_row(row), f"recorded: {record.provenance}")
        for record in load_records()
        if record.kind == "move" and record.hardware.get("gpu")
        for row in record.rows
    ]


def main() -> None:
    """Watch all models move and write what was seen as a record of kind ``"move"``."""
    from pleviz.measure.machine import inspect_machine

    parser = argparse.ArgumentParser(prog="python -m pleviz.watch", description=main.__doc__)
    parser.add_argument("--out", required=True, help="the record to write, a JSON file")
    out = parser.parse_args().out
    machine = inspect_machine("auto", lambda *_: None, lambda: None)
    device = machine.device.partition(":")[0]
    record = new_record(
        "move",
        command="python -m pleviz.watch --out FILE.json",
        hardware=machine.hardware,
        versions=machine.versions,
        link_bytes_per_s=machine.link_bytes_per_s,
        arguments={"device": device, "prompt_tokens": PROMPT_TOKENS[device == "cuda"]},
        method={
            "timeline": "memory_allocated, memory_reserved and the process' RSS, sampled every 10 ms",
            "readings": "device_used is the driver's figure: used memory of the whole device",
            "weights": "random; memory does not depend on their values",
        },
        rows=[watch_move(name, device=device).to_row() for name in SPECS],
    )
    write_record(out, record)


if __name__ == "__main__":
    main()
