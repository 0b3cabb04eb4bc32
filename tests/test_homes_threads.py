"""Many threads, many models, many times: the right rows for each, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import pleviz
from pleviz.homes import OffloadError, registered_bytes
from pleviz.homes.embedding import HostEmbedding
from pleviz.homes.guard import IdGuard
from tests.test_homes import DEVICES, IDS, ON_PLACES, logits, make
from tests.test_homes_lifecycle import BOTH, HOMES, offload

pytestmark = pytest.mark.filterwarnings("ignore:pleviz. rows of the table are gathered on the CPU")
THREADS = 6


@pytest.fixture(autouse=True)
def many_switches():
    """Let threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def at_once(function, count=THREADS):
    """``function(0) … function(count - 1)``, started together in threads of their own."""
    barrier = threading.Barrier(count)

    def start(number):
        barrier.wait()
        return function(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


def prompts(device):
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 7, 20, 1, 40, 300][:THREADS]  # the last is long enough to look for duplicates
    return [torch.randint(2, 128, (2, n), generator=generator).to(device) for n in lengths]


@BOTH
@HOMES
def test_threads_that_share_a_model_get_their_own_rows(kind, home, device, tmp_path):
    model, ids = make(kind, device), prompts(device)

    def work(number):
        with torch.no_grad():
            out = [model(ids[number]).logits.cpu() for _ in range(3)]
        out.append(model.generate(ids[number][:, :5], max_new_tokens=4, do_sample=False).cpu())
        return out

    expected = [work(number) for number in range(THREADS)]
    with offload(model, home, tmp_path) as handle:
        got = at_once(work)
        used = handle.home
        assert pleviz.home_of(model) == used
    for one, other in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "mapped"])
def test_threads_with_streams_of_their_own_and_a_right_count(home):
    model, ids = make("gemma4", "cuda"), prompts("cuda")
    module = pleviz.find_table(model).module
    expected = [module(each) for each in ids]
    with pleviz.offload(model, home) as handle:

        def work(number):
            with torch.cuda.stream(torch.cuda.Stream()):
                got = [module(ids[number]) for _ in range(20)]
                torch.cuda.current_stream().synchronize()
            return got

        for got, right in zip(at_once(work), expected, strict=True):
            assert all(torch.equal(each, right) for each in got)
        row = 4 * 8 * 4
        rows = [each.numel() for each in ids]
        if home == "cpu":
            rows = [each.unique().numel() if each.numel() >= 256 else each.numel() for each in ids]
        assert handle.bytes_moved == 20 * row * sum(rows)


@BOTH
@ON_PLACES
def test_threads_that_offload_the_same_model(kind, home, device):
    model = make(kind, device)
    expected = logits(model)
    module = pleviz.find_table(model).module
    cls = type(module)
    for _ in range(5):

        def move(number):
            try:
                return pleviz.offload(model, home)
            except OffloadError:
                return None

        handles = [handle for handle in at_once(move) if handle]
        assert len(handles) == 1
        assert torch.equal(logits(model), expected)
        at_once(lambda number, handle=handles[0]: handle.restore())
        assert type(module) is cls and pleviz.home_of(model) == "gpu"
    assert torch.equal(logits(model), expected)


@ON_PLACES
def test_two_models_offloaded_at_once(home, device):
    models = [make(kind, device, seed=seed) for kind in ("gemma4", "gemma3n") for seed in (0, 1)]
    expected = [logits(model) for model in models]
    handles = [pleviz.offload(model, home) for model in models]
    assert all(torch.equal(logits(m), e) for m, e in zip(models, expected, strict=True))
    if handles[0].home == "mapped":
        assert registered_bytes() == 4 * pleviz.find_table(models[0]).nbytes
    handles[1].restore()
    handles[2].restore()
    assert [pleviz.home_of(m) for m in models] == [handles[0].home, "gpu", "gpu", handles[3].home]
    assert all(torch.equal(logits(m), e) for m, e in zip(models, expected, strict=True))
    del models, handles
    gc.collect()
    assert registered_bytes() == 0


def census(model):
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "tensors": sum(isinstance(o, torch.Tensor) for o in gc.get_objects()),
        "hooks": sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()),
        "attributes": sum(len(vars(m)) for m in model.modules()),
        "registered": registered_bytes(),
    }


@BOTH
@HOMES
def test_fifty_moves_leave_nothing_behind(kind, home, device, tmp_path):
    model = make(kind, device, num_hidden_layers=2, num_kv_shared_layers=0)
    model.save_pretrained(tmp_path)
    ids, options = IDS.to(device), {"checkpoint": tmp_path} if home == "file" else {}
    table = pleviz.find_table(model).module
    rows = table(ids).detach()

    def move():
        with pleviz.offload(model, home, **options):
            assert torch.equal(table(ids), rows)
            model.float()
            copy.deepcopy(table)

    for _ in range(3):
        move()
    before = census(model)
    if device == "cuda":
        memory = torch.cuda.memory_allocated()
    for _ in range(50):
        move()
    after = census(model)
    # a few objects of the interpreter's own come and go
    assert after.pop("objects") < before.pop("objects") + 50
    assert after == before
    if device == "cuda":
        assert torch.cuda.memory_allocated() == memory


@BOTH
@HOMES
@pytest.mark.parametrize("restored", [False, True])
def test_a_dropped_model_is_freed(kind, home, device, restored, tmp_path):
    model = make(kind, device)
    handle = offload(model, home, tmp_path)
    twin = copy.deepcopy(model)
    logits(model)
    logits(twin)
    if restored:
        handle.restore()
    dead = [
        weakref.ref(o)
        for o in (model, twin, pleviz.find_table(model).module, pleviz.find_table(twin).weight)
    ]
    del model, twin, handle
    gc.collect()
    assert [ref() for ref in dead] == [None] * 4
    assert registered_bytes() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_no_module_of_another_model_is_touched(device):
    """Patching a class would change every model of the process; a home belongs to one module."""
    model, other = make("gemma4", device), make("gemma4", device)
    cls = type(pleviz.find_table(other).module)
    forward = cls.forward
    with pleviz.offload(model, "cpu"):
        assert type(pleviz.find_table(other).module) is cls and cls.forward is forward
        assert not isinstance(other.get_input_embeddings(), HostEmbedding)
        assert not any(
            isinstance(h, IdGuard) for m in other.modules() for h in m._forward_pre_hooks.values()
        )
