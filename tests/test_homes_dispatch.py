"""accelerate before, while and after a table is in a home: the table stays there, the bits stay equal."""

from __future__ import annotations

import pytest
import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import (
    AlignDevicesHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_submodules,
)
from accelerate.utils import (
    OffloadedWeightsLoader,
    offload_state_dict,
    set_module_tensor_to_device,
)

import pleviz
from pleviz.homes import OffloadError
from pleviz.table import compute_device
from tests.test_homes import IDS, MASK, ON_PLACES, make
from tests.test_homes_lifecycle import BOTH

pytestmark = [
    pytest.mark.filterwarnings("ignore:pleviz. rows of the table are gathered on the CPU"),
    pytest.mark.filterwarnings("ignore:.*on the meta device"),
]


def logits(model, device):
    """The device of a dispatched model's parameters says nothing about where it computes."""
    with torch.no_grad():
        return model(IDS.to(device), attention_mask=MASK.to(device)).logits.cpu()


def to_cpu(model, device, folder):
    hang_hooks(model, device, {name: value.cpu() for name, value in model.state_dict().items()})


def to_disk(model, device, folder):
    offload_state_dict(str(folder), model.state_dict())
    hang_hooks(model, device, OffloadedWeightsLoader(save_folder=str(folder)))


def hang_hooks(model, device, values):
    """As ``cpu_offload`` and ``disk_offload``, and the shared key and value states left alone.

    (They cannot be told to, and break Gemma 4 in older transformers.)
    """
    keys = model._skip_keys_device_placement
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True, skip_keys=keys), append=True)
    attach_align_device_hook(model, torch.device(device), True, values, skip_keys=keys)


def some_to_disk(model, device, folder):
    place = 0 if device == "cuda" else "cpu"
    parts = {f"model.{name}": place for name, _ in model.model.named_children()} | {
        "lm_head": place
    }
    parts |= {"model.embed_tokens_per_layer": "disk", "model.per_layer_model_projection": "disk"}
    dispatch_model(
        model,
        parts,
        main_device=place,
        offload_dir=str(folder),
        skip_keys=model._skip_keys_device_placement,
    )


WAYS = pytest.mark.parametrize("dispatch", [to_cpu, to_disk, some_to_disk])


@WAYS
@BOTH
@ON_PLACES
def test_a_dispatched_model_is_offloaded_and_restored(kind, home, device, dispatch, tmp_path):
    model = make(kind, device)
    expected = logits(model, device)
    dispatch(model, device, tmp_path)
    module = pleviz.find_table(model).module
    hook = module._hf_hook
    assert module.weight.is_meta
    assert compute_device(pleviz.find_table(model).owner).type == device
    with pleviz.offload(model, home) as handle:
        assert torch.equal(logits(model, device), expected)
        assert pleviz.home_of(model) == handle.home == (home if device == "cuda" else "cpu")
        assert not hasattr(module, "_hf_hook") and not module.weight.is_meta
    assert module._hf_hook is hook and module.weight.is_meta
    assert torch.equal(logits(model, device), expected)
    remove_hook_from_submodules(model)
    assert torch.equal(logits(model.to(device), device), expected)


@WAYS
@BOTH
@ON_PLACES
def test_an_offloaded_model_is_dispatched_and_restored(kind, home, device, dispatch, tmp_path):
    model = make(kind, device)
    expected = logits(model, device)
    handle = pleviz.offload(model, home)
    table = pleviz.find_table(model)
    weight = table.weight
    dispatch(model, device, tmp_path)
    assert (
        table.module.weight is weight and not weight.is_meta
    )  # b03, b13: it did not leave its home
    for _ in range(2):
        assert torch.equal(logits(model, device), expected)
    assert pleviz.home_of(model) == handle.home and table.module.weight is weight
    handle.restore()
    assert pleviz.home_of(model) == "gpu" and hasattr(table.module, "_hf_hook")
    assert torch.equal(logits(model, device), expected)


@WAYS
@BOTH
@ON_PLACES
def test_hooks_that_come_and_go_while_the_table_is_offloaded(
    kind, home, device, dispatch, tmp_path
):
    model = make(kind, device)
    expected = logits(model, device)
    with pleviz.offload(model, home):
        dispatch(model, device, tmp_path)
        remove_hook_from_submodules(model)
        assert torch.equal(logits(model.to(device), device), expected)
    module = pleviz.find_table(model).module
    assert not hasattr(module, "_hf_hook") and "forward" not in vars(module)
    assert torch.equal(logits(model, device), expected)


@WAYS
@BOTH
@ON_PLACES
def test_values_changed_in_the_home_are_the_ones_that_come_back(
    kind, home, device, dispatch, tmp_path
):
    model, twin = make(kind, device), make(kind, device)
    dispatch(model, device, tmp_path)
    values = pleviz.find_table(twin).weight.detach().flip(0).clone()
    key = pleviz.find_table(model).name + ".weight"
    with pleviz.offload(model, home):
        model.load_state_dict({key: values}, strict=False)
        twin.load_state_dict({key: values}, strict=False)
        expected = logits(twin, device)
        assert torch.equal(logits(model, device), expected)
    assert torch.equal(logits(model, device), expected)


@BOTH
@ON_PLACES
def test_a_tensor_that_accelerate_sets_by_name(kind, home, device):
    model, twin = make(kind, device), make(kind, device)
    name = pleviz.find_table(model).name + ".weight"
    values = pleviz.find_table(model).weight.detach().flip(0).clone().cpu()
    handle = pleviz.offload(model, home)
    for each in (model, twin):
        set_module_tensor_to_device(each, name, device, value=values)
    expected = logits(twin, device)
    assert torch.equal(logits(model, device), expected)
    handle.restore()
    assert torch.equal(logits(model, device), expected)


@BOTH
@ON_PLACES
def test_an_emptied_table_still_comes_back(kind, home, device):
    model = make(kind, device)
    expected = logits(model, device)
    name = pleviz.find_table(model).name + ".weight"
    with pleviz.offload(model, home):
        set_module_tensor_to_device(model, name, "meta")
        assert pleviz.find_table(model).weight.is_meta
    assert torch.equal(logits(model, device), expected)


@BOTH
@ON_PLACES
def test_planning_a_device_map_sees_the_same_model(kind, home, device):
    def plan(model):
        return infer_auto_device_map(
            model, {"cpu": 60_000, "disk": 10**9}, no_split_module_classes=model._no_split_modules
        )

    plain, model = make(kind, device), make(kind, device)
    with pleviz.offload(model, home):
        assert plan(model) == plan(plain)
    assert "disk" in plan(plain).values()


def test_home_gpu_of_a_dispatched_model_is_refused(tmp_path):
    model = make("gemma4")
    expected = logits(model, "cpu")
    to_cpu(model, "cpu", tmp_path)
    with pytest.raises(OffloadError, match="accelerate"):
        pleviz.offload(model, "gpu")
    assert torch.equal(logits(model, "cpu"), expected)
