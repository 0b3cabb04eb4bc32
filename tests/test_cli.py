"""The command line: exact JSON, one clear line for a user's mistake, the headline."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pleviz
from pleviz.cli import app
from pleviz.headline import headline
from pleviz.records import Record, new_record, read_record, write_record

run = CliRunner().invoke


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pleviz", *arguments], capture_output=True, text=True, timeout=200
    )


def test_budget_as_json_has_the_exact_bytes() -> None:
    done = python("budget", "gemma-4-E4B", "--home", "mapped", "--json")
    assert done.returncode == 0, done.stderr
    budget = json.loads(done.stdout)
    assert budget["table_bytes"] == 5_637_144_576 and budget["row_bytes"] == 21_504
    assert budget["host_components"] == {"ple_table": 5_637_144_576}
    assert budget == json.loads(pleviz.budget("gemma-4-E4B", home="mapped").to_json())


def test_budget_options_reach_the_budget() -> None:
    words = "budget gemma-3n-E2B --precision nf4 --context 4096 --batch 3 --json"
    told = json.loads(run(app, words.split()).stdout)
    expected = pleviz.budget("gemma-3n-E2B", precision="nf4", context=4096, batch=3)
    assert told == json.loads(expected.to_json()) and told["kv_cache_bytes"] > 0
    assert "5.64 GB" in run(app, ["budget", "gemma-4-E4B"]).stdout
    towers = json.loads(run(app, ["budget", "gemma-4-E2B", "--towers", "--json"]).stdout)
    assert towers == json.loads(pleviz.budget("gemma-4-E2B", towers=True).to_json())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("budget gemma-5", "gemma-5.*gemma-4-E4B"),
        ("budget gemma-4-E4B --home moon", "moon.*mapped"),
        ("budget gemma-4-E4B --precision int3", "int3.*nf4"),
        ("measure --model gemma-5 --out x.json", "unknown model 'gemma-5'.*gemma-4-E2B"),
        ("measure --out x.json", "name a model to measure"),
        ("measure --model gemma-4-E2B --homes moon --out x.json", "unknown home 'moon'"),
        ("measure --model gemma-4-E2B --batch 1,two --out x.json", "whole number, not 'two'"),
        ("measure --model gemma-4-E2B --out /nowhere/x.json", "no folder /nowhere"),
        ("headline --records /nowhere", "no records at /nowhere"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(words: str, message: str) -> None:
    import re

    result = run(app, words.split())
    assert result.exit_code == 2
    assert re.fullmatch(f"pleviz: .*{message}.*\n", result.stderr), result.stderr
    assert result.stdout == "" and isinstance(result.exception, SystemExit)


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{")
    result = run(app, ["headline", "--records", str(tmp_path)])
    assert result.exit_code == 2 and "odd.json is not JSON" in result.stderr


def test_help_and_budget_load_no_heavy_library() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from pleviz.cli import app\n"
        "for words in (['--help'], ['measure', '--help'], ['specs'], ['budget', 'gemma-4-E2B'],"
        " ['headline']): assert CliRunner().invoke(app, words).exit_code == 0, words\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'plotly', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_specs_and_version() -> None:
    listed = run(app, ["specs"]).stdout
    assert all(name in listed for name in pleviz.SPECS)
    assert "262,144 × 10,752" in listed and "7.46 B" in listed
    assert run(app, ["--version"]).stdout == f"pleviz {pleviz.__version__}\n"


def test_measure_from_a_shell_and_again(tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    words = (
        "measure --model gemma-4-E2B --homes gpu,cpu,mapped --scale tiny --device cpu --prefill 16 "
        f"--decode 3 --segment-seconds 0.05 --out {out}"
    ).split()
    done = python(*words)
    assert done.returncode == 0, done.stderr
    record = read_record(out)
    assert [row["home"] for row in record.rows] == ["gpu", "cpu", "mapped"]
    assert record.rows[1]["parity"]["verdict"] == "identical"
    assert "identical" in done.stdout and record.provenance in done.stdout
    assert "mapped: CUDA is not available" in done.stdout
    assert "gemma-4-E2B bf16 cpu: status ok" in done.stderr  # told as soon as it was known
    started = time.monotonic()
    again = python(*words)
    assert again.returncode == 0 and read_record(out) == record
    assert time.monotonic() - started < 100
    other = python(*words[:-2], "--only-memory", "--out", str(out))
    assert other.returncode == 2 and "other conditions" in other.stderr
    assert "Traceback" not in other.stderr


def test_a_failed_row_gives_exit_code_1(tmp_path: Path) -> None:
    words = "measure --model gemma-4-E2B --homes gpu --scale tiny --device cpu --only-memory"
    limits = ["--row-timeout", "0.001", "--out", str(tmp_path / "a.json")]
    result = run(app, words.split() + limits)
    assert result.exit_code == 1
    assert "gave up after 0.001 s" in result.stdout


# -- headline ----------------------------------------------------------------------------------------

H200 = {"gpu": "NVIDIA H200", "driver": "580.1", "cpu": "c", "cpu_count": 16, "ram_bytes": 1}


def row(home: str, resident: int, peak: int | None = None, **changes: object) -> dict[str, object]:
    fields = {"model": "gemma-4-E4B", "precision": "bf16", "home": home, "compiled": False}
    fields |= {"status": "ok", "resident_bytes": resident}
    return fields | ({} if peak is None else {"peak_prefill_bytes": peak}) | changes


def record(kind: str, rows: list[dict[str, object]], day: str = "2026-05-01", **changes) -> Record:
    import dataclasses

    fields = {"hardware": H200, "arguments": {"scale": "real", "prefill_tokens": 8500}}
    made = new_record(kind, command="c", rows=rows, **fields | changes)
    return dataclasses.replace(made, created=f"{day}T00:00:00Z", commit="abc", dirty=False)


MEASURED = [
    row("gpu", 14_930_000_000, 16_430_000_000),
    row("mapped", 9_290_000_000, 10_790_000_000),
]


def test_headline_without_records_is_a_prediction_and_says_so(tmp_path: Path) -> None:
    text = headline(tmp_path)
    assert "PREDICTED" in text and "no measurement on a GPU" in text
    for name in pleviz.SPECS:
        assert name in text
    assert "14.93 GB" in text and "9.29 GB" in text and "5.64 GB" in text


def test_headline_of_a_record(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", record("speed", MEASURED))
    text = headline(tmp_path)
    assert "PREDICTED" not in text
    line = next(line for line in text.splitlines() if line.startswith("gemma-4-E4B"))
    expected = "gemma-4-E4B bf16 14.93 GB 9.29 GB 5.64 GB 0.62 16.43 GB 10.79 GB"
    assert " ".join(line.split()) == expected
    assert "prefill of 8,500 tokens" in text and "random weights" in text
    assert "Measured on NVIDIA H200, driver 580.1" in text and "2026-05-01" in text
    markdown = run(app, ["headline", "--markdown", "--records", str(tmp_path)]).stdout
    assert "| gemma-4-E4B | bf16 | 14.93 GB | 9.29 GB | 5.64 GB | 0.62 |" in markdown
    assert "| --- | --- | ---: |" in markdown


@pytest.mark.parametrize(
    "unfit",
    [
        {"hardware": H200 | {"gpu": None}},
        {"arguments": {"scale": "tiny"}},
        {"rows": [row("gpu", 1, compiled=True), row("mapped", 1, compiled=True)]},
        {"rows": [row("gpu", 1), row("mapped", 1, status="failed")]},
        {"rows": [row("gpu", 1), row("cpu", 1)]},
        {"rows": [{"home": "gpu", "what": "another kind of row"}]},
    ],
)
def test_headline_takes_only_eager_gpu_pairs_at_real_shapes(tmp_path: Path, unfit: dict) -> None:
    write_record(tmp_path / "a.json", record("speed", unfit.pop("rows", MEASURED), **unfit))
    assert "PREDICTED" in headline(tmp_path)


def test_headline_takes_the_newest_but_prefers_rows_with_peaks(tmp_path: Path) -> None:
    newer = [
        row("gpu", 15_000_000_000, 17_000_000_000),
        row("mapped", 9_000_000_000, 10_000_000_000),
    ]
    write_record(tmp_path / "a.json", record("speed", newer, day="2026-06-01"))
    write_record(tmp_path / "b.json", record("speed", MEASURED, day="2026-05-01"))
    memory = [row("gpu", 14_000_000_000), row("mapped", 8_000_000_000)]
    write_record(tmp_path / "c.json", record("vram", memory, day="2026-07-01"))
    text = headline(tmp_path)
    assert "15.00 GB" in text and "14.00 GB" not in text and "14.93 GB" not in text
    assert text.count("Measured on") == 1 and "2026-06-01" in text
