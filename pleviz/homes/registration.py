"""Page-lock host memory in place and see it from the GPU as an ordinary CUDA tensor.

``cudaHostRegister`` pins the pages that a host tensor already has: no copy, and with unified
addressing the GPU reads them at the same address over the bus. A registration is undone exactly
once, when its last view is gone, at the latest when the interpreter exits.

Reference: CUDA Runtime API, "Memory Management", ``cudaHostRegister``.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import warnings
import weakref
from typing import Any

import torch

PORTABLE, MAPPED, READ_ONLY = 1, 2, 8  # cudaHostRegister flags

# cuDeviceGetAttribute numbers (cuda.h)
_CAN_USE_HOST_POINTER = 91
_HOST_REGISTER_SUPPORTED = 99
_READ_ONLY_REGISTER_SUPPORTED = 113

_LIVE: dict[int, int] = {}  # address -> bytes of every registration that is not yet undone
_VIEWS: weakref.WeakValueDictionary[int, HostView] = weakref.WeakValueDictionary()  # by address
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered


class RegistrationError(RuntimeError):
    """The driver refused to register host memory; the message says why."""


def registered_bytes() -> int:
    """Host bytes that pleviz has registered with CUDA at this moment."""
    return sum(_LIVE.values())


def why_not(device: torch.device, *, read_only: bool = False) -> str | None:
    """Why host memory cannot be registered for ``device``; ``None`` where it can."""
    if not torch.cuda.is_available():
        return "CUDA is not available"
    if device.type != "cuda":
        return f"the model computes on {device.type}, not on a CUDA device"
    if torch.version.hip:
        return "in-place registration is not supported on ROCm builds of torch"
    index = device.index if device.index is not None else torch.cuda.current_device()
    if _attribute(_HOST_REGISTER_SUPPORTED, index) == 0:
        return "the driver does not support registering host memory (cudaHostRegister)"
    if _attribute(_CAN_USE_HOST_POINTER, index) == 0:
        return "the GPU cannot use host addresses of registered memory directly"
    if read_only and _attribute(_READ_ONLY_REGISTER_SUPPORTED, index) == 0:
        return "the driver does not support registering read-only memory"
    return None


def _attribute(number: int, index: int) -> int:
    """A device attribute from the driver; 1 (assume yes, registering will tell) if it cannot be asked."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 1
    value = ctypes.c_int(1)
    failed = driver.cuDeviceGetAttribute(ctypes.byref(value), number, index)
    return 1 if failed else value.value


class HostView:
    """A host tensor registered with CUDA, exposed through ``__cuda_array_interface__``.

    The tensors made from it keep it alive; when the last one goes, the memory is unregistered.

    Args:
        host: contiguous CPU tensor of a floating dtype. It stays where it is.
        device: the CUDA device that will read it.
        read_only: the memory may only be read (a read-only memory map).

    Raises:
        RegistrationError: the driver refused. Nothing is registered then.
    """

    def __init__(self, host: torch.Tensor, device: torch.device, *, read_only: bool = False) -> None:
        self.host = host
        # numpy's type strings have no bfloat16: pass integers of the same size, view them after
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": f"<i{host.element_size()}",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
        address, nbytes = host.data_ptr(), host.numel() * host.element_size()
        self.shared = _VIEWS.get(address)  # one registration serves, and outlives, all its views
        if self.shared is not None and _LIVE.get(address, 0) >= nbytes:
            return
        if host.is_pinned():  # torch's own pinned memory is mapped already, and refuses a second time
            return
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the device must have a context
            # noted before it is done: an interrupt between the two must not leak it
            _LIVE[address] = nbytes
            undo = weakref.finalize(self, _unregister, address, host, os.getpid())
            result = torch.cuda.cudart().cudaHostRegister(
                address, nbytes, PORTABLE | MAPPED | (READ_ONLY if read_only else 0)
            )
        if int(result):
            undo.detach()
            del _LIVE[address]
            _clear_cuda_error(device)
            raise RegistrationError(f"cudaHostRegister of {nbytes:,} bytes failed: {_text(result)}")
        _VIEWS[address] = self


def _unregister(address: int, host: torch.Tensor, pid: int) -> None:
    """Undo one registration. ``host`` is an argument so that its memory outlives the registration."""
    del host
    if os.getpid() != pid:  # a forked child has the parent's bookkeeping but not its CUDA context
        return
    if _LIVE.pop(address, None) is None:
        return
    torch.cuda.synchronize()  # a kernel may still be reading
    result = torch.cuda.cudart().cudaHostUnregister(address)
    if int(result):
        _clear_cuda_error(torch.device("cuda"))
    if int(result) not in (0, _NOT_REGISTERED):
        warnings.warn(f"pleviz: cudaHostUnregister failed: {_text(result)}", stacklevel=2)


def _text(result: Any) -> str:
    """A CUDA result in words."""
    return f"error {int(result)}, {torch.cuda.cudart().cudaGetErrorString(result)}"


def _clear_cuda_error(device: torch.device) -> None:
    """Take a failed call's error off the runtime, or the next kernel launch would report it."""
    try:
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except RuntimeError:
        pass  # that was the stale error, now cleared


def map_to_device(host: torch.Tensor, device: torch.device, *, read_only: bool = False) -> torch.Tensor:
    """``host`` as a CUDA tensor on ``device``: same memory, same shape and dtype, nothing copied.

    Raises:
        RegistrationError: the driver refused.
    """
    view = HostView(host, device, read_only=read_only)
    with torch.cuda.device(device):
        return torch.as_tensor(view, device=device).view(host.dtype)


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor on memory pages of its own.

    Registering works on whole pages, so two tensors that share one would disturb each other.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    page = mmap.PAGESIZE
    raw = torch.empty((-(-nbytes // page) + 1) * page, dtype=torch.uint8)
    start = -raw.data_ptr() % page
    return raw[start : start + nbytes].view(dtype).view(shape)


def is_file_backed(tensor: torch.Tensor) -> bool:
    """Whether a CPU tensor's memory is a map of a file (Linux; ``False`` where it cannot be told).

    A checkpoint loaded on the CPU is often such a map. Pinning a private, writable file map makes
    the kernel copy its pages or fails, so such a tensor is copied to ordinary memory first.
    """
    try:
        with open("/proc/self/maps") as maps:
            lines = maps.readlines()
    except OSError:
        return False
    address = tensor.data_ptr()
    for line in lines:
        span, _, rest = line.partition(" ")
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            inode = rest.split()[3]
            return inode != "0"
    return False
