"""Specs against the real transformers classes: names, shapes, builds, and clear refusals."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3n import Gemma3nTextConfig
from transformers.models.gemma4 import Gemma4Config, Gemma4TextConfig

from pleviz import building
from pleviz.building import build as build_with
from pleviz.building import empty_model, fill_normal_
from pleviz.configs import shrink
from pleviz.specs import FULL, SLIDING, SPECS, NoTableError, Spec, build, find_spec, spec_of
from pleviz.table import find_table
from pleviz.tensors import TensorShape
from pleviz.towers import read_towers
from tests.spec_strategies import text_configs
from tests.tiny import _TinyVisionConfig, tiny_config, tiny_model

NAMES = tuple(SPECS)
ONE_PER_FAMILY = ("gemma-3n-E2B", "gemma-4-E2B")  # Gemma 4 E2B has the double-wide layers
DTYPES = (torch.bfloat16, torch.float32)


def parameters_of(model: nn.Module) -> list[TensorShape]:
    """What ``Spec.tensors`` must say about this model, in the model's own order."""
    linears = {f"{name}.weight" for name, m in model.named_modules() if type(m) is nn.Linear}
    return [
        TensorShape(name, tuple(p.shape), linear=name in linears)
        for name, p in model.named_parameters()
    ]


def buffers_of(model: nn.Module) -> set[TensorShape]:
    """What ``Spec.buffers`` must say about this model (of a 16-bit dtype)."""
    return {
        TensorShape(
            name, tuple(b.shape), itemsize=None if b.dtype == model.dtype else b.element_size()
        )
        for name, b in model.named_buffers()
    }


def meta_model(spec: Spec, **kwargs) -> PreTrainedModel:
    return empty_model(spec, dtype=torch.bfloat16, **kwargs)


# ------------------------------------------------------------------ the published shapes


@pytest.mark.parametrize(
    ("name", "parameters", "table", "with_towers"),
    [
        ("gemma-3n-E2B", 4_435_182_688, 2_013_265_920, 5_418_464_192),
        ("gemma-3n-E4B", 6_835_235_568, 2_348_810_240, 7_818_517_072),
        ("gemma-4-E2B", 4_628_569_344, 2_348_810_240, 5_104_297_504),
        ("gemma-4-E4B", 7_463_013_376, 2_818_572_288, 7_941_100_832),
    ],
)
def test_parameter_totals(name, parameters, table, with_towers):
    spec = SPECS[name]
    assert spec.parameters() == parameters
    assert math.prod(spec.table_shape) == table
    assert spec.parameters(towers=True) == with_towers


def test_specs_cannot_be_changed():
    with pytest.raises(TypeError):
        SPECS["mine"] = SPECS["gemma-4-E4B"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPECS["gemma-4-E4B"].hidden_size = 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["real", "tiny"])
def test_tensors_are_those_of_the_real_class(name, scale):
    spec = SPECS[name] if scale == "real" else shrink(SPECS[name])
    model = meta_model(SPECS[name], scale=scale)
    assert list(spec.tensors()) == parameters_of(model)
    assert set(spec.buffers()) == buffers_of(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # so the head is not listed


@settings(deadline=None, max_examples=25)
@given(config=text_configs())
def test_tensors_of_random_configs_are_those_of_the_real_class(config):
    spec = spec_of(config)
    classes = building._model_class(spec, towers=False)
    with torch.device("meta"):
        model = classes._from_config(config, dtype=torch.bfloat16)
    assert list(spec.tensors()) == parameters_of(model)
    assert set(spec.buffers()) == buffers_of(model)
    assert all(t.component != "other" for t in spec.tensors())
    again = spec_of(spec.config())
    assert dataclasses.replace(again, name=spec.name) == spec


@pytest.mark.parametrize("name", ["gemma-4-E2B", "gemma-4-E4B"])
def test_gemma4_towers_are_those_of_the_real_class(name):
    model, spec = meta_model(SPECS[name], towers=True), SPECS[name]
    assert set(spec.tensors(towers=True)) == set(parameters_of(model))
    assert len(spec.tensors(towers=True)) == len(parameters_of(model))
    assert set(spec.buffers(towers=True)) == buffers_of(model)
    assert {t.component for t in spec.tensors(towers=True)} >= {"towers", "ple_table"}


@pytest.mark.parametrize("name", ["gemma-3n-E2B", "gemma-3n-E4B"])
def test_gemma3n_audio_and_projections_are_those_of_the_real_class(name):
    """All but the vision tower, which lives in timm; a stand-in of the same width is built here."""
    spec = SPECS[name]
    config = spec.config(towers=True)
    config.vision_config = _TinyVisionConfig(hidden_size=2048, vocab_size=128, vocab_offset=262_144)
    with torch.device("meta"):
        model = building._model_class(spec, towers=True)._from_config(config, dtype=torch.bfloat16)

    def without_vision(tensors):
        return {t for t in tensors if "vision_tower" not in t.name}

    listed = spec.tensors(towers=True)
    assert without_vision(listed) == without_vision(parameters_of(model))
    assert without_vision(spec.buffers(towers=True)) == without_vision(buffers_of(model))
    assert sum(t.numel for t in listed if "vision_tower" in t.name) == 294_126_912


@pytest.mark.gpu  # where timm is installed
@pytest.mark.parametrize("name", ["gemma-3n-E2B", "gemma-3n-E4B"])
def test_gemma3n_vision_tower_is_that_of_timm(name):
    model = meta_model(SPECS[name], towers=True)
    assert set(SPECS[name].tensors(towers=True)) == set(parameters_of(model))


def test_tower_data_is_what_the_script_would_write():
    spec = dataclasses.replace(SPECS["gemma-4-E4B"], hidden_size=8 * 331)
    entries = read_towers(meta_model(spec, towers=True), spec.hidden_size)
    from pleviz.towers import _data

    assert entries == _data()["gemma4"]


def test_towers_of_unpublished_specs_are_refused():
    spec = dataclasses.replace(SPECS["gemma-4-E4B"], name="mine")
    with pytest.raises(ValueError, match=r"not part of its spec.*gemma-4-E4B"):
        spec.tensors(towers=True)


def test_a_spec_reads_well():
    text, page = str(SPECS["gemma-4-E4B"]), SPECS["gemma-4-E4B"]._repr_html_()
    for said in (
        "7.46 B",
        "262,144 × 10,752",
        "35 sliding (512 tokens), 7 full",
        "2 × 256, 2 × 512",
    ):
        assert said in text
        assert said in page


# ------------------------------------------------------------------ tiny models


@pytest.mark.parametrize("name", NAMES)
def test_tiny_keeps_what_makes_the_real_one_special(name):
    real, tiny = SPECS[name], shrink(SPECS[name])
    assert tiny.family == real.family
    assert {SLIDING, FULL} == set(tiny.layer_types[: tiny.first_kv_shared_layer])
    assert {SLIDING, FULL} == set(tiny.layer_types[tiny.first_kv_shared_layer :])
    assert math.prod(tiny.table_shape) > tiny.parameters() / 2
    assert tiny.parameters() < 10**6
    wide = [s.intermediate_sizes[-1] // s.intermediate_sizes[0] for s in (real, tiny)]
    assert wide[0] == wide[1]
    assert (real.global_head_dim > real.head_dim) == (tiny.global_head_dim > tiny.head_dim)
    assert (real.vocab_size > real.vocab_size_per_layer_input) == (
        tiny.vocab_size > tiny.vocab_size_per_layer_input
    )
    assert set(tiny.activation_sparsity_pattern) == set(real.activation_sparsity_pattern)
    for scale in (tiny.hidden_size**0.5, tiny.hidden_size_per_layer_input**0.5):
        assert torch.tensor(scale).bfloat16().float() != torch.tensor(scale)


@settings(deadline=None, max_examples=15)
@given(config=text_configs())
def test_any_spec_can_be_shrunk_built_and_run(config):
    model = build(spec_of(config), dtype=torch.float32)
    logits = model(torch.tensor([[3, 7, 20, 1000]])).logits
    assert torch.isfinite(logits).all()


# ------------------------------------------------------------------ spec_of


@pytest.mark.parametrize("name", NAMES)
def test_spec_of_recognises_the_published_models(name):
    assert spec_of(SPECS[name].config()) is SPECS[name]
    assert spec_of(SPECS[name].config(towers=True)) is SPECS[name]


@pytest.mark.parametrize("kind", ["gemma3n", "gemma4"])
@pytest.mark.parametrize("towers", [False, True])
def test_spec_of_reads_models_and_configs_alike(kind, towers):
    model = tiny_model(kind, towers=towers)
    text = model.config.get_text_config()
    spec = spec_of(model)
    assert spec == spec_of(model.config) == spec_of(text) == spec_of(model.model)
    prefix = "model.language_model." if towers else "model."
    table = model.get_parameter(f"{prefix}embed_tokens_per_layer.weight")
    assert spec.table_shape == tuple(table.shape)


def test_spec_of_a_peft_model():
    from peft import LoraConfig, get_peft_model

    model = tiny_model("gemma4")
    expected = spec_of(model)
    assert spec_of(get_peft_model(model, LoraConfig(target_modules=["q_proj"]))) == expected


def _off(family: str):
    config = tiny_config(family)
    config.hidden_size_per_layer_input = 0
    return config


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("diffusion_gemma", "without per-layer embeddings"),
        ("diffusion_gemma_text", "without per-layer embeddings"),
        ("embedding_gemma2", "no per-token table"),
        ("embedding_gemma2_text", "no per-token table"),
        ("gemma4_unified", "without per-layer embeddings"),
        ("gemma4_unified_text", "without per-layer embeddings"),
        ("gemma4_unified_assistant", "without per-layer embeddings|no per-layer embeddings"),
        ("qwen4_exp", "hashes of several tokens"),
        ("qwen4_exp_text", "hashes of several tokens"),
        ("gemma3", "no hidden_size_per_layer_input"),
        ("llama", "no hidden_size_per_layer_input"),
    ],
)
def test_models_without_a_table_are_refused_with_the_reason(kind, why):
    if kind in CONFIG_MAPPING:
        config = AutoConfig.for_model(kind)
    else:  # an older transformers does not know it; the answer goes by the type's name alone
        config = Gemma4TextConfig(hidden_size_per_layer_input=0)
        config.model_type = kind
    with pytest.raises(NoTableError, match=why) as error:
        spec_of(config)
    assert kind in str(error.value)
    assert "gemma-4-E4B" in str(error.value)  # what to use instead


def test_gemma4_assistant_is_refused_with_the_reason():
    text = Gemma4TextConfig(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    config = Gemma4Config(text_config=text)
    config.model_type = "gemma4_assistant"
    with pytest.raises(NoTableError, match="in the model that it assists"):
        spec_of(config)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_ple_switched_off_is_refused(family):
    with pytest.raises(NoTableError, match="hidden_size_per_layer_input=0"):
        spec_of(_off(family))


def test_an_unknown_model_with_a_table_is_another_error():
    config = tiny_config("gemma4")
    config.model_type = "gemma5_text"
    with pytest.raises(ValueError, match="find_table") as error:
        spec_of(config)
    assert not isinstance(error.value, NoTableError)  # it does have a table


@pytest.mark.parametrize("wrong", ["gemma-4-E4B", None, nn.Linear(2, 2), {}])
def test_spec_of_something_else_is_a_type_error(wrong):
    with pytest.raises(TypeError, match=r"config or a model"):
        spec_of(wrong)


def test_all_layers_shared_is_refused():
    config = Gemma4TextConfig(num_hidden_layers=2, layer_types=[FULL, FULL], num_kv_shared_layers=2)
    with pytest.raises(ValueError, match="leaves none of the 2 layers"):
        spec_of(config)


def test_unknown_name_lists_the_names():
    for call in (find_spec, build):
        with pytest.raises(ValueError, match=r"'gemma-5'.*gemma-3n-E2B, gemma-3n-E4B"):
            call("gemma-5")


def test_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="'real' or 'tiny'"):
        build("gemma-4-E4B", scale="huge")


def test_widths_that_gemma4_cannot_have_are_refused():
    spec = SPECS["gemma-4-E4B"]
    odd = dataclasses.replace(spec, intermediate_sizes=(8, *spec.intermediate_sizes[1:]))
    with pytest.raises(ValueError, match="one FFN width"):
        odd.config()


def test_importing_specs_and_arithmetic_loads_no_torch():
    code = (
        "import sys, pleviz.specs, pleviz.arithmetic as a; a.budget('gemma-4-E4B', towers=True);"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# ------------------------------------------------------------------ build


def _logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.tensor([[2, 5, 900, 17, 31], [0, 0, 2, 8, 1000]])  # the second is left-padded
    with torch.no_grad():
        return model(ids, attention_mask=(ids != 0).long()).logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_built_model_is_what_from_pretrained_would_give(name, dtype, tmp_path):
    model = build(name, dtype=dtype)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    _assert_same(model, loaded)
    assert torch.equal(_logits(model), _logits(loaded))
    assert not model.training


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_built_with_towers_is_what_from_pretrained_would_give(dtype, tmp_path):
    model = build("gemma-4-E2B", towers=True, dtype=dtype)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    _assert_same(model, loaded)
    assert torch.equal(_logits(model), _logits(loaded))
    assert torch.equal(_logits(model), _logits(build("gemma-4-E2B", dtype=dtype)))  # same text part


def _assert_same(a: PreTrainedModel, b: PreTrainedModel) -> None:
    assert list(a.state_dict()) == list(b.state_dict())
    for mine, theirs in (
        (dict(a.named_parameters()), dict(b.named_parameters())),
        (dict(a.named_buffers()), dict(b.named_buffers())),
    ):
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert tensor.dtype == theirs[name].dtype, name
            assert torch.equal(tensor, theirs[name]), name
            assert tensor.requires_grad == theirs[name].requires_grad, name


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_the_table_has_influence_on_the_logits(name):
    model = build(name, dtype=torch.float32)
    before = _logits(model)
    find_table(model).weight.data.mul_(2)
    assert not torch.equal(before, _logits(model))


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_a_seed_fixes_the_weights_and_another_changes_them(name):
    one, same, other = (build(name, seed=seed) for seed in (7, 7, 8))
    for (key, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), key
        assert torch.equal(a, c) == (a.dim() < 2), key  # norms and scales are not random


def test_every_matrix_has_its_own_numbers_of_the_right_size():
    model = build("gemma-3n-E4B", dtype=torch.float32)
    starts = [p.view(-1)[:16] for p in model.parameters() if p.dim() > 1]
    assert len({tuple(start.tolist()) for start in starts}) == len(starts)
    table = find_table(model).weight
    assert abs(table.mean()) < 1e-3 * 0.02 * 5
    assert abs(table.std() / 0.02 - 1) < 0.01
    assert table.abs().max() <= 0.02 * 2 * 3**0.5
    pair = table[:, :32].flatten(), table[:, 32:64].flatten()
    assert abs(torch.corrcoef(torch.stack(pair))[0, 1]) < 0.02  # neighbouring layers


def test_the_hash_is_splitmix64():
    """Against an independent implementation in Python's own integers."""

    def splitmix(stream: int, index: int) -> int:
        z = (stream + index * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    for stream in (0, 1, -1, 2**62 + 12345, -(2**63)):
        words = building._hash(2**40, 50, stream, torch.device("cpu")).tolist()
        assert [w % 2**64 for w in words] == [splitmix(stream, 2**40 + i) for i in range(50)]
        values = torch.empty(50)
        fill_normal_(values, stream=stream, std=65536 / 3**0.5)  # scale 1: the sums themselves
        sums = [
            sum((splitmix(stream, i) >> shift) % 2**16 for shift in (0, 16, 32, 48)) - 131_070
            for i in range(50)
        ]
        assert values.tolist() == sums


def test_chunks_do_not_show(monkeypatch):
    whole, parts = torch.empty(1000), torch.empty(1000)
    fill_normal_(whole, stream=3, std=0.02)
    monkeypatch.setattr(building, "CHUNK", 64)
    fill_normal_(parts, stream=3, std=0.02)
    assert torch.equal(whole, parts)


def test_building_leaves_no_trace():
    torch.manual_seed(0)
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_default_device()
    build("gemma-3n-E2B")
    after = torch.get_rng_state(), torch.get_default_dtype(), torch.get_default_device()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_nothing_large_is_made_on_another_device(monkeypatch):
    """With 'meta' as the device, whatever appears on the CPU took a detour."""
    monkeypatch.setattr(building, "CHUNK", 1 << 30)  # meta tensors need no memory

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.device.type == "cpu":
                self.largest = max(self.largest, out.numel())
            return out

    with Watch() as watch:
        model = build_with(SPECS["gemma-4-E4B"], scale="real", device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert 0 < watch.largest <= 512  # the rotary frequencies


def test_spec_of_a_built_model_gives_its_tensors():
    for name in NAMES:
        model = build(name, dtype=torch.bfloat16)
        assert list(spec_of(model).tensors()) == parameters_of(model)


def test_gemma3n_default_config_is_e4b():
    assert spec_of(Gemma3nTextConfig()) is SPECS["gemma-3n-E4B"]


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_seed_gives_the_same_bits_on_cpu_and_cuda(name, dtype):
    on_cpu, on_gpu = (build(name, device=device, dtype=dtype) for device in ("cpu", "cuda"))
    for (key, a), b in zip(on_cpu.named_parameters(), on_gpu.parameters(), strict=True):
        assert torch.equal(a, b.cpu()), key
    for (key, a), b in zip(on_cpu.named_buffers(), on_gpu.buffers(), strict=True):
        assert torch.equal(a, b.cpu()), key


@pytest.mark.gpu  # where timm is installed
def test_gemma3n_with_towers_is_what_from_pretrained_would_give(tmp_path):
    model = build("gemma-3n-E2B", towers=True, device="cuda")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cuda")
    _assert_same(model, loaded)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.gpu
def test_a_real_model_is_built_on_the_gpu_alone():
    import psutil

    torch.cuda.reset_peak_memory_stats()
    resident, rss = torch.cuda.memory_allocated(), psutil.Process().memory_info().rss
    model = build("gemma-4-E2B", scale="real", device="cuda")
    held = torch.cuda.memory_allocated() - resident
    assert held == pytest.approx(2 * SPECS["gemma-4-E2B"].parameters(), rel=0.001)
    assert torch.cuda.max_memory_allocated() - resident - held < 256e6
    assert psutil.Process().memory_info().rss - rss < 2e9  # CUDA's own, not the 9 GB of weights
    del model
