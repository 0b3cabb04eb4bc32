"""The exercises of the notebooks on homes and on parity; see :mod:`pleviz.exercises`."""

from __future__ import annotations

import random
from collections.abc import Mapping

from pleviz.advice import advise
from pleviz.arithmetic import row_bytes, table_bytes
from pleviz.budgets import budget
from pleviz.exercise_kinds import Choice, Exercise, Mistake
from pleviz.specs import SPECS

MODEL = "gemma-4-E2B"
LINK = 12 * 10**9
"""Bytes per second of the link in exercise 03.2."""
TOKEN = 1000
"""The token of exercise 03.3."""
GREEDY = 2287
"""Greedy tokens of the long comparison, as in the records."""
FLIP = 1e-4
"""Share of tokens that flip in exercise 04.4."""
LAYERS = 12
"""Decoder layers of the tiny model that notebook 04 builds (a test compares)."""


def _naive() -> int:
    """Bytes over the bus per token with ``device_map``."""
    return budget(MODEL, home="device_map").bytes_per_token


def _changed(model: str) -> float:
    from pleviz.rounding import changed_by_fp16

    rows, width = SPECS[model].table_shape
    return changed_by_fp16(SPECS[model].initializer_range) * rows * width


def _ulps(dtype: str, high: float = 1.5) -> int:
    import torch

    from pleviz.parity import max_ulp

    low, top = (torch.tensor([number], dtype=getattr(torch, dtype)) for number in (1.0, high))
    return max_ulp(low, top)


def _verdict_on_nans() -> str:
    import torch

    from pleviz.parity.bits import compare
    from pleviz.parity.report import Parity

    nans = torch.full((4,), float("nan"))
    logits = compare("logits", nans, nans)
    return Parity("A", "B", (logits,), (), None, None, None, ()).verdict


def suspect_layer(layers: int) -> int:
    """Where :func:`pleviz.faults.suspect` plants its fault in a model of so many layers."""
    return random.Random("04.3").randrange(1, layers - 1)


def _all_equal() -> float:
    """Percent chance that no token of the long comparison flips."""
    return 100 * (1 - FLIP) ** GREEDY


_NOT_THE_LAYER = (
    "run pleviz.diff(model, mystery, ids) and read .first_difference: everything before that stage "
    "is equal bit for bit"
)

HOMES: Mapping[str, Exercise | Choice] = {
    "03.1": Exercise(
        unit="GB",
        answer=lambda: 100 * _naive(),
        because="a whole table per forward pass, whatever the pass needs of it",
        hint="each token is one forward pass, and each forward pass copies the table",
        mistakes=(
            Mistake(
                lambda: 100 * row_bytes(MODEL),
                "that is what the other homes move; the hook of device_map does not pick rows",
            ),
            Mistake(_naive, "that is one token; it writes 100"),
            Mistake(lambda: 100 * table_bytes("gemma-4-E4B"), "that is E4B's table"),
        ),
    ),
    "03.2": Exercise(
        unit="ms",
        answer=lambda: 1e3 * _naive() / LINK,
        because="bytes ÷ bytes per second. No GPU can make up for that",
        hint="divide the bytes of one token by the link's bytes per second, and mind the unit",
        mistakes=(
            Mistake(lambda: _naive() / LINK, "that is in seconds"),
            Mistake(lambda: 1e3 * row_bytes(MODEL) / LINK, "that is the time of a row"),
            Mistake(lambda: 1e5 * _naive() / LINK, "that is the time of all 100 tokens"),
        ),
    ),
    "03.3": Exercise(
        unit="MB",
        answer=lambda: TOKEN * row_bytes(MODEL),
        because="the row of token 0 comes first, so as many rows lie before it as its id says",
        hint="rows lie one after the other, in the order of the ids, from 0 on",
        mistakes=(
            Mistake(
                lambda: (TOKEN + 1) * row_bytes(MODEL),
                "that is where the row ends: ids begin at 0",
            ),
            Mistake(
                lambda: TOKEN * row_bytes(MODEL) / SPECS[MODEL].num_hidden_layers,
                "a row holds the vectors of all layers",
            ),
            Mistake(
                lambda: TOKEN * row_bytes(MODEL, itemsize=1), "each number takes 2 bytes in bf16"
            ),
        ),
        tolerance=0.0005,
    ),
    "03.4": Exercise(
        unit="weights",
        answer=lambda: _changed(MODEL),
        because="the share that changes × the numbers in the table. Weights below 2⁻¹⁷ are the ones",
        hint="multiply changed_by_fp16(0.02) by how many numbers the table holds",
        mistakes=(
            Mistake(lambda: 2 * _changed(MODEL), "a weight takes 2 bytes: count weights"),
            Mistake(lambda: _changed("gemma-4-E4B"), "that is E4B's table"),
        ),
    ),
    "03.5": Choice(
        answer=lambda: str(
            advise(
                "gemma-4-E4B",
                gpu_bytes=12 * 2**30,
                ram_bytes=32 * 2**30,
                from_file=False,
                precisions=("bf16",),
            ).home
        ),
        options=("gpu", "mapped", "file", "cpu"),
        because="the table does not fit on the card, no file holds these weights, and the GPU can "
        "read them where they are",
        hints={
            "gpu": "look at the peak of home='gpu' in pleviz.budget: it is more than the card has",
            "file": "no checkpoint file has these weights",
            "cpu": "it would work, but the CPU would fetch each row while the GPU waits",
        },
    ),
    "04.1": Exercise(
        unit="ULP",
        answer=lambda: _ulps("bfloat16"),
        because="7 bits after the leading one make 128 steps from 1 to 2, half of them up to 1.5",
        hint="divide the distance by the size of one step between 1 and 2",
        mistakes=(
            Mistake(lambda: _ulps("float16"), "that is float16, which has three bits more"),
            Mistake(lambda: _ulps("float32"), "that is float32"),
            Mistake(lambda: _ulps("bfloat16", 2.0), "that is all the way to 2"),
        ),
        tolerance=0.001,
    ),
    "04.2": Choice(
        answer=_verdict_on_nans,
        options=("identical", "different", "non-finite", "vacuous"),
        because="two broken models agree on nothing that matters, so that is not called equality",
        hints={
            "identical": "their bits may be equal, but what would that say about a working model?",
            "different": "nothing differs, and yet something is wrong: what is it?",
            "vacuous": "that word is for logits that do not depend on the table",
        },
    ),
    "04.3": Choice(
        answer=lambda: str(suspect_layer(LAYERS)),
        options=tuple(map(str, range(LAYERS))),
        because="all stages before that layer are equal bit for bit, so the fault is in it",
        hints={str(n): _NOT_THE_LAYER for n in range(LAYERS) if n != suspect_layer(LAYERS)},
    ),
    "04.4": Exercise(
        unit="%",
        answer=_all_equal,
        because="so equal tokens are weak evidence, and the records compare all logits as well",
        hint="the chance that one token does not flip, to the power of the number of tokens",
        mistakes=(
            Mistake(lambda: 100 - _all_equal(), "that is the chance to notice"),
            Mistake(lambda: 100 * GREEDY * FLIP, "that is how many flips to expect, in percent"),
            Mistake(lambda: _all_equal() / 100, "give it in percent: multiply by 100"),
        ),
    ),
}
"""``"<notebook>.<number>"`` -> exercise."""
