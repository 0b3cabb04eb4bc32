"""Any sequence of steps leaves the bits those of a twin that got the same steps without pleviz.

The examples are the same in every run; ``pytest -p hypothesis --hypothesis-seed=random`` tries others
(with ``PLEVIZ_RANDOM_EXAMPLES=1``, which switches the fixed seed off).
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import json
import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import pleviz
from pleviz.homes import registered_bytes
from pleviz.homes.embedding import HostEmbedding
from pleviz.homes.gather import gather_rows
from pleviz.homes.guard import IdGuard
from pleviz.homes.shard import find_in_checkpoint, map_table, same_bits
from tests.tiny import KINDS, tiny_model

FIXED = {
    "deadline": None,
    "derandomize": not os.environ.get("PLEVIZ_RANDOM_EXAMPLES"),
    "database": None,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:pleviz. rows of the table are gathered on the CPU"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]
SMALL = {
    "vocab_size": 24,
    "vocab_size_per_layer_input": 24,
    "num_hidden_layers": 1,
    "num_kv_shared_layers": 0,
    "hidden_size": 12,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "hidden_size_per_layer_input": 3,
}
IDS = torch.tensor([[0, 2, 5, 9, 20, 2]])
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@functools.cache
def pickled(kind):
    """One model per kind, in the form that is copied fastest."""
    extra = {"global_head_dim": 4} if kind == "gemma4" else {"laurel_rank": 2}
    return pickle.dumps(tiny_model(kind, **SMALL | extra))


def seed(number, device):
    """As ``torch.manual_seed``, which takes milliseconds where CUDA is not initialised."""
    torch.default_generator.manual_seed(number)
    if device == "cuda":
        torch.cuda.manual_seed(number)


def logits(model):
    with torch.no_grad():
        rows = model.get_input_embeddings().num_embeddings
        return model(IDS.to(model.device) % rows, use_cache=False).logits.cpu()


class Pair:
    """A model whose table moves about, and its twin, to which only the other steps happen."""

    def __init__(self, kind: str, device: str, folder: Path) -> None:
        self.model, self.twin = (pickle.loads(pickled(kind)).to(device) for _ in range(2))
        self.device, self.folder = device, folder
        self.handle: pleviz.Offload | None = None
        self.seeds = 0
        self.expected: torch.Tensor | None = None

    # ------------------------------------------------------------ steps of pleviz, for one of them

    def offload(self, home: str) -> None:
        """Into another home, unless the table is in one or is being trained: that is refused."""
        table = pleviz.find_table(self.model)
        busy = isinstance(table.module, HostEmbedding)
        if busy or (self.model.training and table.weight.requires_grad):
            with pytest.raises(pleviz.homes.OffloadError):
                pleviz.offload(self.model, home)
            return
        options = {}
        if home == "file":
            self.model.save_pretrained(self.folder / "home")
            options = {"checkpoint": self.folder / "home"}
            if table.weight.dtype == torch.float64:
                with pytest.raises(ValueError, match="stored as F64"):
                    pleviz.offload(self.model, home, **options)
                return
        self.handle = pleviz.offload(self.model, home, **options)
        assert (pleviz.home_of(self.model) == "gpu") == (home == "gpu")

    def restore(self, how: str) -> None:
        if how == "handle" and self.handle is not None:
            self.handle.restore()
            self.handle = None
        elif how == "function" and pleviz.home_of(self.model) != "gpu":
            pleviz.restore(self.model)

    # ------------------------------------------------------------------- steps that happen to both

    def both(self, step) -> None:
        self.seeds += 1
        self.expected = None
        results = []
        for name in ("model", "twin"):
            seed(self.seeds, self.device)
            changed = step(getattr(self, name))
            if isinstance(changed, torch.nn.Module):
                if name == "model" and changed is not self.model:
                    self.handle = None  # it was for the other object
                setattr(self, name, changed)
            else:
                results.append(changed)
        if results and isinstance(results[0], torch.Tensor):
            assert torch.equal(*results)

    def to(self, dtype) -> None:
        self.both(lambda model: model.to(dtype))

    def mode(self, train) -> None:
        self.both(lambda model: model.train(train))

    def resize(self, rows, mean) -> None:
        if self.device == "cuda" and pleviz.home_of(self.model) == "cpu":
            # new rows are drawn where the table is: by another random generator
            rows = min(rows, pleviz.find_table(self.model).rows)
        if pleviz.find_table(self.model).weight.dtype == torch.float16:
            mean = False  # the covariance overflows, with and without a home
        self.both(lambda model: model.resize_token_embeddings(rows, mean_resizing=mean) and model)
        assert (
            pleviz.find_table(self.model).rows
            == pleviz.find_table(self.model).weight.shape[0]
            == rows
        )

    def generate(self, sample) -> None:
        ids = IDS.to(self.device) % pleviz.find_table(self.model).rows
        self.both(lambda model: model.eval().generate(ids, max_new_tokens=2, do_sample=sample))

    @property
    def read_only(self) -> bool:
        """The driver maps a file read-only: a write by the GPU would end the process."""
        return self.device == "cuda" and pleviz.home_of(self.model) == "file"

    def write(self) -> None:
        if self.read_only:
            return

        def double(model):
            with torch.no_grad():
                pleviz.find_table(model).weight.mul_(2)
            return model

        self.both(double)

    def rewrite(self) -> None:
        """As merging an adapter does: other values behind the same parameter."""

        def point_elsewhere(model):
            weight = pleviz.find_table(model).weight
            weight.data = weight.data.flip(0).clone()
            return model

        self.both(point_elsewhere)

    def replace(self) -> None:
        trainable = pleviz.find_table(self.twin).weight.requires_grad

        def swap(model):
            module = pleviz.find_table(model).module
            values = module.weight.detach().flip(0).clone()
            module.weight = torch.nn.Parameter(values, requires_grad=trainable)
            return model

        self.both(swap)

    def freeze(self, trainable) -> None:
        if pleviz.home_of(self.model) == "gpu" or not trainable:
            self.both(lambda model: model.requires_grad_(trainable))

    def load_state(self, assign) -> None:
        def load(model):
            state = {name: values.flip(0).clone() for name, values in model.state_dict().items()}
            model.load_state_dict(state, assign=assign)
            model.tie_weights()
            return model

        self.both(load)

    def state_file(self) -> None:
        def there_and_back(model):
            memory = io.BytesIO()
            torch.save(model.state_dict(), memory)
            memory.seek(0)
            model.load_state_dict(torch.load(memory))
            return model

        self.both(there_and_back)

    def copied(self, how) -> None:
        copies = {
            "deepcopy": copy.deepcopy,
            "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        }
        model, expected = self.model, logits(self.twin.eval())
        self.both(copies[how])
        home = pleviz.home_of(model)
        ram = "cpu" if self.device == "cpu" else "mapped"
        if how == "pickle":  # the values come along: a file, or a GPU's way to RAM, is left behind
            allowed = {"gpu": ["gpu"], "cpu": ["cpu"]}.get(home, [ram])
        else:  # a file that no longer holds the values is left behind as well
            allowed = [home, ram] if home == "file" else [home]
        assert pleviz.home_of(self.model) in allowed
        if self.read_only:
            return
        with torch.no_grad():  # the original does not notice what happens to its copy
            weight = pleviz.find_table(self.model).weight
            values = weight.clone()
            weight.add_(1)
            assert torch.equal(logits(model.eval()), expected)
            weight.copy_(values)

    def saved(self) -> None:
        home = pleviz.home_of(self.model)

        def there_and_back(model):
            model.save_pretrained(self.folder / "saved")
            again = type(model).from_pretrained(self.folder / "saved", dtype=model.dtype)
            return again.to(self.device).train(model.training)

        self.both(there_and_back)
        assert pleviz.home_of(self.model) == "gpu"
        if home != "gpu":
            self.offload("cpu")

    # --------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        training = self.model.training
        if self.expected is None:
            self.expected = logits(self.twin.eval())
        assert (
            torch.equal(logits(self.model.eval()), self.expected)
            and not self.expected.isnan().all()
        )
        self.model.train(training), self.twin.train(training)
        module, twin = pleviz.find_table(self.model).module, pleviz.find_table(self.twin).module
        assert same_bits(module.weight.cpu(), twin.weight.cpu())
        assert module.num_embeddings == twin.num_embeddings
        assert list(self.model.state_dict()) == list(self.twin.state_dict())
        guards = [
            h
            for m in self.model.modules()
            for h in m._forward_pre_hooks.values()
            if isinstance(h, IdGuard)
        ]
        if pleviz.home_of(self.model) == "gpu":
            assert (
                type(module) is type(twin) and set(vars(module)) == set(vars(twin)) and not guards
            )
            assert module.weight.requires_grad == twin.weight.requires_grad
        else:
            assert len(guards) == 1 and not module.weight.requires_grad


FLAG = st.booleans()
HOMES = st.sampled_from(["cpu", "file", "mapped", "mapped", "auto", "gpu"])


def step(name, *values):
    return st.tuples(st.just(name), *values)


# what meets the most code paths comes up the most
STEPS = st.one_of(
    step("offload", HOMES),
    step("offload", HOMES),
    step("restore", st.sampled_from(["handle", "function"])),
    step("to", st.sampled_from(DTYPES)),
    step("resize", st.sampled_from([16, 24, 31, 40]), FLAG),
    step("rewrite"),
    st.tuples(st.sampled_from(["write", "replace", "state_file", "saved"])),
    step("copied", st.sampled_from(["deepcopy", "pickle"])),
    step("copied", st.sampled_from(["deepcopy", "pickle"])),
    step("load_state", FLAG),
    step("mode", FLAG) | step("freeze", FLAG) | step("generate", FLAG),
)


def play(kind, device, steps):
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(kind, device, Path(folder))
        for (name, *values), look in steps:
            getattr(pair, name)(*values)
            if look:  # not always: a look is a forward pass, which tidies up
                pair.check()
        pair.check()
        pair.restore("handle")
        pair.restore("function")
        pair.check()


SEQUENCES = st.lists(st.tuples(STEPS, st.sampled_from([False, False, True])), max_size=8)


@pytest.fixture
def mapped_without_gpu(monkeypatch):
    """The home "mapped" works where its rows are in ordinary memory too: it needs no GPU then."""
    why_not = {True: "no read-only maps here", False: None}
    monkeypatch.setattr(pleviz.homes, "why_not", lambda device, *, read_only: why_not[read_only])


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture], **FIXED)
@given(kind=st.sampled_from(KINDS), steps=SEQUENCES)
def test_any_sequence_of_steps(mapped_without_gpu, kind, steps):
    play(kind, "cpu", steps)


EACH = [
    ("to", torch.bfloat16),
    ("resize", 31, False),
    ("resize", 16, False),
    ("rewrite",),
    ("write",),
    ("replace",),
    ("state_file",),
    ("copied", "deepcopy"),
    ("copied", "pickle"),
    ("load_state", False),
    ("load_state", True),
    ("freeze", False),
    ("restore", "function"),
]


@pytest.mark.parametrize("home", ["cpu", "file"])
def test_each_step_right_after_each_other(home):
    """Without a forward pass between the two, which would tidy up."""
    for number, (first, second) in enumerate(itertools.product(EACH, EACH)):
        kind = KINDS[number % 2]
        play(kind, "cpu", [(("offload", home), False), (first, False), (second, False)])


@pytest.mark.gpu
@settings(max_examples=150, **FIXED)
@given(kind=st.sampled_from(KINDS), steps=SEQUENCES)
def test_any_sequence_of_steps_on_a_gpu(kind, steps):
    play(kind, "cuda", steps)
    gc.collect()
    assert registered_bytes() == 0


# ------------------------------------------------------------------------------------ single parts


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@st.composite
def lookups(draw):
    """A table of any dtype, and ids of any shape, layout and integer type."""
    rows, width = draw(st.integers(1, 70)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from([*DTYPES, torch.int8]))
    shape = draw(st.lists(st.integers(0, 5), max_size=3) | st.just([700]) | st.just([3, 300]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    # random bits: infinities, denormals and NaNs with payloads among them
    raw = torch.randint(
        0, 256, (rows, width * dtype.itemsize), dtype=torch.uint8, generator=generator
    )
    distinct = draw(st.integers(1, rows))
    ids = torch.randint(
        0,
        distinct,
        shape,
        generator=generator,
        dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )
    layout = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "flipped"]))
    if layout == "transposed":
        ids = ids.T if ids.dim() == 2 else ids
    elif layout == "strided":
        ids = torch.stack([ids, ids], dim=-1)[..., 0]
    elif layout == "expanded":
        ids = ids.expand(2, *ids.shape)
    elif layout == "flipped":
        ids = torch.cat([ids, ids]).flip(0) if ids.dim() else ids
    return raw.view(dtype), ids


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(max_examples=300, **FIXED)
@given(lookup=lookups())
def test_gathered_rows_are_those_of_an_embedding(device, lookup):
    table, ids = lookup
    expected = F.embedding(ids, table)
    got = gather_rows(table, ids.to(device))
    assert got.shape == expected.shape and got.dtype == expected.dtype and got.device.type == device
    assert torch.equal(bits(got.cpu()), bits(expected))


@settings(max_examples=100, **FIXED)
@given(
    lookup=lookups(),
    bad=st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1]),
    where=st.integers(0, 10**6),
)
def test_one_id_outside_is_an_error_wherever_it_is(lookup, bad, where):
    table, ids = lookup
    ids = ids.clone().reshape(-1)
    if ids.numel() == 0:
        return
    bad = bad if bad < 0 else min(table.shape[0] + bad, 2**31 - 1)
    ids[where % ids.numel()] = bad
    with pytest.raises(IndexError, match=f"token id {bad} is outside"):
        gather_rows(table, ids)


@settings(max_examples=100, **FIXED)
@given(
    rows=st.integers(1, 50),
    width=st.integers(1, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    prefix=st.sampled_from(["", "model.", "model.language_model.", "language_model.model."]),
    # every other tensor: the shard it is in, its length in bytes
    others=st.dictionaries(
        st.sampled_from(
            [
                "embed_tokens.weight",
                "not_embed_tokens_per_layer.weight",
                "embed_tokens_per_layer.bias",
                "embed_tokens_per_layer_norm.weight",
                "a",
                "zz.weight",
            ]
        ),
        st.tuples(st.integers(0, 3), st.integers(0, 9)),
    ),
    shard=st.integers(0, 3),
    sharded=st.booleans(),
    metadata=st.sampled_from([None, {"format": "pt"}, {"embed_tokens_per_layer.weight": "x" * 50}]),
)
def test_the_table_is_found_in_any_layout_of_shards(
    rows, width, dtype, prefix, others, shard, sharded, metadata
):
    raw = torch.arange(rows * width * dtype.itemsize, dtype=torch.int64).mul(37).to(torch.uint8)
    table = raw.view(dtype).view(rows, width)
    key = f"{prefix}embed_tokens_per_layer.weight"
    shards = {number: {} for number in range(4 if sharded else 1)}
    for name, (number, nbytes) in others.items():
        shards[number % len(shards)][prefix + name] = torch.zeros(nbytes, dtype=torch.uint8)
    shards[shard % len(shards)][key] = table
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        files = {
            n: f"model-{n + 1:05}-of-{len(shards):05}.safetensors"
            if sharded
            else "model.safetensors"
            for n in shards
        }
        for number, tensors in shards.items():
            save_file(tensors, folder / files[number], metadata=metadata)
        if sharded:
            index = {name: files[number] for number, tensors in shards.items() for name in tensors}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        found = find_in_checkpoint(folder)
        assert (found.key, found.dtype, found.shape, found.nbytes) == (
            key,
            dtype,
            (rows, width),
            table.nbytes,
        )
        for copy_on_write in (False, True):
            mapped = map_table(found, copy_on_write=copy_on_write)
            assert torch.equal(bits(mapped), bits(table)) and same_bits(mapped, table)
        before = found.path.read_bytes()
        mapped.zero_()  # the copy-on-write one: it never reaches the file
        assert found.path.read_bytes() == before and not same_bits(mapped, torch.ones_like(mapped))


@settings(max_examples=100, **FIXED)
@given(
    lookup=lookups(), row=st.integers(0, 10**6), column=st.integers(0, 10**6), bit=st.integers(0, 7)
)
def test_same_bits_sees_a_single_bit(lookup, row, column, bit):
    table, _ = lookup
    other = table.clone()
    assert same_bits(table, other)  # NaNs too
    raw = other.view(torch.uint8)
    raw[row % raw.shape[0], column % raw.shape[1]] ^= 1 << bit
    assert not same_bits(table, other)
    assert not same_bits(table, table[:-1]) and not same_bits(table, table.to(torch.complex64))
