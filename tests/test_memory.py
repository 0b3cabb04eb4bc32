"""The byte ledger and the memory probe."""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pleviz
from pleviz.components import COMPONENTS, component_of
from pleviz.ledger import MAPPED, _Intervals, entries, ledger
from pleviz.memory import MemoryProbe, host_link_bandwidth
from pleviz.memory import probe as probe_module
from tests.tiny import KINDS, tiny_config, tiny_model

MB = 1_000_000


def nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# --- components --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_component(kind):
    model = tiny_model(kind, towers=True)
    found = {component_of(name) for name, _ in model.named_parameters()}
    assert found <= set(COMPONENTS) - {"buffers", "other"}
    extra = {"altup", "laurel"} if kind == "gemma3n" else set()
    assert found == extra | {
        "ple_table",
        "token_embedding",
        "attention",
        "ffn",
        "ple_projections",
        "norms",
        "towers",
    }


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("model.embed_tokens.weight", "token_embedding"),
        ("lm_head.weight", "token_embedding"),
        ("model.embed_tokens_per_layer.weight", "ple_table"),
        ("model.language_model.embed_tokens_per_layer.weight", "ple_table"),
        ("base_model.model.model.embed_tokens_per_layer.base_layer.weight", "ple_table"),
        ("base_model.model.model.per_layer_model_projection.base_layer.weight", "ple_projections"),
        ("base_model.model.model.per_layer_model_projection.lora_A.default.weight", "other"),
        ("model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight", "towers"),
        ("model.audio_tower.layers.0.norm_out.weight", "towers"),
        ("model.layers.0.altup.router_norm.weight", "altup"),
        ("model.altup_unembed_projections.2.weight", "altup"),
        ("model.layers.0.laurel.post_laurel_norm.weight", "laurel"),
        ("model.layers.0.post_per_layer_input_norm.weight", "norms"),
        ("model.layers.0.post_feedforward_layernorm_1.weight", "norms"),
        ("model.norm.weight", "norms"),
        ("score.weight", "other"),
    ],
)
def test_component_of(name, component):
    assert component_of(name) == component


# --- ledger ------------------------------------------------------------------------------------


@pytest.mark.parametrize("towers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ledger_adds_up(kind, towers):
    model = tiny_model(kind, towers=towers)
    found = ledger(model)
    assert found.total == nbytes(model.parameters()) + nbytes(model.buffers())
    assert found.components["ple_table"] == 128 * 4 * 8 * 4
    assert found.components["token_embedding"] == 128 * 48 * 4  # the head is tied to it
    assert found.components["buffers"] == nbytes(model.buffers())
    assert set(found.by_device) == {"cpu"}
    assert found.on("cpu") == found.total
    assert found.on("cuda") == 0


def test_b02_tied_tensors_count_once():
    model = tiny_model("gemma4")
    naive = nbytes(model.state_dict().values())
    parameters = ledger(model).total - ledger(model).components["buffers"]
    assert naive - parameters >= 128 * 48 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_ledger_on_meta_equals_ledger_on_cpu(kind):
    on_cpu = ledger(tiny_model(kind))
    with torch.device("meta"):
        on_meta = ledger(type(tiny_model(kind))(tiny_config(kind)))
    assert set(on_meta.by_device) == {"meta"}
    assert on_meta.components == on_cpu.components


@pytest.mark.parametrize("name", sorted(pleviz.SPECS))
def test_ledger_agrees_with_the_specs_at_real_shapes(name):
    expected = dict.fromkeys(COMPONENTS, 0)
    for tensor in pleviz.SPECS[name].tensors():
        expected[tensor.component] += tensor.numel * 2
    found = ledger(pleviz.build(name, scale="real", device="meta")).components
    del found["buffers"]
    assert found == {component: nbytes for component, nbytes in expected.items() if nbytes}


def test_devices_are_told_apart():
    model = tiny_model("gemma4")
    model.model.embed_tokens_per_layer.to("meta")
    found = ledger(model)
    assert found.by_device["meta"]["ple_table"] == 128 * 32 * 4
    assert "ple_table" not in found.by_device["cpu"]
    assert found.on("meta") + found.on("cpu") == found.total
    assert "meta" in str(found)


def test_views_of_one_storage_count_their_bytes_once():
    whole = torch.zeros(100)
    model = torch.nn.Module()
    model.first = torch.nn.Parameter(whole[:60])
    model.second = torch.nn.Parameter(whole[40:80])  # 20 of its 40 elements are known
    assert ledger(model).total == 80 * 4


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=12))
def test_intervals_count_each_byte_once(pieces):
    counted, seen = _Intervals(), set()
    for start, length in pieces:
        new = set(range(start, start + length)) - seen
        assert counted.add(start, start + length) == len(new)
        seen |= new


def test_adapters_are_apart_from_the_base_model():
    from peft import LoraConfig, get_peft_model

    model = tiny_model("gemma4")
    before = ledger(model).components
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    after = ledger(wrapped).components
    adapters = nbytes(p for n, p in wrapped.named_parameters() if "lora_" in n)
    assert after.pop("other") == adapters > 0
    assert after == before


def test_an_offloaded_table_is_still_in_the_ledger():
    model = tiny_model("gemma4")
    before = ledger(model)
    with pleviz.offload(model, "cpu"):
        assert ledger(model) == before


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Gemma 4 on disk, with layers wide enough for blocks of 64 weights."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("gemma4", hidden_size=64, intermediate_size=128).save_pretrained(path)
    return path


def quantised(path, **settings):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(**settings)
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )


@pytest.mark.parametrize("double", [False, True])
def test_ledger_of_nf4(saved, double):
    model = quantised(
        saved,
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
    )
    found = ledger(model)
    layer = model.model.layers[0]
    ffn = 4 * sum(
        getattr(layer.mlp, n).weight.numel() for n in ("up_proj", "gate_proj", "down_proj")
    )
    assert ffn == 4 * 3 * 64 * 128 // 2  # two weights in a byte
    weights, blocks = 4 * 3 * 64 * 128, 64 * 128 // 64
    if (
        double
    ):  # 8-bit scales, and for each matrix: one fp32 scale per 256, its code book, an offset
        scales = blocks + 4 * (-(-blocks // 256)) + 256 * 4 + 4
    else:
        scales = 4 * blocks
    assert found.components["ffn"] == weights // 2 + 12 * (scales + 16 * 4)
    assert dict(found.not_quantised) == {
        "model.embed_tokens_per_layer.weight": 128 * 32 * 2,
        "model.embed_tokens.weight": 128 * 64 * 2,
    }
    assert "not quantised: model.embed_tokens.weight" in str(found)


def test_ledger_of_int8_before_and_after_the_first_forward(saved):
    model = quantised(saved, load_in_8bit=True)
    before = ledger(model)
    assert before.components["ffn"] == 4 * 3 * 64 * 128 + 4 * 4 * (128 + 128 + 64)
    with torch.no_grad():
        model(torch.tensor([[2, 5, 9]]))  # moves the scales from the weight to the module
    assert ledger(model).components == before.components


def test_entries_name_the_parts_of_a_quantised_weight(saved):
    model = quantised(saved, load_in_4bit=True)
    names = {entry.name: entry.kind for entry in entries(model)}
    assert names["model.layers.0.mlp.up_proj.weight"] == "parameter"
    assert names["model.layers.0.mlp.up_proj.weight.absmax"] == "quantisation"


# --- probe -------------------------------------------------------------------------------------


def test_b02_without_cuda_nothing_touches_cuda():
    with MemoryProbe() as probe:
        pass
    if not torch.cuda.is_available():
        assert not torch.cuda.is_initialized()
        assert probe.report().source in ("cpu", "mps")
        assert "CUDA" in probe.report().reason


def test_cpu_growth_is_what_the_block_keeps():
    with MemoryProbe(device="cpu", interval_s=0.01) as probe:
        kept = torch.ones(25 * MB)
    report = probe.report()
    assert report.source == "cpu"
    assert report.reason == "you asked for it"
    assert 95 * MB < report.growth < 120 * MB
    assert report.peak >= report.before.rss + 95 * MB
    del kept


def test_cpu_peak_sees_what_the_block_let_go():
    with MemoryProbe(device="cpu", interval_s=0.005) as probe:
        torch.ones(50 * MB).sum().item()
        threading.Event().wait(0.02)
    report = probe.report()
    assert report.peak - report.before.rss > 150 * MB
    assert report.growth < 50 * MB


def test_peak_of_a_second_smaller_block_is_not_the_first_ones():
    with MemoryProbe(device="cpu", interval_s=0.005) as first:
        torch.ones(50 * MB).sum().item()
    with MemoryProbe(device="cpu", interval_s=0.005) as second:
        threading.Event().wait(0.02)
    assert second.report().peak < first.report().peak - 100 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_file_mapped_pages_are_told_apart(tmp_path):
    path = tmp_path / "table.bin"
    path.write_bytes(bytes(64 * MB))
    with MemoryProbe(device="cpu") as probe:
        mapped = torch.from_file(str(path), shared=True, size=64 * MB, dtype=torch.uint8)
        assert int(mapped.sum()) == 0
    report = probe.report()
    assert 60 * MB < report.after.file_mapped - report.before.file_mapped < 80 * MB


def test_timeline_has_the_marks_in_order():
    with MemoryProbe(device="cpu", interval_s=0.005) as probe:
        threading.Event().wait(0.03)
        probe.mark("moved table")
        threading.Event().wait(0.03)
        probe.mark("prefill")
    report = probe.report()
    assert [mark.event for mark in report.marks] == ["moved table", "prefill"]
    times = [sample.seconds for sample in report.timeline]
    assert times == sorted(times)
    assert len(times) >= 6
    assert times[0] < report.marks[0].seconds
    assert report.seconds == times[-1] >= 0.06


def test_ledgers_before_and_after():
    model = tiny_model("gemma4")
    with MemoryProbe(model, device="cpu") as probe:
        model.model.embed_tokens_per_layer.to("meta")
    report = probe.report()
    assert set(report.ledger_before.by_device) == {"cpu"}
    assert report.ledger.by_device["meta"] == {"ple_table": 16384, "buffers": 4}


def test_a_model_built_inside_the_block():
    with MemoryProbe(device="cpu") as probe:
        model = probe.model = tiny_model("gemma4")
    assert probe.report().ledger_before is None
    assert probe.report().ledger.total == ledger(model).total


def test_the_probe_does_not_keep_the_model():
    model = tiny_model("gemma4")
    alive = weakref.ref(model)
    with MemoryProbe(model, device="cpu") as probe:
        del model
        gc.collect()
        assert alive() is None
    assert probe.report().ledger is None
    assert probe.report().ledger_before is not None


def test_report_after_an_exception_and_no_thread_left():
    threads = threading.active_count()
    probe = MemoryProbe(device="cpu")
    with pytest.raises(KeyError), probe:
        raise KeyError("inside")
    assert probe.report().seconds > 0
    assert threading.active_count() == threads
    assert not probe_module._ACTIVE
    with probe:  # and it can be used again
        pass


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MemoryProbe(interval_s=0), ValueError, "more than 0"),
        (lambda: MemoryProbe(device="xpu"), ValueError, "cuda, mps and cpu"),
        (lambda: MemoryProbe(device="cpu").report(), RuntimeError, "not run yet"),
        (lambda: MemoryProbe(device="cpu").mark("x"), RuntimeError, "inside"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_probe_cannot_be_entered_twice():
    probe = MemoryProbe(device="cpu")
    with probe:
        with pytest.raises(RuntimeError, match="already measuring"):
            probe.__enter__()
        with pytest.raises(RuntimeError, match="still open"):
            probe.report()


class _FakeAllocator(probe_module.COUNTERS["cpu"]):
    """torch's peak counters in small: one peak for all, reset by whoever enters last."""

    now = peak = 0

    @classmethod
    def use(cls, nbytes):
        cls.now = nbytes
        cls.peak = max(cls.peak, nbytes)

    def reset_peaks(self):
        type(self).peak = self.now

    def in_use(self):
        return self.now, self.now

    def peaks(self):
        return self.peak, self.peak


def test_nested_probes_keep_each_others_peaks(monkeypatch):
    monkeypatch.setitem(probe_module.COUNTERS, "cpu", _FakeAllocator)
    peaks = []
    with MemoryProbe(device="cpu", interval_s=60) as outer:
        _FakeAllocator.use(900)  # before the inner probe resets the counters
        _FakeAllocator.use(100)
        for top in (500, 300):
            with MemoryProbe(device="cpu", interval_s=60) as inner:
                _FakeAllocator.use(top)
                _FakeAllocator.use(100)
            peaks.append(inner.report().peak_allocated)
    assert peaks == [500, 300]
    assert outer.report().peak_allocated == 900
    with (
        MemoryProbe(device="cpu", interval_s=60) as outer,
        MemoryProbe(device="cpu", interval_s=60),
    ):
        _FakeAllocator.use(700)
        _FakeAllocator.use(100)
    assert outer.report().peak_allocated == 700


def test_report_as_text_html_and_json():
    model = tiny_model("gemma3n")
    with MemoryProbe(model, device="cpu") as probe:
        probe.mark("a <mark>")
    report = probe.report()
    text, page, plain = str(report), report._repr_html_(), json.loads(json.dumps(report.to_dict()))
    for words in ("you asked for it", "file_mapped", "peak of rss", "the model holds", "laurel"):
        assert words in text
    assert "resident pages of this process" in text
    assert "resident pages of this process" in page
    assert "allocated" not in text  # there is no accelerator to tell apart
    assert page.count("<table>") == 2
    assert plain["ledger"]["by_device"]["cpu"]["ple_table"] == 16384
    assert plain["timeline"][-1]["rss"] > 0
    assert plain["resident"] == report.after.rss
    assert any(sample["event"] == "a <mark>" for sample in plain["timeline"])


def test_link_bandwidth_needs_a_gpu():
    with pytest.raises(RuntimeError, match="CUDA device"):
        host_link_bandwidth(device="cpu")
    with pytest.raises(ValueError, match="at least 1"):
        host_link_bandwidth(nbytes=0)


# --- on a real GPU -----------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_allocated_reserved_and_context_are_told_apart():
    with MemoryProbe() as probe:
        kept = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
        torch.empty(256 * MB, dtype=torch.uint8, device="cuda")
    report = probe.report()
    assert report.source == "cuda"
    assert 64 * MB <= report.growth < 66 * MB
    assert 320 * MB <= report.peak - report.before.allocated < 330 * MB
    assert report.cached >= 256 * MB  # freed for torch, still taken from the driver
    assert report.end.reserved - report.after.reserved >= 250 * MB
    assert report.after.device_used >= report.after.reserved
    assert report.context > 50 * MB
    assert "nvidia-smi" in str(report)
    del kept


@pytest.mark.gpu
def test_gpu_nested_probes_keep_each_others_peaks():
    with MemoryProbe(interval_s=60) as outer:
        torch.empty(512 * MB, dtype=torch.uint8, device="cuda")
        with MemoryProbe(interval_s=60) as inner:
            torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
    base = outer.report().before.allocated
    assert 64 * MB <= inner.report().peak - base < 70 * MB
    assert outer.report().peak - base >= 512 * MB


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_ledger_is_what_the_allocator_says(kind):
    with MemoryProbe() as probe:
        model = probe.model = tiny_model(kind, hidden_size=1024, intermediate_size=4096).to("cuda")
    report = probe.report()
    assert report.ledger.on("cuda") == report.ledger.total
    assert report.growth == pytest.approx(report.ledger.total, rel=0.005)
    del model


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "mapped"])
def test_gpu_an_offloaded_table_is_not_on_the_gpu(home):
    model = tiny_model("gemma4", vocab_size_per_layer_input=65_536, vocab_size=256).to("cuda")
    table = 65_536 * 32 * 4
    with MemoryProbe(model) as probe:
        handle = pleviz.offload(model, home)
        probe.mark("moved table")
    report = probe.report()
    assert handle.home == home
    assert -report.growth == pytest.approx(table, rel=0.001)
    assert "ple_table" not in report.ledger.by_device["cuda:0"]
    assert report.ledger.by_device[MAPPED if home == "mapped" else "cpu"]["ple_table"] == table
    assert report.after.registered - report.before.registered == (table if home == "mapped" else 0)
    handle.restore()


@pytest.mark.gpu
def test_gpu_link_bandwidth_is_plausible():
    assert 1e9 < host_link_bandwidth() < 1e12
