"""Records as notebooks show them, and the live timing of lookups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pleviz import recorded, records
from pleviz.lookups import COUNTS, MID_SIZE, time_lookups
from pleviz.records import new_record, write_record

GPU = {"gpu": "NVIDIA H200", "driver": "570.1"}
VERSIONS = {"torch": "2.11.0"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without records."""
    (tmp_path / "records").mkdir()
    monkeypatch.setattr(records, "_own_records", lambda: tmp_path / "records")
    return tmp_path / "records"


def write(
    folder: Path, name: str, kind: str, day: int, rows: list[dict[str, Any]], **more: Any
) -> None:
    options = {"hardware": GPU, "arguments": {}} | more
    record = new_record(kind, command="x", versions=VERSIONS, rows=rows, **options)
    dated = records.from_dict(record.to_dict() | {"created": f"2026-01-{day:02}T00:00:00Z"})
    write_record(folder / f"{name}.json", dated)


def speed(model: str, home: str, tok_s: float, **more: Any) -> dict[str, Any]:
    row = {"model": model, "precision": "bf16", "home": home, "compiled": False, "status": "ok"}
    return row | {"decode_tok_s": tok_s} | more


def test_without_records_all_is_empty(folder: Path) -> None:
    assert recorded.speed_by_home() == ({}, "")
    assert recorded.lookups_by_home("gemma-4-E4B") == ([], "")
    assert recorded.attaching("gemma-4-E4B") == ("", "")
    assert recorded.long_parity() == ("", "")
    assert recorded.short_parity() == ("", "")
    assert recorded.compiled_decoding() == ("", "")
    assert recorded.prefill_changes({}) == ""


def test_speed_is_the_newest_of_each_model_at_real_shapes_on_a_gpu(folder: Path) -> None:
    real = {"arguments": {"scale": "real"}}
    e4b, e2b = "gemma-4-E4B", "gemma-4-E2B"
    write(folder, "a", "speed", 1, [speed(e4b, "gpu", 1.0), speed(e2b, "gpu", 2.0)], **real)
    write(folder, "b", "speed", 2, [speed(e4b, "gpu", 3.0), speed(e4b, "mapped", 4.0)], **real)
    write(folder, "c", "speed", 3, [speed(e4b, "gpu", 9.0)], arguments={"scale": "tiny"})
    write(folder, "d", "speed", 4, [speed(e4b, "gpu", 9.0)], hardware={"gpu": None}, **real)
    write(folder, "e", "vram", 5, [speed(e4b, "gpu", 9.0)], **real)
    compiled = speed(e4b, "gpu", 9.0, compiled=True)
    failed = speed(e2b, "gpu", 9.0, status="failed")
    write(folder, "f", "speed", 6, [compiled, failed, speed(e4b, "cpu", 9.0)], **real)
    views, source = recorded.speed_by_home()
    assert list(views) == [e4b, e2b]
    assert [(row["home"], row["decode_tok_s"]) for row in views[e4b]] == [
        ("gpu", 3.0),
        ("mapped", 4.0),
    ]
    assert [row["decode_tok_s"] for row in views[e2b]] == [2.0]
    dates = [part.split(", ")[3] for part in source.split("; ")]
    assert dates == ["2026-01-02", "2026-01-01"]
    assert recorded.speed_by_home("nf4") == ({}, "")


def test_prefill_is_compared_with_gpu_in_percent() -> None:
    rows = (
        speed("gemma-4-E4B", "gpu", 1.0, prefill_ratio_to_gpu=1.0),
        speed("gemma-4-E4B", "device_map", 1.0, prefill_ratio_to_gpu=2.6567),
        speed("gemma-4-E4B", "mapped", 1.0, prefill_ratio_to_gpu=0.9983),
        speed("gemma-4-E4B", "cpu", 1.0),
    )
    header, _, line = recorded.prefill_changes({"gemma-4-E4B": rows}).splitlines()
    assert header.split()[-3:] == ["mapped", "cpu", "device_map"]
    assert line.split() == ["gemma-4-E4B", "+0", "%", "+166", "%"]


def test_compiled_decoding_pairs_the_homes_of_one_record(folder: Path) -> None:
    def row(model: str, home: str, *tok_s: float, status: str = "ok") -> dict[str, Any]:
        decode = [{"batch": b, "tok_s": t} for b, t in zip((1, 64), tok_s, strict=True)]
        fields = {"decode": decode, "compiled": True, "status": status}
        return speed(model, home, tok_s[0]) | fields

    e4b, e2b = "gemma-4-E4B", "gemma-4-E2B"
    old = [row(e4b, "gpu", 1.0, 2.0), row(e4b, "mapped", 3.0, 4.0)]
    new = [row(e4b, "gpu", 200.0, 8000.0), row(e4b, "mapped", 199.0, 7900.0)]
    new += [row(e4b, "workaround", 9.0, 9.0, status="failed"), row(e2b, "gpu", 5.0, 6.0)]
    write(folder, "a", "speed", 1, old)
    write(folder, "b", "speed", 2, new)
    text, source = recorded.compiled_decoding()
    lines = [line.split() for line in text.splitlines()[2:]]
    assert lines == [
        ["gemma-4-E4B,", "batch", "1", "200", "199", "0.995"],
        ["gemma-4-E4B,", "batch", "64", "8,000", "7,900", "0.988"],
    ]
    assert "2026-01-02" in source
    assert "2026-01-01" not in source


def test_short_parity_shows_each_verdict(folder: Path) -> None:
    def row(home: str, verdict: str, precision: str = "bf16") -> dict[str, Any]:
        parity = {"parity": {"verdict": verdict}, "precision": precision}
        return speed("gemma-4-E4B", home, 1.0) | parity

    rows = [row("gpu", "reference"), row("cpu", "identical"), row("mapped", "different")]
    rows += [row("gpu", "reference", "nf4"), row("cpu", "vacuous", "nf4")]
    write(folder, "a", "speed", 1, rows)
    text, _ = recorded.short_parity()
    header, _, bf16, nf4 = text.splitlines()
    assert header.split() == ["against", "gpu", "mapped", "cpu"]
    assert bf16.split() == ["gemma-4-E4B,", "bf16", "different", "identical"]
    assert nf4.split() == ["gemma-4-E4B,", "nf4", "vacuous"]


def test_homes_in_detail(folder: Path) -> None:
    rows = [
        {"kind": "gather", "home": "mapped", "ids": 64, "seconds": 3e-5, "bytes": 1_376_256},
        {
            "kind": "attach",
            "home": "file",
            "attach_s": 0.291,
            "table_bytes": 5_637_144_576,
            "added_anonymous_bytes": -4096,
        },
    ]
    write(folder, "a", "homes", 1, rows, arguments={"model": "gemma-4-E4B"})
    write(folder, "b", "homes", 2, rows[:1], arguments={"model": "gemma-4-E2B"})
    lookups, source = recorded.lookups_by_home("gemma-4-E4B")
    assert [(x.way, x.tokens, x.seconds, x.moved_bytes) for x in lookups] == [
        ("mapped", 64, 3e-5, 1_376_256)
    ]
    assert source.startswith("NVIDIA H200, driver 570.1, torch 2.11.0, 2026-01-01")
    text, _ = recorded.attaching("gemma-4-E4B")
    assert text.splitlines()[-1].split() == ["file", "0.29", "s", "5.64", "GB", "0", "B"]
    assert recorded.attaching("gemma-4-E2B") == ("", "")


def test_long_parity_says_no_loudly(folder: Path) -> None:
    def row(model: str, home: str, **more: Any) -> dict[str, Any]:
        equal = {"tokens_equal": True, "checksums_equal": True}
        return {"model": model, "home": home, "tokens": 2287, "distinct_tokens": 321} | equal | more

    rows = [row("gemma-4-E4B", "gpu"), row("gemma-4-E4B", "file", checksums_equal=False)]
    rows += [row("gemma-3n-E2B", "gpu"), row("gemma-3n-E2B", "file")]
    write(folder, "a", "greedy", 1, rows)
    write(folder, "b", "greedy", 2, rows, hardware={"gpu": None})
    text, source = recorded.long_parity()
    first, second = text.splitlines()[2:]
    assert first.split() == ["gemma-3n-E2B", "file", "2,287", "321", "yes", "yes"]
    assert second.split() == ["gemma-4-E4B", "file", "2,287", "321", "yes", "NO"]
    assert "2026-01-01" in source


# --- live ------------------------------------------------------------------------------------


def test_lookups_on_the_cpu_are_timed_and_their_bytes_counted() -> None:
    found = time_lookups(width=256, device="cpu", rows=512, counts=(1, 8), repeats=1)
    assert [(x.way, x.tokens) for x in found] == [
        ("cpu", 1),
        ("device_map", 1),
        ("cpu", 8),
        ("device_map", 8),
    ]
    assert [x.moved_bytes for x in found] == [512, 512 * 512, 8 * 512, 512 * 512]
    assert all(0 < x.seconds < 10 for x in found)


@pytest.mark.gpu
def test_lookups_on_a_gpu_have_every_way_and_leave_nothing_registered() -> None:
    import gc

    from pleviz.homes import registered_bytes

    before = registered_bytes()
    found = time_lookups(width=1024, device="cuda", rows=4096, counts=(1, 64), repeats=2)
    assert {x.way for x in found} == {"mapped", "cpu", "workaround", "device_map"}
    gc.collect()
    torch.cuda.synchronize()
    assert registered_bytes() == before


def test_lookups_refuse_what_they_cannot_time() -> None:
    with pytest.raises(ValueError, match="on 'cuda' or 'cpu', not 'mps'"):
        time_lookups(width=8, device="mps")
    with pytest.raises(ValueError, match="must be at least 1"):
        time_lookups(width=8, device="cpu", rows=8, counts=(0,))
    assert set(COUNTS) == set(MID_SIZE) == {True, False}
