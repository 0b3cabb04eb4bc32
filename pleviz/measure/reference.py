"""What the ``gpu`` row computed, kept in a file for the rows that come after it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pleviz.measure.plan import REFERENCE_PROMPT, REFERENCE_STEPS
from pleviz.measure.timing import EagerDecoder, random_ids
from pleviz.table import find_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compute(
    model: PreTrainedModel, device: torch.device, seconds: float = 3.0
) -> dict[str, torch.Tensor]:
    """Logits ``[1, prompt, vocab]`` of a fixed random prompt, and ``[1, steps]`` greedy tokens.

    Decoding stops early, after 4 steps at least, where it takes longer than ``seconds``.
    """
    ids = random_ids(model, 1, REFERENCE_PROMPT, device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    decoder = EagerDecoder(model, ids)
    tokens = [decoder.tokens.cpu()]
    start = time.perf_counter()
    while len(tokens) < REFERENCE_STEPS:
        decoder.step()
        tokens.append(decoder.tokens.cpu())
        if len(tokens) >= 4 and time.perf_counter() - start > seconds:
            break
    return {"logits": logits.cpu(), "tokens": torch.cat(tokens, dim=1)}


def save(path: Path, model: PreTrainedModel, device: torch.device) -> None:
    """Write what ``model`` computes, and whether its table has any influence on that."""
    from safetensors.torch import save_file

    mine = compute(model, device)
    matters = not torch.equal(mine["logits"], _logits_without_table(model, device))
    part = path.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in mine.items()}, part, {"table_matters": str(matters)})
    part.replace(path)


def compare(path: Path, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """The row's ``parity``: whether ``model`` computes the bits in the file.

    ``verdict`` is ``"identical"`` (every bit of the logits and every greedy token), ``"different"``,
    ``"non-finite"`` (NaN or infinity in either), or ``"vacuous"``: equal, but the table has no
    influence on the logits, so that any table would do.
    """
    from safetensors import safe_open

    from pleviz.parity.bits import bit_equal, compare

    mine = compute(model, device)
    with safe_open(path, framework="pt") as file:
        theirs = {name: file.get_tensor(name) for name in ("logits", "tokens")}
        matters = file.metadata()["table_matters"] == "True"
    logits_equal = bit_equal(theirs["logits"], mine["logits"])
    ulp = 0 if logits_equal else compare("logits", theirs["logits"], mine["logits"]).max_ulp
    count = min(theirs["tokens"].shape[1], mine["tokens"].shape[1])
    tokens_equal = torch.equal(theirs["tokens"][:, :count], mine["tokens"][:, :count])
    finite = bool(torch.isfinite(theirs["logits"]).all() and torch.isfinite(mine["logits"]).all())
    if not finite:
        verdict = "non-finite"
    elif not (logits_equal and tokens_equal):
        verdict = "different"
    else:
        verdict = "identical" if matters else "vacuous"
    return {
        "verdict": verdict,
        "logits_equal": logits_equal,
        "greedy_equal": tokens_equal,
        "max_ulp": ulp,
        "prompt_tokens": REFERENCE_PROMPT,
        "greedy_tokens": count,
    }


def _logits_without_table(model: PreTrainedModel, device: torch.device) -> torch.Tensor:
    def zero(_module: torch.nn.Module, _args: tuple, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rows)

    hook = find_table(model).module.register_forward_hook(zero)
    try:
        ids = random_ids(model, 1, REFERENCE_PROMPT, device)
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits.cpu()
    finally:
        hook.remove()
