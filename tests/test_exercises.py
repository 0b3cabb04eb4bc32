"""Exercises accept what is right, explain what is wrong, and their printed solutions are right."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import pleviz
from pleviz import arithmetic, roofline
from pleviz.exercises import EXERCISES, Choice, Exercise, check, judge
from pleviz.specs import SPECS

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("[0-9]*.py"))
NUMBERS = {key: e for key, e in EXERCISES.items() if isinstance(e, Exercise)}
CHOICES = {key: e for key, e in EXERCISES.items() if isinstance(e, Choice)}
SCALE = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "%": 1, "tokens": 1, "ms": 1, "weights": 1, "ULP": 1}

each_number = pytest.mark.parametrize("key", NUMBERS)


# The answers once more, from the shapes alone: not by the functions that the exercises call.
def by_hand() -> dict[str, float]:
    e2b, e4b = SPECS["gemma-4-E2B"], SPECS["gemma-4-E4B"]
    row_e4b = e4b.num_hidden_layers * e4b.hidden_size_per_layer_input * 2
    table_3n = 262_144 * 35 * 256
    weights = 2 * (e4b.parameters() - 262_144 * row_e4b // 2)
    scalars = 2 * (2 + e4b.num_hidden_layers) + 4 * 2 * (128 + 256)
    own = [
        (512 if kind == "sliding_attention" else 8500, dim)
        for kind, dim in zip(e4b.layer_types[:24], e4b.head_dims[:24], strict=True)
    ]
    cache = sum(2 * tokens * 2 * dim * 2 for tokens, dim in own)
    return {
        "01.1": e2b.num_hidden_layers * e2b.hidden_size_per_layer_input * 2,
        "01.2": 8500 * row_e4b,
        "01.3": 100 * table_3n / SPECS["gemma-3n-E4B"].parameters(),
        "02.1": 262_144 * 30 * 256 * 2,
        "02.2": 12e9 - weights - scalars - cache,
        "02.4": 15.4e9 - 14.9e9,
    }


def test_answers_follow_from_the_shapes() -> None:
    for key, wanted in by_hand().items():
        assert math.isclose(EXERCISES[key].answer(), wanted, rel_tol=1e-6), key


def test_tokens_to_reach_is_the_first_that_does() -> None:
    tokens, balance = EXERCISES["01.4"].answer(), roofline.MACHINES[0].balance
    assert arithmetic.matmul_intensity(10_240, 2_560, batch=tokens) >= balance
    assert arithmetic.matmul_intensity(10_240, 2_560, batch=tokens - 1) < balance


@each_number
def test_right_answer_in_many_forms(key: str) -> None:
    exercise = NUMBERS[key]
    value = exercise.answer() / SCALE[exercise.unit]
    rounded = float(f"{value:.4g}")
    forms = [value, rounded, f"{value:.4g}", f" {value:.6f} {exercise.unit} ", np.float64(value)]
    forms += [torch.tensor(value, dtype=torch.float64)]
    assert [form for form in forms if not judge(key, form).right] == []


@pytest.mark.parametrize("key", [k for k, e in NUMBERS.items() if e.unit.endswith("B")])
def test_sizes_may_come_in_bytes_and_other_units(key: str) -> None:
    size = EXERCISES[key].answer()
    for form in (
        size,
        round(size),
        f"{size:.0f} B",
        f"{size:,.0f} bytes",
        f"{size / 1e6:.5f} MB",
        f"{size / 2**20:.5f} MiB",
        f"{size / 1e3:.3f} KB",
    ):
        assert judge(key, form).right, form


@each_number
def test_wrong_answers_are_wrong(key: str) -> None:
    exercise = NUMBERS[key]
    value = exercise.answer() / SCALE[exercise.unit]
    for wrong in (0.97 * value, 1.03 * value, -value, 0, 1, float("nan"), float("inf")):
        verdict = judge(key, wrong)
        assert not verdict.right, wrong
        assert verdict.message.startswith("not yet: ")


@each_number
def test_known_mistakes_get_their_own_hint(key: str) -> None:
    exercise = NUMBERS[key]
    for mistake in exercise.mistakes:
        verdict = judge(key, mistake.answer() / SCALE[exercise.unit])
        assert not verdict.right
        assert verdict.message == f"not yet: {mistake.hint}."
    hints = [exercise.hint, *(mistake.hint for mistake in exercise.mistakes)]
    assert len(set(hints)) == len(hints)


@each_number
def test_hints_do_not_give_the_answer_away(key: str) -> None:
    exercise = NUMBERS[key]
    shown = f"{exercise.answer() / SCALE[exercise.unit]:.3g}"
    assert all(shown not in text for text in [exercise.hint, *(m.hint for m in exercise.mistakes)])


@pytest.mark.parametrize("key", CHOICES)
def test_choices(key: str) -> None:
    exercise = CHOICES[key]
    assert judge(key, f" {exercise.answer().upper()} ").right
    wrong = [option for option in exercise.options if option != exercise.answer()]
    assert set(exercise.hints) == set(wrong)
    for option in wrong:
        assert judge(key, option).message == f"not yet: {exercise.hints[option]}."
    assert judge(key, "vram").message.startswith("cannot read 'vram': give one of ")


@pytest.mark.parametrize("answer", [None, ...])
@pytest.mark.parametrize("key", EXERCISES)
def test_no_answer_yet(key: str, answer: object) -> None:
    verdict = judge(key, answer)
    assert not verdict.right
    assert verdict.message.startswith("no answer yet: put ")


@each_number
@pytest.mark.parametrize("answer", ["", "many", "4 apples", True, [1, 2], "1 2", "GB"])
def test_unreadable_answers_say_what_is_wanted(key: str, answer: object) -> None:
    verdict = judge(key, answer)
    assert not verdict.right
    assert verdict.message.startswith(f"cannot read {answer!r}: give a number")


def test_unknown_exercise_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no exercise '9.9'.*01\.1, 01\.2"):
        check("9.9", 1)


def test_check_prints_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert pleviz.check("01.1", "17.92 kB") is None
    assert capsys.readouterr().out.startswith("01.1: right, 17.92 kB: ")


# --- the notebooks ---------------------------------------------------------------------------


def solutions() -> list[tuple[str, str]]:
    """(exercise, code) of every hidden solution."""
    found = []
    for path in NOTEBOOKS:
        text = path.read_text().replace("\n# ", "\n").replace("\n#\n", "\n\n")
        for code in re.findall(
            r"(?s)<details><summary>Solution</summary>\n\n```python\n(.*?)```", text
        ):
            key = re.search(r'pleviz\.check\("([\d.]+)"', code)
            assert key, code
            found.append((key[1], code))
    return found


def test_every_exercise_of_a_notebook_is_asked_and_solved_there() -> None:
    solved = {key for key, _ in solutions()}
    asked = {
        key
        for path in NOTEBOOKS
        for key in re.findall(r'(?m)^pleviz\.check\("([\d.]+)", None\)', path.read_text())
    }
    there = {path.name[:2] for path in NOTEBOOKS}
    assert asked == solved == {key for key in EXERCISES if key[:2] in there}


@pytest.mark.parametrize(("key", "code"), solutions(), ids=[key for key, _ in solutions()])
def test_hidden_solution_is_right(key: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"pleviz": pleviz, "arithmetic": arithmetic, "roofline": roofline}
    exec(code, names)  # our own notebook's code
    assert capsys.readouterr().out.startswith(f"{key}: right, ")
