"""How fast the link between host memory and the GPU is."""

from __future__ import annotations

import statistics

import torch


def host_link_bandwidth(
    nbytes: int = 1 << 28, device: str | torch.device = "cuda", repeats: int = 5
) -> float:
    """Bytes per second of a copy from page-locked host memory to ``device``, median of ``repeats``.

    The ceiling for anything that reads host memory from the GPU. Timed with CUDA events after one
    warm-up copy. Takes ``nbytes`` of host and of device memory while it runs.

    Raises:
        RuntimeError: no CUDA device.
        ValueError: nothing to copy.
    """
    if nbytes < 1 or repeats < 1:
        raise ValueError(f"nbytes and repeats must be at least 1, not {nbytes} and {repeats}")
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise RuntimeError(
            f"host_link_bandwidth times copies to a CUDA device; device is '{device}' and CUDA is "
            f"{'available' if torch.cuda.is_available() else 'not available'} here."
        )
    with torch.cuda.device(device):
        host = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
        target = torch.empty(nbytes, dtype=torch.uint8, device=device)
        target.copy_(host, non_blocking=True)
        seconds = []
        for _ in range(repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(host, non_blocking=True)
            stop.record()
            stop.synchronize()
            seconds.append(start.elapsed_time(stop) / 1e3)
    return nbytes / statistics.median(seconds)
