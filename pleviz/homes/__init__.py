"""Where the PLE table lives, and moving it there: :func:`offload`.

========== ================================================================================
home       what a lookup does
========== ================================================================================
``gpu``    the ordinary path: the table is on the device that computes
``mapped`` the table is in host RAM, page-locked in place; the GPU reads single rows of it
``file``   as ``mapped``, but the memory is the read-only map of the checkpoint file itself
``cpu``    ids go to the CPU, rows are gathered into a pinned buffer and copied up
``auto``   ``mapped`` where it works, otherwise ``cpu``; says which, and why
========== ================================================================================
"""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import torch
from torch import nn

from pleviz.format import fmt_bytes
from pleviz.homes.atomic import ONE_MOVE_AT_A_TIME, AllOrNothing
from pleviz.homes.dispatch import copier_in, drop_own_forward, put_hook_back, take_hook_off
from pleviz.homes.embedding import HostEmbedding
from pleviz.homes.guard import add_guards, remove_guards
from pleviz.homes.home import attach, detach
from pleviz.homes.registration import RegistrationError, registered_bytes, why_not
from pleviz.homes.shard import (
    TableInShard,
    checkpoint_dir,
    find_in_checkpoint,
    map_table,
    same_bits,
)
from pleviz.table import TABLE_NAME, Table, compute_device, find_table

__all__ = [
    "HOME_NAMES",
    "Offload",
    "OffloadError",
    "RegistrationError",
    "home_of",
    "offload",
    "registered_bytes",
    "restore",
]

HOME_NAMES = ("auto", "gpu", "mapped", "file", "cpu")
_RAM_RESERVE = 2**28  # bytes of RAM to leave free when the table is copied to it


class OffloadError(RuntimeError):
    """The table cannot be moved; the message says why and what to do. The model is unchanged."""


class Offload:
    """A moved table. Also a context manager: leaving the block restores the model.

    Attributes:
        home: the home in use (never ``"auto"``).
        reason: why this home, in a sentence.
    """

    def __init__(
        self, model: nn.Module, home: str, reason: str, came_from: torch.device, move: object = None
    ) -> None:
        self._model: nn.Module | None = model
        self.home = home
        self.reason = reason
        self._came_from = came_from
        self._move = move

    @property
    def table(self) -> Table:
        """The table as it is now."""
        return find_table(self._live())

    @property
    def bytes_saved(self) -> int:
        """Bytes of accelerator memory that the table would take there and does not."""
        table = self.table
        at_home = isinstance(table.module, HostEmbedding)
        return table.nbytes if at_home and compute_device(table.owner).type != "cpu" else 0

    @property
    def bytes_moved(self) -> int:
        """Bytes of table rows brought to the accelerator so far.

        Each row once per forward pass and, for ``cpu``, once per distinct id of a long prompt.
        ``mapped`` lookups inside a compiled graph are not counted.
        """
        module = self.table.module
        return module._home.bytes_moved() if isinstance(module, HostEmbedding) else 0

    def restore(self) -> None:
        """Put the table back where it was, and the module's class, parameter and hooks with it.

        If the model was moved since, the table joins it. Does nothing the second time, or when
        something else has restored this table, or offloaded it anew, in the meantime.
        """
        with ONE_MOVE_AT_A_TIME:
            if self._model is None:
                return
            table = find_table(self._model)
            moves = [module._home.move for module in _offloaded(table)]
            if self._move in moves:
                restore(self._model)
            elif self._move is None and not moves:
                table.weight.data = table.weight.data.to(self._came_from)
            self._model = None

    def _live(self) -> nn.Module:
        if self._model is None:
            raise OffloadError("this table was restored; call pleviz.offload(model) again")
        return self._model

    def __enter__(self) -> Self:
        self._live()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        if self._model is None:
            return f"Offload(home={self.home!r}, restored)"
        saved = fmt_bytes(self.bytes_saved)
        return f"Offload(home={self.home!r}, saved {saved}; {self.reason})"


def offload(
    model: nn.Module,
    home: str = "auto",
    *,
    checkpoint: str | Path | None = None,
    verify: bool = True,
) -> Offload:
    """Move the PLE table of ``model`` to ``home``. The model computes the same bits afterwards.

    Args:
        model: any model with a PLE table (see :func:`pleviz.find_table`).
        home: ``"auto"``, ``"gpu"``, ``"mapped"``, ``"file"`` or ``"cpu"``. Where host memory cannot
            be page-locked, ``"mapped"`` and ``"file"`` gather rows on the CPU, with a warning.
        checkpoint: for ``"file"``: the folder or Hub name of the safetensors checkpoint; by default
            the one the model was loaded from.
        verify: for ``"file"``: compare the file's table with the model's bit by bit first.

    Returns:
        A handle with ``.restore()``; use it in a ``with`` block to restore at its end. While it is
        offloaded the table is frozen (``requires_grad=False``); restoring brings the flag back.

    Raises:
        ValueError: unknown home.
        NoTableError: the model has no PLE table.
        FileNotFoundError: no safetensors checkpoint for ``"file"``.
        OffloadError: already offloaded, trained, quantised, on the meta device, too little RAM, or
            the checkpoint's table is not the model's.
    """
    if home not in HOME_NAMES:
        raise ValueError(f"unknown home {home!r}; choose one of {', '.join(HOME_NAMES)}")
    with ONE_MOVE_AT_A_TIME, torch.inference_mode(False):  # the table outlives a caller's block
        return _offload(model, home, checkpoint, verify)


def _offload(model: nn.Module, home: str, checkpoint: str | Path | None, verify: bool) -> Offload:
    table = find_table(model)
    device = compute_device(table.owner)
    _refuse(table)
    came_from = table.weight.device
    if home == "gpu":
        if came_from.type == "meta":
            raise OffloadError(
                f"{table.name} is kept elsewhere by accelerate, whose hook copies it in at each step. For "
                "home 'gpu' load the model without a device_map, or take the hooks off first "
                "(accelerate.hooks.remove_hook_from_submodules(model))."
            )
        if came_from != device:
            table.weight.data = table.weight.data.to(device)
        return Offload(model, "gpu", f"the table is on {device}, where the model computes", came_from)

    shard = _shard(model, checkpoint) if home == "file" else None
    problem = None if home == "cpu" else why_not(device, read_only=home == "file")
    if shard is not None and not shard.aligned:
        problem = problem or f"the table starts at the odd byte {shard.offset} of {shard.path.name}"
    kind = "cpu" if home == "cpu" or problem else "mapped"
    if shard is not None and kind == "mapped" and table.wrapper == "lora":
        raise OffloadError(
            f"a LoRA adapter sits on {table.name}, and merging it would write into the read-only file. "
            "Use home='mapped', or merge the adapter first."
        )
    if shard is None:
        _require_ram(table, kind)
    with AllOrNothing(model, table.module):
        hook = take_hook_off(table.module, device)
        if shard is not None:
            _refuse_other_table(table, shard, bits=verify)
        try:
            attached = attach(table.module, kind, device, shard)
        except RegistrationError as error:
            problem = str(error)
            attached = attach(table.module, "cpu", device, shard)
        if problem and (home == "mapped" or (home == "file" and device.type != "cpu")):
            warnings.warn(f"pleviz: rows of the table are gathered on the CPU: {problem}", stacklevel=3)
        family_has_rule = table.owner.config.model_type.startswith("gemma3n")
        attached.row_zero_outside = family_has_rule
        attached.accelerate_hook = hook
        attached.neighbour_trained = _neighbour_is_trainable(table)
        add_guards(table.owner, model, table.module, limits=not family_has_rule)
    if problem:
        reason = f"rows are gathered on the CPU: {problem}"
    elif home == "auto":
        reason = "the GPU can read host memory in place"
    else:
        reason = "you asked for it"
    handle = Offload(model, attached.name, reason, came_from, attached.move)
    try:
        _free_cache(came_from)
    except BaseException:
        handle.restore()
        raise
    return handle


def restore(model: nn.Module) -> None:
    """Put an offloaded table of ``model`` back, also on a deep copy that never had a handle.

    Raises:
        NoTableError: the model has no PLE table.
        OffloadError: its table is not offloaded.
    """
    with ONE_MOVE_AT_A_TIME, torch.inference_mode(False):
        table = find_table(model)
        modules = _offloaded(table)
        if not modules:
            raise OffloadError("the table is not offloaded: there is nothing to restore")
        still_hooked = any("_hf_hook" in module.__dict__ for module in model.modules())
        with AllOrNothing(model, *modules):
            for module in modules:
                _bring_back(module, table, still_hooked=still_hooked)
            remove_guards(model)


def _bring_back(module: HostEmbedding, table: Table, *, still_hooked: bool) -> None:
    home = module._home
    hook = home.accelerate_hook
    if home.hooked_since and not still_hooked:
        hook = None  # accelerate's hooks were removed from the model again
    if home.neighbour_trained and not _neighbour_is_trainable(table):
        home.was_trainable = False  # PEFT, or requires_grad_(False), froze the whole model
    device = compute_device(table.owner) if home.joins_model else home.was_device
    # a hook that copies weights in brings the table to the GPU only when it is used
    detach(module, device if copier_in(hook) is None else torch.device("cpu"))
    if hook is not None:
        put_hook_back(module, hook)


def _offloaded(table: Table) -> list[HostEmbedding]:
    """Every offloaded module in the table's place: PEFT may keep a copy of it beside the original."""
    place = getattr(table.owner, TABLE_NAME)
    return [module for module in place.modules() if isinstance(module, HostEmbedding)]


def home_of(model: nn.Module) -> str:
    """The home the table of ``model`` is in at this moment: ``"gpu"`` is the ordinary path.

    Raises:
        NoTableError: the model has no PLE table.
    """
    module = find_table(model).module
    return module._home.name if isinstance(module, HostEmbedding) else "gpu"


def _neighbour_is_trainable(table: Table) -> bool:
    """Whether the norm beside the table is trainable: what freezes a whole model freezes it, too.

    The table's own flag does not tell: it is off while the table is offloaded.
    """
    norm = getattr(table.owner, "per_layer_projection_norm", None)
    return norm is not None and any(p.requires_grad for p in norm.parameters())


def _refuse(table: Table) -> None:
    """Raise for every table that cannot be moved, before anything changed."""
    module, weight = table.module, table.module._parameters.get("weight")
    if weight is None or weight.shape[0] == 0:
        raise OffloadError(
            f"{table.name} has no rows: its weight was taken away or is a placeholder. Load the model "
            "with its table, then offload it."
        )
    if isinstance(module, HostEmbedding):
        raise OffloadError(
            f"{table.name} is already offloaded to '{module._home.name}'. Call .restore() on the "
            "handle, or pleviz.restore(model), before choosing another home."
        )
    if not isinstance(module, nn.Embedding) or not weight.is_floating_point():
        raise OffloadError(
            f"{table.name} is a {type(module).__name__} of {weight.dtype}: only a table of "
            "floating-point rows can be moved. Load the model with its table unquantised."
        )
    hooked = hasattr(module, "_hf_hook")  # accelerate's: its weight may be meta, its forward wrapped
    if weight.device.type == "meta" and not hooked:
        raise OffloadError(
            f"{table.name} is on the meta device: its values were never loaded."
        )
    drop_own_forward(module)
    if "forward" in module.__dict__ and not hooked:
        raise OffloadError(
            f"the forward of {table.name} was replaced on the instance (a hand-made offload?). "
            "Undo that first: `del pleviz.find_table(model).module.forward`."
        )
    if table.wrapper == "trainable_tokens":
        raise OffloadError(
            f"{table.name} has trainable tokens (trainable_tokens of PEFT): each step copies all of it "
            "on the device that computes. Merge them (model.merge_and_unload()), and offload then."
        )
    if weight.requires_grad and (table.wrapper == "modules_to_save" or module.training):
        raise OffloadError(
            f"{table.name} is being trained (requires_grad=True, "
            f"{'model.train()' if table.wrapper != 'modules_to_save' else table.wrapper}): an offloaded "
            "table is read-only. Freeze it with "
            "`pleviz.find_table(model).weight.requires_grad_(False)`, or call model.eval(), and "
            "offload again."
        )


def _shard(model: nn.Module, checkpoint: str | Path | None) -> TableInShard:
    name = str(checkpoint or getattr(model.config, "name_or_path", ""))
    folder = checkpoint_dir(name) if name else None
    if folder is None:
        raise FileNotFoundError(
            f"home 'file' needs the safetensors checkpoint on disk, and {name or 'this model'} is not a "
            "folder or in the Hugging Face cache. Pass checkpoint=<folder>, or use home='mapped'."
        )
    return find_in_checkpoint(folder)


def _refuse_other_table(table: Table, shard: TableInShard, *, bits: bool) -> None:
    """Raise unless the file holds the table of the model: its shape, dtype and, if asked, its bits."""
    weight = table.weight
    same = shard.dtype == weight.dtype and shard.shape == tuple(weight.shape)
    if same and bits:
        same = same_bits(map_table(shard), weight)
    if not same:
        raise OffloadError(
            f"the table in {shard.path.name} ({shard.dtype}, {list(shard.shape)}) is not the model's "
            f"({weight.dtype}, {list(weight.shape)}), or differs in its values: home 'file' would "
            "change the model. Use home='mapped', or save the model and load it again."
        )


def _require_ram(table: Table, home: str) -> None:
    if table.weight.device.type == "cpu":
        return
    free = psutil.virtual_memory().available
    if free < table.nbytes + _RAM_RESERVE:
        raise OffloadError(
            f"home '{home}' needs {fmt_bytes(table.nbytes, binary=True)} of host RAM for the table, "
            f"and {fmt_bytes(free, binary=True)} are free. Close something, or use home='gpu'."
        )


def _free_cache(device: torch.device) -> None:
    """Give the table's old memory back to the driver, so that other programs see it free too."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
