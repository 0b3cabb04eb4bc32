"""Exercises that check themselves: ``pleviz.check("01.2", answer)`` says right, or what to look at.

No accepted answer is written down here: each is computed by the functions that the notebooks teach,
so it cannot drift from them. So are the answers that a known mistake leads to, each with its hint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pleviz.arithmetic import parameters_by_component, row_bytes, table_bytes
from pleviz.budgets import budget
from pleviz.exercise_kinds import Choice, Exercise, Mistake
from pleviz.exercises_homes import HOMES
from pleviz.roofline import MACHINES, tokens_to_reach
from pleviz.specs import SPECS

PROMPT = 8500
"""Tokens of the long prompt in the exercises, as in the records."""
CARD = 12 * 10**9
"""Bytes of the card that exercise 02.2 is about."""
READING = {"allocated": 14_900_000_000, "reserved": 15_400_000_000, "device_used": 16_100_000_000}
"""The three readings in exercise 02.4."""

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_NAMES = {name.lower(): name for name in _UNITS} | {"bytes": "B", "byte": "B"}


@dataclass(frozen=True)
class Verdict:
    """What :func:`judge` thinks of an answer."""

    right: bool
    message: str


def _share_of_table(model: str) -> float:
    counts = parameters_by_component(model)
    return 100 * counts["ple_table"] / sum(counts.values())


def _saved(model: str, precision: str = "bf16") -> int:
    """Bytes by which the accelerator holds less once the table has left it."""
    before = budget(model, precision=precision)
    return before.resident_bytes - budget(model, home="mapped", precision=precision).resident_bytes


def _left_on_card(home: str) -> int:
    need = budget("gemma-4-E4B", home=home, context=PROMPT)
    return CARD - need.resident_bytes - need.kv_cache_bytes


EXERCISES: Mapping[str, Exercise | Choice] = MappingProxyType(
    {
        "01.1": Exercise(
            unit="kB",
            answer=lambda: row_bytes("gemma-4-E2B"),
            because="layers × 256 numbers × 2 bytes: all layers' vectors of a token lie in one row",
            hint="a row holds hidden_size_per_layer_input numbers for each layer, 2 bytes each",
            mistakes=(
                Mistake(
                    lambda: 2 * SPECS["gemma-4-E2B"].hidden_size_per_layer_input,
                    "that is the vector of one layer; a row holds those of all layers",
                ),
                Mistake(
                    lambda: row_bytes("gemma-4-E2B", itemsize=1),
                    "that counts numbers; each takes 2 bytes in bf16",
                ),
                Mistake(
                    lambda: 2 * SPECS["gemma-4-E2B"].hidden_size,
                    "that is a row of the token embedding; the PLE row does not depend on "
                    "hidden_size",
                ),
                Mistake(
                    lambda: row_bytes("gemma-4-E4B"), "that is E4B's row; E2B has fewer layers"
                ),
            ),
        ),
        "01.2": Exercise(
            unit="MB",
            answer=lambda: PROMPT * row_bytes("gemma-4-E4B"),
            because="tokens × bytes of a row; the size of the table does not enter",
            hint="each token of the prompt reads one row",
            mistakes=(
                Mistake(
                    lambda: table_bytes("gemma-4-E4B"), "that is the whole table, which is not read"
                ),
                Mistake(
                    lambda: row_bytes("gemma-4-E4B"), "that is one token; the prompt has 8,500"
                ),
                Mistake(
                    lambda: (
                        PROMPT * row_bytes("gemma-4-E4B") / SPECS["gemma-4-E4B"].num_hidden_layers
                    ),
                    "that is the share of one layer; a lookup brings all layers' vectors at once",
                ),
            ),
            tolerance=0.005,
        ),
        "01.3": Exercise(
            unit="%",
            answer=lambda: _share_of_table("gemma-3n-E4B"),
            because="parameters of the table ÷ parameters of the text model",
            hint="divide the parameters of ple_table by the sum of all components",
            mistakes=(
                Mistake(
                    lambda: (
                        100
                        * _share_of_table("gemma-3n-E4B")
                        / (100 - _share_of_table("gemma-3n-E4B"))
                    ),
                    "that is the table compared with the rest; the whole includes the table",
                ),
                Mistake(
                    lambda: _share_of_table("gemma-3n-E4B") / 100,
                    "give it in percent: multiply by 100",
                ),
                Mistake(lambda: _share_of_table("gemma-3n-E2B"), "that is E2B's share"),
            ),
        ),
        "01.4": Exercise(
            unit="tokens",
            answer=lambda: tokens_to_reach("gemma-4-E4B", MACHINES[0]),
            because="a weight does 2 FLOP per token and is read once for all of them, so its "
            "intensity grows with the tokens until arithmetic becomes the limit",
            hint="raise batch in matmul_intensity until it passes the balance of the machine",
            mistakes=(
                Mistake(
                    lambda: MACHINES[0].balance,
                    "close: that would be it if only the weights were read. Inputs and outputs "
                    "cost bytes too, so a few more tokens are needed",
                ),
            ),
        ),
        "02.1": Exercise(
            unit="GB",
            answer=lambda: _saved("gemma-3n-E2B"),
            because="exactly the table, nothing else moved",
            hint="subtract budget(…, home='mapped').resident_bytes from that of home='gpu'",
            mistakes=(
                Mistake(
                    lambda: _saved("gemma-3n-E2B") * 10**9 / 2**30,
                    "right bytes, other unit: that number is in GiB (2³⁰); give GB (10⁹)",
                ),
                Mistake(
                    lambda: budget("gemma-3n-E2B", home="mapped").resident_bytes,
                    "that is what stays; asked is what goes",
                ),
            ),
        ),
        "02.2": Exercise(
            unit="GB",
            answer=lambda: _left_on_card("mapped"),
            because="card − weights − KV cache. Prefill needs room for activations too, which is "
            "what the rest is for",
            hint="12 GB − resident_bytes − kv_cache_bytes, both with home='mapped', context=8500",
            mistakes=(
                Mistake(
                    lambda: CARD - budget("gemma-4-E4B", home="mapped").resident_bytes,
                    "the KV cache of 8,500 tokens is missing: pass context=8500",
                ),
                Mistake(
                    lambda: _left_on_card("gpu"),
                    "that is with the table still on the GPU, where the model does not fit at all",
                ),
            ),
            tolerance=0.005,
        ),
        "02.3": Choice(
            answer=lambda: "allocated",
            options=("allocated", "reserved", "device_used"),
            because="deleting a tensor gives its memory to torch's cache. Reserved, and with it "
            "what nvidia-smi shows, stay until the cache is emptied",
            hints={
                "reserved": "reserved counts torch's cache too, and that is where the memory went",
                "device_used": "nvidia-smi counts what torch has reserved, its cache included",
            },
        ),
        "02.4": Exercise(
            unit="GB",
            answer=lambda: READING["reserved"] - READING["allocated"],
            because="reserved − allocated is cache without use; empty_cache() returns at most that",
            hint="only memory that torch holds and no tensor uses can be given back",
            mistakes=(
                Mistake(
                    lambda: READING["device_used"] - READING["reserved"],
                    "that is the CUDA context and other programs: nothing in Python frees it",
                ),
                Mistake(
                    lambda: READING["device_used"] - READING["allocated"],
                    "part of that is the CUDA context, which stays",
                ),
            ),
        ),
    }
    | HOMES
)
"""``"<notebook>.<number>"`` -> exercise."""


def check(key: str, answer: float | str | None = None) -> None:
    """Print whether ``answer`` to exercise ``key`` is right, and if not, what to look at.

    Args:
        key: such as ``"01.2"``.
        answer: a number in the unit that is asked for, or text with its own (``"17.9 kB"``); the
            word itself where a word is asked for. Rounding to three digits is fine.

    Raises:
        ValueError: there is no such exercise; the message lists them.
    """
    print(f"{key}: {judge(key, answer).message}")  # noqa: T201


def judge(key: str, answer: float | str | None) -> Verdict:
    """The verdict that :func:`check` prints."""
    if key not in EXERCISES:
        raise ValueError(f"there is no exercise {key!r}. Exercises: {', '.join(EXERCISES)}.")
    exercise = EXERCISES[key]
    if answer is None or answer is ...:
        return Verdict(False, f"no answer yet: put {_wanted(exercise)} in its place.")
    if isinstance(exercise, Choice):
        return _judge_choice(exercise, answer)
    readings = _readings(answer, exercise.unit)
    if not readings:
        return Verdict(False, f"cannot read {answer!r}: give {_wanted(exercise)}.")

    def off(wanted: float) -> float:
        return min(abs(number - wanted) / abs(wanted) for number in readings)

    if off(exercise.answer()) <= exercise.tolerance:
        return Verdict(
            True, f"right, {_shown(exercise.answer(), exercise.unit)}: {exercise.because}."
        )
    # the nearest known mistake: two of them may be within the tolerance of an answer
    nearest = min(exercise.mistakes, key=lambda mistake: off(mistake.answer()))
    explained = off(nearest.answer()) <= exercise.tolerance
    return Verdict(False, f"not yet: {nearest.hint if explained else exercise.hint}.")


def _judge_choice(exercise: Choice, answer: object) -> Verdict:
    word = str(answer).strip().lower()
    if word not in exercise.options:
        return Verdict(False, f"cannot read {answer!r}: give {_wanted(exercise)}.")
    if word == exercise.answer():
        return Verdict(True, f"right, {word}: {exercise.because}.")
    return Verdict(False, f"not yet: {exercise.hints[word]}.")


def _wanted(exercise: Exercise | Choice) -> str:
    if isinstance(exercise, Choice):
        return f"one of {', '.join(map(repr, exercise.options))}"
    if exercise.unit in _UNITS:
        return f"a number in {exercise.unit}, or text with a unit"
    return "a number in percent" if exercise.unit == "%" else f"a number of {exercise.unit}"


def _readings(answer: object, unit: str) -> list[float]:
    """What the answer may mean, in bytes, or in ``unit`` where that is not a size; [] if nothing.

    A size without a unit may be in the unit asked for or in bytes: the two are never confused.
    """
    scales = [_UNITS[unit], 1] if unit in _UNITS else [1]
    if isinstance(answer, str):
        text = re.sub(r"[,_\u202f]", "", answer).strip()
        match = re.fullmatch(r"([-+]?\d*\.?\d+(?:e[-+]?\d+)?)\s*(\S*)", text, re.IGNORECASE)
        if match is None:
            return []
        own = match[2]
        if own and own != unit:
            if unit not in _UNITS or own.lower() not in _NAMES:
                return []
            scales = [_UNITS[_NAMES[own.lower()]]]
        elif own:
            scales = scales[:1]
        answer = float(match[1])
    if isinstance(answer, bool):
        return []
    try:
        number = float(answer)  # type: ignore[arg-type]  # also numpy's and torch's numbers
    except (TypeError, ValueError):
        return []
    return [number * scale for scale in scales]


def _shown(number: float, unit: str) -> str:
    if unit in _UNITS:
        return f"{number / _UNITS[unit]:,.4g} {unit}"
    return f"{number:.3g} %" if unit == "%" else f"{number:,.0f} {unit}"
