"""Time prefill and greedy decoding of a causal language model."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pleviz.measure.plan import PREFILLS, SEGMENTS
from pleviz.table import find_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

WARM_UP = 6
"""Decode steps before the first timed one."""


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def random_ids(
    model: PreTrainedModel, batch: int, length: int, device: torch.device
) -> torch.Tensor:
    """Random token ids ``[batch, length]``, the same for every row of a model on every machine."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, find_table(model).rows, (batch, length), generator=generator)
    return ids.to(device)


def cache_name(model: PreTrainedModel) -> str:
    """The keyword that ``forward`` takes its cache by: transformers renamed it in 5.2x."""
    return (
        "cache"
        if "cache" in inspect.signature(type(model).forward).parameters
        else "past_key_values"
    )


def time_prefill(
    model: PreTrainedModel, ids: torch.Tensor, seconds: float
) -> tuple[float, list[float]]:
    """Median and all times, in seconds, of a forward pass over the prompt ``ids`` ``[batch, length]``.

    As ``generate`` does it: a cache is filled, and only the last position's logits are computed. The
    caller has done one such pass already, so that everything is warm.
    """
    least, most = PREFILLS
    times: list[float] = []
    while len(times) < least or (len(times) < most and sum(times) < seconds):
        synchronize(ids.device)
        start = time.perf_counter()
        prefill(model, ids)
        synchronize(ids.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times), times


def prefill(model: PreTrainedModel, ids: torch.Tensor, cache: Cache | None = None) -> Any:
    """One prefill pass; with no ``cache`` the model makes a dynamic one."""
    given = {} if cache is None else {cache_name(model): cache}
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, logits_to_keep=1, **given)


class Decoder(Protocol):
    """Greedy decoding, one step at a time."""

    tokens: torch.Tensor
    """``[batch, 1]``: the tokens chosen last."""

    def step(self) -> None:
        """Choose the next tokens."""


class EagerDecoder:
    """Greedy decoding with the dynamic cache that the model makes in the prefill of ``ids``."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self._model = model
        self._name = cache_name(model)
        self._rows = find_table(model).rows
        outputs = prefill(model, ids)
        self._cache = getattr(outputs, self._name)
        self.tokens = greedy(outputs.logits, self._rows)

    def step(self) -> None:
        with torch.no_grad():
            outputs = self._model(
                input_ids=self.tokens, use_cache=True, **{self._name: self._cache}
            )
        self.tokens = greedy(outputs.logits, self._rows)


def greedy(logits: torch.Tensor, rows: int) -> torch.Tensor:
    """The likeliest next tokens ``[batch, 1]`` among the ids that have a row in the table.

    Gemma 3n's output vocabulary has ids beyond its table. A trained model does not choose them; one
    with random weights would, and on a GPU some versions of transformers then crash.
    """
    return logits[:, -1, :rows].argmax(dim=-1, keepdim=True)


@dataclass(frozen=True)
class DecodeTime:
    """Speed of greedy decoding."""

    tok_s: float
    """Tokens per second, all sequences of the batch together: median of the segments."""
    segments_tok_s: tuple[float, ...]
    steps: int
    """Steps in one segment."""


def warm_up(decoder: Decoder, device: torch.device) -> None:
    """Take :data:`WARM_UP` steps, or as few as two where they take longer than a second."""
    start = time.perf_counter()
    for done in range(1, WARM_UP + 1):
        decoder.step()
        synchronize(device)
        if done >= 2 and time.perf_counter() - start > 1:
            break


def time_decode(
    decoder: Decoder, device: torch.device, *, steps: int, seconds: float
) -> DecodeTime:
    """Time warm decoding in :data:`SEGMENTS` stretches of equal length.

    A stretch has ``steps / SEGMENTS`` steps, or as few as ``seconds`` allow (at least one); the
    device is waited for at its ends only, as in real decoding.
    """
    estimate = _seconds(decoder.step, device, 2) / 2
    per_segment = max(1, min(math.ceil(steps / SEGMENTS), int(seconds / estimate)))
    times = [_seconds(decoder.step, device, per_segment) for _ in range(SEGMENTS)]
    speeds = tuple(decoder.tokens.shape[0] * per_segment / t for t in times)
    return DecodeTime(statistics.median(speeds), speeds, per_segment)


def _seconds(call: Callable[[], None], device: torch.device, times: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    return time.perf_counter() - start
