"""Which home for the table, given a GPU, RAM and the link between them. Arithmetic only, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pleviz.budgets import Budget, budget
from pleviz.format import fmt_bytes
from pleviz.specs import Spec, find_spec

GPU_RESERVE = 600 * 10**6
"""Bytes of a GPU that no model gets: the CUDA context, and a little room for fragmentation."""
RAM_RESERVE = 4 * 10**9
"""Bytes of RAM left to the operating system and to Python with torch's libraries."""
LINKS: Mapping[str, float] = MappingProxyType(
    {"PCIe 3.0 ×16": 12e9, "PCIe 4.0 ×16": 25e9, "PCIe 5.0 ×16": 55e9}
)
"""Bytes per second that a copy from page-locked memory reaches; about 4/5 of the nominal rate."""
PREFERENCE = ("bf16", "int8", "nf4")
"""Precisions from the one that changes nothing to the smallest."""


@dataclass(frozen=True)
class Advice:
    """Where to put the table, and why. Made by :func:`advise`."""

    home: str | None
    """One of the homes of :func:`pleviz.offload`; ``None``: the model does not fit."""
    precision: str | None
    """The best precision that fits."""
    reason: str
    need: Budget | None
    """What the model then takes."""
    spare_bytes: int
    """Bytes of the GPU that stay free at the peak."""
    token_s: float
    """Seconds the link is busy with the table for one decoded token."""
    prompt_s: float
    """The same for the whole prompt."""

    @property
    def short(self) -> str:
        """For a cell of a table.

        >>> advise("gemma-4-E4B", gpu_bytes=12 * 10**9, ram_bytes=16 * 10**9).short
        'bf16, file'
        """
        return f"{self.precision}, {self.home}" if self.home else "does not fit"

    def __str__(self) -> str:
        if self.need is None:
            return f"Does not fit: {self.reason}."
        peak = fmt_bytes(self.need.prefill_peak_bytes)
        text = (
            f"home={self.home!r}, {self.precision}: {self.reason}. "
            f"Peak {peak}, {fmt_bytes(self.spare_bytes)} to spare"
        )
        if self.home == "gpu":
            return f"{text}."
        return (
            f"{text}; the link is busy {self.token_s * 1e6:.1f} µs per token, "
            f"{self.prompt_s * 1e3:.1f} ms for a prompt of {self.need.context:,}."
        )


def advise(
    name_or_spec: str | Spec,
    *,
    gpu_bytes: int,
    ram_bytes: int,
    link_bytes_per_s: float = LINKS["PCIe 3.0 ×16"],
    context: int = 8500,
    cuda: bool = True,
    from_file: bool = True,
    precisions: tuple[str, ...] = PREFERENCE,
) -> Advice:
    """The best way to run a model: the least rounding first, the table on the GPU if there is room.

    A way fits if its estimated prefill peak leaves :data:`GPU_RESERVE` on the GPU and, with the
    table on the host, the table leaves :data:`RAM_RESERVE` of the RAM. With CUDA that holds for the
    home ``file`` too, since page-locked pages stay in RAM; elsewhere its pages come and go.

    Args:
        name_or_spec: the model; text only.
        gpu_bytes: memory of the GPU.
        ram_bytes: memory of the host.
        link_bytes_per_s: speed of a copy between the two.
        context: tokens of the prompt, read at once, with logits for the last.
        cuda: whether the GPU is an NVIDIA one, which can read host memory in place.
        from_file: whether the weights come from a safetensors checkpoint in the same 16-bit type.
        precisions: to try, in this order.

    Raises:
        ValueError: unknown model or precision, or a number that is not positive.
    """
    spec = find_spec(name_or_spec)
    for what, number in (
        ("gpu_bytes", gpu_bytes),
        ("ram_bytes", ram_bytes),
        ("link_bytes_per_s", link_bytes_per_s),
        ("context", context),
    ):
        if not number > 0:
            raise ValueError(f"{what} must be positive, not {number}")
    room = gpu_bytes - GPU_RESERVE
    host = "file" if from_file else "mapped" if cuda else "cpu"
    must_be_in_ram = cuda or host == "cpu"
    missing = []
    for precision in precisions:
        for home in ("gpu", host):
            need = budget(spec, home=home, precision=precision, context=context)
            spare = room - need.prefill_peak_bytes
            if spare < 0:
                missing.append(f"the GPU lacks {fmt_bytes(-spare)} for {precision}, {home}")
                continue
            in_ram = must_be_in_ram and home != "gpu"
            if in_ram and ram_bytes - RAM_RESERVE < need.table_bytes:
                missing.append(f"RAM is too small for the table of {fmt_bytes(need.table_bytes)}")
                continue
            moved = need.bytes_per_token / link_bytes_per_s
            return Advice(
                home=home,
                precision=precision,
                reason=_reason(home, cuda=cuda),
                need=need,
                spare_bytes=spare,
                token_s=moved,
                prompt_s=moved * context,
            )
    return Advice(None, None, missing[-1], None, 0, 0.0, 0.0)


def _reason(home: str, *, cuda: bool) -> str:
    if home == "gpu":
        return "everything fits on the GPU, so nothing has to move"
    where = "the checkpoint's own pages in RAM" if home == "file" else "RAM"
    if cuda:
        return f"the GPU reads rows from {where}"
    return f"the CPU gathers rows from {where}, since only CUDA reads host memory in place"
