"""Figures of parity: the numbers a dtype has, what rounding loses, where two models part.

Each function returns a figure for :func:`pleviz.show` that carries its description.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from pleviz.plots.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, empty_figure
from pleviz.rounding import FP16_EXACT_FROM, fp16_round_trip, numbers_between, step

if TYPE_CHECKING:
    from pleviz.parity import Parity


def number_ruler(*, low: float = 0.98, high: float = 1.045, example: float = 1.01) -> go.Figure:
    """The numbers of bfloat16, float16 and float32 around 1, and where ``example`` is rounded to."""
    import torch

    dtypes = {
        "bfloat16": (torch.bfloat16, VERMILION),
        "float16": (torch.float16, BLUE),
        "float32": (torch.float32, GREEN),
    }
    rounded = {
        name: float(torch.tensor(example, dtype=dtype)) for name, (dtype, _) in dtypes.items()
    }
    landed = "; ".join(f"{name} {value:.6g}" for name, value in rounded.items())
    fig = empty_figure(
        f"The numbers there are around 1, and what becomes of {example:g}",
        height=330,
        alt="A ruler for each dtype, a mark for each number. Above 1 bfloat16 has a mark every "
        f"0.0078, twice as far apart as below 1; float16 has eight times as many. {example:g} "
        f"becomes: {landed}.",
    )
    for name, (dtype, colour) in dtypes.items():
        if dtype.itemsize == 2:
            marks = numbers_between(low, high, dtype)
            fig.add_scatter(
                x=marks,
                y=[name] * len(marks),
                mode="markers",
                marker={"symbol": "line-ns", "size": 26, "line": {"width": 2, "color": colour}},
                hovertemplate="%{x:.8g}<extra>" + name + "</extra>",
                showlegend=False,
            )
        else:
            fig.add_scatter(
                x=[low, high],
                y=[name] * 2,
                mode="lines",
                line={"color": colour, "width": 26},
                hoverinfo="skip",
                showlegend=False,
            )
    fig.add_scatter(
        name=f"{example:g} rounded to the nearest number",
        x=list(rounded.values()),
        y=list(rounded),
        mode="markers",
        marker={"symbol": "circle-open", "size": 13, "color": GREY, "line": {"width": 3}},
        hovertemplate="%{x:.8g}<extra>%{y}</extra>",
    )
    fig.add_vline(x=example, line={"color": GREY, "dash": "dot", "width": 1.5})
    one = 1 + step(1.0, torch.bfloat16)
    fig.add_scatter(
        x=[1, one],
        y=["bfloat16"] * 2,
        mode="lines",
        yaxis="y",
        showlegend=False,
        hoverinfo="skip",
        line={"color": GREY, "width": 2},
    )
    fig.add_annotation(
        x=(1 + one) / 2, y="bfloat16", text="1 ULP", showarrow=False, yshift=24, font={"size": 12}
    )
    fig.update_xaxes(range=[low, high], title="number", showgrid=False)
    fig.update_yaxes(range=[2.6, -0.8], showgrid=False, zeroline=False)
    return fig


def fp16_window(std: float) -> go.Figure:
    """Where weights of N(0, ``std``²) lie, and which of them a copy in float16 changes."""
    binades = [b for b in fp16_round_trip(std) if b.share > 1e-7]
    changed = sum(b.changed for b in binades)
    fig = empty_figure(
        f"Weights of standard deviation {std:g}, by size, on the way through float16",
        height=430,
        alt="Bars on a logarithmic axis. Most weights lie between 2⁻¹⁰ and 2⁻⁴, where float16 keeps "
        f"all of them. Below 2⁻¹⁷ ever fewer survive. In all {changed:.2%} change.",
    )
    for name, colour, shares in (
        ("all weights of this size", SKY, [b.share for b in binades]),
        ("those that come back changed", VERMILION, [b.changed for b in binades]),
    ):
        fig.add_bar(
            name=name,
            x=[b.exponent for b in binades],
            y=[share or None for share in shares],  # a logarithm has no place for 0
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate="2<sup>%{x}</sup> to twice that: %{y:.2~%} of all weights"
            f"<extra>{name}</extra>",
        )
    limit = math.log2(FP16_EXACT_FROM)
    fig.add_vline(
        x=limit - 0.5,
        line={"color": GREY, "dash": "dash", "width": 1.5},
        annotation={"text": "float16 keeps every bf16 number from here to 65,280 →"},
        annotation_position="top left",
    )
    fig.update_layout(barmode="overlay", bargap=0.15, margin_t=76)
    ticks = range(binades[0].exponent, binades[-1].exponent + 1, 3)
    fig.update_xaxes(
        title="size of the weight (each bar: up to twice that)",
        tickvals=list(ticks),
        ticktext=[f"2<sup>{n}</sup>" for n in ticks],
        showgrid=False,
    )
    decades = range(-7, 1)
    fig.update_yaxes(
        type="log",
        title="share of all weights",
        range=[-7, 0],
        tickvals=[10.0**n for n in decades],
        ticktext=[f"{100 * 10.0**n:.10f}".rstrip("0").rstrip(".") + " %" for n in decades],
    )
    return fig


def divergence(parities: Mapping[str, Parity], *, title: str, alt: str) -> go.Figure:
    """How much of each stage differs, in the order in which a model computes them.

    Args:
        parities: what was compared -> result; all of one kind of model.
        title: what was changed.
        alt: what holds on every machine: the shares differ with the processor.
    """
    fig = empty_figure(title, height=470, alt=alt)
    looks = zip(
        (BLUE, VERMILION, ORANGE, PURPLE, GREEN),
        ("solid", "dash", "dot", "dashdot", "longdash"),
        strict=True,
    )
    for (name, parity), (colour, dash) in zip(parities.items(), looks, strict=False):
        stages = [s for s in parity.stages if not s.name.endswith("per-layer input")]
        fig.add_scatter(
            name=name,
            x=[stage.name for stage in stages],
            y=[100 * stage.differing / stage.total for stage in stages],
            customdata=[[stage.differing, stage.total, stage.max_ulp] for stage in stages],
            mode="lines+markers",
            line={"color": colour, "width": 2.5, "dash": dash},
            marker={"size": 8},
            cliponaxis=False,
            hovertemplate="%{x}: %{customdata[0]:,} of %{customdata[1]:,} differ, up to "
            "%{customdata[2]:,} ULP<extra>" + name + "</extra>",
        )
    fig.update_xaxes(type="category", tickangle=-45, showgrid=False)
    fig.update_yaxes(title="numbers that differ, %", range=[-3, 103])
    return fig
