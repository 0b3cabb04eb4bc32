"""Fine-tuning beside, and on, a table in any home: the same losses, merges and files bit for bit."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from packaging.version import Version
from peft import (
    LoraConfig,
    PeftModel,
    TrainableTokensConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from transformers import Trainer, TrainingArguments
from transformers.integrations import peft as transformers_peft

import pleviz
from pleviz.homes import OffloadError
from pleviz.homes.loading import load
from tests.test_homes import IDS, ON_PLACES, assert_table_matters, logits, make
from tests.test_homes_lifecycle import BOTH, HOMES, assert_same, offload

pytestmark = [
    pytest.mark.filterwarnings("ignore:pleviz. rows of the table are gathered on the CPU"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
LORA = {"r": 2, "lora_alpha": 8, "init_lora_weights": False}
ELSEWHERE = ["q_proj", "per_layer_input_gate", "per_layer_model_projection"]
TABLE = "embed_tokens_per_layer"


def adapted(model, targets=ELSEWHERE, **kwargs):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules=targets, **LORA | kwargs)).eval()


def losses(model, steps=3):
    ids = IDS[:1].to(model.device)
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    history = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    model.eval()
    assert len(set(history)) == steps  # it does learn something
    return history


@BOTH
@HOMES
@pytest.mark.parametrize("reentrant", [False, True])
def test_lora_with_gradient_checkpointing(kind, home, device, reentrant, tmp_path):
    def curve(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return losses(model), logits(model)

    plain, model = make(kind, device), make(kind, device)
    assert_table_matters(plain)
    handle = offload(model, home, tmp_path)
    expected = curve(adapted(plain))
    assert_same(curve(adapted(model)), expected)
    handle.restore()
    assert torch.equal(logits(model), expected[1])


@BOTH
@HOMES
@pytest.mark.parametrize("targets", [ELSEWHERE, "all-linear"], ids=["some", "b16_all_linear"])
def test_merging_after_offload(kind, home, device, targets, tmp_path):
    plain, model = make(kind, device), make(kind, device)
    untouched = logits(plain)
    plain = adapted(plain, targets)
    with offload(model, home, tmp_path) as handle:
        model = adapted(model, targets)
        expected = logits(plain)
        assert torch.equal(logits(model), expected) and not torch.equal(expected, untouched)
        with model.disable_adapter():
            assert torch.equal(logits(model), untouched)
        used, merged = handle.home, model.merge_and_unload(safe_merge=targets == "all-linear")
        expected = logits(plain.merge_and_unload(safe_merge=targets == "all-linear"))
        assert torch.equal(logits(merged), expected)
        assert pleviz.home_of(merged) == used
    assert torch.equal(logits(merged), expected)
    assert_same(merged.state_dict(), plain.merge_and_unload().state_dict())


@BOTH
@pytest.mark.parametrize(
    ("home", "device"),
    [("cpu", "cpu"), ("file", "cpu"), pytest.param("mapped", "cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("order", ["offload-first", "peft-first"])
@pytest.mark.parametrize("safe", [False, True])
def test_lora_on_the_table_itself(kind, home, device, order, safe, tmp_path):
    plain, model = make(kind, device), make(kind, device)
    plain = adapted(plain, [TABLE, "q_proj"])
    if order == "offload-first":
        offload(model, home, tmp_path)
        model = adapted(model, [TABLE, "q_proj"])
    else:
        model.save_pretrained(tmp_path / "home")
        model = adapted(model, [TABLE, "q_proj"])
        pleviz.offload(model, home, **({"checkpoint": tmp_path / "home"} if home == "file" else {}))
    file = tmp_path / "home" / "model.safetensors"
    before = file.read_bytes() if file.exists() else None
    assert pleviz.find_table(model).wrapper == "lora"
    assert losses(model) == losses(plain)
    assert torch.equal(logits(model), logits(plain))
    plain.merge_adapter(safe_merge=safe)
    model.merge_adapter(safe_merge=safe)
    assert torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(copy.deepcopy(model)), logits(plain))  # b33: with what was merged
    plain.unmerge_adapter()
    model.unmerge_adapter()
    assert torch.equal(logits(model), logits(plain))
    plain, model = plain.merge_and_unload(safe_merge=safe), model.merge_and_unload(safe_merge=safe)
    assert pleviz.home_of(model) == (home if home != "file" or not safe else "cpu")
    assert torch.equal(logits(model), logits(plain))
    pleviz.restore(model)
    assert torch.equal(logits(model), logits(plain))
    assert torch.equal(pleviz.find_table(model).weight, pleviz.find_table(plain).weight)
    assert before is None or file.read_bytes() == before


@BOTH
def test_lora_on_a_table_that_is_mapped_read_only(kind, tmp_path, monkeypatch):
    """Here in ordinary memory, where a write to such a map ends the process as it does on a GPU."""
    monkeypatch.setattr(pleviz.homes, "why_not", lambda device, *, read_only: None)
    plain, model = adapted(make(kind), [TABLE]), make(kind)
    handle = offload(model, "file", tmp_path)
    assert (
        pleviz.home_of(model) == "file" and pleviz.find_table(model).module._home.kind == "mapped"
    )
    model = adapted(model, [TABLE])
    assert pleviz.home_of(model) == "mapped"  # in RAM now, where it can be written to
    merged, expected = model.merge_and_unload(), logits(plain.merge_and_unload())
    assert torch.equal(logits(merged), expected)
    handle.restore()
    assert torch.equal(logits(merged), expected)
    before = adapted(make(kind), [TABLE])
    with pytest.raises(OffloadError, match="would write into the read-only file"):
        pleviz.offload(before, "file", checkpoint=tmp_path / "home")
    with pleviz.offload(before, "mapped"):
        assert torch.equal(logits(before.merge_and_unload()), expected)


@BOTH
@HOMES
def test_an_adapter_saved_and_loaded_beside_an_offloaded_table(kind, home, device, tmp_path):
    plain, model = adapted(make(kind, device)), make(kind, device)
    handle = offload(model, home, tmp_path)
    adapted(model).save_pretrained(tmp_path / "adapter")
    assert not any("per_layer.weight" in p.name for p in (tmp_path / "adapter").iterdir())
    base = make(kind, device)
    with pleviz.offload(base, "cpu" if home == "file" else home):
        again = PeftModel.from_pretrained(base, tmp_path / "adapter")
        assert torch.equal(logits(again), logits(plain))
    assert torch.equal(logits(again), logits(plain))
    handle.restore()


@pytest.mark.skipif(
    Version(peft.__version__) < Version(getattr(transformers_peft, "MIN_PEFT_VERSION", "0")),
    reason="this transformers wants a newer PEFT",
)
@BOTH
@ON_PLACES
def test_adapters_of_transformers_own(kind, home, device, tmp_path):
    def run(model, folder):
        torch.manual_seed(0)
        model.add_adapter(LoraConfig(target_modules=ELSEWHERE, **LORA))
        first = logits(model)
        model.save_pretrained(folder)
        model.disable_adapters()
        without = logits(model)
        model.load_adapter(folder, adapter_name="again")
        model.set_adapter("again")
        return first, without, logits(model)

    plain, model = make(kind, device), make(kind, device)
    with pleviz.offload(model, home):
        assert_same(run(model, tmp_path / "a"), run(plain, tmp_path / "b"))


@BOTH
@ON_PLACES
def test_restoring_under_peft_does_not_make_the_table_trainable(kind, home, device):
    model = make(kind, device)
    handle = pleviz.offload(model, home)
    wrapped = adapted(model)
    handle.restore()
    assert not pleviz.find_table(wrapped).weight.requires_grad
    assert all("lora_" in n for n, p in wrapped.named_parameters() if p.requires_grad)
    model = make(kind, device)
    with pleviz.offload(model, home):
        model.requires_grad_(False)
    assert not pleviz.find_table(model).weight.requires_grad


@ON_PLACES
@pytest.mark.parametrize("trainable", [False, True])
def test_a_new_parameter_keeps_its_flag_for_the_restore(home, device, trainable):
    model = make("gemma4", device).requires_grad_(False)
    with pleviz.offload(model, home):
        module = pleviz.find_table(model).module
        module.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=trainable)
        assert not module.weight.requires_grad
    assert pleviz.find_table(model).weight.requires_grad == trainable


@BOTH
@ON_PLACES
def test_training_an_offloaded_table_is_refused(kind, home, device):
    model = make(kind, device)
    expected, ids = logits(model), IDS[:1].to(device)
    handle = pleviz.offload(model, home)
    model.train().requires_grad_(True)
    with pytest.raises(RuntimeError, match="read-only"):
        model(ids, labels=ids)
    assert torch.equal(logits(model.eval()), expected)  # without gradients it works
    handle.restore()
    model.train()(ids, labels=ids).loss.backward()
    assert pleviz.find_table(model).weight.grad.abs().sum() > 0


@BOTH
@ON_PLACES
@pytest.mark.parametrize(
    "config",
    [
        TrainableTokensConfig(target_modules=[TABLE], token_indices=[5, 9]),
        LoraConfig(target_modules=["q_proj"], trainable_token_indices={TABLE: [5, 9]}),
    ],
    ids=["trainable-tokens", "lora-with-tokens"],
)
def test_b16_trainable_tokens_of_the_table_are_refused(kind, home, device, config):
    before = get_peft_model(make(kind, device), config)
    with pytest.raises(OffloadError, match="trainable_tokens"):
        pleviz.offload(before, home)
    model = make(kind, device)
    expected = logits(model)
    handle = pleviz.offload(model, home)
    after = get_peft_model(model, config)
    # each step would copy the whole table
    with pytest.raises(RuntimeError, match="restore"):
        after(IDS.to(device))
    handle.restore()
    assert torch.equal(logits(after), expected)
    assert after(IDS.to(device)).logits.requires_grad


@BOTH
@ON_PLACES
def test_b16_a_copy_of_an_offloaded_table_that_is_to_be_trained(kind, home, device):
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=[TABLE], **LORA)
    torch.manual_seed(0)
    plain = get_peft_model(make(kind, device), config)
    model = make(kind, device)
    handle = pleviz.offload(model, home)
    torch.manual_seed(0)
    model = get_peft_model(model, config)
    with pytest.raises(RuntimeError, match="read-only"):
        model(IDS.to(device))
    assert torch.equal(logits(model), logits(plain))
    handle.restore()
    assert pleviz.home_of(model) == "gpu"
    assert not any(hasattr(m, "_home") for m in model.modules())
    assert losses(model) == losses(plain)
    assert torch.equal(logits(model), logits(plain))


@BOTH
@ON_PLACES
def test_trainer(kind, home, device, tmp_path):
    def train(model, folder):
        arguments = TrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=1,
            learning_rate=0.02,
            report_to=[],
            save_steps=2,
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=device == "cpu",
            seed=0,
        )
        rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain, model = make(kind, device), make(kind, device)
    pleviz.find_table(plain).weight.requires_grad_(False)
    handle = pleviz.offload(model, home)
    used = handle.home
    history = train(plain, tmp_path / "plain")
    assert train(model, tmp_path / "model") == history and len(set(history)) == 2
    assert pleviz.home_of(model) == used
    assert torch.equal(logits(model.eval()), logits(plain.eval()))
    reloaded = type(model).from_pretrained(tmp_path / "model" / "checkpoint-2")
    assert torch.equal(logits(reloaded.to(device)), logits(plain))
    handle.restore()
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("gemma4", "cpu"),
        *(pytest.param(k, "cuda", marks=pytest.mark.gpu) for k in ("gemma4", "gemma3n")),
    ],
)
@pytest.mark.parametrize("home", ["cpu", "file", pytest.param("mapped", marks=pytest.mark.gpu)])
def test_b22_lora_on_nf4_weights(kind, home, device, tmp_path):
    pytest.importorskip("bitsandbytes")
    widths = {"hidden_size": 64, "head_dim": 16, "hidden_size_per_layer_input": 64}
    widths |= {"global_head_dim": 16} if kind == "gemma4" else {"laurel_rank": 64}
    make(kind, **widths).save_pretrained(tmp_path)

    def run(home):
        model, _ = load(tmp_path, home=home, quantization="nf4", device=device, dtype=torch.float32)
        assert pleviz.home_of(model) == home
        model = adapted(prepare_model_for_kbit_training(model), ["q_proj", "up_proj"])
        curve = losses(model), logits(model)
        if home != "gpu":
            pleviz.restore(model)
            assert not pleviz.find_table(model).weight.requires_grad
            assert torch.equal(logits(model), curve[1])
        return curve

    assert_same(run(home), run("gpu"))
