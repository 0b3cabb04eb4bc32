"""Install pleviz (editable, with its tools) into the Python that runs this script.

``make`` calls it; standard library only. It differs from ``pip install -e .[dev]`` in being careful
about torch: one that already imports is never replaced, and a machine without an NVIDIA GPU gets a
CPU build (about 200 MB) instead of a CUDA build (several GB) where one can be had.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# from this version on, `pip install --dry-run` reads a package's metadata without downloading it
PIP_WITH_CHEAP_DRY_RUN = (24, 1)


def is_cuda_build(requirements: Iterable[str]) -> bool:
    """Whether a torch with these requirements (its ``Requires-Dist``) is a CUDA build.

    >>> is_cuda_build(["filelock", "nvidia-cudnn-cu13==9.1; platform_system == 'Linux'"])
    True
    """
    return any(re.match(r"(nvidia|cuda)[-_]", name, re.IGNORECASE) for name in requirements)


def torch_attempts(
    requirement: str, *, installed: str | None, has_gpu: bool, registry_is_cuda: bool
) -> list[list[str]]:
    """The ``pip install`` arguments to try for torch, in order, until one succeeds.

    Args:
        requirement: what to install, e.g. ``"torch==2.13.0"``.
        installed: version of the torch that imports already, or None.
        has_gpu: whether there is an NVIDIA GPU.
        registry_is_cuda: whether pip would take a CUDA build from where it looks by default.
    """
    if installed is not None:
        return []
    if has_gpu or not registry_is_cuda:
        return [[requirement]]
    return [[requirement, "--index-url", CPU_INDEX], [requirement]]


def constraints_for(text: str, torch_version: str | None, pins: Iterable[str] = ()) -> str:
    """``constraints.txt`` with torch pinned to the one that is there: pip then leaves it alone.

    ``pins`` such as ``"transformers==5.8.1"`` replace the lines of the same packages.
    """
    if torch_version is not None:
        pins = [*pins, f"torch=={torch_version}"]
    for pin in pins:
        text = re.sub(rf"(?m)^{re.escape(pin.partition('==')[0])}==.*$", pin, text)
    return text


def pinned(text: str, name: str) -> str:
    """The line of ``constraints.txt`` that pins ``name``."""
    match = re.search(rf"(?m)^{re.escape(name)}==[^\s;#]+", text)
    if match is None:
        raise ValueError(f"constraints.txt has no pin for {name}: add a line '{name}==VERSION'")
    return match.group()


def importable_torch() -> str | None:
    """Version of the torch that this Python imports (asked in a fresh process), or None."""
    code = "import torch; from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return found.stdout.strip() or None if found.returncode == 0 else None


def has_nvidia_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU that its driver knows of (also under WSL)."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU" in listed.stdout


def pip(*arguments: str) -> bool:
    """Run pip quietly; its errors stay visible. Returns whether it succeeded."""
    quiet = ["-qq", "--no-input", "--disable-pip-version-check", "--root-user-action=ignore"]
    command = [sys.executable, "-m", "pip", "install", *quiet, *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0


def registry_has_cuda_build(requirement: str) -> bool:
    """Ask pip what it would install for ``requirement``. False where it cannot say."""
    if not sys.platform.startswith("linux"):
        return False  # PyPI has CUDA builds for Linux only
    from importlib.metadata import version

    if tuple(int(part) for part in version("pip").split(".")[:2]) < PIP_WITH_CHEAP_DRY_RUN:
        pip("--upgrade", "pip")  # if it fails we merely download more than we needed to
    ask = ["--dry-run", "--report", "-", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *ask, requirement]
    answer = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if answer.returncode != 0:
        return False
    would_install = json.loads(answer.stdout)["install"]
    return any(is_cuda_build(item["metadata"].get("requires_dist", [])) for item in would_install)


def install_torch(requirement: str) -> str:
    """Make sure that torch imports; returns its version. Exits with a message if it cannot."""
    installed = importable_torch()
    has_gpu = has_nvidia_gpu()
    attempts = torch_attempts(
        requirement,
        installed=installed,
        has_gpu=has_gpu,
        registry_is_cuda=installed is None and not has_gpu and registry_has_cuda_build(requirement),
    )
    for arguments in attempts:
        print("torch: pip install", *arguments, flush=True)
        if pip(*arguments):
            break
    version = importable_torch()
    if version is None:
        sys.exit(
            f"torch does not import. Install it by hand into {sys.prefix}, then run make again."
        )
    if installed is not None:
        print(f"torch: {version} is here already and stays", flush=True)
    return version


def main() -> None:
    """Install torch if it is missing, then pleviz with the tools that make's targets use."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--extras", default="dev", help="extras of pleviz to install")
    parser.add_argument("--also", nargs="*", default=[], help="more packages to install")
    parser.add_argument("--pin", action="append", default=[], help="NAME==VERSION instead of ours")
    options = parser.parse_args()
    tested = (ROOT / "constraints.txt").read_text()
    print(f"Installing into {sys.prefix} (minutes the first time)", flush=True)
    version = install_torch(pinned(tested, "torch"))
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text(constraints_for(tested, version, options.pin))
        target = f"{ROOT}[{options.extras}]"
        if not pip("--constraint", str(constraints), "--editable", target, *options.also):
            sys.exit("pip could not install pleviz: its message is above.")


if __name__ == "__main__":
    main()
