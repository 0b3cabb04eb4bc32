"""Plant the smallest fault there is in a copy of a model: one weight, moved by one ULP."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from pleviz.exercises_homes import suspect_layer
from pleviz.rounding import next_up

Model = TypeVar("Model", bound=nn.Module)

_SUSPECT = "layers.{}.post_attention_layernorm.weight"


def plant(model: Model, parameter: str, index: int = 0) -> Model:
    """A copy of ``model`` in which one element is the next larger number; ``model`` stays as it is.

    Args:
        model: any model.
        parameter: name of the parameter, or its end: ``"layers.2.mlp.down_proj.weight"``.
        index: which element, counted through the flattened parameter.

    Raises:
        ValueError: no parameter, or more than one, has that name.
        IndexError: the parameter has no such element.
    """
    twin = copy.deepcopy(model)
    found = [
        (name, p)
        for name, p in twin.named_parameters()
        if name == parameter or name.endswith(f".{parameter}")
    ]
    if len(found) != 1:
        names = ", ".join(name for name, _ in found) or "none"
        raise ValueError(f"{parameter!r} must name one parameter of the model, but names: {names}")
    flat = found[0][1].data.view(-1)
    if not 0 <= index < flat.numel():
        raise IndexError(f"{found[0][0]} has elements 0…{flat.numel() - 1}, not {index}")
    flat[index] = next_up(flat[index])
    return twin


def suspect(model: Model) -> Model:
    """A copy of ``model`` with a fault planted in one of its decoder layers: exercise 04.3."""
    layers = model.config.get_text_config().num_hidden_layers
    return plant(model, _SUSPECT.format(suspect_layer(layers)))
