"""What a measurement ran on: hardware and versions, and nothing that says whose machine it is."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from pleviz.measure.plan import Machine, ram_bytes
from pleviz.measure.runner import Emit, Turn
from pleviz.records import library_versions


def inspect_machine(wanted: str, _emit: Emit, _turn: Turn) -> Machine:
    """Look at the machine, in a process of its own: asking a GPU makes a context.

    Args:
        wanted: a device, or ``"auto"``: CUDA where there is one, otherwise the CPU.

    Raises:
        ValueError: the device is not there.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"there is no device {wanted!r} here ({error})") from None
    hardware: dict[str, Any] = {
        "gpu": None,
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "ram_bytes": ram_bytes(),
        "system": platform.system(),
    }
    link = None
    if device.type == "cuda":
        from pleviz.memory import host_link_bandwidth

        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        hardware |= {"gpu": properties.name, "gpu_bytes": properties.total_memory}
        hardware |= _nvidia_smi(device.index)
        link = host_link_bandwidth(device=device)
    return Machine(str(device), hardware, library_versions(), link)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _nvidia_smi(index: int) -> dict[str, Any]:
    """Driver version and PCIe link; empty where the tool is missing."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    which = visible[index] if len(visible) > index and visible[index].strip() else str(index)
    query = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--id={which}", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    if done.returncode or len(values) != 3:
        return {}
    return {"driver": values[0], "pcie": f"gen {values[1]} x{values[2]}"}
