"""load(): the table goes to its home without a detour, and a wrong or partial checkpoint is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForCausalLM

import pleviz
from pleviz.homes.loading import device_map, load
from pleviz.homes.shard import find_in_checkpoint, map_table
from tests.test_homes import DEVICES, assert_table_matters, greedy, logits
from tests.tiny import KINDS, tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*has no tokenizer", "ignore:pleviz. rows of the table"
)


@pytest.fixture(params=KINDS)
def saved(request, tmp_path):
    model = tiny_model(request.param, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("home", ["gpu", "cpu", "mapped", "file", "auto"])
def test_b14_loaded_into_any_home_the_bits_are_the_checkpoints(saved, home, device):
    original, path = saved
    model, tokenizer = load(path, home=home, device=device)
    assert tokenizer is None and not model.training
    if home in ("cpu", "file", "gpu") or device == "cuda":
        where = {"auto": "file", "gpu": "gpu"}.get(home, home)
        assert pleviz.home_of(model) == where
    table = pleviz.find_table(model)
    assert torch.equal(table.weight.cpu(), pleviz.find_table(original).weight)
    original.to(device)
    # a cast with .to() would have rounded the rotary buffers: compare with the same loading style
    twin = type(original).from_pretrained(path, dtype=torch.bfloat16).to(device)
    assert torch.equal(logits(model), logits(twin))
    assert torch.equal(greedy(model), greedy(twin))
    assert not hasattr(model, "hf_device_map")
    assert not any(hasattr(m, "_hf_hook") or "forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("home", ["cpu", "file"])
def test_restoring_a_loaded_model_gives_the_ordinary_model(saved, home, device):
    original, path = saved
    model, _ = load(path, home=home, device=device)
    expected = logits(model)
    pleviz.restore(model)
    table = pleviz.find_table(model)
    assert table.weight.device.type == device and table.weight.requires_grad
    assert_table_matters(model)  # it also writes to the table: a read-only map would crash here
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("towers", [True, False])
def test_multimodal_checkpoint_with_and_without_towers(towers, tmp_path):
    original = tiny_model("gemma4", towers=True)
    original.save_pretrained(tmp_path)
    model, _ = load(tmp_path, home="cpu", towers=towers, dtype=torch.float32)
    assert hasattr(model.model, "vision_tower") == towers
    assert torch.equal(logits(model), logits(original))


# not nf4 on the CPU for Gemma 3n: bitsandbytes' kernel asserts on the 4 outputs of AltUp's routers
QUANTISED = [
    ("gemma4", "nf4", "cpu"),
    ("gemma4", "int8", "cpu"),
    ("gemma3n", "int8", "cpu"),
    *(pytest.param(k, q, "cuda", marks=pytest.mark.gpu) for k in KINDS for q in ("nf4", "int8")),
]


@pytest.mark.parametrize(("kind", "quantization", "device"), QUANTISED)
def test_b22_quantised_weights_beside_an_untouched_table(kind, quantization, device, tmp_path):
    pytest.importorskip("bitsandbytes")
    # they also take only input widths that are multiples of 64
    widths = {"hidden_size": 64, "head_dim": 16, "hidden_size_per_layer_input": 64}
    widths |= {"global_head_dim": 16} if kind == "gemma4" else {"laurel_rank": 64}
    original = tiny_model(kind, **widths)
    original.save_pretrained(tmp_path)
    common = {"quantization": quantization, "device": device, "dtype": torch.float32}
    plain, _ = load(tmp_path, home="gpu", **common)
    model, _ = load(tmp_path, home="file", **common)
    assert type(model.model.layers[0].mlp.up_proj).__name__ in ("Linear4bit", "Linear8bitLt")
    assert torch.equal(pleviz.find_table(model).weight.cpu(), pleviz.find_table(original).weight)
    assert_table_matters(plain)
    assert torch.equal(logits(model), logits(plain))
    pleviz.restore(model)
    assert type(model.model.layers[0].mlp.up_proj).__name__ in ("Linear4bit", "Linear8bitLt")
    assert torch.equal(logits(model), logits(plain))


def test_b20_the_map_lists_every_sibling_by_its_full_name(saved):
    original, path = saved
    places = device_map(type(original), original.config, "cpu", "disk")
    assert places["model.embed_tokens_per_layer"] == "disk"
    assert [k for k, v in places.items() if v == "disk"] == ["model.embed_tokens_per_layer"]
    assert "" not in places and "model" not in places
    children = {f"model.{n}" for n, _ in original.model.named_children()} | {"lm_head"}
    assert children <= set(places)


def test_b13_b14_the_supported_placement_is_taken_over(saved, tmp_path_factory):
    """accelerate offloads the table (to disk here, there being one device); then a home takes it."""
    original, path = saved
    model = type(original).from_pretrained(
        path,
        dtype=torch.bfloat16,
        device_map=device_map(type(original), original.config, "cpu", "disk"),
        offload_folder=tmp_path_factory.mktemp("offload"),
    )
    assert pleviz.find_table(model).weight.is_meta
    expected = logits(model)
    with pleviz.offload(model, "cpu"):
        assert torch.equal(logits(model), expected)
        assert not pleviz.find_table(model).weight.is_meta
    assert pleviz.find_table(model).weight.is_meta  # accelerate's again
    assert torch.equal(logits(model), expected)


def test_b06_a_class_that_does_not_fit_is_known_by_its_missing_weights(tmp_path):
    tiny_model("gemma4", towers=True).save_pretrained(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        # what a user gets who names the text class for a multimodal checkpoint
        patch.setattr(
            "pleviz.homes.loading.model_class",
            lambda config, towers: (Gemma4ForCausalLM, config.text_config, None),
        )
        with pytest.raises(ValueError, match="they would be random"):
            load(tmp_path, home="cpu")


def test_b05_a_checkpoint_without_the_table_is_refused(saved):
    _, path = saved
    weights = load_file(path / "model.safetensors")
    del weights["model.embed_tokens_per_layer.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"first: model\.embed_tokens_per_layer\.weight"):
        load(path, home="cpu")


def test_gated_repositories_say_how_to_get_access(monkeypatch):
    import httpx
    import transformers
    from huggingface_hub.errors import GatedRepoError

    def refuse(name, **kwargs):
        response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
        raise OSError(f"{name} is a gated repo") from GatedRepoError("gated", response=response)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(
        PermissionError, match="accept its licence at https://huggingface.co/google/gemma"
    ):
        load("google/gemma-4-E4B-it")


def test_bad_arguments_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match="unknown quantization 'q4'"):
        load(tmp_path, quantization="q4")


class TestShard:
    """Finding the table's bytes in a checkpoint."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
    def test_any_prefix_and_dtype(self, tmp_path, dtype, prefix):
        table = torch.randn(16, 8).to(dtype)
        other = {
            f"{prefix}embed_tokens.weight": torch.zeros(3, 3),
            "a": torch.zeros(3, dtype=torch.uint8),
        }
        save_file(
            other | {f"{prefix}embed_tokens_per_layer.weight": table},
            tmp_path / "model.safetensors",
        )
        found = find_in_checkpoint(tmp_path)
        assert (found.dtype, found.shape, found.nbytes) == (dtype, (16, 8), table.nbytes)
        assert torch.equal(map_table(found), table)

    def test_a_sharded_checkpoint(self, tmp_path):
        model = tiny_model("gemma4")
        model.save_pretrained(tmp_path, max_shard_size="40KB")
        assert (tmp_path / "model.safetensors.index.json").exists()
        found = find_in_checkpoint(tmp_path)
        assert torch.equal(map_table(found), pleviz.find_table(model).weight)

    def test_no_table_no_file_and_damaged_files(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
            find_in_checkpoint(tmp_path)
        path = tmp_path / "model.safetensors"
        save_file({"embed_tokens.weight": torch.zeros(4, 4)}, path)
        with pytest.raises(ValueError, match="no tensor named"):
            find_in_checkpoint(tmp_path)
        save_file({"embed_tokens_per_layer.weight": torch.zeros(64, 4)}, path)
        whole = path.read_bytes()
        path.write_bytes(whole[:-10])
        with pytest.raises(ValueError, match="cut short"):
            find_in_checkpoint(tmp_path)
        path.write_bytes(whole[:5])
        with pytest.raises(ValueError, match="not a safetensors file"):
            find_in_checkpoint(tmp_path)
        save_file({"embed_tokens_per_layer.weight": torch.zeros(4, 4, dtype=torch.int8)}, path)
        with pytest.raises(ValueError, match="stored as I8"):
            find_in_checkpoint(tmp_path)

    @pytest.mark.parametrize("device", DEVICES)
    def test_a_table_at_an_odd_byte_is_gathered_on_the_cpu(self, saved, device):
        original, path = saved
        file = path / "model.safetensors"
        raw = file.read_bytes()
        length = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:length].rstrip())
        # one byte of padding in front of the data shifts every tensor to an odd address
        for entry in header.values():
            if "data_offsets" in entry:
                entry["data_offsets"] = [x + 1 for x in entry["data_offsets"]]
        header["pad"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" + raw[length:])
        assert not find_in_checkpoint(path).aligned
        model = original.to(device)
        expected = logits(model)
        with pleviz.offload(model, "file", checkpoint=path) as handle:
            assert handle.home == "file"
            assert ("odd byte" in handle.reason) == (device == "cuda")
            assert torch.equal(logits(model), expected)

    def test_a_write_on_the_cpu_stays_in_the_process(self, saved):
        model, path = saved
        before = (path / "model.safetensors").read_bytes()
        pleviz.offload(model, "file", checkpoint=path)
        with torch.no_grad():
            pleviz.find_table(model).weight.zero_()
        assert not pleviz.find_table(model).weight.any()
        assert (path / "model.safetensors").read_bytes() == before
