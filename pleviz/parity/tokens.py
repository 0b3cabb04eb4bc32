"""Greedy tokens of two models, the first that differs, and how close the choice was."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Greedy:
    """Tokens one model generated, and its margin at each of them."""

    tokens: tuple[tuple[int, ...], ...]
    """Per row of the batch, without the prompt."""
    margins: tuple[tuple[float, ...], ...]
    """Largest logit less the second largest, per row and step; 0 is a tie."""


@dataclass(frozen=True)
class Tokens:
    """Greedy tokens of A and B side by side."""

    a: tuple[tuple[int, ...], ...]
    b: tuple[tuple[int, ...], ...]
    first_divergence: int | None
    """Step (0 is the first generated token) at which a row first differs; ``None`` if none does."""
    row: int | None
    """The row of the batch that differs there."""
    gap_a: float | None
    """A's largest logit less its second largest at that point; 0 is a tie."""
    gap_b: float | None

    @property
    def identical(self) -> bool:
        """Whether all tokens of all rows are equal."""
        return self.first_divergence is None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        count = f"{len(self.a[0])} greedy tokens" + (
            f" in each of {len(self.a)} rows" if len(self.a) > 1 else ""
        )
        if self.first_divergence is None:
            return f"{count}: identical"
        at, row = self.first_divergence, self.row or 0
        tie = " (a tie: the order of equal logits decides)" if 0 in (self.gap_a, self.gap_b) else ""
        return (
            f"{count}: first difference at token {at} of row {row}, "
            f"A {self.a[row][at]}, B {self.b[row][at]}; the best two logits were {self.gap_a:.3g} "
            f"apart in A, {self.gap_b:.3g} in B{tie}"
        )


def greedy(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    max_new_tokens: int,
) -> Greedy:
    """Generate exactly ``max_new_tokens`` tokens per row; end-of-sequence is not allowed to end it.

    Args:
        model: a causal language model with ``generate``.
        input_ids: ``[batch, seq]``.
        attention_mask: ``[batch, seq]``; ``None`` means that no position is padding. (Left alone,
            ``generate`` would guess a mask from the pad id, and the forward pass does not.)
        max_new_tokens: tokens to generate.
    """
    margins: list[torch.Tensor] = []

    def watch_margin(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best = scores.topk(2, dim=-1).values
        margins.append(best[:, 0] - best[:, 1])
        return scores

    with torch.no_grad():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids) if attention_mask is None else attention_mask,
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            temperature=None,  # these three are set in Gemma's generation config, for sampling
            top_k=None,
            top_p=None,
            logits_processor=[watch_margin],
        )
    new = output[:, input_ids.shape[1] :].tolist()
    return Greedy(
        tokens=tuple(map(tuple, new)),
        margins=tuple(map(tuple, torch.stack(margins, dim=1).tolist())),
    )


def compare_tokens(a: Greedy, b: Greedy) -> Tokens:
    """Find the earliest step at which any row differs."""
    steps = min(len(a.tokens[0]), len(b.tokens[0]))
    for step in range(steps):
        for row, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)):
            if x[step] != y[step]:
                gaps = a.margins[row][step], b.margins[row][step]
                return Tokens(a.tokens, b.tokens, step, row, *gaps)
    return Tokens(a.tokens, b.tokens, None, None, None, None)
