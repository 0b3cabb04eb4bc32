"""The measurement: rows in processes of their own, parity that can fail, records that only grow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pleviz.measure import MeasureError, Options, driver, measure, reference
from pleviz.measure.compiled import compile_decoder
from pleviz.measure.jobs import measure_row
from pleviz.measure.plan import Row, RowJob, row_of, with_ratios
from pleviz.measure.runner import UnavailableError, Worker, run_alone, without_paths
from pleviz.measure.timing import (
    EagerDecoder,
    cache_name,
    greedy,
    random_ids,
    time_decode,
    warm_up,
)
from pleviz.measure.workaround import apply_workaround
from pleviz.records import RecordError, read_record, write_record
from pleviz.table import find_table
from tests.tiny import KINDS, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_commit(monkeypatch) -> None:
    monkeypatch.setenv("PLEVIZ_COMMIT", "0123abc")  # a commit made while tests run must not matter


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ()}, "name a model.*gemma-4-E4B"),
        ({"models": ("gemma-9",)}, "unknown model 'gemma-9'.*gemma-3n-E2B"),
        ({"homes": ("gpu", "moon")}, "unknown home 'moon'.*workaround"),
        ({"precisions": ("int3",)}, "unknown precision 'int3'.*nf4"),
        ({"scale": "huge"}, "unknown scale"),
        ({"prefill": 0}, "prefill must be more than 0"),
        ({"decode": -1}, "decode must be more than 0"),
        ({"batches": (1, 0)}, "batch must be more than 0"),
        ({"batches": ()}, "at least one"),
        ({"compiled": True, "only_memory": True}, "ask for one"),
        ({"models": ("gemma-4-E2B", "gemma-4-E4B"), "checkpoint": "x"}, "one model"),
    ],
)
def test_impossible_options_say_what_is_possible(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**{"models": ("gemma-4-E4B",)} | changes)


def test_rows_come_by_model_and_precision_with_the_reference_first() -> None:
    options = Options(("gemma-4-E4B",), homes=("cpu", "gpu", "cpu"), precisions=("nf4", "bf16"))
    assert [(r.precision, r.home) for r in options.rows(options.models)] == [
        ("nf4", "gpu"),
        ("nf4", "cpu"),
        ("bf16", "gpu"),
        ("bf16", "cpu"),
    ]


def test_the_command_in_a_record_has_no_paths() -> None:
    options = Options((), checkpoint="/home/ada/secret/model", homes=("gpu",))
    assert "ada" not in options.command() and "--checkpoint CHECKPOINT" in options.command()


def test_ratios_are_to_the_gpu_row_of_the_same_kind() -> None:
    def row(home: str, precision: str, prefill: float, tok_s: float) -> dict[str, Any]:
        fields = Row("m", precision, home, False).fields()
        return fields | {"prefill_s": prefill, "decode": [{"batch": 64, "tok_s": tok_s}]}

    rows = with_ratios(
        (
            row("mapped", "bf16", 0.51, 99.0),
            row("gpu", "bf16", 0.5, 100.0),
            row("cpu", "nf4", 1.0, 1.0),
        )
    )
    assert rows[0]["prefill_ratio_to_gpu"] == 1.02
    assert rows[0]["decode"][0]["ratio_to_gpu"] == 0.99
    assert "prefill_ratio_to_gpu" not in rows[2] and "ratio_to_gpu" not in rows[2]["decode"][0]
    assert with_ratios(rows) == rows


# -- processes ---------------------------------------------------------------------------------------


def _target(job: str, emit: Any, turn: Any) -> Any:
    """Runs in a child, by name."""
    emit("partial", {"pid": os.getpid()})
    if job == "raise":
        raise ValueError("bad luck")
    if job == "unavailable":
        raise UnavailableError("no such thing here")
    if job == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "exit":
        os._exit(3)
    if job == "sleep":
        time.sleep(60)
    if job == "turn":
        emit("ready", None)
        turn()
        start = time.monotonic()
        time.sleep(0.2)
        return start, time.monotonic()
    return job.upper()


TARGET = "tests.test_measure:_target"


@pytest.mark.parametrize(
    ("job", "status", "reason"),
    [
        ("fine", "ok", None),
        ("raise", "failed", "ValueError: bad luck"),
        ("unavailable", "unavailable", "no such thing here"),
        ("killed", "failed", "the process was ended by SIGKILL (out of memory?)"),
        ("exit", "failed", "the process ended by itself, with exit code 3"),
    ],
)
def test_whatever_happens_in_a_process_is_an_outcome(job: str, status: str, reason: str) -> None:
    outcome = run_alone(TARGET, job, 60)
    assert (outcome.status, outcome.reason) == (status, reason)
    assert outcome.partial["pid"] != os.getpid()  # what it had told before is kept
    assert outcome.value == ("FINE" if job == "fine" else None)


def test_a_process_that_takes_too_long_is_given_up_and_gone() -> None:
    run_alone(TARGET, "fine", 60)  # the server runs now
    outcome = run_alone(TARGET, "sleep", 1.0)
    assert (outcome.status, outcome.reason) == ("failed", "gave up after 1 s")
    with pytest.raises(ProcessLookupError):
        os.kill(outcome.partial["pid"], 0)


def test_processes_that_wait_for_their_turn_take_it_one_at_a_time() -> None:
    workers = [Worker(TARGET, job, 60) for job in ("turn", "raise", "turn")]
    try:
        assert [worker.until_ready() for worker in workers] == [True, False, True]
        outcomes = [worker.result() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [outcome.status for outcome in outcomes] == ["ok", "failed", "ok"]
    (_, first_end), (second_start, _) = outcomes[0].value, outcomes[2].value
    assert first_end <= second_start


def test_error_texts_lose_their_paths() -> None:
    text = without_paths(
        "no file /home/ada/My-Models/x.safetensors or C:\\Users\\ada\\y.bin, 3/4 kept"
    )
    assert text == "no file …/x.safetensors or …/y.bin, 3/4 kept"
    assert len(without_paths("long " * 1000)) < 700


def test_the_server_of_processes_stays_clear_of_cuda_and_bitsandbytes() -> None:
    code = (
        "import sys, os, pleviz.measure; assert 'torch' not in sys.modules\n"
        "import pleviz.measure.preload, torch\n"
        "assert not torch.cuda.is_initialized() and 'bitsandbytes' not in sys.modules\n"
        "assert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'\n"
        "assert 'transformers.models.gemma4.modeling_gemma4' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the workaround, parity --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_workaround_computes_the_same_bits_and_can_be_undone(kind) -> None:
    model = tiny_model(kind, dtype=torch.bfloat16)
    ids = random_ids(model, 2, 12, CPU)
    before, weight = model(ids).logits, find_table(model).weight
    values = weight.detach().clone()
    undo = apply_workaround(model)
    assert torch.equal(model(ids).logits, before)
    weight.data[ids] = 0  # what was patched in reads the table, and is what is used
    assert not torch.equal(model(ids).logits, before)
    weight.data.copy_(values)
    undo()
    assert torch.equal(model(ids).logits, before)
    assert "forward" not in find_table(model).module.__dict__
    assert find_table(model).weight is weight


def _wrong_scale(model) -> None:
    find_table(model).module.embed_scale.mul_(1.01)


def _through_fp16(model) -> None:
    table = find_table(model).weight
    table.data = table.data.to(torch.float16).to(torch.float32)


def _one_row_of_another_token(model) -> None:
    table = find_table(model).weight
    table.data[int(random_ids(model, 1, 48, CPU)[0, 20])] = table.data[5]


def _one_ulp_in_one_weight(model) -> None:
    bits = model.model.layers[1].mlp.gate_proj.weight.data.view(torch.int16)
    bits[0] += 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("damage", "verdict"),
    [
        (None, "identical"),
        (apply_workaround, "identical"),
        (_wrong_scale, "different"),
        (_through_fp16, "different"),
        (_one_row_of_another_token, "different"),
        (_one_ulp_in_one_weight, "different"),
        (lambda m: m.model.norm.weight.data[:1].fill_(float("nan")), "non-finite"),
    ],
)
def test_parity_of_a_row_can_fail(tmp_path: Path, kind, damage, verdict: str) -> None:
    # fp16 holds almost all bfloat16 numbers of this size: only in float32 the loss is sure to show
    dtype = torch.float32 if damage is _through_fp16 else torch.bfloat16
    model = tiny_model(kind, dtype=dtype)
    reference.save(tmp_path / "r.safetensors", model, CPU)
    if damage is not None:
        damage(model)
    parity = reference.compare(tmp_path / "r.safetensors", model, CPU)
    assert parity["verdict"] == verdict
    assert (parity["max_ulp"] == 0) == (verdict == "identical") or verdict == "non-finite"
    assert parity["logits_equal"] == (verdict == "identical")


def test_n1_parity_is_vacuous_where_the_table_does_nothing(tmp_path: Path) -> None:
    model = tiny_model("gemma3n")
    for layer in model.model.layers:  # transformers' own initial value
        layer.altup.correct_output_scale.data.zero_()
    reference.save(tmp_path / "r.safetensors", model, CPU)
    assert reference.compare(tmp_path / "r.safetensors", model, CPU)["verdict"] == "vacuous"


# -- timing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_decoders_choose_the_likeliest_token_of_the_table(kind, compiled: bool) -> None:
    # more ids than rows, as in the real Gemma 3n; an id without a row must never be chosen
    model = tiny_model(kind, vocab_size=160)
    ids = random_ids(model, 2, 10, CPU)
    if compiled:
        made = compile_decoder(model, ids, 32, backend="eager")
        decoder, chosen = made.decoder, made.tokens
        assert (made.fullgraph, made.graphs) == (True, 1)
    else:
        decoder = EagerDecoder(model, ids)
        chosen = decoder.tokens.tolist()
    for _ in range(3):
        decoder.step()
        chosen = [row + new for row, new in zip(chosen, decoder.tokens.tolist(), strict=True)]

    whole = ids
    with torch.no_grad():
        for _ in chosen[0]:
            next_ids = greedy(model(input_ids=whole, use_cache=False).logits, rows=128)
            whole = torch.cat([whole, next_ids], dim=1)
    assert chosen == whole[:, 10:].tolist()
    assert whole.max() < 128


def test_another_batch_size_compiles_one_graph_of_fixed_sizes() -> None:
    model = tiny_model("gemma4")
    torch._dynamo.reset()
    for batch in (1, 3):
        made = compile_decoder(model, random_ids(model, batch, 6, CPU), 20, backend="eager")
        assert made.graphs == 1  # no second one for "batch can change", nor for a counted length


def test_the_caches_keyword_is_the_versions_own() -> None:
    model = tiny_model("gemma4")
    outputs = model(random_ids(model, 1, 4, CPU), use_cache=True)
    assert getattr(outputs, cache_name(model)) is not None


class _Slow:
    tokens = torch.zeros(2, 1)

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps = seconds, 0

    def step(self) -> None:
        self.steps += 1
        time.sleep(self.seconds)


def test_slow_decoding_is_timed_with_fewer_steps() -> None:
    slow = _Slow(0.02)
    timed = time_decode(slow, CPU, steps=300, seconds=0.001)
    assert (timed.steps, slow.steps) == (1, 2 + 3)
    assert 50 < timed.tok_s <= 100  # two sequences, 20 ms a step
    assert timed.tok_s == sorted(timed.segments_tok_s)[1]
    assert time_decode(_Slow(0.001), CPU, steps=7, seconds=9).steps == 3


def test_warm_up_is_cut_short_where_steps_are_slow() -> None:
    slow, fast = _Slow(0.6), _Slow(0)
    warm_up(slow, CPU)
    warm_up(fast, CPU)
    assert (slow.steps, fast.steps) == (2, 6)


# -- whole measurements ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("private") / "checkpoint"
    # multiples of 64: bitsandbytes' CPU kernels need whole blocks
    widths = {"hidden_size": 64, "hidden_size_per_layer_input": 64, "head_dim": 16}
    model = tiny_model(
        "gemma4", dtype=torch.bfloat16, global_head_dim=16, sliding_window=128, **widths
    )
    model.save_pretrained(folder)
    return str(folder)


TABLE = 128 * 4 * 64 * 2  # bytes


def options(checkpoint: str, **changes: Any) -> Options:
    tiny = {"prefill": 24, "decode": 3, "batches": (1, 2), "segment_seconds": 0.05, "device": "cpu"}
    return Options((), **{"checkpoint": checkpoint} | tiny | changes)


@pytest.fixture(scope="module")
def measured(checkpoint, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("out") / "record.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLEVIZ_COMMIT", "0123abc")
        measure(options(checkpoint), out)
    return out


def test_every_home_has_a_row(measured: Path) -> None:
    record = read_record(measured)
    status = {row["home"]: (row["status"], row.get("reason", "")) for row in record.rows}
    assert [home for home, (word, _) in status.items() if word == "ok"] == ["gpu", "cpu", "file"]
    assert "CUDA is not available" in status["mapped"][1]
    for home in ("device_map", "workaround"):
        assert status[home][0] == "unavailable" and "no accelerator" in status[home][1]


def test_a_row_says_what_was_measured(measured: Path) -> None:
    record = read_record(measured)
    assert (record.kind, record.commit, record.hardware["gpu"]) == ("speed", "0123abc", None)
    assert record.arguments["prefill_tokens"] == 24 and record.link_bytes_per_s is None
    for row in record.select(status="ok"):
        assert row["memory_source"] == "cpu" and row["host_rss_bytes"] == row["resident_bytes"]
        assert row["peak_prefill_bytes"] >= row["resident_bytes"] > 0
        assert row["load_peak_bytes"] > 0 and row["load_s"] > 0 and row["prefill_s"] > 0
        assert len(row["prefill_times_s"]) >= 3
        assert [entry["batch"] for entry in row["decode"]] == [1, 2]
        assert all(len(entry["segments_tok_s"]) == 3 for entry in row["decode"])
        assert row["decode_tok_s"] == row["decode"][0]["tok_s"]
        assert row["prefill_ratio_to_gpu"] > 0 and row["decode"][1]["ratio_to_gpu"] > 0
    verdicts = {row["home"]: row["parity"]["verdict"] for row in record.select(status="ok")}
    assert verdicts == {"gpu": "reference", "cpu": "identical", "file": "identical"}
    gpu, cpu = record.select(home="gpu")[0], record.select(home="cpu")[0]
    assert gpu["predicted_peak_prefill_bytes"] > gpu["predicted_resident_bytes"]
    assert gpu["predicted_resident_bytes"] - cpu["predicted_resident_bytes"] == TABLE


def test_a_record_does_not_tell_where_the_checkpoint_was(measured: Path, checkpoint: str) -> None:
    text = measured.read_text()
    assert "private" not in text and str(measured.parent) not in text
    assert read_record(measured).rows[0]["model"] == "gemma4_text"


def test_resuming_measures_only_what_is_missing(measured, checkpoint, tmp_path: Path) -> None:
    whole = read_record(measured)
    out = tmp_path / "again.json"
    kept = [dict(row) for row in whole.rows if row["home"] != "file"]
    failed = next(row for row in kept if row["home"] == "cpu")
    failed |= {"status": "failed", "reason": "planted"}
    write_record(out, whole.with_rows(kept))

    new: list[str] = []
    record = measure(options(checkpoint), out, on_row=lambda row: new.append(row["home"]))
    assert new == ["cpu", "file"]  # the failed one, and the one that was not there
    for home in ("cpu", "file"):  # the gpu row was not run, so its reference was computed again
        row = record.select(home=home)[0]
        assert row["status"] == "ok" and row["parity"]["verdict"] == "identical"
        assert "reason" not in row
    assert record.select(home="gpu") == whole.select(home="gpu")
    assert len(record.rows) == 6 and read_record(out) == record
    assert measure(options(checkpoint), out) == record  # nothing left to do


def test_a_killed_row_is_recorded_and_the_next_one_runs(checkpoint, tmp_path, monkeypatch) -> None:
    def killing(target: str, job: Any, seconds: float) -> Any:
        if isinstance(job, RowJob) and job.row.home == "gpu":
            return run_alone(TARGET, "killed", seconds)
        return run_alone(target, job, seconds)

    monkeypatch.setattr(driver, "run_alone", killing)
    record = measure(options(checkpoint, homes=("gpu", "cpu"), batches=(1,)), tmp_path / "r.json")
    gpu, cpu = record.rows
    assert gpu["status"] == "failed" and "SIGKILL" in gpu["reason"]
    assert cpu["status"] == "ok" and cpu["decode_tok_s"] > 0


def test_an_interrupted_measurement_keeps_its_rows(checkpoint, tmp_path: Path) -> None:
    def interrupt(_row: Any) -> None:
        raise KeyboardInterrupt

    out, short = tmp_path / "r.json", options(checkpoint, homes=("gpu", "cpu"), only_memory=True)
    with pytest.raises(KeyboardInterrupt):
        measure(short, out, on_row=interrupt)
    assert [row["home"] for row in read_record(out).rows] == ["gpu"]
    first = read_record(out).rows[0]
    record = measure(short, out)
    assert [row["home"] for row in record.rows] == ["gpu", "cpu"] and record.rows[0] == first
    assert "parity" not in first and "prefill_s" not in first  # memory alone was asked for


def test_rows_that_take_too_long_or_cannot_load_are_failed_rows(checkpoint, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(checkpoint).iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[:-999] if file.suffix == ".safetensors" else data)
    short = options(str(broken), homes=("gpu", "cpu"), only_memory=True)
    record = measure(short, tmp_path / "a.json")
    assert [row["status"] for row in record.rows] == ["failed", "failed"]
    assert (
        "Safetensor" in record.rows[0]["reason"] and str(tmp_path) not in record.rows[0]["reason"]
    )
    slow = options(checkpoint, homes=("gpu",), only_memory=True, row_timeout=0.001)
    record = measure(slow, tmp_path / "b.json")
    assert record.rows[0]["reason"] == "gave up after 0.001 s"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": 25}, "prefill_tokens: 24 there, 25 now"),
        ({"compiled": True}, "mode: 'eager' there, 'compiled' now"),
        ({"only_memory": True}, "kind: 'speed' there, 'vram' now"),
    ],
)
def test_a_record_of_other_conditions_is_left_alone(
    measured, checkpoint, changes: dict[str, Any], message: str
) -> None:
    before = measured.read_bytes()
    with pytest.raises(MeasureError, match=message):
        measure(options(checkpoint, **changes), measured)
    assert measured.read_bytes() == before


def test_another_version_or_commit_is_another_record(measured, checkpoint, monkeypatch) -> None:
    monkeypatch.setenv("PLEVIZ_COMMIT", "4567def")
    with pytest.raises(MeasureError, match="0123abc.*4567def"):
        measure(options(checkpoint), measured)


def test_what_cannot_begin_says_why(checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    with pytest.raises(MeasureError, match="no folder"):
        measure(options(checkpoint), tmp_path / "nowhere" / "r.json")
    with pytest.raises(MeasureError, match="no device 'cuda:77'"):
        measure(options(checkpoint, device="cuda:77"), out)
    with pytest.raises(MeasureError, match="cannot read the checkpoint"):
        measure(options(str(tmp_path)), out)
    with pytest.raises(MeasureError, match="is gemma4_text, not gemma-4-E4B"):
        named = options(checkpoint)
        measure(Options(("gemma-4-E4B",), checkpoint=checkpoint, device=named.device), out)
    assert not out.exists()
    out.write_text("{")
    with pytest.raises(RecordError, match="not JSON"):
        measure(options(checkpoint), out)


def test_checkpoints_of_random_weights_are_made_once_and_kept_on_request(tmp_path: Path) -> None:
    wanted = Options(
        ("gemma-3n-E2B",), homes=("gpu",), only_memory=True, scale="tiny", device="cpu"
    )
    measure(wanted, tmp_path / "a.json", keep=tmp_path / "kept")
    folder = tmp_path / "kept" / "gemma-3n-E2B-tiny"
    made = (folder / "model.safetensors").stat().st_mtime_ns
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "gemma3n_text" and config["dtype"] == "bfloat16"
    measure(wanted, tmp_path / "b.json", keep=tmp_path / "kept")
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_no_room_for_a_checkpoint_fails_its_rows_at_once(tmp_path, monkeypatch) -> None:
    usage = type("Usage", (), {"free": 10**9})
    monkeypatch.setattr(driver.shutil, "disk_usage", lambda _path: usage)
    wanted = Options(("gemma-4-E4B",), homes=("gpu", "cpu"), device="cpu")
    record = measure(wanted, tmp_path / "a.json")
    assert [row["status"] for row in record.rows] == ["failed", "failed"]
    assert "takes 14.93 GB and the disk has 1.00 GB free" in record.rows[0]["reason"]


def test_nf4_rows_are_measured_too(checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    wanted = options(checkpoint, homes=("gpu", "cpu"), precisions=("nf4",), batches=(1,))
    record = measure(wanted, tmp_path / "r.json")
    assert [row["status"] for row in record.rows] == ["ok", "ok"], record.rows
    assert record.rows[1]["parity"]["verdict"] == "identical"


def test_compiled_rows_compile_together_and_are_compared(checkpoint, tmp_path: Path) -> None:
    wanted = options(
        checkpoint,
        homes=("gpu", "cpu", "device_map"),
        batches=(2,),
        compiled=True,
        compile_backend="eager",
    )
    record = measure(wanted, tmp_path / "r.json")
    assert record.arguments["mode"] == "compiled"
    gpu, cpu, device_map = record.rows
    for row in (gpu, cpu):
        (entry,) = row["decode"]
        assert row["status"] == "ok" and row["compile_s"] > 0 and "load_s" not in row
        assert entry["fullgraph"] and entry["graphs"] == 1 and entry["recompiled_while_timed"] == 0
        assert entry["greedy_equal_to_gpu"] is True and entry["ratio_to_gpu"] > 0
    assert device_map["status"] == "unavailable" and "hooks" in device_map["reason"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "nf4"])
def test_gpu_every_home_has_the_reference_bits(checkpoint, tmp_path: Path, precision: str) -> None:
    if precision == "nf4":
        pytest.importorskip("bitsandbytes")
    wanted = options(checkpoint, precisions=(precision,), device="cuda")
    record = measure(wanted, tmp_path / "r.json")
    assert record.hardware["gpu"] and record.link_bytes_per_s > 1e9
    verdicts = {row["home"]: row.get("parity", {}).get("verdict", row) for row in record.rows}
    assert verdicts.pop("gpu") == "reference"
    assert set(verdicts.values()) == {"identical"}, verdicts
    resident = {row["home"]: row["resident_bytes"] for row in record.rows}
    assert resident["mapped"] < resident["gpu"]
    assert record.select(home="mapped")[0]["registered_bytes"] >= TABLE
    assert all(row["memory_source"] == "cuda" for row in record.rows)


@pytest.mark.gpu
def test_gpu_compiled_decoding_replays_one_graph(checkpoint, tmp_path: Path) -> None:
    homes = ("gpu", "mapped", "workaround")
    wanted = options(checkpoint, homes=homes, compiled=True, device="cuda", batches=(1, 2))
    record = measure(wanted, tmp_path / "r.json")
    assert [row["status"] for row in record.rows] == ["ok"] * 3, record.rows
    for row in record.rows[:2]:
        for entry in row["decode"]:
            assert entry["graphs"] == 1 and entry["recompiled_while_timed"] == 0
            assert entry["cudagraph_skips"] == 0 and entry["greedy_equal_to_gpu"]


def test_a_row_in_this_process(checkpoint: str) -> None:
    told: dict[str, Any] = {}
    job = RowJob(Row("m", "bf16", "gpu", False), checkpoint, "cpu", options(checkpoint))
    measure_row(job, lambda _kind, value: told.update(value), lambda: None)
    assert told["parity"]["verdict"] == "not compared"  # no reference was asked for
    assert {"resident_bytes", "prefill_s", "decode_tok_s"} <= told.keys()
    assert row_of({"compiled": False, "model": "m", "precision": "bf16", "home": "gpu"}) == job.row
