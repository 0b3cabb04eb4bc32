"""What people, and transformers' own test suites, do to a model: the same bits in every home.

Each action runs on an ordinary model and on an equal one whose table is in a home; both must give
the same bits, then and afterwards, offloaded and restored.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate.utils import compute_module_sizes

import pleviz
from tests.test_homes import IDS, MASK, PLACES, greedy, logits, make
from tests.tiny import KINDS

HOMES = pytest.mark.parametrize(
    ("home", "device"),
    [*PLACES, ("file", "cpu"), pytest.param("file", "cuda", marks=pytest.mark.gpu)],
)
BOTH = pytest.mark.parametrize("kind", KINDS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:pleviz. rows of the table are gathered on the CPU"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]

Action = Callable[[Any, Path], Any]
ACTIONS: dict[str, Action] = {}


def action(function: Action) -> Action:
    """Register something to do to a model; what it returns must have the same bits in every home."""
    ACTIONS[function.__name__.strip("_")] = function
    return function


def offload(model, home, folder):
    """Offload ``model``; for the home ``file`` from a checkpoint of its own written to ``folder``."""
    if home != "file":
        return pleviz.offload(model, home)
    model.save_pretrained(folder / "home")
    return pleviz.offload(model, "file", checkpoint=folder / "home")


def leaves(value: Any) -> Iterator[Any]:
    """Every tensor and number in a result; caches are left out, the logits depend on them."""
    if isinstance(value, torch.Tensor):
        yield value.detach().cpu()
    elif isinstance(value, dict):
        for key in value:
            yield key
            yield from leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, str | int | float | bool | None):
        yield value


def assert_same(got: Any, expected: Any) -> None:
    """Equal bits, dtypes and structure."""
    got, expected = list(leaves(got)), list(leaves(expected))
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b)
            assert not b.isnan().any()
        else:
            assert a == b


def inputs(model, **more):
    device = pleviz.table.compute_device(pleviz.find_table(model).owner)
    return {"input_ids": IDS.to(device), "attention_mask": MASK.to(device), **more}


def generate(model, **kwargs):
    torch.manual_seed(0)
    return model.generate(**inputs(model, max_new_tokens=5, **{"do_sample": False, **kwargs}))


def gradients(model, loss) -> dict[str, torch.Tensor]:
    """Gradients by parameter, without the table's: offloaded, it is frozen."""
    table = pleviz.find_table(model).name
    loss.backward()
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    got.pop(f"{table}.weight", None)
    assert len(got) > 20
    return got


def per_layer(model):
    """What a forward pass from ``inputs_embeds`` needs besides: Gemma 3n cannot find the ids again."""
    if model.config.model_type.startswith("gemma4"):
        return {}
    return {"per_layer_inputs": model.model.get_per_layer_inputs(inputs(model)["input_ids"])}


# ---------------------------------------------------------------------------------- forward passes


@action
def every_hidden_state(model, folder):
    with torch.no_grad():
        out = model(**inputs(model), output_hidden_states=True)
    assert len(out.hidden_states) > 4
    return out.hidden_states, out.logits


@action
def attentions_of_the_eager_kernel(model, folder):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs(model), output_attentions=True)
    assert out.attentions[0] is not None
    return out.attentions, out.logits


@action
def sdpa(model, folder):
    model.set_attn_implementation("sdpa")
    return logits(model)


@action
def right_padding(model, folder):
    some = inputs(model)
    with torch.no_grad():
        return model(
            some["input_ids"].flip(1), attention_mask=some["attention_mask"].flip(1)
        ).logits


@action
def the_last_logits_only(model, folder):
    with torch.no_grad():
        return model(**inputs(model), logits_to_keep=1).logits


@action
def int32_ids_and_a_single_token(model, folder):
    ids = inputs(model)["input_ids"]
    with torch.no_grad():
        return model(ids.int()).logits, model(ids[:, :1]).logits, model(ids[:1, ::2]).logits


@action
def decoding_by_hand(model, folder):
    some = inputs(model)
    history = []
    with torch.no_grad():
        out = model(some["input_ids"][:1], use_cache=True)
        for _ in range(4):
            history.append(out.logits)
            token = out.logits[:, -1:].argmax(-1)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
    return history, out.logits


@action
def functional_call(model, folder):
    weights = {k: v.detach() for k, v in model.named_parameters()}
    with torch.no_grad():
        out = torch.func.functional_call(model, weights, (), inputs(model)).logits
        half = {k: v / 2 for k, v in weights.items()}
        other = torch.func.functional_call(model, half, (), inputs(model)).logits
    assert not torch.equal(out, other)
    return out, other, logits(model)


@action
def inference_mode(model, folder):
    with torch.inference_mode():
        return model(**inputs(model)).logits


@action
def autocast(model, folder):
    device = inputs(model)["input_ids"].device.type
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        return model(**inputs(model)).logits


# -------------------------------------------------------------------------------------- generation


@action
def beam_search(model, folder):
    out = generate(
        model, num_beams=3, num_return_sequences=2, return_dict_in_generate=True, output_scores=True
    )
    return out.sequences, out.sequences_scores


@action
def sampling(model, folder):
    return generate(model, do_sample=True, top_k=20, temperature=0.9), generate(
        model, do_sample=True, num_beams=2
    )


@action
def assisted_generation(model, folder):
    assistant = make(
        model.config.model_type.removesuffix("_text"),
        model.device.type,
        seed=3,
        num_hidden_layers=2,
        num_kv_shared_layers=0,
    )
    one = {k: v[:1] for k, v in inputs(model).items()}
    return model.generate(**one, max_new_tokens=8, do_sample=False, assistant_model=assistant)


@action
def being_the_assistant(model, folder):
    main = make(
        model.config.model_type.removesuffix("_text"),
        model.device.type,
        seed=3,
        num_hidden_layers=6,
    )
    one = {k: v[:1] for k, v in inputs(model).items()}
    return main.generate(**one, max_new_tokens=8, do_sample=False, assistant_model=model)


@action
def prompt_lookup(model, folder):
    ids = inputs(model)["input_ids"][:1].repeat(1, 3)
    return model.generate(ids, max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=2)


@action
def scores_and_hidden_states_of_generate(model, folder):
    out = generate(
        model,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
    )
    return out.sequences, out.scores, out.logits, out.hidden_states


@action
def from_embeddings(model, folder):
    embeds = model.get_input_embeddings()(inputs(model)["input_ids"])
    with torch.no_grad():
        return model(inputs_embeds=embeds, **per_layer(model)).logits


@action
def caches(model, folder):
    names = ["dynamic", "static", "hybrid"]
    if model.device.type == "cuda":
        names += ["offloaded", "offloaded_static"]
    return [generate(model, cache_implementation=name) for name in names], generate(
        model, use_cache=False
    )


# What only reads a table is no different for a file on the CPU: it is gathered there as well.
READING = frozenset(ACTIONS)

# ---------------------------------------------------------------------------- gradients and training


@action
def gradients_of_embeddings(model, folder):
    # one row without padding: the magnitude in Gemma 3n has no gradient at the zero row
    embeds = model.get_input_embeddings()(inputs(model)["input_ids"]).detach()[:1].requires_grad_()
    given = {k: v.detach()[:1] for k, v in per_layer(model).items()}
    model(inputs_embeds=embeds, **given).logits.sum().backward()
    assert embeds.grad.abs().sum() > 0
    return embeds.grad


@action
def gradients_of_all_other_parameters(model, folder):
    ids = inputs(model)["input_ids"][:1]
    return gradients(model.train(), model(ids, labels=ids).loss)


@action
def gradient_checkpointing(model, folder):
    ids = inputs(model)["input_ids"][:1]
    model.train().gradient_checkpointing_enable()
    return gradients(model, model(ids, labels=ids).loss)


@action
def input_require_grads(model, folder):
    ids = inputs(model)["input_ids"][:1]
    model.requires_grad_(False)
    model.enable_input_require_grads()
    model.model.layers[0].requires_grad_(True)
    model(ids, labels=ids).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------------------- saving and loading


def reloaded(model, load) -> Any:
    """The logits and weights of what ``load`` returns, an ordinary model equal to ``model``."""
    other = load()
    assert pleviz.home_of(other) == "gpu"
    state = other.state_dict()
    assert set(state) == set(model.state_dict())
    return logits(other.to(model.device)), state


@action
def sharded_checkpoint(model, folder):
    model.save_pretrained(folder / "sharded", max_shard_size="30KB")
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 2
    return reloaded(model, lambda: type(model).from_pretrained(folder / "sharded"))


@action
def loading_half_precision(model, folder):
    model.save_pretrained(folder / "saved")
    return reloaded(
        model, lambda: type(model).from_pretrained(folder / "saved", dtype=torch.float16)
    )


@action
def state_dict_file(model, folder):
    torch.save(model.state_dict(), folder / "state.pt")
    other = make(model.config.model_type.removesuffix("_text"), seed=5)
    other.load_state_dict(torch.load(folder / "state.pt", map_location="cpu"))
    return reloaded(model, lambda: other)


@action
def state_dict_given_to_from_pretrained(model, folder):
    return reloaded(
        model,
        lambda: type(model).from_pretrained(
            None, config=model.config, state_dict=dict(model.state_dict())
        ),
    )


@action
def safetensors_save_model(model, folder):
    safetensors.torch.save_model(model, folder / "model.st")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter is not pleviz.find_table(model).weight:
                parameter.zero_()
    missing, unexpected = safetensors.torch.load_model(
        model, folder / "model.st", device=str(model.device)
    )
    assert not missing and not unexpected
    return logits(model)


@action
def loading_other_weights(model, folder):
    other = make(model.config.model_type.removesuffix("_text"), seed=5)
    safetensors.torch.save_model(other, folder / "model.st")
    safetensors.torch.load_model(model, folder / "model.st", device=str(model.device))
    return logits(model)


# ----------------------------------------------------------------------------- changes of the model


@action
def half(model, folder):
    model.half()
    return logits(model), pleviz.find_table(model).weight


@action
def double(model, folder):
    model.double()
    return logits(model), pleviz.find_table(model).weight


@action
def there_and_back(model, folder):
    return (
        logits(model.to(torch.bfloat16)),
        logits(model.float()),
        logits(model.type(torch.float16)),
    )


@action
def train_and_eval(model, folder):
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(0)
    trained = logits(model.train())
    return trained, logits(model.eval())


@action
def tie_weights(model, folder):
    model.tie_weights()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    return logits(model)


@action
def writing_through_data(model, folder):
    table = pleviz.find_table(model)
    table.weight.data.mul_(2)
    return logits(model), table.weight


@action
def values_replaced_and_copied(model, folder):
    """As merging an adapter safely does; and before any forward pass comes the next step."""
    weight = pleviz.find_table(model).weight
    weight.data = weight.data.flip(0).clone()
    twin = copy.deepcopy(model)
    weight.data = weight.data.mul(2)
    pickled = pickle.loads(pickle.dumps(model))
    weight.data = weight.data.mul(2)
    state = copy.deepcopy(model.state_dict())
    cast = model.bfloat16()
    return state, [logits(each) for each in (twin, pickled, cast)]


@action
def another_parameter(model, folder):
    module = pleviz.find_table(model).module
    values = module.weight.detach().flip(0).clone()
    module.weight = torch.nn.Parameter(values, requires_grad=False)
    return logits(model), module.weight


@action
def sizes(model, folder):
    return {
        "footprint": model.get_memory_footprint(),
        "parameters": model.num_parameters(),
        "no embeddings": model.num_parameters(exclude_embeddings=True),
        "modules": compute_module_sizes(model),
        "names": [n for n, _ in model.named_parameters()],
        "shapes": [tuple(p.shape) for p in model.parameters()],
        "dtype": str(model.dtype),
        "device": str(model.device),
    }


def resized(new, **kwargs) -> Action:
    def resize(model, folder):
        torch.manual_seed(0)
        model.resize_token_embeddings(new, **kwargs)
        table = pleviz.find_table(model)
        rows = math.ceil((new or 128) / 64) * 64 if kwargs.get("pad_to_multiple_of") else new or 128
        assert table.rows == table.weight.shape[0] == rows
        assert model.config.vocab_size_per_layer_input == rows
        last = torch.full_like(IDS, rows - 1)
        return (
            logits(model, IDS % rows),
            logits(model, last),
            table.weight,
            greedy(model) if rows > 40 else 0,
        )

    return resize


ACTIONS |= {
    "resize_to_140": resized(140),
    "resize_to_140_without_mean": resized(140, mean_resizing=False),
    "resize_to_40": resized(40),
    "resize_to_none": resized(None),
    "resize_to_150_padded": resized(150, pad_to_multiple_of=64),
    "resize_to_100_padded_without_mean": resized(100, pad_to_multiple_of=64, mean_resizing=False),
    "resize_to_none_padded": resized(None, pad_to_multiple_of=64),
}


@action
def resizing_twice_then_saving(model, folder):
    for rows in (140, 90):
        model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(folder / "resized")
    return reloaded(model, lambda: type(model).from_pretrained(folder / "resized"))


GROWING = {name for name in ACTIONS if name.startswith(("resize_to_1", "resizing"))}


def cases() -> Iterator[Any]:
    """Every action in every home where it makes sense."""
    for name in ACTIONS:
        for home, device in (
            ("cpu", "cpu"),
            ("file", "cpu"),
            *((h, "cuda") for h in ("cpu", "mapped", "file")),
        ):
            if (home, device) == ("file", "cpu") and name in READING:
                continue
            if (home, device) == ("file", "cuda") and name == "writing_through_data":
                continue  # the driver maps a file read-only: the write would end the process
            if (home, device) == ("cpu", "cuda") and name in GROWING:
                continue  # new rows are drawn where the table is: by another random generator
            marks = [pytest.mark.gpu] if device == "cuda" else []
            yield pytest.param(name, home, device, marks=marks, id=f"{name}-{home}-{device}")


@pytest.mark.parametrize(("name", "home", "device"), cases())
@BOTH
def test_the_same_bits_as_an_ordinary_model(name, kind, home, device, tmp_path):
    plain, model = make(kind, device), make(kind, device)
    for part in ("plain", "model"):
        (tmp_path / part).mkdir()
    handle = offload(model, home, tmp_path)
    used = handle.home
    expected = ACTIONS[name](plain, tmp_path / "plain")
    assert_same(ACTIONS[name](model, tmp_path / "model"), expected)
    # what comes afterwards is right too: in the home, and restored
    assert pleviz.home_of(model) in (
        used,
        "mapped" if used == "file" and device == "cuda" else "cpu",
    )
    after = logits(plain, IDS % 40)
    assert torch.equal(logits(model, IDS % 40), after)
    handle.restore()
    assert pleviz.home_of(model) == "gpu" and torch.equal(logits(model, IDS % 40), after)
    assert pleviz.find_table(model).weight.dtype == pleviz.find_table(plain).weight.dtype
