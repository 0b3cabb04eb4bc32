"""Advice is the budget's arithmetic: what is recommended fits, and what is better did not."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pleviz import SPECS, budget
from pleviz.advice import GPU_RESERVE, LINKS, PREFERENCE, RAM_RESERVE, advise

GB = 10**9
sizes = st.integers(min_value=1 * GB, max_value=64 * GB)


@settings(max_examples=60, deadline=None)
@given(model=st.sampled_from(list(SPECS)), gpu=sizes, ram=sizes, cuda=st.booleans())
def test_what_is_recommended_fits_and_nothing_better_does(
    model: str, gpu: int, ram: int, cuda: bool
) -> None:
    advice = advise(model, gpu_bytes=gpu, ram_bytes=ram, cuda=cuda, from_file=cuda)
    host = "file" if cuda else "cpu"
    ways = [(precision, home) for precision in PREFERENCE for home in ("gpu", host)]
    fitting = []
    for precision, home in ways:
        need = budget(model, home=home, precision=precision, context=8500)
        on_gpu = need.prefill_peak_bytes + GPU_RESERVE <= gpu
        in_ram = home == "gpu" or need.table_bytes + RAM_RESERVE <= ram
        if on_gpu and in_ram:
            fitting.append((precision, home))
    assert (advice.precision, advice.home) == (fitting[0] if fitting else (None, None))
    if advice.need is not None:
        assert advice.spare_bytes == gpu - GPU_RESERVE - advice.need.prefill_peak_bytes
        assert f"home={advice.home!r}, {advice.precision}: " in str(advice)
    else:
        assert str(advice).startswith("Does not fit: ")


@pytest.mark.parametrize("ram", [8, 16, 32])
def test_a_larger_gpu_is_never_worse(ram: int) -> None:
    order = [(p, h) for p in PREFERENCE for h in ("gpu", "file")] + [(None, None)]
    ranks = []
    for gpu in range(2, 40):
        advice = advise("gemma-4-E4B", gpu_bytes=gpu * GB, ram_bytes=ram * GB)
        ranks.append(order.index((advice.precision, advice.home)))
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] == len(order) - 1
    assert ranks[-1] == 0


def test_the_home_follows_from_what_the_machine_can_do() -> None:
    machine = {"gpu_bytes": 12 * 2**30, "ram_bytes": 32 * 2**30}
    found = {
        (cuda, from_file): advise("gemma-4-E4B", cuda=cuda, from_file=from_file, **machine).home
        for cuda in (True, False)
        for from_file in (True, False)
    }
    assert found == {
        (True, True): "file",
        (True, False): "mapped",
        (False, True): "file",
        (False, False): "cpu",
    }


def test_pages_of_a_file_need_not_all_be_in_ram_unless_they_are_page_locked() -> None:
    small = {"gpu_bytes": 12 * 2**30, "ram_bytes": 8 * 2**30, "precisions": ("bf16",)}
    assert advise("gemma-4-E4B", cuda=True, **small).home is None
    assert advise("gemma-4-E4B", cuda=False, **small).home == "file"
    assert advise("gemma-4-E4B", cuda=False, from_file=False, **small).home is None


def test_time_on_the_link_is_bytes_over_speed() -> None:
    machine = {"gpu_bytes": 12 * 2**30, "ram_bytes": 32 * 2**30, "context": 1000}
    for link in LINKS.values():
        advice = advise("gemma-4-E4B", link_bytes_per_s=link, **machine)
        assert advice.token_s == 42 * 256 * 2 / link
        assert advice.prompt_s == 1000 * advice.token_s
        assert f"{advice.token_s * 1e6:.1f} µs per token" in str(advice)
    everything = advise("gemma-4-E4B", gpu_bytes=80 * GB, ram_bytes=32 * GB)
    assert everything.token_s == 0
    assert "link" not in str(everything)


def test_a_refusal_says_what_is_missing() -> None:
    no_room = advise("gemma-4-E4B", gpu_bytes=2 * GB, ram_bytes=64 * GB)
    assert "the GPU lacks" in no_room.reason
    no_ram = advise("gemma-4-E4B", gpu_bytes=8 * GB, ram_bytes=8 * GB)
    assert "RAM is too small for the table of 5.64 GB" in no_ram.reason
    assert no_ram.short == "does not fit"
    assert dataclasses.asdict(no_ram)["need"] is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gpu_bytes": 0}, "gpu_bytes must be positive"),
        ({"ram_bytes": -1}, "ram_bytes must be positive"),
        ({"link_bytes_per_s": 0.0}, "link_bytes_per_s must be positive"),
        ({"context": 0}, "context must be positive"),
        ({"precisions": ("fp4",)}, "no precision 'fp4'"),
    ],
)
def test_wrong_arguments(wrong: dict, message: str) -> None:
    right = {"gpu_bytes": 12 * GB, "ram_bytes": 16 * GB}
    with pytest.raises(ValueError, match=message):
        advise("gemma-4-E4B", **right | wrong)
    with pytest.raises(ValueError, match="no spec named"):
        advise("gemma-5", **right)
