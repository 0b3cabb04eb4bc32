"""The popular way to keep the PLE table off the GPU by hand, as a yardstick for the homes.

People who need the memory patch the table's ``forward``: ids to the CPU, an ordinary gather there,
the rows back up. It gives the right numbers if the scale is kept. It costs a host synchronisation
at every step and a copy from pageable memory, which cannot overlap with anything.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from pleviz.table import find_table


def apply_workaround(model: nn.Module) -> Callable[[], None]:
    """Move the table of ``model`` to the CPU and patch its forward. Returns a function that undoes it.

    Raises:
        NoTableError: the model has no PLE table.
    """
    table = find_table(model).module
    came_from = table.weight.device
    table.weight.data = table.weight.data.to("cpu")
    weight, scale = table.weight, getattr(table, "embed_scale", None)

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(input_ids.to("cpu"), weight)
        rows = rows.to(input_ids.device, non_blocking=True)
        # in the table's dtype, on the device, as the module itself does: else other bits
        return rows if scale is None else rows * scale.to(rows.device, rows.dtype)

    def undo() -> None:
        del table.forward
        table.weight.data = table.weight.data.to(came_from)

    table.forward = forward
    return undo
