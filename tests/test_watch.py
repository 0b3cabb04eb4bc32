"""Comparisons of prediction and measurement, and moves that were watched: live and from records."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import pleviz
from pleviz import compare, watch
from pleviz.memory import Sample
from pleviz.notebook import quiet
from pleviz.records import Record, new_record, read_record, write_record


@pytest.mark.parametrize("name", ["gemma-3n-E2B", "gemma-4-E4B"])
def test_live_comparison_is_exact_on_the_cpu(name: str) -> None:
    before, after = compare.live([name], scale="tiny", device="cpu")
    assert (before.moment, after.moment) == ("before", "after")
    assert before.difference == after.difference == 0
    assert before.measured - after.measured == before.predicted.table_bytes
    assert before.source == "live, tiny shapes on cpu"
    text = compare.table([before, after])
    assert f"{name}, before" in text
    assert f"{before.measured:,}" in text
    assert "+0.000 %" in text


def record_of(rows: list[dict[str, Any]], *, gpu: str | None = "GPU X", **arguments: Any) -> Record:
    hardware = {"gpu": gpu, "gpu_bytes": 1, "cpu": "c", "cpu_count": 1, "ram_bytes": 1}
    arguments = {"scale": "real"} | arguments
    return new_record("speed", command="c", hardware=hardware, arguments=arguments, rows=rows)


def row(home: str, resident: int, **more: Any) -> dict[str, Any]:
    base = {"model": "gemma-4-E4B", "precision": "bf16", "home": home, "compiled": False}
    return base | {"status": "ok", "resident_bytes": resident} | more


SLOW = {"peak_prefill_bytes": 9 * 10**9, "prefill_s": 0.5, "decode_tok_s": 10.0}
SPEED = {"peak_prefill_bytes": 11 * 10**9, "prefill_s": 0.4, "decode_tok_s": 20.0}


def with_records(monkeypatch: pytest.MonkeyPatch, *records: Record) -> None:
    for module in (compare, watch):
        monkeypatch.setattr(module, "load_records", lambda: records)


def test_recorded_comparison_takes_the_right_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    old = record_of([row("gpu", 1), row("mapped", 2)])
    new = record_of([row("gpu", 3, **SPEED), row("mapped", 4, **SLOW), row("cpu", 5, **SPEED)])
    memory_alone = record_of([row("gpu", 6), row("mapped", 7)])
    without_gpu = record_of([row("gpu", 8), row("mapped", 9)], gpu=None)
    tiny = record_of([row("gpu", 10), row("mapped", 11)], scale="tiny")
    compiled = {"compiled": True, "decode_tok_s": 80.0}
    failed = record_of([row("gpu", 12) | {"status": "failed"}, row("gpu", 13) | compiled])
    with_records(monkeypatch, old, new, memory_alone, without_gpu, tiny, failed)
    found = compare.recorded("bf16")
    assert [(seen.label, seen.measured) for seen in found] == [
        ("gemma-4-E4B, before", 3),
        ("gemma-4-E4B, after", 4),
    ]
    assert found[0].predicted.home == "gpu"
    assert found[1].predicted.home == "mapped"
    assert found[0].source.startswith("recorded: GPU X, ")
    assert compare.recorded("nf4") == []
    lines = compare.costs("gemma-4-E4B").splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["gpu", "mapped", "cpu"]
    assert " ".join(lines[2].split()) == "gpu 3 B 11.00 GB 0.400 1.00 20.0 1.00 80.0 1.00"
    assert lines[3].split()[-4:] == ["0.500", "1.25", "10.0", "0.50"]


def test_a_model_with_half_a_pair_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with_records(monkeypatch, record_of([row("gpu", 3)]))
    assert compare.recorded() == []
    assert "No speeds of gemma-4-E4B in bf16" in compare.costs("gemma-4-E4B")


MOVE = watch.Move(
    model="gemma-4-E4B",
    home="mapped",
    table_bytes=5,
    resident=(15, 10),
    readings={
        moment: {"allocated": 10, "reserved": 12, "device_used": 15} for moment in watch.MOMENTS
    },
    timeline=(Sample(0.0, 0, 0, 1), Sample(1.5, 15, 16, 2, "prompt read"), Sample(2.0, 10, 12, 7)),
)


def test_moves_survive_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = {"gpu": "GPU X", "gpu_bytes": 1, "cpu": "c", "cpu_count": 1, "ram_bytes": 1}
    record = new_record("move", command="c", hardware=hardware, arguments={}, rows=[MOVE.to_row()])
    write_record(tmp_path / "move.json", record)
    with_records(monkeypatch, record_of([row("gpu", 1)]), read_record(tmp_path / "move.json"))
    ((move, source),) = watch.recorded_moves()
    assert move == MOVE
    assert source.startswith("recorded: GPU X, ")


def test_parts_add_up_to_what_nvidia_smi_shows() -> None:
    assert MOVE.parts("end") == {"allocated": 10, "cache": 2, "outside": 3}


def test_thinning_keeps_marks_ends_and_extremes() -> None:
    samples = [Sample(i / 1000, i % 7, 0, 0) for i in range(9000)]
    samples[4321] = Sample(4.321, 99, 0, 0)
    samples[5000] = Sample(5.0, 3, 0, 0, "mark")
    kept = watch._thinned(tuple(samples))
    assert kept[0] == samples[0]
    assert kept[-1] == samples[-1]
    assert samples[4321] in kept
    assert samples[5000] in kept
    assert len(kept) <= 2 * watch.STRETCHES + 5
    assert list(kept) == sorted(kept, key=lambda sample: sample.seconds)


@pytest.mark.parametrize("name", pleviz.SPECS)
def test_narrow_keeps_layers_and_vocabulary(name: str) -> None:
    spec = pleviz.SPECS[name]
    narrow = watch.narrow(spec)
    assert narrow.table_shape[0] == spec.table_shape[0]
    assert narrow.layer_types == spec.layer_types
    total = pleviz.budget(narrow).resident_bytes
    assert 0.8 < pleviz.budget(narrow).table_bytes / total < 1
    assert total < 250 * 10**6


def test_watching_a_move_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # A vocabulary of 2¹⁷ builds in a second. Its table of 63 MB is above the 32 MiB that malloc may
    # keep for itself after a long run of other tests, so freeing it must show in the process' memory.
    wide = watch.narrow

    def smaller(spec: Any) -> Any:
        return dataclasses.replace(wide(spec), vocab_size=2**17, vocab_size_per_layer_input=2**17)

    monkeypatch.setattr(watch, "narrow", smaller)
    quiet()
    move = watch.watch_move("gemma-3n-E2B", device="cpu")
    assert move.home == "file"
    assert move.table_bytes == 2**17 * 30 * 8 * 2
    assert move.resident[0] - move.resident[1] == move.table_bytes
    marks = {sample.event: sample.rss for sample in move.timeline if sample.event}
    assert list(marks) == ["prompt read", "table moved", "read again"]
    fell = marks["prompt read"] - marks["table moved"]
    assert 0.7 * move.table_bytes < fell < 1.3 * move.table_bytes
    assert move.readings["after"] == {"allocated": 0, "reserved": 0, "device_used": None}


@pytest.mark.gpu
def test_watching_a_move_on_the_gpu() -> None:
    move = watch.watch_move("gemma-4-E2B", device="cuda")
    assert move.home == "mapped"
    marks = {sample.event: sample.allocated for sample in move.timeline if sample.event}
    assert abs(move.readings["before"]["allocated"] / move.resident[0] - 1) < 0.02
    assert abs(move.readings["after"]["allocated"] / move.resident[1] - 1) < 0.02
    assert 0.999 < (marks["prompt read"] - marks["table moved"]) / move.table_bytes < 1.05
    for moment in watch.MOMENTS:
        assert all(part >= 0 for part in move.parts(moment).values())


@pytest.mark.gpu
def test_live_comparison_on_the_gpu() -> None:
    before, after = compare.live(["gemma-4-E2B"], scale="real", device="cuda")
    assert abs(before.difference) < 0.005
    assert abs(after.difference) < 0.005
