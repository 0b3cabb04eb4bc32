"""Faults from public reports, for every home: each is named after its entry."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import CompileConfig, DynamicCache, StaticCache

import pleviz
from pleviz.homes import OffloadError
from pleviz.homes.loading import load
from tests.test_homes import IDS, MASK, ON_PLACES, assert_table_matters, greedy, logits, make
from tests.test_homes_lifecycle import BOTH, HOMES, assert_same, offload

pytestmark = pytest.mark.filterwarnings(
    "ignore:pleviz. rows of the table",
    "ignore:.*has no tokenizer",
    "ignore::UserWarning:transformers",
)


def attempt(function):
    """The result, or the kind of error."""
    try:
        return function()
    except (IndexError, RuntimeError) as error:
        return type(error).__name__


@BOTH
@ON_PLACES
def test_b05_a_table_that_was_taken_away_is_refused(kind, home, device):
    model = make(kind, device)
    module = pleviz.find_table(model).module
    weight = module.weight
    for placeholder in (None, torch.nn.Parameter(torch.empty(0, 32, device=device))):
        module.weight = placeholder
        with pytest.raises(OffloadError, match="has no rows"):
            pleviz.offload(model, home)
        assert module.weight is placeholder
    module.weight = weight
    with pleviz.offload(model, home):
        pass


@BOTH
def test_b05_a_table_that_would_be_random_is_refused(kind, tmp_path):
    make(kind, vocab_size_per_layer_input=96).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vocab_size_per_layer_input"] = 128
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"shape \(first: model\.embed_tokens_per_layer\.weight"):
        load(tmp_path, home="cpu", ignore_mismatched_sizes=True)


@BOTH
@ON_PLACES
def test_b13_the_hooks_whole_table_is_not_copied_while_offloaded(kind, home, device):
    class Counting(dict):
        moved = 0

        def __getitem__(self, name):
            value = super().__getitem__(name)
            self.moved += value.numel() * value.element_size()
            return value

    model = make(kind, device)
    table = pleviz.find_table(model)
    whole, values = table.nbytes, Counting(weight=table.weight.detach().cpu().clone())
    hook = AlignDevicesHook(device, offload=True, io_same_device=True, weights_map=values)
    add_hook_to_module(table.module, hook)
    expected = greedy(model)
    assert values.moved >= 6 * whole  # the fault: all of it at every step
    with pleviz.offload(model, home) as handle:
        values.moved = 0
        assert torch.equal(greedy(model), expected)
        assert values.moved == 0
        if device == "cuda":
            assert 0 < handle.bytes_moved <= 17 * table.row_nbytes


@pytest.mark.parametrize("resize", [{}, {"pad_to_multiple_of": 100}, {"pad_to_multiple_of": 64}])
@BOTH
@HOMES
def test_b17_resizing_to_none_when_the_vocabularies_differ(kind, home, device, resize, tmp_path):
    """transformers then lets config and table disagree; a home must not make it worse."""

    def run(model):
        torch.manual_seed(0)
        model.resize_token_embeddings(None, mean_resizing=False, **resize)
        table = pleviz.find_table(model)
        rows = table.weight.shape[0]
        assert table.rows == rows
        return rows, model.config.vocab_size_per_layer_input, logits(model, IDS), table.weight

    plain, model = (make(kind, device, vocab_size_per_layer_input=96) for _ in range(2))
    handle = offload(model, home, tmp_path)
    expected = run(plain)
    assert_same(run(model), expected)
    last = torch.full_like(IDS, expected[0] - 1)
    assert torch.equal(logits(model, last), logits(plain, last))
    outside = torch.full_like(IDS, 127)  # never a row that is not there
    if expected[0] < 128:
        got = attempt(lambda: logits(model, outside))
        assert isinstance(got, torch.Tensor) if kind == "gemma3n" else got == "IndexError"
    handle.restore()
    assert torch.equal(logits(model), expected[2])


@BOTH
@ON_PLACES
@pytest.mark.parametrize("rows", [128, 118])
def test_b18_placeholder_ids_become_what_the_model_makes_of_them(kind, home, device, rows):
    model = make(kind, device, towers=True, vocab_size_per_layer_input=rows)
    seen = []

    def spy(module, args):
        seen.append(args[0].cpu())

    pleviz.find_table(model).module.register_forward_pre_hook(spy)
    config = model.config
    ids = torch.tensor([[2, 5, config.image_token_id, 7, config.audio_token_id, 9]], device=device)
    extra = {"mm_token_type_ids": torch.zeros_like(ids)} if kind == "gemma4" else {}

    def run():
        seen.clear()
        with torch.no_grad():
            return model(ids, **extra).logits, list(seen)

    expected = run()
    if kind == "gemma4":  # placeholders are looked up as padding: they need no row
        assert expected[1][0].tolist() == [[2, 5, 0, 7, 0, 9]]
    with pleviz.offload(model, home):
        assert_same(run(), expected)
        for bad in (-1, 128):
            with pytest.raises(IndexError):
                model(torch.tensor([[2, bad]], device=device))
        assert_same(run(), expected)
    assert_same(run(), expected)


@ON_PLACES
def test_b18_placeholders_beyond_the_vocabulary(home, device):
    model = make("gemma4", device, towers=True)
    model.config.image_token_id = 500
    ids = torch.tensor([[2, 5, 500, 7]], device=device)
    extra = {"mm_token_type_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        expected = model(ids, **extra).logits
        with pleviz.offload(model, home):
            assert torch.equal(model(ids, **extra).logits, expected)


@BOTH
@ON_PLACES
def test_b18_a_model_whose_own_output_is_outside_its_table(kind, home, device):
    """Sampled ids are checked too where the table is smaller than the vocabulary."""
    model = make(kind, device, vocab_size_per_layer_input=40)
    with torch.no_grad():  # the next token is always 100, or nearly
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.lm_head.weight[100] = 50 * model.lm_head.weight[100].sign()
    ids = IDS[:1].to(device)

    def run():
        torch.manual_seed(0)
        return model.generate(ids, max_new_tokens=12, do_sample=True, temperature=5.0)

    plain = attempt(run) if device == "cpu" else None
    with pleviz.offload(model, home):
        got = attempt(run)
    if kind == "gemma4":
        assert got == "IndexError" and plain in ("IndexError", None)
    else:
        assert (got >= 40).any()  # its rule: row 0
    assert logits(model).isfinite().all()  # the CUDA context is alive


def test_b18_rows_read_in_place_are_checked_where_the_table_is_smaller(monkeypatch):
    """The home "mapped", here in ordinary memory: on a GPU such an id would end the CUDA context."""
    monkeypatch.setattr(pleviz.homes, "why_not", lambda device, *, read_only: None)
    ids = torch.tensor([[2, 5, 100]])
    for kind, vocabulary in (("gemma4", 96), ("gemma3n", 96), ("gemma4", 128)):
        model = make(kind, vocab_size_per_layer_input=vocabulary)
        with pleviz.offload(model, "mapped") as handle, torch.no_grad():
            assert handle.home == "mapped"
            out = model(ids[:, :2], use_cache=True)
            following = {"past_key_values": out.past_key_values, "use_cache": True}
            if (kind, vocabulary) == ("gemma4", 96):
                with pytest.raises(IndexError, match="100 is outside the PLE table"):
                    model(ids)
                with pytest.raises(IndexError, match="100 is outside the PLE table"):
                    model(ids[:, 2:], **following)  # one token that continues a cache
            else:
                assert model(ids).logits.isfinite().all()
                assert model(ids[:, 2:], **following).logits.isfinite().all()


@BOTH
@ON_PLACES
@pytest.mark.parametrize("make_cache", [DynamicCache, StaticCache])
def test_b18_n4_a_first_token_is_checked_and_later_ones_cost_nothing(
    kind, home, device, make_cache, monkeypatch
):
    from pleviz.homes import guard

    model = make(kind, device)
    cache = make_cache(
        config=model.config, **({"max_cache_len": 32} if make_cache is StaticCache else {})
    )
    checks = []
    check = guard.check_ids
    monkeypatch.setattr(guard, "check_ids", lambda *args: checks.append(args) or check(*args))

    def step(token, name="past_key_values", length=1):
        ids = torch.full((1, length), token, device=device)
        checks.clear()
        with torch.no_grad():
            model(ids, use_cache=True, **{name: cache})
        return len(checks)

    with pleviz.offload(model, home):
        with pytest.raises(IndexError, match="token id 999 is outside"):
            step(999)
        cache = make_cache(
            config=model.config, **({"max_cache_len": 32} if make_cache is StaticCache else {})
        )
        assert step(5) == 1 and step(6) == 0 and step(7, length=3) == 1
        if "cache" in model.model.forward.__annotations__ or kind == "gemma4":
            assert step(8, "cache") == 0  # the newer name of the same argument


@ON_PLACES
def test_b24_offloading_after_compiling_is_seen(home, device):
    model = make("gemma4", device, num_hidden_layers=1, num_kv_shared_layers=0)
    assert_table_matters(model)
    expected = logits(model, use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")

    def run(ids=IDS):
        with torch.no_grad():
            return compiled(
                ids.to(device), attention_mask=MASK.to(device), use_cache=False
            ).logits.cpu()

    assert torch.equal(run(), expected)
    key = pleviz.find_table(model).name + ".weight"
    values = pleviz.find_table(model).weight.detach().clone()
    with pleviz.offload(model, home):
        assert torch.equal(run(), expected)
        model.load_state_dict({key: values * 2}, strict=False)
        doubled = logits(model, use_cache=False)
        assert torch.equal(run(), doubled) and not torch.equal(doubled, expected)
        model.load_state_dict({key: values}, strict=False)
    assert torch.equal(run(), expected)
    with pleviz.offload(compiled, home):  # named by its compiled form
        assert pleviz.home_of(model) != "gpu" and torch.equal(run(), expected)
        model.resize_token_embeddings(140, mean_resizing=False)
        assert torch.equal(run(IDS + 20), logits(model, IDS + 20, use_cache=False))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "home", "mode"),
    [
        ("gemma4", "mapped", "reduce-overhead"),
        ("gemma4", "cpu", "reduce-overhead"),
        ("gemma3n", "mapped", "default"),
        ("gemma4", "file", "default"),
    ],
)
def test_b24_static_cache_and_cuda_graphs(kind, home, mode, tmp_path):
    def run(model):
        torch._dynamo.reset()
        config = CompileConfig(mode=mode, fullgraph=False)
        return [
            greedy(model, cache_implementation="static", compile_config=config) for _ in range(2)
        ]

    plain, model = make(kind, "cuda"), make(kind, "cuda")
    with offload(model, home, tmp_path):
        assert_same(run(model), run(plain))


@BOTH
@pytest.mark.parametrize("fate", ["kept", "deleted", "replaced", "written"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_b33_a_copy_of_a_model_in_a_file(kind, fate, device, tmp_path):
    model = make(kind, device)
    model.save_pretrained(tmp_path)
    pleviz.offload(model, "file", checkpoint=tmp_path)
    file = tmp_path / "model.safetensors"
    if fate == "deleted":
        file.unlink()
    elif fate == "replaced":
        file.unlink()
        make(kind, seed=1).save_pretrained(tmp_path)
    elif fate == "written" and device == "cpu":
        with torch.no_grad():
            pleviz.find_table(model).weight.mul_(2)
    expected = logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), expected)
    changed = fate == "replaced" or fate == "deleted" or (fate == "written" and device == "cpu")
    assert pleviz.home_of(twin) == (
        ("mapped" if device == "cuda" else "cpu") if changed else "file"
    )
    pleviz.restore(twin)
    assert pleviz.home_of(model) == "file"
    assert torch.equal(logits(twin), expected) and torch.equal(logits(model), expected)


@BOTH
@ON_PLACES
def test_b33_copies_keep_the_rule_for_ids_without_a_row(kind, home, device):
    import pickle

    model = make(kind, device, vocab_size_per_layer_input=96)
    ids = torch.full((2, 6), 100)
    with pleviz.offload(model, home):
        expected = attempt(lambda: logits(model, ids))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_same([attempt(lambda twin=twin: logits(twin, ids))], [expected])
            pleviz.restore(twin)
            assert pleviz.find_table(twin).weight.device.type == device
            assert pleviz.find_table(twin).weight.requires_grad


@BOTH
@HOMES
def test_b05_saving_over_the_checkpoint_that_is_mapped(kind, home, device, tmp_path):
    model = make(kind, device)
    expected = logits(model)
    with offload(model, home, tmp_path):
        model.save_pretrained(tmp_path / "home")
        assert torch.equal(logits(model), expected)
        again = type(model).from_pretrained(tmp_path / "home").to(device)
        assert torch.equal(logits(again), expected)
    assert torch.equal(logits(model), expected)


@ON_PLACES
def test_n2_a_model_without_ple_is_named_as_such(home, device):
    model = make("gemma4", device, hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    expected = logits(model)
    with pytest.raises(pleviz.NoTableError, match="has no PLE table"):
        pleviz.offload(model, home)
    assert torch.equal(logits(model), expected)


@BOTH
@HOMES
def test_n3_each_way_to_bfloat16_is_kept(kind, home, device, tmp_path):
    """Loaded as bfloat16 and cast to it are two models; a home makes neither into the other."""
    make(kind).save_pretrained(tmp_path)
    cls = type(make(kind))
    ways = [
        lambda: cls.from_pretrained(tmp_path, dtype=torch.bfloat16).to(device),
        lambda: cls.from_pretrained(tmp_path).to(torch.bfloat16).to(device),
    ]
    expected = [logits(way()) for way in ways]
    assert not torch.equal(*expected)
    for number, way in enumerate(ways):
        model = way()
        with offload(model, home, tmp_path):
            assert torch.equal(logits(model), expected[number])
    model = cls.from_pretrained(tmp_path).to(device)
    with offload(model, home, tmp_path):
        assert torch.equal(logits(model.to(torch.bfloat16)), expected[1])
    assert torch.equal(logits(model), expected[1])
