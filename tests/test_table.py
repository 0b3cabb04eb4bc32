"""The PLE table is found wherever it is, and nothing else is taken for it."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, TrainableTokensConfig, get_peft_model

from pleviz import NoTableError, find_table
from tests.tiny import KINDS, tiny_model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("towers", [False, True])
def test_finds_the_table_and_its_sizes(kind, towers):
    model = tiny_model(kind, towers=towers)
    table = find_table(model)
    assert table.module is model.get_submodule(table.name)
    assert (
        table.name == ("model.language_model." if towers else "model.") + "embed_tokens_per_layer"
    )
    assert (table.rows, table.num_layers, table.dim) == (128, 4, 8)
    assert table.nbytes == 128 * 4 * 8 * 4
    assert table.row_nbytes * table.rows == table.nbytes
    assert torch.equal(table.layer(2), table.weight[:, 16:24])
    with pytest.raises(IndexError, match="0…3"):
        table.layer(4)


@pytest.mark.parametrize("kind", KINDS)
def test_bare_text_model(kind):
    text = tiny_model(kind).model
    assert find_table(text).name == "embed_tokens_per_layer"
    assert find_table(text).owner is text


def test_b20_embed_tokens_is_not_confused_with_the_table():
    model = tiny_model("gemma4")
    assert find_table(model).module is not model.model.embed_tokens


def test_b06_multimodal_config_has_no_text_attributes_at_its_top():
    model = tiny_model("gemma4", towers=True)
    assert not hasattr(model.config, "hidden_size_per_layer_input")
    assert find_table(model).owner is model.model.language_model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("config", "wrapper", "suffix"),
    [
        (LoraConfig(r=2, target_modules=["q_proj"]), "none", "embed_tokens_per_layer"),
        (
            LoraConfig(r=2, target_modules=["embed_tokens_per_layer"]),
            "lora",
            "embed_tokens_per_layer.base_layer",
        ),
        (
            LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens_per_layer"]),
            "modules_to_save",
            "embed_tokens_per_layer.modules_to_save.default",
        ),
        (
            TrainableTokensConfig(target_modules=["embed_tokens_per_layer"], token_indices=[1, 2]),
            "trainable_tokens",
            "embed_tokens_per_layer.base_layer",
        ),
    ],
    ids=["lora-elsewhere", "lora-on-table", "modules-to-save", "trainable-tokens"],
)
def test_b16_under_peft_the_live_table_is_found(kind, config, wrapper, suffix):
    model = get_peft_model(tiny_model(kind), config)
    table = find_table(model)
    assert table.wrapper == wrapper
    assert table.name.startswith("base_model.model.") and table.name.endswith(suffix)
    assert isinstance(table.module, torch.nn.Embedding)
    # live: scaling this weight, and no other, changes the output
    ids = torch.tensor([[2, 5, 9]])
    before = model(input_ids=ids).logits
    with torch.no_grad():
        table.weight.mul_(3)
    assert not torch.equal(model(input_ids=ids).logits, before)


def test_b16_disabled_modules_to_save_reads_the_original():
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens_per_layer"])
    model = get_peft_model(tiny_model("gemma4"), config)
    with model.disable_adapter():
        assert find_table(model).name.endswith("original_module")


def test_b22_a_quantised_table_is_found_too():
    bnb = pytest.importorskip("bitsandbytes")
    model = tiny_model("gemma4")
    model.model.embed_tokens_per_layer = bnb.nn.Embedding4bit(128, 32)
    assert isinstance(find_table(model).module, bnb.nn.Embedding4bit)


def test_models_without_a_table():
    with pytest.raises(NoTableError, match="Linear has no PLE table"):
        find_table(torch.nn.Linear(2, 2))
    without = tiny_model("gemma4", hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    with pytest.raises(NoTableError, match="no module in it is named 'embed_tokens_per_layer'"):
        find_table(without)


def test_two_tables_are_ambiguous():
    pair = torch.nn.ModuleList([tiny_model("gemma4"), tiny_model("gemma3n")])
    with pytest.raises(ValueError, match="holds 2 PLE tables"):
        find_table(pair)
