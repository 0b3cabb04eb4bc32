"""Measure memory: what a block of code holds, what it needed at its worst, and who counts it how.

    with pleviz.MemoryProbe(model) as probe:
        pleviz.offload(model, "mapped")
        probe.mark("moved table")
        model(input_ids)
    probe.report()

Three numbers are called "VRAM" and differ by gigabytes: what tensors hold (*allocated*), what
torch's caching allocator has taken from the driver (*reserved*), and what the driver shows, with
the CUDA context and other programs (*device used*, as in ``nvidia-smi``). The report gives all
three, before, at the end and after the cache was emptied.
"""

from pleviz.components import component_of
from pleviz.ledger import Ledger, ledger
from pleviz.memory.link import host_link_bandwidth
from pleviz.memory.probe import MemoryProbe
from pleviz.memory.report import MemoryReport, Reading, Sample

__all__ = [
    "Ledger",
    "MemoryProbe",
    "MemoryReport",
    "Reading",
    "Sample",
    "component_of",
    "host_link_bandwidth",
    "ledger",
]
