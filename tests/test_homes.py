"""Moving the table changes no bit of the output, and restoring leaves no trace.

Every parity test first shows that the table matters: a model that ignored it would pass anything.
Tests over ``DEVICES`` run on the CPU here and, marked ``gpu``, on a CUDA device too.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, get_peft_model

import pleviz
from pleviz.homes import OffloadError, registered_bytes
from pleviz.homes.guard import IdGuard
from tests.tiny import KINDS, tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLACES = [  # (home, device the model computes on)
    ("cpu", "cpu"),
    pytest.param("cpu", "cuda", marks=pytest.mark.gpu),
    pytest.param("mapped", "cuda", marks=pytest.mark.gpu),
]
ON_PLACES = pytest.mark.parametrize(("home", "device"), PLACES)
IDS = torch.tensor([[2, 5, 9, 20, 33, 7], [0, 0, 2, 11, 5, 9]])  # the second row is left-padded
MASK = (IDS != 0).long()

# on a machine without CUDA "mapped" says that it gathers on the CPU instead
pytestmark = pytest.mark.filterwarnings("ignore:pleviz. rows of the table are gathered on the CPU")


def make(kind, device="cpu", **kwargs):
    return tiny_model(kind, **kwargs).to(device)


def logits(model, ids=IDS, **kwargs):
    device = next(model.parameters()).device
    with torch.no_grad():
        return model(
            input_ids=ids.to(device), attention_mask=MASK.to(device), **kwargs
        ).logits.cpu()


def greedy(model, **kwargs):
    device = next(model.parameters()).device
    out = model.generate(
        input_ids=IDS.to(device),
        attention_mask=MASK.to(device),
        max_new_tokens=6,
        do_sample=False,
        **kwargs,
    )
    return out.cpu()


def assert_table_matters(model):
    """Scaling the table must change the logits, or parity would prove nothing."""
    table = pleviz.find_table(model)
    before, values = logits(model), table.weight.detach().clone()
    with torch.no_grad():
        table.weight.mul_(3)
        changed = logits(model)
        table.weight.copy_(values)
    assert not torch.equal(before, changed)
    assert torch.equal(before, logits(model))


@ON_PLACES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_b01_logits_and_greedy_tokens_are_bit_identical(kind, home, dtype, device):
    model = make(kind, device, dtype=dtype)
    assert_table_matters(model)
    expected, tokens = logits(model), greedy(model)
    with pleviz.offload(model, home):
        assert torch.equal(logits(model), expected)
        assert torch.equal(greedy(model), tokens)
        assert torch.equal(greedy(model, cache_implementation="static"), tokens)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", KINDS)
@ON_PLACES
def test_restore_gives_back_the_same_object(kind, home, device):
    model = make(kind, device)
    table = pleviz.find_table(model)
    weight, cls, values = table.weight, type(table.module), table.weight.detach().clone()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(RuntimeError, match="inside"), pleviz.offload(model, home):
        assert not pleviz.find_table(model).weight.requires_grad
        raise RuntimeError("inside")
    assert table.module.weight is weight and weight.is_leaf and weight.requires_grad
    assert type(table.module) is cls and "_home" not in vars(table.module)
    assert "forward" not in vars(table.module)
    assert torch.equal(weight, values) and weight.device.type == device
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    restored = model.state_dict()
    assert list(restored) == list(state)
    assert all(torch.equal(restored[k], state[k]) for k in state)
    gc.collect()
    assert registered_bytes() == 0


@ON_PLACES
def test_multimodal_model(home, device):
    model = make("gemma4", device, towers=True)
    assert_table_matters(model)
    expected = logits(model)
    with pleviz.offload(model, home):
        assert torch.equal(logits(model), expected)


@ON_PLACES
def test_from_inputs_embeds_on_gemma4(home, device):
    model = make("gemma4", device)
    embeds = model.get_input_embeddings()(IDS.to(device)).detach()
    with torch.no_grad():
        expected = model(inputs_embeds=embeds).logits
        with pleviz.offload(model, home):
            assert torch.equal(model(inputs_embeds=embeds).logits, expected)


@pytest.mark.parametrize("kind", KINDS)
@ON_PLACES
def test_b04_the_scale_is_the_modules_own(kind, home, device):
    model = make(kind, device, dtype=torch.bfloat16)
    module = pleviz.find_table(model).module
    ids = IDS.to(device)
    expected = module(ids)
    bare = torch.nn.functional.embedding(ids, module.weight)
    assert not torch.equal(bare, expected)  # a bare gather loses the scale
    with pleviz.offload(model, home):
        assert torch.equal(module(ids), expected) and module(ids).dtype == expected.dtype


@pytest.mark.parametrize("kind", KINDS)
@ON_PLACES
def test_b03_casts_reach_the_table_and_moves_do_not(kind, home, device):
    model, twin = make(kind, device), make(kind, device)
    with pleviz.offload(model, home) as handle:
        where = pleviz.find_table(model).weight.data_ptr()
        model.to(device)
        assert pleviz.find_table(model).weight.data_ptr() == where
        model.to(torch.bfloat16)
        twin.to(torch.bfloat16)
        assert pleviz.find_table(model).weight.dtype == torch.bfloat16
        assert torch.equal(logits(model), logits(twin))
        assert pleviz.home_of(model) == handle.home
        model.eval().float()
        twin.float()
        assert torch.equal(logits(model), logits(twin))


@ON_PLACES
def test_b03_the_meta_device_does_not_take_the_table_along(home, device):
    model = make("gemma4", device)
    values = pleviz.find_table(model).weight.detach().clone()
    pleviz.offload(model, home)
    model.to("meta")
    assert torch.equal(pleviz.find_table(model).weight.cpu(), values.cpu())


@pytest.mark.parametrize("kind", KINDS)
@ON_PLACES
def test_b05_checkpoints_of_an_offloaded_model_are_complete(kind, home, device, tmp_path):
    model = make(kind, device)
    keys, expected = set(model.state_dict()), logits(model)
    with pleviz.offload(model, home):
        assert set(model.state_dict()) == keys
        model.save_pretrained(tmp_path)
    reloaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(logits(reloaded.to(device)), expected)


@pytest.mark.parametrize("kind", KINDS)
@ON_PLACES
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_into_an_offloaded_model(kind, home, assign, device):
    model, other = make(kind, device), make(kind, device, seed=1)
    with pleviz.offload(model, home) as handle:
        model.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(logits(model), logits(other))
        assert pleviz.home_of(model) == handle.home
        assert not pleviz.find_table(model).weight.requires_grad
    assert torch.equal(logits(model), logits(other))


@pytest.mark.parametrize("kind", KINDS)
@ON_PLACES
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_b33_copies_are_independent(kind, home, device, how):
    model = make(kind, device)
    expected = logits(model)
    handle = pleviz.offload(model, home)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert pleviz.home_of(twin) == handle.home
    with torch.no_grad():
        pleviz.find_table(twin).weight.zero_()
    assert not torch.equal(logits(twin), expected)
    assert torch.equal(logits(model), expected)
    pleviz.restore(twin)
    assert pleviz.home_of(twin) == "gpu" and pleviz.home_of(model) == handle.home
    assert not any(
        isinstance(h, IdGuard) for m in twin.modules() for h in m._forward_pre_hooks.values()
    )
    handle.restore()
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", KINDS)
@ON_PLACES
def test_b17_resizing_resizes_the_home(kind, home, device):
    model = make(kind, device)
    old = pleviz.find_table(model).weight.detach().clone()
    handle = pleviz.offload(model, home)
    model.resize_token_embeddings(140, mean_resizing=False)
    table = pleviz.find_table(model)
    assert table.rows == 140 and table.weight.shape[0] == 140
    assert pleviz.home_of(model) == handle.home
    assert torch.equal(table.weight[:128].cpu(), old.cpu())
    assert logits(model, torch.full_like(IDS, 139)).isfinite().all()
    if handle.home == "cpu":
        assert table.weight.device.type == "cpu"


@ON_PLACES
@pytest.mark.parametrize("bad", [-1, 128, 10**9])
def test_b18_ids_outside_gemma4_raise_index_error(home, device, bad):
    model = make("gemma4", device)
    expected = logits(model)
    with pleviz.offload(model, home):
        with pytest.raises(IndexError, match=f"token id {bad} is outside"):
            model(torch.tensor([[2, bad]], device=device))
        assert torch.equal(logits(model), expected)  # the CUDA context is alive


@ON_PLACES
def test_b18_a_table_smaller_than_the_vocabulary(home, device):
    ids = torch.tensor([[2, 100, 127]], device=device)
    four = make("gemma4", device, vocab_size_per_layer_input=96)
    with pleviz.offload(four, home), pytest.raises(IndexError, match="PLE table"):
        four(ids)
    three = make("gemma3n", device, vocab_size_per_layer_input=96)  # its rule: row 0
    with pleviz.offload(three, home), torch.no_grad():
        got = three(ids).logits
        module = pleviz.find_table(three).module
        rows = module(ids)
        assert torch.equal(rows[0, 1], rows[0, 2])
        assert torch.equal(rows[0, 1], module(torch.tensor([0], device=device))[0])
        assert got.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@ON_PLACES
def test_b24_one_graph_without_breaks(kind, home, device):
    model = make(kind, device)
    expected = logits(model, use_cache=False)
    with pleviz.offload(model, home):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(logits(compiled, use_cache=False), expected)
    assert torch.equal(logits(compiled, use_cache=False), expected)  # the restore is seen


@pytest.mark.parametrize("kind", KINDS)
def test_the_gather_operator_passes_torchs_own_checks(kind):
    table, ids = pleviz.find_table(make(kind)).weight.detach(), IDS
    torch.library.opcheck(torch.ops.pleviz.gather_rows.default, (table, ids))


@pytest.mark.parametrize("device", DEVICES)
def test_long_prompts_with_duplicates_gather_the_same_rows(device):
    model = make("gemma4", device)
    module = pleviz.find_table(model).module
    ids = torch.randint(0, 128, (3, 700), device=device)  # every row many times
    expected = module(ids)
    with pleviz.offload(model, "cpu") as handle:
        assert torch.equal(module(ids), expected)
        if device == "cuda":  # each distinct row travels once
            assert handle.bytes_moved == 128 * 4 * 8 * 4


@pytest.mark.parametrize("home", ["cpu", "mapped"])
@pytest.mark.gpu
def test_b13_bytes_moved_are_rows_not_tables(home):
    model = make("gemma4", "cuda")
    with pleviz.offload(model, home) as handle:
        logits(model)
        assert handle.bytes_moved == IDS.numel() * 4 * 8 * 4
        greedy(model)
        assert handle.bytes_moved < pleviz.find_table(model).nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "mapped"])
def test_the_memory_is_freed_and_taken_back(home):
    model = tiny_model("gemma4", vocab_size=20_000, vocab_size_per_layer_input=20_000).to("cuda")
    nbytes = pleviz.find_table(model).nbytes
    before = torch.cuda.memory_allocated()
    handle = pleviz.offload(model, home)
    assert before - torch.cuda.memory_allocated() == nbytes == handle.bytes_saved
    assert registered_bytes() == (nbytes if home == "mapped" else 0)
    handle.restore()
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert registered_bytes() == 0


@pytest.mark.gpu
def test_mapped_is_registered_in_place_and_follows_a_move_to_the_cpu_and_back():
    model = tiny_model("gemma4")
    expected_cpu = logits(model)
    address = pleviz.find_table(model).weight.data_ptr()
    model.model.embed_tokens_per_layer = pleviz.find_table(model).module  # stays on the CPU
    table = model.model.embed_tokens_per_layer
    weight = table.weight.data
    model.to("cuda")
    expected = logits(model)
    table.weight.data = weight  # as a loader that never put it on the GPU leaves it
    with pleviz.offload(model, "mapped"):
        assert table.weight.data_ptr() == address and table.weight.is_cuda
        assert torch.equal(logits(model), expected)
        model.to("cpu")
        assert registered_bytes() == 0 and not table.weight.is_cuda
        assert torch.equal(logits(model), expected_cpu)
        model.to("cuda")
        assert torch.equal(logits(model), expected)


@pytest.mark.gpu
def test_a_dropped_model_unregisters_its_memory():
    model = make("gemma4", "cuda")
    pleviz.offload(model, "mapped")
    assert registered_bytes() > 0
    del model
    gc.collect()
    assert registered_bytes() == 0


@pytest.mark.gpu
def test_a_refused_registration_falls_back_and_leaves_cuda_usable(monkeypatch):
    model = make("gemma4", "cuda")
    expected = logits(model)
    cudart = torch.cuda.cudart()
    real = cudart.cudaHostRegister
    # a null address is what the driver itself refuses
    monkeypatch.setattr(
        cudart, "cudaHostRegister", lambda address, size, flags: real(0, size, flags)
    )
    with pytest.warns(UserWarning, match="cudaHostRegister of"):
        handle = pleviz.offload(model, "mapped")
    assert handle.home == "cpu" and registered_bytes() == 0
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_b13_accelerates_copy_hook_gives_way_and_comes_back(kind):
    model = make(kind)
    expected = logits(model)
    module = pleviz.find_table(model).module
    values = module.weight.detach().clone()
    hook = AlignDevicesHook(
        execution_device="cpu", offload=True, io_same_device=True, weights_map={"weight": values}
    )
    add_hook_to_module(module, hook)
    assert module.weight.is_meta
    with pleviz.offload(model, "cpu"):
        assert not hasattr(module, "_hf_hook")
        assert torch.equal(logits(model), expected)
        assert set(model.state_dict()) == set(make(kind).state_dict())
    assert module._hf_hook is hook and module.weight.is_meta
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", KINDS)
@ON_PLACES
@pytest.mark.parametrize("order", ["offload-first", "peft-first"])
def test_b16_lora_training_gives_the_same_losses_bit_for_bit(kind, home, device, order):
    ids = IDS[:1].to(device)  # no padding: Gemma 3n's magnitude has no gradient at the zero row

    def losses(offloaded):
        torch.manual_seed(0)
        model = make(kind, device)
        if offloaded and order == "offload-first":
            pleviz.offload(model, home)
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=["q_proj", "per_layer_input_gate"])
        )
        if offloaded and order == "peft-first":
            pleviz.offload(model, home)
        model.train()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
        history = []
        for _ in range(4):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.item())
        return history

    plain = losses(False)
    assert len(set(plain)) == len(plain)  # it does learn something
    assert losses(True) == plain


class TestRefusals:
    """Each is a clear error raised before anything changed."""

    def unchanged(self, model, expected):
        assert pleviz.home_of(model) == "gpu"
        assert torch.equal(logits(model), expected)

    def test_unknown_home(self):
        model = make("gemma4")
        expected = logits(model)
        with pytest.raises(
            ValueError, match="unknown home 'disk'; choose one of auto, gpu, mapped"
        ):
            pleviz.offload(model, "disk")
        self.unchanged(model, expected)

    def test_no_table(self):
        with pytest.raises(pleviz.NoTableError):
            pleviz.offload(torch.nn.Linear(2, 2))

    def test_a_second_offload(self):
        model = make("gemma4")
        with pleviz.offload(model, "cpu") as handle:
            for home in ("cpu", "mapped", "auto", "gpu"):
                with pytest.raises(OffloadError, match="already offloaded to 'cpu'"):
                    pleviz.offload(model, home)
            assert handle.home == "cpu"
        with pytest.raises(OffloadError, match="not offloaded"):
            pleviz.restore(model)
        handle.restore()  # a second time does nothing
        with pytest.raises(OffloadError, match="was restored"), handle:
            pass

    def test_a_table_in_training(self):
        model = make("gemma4").train()
        with pytest.raises(OffloadError, match="being trained"):
            pleviz.offload(model, "cpu")
        pleviz.find_table(model).weight.requires_grad_(False)
        with pleviz.offload(model, "cpu"):
            pass
        assert not pleviz.find_table(model).weight.requires_grad

    def test_b16_a_trainable_copy_of_the_table(self):
        config = LoraConfig(
            r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens_per_layer"]
        )
        model = get_peft_model(make("gemma4"), config)
        with pytest.raises(OffloadError, match="modules_to_save"):
            pleviz.offload(model, "cpu")

    def test_a_hand_made_patch(self):
        model = make("gemma4")
        module = pleviz.find_table(model).module
        module.forward = lambda ids: type(module).forward(module, ids)
        with pytest.raises(OffloadError, match="replaced on the instance"):
            pleviz.offload(model, "cpu")

    def test_a_table_without_values(self):
        with pytest.raises(OffloadError, match="meta device"):
            pleviz.offload(make("gemma4").to("meta"), "cpu")

    def test_b22_a_quantised_table(self):
        bnb = pytest.importorskip("bitsandbytes")
        model = make("gemma4")
        table = bnb.nn.Embedding4bit(128, 32)
        table.weight = bnb.nn.Params4bit(
            model.model.embed_tokens_per_layer.weight.data, requires_grad=False
        )
        model.model.embed_tokens_per_layer = table.to("cpu")
        with pytest.raises(OffloadError, match="floating-point rows"):
            pleviz.offload(model, "cpu")

    @pytest.mark.gpu
    def test_too_little_ram(self, monkeypatch):
        model = make("gemma4", "cuda")
        expected = logits(model)
        nothing = type(pleviz.homes.psutil.virtual_memory())(*[0] * 11)
        monkeypatch.setattr(pleviz.homes.psutil, "virtual_memory", lambda: nothing)
        with pytest.raises(OffloadError, match="of host RAM"):
            pleviz.offload(model, "cpu")
        self.unchanged(model, expected)

    def test_an_interrupt_in_the_middle_leaves_nothing_half_moved(self, monkeypatch):
        model = make("gemma4")
        expected = logits(model)

        def interrupt(cls):
            raise KeyboardInterrupt

        monkeypatch.setattr("pleviz.homes.home.host_class", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pleviz.offload(model, "cpu")
        self.unchanged(model, expected)
        assert pleviz.find_table(model).weight.requires_grad


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without CUDA")
def test_without_cuda_mapped_warns_and_auto_explains():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        handle = pleviz.offload(make("gemma4"), "mapped")
    assert [str(w.message) for w in seen if "pleviz" in str(w.message)] == [
        "pleviz: rows of the table are gathered on the CPU: CUDA is not available"
    ]
    assert handle.home == "cpu" and handle.bytes_saved == 0
    handle = pleviz.offload(make("gemma4"), "auto")
    assert "CUDA is not available" in handle.reason and "cpu" in repr(handle)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_home_file_reads_the_checkpoint_itself(kind, device, tmp_path):
    model = make(kind, device)
    expected, tokens = logits(model), greedy(model)
    model.save_pretrained(tmp_path)
    with pleviz.offload(model, "file", checkpoint=tmp_path) as handle:
        assert handle.home == "file" == pleviz.home_of(model)
        assert torch.equal(logits(model), expected)
        assert torch.equal(greedy(model), tokens)
        twin = copy.deepcopy(model)
        assert pleviz.home_of(twin) == "file"
        assert torch.equal(logits(twin), expected)
        model.load_state_dict(
            make(kind, device, seed=1).state_dict()
        )  # writing leaves the file alone
        assert pleviz.home_of(model) != "file"
        assert torch.equal(logits(twin), expected)
    other = make(kind, device, seed=2)
    with pytest.raises(OffloadError, match="is not the model's"):
        pleviz.offload(other, "file", checkpoint=tmp_path)
    with pytest.raises(FileNotFoundError, match="home 'file' needs"):
        pleviz.offload(other, "file")
