"""Moving a table is all or nothing: an exception at any point leaves it where it was, or moved.

The interrupts come from a trace function, wherever Python itself can deliver a KeyboardInterrupt:
after each call, at the start of each function and at each turn of a loop of ``pleviz.homes``.
"""

from __future__ import annotations

import copy
import dis
import functools
import gc
import sys
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

import pleviz
from pleviz import homes
from pleviz.homes import OffloadError, registered_bytes
from pleviz.homes.embedding import HostEmbedding
from pleviz.homes.guard import IdGuard
from tests.test_homes import DEVICES, IDS, ON_PLACES, logits, make
from tests.test_homes_lifecycle import BOTH, HOMES, offload
from tests.tiny import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:pleviz. rows of the table are gathered on the CPU")
WATCHED = str(Path(homes.__file__).parent)


@functools.cache
def places(code) -> frozenset[int]:
    """Offsets in ``code`` before which a signal handler may run."""
    found, delivers = set(), False
    for instruction in dis.get_instructions(code):
        if delivers and instruction.opname != "NOP":  # a NOP may lie between two protected ranges
            found.add(instruction.offset)
        delivers = instruction.opname.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
    return frozenset(found)


class Interrupt:
    """Raises KeyboardInterrupt at the ``at``-th place that is reached; the turns of a loop count once."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen: set[tuple] = set()

    def __call__(self, frame, event, arg):
        if (
            not frame.f_code.co_filename.startswith(WATCHED)
            or frame.f_code.co_name == "_unregister"
        ):
            return None  # Python drops an exception that is raised in a finaliser
        frame.f_trace_opcodes = True
        place = (frame.f_code, frame.f_lasti)
        if event == "opcode" and frame.f_lasti in places(frame.f_code) and place not in self.seen:
            if len(self.seen) == self.at:
                raise KeyboardInterrupt
            self.seen.add(place)
        return self

    def during(self, function) -> bool:
        """Run ``function``; whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def guards(model) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, IdGuard)
    ]


class Watch:
    """What an untouched table is like, to compare with."""

    def __init__(self, model) -> None:
        self.model = model
        table = pleviz.find_table(model)
        self.module, self.weight, self.cls = table.module, table.weight, type(table.module)
        self.keys, self.hook = set(vars(self.module)), vars(self.module).get("_hf_hook")
        self.device, self.trainable = self.weight.device, self.weight.requires_grad
        self.ids = IDS.to("cpu" if self.device.type == "meta" else self.device)
        self.rows = self.module(self.ids).detach()

    def check(self) -> str:
        """Raise unless the table is wholly in one state; return its home."""
        assert torch.equal(self.module(self.ids), self.rows)
        if isinstance(self.module, HostEmbedding):
            assert self.module.weight is self.module._parameters["weight"]
            assert not self.module.weight.requires_grad
            assert guards(self.model)
            is_3n = self.model.config.model_type.startswith("gemma3n")
            assert self.module._home.row_zero_outside == is_3n
            assert self.module._home.was_trainable == self.trainable
            assert self.module._home.accelerate_hook is self.hook
        else:
            assert type(self.module) is self.cls and set(vars(self.module)) == self.keys
            assert self.module.weight.device == self.device
            assert self.module.weight.requires_grad == self.trainable
            assert vars(self.module).get("_hf_hook") is self.hook
            if self.hook is None:
                assert self.module.weight is self.weight
            assert not guards(self.model)
        return pleviz.home_of(self.model)


def hooked(model):
    """Let accelerate copy the table in and out, as ``device_map={…: "cpu"}`` does."""
    module = pleviz.find_table(model).module
    device = module.weight.device
    add_hook_to_module(
        module,
        AlignDevicesHook(
            device,
            offload=True,
            io_same_device=True,
            weights_map={"weight": module.weight.data.cpu()},
        ),
    )
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_hook", [False, True], ids=["plain", "hooked"])
@ON_PLACES
def test_an_interrupt_at_any_point_of_a_move(kind, with_hook, home, device):
    everywhere(kind, home, device, with_hook=with_hook)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_an_interrupt_at_any_point_of_a_move_to_a_file(kind, device, tmp_path):
    everywhere(kind, "file", device, checkpoint=tmp_path)


def everywhere(kind, home, device, with_hook=False, **options):
    model = make(kind, device, num_hidden_layers=1, num_kv_shared_layers=0)
    if "checkpoint" in options:
        model.save_pretrained(options["checkpoint"])
    if with_hook:
        hooked(model)
    watch = Watch(model)
    for direction in ("out", "back"):
        ends, interrupted, at = set(), True, 0
        while interrupted:
            if direction == "out":
                interrupted = Interrupt(at).during(lambda: pleviz.offload(model, home, **options))
            else:
                handle = pleviz.offload(model, home, **options)
                interrupted = Interrupt(at).during(handle.restore)
            ends.add(watch.check())
            if pleviz.home_of(model) != "gpu":
                pleviz.restore(model)
                assert watch.check() == "gpu"
            at += 1
        assert at > 50 and len(ends) == 2  # undone at first, done at last
    gc.collect()
    assert registered_bytes() == 0
    assert torch.equal(watch.module(watch.ids), watch.rows)


@BOTH
@HOMES
def test_a_failed_restore_leaves_the_table_at_home(kind, home, device, tmp_path, monkeypatch):
    model = make(kind, device)
    expected = logits(model)
    handle = offload(model, home, tmp_path)
    used, real = handle.home, torch.Tensor.to

    def out_of_memory(self, *args, **kwargs):
        if self.shape == (128, 32):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *args, **kwargs)

    for restore in (
        handle.restore,
        lambda: pleviz.restore(model),
        lambda: handle.__exit__(None, None, None),
    ):
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(torch.Tensor, "to", out_of_memory)
            restore()
        assert pleviz.home_of(model) == handle.home == used
        assert torch.equal(logits(model), expected)
    handle.restore()
    assert pleviz.home_of(model) == "gpu" and torch.equal(logits(model), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the warning comes where there is no CUDA")
def test_a_warning_that_is_an_error_stops_the_move():
    model = make("gemma4")
    watch = Watch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="gathered on the CPU"):
            pleviz.offload(model, "mapped")
    assert watch.check() == "gpu"


@BOTH
@ON_PLACES
def test_blocks_inside_blocks(kind, home, device):
    model, other = make(kind, device), make(kind, device, seed=1)
    expected, others = logits(model), logits(other)
    with pleviz.offload(model, "gpu") as outer:
        with pleviz.offload(model, home) as inner, pleviz.offload(other, home):
            with (
                pytest.raises(OffloadError, match="already offloaded"),
                pleviz.offload(model, "cpu"),
            ):
                pass
            assert pleviz.home_of(model) == inner.home != "gpu"
            assert torch.equal(logits(model), expected) and torch.equal(logits(other), others)
        assert pleviz.home_of(model) == pleviz.home_of(other) == outer.home == "gpu"
    assert torch.equal(logits(model), expected) and torch.equal(logits(other), others)


@ON_PLACES
def test_a_handle_restores_its_own_move_only(home, device):
    model = make("gemma4", device)
    expected = logits(model)
    with pleviz.offload(model, home) as first:
        pleviz.restore(model)
        second = pleviz.offload(model, home)
    assert pleviz.home_of(model) == second.home and torch.equal(logits(model), expected)
    first.restore()
    assert pleviz.home_of(model) == second.home
    second.restore()
    assert pleviz.home_of(model) == "gpu" and not guards(model)
    with pleviz.offload(model, "gpu"):
        third = pleviz.offload(model, home)
    assert pleviz.home_of(model) == third.home and torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", KINDS)
@ON_PLACES
def test_restoring_through_a_part_of_the_model(kind, home, device):
    model = make(kind, device, towers=True)
    expected = logits(model)
    pleviz.offload(model, home)
    assert len(guards(model)) == 2
    pleviz.restore(model.model.language_model)
    assert torch.equal(logits(model), expected)
    assert not guards(model)  # those above it went with the first forward pass


@ON_PLACES
def test_moves_under_inference_mode_leave_ordinary_tensors(home, device, tmp_path):
    model = make("gemma4", device)
    model.save_pretrained(tmp_path)
    ids = IDS[:1].to(device)
    with torch.inference_mode():
        with pleviz.offload(model, home):
            twin = copy.deepcopy(model)
        pleviz.restore(twin)
        with pleviz.offload(twin, "file", checkpoint=tmp_path):
            twin.double().float()
    for each in (model, twin):
        weight = pleviz.find_table(each).weight
        assert not weight.is_inference() and weight.requires_grad
        torch.nn.functional.embedding(ids, weight).sum().backward()
        assert weight.grad.abs().sum() > 0
