"""Greedy decoding with ``torch.compile`` and a static cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pleviz.measure.timing import cache_name, greedy, prefill, synchronize
from pleviz.table import find_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

WARM_UP = 6
"""Steps until nothing more is compiled or recorded: step 1 compiles, the next two record CUDA graphs."""


class CompiledDecoder:
    """Greedy decoding, the whole step in one compiled function, with a static cache.

    Args:
        model: on its device.
        ids: the prompt ``[batch, length]``; its prefill runs eagerly.
        max_tokens: size of the cache.
        backend: of ``torch.compile``. Inductor on CUDA runs with ``mode="reduce-overhead"``, that is
            with CUDA graphs, as transformers' own ``generate`` does.
        fullgraph: raise rather than break the graph.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        max_tokens: int,
        *,
        backend: str = "inductor",
        fullgraph: bool = True,
    ) -> None:
        rows, name = find_table(model).rows, cache_name(model)
        cache = static_cache(model, max_tokens)
        self.tokens = greedy(prefill(model, ids, cache).logits, rows)
        _fix_shapes(self.tokens, cache)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            outputs = model(input_ids=tokens, use_cache=True, **{name: cache})
            return greedy(outputs.logits, rows)

        graphs = backend == "inductor" and ids.device.type == "cuda"
        self._step = torch.compile(
            step,
            backend=backend,
            fullgraph=fullgraph,
            **({"mode": "reduce-overhead"} if graphs else {}),
        )

    def step(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()  # the last step's output has been copied out
        with torch.no_grad():
            self.tokens.copy_(self._step(self.tokens))


def static_cache(model: PreTrainedModel, max_tokens: int) -> Cache:
    """A static cache in which every layer has room for ``max_tokens``, sliding-window layers too.

    transformers' own sliding layer keeps its length as a Python integer as well. In a compiled step
    that is one more input, of another value each time, and CUDA graphs are recorded anew for each.
    Up to the window's length both kinds of layer hold the same tensors.
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=max_tokens)
    cache.layers = [StaticLayer(max_cache_len=max_tokens) for _ in cache.layers]
    return cache


def _fix_shapes(tokens: torch.Tensor, cache: Cache) -> None:
    """Have every size compiled as a constant, though another batch size was compiled before."""
    tensors = [tokens]
    for layer in cache.layers:
        tensors += [t for t in (layer.keys, layer.values) if t is not None]
    for tensor in tensors:
        torch._dynamo.mark_static(tensor)


@dataclass(frozen=True)
class Compiled:
    """A decoder that has been compiled and warmed up, and what that took."""

    decoder: CompiledDecoder
    compile_s: float
    fullgraph: bool
    graphs: int
    cudagraph_skips: int
    tokens: list[list[int]]
    """Per sequence, the tokens of the prompt's end and of the warm-up."""


def compile_decoder(
    model: PreTrainedModel, ids: torch.Tensor, max_tokens: int, *, backend: str
) -> Compiled:
    """Compile in one graph where that works, otherwise with breaks, and take the first steps."""
    graphs, skips = graph_count(), _cudagraph_skips()
    start = time.perf_counter()
    for fullgraph in (True, False):
        decoder = CompiledDecoder(model, ids, max_tokens, backend=backend, fullgraph=fullgraph)
        tokens = [decoder.tokens.clone()]
        try:
            for _ in range(WARM_UP):
                decoder.step()
                tokens.append(decoder.tokens.clone())
            break
        except torch._dynamo.exc.Unsupported:
            if not fullgraph:
                raise
            graphs = graph_count()
    synchronize(ids.device)
    return Compiled(
        decoder=decoder,
        compile_s=time.perf_counter() - start,
        fullgraph=fullgraph,
        graphs=graph_count() - graphs,
        cudagraph_skips=_cudagraph_skips() - skips,
        tokens=torch.cat(tokens, dim=1).tolist(),
    )


def graph_count() -> int:
    """Graphs compiled so far in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _cudagraph_skips() -> int:
    return torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
