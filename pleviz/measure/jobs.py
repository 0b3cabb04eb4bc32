"""What the processes of a measurement do. Each function here runs in a process of its own."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pleviz.measure import reference
from pleviz.measure.compiled import WARM_UP as COMPILED_WARM_UP
from pleviz.measure.compiled import Compiled, compile_decoder, graph_count
from pleviz.measure.loading import load_row, why_unavailable
from pleviz.measure.plan import DECODE_PROMPT, SEGMENTS, BuildJob, RowJob
from pleviz.measure.runner import Emit, Turn, UnavailableError
from pleviz.measure.timing import (
    DecodeTime,
    EagerDecoder,
    prefill,
    random_ids,
    time_decode,
    time_prefill,
    warm_up,
)
from pleviz.memory import MemoryProbe, MemoryReport

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_checkpoint(job: BuildJob, _emit: Emit, _turn: Turn) -> None:
    """Save a model with random weights, one seed for all, in bfloat16."""
    from pleviz import build

    model = build(job.model, scale=job.scale, device=job.device, dtype=torch.bfloat16)
    model.save_pretrained(job.folder)


def save_reference(job: RowJob, _emit: Emit, _turn: Turn) -> None:
    """Only what the ``gpu`` row leaves behind: for runs that do not measure that row (again)."""
    assert job.reference is not None
    device = torch.device(job.device)
    model, _ = load_row(job.checkpoint, "gpu", job.row.precision, device)
    reference.save(Path(job.reference), model, device)


def measure_row(job: RowJob, emit: Emit, _turn: Turn) -> dict[str, Any]:
    """An eager row: memory, parity, prefill, decoding."""
    device, options = torch.device(job.device), job.options
    model, base = _load(job, device, emit)
    if options.only_memory:
        return {}
    emit("partial", {"parity": _parity(job, model, device)})

    ids = random_ids(model, 1, options.prefill, device)
    with MemoryProbe(device=device) as probe:  # on the warm-up pass: it would slow a timed one
        prefill(model, ids)
    emit("partial", {"peak_prefill_bytes": probe.report().peak - base})
    seconds, times = time_prefill(model, ids, options.segment_seconds)
    emit("partial", {"prefill_s": seconds, "prefill_times_s": times})

    decode: list[dict[str, Any]] = []
    for batch in options.batches:
        decoder = EagerDecoder(model, random_ids(model, batch, DECODE_PROMPT, device))
        with MemoryProbe(device=device) as probe:
            decoder.step()
        warm_up(decoder, device)
        timed = time_decode(decoder, device, steps=options.decode, seconds=options.segment_seconds)
        decode.append(_decode_entry(batch, timed) | {"peak_bytes": probe.report().peak - base})
        emit("partial", _decode_fields(decode))
        del decoder  # and its cache, before the next peak
    return {}


def measure_compiled(job: RowJob, emit: Emit, turn: Turn) -> dict[str, Any]:
    """A compiled row: memory after loading, compilation beside others, then decoding alone."""
    if job.row.home == "device_map":
        raise UnavailableError("accelerate's hooks move the whole table in Python at every step")
    device, options = torch.device(job.device), job.options
    _share_processors(job)
    model, _ = _load(job, device, emit)
    steps = SEGMENTS * math.ceil(options.decode / SEGMENTS)
    size = DECODE_PROMPT + COMPILED_WARM_UP + steps + 8
    ready: dict[int, Compiled] = {}
    for batch in options.batches:
        ids = random_ids(model, batch, DECODE_PROMPT, device)
        ready[batch] = compile_decoder(model, ids, size, backend=options.compile_backend)
    emit("partial", {"compile_s": sum(compiled.compile_s for compiled in ready.values())})
    emit("ready", None)
    turn()

    decode: list[dict[str, Any]] = []
    for batch, compiled in ready.items():
        before = graph_count()
        timed = time_decode(
            compiled.decoder, device, steps=options.decode, seconds=options.segment_seconds
        )
        entry = _decode_entry(batch, timed) | {
            "compile_s": compiled.compile_s,
            "fullgraph": compiled.fullgraph,
            "graphs": compiled.graphs,
            "cudagraph_skips": compiled.cudagraph_skips,
            "recompiled_while_timed": graph_count() - before,
        }
        decode.append(entry)
        emit("partial", _decode_fields(decode))
    return {"tokens": {batch: compiled.tokens for batch, compiled in ready.items()}}


def _load(job: RowJob, device: torch.device, emit: Emit) -> tuple[PreTrainedModel, int]:
    """Load the row's model, report its memory; also returns the bytes in use before."""
    if reason := why_unavailable(job.row.home, device):
        raise UnavailableError(reason)
    from pleviz.homes import OffloadError

    start = time.perf_counter()
    with MemoryProbe(device=device) as probe:
        try:
            model, remark = load_row(job.checkpoint, job.row.home, job.row.precision, device)
        except OffloadError as error:
            raise UnavailableError(str(error)) from None
    report = probe.report()
    base = report.resident - report.growth
    memory = _memory(model, job, report, base)
    if remark is not None:
        memory["remark"] = remark
    if not job.row.compiled:  # compiled rows load side by side
        memory["load_s"] = time.perf_counter() - start
    emit("partial", memory)
    return model, base


def _memory(model: PreTrainedModel, job: RowJob, report: MemoryReport, base: int) -> dict[str, Any]:
    memory: dict[str, Any] = {
        "memory_source": report.source,
        "resident_bytes": report.growth,
        "load_peak_bytes": report.peak - base,
        "host_rss_bytes": report.after.rss - report.before.rss,
        "registered_bytes": report.after.registered,
        "attention": model.config.get_text_config(decoder=True)._attn_implementation,
    }
    predicted = _predicted(model, job)
    memory |= predicted
    if predicted and report.source != "cpu":  # a process' RSS on the CPU is not the model alone
        ratio = report.growth / predicted["predicted_resident_bytes"]
        memory["resident_ratio_to_predicted"] = round(ratio, 5)
    return memory


def _predicted(model: PreTrainedModel, job: RowJob) -> dict[str, int]:
    """What the budget says of this model; empty where it does not know the towers' shapes."""
    from pleviz import SPECS, budget, spec_of
    from pleviz.peaks import CUBLAS_WORKSPACE

    spec, towers = spec_of(model), hasattr(model.config, "text_config")
    if towers and spec.name not in SPECS:
        return {}
    home = "cpu" if job.row.home == "workaround" else job.row.home
    precision, prompt = job.row.precision, job.options.prefill
    held = budget(spec, home=home, precision=precision, towers=towers)
    predicted = {"predicted_resident_bytes": held.resident_bytes}
    if not (job.options.only_memory or job.row.compiled):
        used = budget(spec, home=home, precision=precision, towers=towers, context=prompt)
        # the probe made the BLAS workspace before its first reading, so growth does not contain it
        peak = used.prefill_peak_bytes - CUBLAS_WORKSPACE
        predicted["predicted_peak_prefill_bytes"] = peak
    return predicted


def _parity(job: RowJob, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    if job.reference is None or (job.row.home != "gpu" and not Path(job.reference).exists()):
        return {"verdict": "not compared", "reason": "there is no gpu row to compare with"}
    if job.row.home == "gpu":
        reference.save(Path(job.reference), model, device)
        return {"verdict": "reference"}
    return reference.compare(Path(job.reference), model, device)


def _decode_entry(batch: int, timed: DecodeTime) -> dict[str, Any]:
    return {
        "batch": batch,
        "tok_s": timed.tok_s,
        "segments_tok_s": list(timed.segments_tok_s),
        "steps_per_segment": timed.steps,
    }


def _decode_fields(decode: list[dict[str, Any]]) -> dict[str, Any]:
    """All batch sizes, and the first one's speed and peak where a reader looks for them."""
    first = decode[0]
    fields = {"decode": list(decode), "decode_tok_s": first["tok_s"]}
    return fields | ({"peak_decode_bytes": first["peak_bytes"]} if "peak_bytes" in first else {})


def _share_processors(job: RowJob) -> None:
    """Many processes compile at once: divide the processors, and give each a cache of its own.

    A shared cache would make the time to compile depend on which row came first.
    """
    import os

    import torch._inductor.config

    rows = len(job.options.models or (1,)) * len(job.options.homes) * len(job.options.precisions)
    torch._inductor.config.compile_threads = max(1, (os.cpu_count() or 1) // rows)
    cache = Path(job.checkpoint).parent / f"inductor-{job.row}".replace(" ", "-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
