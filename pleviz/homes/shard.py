"""Find the PLE table in a safetensors checkpoint and map it into memory, without reading it.

A safetensors file is an 8-byte little-endian header length, a JSON header with each tensor's
dtype, shape and byte range, then the raw bytes (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import mmap
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from pleviz.table import TABLE_NAME

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class TableInShard:
    """Where the bytes of a table are on disk: ``nbytes`` from ``offset`` in ``path``."""

    path: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, int]
    offset: int

    @property
    def aligned(self) -> bool:
        """Whether the elements start at multiples of their size, as a GPU needs them."""
        return self.offset % self.dtype.itemsize == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


def checkpoint_dir(name_or_path: str) -> Path | None:
    """The folder with the weights: a local one, or the newest in the Hugging Face cache."""
    local = Path(name_or_path)
    if local.is_dir():
        return local
    from huggingface_hub import try_to_load_from_cache

    for file in (_INDEX, _SINGLE):
        try:
            found = try_to_load_from_cache(name_or_path, file)
        except ValueError:  # not the form of a repository's name
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def find_in_checkpoint(folder: Path) -> TableInShard:
    """Locate the table's tensor in a single-file or sharded safetensors checkpoint.

    Raises:
        FileNotFoundError: no safetensors weights there.
        ValueError: no table in them, or one that is damaged or stored in an unsupported dtype.
    """
    index = folder / _INDEX
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        shards = sorted({shard for key, shard in weight_map.items() if _is_table(key)})
    else:
        shards = [_SINGLE]
    for shard in shards:
        path = folder / shard
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing: home 'file' needs the model's safetensors weights on disk"
            )
        header, start = _read_header(path)
        for key, entry in header.items():
            if _is_table(key):
                return _checked(path, key, entry, start)
    raise ValueError(f"no tensor named '…{TABLE_NAME}.weight' in the checkpoint {folder}")


def _is_table(key: str) -> bool:
    return key.endswith(f"{TABLE_NAME}.weight") and key.split(".")[-2] == TABLE_NAME


def _read_header(path: Path) -> tuple[dict, int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        count = struct.unpack("<Q", length)[0] if len(length) == 8 else size
        if 8 + count > size:
            raise ValueError(f"{path} is not a safetensors file, or it is cut short")
        header = json.loads(file.read(count))
    header.pop("__metadata__", None)
    return header, 8 + count


def _checked(path: Path, key: str, entry: dict, start: int) -> TableInShard:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(
            f"{key} is stored as {entry['dtype']} in {path.name}; home 'file' maps {', '.join(_DTYPES)}"
        )
    found = TableInShard(path, key, dtype, tuple(entry["shape"]), start + entry["data_offsets"][0])
    if found.offset + found.nbytes > path.stat().st_size:
        raise ValueError(f"{path} is cut short: {key} ends beyond the end of the file")
    return found


def map_table(where: TableInShard, *, copy_on_write: bool = False) -> torch.Tensor:
    """The table as a CPU tensor over a map of the file. Nothing is read yet.

    The map is shared and read-only, as the GPU driver needs it: writing to the tensor would crash
    the process. With ``copy_on_write`` it is private instead: what is written stays in this
    process and never reaches the file.
    """
    access = mmap.ACCESS_COPY if copy_on_write else mmap.ACCESS_READ
    with where.path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=access)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=where.nbytes, offset=where.offset)
    return flat.view(where.dtype).view(where.shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tables hold the same bits, in the same shape and dtype; a NaN equals itself.

    Compares on the device of ``b``, some rows at a time, so that a large table needs little memory.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    if a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    step = max(1, 2**28 // max(1, a.shape[1] * a.element_size()))  # rows in 256 MiB
    return all(
        torch.equal(
            a[row : row + step].to(b.device).contiguous().view(torch.uint8),
            b[row : row + step].contiguous().view(torch.uint8),
        )
        for row in range(0, a.shape[0], step)
    )
