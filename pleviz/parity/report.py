"""The result of a comparison: verdict, first difference, and what to look at next."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pleviz.format import html_table, text_table
from pleviz.parity.bits import MISSING, NONFINITE, OK, SHAPE, Comparison
from pleviz.parity.stages import LOGITS, TABLE_ROWS
from pleviz.parity.tokens import Tokens

_FOLD = 4  # this many OK stages in a row are shown as one line
_SHOWN = 8  # at most this many weights are listed; `.weights` has them all


@dataclass(frozen=True)
class Parity:
    """How model B compares with model A on one input. Made by :func:`pleviz.diff`."""

    model_a: str
    """What A is, in words."""
    model_b: str
    stages: tuple[Comparison, ...]
    """The forward pass in order, the logits last."""
    weights: tuple[Comparison, ...]
    """The parameters and buffers that are not equal bit for bit; all that are, are left out."""
    weights_compared: int | None
    """How many parameters and buffers were compared; ``None``: both sides are the same model."""
    tokens: Tokens | None
    """Greedy tokens, if they were asked for."""
    table_matters: bool | None
    """Whether other table rows give other logits; ``None``: not checked, as there is a difference."""
    notes: tuple[str, ...]
    """What else one should know about this comparison."""

    @property
    def verdict(self) -> str:
        """The result in a word.

        ``"non-finite"``: a NaN or infinity somewhere, so equality would mean nothing;
        ``"different"``: logits, a stage, a weight or a token differ; ``"vacuous"``: nothing
        differs, but the table has no influence on these logits, so it could hold anything;
        ``"identical"``: equal in every bit, and none of the above.
        """
        if self._first_nonfinite is not None:
            return "non-finite"
        if self.first_difference is not None:
            return "different"
        return "identical" if self.table_matters else "vacuous"

    @property
    def ok(self) -> bool:
        """``True`` for ``"identical"`` only."""
        return self.verdict == "identical"

    @property
    def first_difference(self) -> str | None:
        """The first stage that is not OK; where all are, the first weight or token that differs."""
        for comparison in (*self.stages, *self.weights):
            if comparison.status != OK:
                return comparison.name
        if self.tokens is not None and not self.tokens.identical:
            return f"greedy token {self.tokens.first_divergence}"
        return None

    @property
    def logits(self) -> Comparison:
        """The comparison of the logits."""
        return self.stages[-1]

    @property
    def max_ulp(self) -> int | None:
        """Largest distance of two logits in ULPs; ``None`` where they cannot be compared."""
        return self.logits.max_ulp

    @property
    def sentence(self) -> str:
        """The verdict, with what it rests on."""
        first = self.first_difference
        if self.verdict == "non-finite":
            bad = self._first_nonfinite
            return f"NON-FINITE: {bad.name} is the first stage with NaN or infinity ({bad.detail})."
        if self.verdict == "vacuous":
            return (
                "VACUOUS: nothing differs, but the logits do not depend on the PLE table, so this "
                "says nothing about the table."
            )
        if self.verdict == "identical":
            return f"IDENTICAL: {len(self.stages)} stages and {self.logits.total:,} logits, bit for bit."
        if any(stage.status != OK for stage in self.stages):
            return f"DIFFERENT: the first difference is at {first}; {self._logits_in_words()}."
        if self.weights:
            count = f"{len(self.weights)} of the parameters and buffers"
            return (
                f"DIFFERENT: these logits are equal bit for bit, but {count} differ, first {first}."
            )
        return f"DIFFERENT: the logits are equal bit for bit, but {first} is not."

    def _logits_in_words(self) -> str:
        logits = self.logits
        if logits.status == OK:
            return "the logits are equal all the same"
        if logits.max_ulp is None:
            return f"the logits cannot be equal ({logits.detail})"
        share = f"{logits.differing:,} of {logits.total:,}"
        return f"{share} logits differ, by up to {logits.max_ulp:,} ULP ({logits.max_abs:.2g})"

    def next_steps(self) -> tuple[str, ...]:
        """What to look at next, from where the first difference is."""
        return tuple(_hints(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return {
            "verdict": self.verdict,
            "ok": self.ok,
            "sentence": self.sentence,
            "first_difference": self.first_difference,
            "max_ulp": self.max_ulp,
            "model_a": self.model_a,
            "model_b": self.model_b,
            "stages": [stage.to_dict() for stage in self.stages],
            "weights": [weight.to_dict() for weight in self.weights],
            "weights_compared": self.weights_compared,
            "tokens": self.tokens.to_dict() if self.tokens is not None else None,
            "table_matters": self.table_matters,
            "notes": list(self.notes),
        }

    @property
    def _first_nonfinite(self) -> Comparison | None:
        return next((stage for stage in self.stages if stage.status == NONFINITE), None)

    def _stage_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        fine: list[Comparison] = []
        for stage in (*self.stages, None):
            if stage is not None and stage.status == OK and stage.name != LOGITS:
                fine.append(stage)
                continue
            if len(fine) >= _FOLD:
                total = f"{len(fine)} stages"
                rows.append((f"{fine[0].name} … {fine[-1].name}", OK, "0", "0", total))
            else:
                rows += [_row(one) for one in fine]
            fine = []
            if stage is not None:
                mark = "  <- first" if stage.name == self.first_difference else ""
                rows.append(_row(stage, mark))
        return rows

    def _weight_rows(self) -> list[tuple[str, ...]]:
        rows = [_row(weight) for weight in self.weights[:_SHOWN]]
        if len(self.weights) > _SHOWN:
            rows.append((f"… and {len(self.weights) - _SHOWN} more, in .weights", "", "", "", ""))
        return rows

    def _lines(self) -> list[str]:
        """What is said below the tables."""
        lines = []
        if self.weights_compared is None:
            lines.append("weights: both sides are the same model, only its table moved")
        elif not self.weights:
            lines.append(f"weights and buffers: all {self.weights_compared} equal bit for bit")
        if self.tokens is not None:
            lines.append(str(self.tokens))
        lines += [f"note: {note}" for note in self.notes]
        return lines + [f"next: {hint}" for hint in self.next_steps()]

    def __str__(self) -> str:
        parts = [f"A: {self.model_a}", f"B: {self.model_b}", self.sentence, ""]
        parts.append(text_table(_HEADER, self._stage_rows()))
        if self.weights:
            parts += ["", text_table(("weights that differ", *_HEADER[1:]), self._weight_rows())]
        return "\n".join([*parts, "", *self._lines()])

    def _repr_html_(self) -> str:
        title = f"A: {self.model_a}. B: {self.model_b}."
        page = f"<p><strong>{html.escape(self.sentence)}</strong></p>"
        page += html_table(_HEADER, self._stage_rows(), caption=title)
        if self.weights:
            page += html_table(("weights that differ", *_HEADER[1:]), self._weight_rows())
        items = "".join(f"<li>{html.escape(line)}</li>" for line in self._lines())
        return f"{page}<ul>{items}</ul>"


_HEADER = ("stage", "status", "max ULP", "max |A-B|", "differing")


def _row(comparison: Comparison, mark: str = "") -> tuple[str, ...]:
    differing = f"{comparison.differing:,} of {comparison.total:,}"
    if comparison.status in (MISSING, SHAPE):
        differing = comparison.detail
    elif comparison.detail:
        differing = f"{differing}; {comparison.detail}"
    return (
        comparison.name + mark,
        comparison.status,
        "" if comparison.max_ulp is None else f"{comparison.max_ulp:,}",
        "" if comparison.max_abs is None else f"{comparison.max_abs:.3g}",
        differing,
    )


def _hints(parity: Parity) -> Iterator[str]:
    """Symptom -> likely cause, for this result."""
    kinds = {weight.kind for weight in parity.weights}
    if parity.verdict == "vacuous":
        yield (
            "a freshly initialised Gemma 3n ignores its table because altup.correct_output_scale "
            "is zero: fill it with ones, or load trained weights"
        )
    elif parity.verdict == "non-finite":
        if any(note.startswith("float16") for note in parity.notes):
            yield "float16 overflows above 65,504: use bfloat16 or float32"
        yield "look for NaN or infinity in the weights at or before that stage"
    elif parity.verdict == "different":
        if kinds & {"parameter", "quantisation"}:
            yield "the weights are not the same: load or copy both models from one source, in one dtype"
        if "buffer" in kinds:
            yield (
                "buffers differ: model.to(dtype) also rounds float32 buffers (rotary frequencies), "
                "from_pretrained(dtype=...) does not; build both models the same way"
            )
        if kinds:
            return
        if parity.first_difference == TABLE_ROWS:
            yield (
                "the table gave other rows: a copy of it in another dtype, its scale (embed_scale) "
                "lost or applied twice, or ids changed on the way"
            )
        elif any(stage.status != OK for stage in parity.stages):
            yield (
                "same weights, other numbers: another device, attention implementation, batch "
                "shape or kernel rounds differently; make those equal, then compare again"
            )
        else:
            yield (
                "one forward pass agrees but decoding does not: look at the cache, the padding and "
                "the kernels for single tokens"
            )
