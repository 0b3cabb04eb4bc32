"""The homes in detail, as records: speed in turns, attaching, gathering, profiles, long parity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pleviz.measure.driver import MeasureError, rounded
from pleviz.measure.loading import load_row
from pleviz.measure.plan import Machine
from pleviz.measure.runner import Emit, Outcome, Turn, Worker, run_alone
from pleviz.records import Record, new_record, write_record

if TYPE_CHECKING:
    from collections.abc import Mapping

GREEDY_HOMES = ("gpu", "file")


def bench(model: str, checkpoint: Path, out: Path, *, prompt: int = 8500) -> Record:
    """Measure one model's homes in detail on a CUDA device; one process, then write the record.

    Raises:
        MeasureError: no CUDA device, or the process failed; the message says why.
    """
    machine = _machine("cuda")
    outcome = run_alone("pleviz.measure.bench:_bench_job", (str(checkpoint), prompt), 300)
    if outcome.status != "ok":
        raise MeasureError(f"the benchmark of {model} failed: {outcome.reason}")
    record = new_record(
        "homes",
        command=f"pleviz bench --model {model} --prompt {prompt}",
        hardware=machine.hardware,
        versions=machine.versions,
        arguments={"model": model, "precision": "bf16", "prompt_tokens": prompt},
        method={
            "speed": "homes take turns in one process; medians over all turns; eager, dynamic cache",
            "attach": "table in ordinary RAM (mapped, cpu) or in a warm file; wall clock",
            "gather": "the table's lookup alone, synchronised; link: pinned copy in the same process",
            "profile": "torch.profiler over eager decode steps of batch 1",
            "first_touch": "8,500 random rows from the file through the page cache, no GPU",
        },
        link_bytes_per_s=machine.link_bytes_per_s,
        rows=[rounded(row) for row in outcome.value],
    )
    write_record(out, record)
    return record


def _bench_job(job: tuple[str, int], _emit: Emit, _turn: Turn) -> list[dict[str, Any]]:
    import torch

    from pleviz import benchmarks, offload, restore

    checkpoint, prompt = Path(job[0]), job[1]
    device = torch.device("cuda", 0)
    rows = [{"kind": "first_touch"} | row for row in benchmarks.first_touch(checkpoint)]
    model, _ = load_row(str(checkpoint), "gpu", "bf16", device)
    for row in benchmarks.paired_speed(model, checkpoint, prompt=prompt):
        rows.append({"kind": "speed"} | row)
    for home in ("gpu", "mapped", "file", "cpu"):
        handle = offload(model, home, checkpoint=checkpoint, verify=False)
        rows += [{"kind": "gather"} | row for row in benchmarks.gather_times(model)]
        rows.append({"kind": "profile"} | benchmarks.decode_step_profile(model))
        handle.restore()
    rows += [{"kind": "attach"} | row for row in benchmarks.attach(model, checkpoint)]
    if benchmarks.home_of(model) != "gpu":
        restore(model)
    return rows


def greedy(
    checkpoints: Mapping[str, Path], out: Path, *, tokens: int = 2287, device: str = "auto"
) -> Record:
    """Decode greedily with the table on the GPU and from the file, and compare every step's bits.

    All models and homes run side by side, each in a process of its own: nothing is timed.

    Args:
        checkpoints: folder of each model's checkpoint.
        out: the record to write.
        tokens: how many tokens to decode.
        device: where; ``"auto"`` is CUDA where there is one.

    Raises:
        MeasureError: a process failed; the message says why.
    """
    machine = _machine(device)
    jobs = [(name, home) for name in checkpoints for home in GREEDY_HOMES]
    workers: dict[tuple[str, str], Worker] = {}
    try:
        for name, home in jobs:
            job = (str(checkpoints[name]), home, tokens, machine.device)
            workers[name, home] = Worker("pleviz.measure.bench:_greedy_job", job, 580)
        outcomes = {key: worker.result() for key, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.kill()
    record = new_record(
        "greedy",
        command=f"pleviz greedy --model {','.join(checkpoints)} --tokens {tokens}",
        hardware=machine.hardware,
        versions=machine.versions,
        arguments={"precision": "bf16", "tokens": tokens, "prompt_tokens": 32, "weights": "random"},
        method={
            "checksums": "per step, the sum of the logits' bit patterns times odd multipliers, "
            "modulo 2^64: equal checksums mean equal bits but for a collision"
        },
        rows=[_compared(name, home, outcomes) for name, home in jobs],
    )
    write_record(out, record)
    return record


def _greedy_job(
    job: tuple[str, str, int, str], _emit: Emit, _turn: Turn
) -> tuple[list[int], list[int]]:
    import torch

    from pleviz import benchmarks

    checkpoint, home, tokens, device = job
    model, _ = load_row(checkpoint, home, "bf16", torch.device(device))
    ids, sums = benchmarks.greedy_trace(model, tokens)
    return ids.tolist(), sums.tolist()


def _compared(name: str, home: str, outcomes: Mapping[tuple[str, str], Outcome]) -> dict[str, Any]:
    outcome, reference = outcomes[name, home], outcomes[name, "gpu"]
    for one in (outcome, reference):
        if one.status != "ok":
            raise MeasureError(f"greedy decoding of {name} {home} failed: {one.reason}")
    (ids, sums), (ids_gpu, sums_gpu) = outcome.value, reference.value
    return {
        "model": name,
        "home": home,
        "tokens": len(ids),
        "distinct_tokens": len(set(ids)),
        "tokens_equal": ids == ids_gpu,
        "checksums_equal": sums == sums_gpu,
        "distinct_checksums": len(set(sums)),
    }


def _machine(device: str) -> Machine:
    outcome = run_alone("pleviz.measure.machine:inspect_machine", device, 300)
    if outcome.status != "ok":
        raise MeasureError(f"cannot use device {device!r}: {outcome.reason}")
    return outcome.value
