"""Counting what rounding does, and faults of one step: against torch and by brute force."""

from __future__ import annotations

import math

import pytest
import torch

from pleviz import rounding
from pleviz.faults import plant, suspect
from pleviz.parity import bit_equal, diff, max_ulp
from tests.tiny import tiny_model

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def test_bf16_numbers_are_all_there_are() -> None:
    numbers = rounding.bf16_numbers()
    assert len(numbers) == len(set(numbers.tolist())) == 255 * 128
    assert numbers[0] == 0
    assert numbers[-1] == torch.finfo(torch.bfloat16).max
    assert bool((numbers.double().diff() > 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [-3.0, -1.0, -1e-3, 0.0, -0.0, 1e-3, 1.0, 20.0, 256.0])
def test_next_up_is_torch_s_nextafter(number: float, dtype: torch.dtype) -> None:
    here = torch.tensor([number], dtype=dtype)
    assert bit_equal(rounding.next_up(here), torch.nextafter(here, torch.full_like(here, math.inf)))
    assert max_ulp(here, rounding.next_up(here)) == 1
    assert rounding.step(number, dtype) > 0


def test_bits_spell_the_number() -> None:
    for dtype, bias, digits in ((torch.bfloat16, 127, 7), (torch.float16, 15, 10)):
        for number in (1.0, 1.5, -2.75, 0.0625):
            sign, exponent, mantissa = rounding.bits(number, dtype).split()
            value = (1 + int(mantissa, 2) / 2**digits) * 2.0 ** (int(exponent, 2) - bias)
            assert (-value if sign == "1" else value) == number
    assert rounding.bits(1.01, torch.bfloat16) == rounding.bits(1.0078125, torch.bfloat16)


def test_numbers_between_are_one_step_apart() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        found = rounding.numbers_between(0.9, 2.1, dtype)
        ups = rounding.next_up(torch.tensor(found, dtype=dtype)).tolist()
        assert ups[:-1] == found[1:]
        assert ups[-1] > 2.1
    with pytest.raises(ValueError, match="can list 16-bit numbers"):
        rounding.numbers_between(0, 1, torch.float32)
    with pytest.raises(ValueError, match="from -1"):
        rounding.numbers_between(-1, 1, torch.bfloat16)


def test_fp16_keeps_exactly_the_window_that_is_claimed() -> None:
    numbers = rounding.bf16_numbers()
    kept = rounding.survives_fp16(numbers)
    window = (numbers >= rounding.FP16_EXACT_FROM) & (numbers <= 65_280)
    assert bool(kept[window].all())
    below = numbers[numbers < rounding.FP16_EXACT_FROM]
    assert not rounding.survives_fp16(below[-1:]).item()  # the limit is sharp
    assert not kept[numbers > 65_280].any()


def test_share_that_fp16_changes_agrees_with_a_sample() -> None:
    for std in (0.02, 0.002):
        weights = (
            torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)) * std
        ).bfloat16()
        sampled = (weights != weights.half().bfloat16()).double().mean().item()
        expected = rounding.changed_by_fp16(std)
        assert abs(sampled - expected) < 5 * math.sqrt(expected / len(weights))
    assert f"{rounding.changed_by_fp16(0.02):.2%}" == "0.02%"
    with pytest.raises(ValueError, match="std must be positive"):
        rounding.changed_by_fp16(0)


def test_binades_hold_all_weights_once() -> None:
    binades = rounding.fp16_round_trip(0.02)
    assert math.isclose(sum(b.share for b in binades), 1, rel_tol=1e-12)
    exponents = [b.exponent for b in binades]
    assert exponents == sorted(set(exponents))
    weights = (torch.randn(1_000_000, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    sizes = weights.abs().double()
    for binade in binades:
        if binade.share > 1e-3:
            inside = (sizes >= 2.0**binade.exponent) & (sizes < 2.0 ** (binade.exponent + 1))
            assert inside.double().mean().item() == pytest.approx(binade.share, rel=0.1)


# --- planted faults --------------------------------------------------------------------------


def test_a_planted_fault_is_one_step_in_one_weight_of_a_copy() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    before = {name: p.clone() for name, p in model.named_parameters()}
    twin = plant(model, "layers.1.mlp.down_proj.weight", index=5)
    assert all(bit_equal(before[name], p) for name, p in model.named_parameters())
    name = "model.layers.1.mlp.down_proj.weight"
    changed = [n for n, p in twin.named_parameters() if not bit_equal(before[n], p)]
    assert changed == [name]
    difference = (dict(twin.named_parameters())[name] != before[name]).flatten().nonzero()
    assert difference.tolist() == [[5]]
    assert max_ulp(before[name], dict(twin.named_parameters())[name]) == 1


def test_a_fault_needs_a_place() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="but names: none"):
        plant(model, "layers.9.mlp.down_proj.weight")
    with pytest.raises(ValueError, match="but names: model.layers.0"):
        plant(model, "mlp.down_proj.weight")
    with pytest.raises(IndexError, match=r"has elements 0…3071, not 3072"):
        plant(model, "layers.0.mlp.down_proj.weight", index=3072)


def test_the_suspect_of_exercise_04_3_is_found_where_it_is() -> None:
    import pleviz
    from pleviz.exercises_homes import LAYERS, suspect_layer

    model = pleviz.build("gemma-4-E4B", scale="tiny")
    assert len(model.model.layers) == LAYERS
    for seed in (0, 1):
        ids = torch.randint(3, 1024, (1, 48), generator=torch.Generator().manual_seed(seed))
        assert diff(model, suspect(model), ids).first_difference == f"layer {suspect_layer(LAYERS)}"
