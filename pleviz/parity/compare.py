"""Run two models, or one model in two homes, on one input and compare them: :func:`diff`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pleviz.parity.bits import MISSING, OK, Comparison, bit_equal, compare
from pleviz.parity.report import Parity
from pleviz.parity.stages import LOGITS, perturbed_table, run
from pleviz.parity.tokens import compare_tokens, greedy
from pleviz.parity.weights import compare_weights
from pleviz.table import find_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 64  # enough to see whether the table matters


def diff(
    model_a: PreTrainedModel,
    model_b_or_home: PreTrainedModel | str,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 0,
    layers: bool = True,
    logits_to_keep: int = 0,
) -> Parity:
    """Compare two models bit by bit, or one model with itself in another home.

    Each side does one plain forward pass. The tensors of A wait in host RAM (about 2 GB of layers
    and 4.5 GB of logits for 8,500 tokens of Gemma 4 E4B) and those of B are compared as they are
    computed. The models are left as they were, also after an exception.

    Args:
        model_a: a causal language model with a PLE table.
        model_b_or_home: another model, or the name of a home (``"cpu"``, ``"mapped"``, …): then A
            as it is is compared with A inside ``pleviz.offload(model_a, home)``.
        input_ids: token ids, ``[seq]`` or ``[batch, seq]``, on any device.
        attention_mask: ``[batch, seq]``, 0 at padding. Padded positions are compared too.
        max_new_tokens: also generate this many greedy tokens with each.
        layers: compare inside the models too, not only the logits.
        logits_to_keep: compare logits of the last so many positions only; 0 for all.

    Raises:
        NoTableError: A has no PLE table.
        TypeError: ids that are not integers, a model without logits.
        ValueError: no ids, ids outside the vocabulary, a mask of another shape, an unknown home.
        OffloadError: the table cannot be moved to that home.

    >>> parity = diff(model, "cpu", input_ids, max_new_tokens=16)  # doctest: +SKIP
    >>> assert parity.ok, parity  # doctest: +SKIP
    """
    home = model_b_or_home if isinstance(model_b_or_home, str) else None
    model_b = model_a if home is not None else model_b_or_home
    find_table(model_a)
    ids, mask = _check_input(input_ids, attention_mask)
    if max_new_tokens < 0 or logits_to_keep < 0:
        raise ValueError("max_new_tokens and logits_to_keep cannot be negative")
    for model in (model_a, model_b):
        _check_ids(ids, model)
    notes = _notes(model_a, model_b, ids, mask)
    layers = layers and not (_is_compiled(model_a) or _is_compiled(model_b))

    options: dict[str, Any] = {"layers": layers, "logits_to_keep": logits_to_keep}
    stages = _Stages()
    label_a = _describe(model_a)
    with _evaluating(model_a), _evaluating(model_b):
        run(model_a, *_on_device(model_a, ids, mask), stages.keep, **options)
        tokens_a = _greedy(model_a, ids, mask, max_new_tokens)
        with _second_side(model_a, model_b, home) as label_b:
            run(model_b, *_on_device(model_b, ids, mask), stages.check, **options)
            tokens_b = _greedy(model_b, ids, mask, max_new_tokens)
    found = stages.result()
    weights, compared, unreadable = (), None, []
    if home is None:
        weights, compared, unreadable = compare_weights(model_a, model_b)
    if unreadable:
        notes.append(
            "weights on the meta device (kept elsewhere by accelerate) were not compared: "
            f"{', '.join(unreadable[:3])}{f' … ({len(unreadable)})' if len(unreadable) > 3 else ''}"
        )
    equal = not weights and all(stage.status == OK for stage in found)
    return Parity(
        model_a=label_a,
        model_b=label_b,
        stages=found,
        weights=weights,
        weights_compared=compared,
        tokens=compare_tokens(tokens_a, tokens_b) if tokens_a and tokens_b else None,
        table_matters=_table_matters(model_a, ids, mask) if equal else None,
        notes=tuple(notes),
    )


class _Stages:
    """Keeps the stages of A on the host and compares those of B with them as they come."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int | None, torch.Tensor]] = {}
        self._order: list[str] = []
        self._found: dict[str, Comparison] = {}

    def keep(self, name: str, layer: int | None, tensor: torch.Tensor) -> None:
        """A stage of A. Copied, because later code may write to it in place."""
        self._waiting[name] = layer, tensor.detach().to("cpu", copy=True)
        self._order.append(name)

    def check(self, name: str, layer: int | None, tensor: torch.Tensor) -> None:
        """A stage of B."""
        if name in self._waiting:
            self._found[name] = compare(name, self._waiting.pop(name)[1], tensor, layer=layer)
        else:
            self._found[name] = Comparison(name, "stage", MISSING, layer, detail="only in B")

    def result(self) -> tuple[Comparison, ...]:
        """All stages in the order of A, B's own after the one they follow in B; logits last."""
        order = list(self._order)
        before = None
        for name in self._found:
            if name not in order:
                order.insert(order.index(before) + 1 if before else 0, name)
            before = name
        for name, (layer, _) in self._waiting.items():  # these have no counterpart
            self._found[name] = Comparison(name, "stage", MISSING, layer, detail="only in A")
        order.remove(LOGITS)
        return tuple(self._found[name] for name in (*order, LOGITS))


def _check_input(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids and mask as ``[batch, seq]``, or a clear error."""
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"input_ids must be a tensor of token ids, not {type(input_ids).__name__}")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"input_ids must be int64 token ids, not {input_ids.dtype}")
    if input_ids.dim() not in (1, 2) or input_ids.numel() == 0:
        shape = list(input_ids.shape)
        raise ValueError(f"input_ids must be [seq] or [batch, seq] and not empty, not {shape}")
    ids = input_ids if input_ids.dim() == 2 else input_ids[None]
    if attention_mask is None:
        return ids, None
    mask = attention_mask if attention_mask.dim() == 2 else attention_mask[None]
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}: "
            "they must have one shape"
        )
    return ids, mask


def _check_ids(ids: torch.Tensor, model: nn.Module) -> None:
    """No id without a row may reach a GPU, where it ends the CUDA context."""
    low, high = int(ids.min()), int(ids.max())
    vocabulary = model.config.get_text_config().vocab_size
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"input_ids go from {low} to {high}, the vocabulary of {type(model).__name__} from 0 "
            f"to {vocabulary - 1}"
        )
    rows = getattr(model.config.get_text_config(), "vocab_size_per_layer_input", vocabulary)
    if high >= rows and model.get_input_embeddings().weight.is_cuda:
        raise ValueError(
            f"input_ids go up to {high}, the PLE table has {rows} rows. Some versions of "
            "transformers look such an id up all the same, which ends the CUDA context."
        )


def _on_device(
    model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    embedding = model.get_input_embeddings()
    device = next(embedding.parameters()).device
    if device.type == "meta":  # accelerate keeps the weight elsewhere and brings it at each call
        device = torch.device(embedding._hf_hook.execution_device)
    return ids.to(device), None if mask is None else mask.to(device)


def _greedy(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, count: int) -> Any:
    return greedy(model, *_on_device(model, ids, mask), count) if count else None


@contextmanager
def _second_side(model_a: nn.Module, model_b: nn.Module, home: str | None) -> Iterator[str]:
    """B in its place; yields what B is, in words."""
    if home is None:
        yield _describe(model_b)
        return
    from pleviz.homes import offload

    with offload(model_a, home) as moved:
        yield f"A with its table in the home '{moved.home}' ({moved.reason})"


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the block; afterwards each module's own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _table_matters(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether other table rows give other logits. Looks at the last tokens only."""
    ids, mask = _on_device(model, ids, mask)
    ids, mask = ids[:, -_PROBE_TOKENS:], None if mask is None else mask[:, -_PROBE_TOKENS:]
    found: list[torch.Tensor] = []

    def keep(_name: str, _layer: int | None, tensor: torch.Tensor) -> None:
        found.append(tensor)

    # a compiled model would not see the hook
    with _evaluating(model), torch.compiler.set_stance("force_eager"):
        run(model, ids, mask, keep, layers=False)
        with perturbed_table(model):
            run(model, ids, mask, keep, layers=False)
    return not bit_equal(*found)


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _describe(model: nn.Module) -> str:
    weight = model.get_input_embeddings().weight
    dtype, attention = str(weight.dtype).removeprefix("torch."), ""
    implementation = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if implementation:
        attention = f", {implementation} attention"
    return f"{type(model).__name__}, {dtype}, {weight.device}{attention}"


def _notes(
    model_a: nn.Module, model_b: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None
) -> list[str]:
    notes = []
    if any(p.dtype == torch.float16 for m in (model_a, model_b) for p in m.parameters()):
        notes.append(
            "float16: trained Gemma 3n and Gemma 4 models overflow it (it ends at 65,504); "
            "bfloat16 is what they were trained in"
        )
        warnings.warn(f"pleviz.diff: {notes[-1]}", stacklevel=3)
    if mask is not None and (padded := int((mask == 0).sum())):
        notes.append(
            f"{padded} of {ids.numel()} positions are padding; they are compared too (what a model "
            "computes there is of no use, but it is deterministic)"
        )
    if _is_compiled(model_a) or _is_compiled(model_b):
        notes.append("a side is compiled and does not call hooks: only the logits were compared")
    return notes
