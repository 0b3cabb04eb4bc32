"""Arithmetic against real models: their tensors, caches, live activations and bitsandbytes' bytes."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pleviz.arithmetic import (
    HOMES,
    PUBLISHED,
    break_even_rank,
    budget,
    effective_parameters,
    embedding_row_intensity,
    factorised_table_parameters,
    kv_cache_bytes,
    matmul_intensity,
    parameters_by_component,
    row_bytes,
    table_bytes,
    unused_kv_parameters,
)
from pleviz.building import empty_model
from pleviz.configs import shrink
from pleviz.peaks import CUBLAS_WORKSPACE, Pass, kv_bytes, stages
from pleviz.precision import PRECISIONS, is_quantised, nf4_bytes
from pleviz.specs import SPECS, build, spec_of
from tests.spec_strategies import text_configs

NAMES = tuple(SPECS)
ONE_PER_FAMILY = ("gemma-3n-E2B", "gemma-4-E2B")
E4B = "gemma-4-E4B"


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ------------------------------------------------------------------ the table


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_as_many_rows_as_tokens(name):
    assert table_bytes(name) == row_bytes(name) * SPECS[name].vocab_size_per_layer_input
    assert table_bytes(name, itemsize=4) == 2 * table_bytes(name)


def test_headline_numbers():
    b = budget(E4B, home="mapped")
    assert (b.table_bytes, b.row_bytes) == (5_637_144_576, 21_504)
    said = json.loads(b.to_json())
    assert (said["table_bytes"], said["row_bytes"]) == (5_637_144_576, 21_504)
    assert said["host_components"] == {"ple_table": 5_637_144_576}
    assert said["resident_bytes"] == b.resident_bytes == 9_288_885_336
    assert said["bytes_per_token"] == 21_504


# ------------------------------------------------------------------ resident bytes, exactly


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_resident_bytes_are_those_of_the_model(name, precision):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    model = build(name, dtype=dtype)
    held = sum(bytes_of(t) for t in (*model.parameters(), *model.buffers()))
    b = budget(spec_of(model), precision=precision)
    assert b.resident_bytes == held
    assert b.components["buffers"] == sum(bytes_of(t) for t in model.buffers())
    assert b.components["ple_table"] == bytes_of(model.model.embed_tokens_per_layer.weight)


@pytest.mark.parametrize("name", ["gemma-4-E2B", "gemma-4-E4B"])
def test_resident_bytes_with_towers_are_those_of_the_model(name):
    model = empty_model(SPECS[name], towers=True, dtype=torch.bfloat16)
    held = sum(bytes_of(t) for t in (*model.parameters(), *model.buffers()))
    assert budget(name, towers=True).resident_bytes == held


NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": torch.bfloat16,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("precision", "double_quant", "options"),
    [
        ("nf4", True, NF4 | {"bnb_4bit_use_double_quant": True}),
        ("nf4", False, NF4),
        ("int8", True, {"load_in_8bit": True}),
    ],
)
def test_quantised_bytes_are_those_bitsandbytes_holds(
    name, precision, double_quant, options, tmp_path
):
    model = build(name)
    model.save_pretrained(tmp_path)
    quantised = type(model).from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
        quantization_config=BitsAndBytesConfig(**options),
    )
    held = sum(bytes_of(t) for t in quantised.buffers())
    held += sum(bytes_of(t) for p in quantised.parameters() for t in _parts(p))
    b = budget(spec_of(quantised), precision=precision, double_quant=double_quant)
    assert b.resident_bytes == held
    assert b.resident_bytes < budget(spec_of(quantised)).resident_bytes


def _parts(parameter: nn.Parameter) -> list[torch.Tensor]:
    """The parameter and what bitsandbytes hangs on it."""
    parts = [parameter.data]
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        parts += [state.absmax, state.code]
        if state.nested:
            parts += [state.offset, state.state2.absmax, state.state2.code]
    if getattr(parameter, "SCB", None) is not None:
        parts.append(parameter.SCB)
    return parts


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("numel", [1, 9, 63, 64, 65, 64 * 256, 64 * 256 + 1, 100_000])
def test_nf4_bytes_of_any_size(numel, double_quant):
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        torch.ones(numel), quant_type="nf4", compress_statistics=double_quant
    )
    parts = [packed, state.absmax, state.code]
    if double_quant:
        parts += [state.offset, state.state2.absmax, state.state2.code]
    assert nf4_bytes(numel, double_quant=double_quant) == sum(map(bytes_of, parts))


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
@pytest.mark.parametrize("towers", [False, True])
def test_what_is_quantised_at_real_shapes(name, towers):
    """The modules that transformers swaps for bitsandbytes' in an untied model, as it loads one."""
    from transformers import initialization
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    if towers and SPECS[name].family == "gemma3n":
        name = E4B  # Gemma 3n's vision tower needs timm
    with initialization.no_tie_weights():
        model = empty_model(SPECS[name], towers=towers, dtype=torch.bfloat16)
    skipped = get_keys_to_not_convert(model)
    replace_with_bnb_linear(model, skipped, BitsAndBytesConfig(**NF4))
    swapped = {
        f"{module_name}.weight"
        for module_name, module in model.named_modules()
        if type(module).__name__ == "Linear4bit"
    }
    assert swapped == {t.name for t in SPECS[name].tensors(towers) if is_quantised(t, "nf4")}
    assert len(swapped) > 100


def test_gemma3n_towers_are_counted_in_every_precision():
    for precision in PRECISIONS:
        text = budget("gemma-3n-E4B", precision=precision)
        both = budget("gemma-3n-E4B", precision=precision, towers=True)
        assert both.components["towers"] > 0
        assert "towers" not in text.components
        assert both.components["ple_table"] == text.components["ple_table"]


# ------------------------------------------------------------------ KV cache


def _cache_after(model: PreTrainedModel, prompt: int, steps: int, batch: int = 1) -> list[int]:
    """Bytes that each layer's cached keys and values keep in memory (whole storages)."""
    cache = None
    with torch.no_grad():
        for count in [prompt] * (prompt > 0) + [1] * steps:
            ids = torch.full((batch, count), 7)
            cache = model(ids, past_key_values=cache, use_cache=True).past_key_values
    sizes = []
    for layer in cache.layers:
        if layer.keys is not None and layer.keys.numel():
            tensors = (layer.keys, layer.values)
            sizes.append(sum(t.untyped_storage().nbytes() for t in tensors))
    return sizes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("context", [2, 7, 8, 9, 10, 30])  # the tiny window is 8
def test_kv_cache_is_what_the_model_holds_while_decoding(name, context):
    model = build(name, dtype=torch.float32)
    held = sum(_cache_after(model, context - 1, 1, batch=2))
    assert kv_cache_bytes(spec_of(model), context, batch=2, itemsize=4) == held


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [5, 8, 30])
def test_sliding_layers_hold_the_whole_prompt_until_the_next_token(name, prompt):
    model = build(name, dtype=torch.float32)
    spec = spec_of(model)
    after_prefill = _cache_after(model, prompt, 0)
    assert kv_bytes(spec, prompt, 0, 1, 4) == after_prefill
    assert (sum(after_prefill) > kv_cache_bytes(spec, prompt, itemsize=4)) == (prompt > 8)


@settings(deadline=None, max_examples=10)
@given(config=text_configs(), context=st.integers(2, 20))
def test_kv_cache_of_random_configs(config, context):
    assume(config.num_kv_shared_layers > 0)  # transformers 5.8 forgets the windows of the others
    spec = shrink(spec_of(config))
    model = build(spec_of(config), dtype=torch.float32)
    assert kv_cache_bytes(spec, context, itemsize=4) == sum(_cache_after(model, context - 1, 1))


# ------------------------------------------------------------------ peaks


class LiveBytes(TorchDispatchMode):
    """Most bytes alive at once, apart from tensors that were there before."""

    def __init__(self, before: list[torch.Tensor]) -> None:
        super().__init__()
        self.before = {t.untyped_storage()._cdata for t in before}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.live = {key: value for key, value in self.live.items() if not value[0].expired()}
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.before:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return out


def _no_attention(module, query, key, value, mask, **kwargs):
    """In place of a fused kernel: the output, and nothing of its inner workings."""
    return torch.empty_like(query).transpose(1, 2).contiguous(), None


def live_peak(name: str, tokens: int, batch: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Peak of a prefill at real shapes, measured on the meta device, without mask tensors."""
    ALL_ATTENTION_FUNCTIONS.register("pleviz_none", _no_attention)
    model = empty_model(SPECS[name], dtype=dtype).eval()
    model.config._attn_implementation = "pleviz_none"
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    masks = {"full_attention": None, "sliding_attention": None}
    last = torch.tensor([-1], device="meta")  # as a tensor, so that no layer skips the prompt
    watch = LiveBytes([*model.parameters(), *model.buffers(), ids, last])
    with torch.no_grad(), watch:
        model(ids, attention_mask=masks, use_cache=True, logits_to_keep=last)
    return watch.peak


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tokens", "batch"), [(300, 1), (500, 3)])
def test_the_estimated_peak_is_the_one_of_live_tensors(name, tokens, batch):
    parts = stages(SPECS[name], Pass(tokens, batch=batch))
    assert max(parts.values()) == pytest.approx(live_peak(name, tokens, batch), rel=0.002)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_the_estimated_peak_in_float32(name):
    parts = stages(SPECS[name], Pass(500, itemsize=4))
    assert max(parts.values()) == pytest.approx(live_peak(name, 500, 1, torch.float32), rel=0.002)


def test_logits_of_every_position_dominate():
    """8,500 positions × 262,144 logits in bf16, before and after softcapping: 8.9 GB."""
    last, all_of_them = (budget(E4B, context=8500, logits=n) for n in (1, 8500))
    assert all_of_them.prefill_stages["head"] > 2 * 8500 * 262_144 * 2
    assert all_of_them.prefill_peak_bytes - last.prefill_peak_bytes > 7e9


@pytest.mark.parametrize(
    ("home", "resident", "prefill_peak"),
    [("gpu", 14.93, 16.43), ("mapped", 9.29, 10.79), ("device_map", 9.29, 15.37)],
)
def test_against_one_h200(home, resident, prefill_peak):
    """Measured: Gemma 4 E4B text model, bf16, 8,500-token prefill; torch 2.11, transformers 5.17."""
    b = budget(E4B, home=home, context=8500)
    assert b.resident_bytes / 1e9 == pytest.approx(resident, abs=0.005)
    assert b.prefill_peak_bytes / 1e9 == pytest.approx(prefill_peak, abs=0.01)


def test_device_map_decoding_peak_against_one_h200():
    assert budget(E4B, home="device_map", context=128).decode_peak_bytes / 1e9 == pytest.approx(
        14.96, abs=0.005
    )


def test_nf4_against_one_h200():
    """Measured after a forward pass, without double quantisation: 9.26 GB, and 3.62 mapped."""
    for home, measured in (("gpu", 9.26), ("mapped", 3.62)):
        b = budget(E4B, home=home, precision="nf4", double_quant=False)
        held = (b.resident_bytes + CUBLAS_WORKSPACE) / 1e9
        assert held == pytest.approx(measured, rel=0.005)


# ------------------------------------------------------------------ properties of a budget

budgets = st.fixed_dictionaries(
    {
        "name_or_spec": st.sampled_from(NAMES),
        "home": st.sampled_from(HOMES),
        "precision": st.sampled_from(PRECISIONS),
        "towers": st.booleans(),
        "context": st.integers(0, 40_000),
        "batch": st.integers(1, 64),
        "prefill_chunk": st.one_of(st.none(), st.integers(1, 4096)),
        "double_quant": st.booleans(),
    }
)


@settings(deadline=None, max_examples=60)
@given(call=budgets)
def test_components_add_up(call):
    b = budget(**call)
    assert sum(b.components.values()) == b.resident_bytes + b.kv_cache_bytes
    assert all(isinstance(v, int) and v >= 0 for v in b.components.values())
    assert b.prefill_peak_bytes >= b.resident_bytes
    assert b.decode_peak_bytes >= b.resident_bytes
    rows = SPECS[call["name_or_spec"]].vocab_size_per_layer_input
    assert b.table_bytes == rows * b.row_bytes
    everywhere = sum(b.host_components.values()) + b.resident_bytes
    on_gpu = budget(**call | {"home": "gpu"})
    assert everywhere == on_gpu.resident_bytes
    if call["home"] != "gpu":
        assert on_gpu.resident_bytes - b.resident_bytes == b.table_bytes
    assert json.loads(b.to_json()) == b.to_dict()


@settings(deadline=None, max_examples=40)
@given(call=budgets, more=st.integers(1, 5000))
def test_more_never_needs_less(call, more):
    b = budget(**call)
    longer = budget(**call | {"context": call["context"] + more})
    wider = budget(**call | {"batch": call["batch"] + more % 7 + 1})
    for bigger in (longer, wider):
        assert bigger.resident_bytes == b.resident_bytes
        assert bigger.kv_cache_bytes >= b.kv_cache_bytes
        assert bigger.prefill_peak_bytes >= b.prefill_peak_bytes
        assert bigger.decode_peak_bytes >= b.decode_peak_bytes


@settings(deadline=None, max_examples=25)
@given(call=budgets)
def test_reading_the_prompt_in_pieces_never_needs_more_at_the_lookup(call):
    whole = budget(**call | {"prefill_chunk": None, "context": call["context"] + 1})
    pieces = budget(**call | {"prefill_chunk": 256, "context": call["context"] + 1})
    for stage in ("lookup", "project", "head"):
        assert pieces.prefill_stages[stage] <= whole.prefill_stages[stage]


def test_lower_precision_needs_less():
    sizes = [budget(E4B, precision=p).resident_bytes for p in ("fp32", "bf16", "int8", "nf4")]
    assert sizes == sorted(sizes, reverse=True)
    assert budget(E4B, precision="nf4").resident_bytes < (
        budget(E4B, precision="nf4", double_quant=False).resident_bytes
    )


def test_bytes_over_the_bus():
    per_token = {home: budget(E4B, home=home).bytes_per_token for home in HOMES}
    row, table = 21_504, 5_637_144_576
    assert per_token == {"gpu": 0, "cpu": row, "mapped": row, "file": row, "device_map": table}


def test_no_context_means_no_peaks():
    b = budget(E4B)
    assert b.prefill_peak_bytes == b.decode_peak_bytes == b.resident_bytes
    assert b.kv_cache_bytes == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"name_or_spec": "gemma-5"}, "gemma-3n-E2B"),
        ({"home": "disk"}, "gpu, cpu, mapped, file, device_map"),
        ({"precision": "fp8"}, "bf16, fp16, fp32, nf4, int8"),
        ({"context": -1}, "context must be at least 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1"),
        ({"logits": 0}, "logits must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_with_the_valid_ones(wrong, says):
    with pytest.raises(ValueError, match=says):
        budget(**{"name_or_spec": E4B} | wrong)


def test_budget_reads_well():
    b = budget(E4B, home="mapped", context=8500)
    text, page = str(b), b._repr_html_()
    for said in ("5.64 GB", "9.29 GB", "10.79 GB", "21.50 kB", "estimate", "8500 tokens"):
        assert said in text
        assert said in page
    assert page.count("<table") == 1
    with pytest.raises(TypeError):
        b.components["ple_table"] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        b.home = "gpu"


# ------------------------------------------------------------------ parameters and intensities


@pytest.mark.parametrize("name", NAMES)
def test_parameters_by_component_add_up(name):
    counts = parameters_by_component(name, towers=True)
    assert sum(counts.values()) == SPECS[name].parameters(towers=True)
    assert counts["ple_table"] == math.prod(SPECS[name].table_shape)
    assert ("altup" in counts) == ("laurel" in counts) == name.startswith("gemma-3n")


@pytest.mark.parametrize(
    ("name", "total", "effective", "within"),
    [
        ("gemma-3n-E2B", 5.44e9, 1.91e9, 0.005e9),
        ("gemma-3n-E4B", 7.85e9, 4e9, 0.05e9),
        ("gemma-4-E2B", 5.1e9, 2.3e9, 0.055e9),  # 2.353: Google rounds down here
        ("gemma-4-E4B", 8e9, 4.5e9, 0.06e9),
    ],
)
def test_effective_parameters_arrive_at_the_published_figures(name, total, effective, within):
    e = effective_parameters(name)
    assert e.total == pytest.approx(total, abs=max(within, 0.06e9 if total == 8e9 else 0))
    assert e.effective == pytest.approx(effective, abs=within)
    assert e.total - sum(e.left_out.values()) == e.effective
    assert PUBLISHED[name].effective in str(e)
    assert "effective" in e._repr_html_()


def test_effective_parameters_can_leave_out_other_parts():
    e = effective_parameters(E4B, leave_out=("ple_table",))
    assert e.total - e.effective == 2_818_572_288
    with pytest.raises(ValueError, match=r"no component 'laurel'.*ple_table"):
        effective_parameters(E4B, leave_out=("laurel",))
    with pytest.raises(ValueError, match="gemma-3n-E2B"):
        effective_parameters("gemma-5")


def test_unused_kv_parameters_are_the_weights_of_the_same_model_without_sharing():
    for name in NAMES:
        unshared = dataclasses.replace(SPECS[name], num_kv_shared_layers=0)
        assert unused_kv_parameters(name) == unshared.parameters() - SPECS[name].parameters()
        assert unused_kv_parameters(unshared) == 0


def test_intensities():
    # a table row is worth half a FLOP per byte at any batch; a matrix grows with it
    assert embedding_row_intensity() == 0.5
    assert embedding_row_intensity(4) == 0.25
    one, many = matmul_intensity(10_240, 2560), matmul_intensity(10_240, 2560, batch=64)
    assert one == pytest.approx(1.0, rel=0.001)
    assert many == pytest.approx(64, rel=0.05)
    assert matmul_intensity(10_240, 2560, itemsize=0.5) == pytest.approx(4 * one, rel=0.01)
    # and ends at what the activations allow: out·in/(out + in)
    assert matmul_intensity(10_240, 2560, batch=10**9) == pytest.approx(2048, rel=0.001)


@pytest.mark.parametrize("name", NAMES)
def test_factorising_the_table(name):
    rank, whole = break_even_rank(name), math.prod(SPECS[name].table_shape)
    assert factorised_table_parameters(name, rank) <= whole
    assert factorised_table_parameters(name, rank + 1) > whole
    with pytest.raises(ValueError, match="at least 1"):
        factorised_table_parameters(name, 0)
