"""The probe: reads the counters around a block of code, and samples them while it runs."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

from pleviz.ledger import Ledger, ledger
from pleviz.memory.counters import (
    COUNTERS,
    choose_device,
    high_water_rss,
    process_reading,
    sampled_note,
)
from pleviz.memory.report import MemoryReport, Reading, Sample

if TYPE_CHECKING:
    import torch
    from torch import nn

_LOCK = threading.Lock()
_ACTIVE: list[MemoryProbe] = []


class MemoryProbe:
    """Measures the memory of the ``with`` block it is used for. Reusable; probes may nest.

    Args:
        model: ledgers of it are taken before and after. Where the model is built inside the block,
            set ``probe.model`` there.
        device: what to measure. By default the accelerator the model is on, else CUDA, else MPS,
            else the CPU; the report says which and why.
        interval_s: seconds between two samples of the timeline.

    Entering and leaving empties the allocator's cache, and entering resets torch's peak counters
    (the peaks of enclosing probes are kept). Where there is no CUDA device nothing touches CUDA.

    Raises:
        ValueError: a device that is not there, or an interval that is not positive.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        device: str | torch.device | None = None,
        interval_s: float = 0.05,
    ) -> None:
        if not interval_s > 0:
            raise ValueError(f"interval_s must be more than 0 seconds, not {interval_s}")
        self._model: weakref.ref[nn.Module] | None = None
        self.model = model
        self.interval_s = interval_s
        self._device, self._reason = choose_device(model, device)
        self._active = False
        self._report: MemoryReport | None = None

    @property
    def model(self) -> nn.Module | None:
        """The model ledgers are taken of. The probe does not keep it alive."""
        return self._model() if self._model is not None else None

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        self._model = weakref.ref(model) if model is not None else None

    def __enter__(self) -> MemoryProbe:
        if self._active:
            raise RuntimeError("this probe is already measuring; use another MemoryProbe inside it")
        self._process = psutil.Process()  # here, not at import: the process may have forked since
        self._counter = COUNTERS[self._device.type](self._device)
        self._counter.warm_up()
        self._ledger_before = self._ledger()
        self._settle()
        self._counter.empty_cache()
        self._before = self._read()
        self._samples: list[Sample] = []
        self._high_water = high_water_rss()
        self._peaks = (0, 0)
        self._start = time.perf_counter()
        with _LOCK:
            for outer in _ACTIVE:  # they read their peaks from the counters we reset now
                outer._keep_peaks()
            self._counter.reset_peaks()
            _ACTIVE.append(self)
        self._active, self._report = True, None
        self._sample()
        self._stop = threading.Event()
        self._sampler = threading.Thread(
            target=self._run_sampler, daemon=True, name="pleviz-memory"
        )
        self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._sampler.join()
        self._active = False
        try:
            self._sample()
            self._settle()  # raises if the block broke the CUDA context
            with _LOCK:
                self._keep_peaks()  # before emptying the cache
        finally:
            _ACTIVE.remove(self)
        end = self._read()
        self._counter.empty_cache()
        after = self._read()
        self._report = self._make_report(end, after)

    def mark(self, event: str) -> None:
        """Put a named event on the timeline, with the memory in use at this moment."""
        if not self._active:
            raise RuntimeError("mark() works inside the probe's with block only")
        self._counter.synchronize()
        self._sample(event)

    def report(self) -> MemoryReport:
        """What was measured. Also there after the block raised."""
        if self._report is None:
            where = "still open" if self._active else "not run yet"
            raise RuntimeError(f"no report: the probe's with block is {where}")
        return self._report

    def _ledger(self) -> Ledger | None:
        model = self.model
        return ledger(model) if model is not None else None

    def _settle(self) -> None:
        gc.collect()
        self._counter.synchronize()

    def _keep_peaks(self) -> None:
        now = self._counter.peaks()
        self._peaks = (max(self._peaks[0], now[0]), max(self._peaks[1], now[1]))

    def _run_sampler(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._sample()

    def _sample(self, event: str | None = None) -> None:
        allocated, reserved = self._counter.in_use()
        rss = self._process.memory_info().rss
        seconds = time.perf_counter() - self._start
        self._samples.append(Sample(seconds, allocated, reserved, rss, event))

    def _read(self) -> Reading:
        allocated, reserved = self._counter.in_use()
        return replace(
            process_reading(self._process),
            allocated=allocated,
            reserved=reserved,
            device_used=self._counter.device_used(),
        )

    def _make_report(self, end: Reading, after: Reading) -> MemoryReport:
        samples = sorted(self._samples, key=lambda sample: sample.seconds)
        rss_peak, rss_source = self._rss_peak(samples, end)
        return MemoryReport(
            source=self._device.type,
            reason=self._reason,
            device=self._counter.name,
            before=self._before,
            end=end,
            after=after,
            peak_allocated=max(self._peaks[0], *(sample.allocated for sample in samples)),
            peak_reserved=max(self._peaks[1], *(sample.reserved for sample in samples)),
            peak_rss=rss_peak,
            peak_source=self._counter.peak_source or sampled_note(self.interval_s, len(samples)),
            peak_rss_source=rss_source,
            seconds=samples[-1].seconds,
            timeline=tuple(samples),
            ledger_before=self._ledger_before,
            ledger=self._ledger(),
        )

    def _rss_peak(self, samples: list[Sample], end: Reading) -> tuple[int, str]:
        """Exact where the process' own high-water mark rose in the block, else from the samples."""
        now = high_water_rss()
        sampled = max(self._before.rss, end.rss, *(sample.rss for sample in samples))
        if now is not None and self._high_water is not None and now > self._high_water:
            note = "exact: the process' high-water mark (ru_maxrss) rose in this block"
            return max(now, sampled), note  # the kernel updates the mark a little late
        return sampled, sampled_note(self.interval_s, len(samples))
