"""Who counts memory: torch's allocators for the accelerator, the operating system for the process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from pleviz.memory.report import Reading

if TYPE_CHECKING:
    from torch import nn


def choose_device(
    model: nn.Module | None, wanted: str | torch.device | None
) -> tuple[torch.device, str]:
    """The device to measure, and the reason in words. Creates no CUDA context."""
    if wanted is not None:
        device, reason = torch.device(wanted), "you asked for it"
    else:
        device, reason = _default_device(model)
    there = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "cpu": lambda: True,
    }
    if device.type not in there:
        raise ValueError(f"cannot measure '{device}': only cuda, mps and cpu are known")
    if not there[device.type]():
        raise ValueError(f"cannot measure '{device}': {device.type} is not available here")
    return device, reason


def _default_device(model: nn.Module | None) -> tuple[torch.device, str]:
    if model is not None:
        for parameter in model.parameters():
            if parameter.device.type in ("cuda", "mps"):
                return parameter.device, f"the model is on {parameter.device}"
    if torch.cuda.is_available():
        return torch.device("cuda"), "CUDA is available"
    if torch.backends.mps.is_available():
        return torch.device("mps"), "CUDA is not available, MPS is"
    return torch.device("cpu"), "neither CUDA nor MPS is available, so process memory is measured"


class CpuCounter:
    """What a probe asks of an accelerator. Here there is none: everything is 0."""

    name = "cpu"
    peak_source: str | None = "not on an accelerator"
    """How the peaks are found; ``None`` where there are no peak counters and samples must do."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self) -> None:
        """Allocate now whatever the first use of the device allocates."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def empty_cache(self) -> None:
        """Give cached memory back to the driver."""

    def reset_peaks(self) -> None:
        """Start new peaks."""

    def in_use(self) -> tuple[int, int]:
        """Bytes allocated and reserved."""
        return 0, 0

    def device_used(self) -> int | None:
        """Bytes in use on the device, all programs together; ``None`` if it does not tell."""
        return None

    def peaks(self) -> tuple[int, int]:
        """Peaks of :meth:`in_use` since they were reset."""
        return 0, 0


class _CudaCounter(CpuCounter):
    peak_source = "exact: the caching allocator's own peak counters"

    def warm_up(self) -> None:
        # the context and cuBLAS' workspace: no reading must mistake them for data
        index = self.device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.name = f"{self.device} ({torch.cuda.get_device_name(self.device)})"
        ones = torch.ones(16, 16, device=self.device)
        (ones @ ones).sum().item()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def in_use(self) -> tuple[int, int]:
        return torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)

    def device_used(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def peaks(self) -> tuple[int, int]:
        return (
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
        )


class _MpsCounter(CpuCounter):
    name = "mps"
    peak_source = None

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def empty_cache(self) -> None:
        torch.mps.empty_cache()

    def in_use(self) -> tuple[int, int]:
        return torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()


COUNTERS = {"cuda": _CudaCounter, "mps": _MpsCounter, "cpu": CpuCounter}


def sampled_note(interval_s: float, samples: int) -> str:
    """How good a peak is that was found by sampling."""
    return (
        f"largest of {samples} samples, one per {interval_s * 1e3:.0f} ms: shorter peaks are missed"
    )


def process_reading(process: psutil.Process) -> Reading:
    """The process' part of a reading; the accelerator's is left empty."""
    full: dict[str, int] = {}
    try:
        full = process.memory_full_info()._asdict()
    except psutil.Error:  # not permitted (macOS sandboxes)
        pass
    homes = sys.modules.get("pleviz.homes")  # where it was never imported, nothing is registered
    return Reading(
        allocated=0,
        reserved=0,
        device_used=None,
        rss=full.get("rss") or process.memory_info().rss,
        uss=full.get("uss"),
        pss=full.get("pss"),
        file_mapped=_file_mapped(),
        registered=homes.registered_bytes() if homes is not None else 0,
    )


def _file_mapped() -> int | None:
    """Resident bytes that are pages of files (Linux), libraries included."""
    try:
        with Path("/proc/self/status").open() as status:
            lines = [line.split() for line in status if line.startswith("RssFile:")]
    except OSError:
        return None
    return int(lines[0][1]) * 1024 if lines else None


def high_water_rss() -> int | None:
    """The largest RSS this process ever had, where the system keeps it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
