"""Records: whole files only, clear errors, provenance without private facts."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pleviz import records
from pleviz.records import Record, RecordError, load_records, new_record, read_record, write_record

HARDWARE = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cpu": "Some CPU",
    "cpu_count": 2,
    "ram_bytes": 8,
}
ROW = {"model": "gemma-4-E4B", "home": "gpu", "resident_bytes": 14_926_029_912, "prefill_s": 0.373}


def make(**changes: object) -> Record:
    fields = {
        "command": "pleviz measure --model gemma-4-E4B",
        "hardware": HARDWARE,
        "arguments": {"prefill_tokens": 8500},
        "rows": [ROW],
    }
    return new_record(changes.pop("kind", "speed"), **fields | changes)


def test_round_trip(tmp_path: Path) -> None:
    record = make(method={"prefill_s": "median"}, link_bytes_per_s=55.1e9)
    write_record(tmp_path / "a.json", record)
    assert read_record(tmp_path / "a.json") == record
    assert record.rows[0]["resident_bytes"] == 14_926_029_912  # bytes stay exact integers


def test_lists_of_numbers_stay_on_one_line_and_strings_unharmed(tmp_path: Path) -> None:
    tricky = 'a "quoted" [1,\n 2] {3}\\'
    record = make(
        rows=[ROW | {"times_s": [1.5, 2.5], "note": tricky, "sub": [{"tok_s": [1.0]}, []]}]
    )
    write_record(tmp_path / "a.json", record)
    assert '"times_s": [1.5, 2.5]' in (tmp_path / "a.json").read_text()
    assert read_record(tmp_path / "a.json") == record


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.json"
    write_record(path, make())
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_record(path, make(kind="vram"))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_record(path, make())
    code = (
        "import sys; from pleviz.records import *\n"
        f"r = read_record({str(path)!r}); print('go', flush=True)\n"
        f"while True: write_record({str(path)!r}, r.with_rows([dict(r.rows[0])] * 500))\n"
    )
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"go\n"
        writer.kill()
        writer.wait()
        writer.stdout.close()
        assert len(read_record(path).rows) in (1, 500)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1, "kind"', "not JSON"),
        ("[1, 2]", "not a pleviz record"),
        ('{"kind": "speed"}', "not a pleviz record"),
        ('{"schema": 99, "anything": "else"}', "newer pleviz"),
        ('{"schema": 1, "kind": "speed"}', "missing: .*hardware"),
    ],
)
def test_malformed_files_are_named_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(RecordError, match=message) as caught:
        load_records(tmp_path)
    assert "odd.json" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rows", {"model": 1}, "'rows' must be a list"),
        ("rows", [3], "row 0 must be a mapping"),
        ("rows", [{"resident_bytes": 1.5}], "resident_bytes"),
        ("rows", [{"resident_bytes": "9 GB"}], "resident_bytes"),
        ("rows", [{"decode": [{"tok_s": "fast"}]}], "tok_s"),
        ("rows", [{"prefill_s": True}], "prefill_s"),
        ("created", "yesterday", "created"),
        ("schema", 0, "schema"),
        ("schema", "1", "schema"),
        ("dirty", "no", "dirty"),
        ("hardware", [], "hardware"),
        ("colour", "blue", "unknown: colour"),
    ],
)
def test_wrong_fields_are_refused(tmp_path: Path, field: str, value: object, message: str) -> None:
    data = make().to_dict() | {field: value}
    (tmp_path / "odd.json").write_text(json.dumps(data))
    with pytest.raises(RecordError, match=message):
        read_record(tmp_path / "odd.json")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_must_be_finite(number: float) -> None:
    with pytest.raises(RecordError, match="finite"):
        make(rows=[{"prefill_s": number}])


def test_load_records_sorts_by_date_and_takes_a_file_too(tmp_path: Path) -> None:
    import dataclasses

    for name, day in (("a", "2026-03-02"), ("b", "2026-03-01")):
        record = dataclasses.replace(make(), created=f"{day}T00:00:00Z")
        write_record(tmp_path / f"{name}.json", record)
    assert [r.created[:10] for r in load_records(tmp_path)] == ["2026-03-01", "2026-03-02"]
    assert len(load_records(tmp_path / "a.json")) == 1
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_records(tmp_path / "nowhere")


def test_the_repositorys_own_records_are_valid() -> None:
    for record in load_records():
        assert record.rows


def test_commit_from_git_or_environment(monkeypatch) -> None:
    monkeypatch.setenv("PLEVIZ_COMMIT", "0123abc")
    assert records.git_commit() == ("0123abc", False)
    monkeypatch.setenv("PLEVIZ_COMMIT", "0123abc-dirty")
    assert records.git_commit() == ("0123abc", True)
    monkeypatch.delenv("PLEVIZ_COMMIT")
    commit, _ = records.git_commit()
    assert commit is None or len(commit) == 40


def test_another_projects_repository_is_not_ours(tmp_path: Path, monkeypatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "site-packages").mkdir()
    monkeypatch.delenv("PLEVIZ_COMMIT", raising=False)
    monkeypatch.setattr(records, "_ROOT", tmp_path / "site-packages")
    assert records.git_commit() == (None, False)


def test_nothing_private_is_recorded(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", make())
    text = (tmp_path / "a.json").read_text()
    private = [socket.gethostname(), str(Path.home()), str(tmp_path), str(Path.cwd())]
    user = getpass.getuser()
    for word in (*private, user):
        assert not re.search(rf"\b{re.escape(word)}\b", text) or len(word) < 2, word


def test_provenance_names_machine_versions_date_and_commit(monkeypatch) -> None:
    monkeypatch.setenv("PLEVIZ_COMMIT", "0123456789abcdef-dirty")
    line = make(versions={"torch": "2.11", "transformers": "5.17", "bitsandbytes": None}).provenance
    assert line.startswith("NVIDIA H200, driver 580.1, torch 2.11, transformers 5.17, 20")
    assert line.endswith("pleviz 0123456789 with local changes")
    assert "CPU only (Some CPU)" in make(hardware=HARDWARE | {"gpu": None}).provenance


def test_select_and_views() -> None:
    record = make(rows=[ROW, ROW | {"home": "mapped", "nested": {"a": 1}}])
    assert record.select(home="mapped", model="gemma-4-E4B") == (record.rows[1],)
    assert record.select(home="nowhere") == ()
    assert "14.93 GB" in str(record) and "nested" not in str(record)
    assert "<table>" in record._repr_html_() and record.provenance in str(record)
