"""What each home costs, piece by piece: attaching, gathering rows, one decode step, long parity.

Each function takes a loaded model and returns plain rows (dicts with units in their keys) for a
:class:`pleviz.records.Record`. All need a CUDA device unless they say otherwise.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pleviz.homes import home_of, offload, registered_bytes
from pleviz.homes.registration import empty_pages
from pleviz.homes.shard import TableInShard, find_in_checkpoint, map_table
from pleviz.memory.link import host_link_bandwidth
from pleviz.table import compute_device, find_table

# host waits for the GPU: each of these calls is a synchronisation
_SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def process_memory() -> dict[str, int]:
    """Bytes of this process by kind (Linux): ``anonymous`` is private RAM, ``pss`` its fair share."""
    wanted = {"Rss": "rss_bytes", "Pss": "pss_bytes", "Anonymous": "anonymous_bytes"}
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in wanted:
            found[wanted[key]] = int(value.split()[0]) * 1024
    return found


def gather_times(
    model: nn.Module, counts: tuple[int, ...] = (1, 64, 1000, 8500)
) -> list[dict[str, Any]]:
    """Time the table's lookup for ``counts`` random ids: median of 9, wall clock, synchronised."""
    table = find_table(model)
    link = host_link_bandwidth()
    generator = torch.Generator().manual_seed(0)
    rows = []
    for count in counts:
        ids = torch.randint(0, table.rows, (1, count), generator=generator).cuda()
        seconds = []
        for turn in range(12):
            torch.cuda.synchronize()
            start = time.perf_counter()
            table.module(ids)
            torch.cuda.synchronize()
            if turn >= 3:  # the first ones warm up
                seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds)
        rows.append(
            {
                "home": home_of(model),
                "ids": count,
                "seconds": median,
                "bytes": count * table.row_nbytes,
                "bytes_per_s": count * table.row_nbytes / median,
                "ratio_to_pinned_copy": count * table.row_nbytes / median / link,
                "link_bytes_per_s": link,
            }
        )
    return rows


def paired_speed(
    model: nn.Module, checkpoint: Path, *, prompt: int = 8500, rounds: int = 4, steps: int = 12
) -> list[dict[str, Any]]:
    """Prefill and eager decoding in every home, in turn, in one process: ratios free of its luck.

    Two processes of the same model differ by a few percent in decoding, which is launch-bound; so
    the homes take turns here, ``rounds`` times, and the medians of all their steps are compared.
    ``model`` is wholly on the GPU.
    """
    table = find_table(model)
    on_gpu = table.weight.data
    in_ram = empty_pages(tuple(on_gpu.shape), on_gpu.dtype).copy_(on_gpu)
    ids = torch.randint(
        0, table.rows, (1, prompt), generator=torch.Generator().manual_seed(0)
    ).cuda()
    times: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds + 1):
        for home in ("gpu", "mapped", "file", "cpu"):
            table.weight.data = on_gpu if home == "gpu" else in_ram
            handle = offload(model, home, checkpoint=checkpoint, verify=False)
            measured = {"prefill": _prefill_times(model, ids)}
            for batch in (1, 64):
                measured[f"decode_{batch}"] = _step_times(model, batch, steps)
            if turn > 0:  # the first round warms everything up
                for what, seconds in measured.items():
                    times.setdefault(handle.home, {}).setdefault(what, []).extend(seconds)
            if home != "gpu":
                _release(model)
    table.weight.data = on_gpu
    base = {what: statistics.median(seconds) for what, seconds in times["gpu"].items()}
    return [
        {
            "home": home,
            "what": what,
            "median_s": statistics.median(seconds),
            "ratio_to_gpu": statistics.median(seconds) / base[what],
            "samples": len(seconds),
        }
        for home, kinds in times.items()
        for what, seconds in kinds.items()
    ]


def _prefill_times(model: nn.Module, ids: torch.Tensor) -> list[float]:
    seconds = []
    with torch.inference_mode():
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return seconds[1:]


def _step_times(model: nn.Module, batch: int, steps: int) -> list[float]:
    step, token = _decoder(model, batch)
    seconds = []
    for turn in range(steps + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        token = step(token)
        torch.cuda.synchronize()
        if turn >= 2:
            seconds.append(time.perf_counter() - start)
    return seconds


def _decoder(
    model: nn.Module, batch: int
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """One greedy step with a dynamic cache, and the tokens that a 64-token prompt leads to.

    Gemma 3n's head has ids beyond its table; random weights would choose them, and some versions of
    transformers then crash on a GPU. So the choice is among the table's rows.
    """
    from transformers import DynamicCache

    config = model.config.get_text_config()
    rows = find_table(model).rows
    device = compute_device(find_table(model).owner)
    cache = DynamicCache(config=config)

    def step(token: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            return logits[..., :rows].argmax(-1)

    prompt = torch.randint(3, rows, (batch, 64), generator=torch.Generator().manual_seed(0))
    return step, step(prompt.to(device))


def attach(model: nn.Module, checkpoint: Path) -> list[dict[str, Any]]:
    """Time attaching each home, with the process's memory before and after.

    ``model`` is on the GPU but for its table, which is an ordinary CPU tensor: attaching ``mapped``
    is in place. ``file`` is timed with its pages in the page cache.
    """
    table = find_table(model)
    in_ram = empty_pages(tuple(table.weight.shape), table.weight.dtype).copy_(
        table.weight.detach().cpu()
    )
    rows = []
    for home in ("mapped", "file", "cpu"):
        table.weight.data = in_ram
        if home == "file":  # the private copy must be gone before its memory is counted
            table.weight.data = map_table(find_in_checkpoint(checkpoint))
            del in_ram
        _settle()
        before = process_memory()
        start = time.perf_counter()
        handle = offload(model, home, checkpoint=checkpoint, verify=False)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        after = process_memory()
        rows.append(
            {
                "home": handle.home,
                "reason": handle.reason,
                "attach_s": seconds,
                "table_bytes": table.nbytes,
                "registered_bytes": registered_bytes(),
                **{f"added_{key}": after[key] - before[key] for key in after},
            }
        )
        handle._model = None  # keep the table on the host: it goes to the next home from there
        host = table.module._home.host
        _release(model)
        table.weight.data = host
        if home == "file":
            in_ram = host
    return rows


def _release(model: nn.Module) -> None:
    """Take the home off and leave the table on the host, whatever the model computes on."""
    from pleviz.homes import restore

    home = find_table(model).module._home
    home.joins_model, home.was_device = False, torch.device("cpu")
    home.shard = None  # no copy of the map: it is only handed on to the next home
    restore(model)
    _settle()


def first_touch(checkpoint: Path, count: int = 8500) -> list[dict[str, Any]]:
    """Time a CPU gather of ``count`` random rows from the file: page cache cold, then warm.

    Needs no GPU. The cold figure is the disk's; the kernel may refuse to drop pages in use.
    """
    shard = find_in_checkpoint(checkpoint)
    evict(shard)
    ids = torch.randint(0, shard.shape[0], (count,), generator=torch.Generator().manual_seed(0))
    table = map_table(shard)
    rows = []
    for state in ("cold", "warm"):
        start = time.perf_counter()
        table.index_select(0, ids)
        rows.append(
            {
                "page_cache": state,
                "ids": count,
                "bytes": count * shard.shape[1] * shard.dtype.itemsize,
                "seconds": time.perf_counter() - start,
            }
        )
    return rows


def evict(shard: TableInShard) -> None:
    """Ask the kernel to drop the file's clean pages from the page cache (Linux)."""
    with shard.path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def decode_step_profile(model: nn.Module, steps: int = 3) -> dict[str, Any]:
    """Profile eager decode steps: how often the host waits for the GPU, and what the GPU does."""
    from torch.profiler import ProfilerActivity, profile

    step, token = _decoder(model, batch=1)
    for _ in range(3):
        token = step(token)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            token = step(token)
    # leaving the block synchronises once, outside the steps
    events = profiler.events()
    waits = [e for e in events if e.name in _SYNCHRONISING]
    last_launch = max((e.time_range.end for e in events if e.name == "cudaLaunchKernel"), default=0)
    inside = [e for e in waits if e.time_range.start < last_launch]
    copies = [e for e in events if e.name == "cudaMemcpyAsync" and e.time_range.start < last_launch]
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return {
        "home": home_of(model),
        "steps": steps,
        "host_waits_per_step": len(inside) / steps,
        "copies_per_step": len(copies) / steps,
        "kernels_per_step": len(kernels) / steps,
        "gpu_busy_s_per_step": sum(e.time_range.elapsed_us() for e in kernels) / steps / 1e6,
        "timeline": _timeline(kernels, steps),
    }


def _timeline(kernels: list[Any], steps: int) -> list[dict[str, Any]]:
    """The first 60 GPU activities of the first profiled step, times in microseconds."""
    first = sorted(kernels, key=lambda e: e.time_range.start)[: min(60, len(kernels) // steps)]
    origin = first[0].time_range.start if first else 0
    return [
        {
            "name": e.name[:60],
            "start_us": e.time_range.start - origin,
            "duration_us": e.time_range.elapsed_us(),
        }
        for e in first
    ]


def greedy_trace(model: nn.Module, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode ``tokens`` greedily from a fixed prompt. Works on any device.

    Returns:
        ``(ids, checksums)``, both ``[tokens]`` int64: the tokens, and for each step the sum of the
        logits' bit patterns weighted by position, so that equal checksums mean equal bits but for
        a collision in 2⁶⁴.
    """
    from transformers import DynamicCache

    config = model.config.get_text_config()
    rows = find_table(model).rows  # see _decoder
    token = torch.randint(3, rows, (1, 32), generator=torch.Generator().manual_seed(7))
    token = token.to(compute_device(find_table(model).owner))
    out, sums = [], []
    weights = None
    with torch.inference_mode():
        cache = DynamicCache(config=config)
        for _ in range(tokens):
            logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[
                :, -1
            ]
            token = logits[:, :rows].argmax(-1, keepdim=True)
            bits = logits.view({2: torch.int16, 4: torch.int32}[logits.element_size()]).long()
            if weights is None:  # odd multipliers, one per position
                weights = (
                    torch.arange(bits.shape[-1], device=bits.device) * 0x9E3779B97F4A7C1 * 2 + 1
                )
            out.append(token)
            sums.append((bits * weights).sum())
    return torch.cat(out, dim=-1)[0].cpu(), torch.stack(sums).cpu()


def _settle() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
