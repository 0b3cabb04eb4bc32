"""The parity diff: it must find what differs, and must not call equal what was never compared."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pleviz
from pleviz.parity import Parity, bit_equal, bits, diff, max_ulp
from pleviz.parity.stages import perturbed_table
from pleviz.parity.tokens import Greedy, compare_tokens
from pleviz.specs import NoTableError
from tests.tiny import KINDS, tiny_model

IDS = torch.tensor([[2, 5, 9, 20, 33, 7]])


def nudge(weight: torch.Tensor, index: int) -> None:
    """Add one ULP to the element at a flat index."""
    integers = {2: torch.int16, 4: torch.int32}[weight.element_size()]
    with torch.no_grad():
        weight.data.view(-1).view(integers)[index] += 1


def hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def stage(parity: Parity, name: str) -> bits.Comparison:
    return next(s for s in parity.stages if s.name == name)


@pytest.fixture(params=KINDS)
def model(request):
    model = tiny_model(request.param)
    with torch.no_grad():  # the premise of every parity test: the table matters
        before = model(IDS).logits
        with perturbed_table(model):
            assert not torch.equal(model(IDS).logits, before)
        assert torch.equal(model(IDS).logits, before)
    return model


# --- ULPs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pair_of_neighbours_is_one_ulp_apart(dtype):
    infinity = torch.tensor([math.inf], dtype=dtype).view(torch.int16).item()
    positive = torch.arange(0, infinity + 1, dtype=torch.int16).view(dtype)
    line = torch.cat([-positive.flip(0)[:-1], positive])  # -inf … 0 … inf, one zero
    assert (line.double().diff() > 0).all()  # sorted, no value twice
    assert (bits._ordered(line).diff() == 1).all()
    assert max_ulp(line[:-1], line[1:]) == 1
    assert max_ulp(line[:1], line[-1:]) == 2 * infinity


@given(
    st.floats(-(2.0**127), 2.0**127, width=32),
    st.integers(0, 40),
    st.sampled_from([np.float32, np.float64]),
)
def test_ulp_counts_steps_of_nextafter(start, steps, kind):
    a = b = kind(start)
    for _ in range(steps):
        b = np.nextafter(b, kind(np.inf))
    assert max_ulp(torch.tensor([a]), torch.tensor([b])) == steps
    assert max_ulp(torch.tensor([b]), torch.tensor([a])) == steps


def test_ulp_at_the_ends_of_the_scale():
    top = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert max_ulp(-top, top) == 2 * 0x7FEFFFFFFFFFFFFF  # more than an int64 holds
    tiny = torch.tensor([5e-324], dtype=torch.float64)
    assert max_ulp(tiny, -tiny) == 2
    assert max_ulp(torch.tensor([0.0]), torch.tensor([-0.0])) == 0
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert max_ulp(largest, torch.tensor([math.inf])) == 1


def test_ulp_leaves_nan_out():
    nan = math.nan
    assert max_ulp(torch.tensor([nan, 1.0]), torch.tensor([3.0, 1.0])) == 0
    assert max_ulp(torch.tensor([nan]), torch.tensor([nan])) == 0


def test_ulp_of_float8():
    a = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    b = torch.tensor([1.125, 2.0]).to(torch.float8_e4m3fn)  # three bits of mantissa
    assert max_ulp(a, b) == 1


# --- comparing tensors -------------------------------------------------------------------------


def test_compare_counts_across_chunks(monkeypatch):
    monkeypatch.setattr(bits, "CHUNK", 7)
    a = torch.linspace(1, 2, 100).view(4, 25)
    b = a.clone()
    for index, steps in ((3, 1), (50, 5), (99, 2)):
        for _ in range(steps):
            nudge(b, index)
    found = bits.compare("x", a, b)
    assert (found.status, found.total, found.differing, found.max_ulp) == ("DIFF", 100, 3, 5)
    assert found.max_abs == float((a - b).abs().max())
    assert bits.compare("x", a, a.clone()).status == "OK"
    assert bits.compare("x", a.t(), b.t()).differing == 3  # not contiguous


def test_compare_tells_kinds_of_difference_apart():
    one = torch.ones(3)
    assert bits.compare("x", one, torch.ones(4)).status == "SHAPE"
    found = bits.compare("x", one, torch.ones(3, dtype=torch.bfloat16))
    assert (found.status, found.max_ulp, found.max_abs) == ("DTYPE", None, 0.0)
    nan = torch.tensor([math.nan, 1.0, 1.0])
    found = bits.compare("x", nan, nan.clone())
    assert (found.status, found.differing) == ("NONFINITE", 0)
    assert found.detail == "NaN or infinity: 1 in A, 1 in B"
    assert bits.compare("x", one, nan).detail == "NaN or infinity: 0 in A, 1 in B"
    found = bits.compare("x", torch.tensor(0.0), torch.tensor(-0.0))
    assert (found.status, found.max_ulp, found.differing) == ("DIFF", 0, 1)
    whole = torch.tensor([1, 2])
    assert bits.compare("x", whole, whole + 1).max_abs == 1.0
    assert bits.compare("x", whole, whole.clone()).max_ulp is None
    assert bits.compare("x", torch.empty(0), torch.empty(0)).status == "OK"


def test_bit_equal_is_stricter_than_equal():
    assert bit_equal(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not bit_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not bit_equal(torch.ones(2), torch.ones(2).double())


# --- identical ---------------------------------------------------------------------------------


def test_a_copy_is_identical(model):
    parity = diff(model, copy.deepcopy(model), IDS, max_new_tokens=4)
    assert parity.ok
    assert parity.verdict == "identical"
    assert parity.first_difference is None
    assert parity.max_ulp == 0
    assert parity.weights == ()
    named = len(dict(model.named_parameters(remove_duplicate=False)))
    assert parity.weights_compared == named + len(dict(model.named_buffers()))
    assert parity.tokens.identical
    assert len(parity.tokens.a[0]) == 4
    assert parity.next_steps() == ()
    assert hooks(model) == 0


def test_stages_are_in_forward_order(model):
    names = [s.name for s in diff(model, model, IDS).stages]
    streams = ["AltUp streams"] if hasattr(model.model, "altup_projections") else []
    layers = [f"layer {i}{what}" for i in range(4) for what in (" per-layer input", "")]
    start = ["token embedding", "table rows", "context projection"]
    assert names == [*start, *streams, *layers, "final norm", "logits"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("towers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_home_is_identical_and_leaves_no_trace(kind, towers, dtype):
    model = tiny_model(kind, dtype=dtype, towers=towers)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    table, kept = pleviz.find_table(model), pleviz.find_table(model).weight
    kind_before = type(table.module)
    parity = diff(model, "cpu", IDS, max_new_tokens=3)
    assert parity.ok, parity
    assert "home 'cpu'" in parity.model_b
    assert parity.weights_compared is None
    assert type(table.module) is kind_before
    assert table.weight is kept
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert hooks(model) == 0


def test_ids_of_every_accepted_form(model):
    twin = copy.deepcopy(model)
    for ids in (IDS, IDS[0], IDS.int(), IDS.expand(3, -1)):
        assert diff(model, twin, ids).ok
    assert diff(model, twin, IDS, logits_to_keep=2).logits.total == 2 * 128
    assert stage(diff(model, twin, IDS, logits_to_keep=2), "layer 3").total % (6 * 48) == 0
    only = diff(model, twin, IDS, layers=False)
    assert only.ok
    assert [s.name for s in only.stages] == ["logits"]


def test_left_padded_batch(model):
    ids = torch.tensor([[0, 0, 2, 5, 9], [2, 5, 9, 20, 33]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    parity = diff(model, copy.deepcopy(model), ids, attention_mask=mask, max_new_tokens=3)
    assert parity.ok
    assert parity.logits.total == 2 * 5 * 128
    assert any("2 of 10 positions are padding" in note for note in parity.notes)
    other = copy.deepcopy(model)
    nudge_many(other.model.layers[1].mlp.down_proj.weight)
    assert not diff(model, other, ids, attention_mask=mask).ok


def nudge_many(weight: torch.Tensor) -> None:
    for index in range(0, weight.numel(), 5):
        nudge(weight, index)


def test_training_mode_is_put_back(model):
    model.train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    assert diff(model, "cpu", IDS).ok
    assert [m.training for m in model.modules()] == modes


# --- different ---------------------------------------------------------------------------------


def test_one_ulp_in_one_weight_names_the_layer(model):
    """Both where the logits show it and where rounding hides it from them."""
    name, seen = "model.layers.1.mlp.down_proj.weight", set()
    for index in range(60):
        other = copy.deepcopy(model)
        nudge(other.get_parameter(name), index)
        parity = diff(model, other, IDS)
        with torch.no_grad():
            hidden = torch.equal(model(IDS).logits, other(IDS).logits)
        seen.add(hidden)
        assert not parity.ok
        assert parity.verdict == "different"
        assert [(w.name, w.layer, w.max_ulp, w.differing) for w in parity.weights] == [
            (name, 1, 1, 1)
        ]
        if hidden:
            assert parity.logits.status == "OK"
            assert "equal" in parity.sentence
        else:
            assert parity.first_difference == "layer 1"
            assert stage(parity, "layer 1").layer == 1
            assert parity.max_ulp > 0
            assert stage(parity, "layer 0").status == "OK"
        if seen == {True, False}:
            return
    pytest.fail("the search did not meet both cases")


def test_a_difference_that_no_stage_shows_is_named_by_its_weight(model):
    other = copy.deepcopy(model)
    table = pleviz.find_table(other)
    nudge(table.weight, 100 * table.width)  # the row of an id that is not in the input
    parity = diff(model, other, IDS)
    assert all(s.status == "OK" for s in parity.stages)
    assert parity.verdict == "different"
    assert parity.first_difference == "model.embed_tokens_per_layer.weight"
    assert parity.weights[0].max_ulp == 1
    assert "equal bit for bit" in parity.sentence


def test_other_table_rows_are_the_first_difference(model):
    other = copy.deepcopy(model)
    pleviz.find_table(other).module.embed_scale.mul_(2)  # the hidden scale, applied twice
    parity = diff(model, other, IDS)
    assert parity.first_difference == "table rows"
    assert [w.name for w in parity.weights] == ["model.embed_tokens_per_layer.embed_scale"]


def test_same_weights_other_lookup(model):
    other = copy.deepcopy(model)
    table = pleviz.find_table(other).module
    table.register_forward_hook(lambda _m, _a, rows: rows.half().to(rows.dtype))
    parity = diff(model, other, IDS)
    assert parity.first_difference == "table rows"
    assert parity.weights == ()
    assert "other rows" in parity.next_steps()[0]
    assert hooks(other) == 1  # theirs stays


@pytest.mark.parametrize("kind", KINDS)
def test_n3_two_ways_to_bf16_differ_in_their_buffers(kind, tmp_path):
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = copy.deepcopy(model).to(torch.bfloat16)
    parity = diff(loaded, cast, IDS)
    assert parity.verdict == "different"
    assert {w.kind for w in parity.weights} == {"buffer"}
    assert any("inv_freq" in w.name and w.status == "DTYPE" for w in parity.weights)
    assert any("buffers differ" in hint for hint in parity.next_steps())


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_shapes_get_a_verdict(kind):
    model = tiny_model(kind)
    wider = diff(model, tiny_model(kind, vocab_size=140), IDS)
    assert wider.verdict == "different"
    assert (wider.logits.status, wider.max_ulp) == ("SHAPE", None)
    assert any(w.status == "SHAPE" for w in wider.weights)
    assert "[1, 6, 140]" in str(wider)
    deeper = diff(model, tiny_model(kind, num_hidden_layers=6), IDS)
    assert stage(deeper, "layer 5").status == "MISSING"
    assert stage(deeper, "layer 5").detail == "only in B"
    assert [s.name for s in deeper.stages][-3:] == ["layer 5", "final norm", "logits"]
    shallower = diff(tiny_model(kind, num_hidden_layers=6), model, IDS)
    assert stage(shallower, "layer 5").detail == "only in A"
    assert any(w.detail == "only in A" and w.layer == 5 for w in shallower.weights)
    other = diff(model, tiny_model(next(k for k in KINDS if k != kind)), IDS)
    assert other.verdict == "different"
    assert any(w.status == "MISSING" for w in other.weights)


def test_a_model_without_a_table():
    table = tiny_model("gemma4", num_kv_shared_layers=0)
    without = tiny_model("gemma4", num_kv_shared_layers=0, hidden_size_per_layer_input=0)
    parity = diff(table, without, IDS)
    assert parity.verdict == "different"
    assert stage(parity, "table rows").status == "MISSING"
    with pytest.raises(NoTableError):
        diff(without, table, IDS)


# --- neither -----------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["copy", "cpu"])
def test_b10_nan_is_not_identical_to_itself(model, second):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    parity = diff(model, model if second == "copy" else second, IDS, max_new_tokens=2)
    assert parity.verdict == "non-finite"
    assert not parity.ok
    assert parity.first_difference == "layer 1"
    assert "layer 1" in parity.sentence
    assert parity.tokens.identical  # which is why tokens alone prove nothing


def test_b10_an_infinity_that_softcapping_hides():
    model = tiny_model("gemma4", final_logit_softcapping=30.0)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0.02  # padding's row: 0 × infinity would be NaN
        state = model.model(IDS).last_hidden_state
        model.model.norm.weight[state.abs().amax((0, 1)).argmax()] = 3e38  # one channel overflows
        assert not model.model(IDS).last_hidden_state.isfinite().all()
        assert model(IDS).logits.isfinite().all()
    parity = diff(model, copy.deepcopy(model), IDS)
    assert parity.logits.status == "OK"
    assert parity.verdict == "non-finite"
    assert parity.first_difference == "final norm"


def test_b10_fp16_is_warned_about_and_overflow_is_called_so():
    model = tiny_model("gemma4", dtype=torch.float16)
    with pytest.warns(UserWarning, match="float16"):
        assert diff(model, copy.deepcopy(model), IDS).ok
    with torch.no_grad():
        pleviz.find_table(model).weight.fill_(30_000.0)
    with pytest.warns(UserWarning, match="float16"):
        parity = diff(model, copy.deepcopy(model), IDS)
    assert parity.verdict == "non-finite"
    assert parity.first_difference == "table rows"
    assert any("bfloat16" in hint for hint in parity.next_steps())


@pytest.mark.parametrize("second", ["copy", "cpu"])
def test_n1_a_fresh_gemma3n_is_vacuous(second):
    model = tiny_model("gemma3n")
    for name, parameter in model.named_parameters():
        if name.endswith("correct_output_scale"):
            parameter.data.zero_()  # the library's own initial state
    parity = diff(model, copy.deepcopy(model) if second == "copy" else second, IDS)
    assert parity.verdict == "vacuous"
    assert not parity.ok
    assert parity.table_matters is False
    assert "correct_output_scale" in parity.next_steps()[0]


# --- tokens ------------------------------------------------------------------------------------


def greedy_tokens(model, ids):
    full = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=full, max_new_tokens=8, min_new_tokens=8, do_sample=False
    )
    return out[:, ids.shape[1] :]


def diverging(model):
    """A prompt, and a model that leaves ``model``'s tokens some steps into its continuation."""
    for seed in range(40):
        torch.manual_seed(seed)
        ids = torch.randint(3, 128, (2, 4))
        new, other = greedy_tokens(model, ids), copy.deepcopy(model)
        late = [t for t in new[1, 2:6].tolist() if t not in ids and t not in new[:, :2]]
        with torch.no_grad():  # rows of tokens that turn up late, so that the start stays the same
            pleviz.find_table(other).weight[late] *= -50
        theirs = greedy_tokens(other, ids)
        if not torch.equal(new, theirs):
            return ids, other, new, theirs
    return pytest.fail("no prompt diverged")


def test_index_of_the_first_token_that_differs(model):
    ids, other, new, theirs = diverging(model)
    step = int((new != theirs).any(0).nonzero()[0])
    assert step > 0
    row = int((new != theirs)[:, step].nonzero()[0])
    parity = diff(model, other, ids, max_new_tokens=8)
    assert parity.logits.status == "OK"
    assert (parity.tokens.first_divergence, parity.tokens.row) == (step, row)
    assert parity.tokens.a == tuple(map(tuple, new.tolist()))
    assert parity.tokens.b == tuple(map(tuple, theirs.tolist()))
    for gap, net, tokens in (
        (parity.tokens.gap_a, model, new),
        (parity.tokens.gap_b, other, theirs),
    ):
        text = torch.cat([ids[row], tokens[row, :step]])[None]
        logits = net(text).logits[0, -1].detach()
        logits[1] = -math.inf  # end of sequence was not allowed
        best = logits.topk(2).values
        assert gap == pytest.approx(float(best[0] - best[1]), rel=1e-3, abs=1e-6)
    assert f"token {step} of row {row}" in str(parity)


def test_tokens_that_diverge_are_not_ok_even_if_the_logits_agree(model):
    parity = diff(model, copy.deepcopy(model), IDS, max_new_tokens=2)
    tokens = compare_tokens(Greedy(((4, 5),), ((1.0, 0.0),)), Greedy(((4, 6),), ((1.0, 0.5),)))
    assert (tokens.first_divergence, tokens.gap_a, tokens.gap_b) == (1, 0.0, 0.5)
    assert "a tie" in str(tokens)
    object.__setattr__(parity, "tokens", tokens)
    assert not parity.ok
    assert parity.first_difference == "greedy token 1"
    assert "decoding" in parity.next_steps()[0]


def test_end_of_sequence_does_not_shorten_the_comparison(model):
    with torch.no_grad():
        first = int(model(IDS).logits[0, -1].argmax())
    model.generation_config.eos_token_id = first  # the model would stop at once
    parity = diff(model, copy.deepcopy(model), IDS, max_new_tokens=5)
    assert len(parity.tokens.a[0]) == 5
    assert parity.ok


def test_sampling_settings_of_the_model_do_not_matter(model):
    model.generation_config.update(do_sample=True, temperature=0.5, top_k=3, top_p=0.9)
    assert diff(model, copy.deepcopy(model), IDS, max_new_tokens=5).ok


# --- wrapped models ----------------------------------------------------------------------------


def lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["down_proj"])).eval()


def test_layers_are_named_alike_under_peft(model):
    a, b = lora(copy.deepcopy(model)), lora(copy.deepcopy(model))
    assert diff(a, b, IDS, max_new_tokens=2).ok
    base = b.get_base_model().model.layers[2].mlp.down_proj.base_layer
    nudge_many(base.weight)
    parity = diff(a, b, IDS)
    assert parity.first_difference == "layer 2"
    assert parity.weights[0].layer == 2
    assert parity.weights[0].name.endswith("layers.2.mlp.down_proj.base_layer.weight")


def test_plain_against_peft_lists_the_adapters(model):
    parity = diff(model, lora(copy.deepcopy(model)), IDS)
    assert parity.logits.status == "OK"  # a fresh adapter adds zero
    assert {(w.status, w.detail) for w in parity.weights} == {("MISSING", "only in B")}
    assert all("lora_" in w.name for w in parity.weights)


def test_text_model_against_the_multimodal_one(model):
    kind = model.config.model_type.split("_")[0]
    whole = tiny_model(kind, towers=True)
    text = copy.deepcopy(model)
    state = whole.model.language_model.state_dict()
    text.model.load_state_dict(state)
    parity = diff(text, whole, IDS)
    assert parity.logits.status == "OK"
    assert all(s.status == "OK" for s in parity.stages)
    assert {w.detail for w in parity.weights} == {"only in B"}  # the towers


def test_a_table_that_accelerate_keeps_elsewhere(model):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    other = copy.deepcopy(model)
    table = pleviz.find_table(other)
    kept = {"weight": table.weight.detach().clone()}
    hook = AlignDevicesHook("cpu", offload=True, io_same_device=True, weights_map=kept)
    add_hook_to_module(table.module, hook)
    parity = diff(model, other, IDS)
    assert parity.ok, parity  # by what it computes; its weight is not there to be read
    assert any("meta device" in note for note in parity.notes)
    kept["weight"][5] += 1
    assert diff(model, other, IDS).first_difference == "table rows"


@pytest.mark.parametrize("kind", ["gemma4"])
def test_a_compiled_model_is_compared_by_its_logits(kind):
    model = tiny_model(kind, num_hidden_layers=2, num_kv_shared_layers=0)
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    parity = diff(compiled, model, IDS)
    assert parity.ok, parity
    assert len(parity.stages) == 1
    assert any("compiled" in note for note in parity.notes)


def test_a_changed_scale_of_a_quantised_weight_is_found(tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "hidden_size_per_layer_input": 64}
    heads = {
        "head_dim": 16,
        "global_head_dim": 16,
    }  # bitsandbytes' CPU kernels need multiples of 64
    tiny_model("gemma4", **sizes, **heads).save_pretrained(tmp_path)
    a, b = (
        AutoModelForCausalLM.from_pretrained(
            tmp_path,
            quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            dtype=torch.bfloat16,
            device_map={"": "cpu"},
        )
        for _ in range(2)
    )
    assert diff(a, b, IDS).ok
    b.model.layers[1].mlp.up_proj.weight.quant_state.absmax[0] *= 2
    parity = diff(a, b, IDS)
    assert [(w.name, w.kind) for w in parity.weights] == [
        ("model.layers.1.mlp.up_proj.weight.absmax", "quantisation")
    ]
    assert parity.first_difference == "layer 1"


# --- errors, and nothing left behind -----------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([[0.5]]), TypeError, "int64"),
        (torch.tensor([[True]]), TypeError, "int64"),
        ([2, 5], TypeError, "tensor of token ids"),
        (torch.empty(1, 0, dtype=torch.long), ValueError, "not empty"),
        (torch.zeros(1, 1, 1, dtype=torch.long), ValueError, r"\[batch, seq\]"),
        (torch.tensor([[2, 128]]), ValueError, "from 2 to 128.*from 0 to 127"),
        (torch.tensor([[2, -1]]), ValueError, "from -1"),
    ],
)
def test_bad_ids(model, ids, error, message):
    with pytest.raises(error, match=message):
        diff(model, model, ids)


def test_bad_mask_home_and_model(model):
    with pytest.raises(ValueError, match="one shape"):
        diff(model, model, IDS, attention_mask=torch.ones(1, 5))
    with pytest.raises(ValueError, match="unknown home"):
        diff(model, "attic", IDS)
    with pytest.raises(TypeError, match="ForCausalLM"):
        diff(model.model, model.model, IDS)
    with pytest.raises(ValueError, match="negative"):
        diff(model, model, IDS, max_new_tokens=-1)
    assert hooks(model) == 0


@pytest.mark.parametrize("call", [1, 2])
def test_nothing_is_left_behind_after_an_exception(model, call):
    table = pleviz.find_table(model)
    kind, weight, calls = type(table.module), table.weight, []

    def fail(_module, _args, _output):
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("planted")

    handle = model.model.layers[2].register_forward_hook(fail)
    model.train()
    with pytest.raises(RuntimeError, match="planted"):
        diff(model, "cpu", IDS)
    handle.remove()
    assert hooks(model) == 0
    assert type(table.module) is kind
    assert table.weight is weight
    assert pleviz.home_of(model) == "gpu"
    assert model.training
    assert diff(model, "cpu", IDS).ok


def test_hooks_of_both_models_are_gone_after_an_exception(model):
    other = copy.deepcopy(model)

    def fail(*_):
        raise RuntimeError("planted")

    handle = other.lm_head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        diff(model, other, IDS)
    handle.remove()
    assert hooks(model) == hooks(other) == 0


# --- the report --------------------------------------------------------------------------------


def test_report_as_text_html_and_json(model):
    other = copy.deepcopy(model)
    nudge_many(other.model.layers[2].mlp.up_proj.weight)
    parity = diff(model, other, IDS, max_new_tokens=2)
    text, page, plain = str(parity), parity._repr_html_(), json.loads(json.dumps(parity.to_dict()))
    assert "DIFFERENT: the first difference is at layer 2" in text
    assert "layer 2  <- first" in text
    assert "stages" in text  # those before it are folded into one line
    assert "model.layers.2.mlp.up_proj.weight" in text
    assert "next: the weights are not the same" in text
    for words in ("DIFFERENT", "layer 2  &lt;- first", "next: the weights", "2 greedy tokens"):
        assert words in page
    assert page.count("<table>") == 2
    assert plain["verdict"] == "different"
    assert plain["first_difference"] == "layer 2"
    assert plain["stages"][-1]["name"] == "logits"
    assert plain["stages"][-1]["max_ulp"] == parity.max_ulp > 0


# --- on a real GPU -----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "mapped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_homes_are_identical(kind, dtype, home):
    model = tiny_model(kind, dtype=dtype).to("cuda")
    ids = torch.tensor([[0, 0, 2, 5, 9], [2, 5, 9, 20, 33]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    parity = diff(model, home, ids, attention_mask=mask, max_new_tokens=8)
    assert parity.ok, parity
    assert f"home '{home}'" in parity.model_b


@pytest.mark.gpu
def test_gpu_cpu_and_cuda_are_compared_across_devices():
    model = tiny_model("gemma4")
    parity = diff(model, copy.deepcopy(model).to("cuda"), IDS)
    assert parity.weights == ()
    assert stage(parity, "table rows").status == "OK"
    assert stage(parity, "token embedding").status == "OK"


@pytest.mark.gpu
def test_gpu_large_logits_are_compared_in_little_memory():
    logits = torch.randn(2000, 262_144, device="cuda", dtype=torch.bfloat16)  # 1 GB
    other = logits.clone()
    nudge(other, 2**28 + 5)
    host = logits.cpu()
    del logits
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = bits.compare("logits", host, other)
    assert (found.differing, found.max_ulp) == (1, 1)
    assert torch.cuda.max_memory_allocated() - before < 400_000_000
