"""Watch one forward pass: the tensors of the PLE path and of every decoder layer, in order."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from pleviz.specs import NoTableError
from pleviz.table import PROJECTION_NAME, TABLE_NAME, find_table

LOGITS = "logits"
TABLE_ROWS = "table rows"

OnStage = Callable[[str, int | None, torch.Tensor], None]
"""Called with a stage's name, its decoder layer (or ``None``) and its tensor, as it is computed."""


def run(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    on_stage: OnStage,
    *,
    layers: bool = True,
    logits_to_keep: int = 0,
) -> None:
    """One plain forward pass of ``model``, its stages handed to ``on_stage``; logits come last.

    Not ``generate``: there Gemma 4 computes its KV-shared layers for the last position only.

    Args:
        model: a causal language model, wrapped or not.
        input_ids: ``[batch, seq]``.
        attention_mask: ``[batch, seq]`` or ``None``.
        on_stage: gets each stage.
        layers: watch the inside too; otherwise only the logits.
        logits_to_keep: positions, counted from the end, to compute logits for; 0 for all.

    Raises:
        TypeError: the model has no logits.
    """
    kwargs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if attention_mask is not None:
        kwargs["attention_mask"] = attention_mask
    if logits_to_keep:
        # as indices, because a plain number makes Gemma 4 drop positions inside the model too
        seq = input_ids.shape[1]
        first = max(0, seq - logits_to_keep)
        kwargs["logits_to_keep"] = torch.arange(first, seq, device=input_ids.device)
    with torch.no_grad(), watch(model, on_stage) if layers else ExitStack():
        output = model(**kwargs)
        logits = getattr(output, "logits", None)
        if logits is None:
            raise TypeError(
                f"{type(model).__name__} returns no logits. Pass the causal language model "
                "(…ForCausalLM or …ForConditionalGeneration), not the text model inside it."
            )
        on_stage(LOGITS, None, logits)


@contextmanager
def watch(model: nn.Module, on_stage: OnStage) -> Iterator[None]:
    """Call ``on_stage`` for every stage of the forward passes in the block; then remove the hooks.

    A stage that is computed more than once in the block gets ``(2)``, ``(3)`` … after its name.
    """
    times: Counter[str] = Counter()

    def emit(name: str, layer: int | None, tensor: Any) -> None:
        if isinstance(tensor, tuple):
            tensor = tensor[0]
        if isinstance(tensor, torch.Tensor):
            times[name] += 1
            on_stage(name if times[name] == 1 else f"{name} ({times[name]})", layer, tensor)

    text = text_model(model)
    with ExitStack() as hooks:

        def after(module: nn.Module | None, name: str, layer: int | None = None) -> None:
            if module is not None:
                handle = module.register_forward_hook(
                    lambda _module, _args, output: emit(name, layer, output)
                )
                hooks.callback(handle.remove)

        def before(module: nn.Module, layer: int) -> None:
            signature = inspect.signature(type(module).forward)

            def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
                given = signature.bind_partial(_module, *args, **kwargs).arguments
                if layer == 0 and hasattr(text, "altup_projections"):
                    emit("AltUp streams", None, given.get("hidden_states"))
                emit(f"layer {layer} per-layer input", layer, given.get("per_layer_input"))

            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

        after(text.embed_tokens, "token embedding")
        after(getattr(text, TABLE_NAME, None), TABLE_ROWS)
        after(getattr(text, PROJECTION_NAME, None), "context projection")
        for index, module in enumerate(text.layers):
            before(module, index)
            after(module, f"layer {index}", index)
        after(getattr(text, "norm", None), "final norm")
        yield


@contextmanager
def perturbed_table(model: nn.Module) -> Iterator[None]:
    """Within the block the table's lookups give other rows; no weight is touched."""
    table = getattr(find_table(model).owner, TABLE_NAME)
    handle = table.register_forward_hook(lambda _module, _args, rows: 1 - rows)
    try:
        yield
    finally:
        handle.remove()


def text_model(model: nn.Module) -> nn.Module:
    """The text model inside ``model``: the module with the token embedding and the decoder layers.

    Raises:
        NoTableError: there is no such module.
    """
    try:
        return find_table(model).owner
    except NoTableError:  # one side of a comparison may lack the table
        for module in model.modules():
            if isinstance(getattr(module, "layers", None), nn.ModuleList) and isinstance(
                getattr(module, "embed_tokens", None), nn.Module
            ):
                return module
        raise
