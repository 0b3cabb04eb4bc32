"""Curves: memory over time, and the roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from pleviz.format import fmt_bytes
from pleviz.plots.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    empty_figure,
    unit_for,
)
from pleviz.roofline import MACHINES, Machine, Operation

if TYPE_CHECKING:
    from pleviz.memory import Sample

_SERIES = {
    "allocated": ("allocated: live tensors on the GPU", BLUE, "solid"),
    "reserved": ("reserved: allocated and torch's cache", SKY, "dot"),
    "rss": ("RSS: this process in host memory", BLUE, "solid"),
}


def intensity_chart(
    operations: Sequence[Operation], machines: Sequence[Machine] = MACHINES, *, title: str
) -> go.Figure:
    """Where operations sit under the roofs of machines; both axes are logarithmic.

    A point's height is the best speed the first machine can reach at its intensity: memory
    bandwidth × intensity left of the balance point, peak arithmetic right of it.
    """
    labels = list(dict.fromkeys(op.label for op in operations))
    facts = "; ".join(f"{label}: {_in_words(operations, label)}" for label in labels)
    balance = machines[0].balance
    alt = f"Roofline chart of {machines[0].name}, balance at {balance:.0f} FLOP per byte. {facts}."
    fig = empty_figure(title, height=490, alt=alt)
    low, high = 10**-1, 10**4
    for machine, colour in zip(machines, (GREY, ORANGE, GREEN), strict=False):
        ends = [low, machine.balance, high]
        fig.add_scatter(
            name=f"{machine.name}: balance at {machine.balance:.0f} FLOP per byte",
            x=ends,
            y=[machine.reachable(x) / 1e12 for x in ends],
            mode="lines",
            line={"color": colour, "width": 2.5},
            hoverinfo="skip",
        )
    fig.add_vline(x=balance, line={"color": GREY, "dash": "dot", "width": 2})
    for text, side, shift in (
        ("← bound by memory", "right", -6),
        ("bound by arithmetic →", "left", 6),
    ):
        place = {"x": math.log10(balance), "y": 0, "yref": "paper", "xshift": shift}
        fig.add_annotation(text=text, xanchor=side, yanchor="bottom", showarrow=False, **place)
    looks = (  # the diamond fits on the circle, where the two meet
        (VERMILION, "square", 13, "bottom right"),
        (BLUE, "circle", 16, "bottom center"),
        (PURPLE, "diamond", 9, "top center"),
    )
    for label, look in zip(labels, looks, strict=False):
        fig.add_trace(_points([op for op in operations if op.label == label], machines[0], look))
    ticks = {"type": "log", "dtick": 1, "exponentformat": "power"}
    fig.update_xaxes(title="arithmetic intensity, FLOP per byte", range=[-1, 4], **ticks)
    fig.update_yaxes(title="reachable speed, TFLOP/s", range=[-1.6, 3.6], **ticks)
    return fig


def _in_words(operations: Sequence[Operation], label: str) -> str:
    """Intensity of one operation at each number of tokens; once where it is always the same."""
    found = {op.tokens: f"{op.intensity:,.1f}" for op in operations if op.label == label}
    if len(set(found.values())) == 1:
        return f"{next(iter(found.values()))} for any number of tokens"
    return ", ".join(f"{value} for {tokens:,}" for tokens, value in found.items()) + " tokens"


def _points(
    operations: Sequence[Operation], machine: Machine, look: tuple[str, str, int, str]
) -> go.Scatter:
    """One operation at several numbers of tokens; where all coincide, one point stands for them."""
    colour, symbol, size, position = look
    counts = [f"{op.tokens:,}" for op in operations]
    if len({op.intensity for op in operations}) == 1:
        operations, counts = operations[:1], ["any number"]
    return go.Scatter(
        name=operations[0].label,
        x=[op.intensity for op in operations],
        y=[machine.reachable(op.intensity) / 1e12 for op in operations],
        text=counts,
        textposition=position,
        mode="markers+text",
        marker={"color": colour, "symbol": symbol, "size": size},
        hovertemplate="%{text} tokens: %{x:.3~g} FLOP per byte, up to %{y:.3~g} TFLOP/s on "
        f"{machine.name}<extra>{operations[0].label}</extra>",
    )


def timeline(
    samples: Sequence[Sample],
    *,
    title: str,
    source: str,
    series: Sequence[str] = ("allocated", "reserved"),
    levels: Mapping[str, int] | None = None,
) -> go.Figure:
    """Memory over time, with a dashed line at each mark of the probe.

    Args:
        samples: the timeline of a memory report.
        title: what was running.
        source: where the numbers come from.
        series: which of ``allocated``, ``reserved`` and ``rss`` to draw.
        levels: predictions to draw as horizontal lines: name -> bytes.
    """
    levels = levels or {}
    marks = [sample for sample in samples if sample.event is not None]
    predicted = "".join(f"; a line at {fmt_bytes(n)}, {name}" for name, n in levels.items())
    alt = f"{', '.join(series)} over time, with marks at: {', '.join(m.event for m in marks)}"
    fig = empty_figure(title, height=420, alt=f"{alt}{predicted}.", source=source)
    fig.update_layout(margin_t=fig.layout.margin.t + 22)  # for the names of the marks
    scale, unit = unit_for(max(getattr(sample, which) for sample in samples for which in series))
    for which in series:
        name, colour, dash = _SERIES[which]
        sizes = [getattr(sample, which) for sample in samples]
        fig.add_scatter(
            name=name,
            x=[sample.seconds for sample in samples],
            y=[size / scale for size in sizes],
            customdata=sizes,
            mode="lines",
            line={"color": colour, "width": 2.5, "dash": dash},
            hovertemplate="%{x:.2f} s: %{customdata:,} bytes<extra>" + which + "</extra>",
        )
    for i, (name, nbytes) in enumerate(levels.items()):
        fig.add_hline(
            y=nbytes / scale,
            line={"color": VERMILION, "dash": "dash", "width": 1.5},
            annotation={"text": f"{name}: {fmt_bytes(nbytes)}", "font": {"color": VERMILION}},
            annotation_position="bottom right" if i else "top right",
        )
    for mark in marks:
        fig.add_vline(
            x=mark.seconds,
            line={"color": GREY, "dash": "dash", "width": 1.5},
            annotation={"text": mark.event, "y": 1, "yanchor": "bottom", "xanchor": "center"},
        )
    fig.update_xaxes(title="seconds")
    fig.update_yaxes(title=unit, rangemode="tozero")
    return fig
