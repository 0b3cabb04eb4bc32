"""Figures of memory and traffic, as plotly figures that read in light and in dark themes.

Every function takes plain numbers (bytes, seconds) and returns a ``plotly.graph_objects.Figure``
for :func:`pleviz.show`. Hovering a bar gives its exact bytes. A figure of measurements carries where
they come from: ``source="live"``, or ``source=record.provenance``-like text that says "recorded".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from pleviz.format import fmt_bytes
from pleviz.roofline import MACHINES, Machine, Operation

if TYPE_CHECKING:
    from pleviz.memory import Sample

GREY = "#777777"
"""Text and lines: contrast 4.5 on white, 4.2 on JupyterLab's dark background."""
GRID = "rgba(127,127,127,0.25)"
GIGA = 10**9

# Okabe and Ito's palette, told apart by colour-blind readers too: jfly.uni-koeln.de/color
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, PALE = "#0072B2", "#D55E00", "#CC79A7", "#AAAAAA"

PARTS: Mapping[str, tuple[str, str]] = {
    # component -> name in the legend, colour. The table comes last: it is the part that goes.
    "ffn": ("feed-forward", BLUE),
    "attention": ("attention", SKY),
    "token_embedding": ("token embedding = output head", GREEN),
    "ple_projections": ("PLE projections", PURPLE),
    "towers": ("vision and audio towers", YELLOW),
    "kv_cache": ("KV cache", ORANGE),
    "small": ("AltUp, LAuReL, norms, buffers", PALE),
    "ple_table": ("PLE table", VERMILION),
    # who counts what, for figures of a device's memory
    "allocated": ("live tensors (allocated)", BLUE),
    "cache": ("torch's cache (reserved − allocated)", SKY),
    "outside": ("CUDA context and other programs", ORANGE),
}
"""Everything a bar can be made of, in the order it is stacked."""


@dataclass(frozen=True)
class Bar:
    """One stacked bar."""

    label: str
    parts: Mapping[str, int]
    """Bytes by component; names that are not in :data:`PARTS` are summed up as ``small``."""
    measured: int | None = None
    """Bytes to mark with a diamond: the measurement beside the prediction that the bar shows."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def stacked_bars(
    bars: Sequence[Bar] | Mapping[str, Sequence[Bar]], *, title: str, source: str = ""
) -> go.Figure:
    """Horizontal stacked bars of bytes, in GB.

    Args:
        bars: from top to bottom; or several such lists by name, to choose from with buttons in the
            figure (same labels, and measured values in the same bars).
        title: what the bars show.
        source: where the numbers come from, for figures of measurements.
    """
    views = dict(bars) if isinstance(bars, Mapping) else {"": bars}
    for name, view in views.items():
        if [bar.label for bar in view] != [bar.label for bar in next(iter(views.values()))]:
            raise ValueError(f"view '{name}' has other bars than the first one: labels must agree")
    first, *_ = views.values()
    shown = [part for part in PARTS if any(_fold(bar)[part] for v in views.values() for bar in v)]
    traces = {name: [*_bar_traces(view, shown)] for name, view in views.items()}
    fig = _figure(title, height=150 + 38 * len(first) + 22 * (len(shown) // 3), source=source)
    fig.add_traces(next(iter(traces.values())))
    widest = max(max(bar.total, bar.measured or 0) for view in views.values() for bar in view)
    fig.update_layout(barmode="stack", bargap=0.35)
    fig.update_xaxes(title="GB (10⁹ bytes)", range=[0, 1.16 * widest / GIGA])
    fig.update_yaxes(autorange="reversed", gridcolor="rgba(0,0,0,0)")
    if len(views) > 1:
        _add_buttons(fig, traces)
    return fig


def _fold(bar: Bar) -> dict[str, int]:
    """Bytes of each of :data:`PARTS`."""
    folded = dict.fromkeys(PARTS, 0)
    for name, nbytes in bar.parts.items():
        folded[name if name in PARTS else "small"] += nbytes
    return folded


def _bar_traces(bars: Sequence[Bar], shown: Sequence[str]) -> Iterable[Any]:
    labels = [bar.label for bar in bars]
    for part in shown:
        label, colour = PARTS[part]
        sizes = [_fold(bar)[part] for bar in bars]
        yield go.Bar(
            name=label,
            y=labels,
            x=[size / GIGA for size in sizes],
            customdata=sizes,
            orientation="h",
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=f"{label}: %{{customdata:,}} bytes<extra>%{{y}}</extra>",
        )
    marked = any(bar.measured is not None for bar in bars)
    gap = "\u2003" if marked else "\u2009"  # room for the diamond; plain spaces would be collapsed
    yield go.Scatter(
        y=labels,
        x=[max(bar.total, bar.measured or 0) / GIGA for bar in bars],
        text=[f"{gap}{fmt_bytes(bar.total)}" for bar in bars],
        mode="text",
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )
    if marked:
        yield _diamonds(bars)


def _diamonds(bars: Sequence[Bar]) -> go.Scatter:
    marked = [bar for bar in bars if bar.measured is not None]
    return go.Scatter(
        name="measured",
        y=[bar.label for bar in marked],
        x=[bar.measured / GIGA for bar in marked],
        customdata=[(bar.measured, bar.measured / bar.total - 1) for bar in marked],
        mode="markers",
        marker={
            "symbol": "diamond",
            "size": 13,
            "color": "white",
            "line": {"width": 2.5, "color": "black"},
        },
        hovertemplate="measured: %{customdata[0]:,} bytes, %{customdata[1]:+.3%} of the prediction"
        "<extra>%{y}</extra>",
    )


def _add_buttons(fig: go.Figure, traces: Mapping[str, Sequence[Any]]) -> None:
    """Buttons that swap the data of all traces; the axes stay, so that bars can be compared."""
    keys = ("x", "customdata", "text")
    buttons = [
        {
            "label": name,
            "method": "restyle",
            "args": [{key: [trace[key] for trace in view] for key in keys}],
        }
        for name, view in traces.items()
    ]
    menu = {"type": "buttons", "direction": "right", "buttons": buttons, "showactive": True}
    place = {"x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom", "pad": {"b": 8}}
    # the button in use has a near-white ground in every theme, so its text must stay grey
    look = {"bgcolor": GRID, "bordercolor": GREY, "font": {"color": GREY}}
    fig.update_layout(updatemenus=[menu | place | look])


def row_and_table(sizes: Mapping[str, tuple[int, int]], *, title: str) -> go.Figure:
    """One token's row against the whole table, on a logarithmic axis.

    Args:
        sizes: model -> bytes of a row, bytes of the table.
        title: what the figure shows.
    """
    fig = _figure(title, height=170 + 44 * len(sizes))
    models = list(sizes)
    for model, (row, table) in sizes.items():
        fig.add_scatter(
            x=[row, table],
            y=[model, model],
            mode="lines",
            line={"color": GREY, "width": 2},
            hoverinfo="skip",
            showlegend=False,
        )
    for index, (name, colour) in enumerate((("one token's row", SKY), ("the table", VERMILION))):
        values = [pair[index] for pair in sizes.values()]
        fig.add_scatter(
            name=name,
            x=values,
            y=models,
            mode="markers+text",
            marker={"color": colour, "size": 15},
            text=[fmt_bytes(value) for value in values],
            textposition="top center",
            cliponaxis=False,
            hovertemplate="%{x:,} bytes<extra>%{y}, " + name + "</extra>",
        )
    fig.add_scatter(
        x=[(row * table) ** 0.5 for row, table in sizes.values()],
        y=models,
        mode="text",
        text=[f"× {table // row:,}" for row, table in sizes.values()],
        textposition="top center",
        hoverinfo="skip",
        showlegend=False,
    )
    fig.update_xaxes(
        type="log",
        title="bytes (each grid line: ×10)",
        tickvals=[10**n for n in range(3, 11)],
        ticktext=["1 kB", "10 kB", "100 kB", "1 MB", "10 MB", "100 MB", "1 GB", "10 GB"],
        range=[3.5, 10.5],
    )
    fig.update_yaxes(autorange="reversed", range=[-0.6, len(sizes) - 0.4])
    return fig


def intensity_chart(
    operations: Sequence[Operation], machines: Sequence[Machine] = MACHINES, *, title: str
) -> go.Figure:
    """Where operations sit under the roofs of machines; both axes are logarithmic.

    A point's height is the best speed the first machine can reach at its intensity: memory
    bandwidth × intensity left of the balance point, peak arithmetic right of it.
    """
    fig = _figure(title, height=500)
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
    balance = machines[0].balance
    fig.add_vline(x=balance, line={"color": GREY, "dash": "dot", "width": 2})
    for text, side in (("← bound by memory", "right"), ("bound by arithmetic →", "left")):
        fig.add_annotation(
            text=text,
            x=math.log10(balance),
            xanchor=side,
            y=0,
            yref="paper",
            yanchor="bottom",
            showarrow=False,
            xshift=6 if side == "left" else -6,
        )
    looks = (
        (VERMILION, "square", 13, "bottom right"),
        (BLUE, "circle", 16, "bottom center"),
        (PURPLE, "diamond", 9, "top center"),
    )  # the diamond fits on the circle where they meet
    for label, look in zip(dict.fromkeys(op.label for op in operations), looks, strict=False):
        fig.add_trace(_points([op for op in operations if op.label == label], machines[0], look))
    ticks = {"type": "log", "dtick": 1, "exponentformat": "power"}
    fig.update_xaxes(title="arithmetic intensity, FLOP per byte", range=[-1, 4], **ticks)
    fig.update_yaxes(title="reachable speed, TFLOP/s", range=[-1.6, 3.6], **ticks)
    return fig


def _points(
    operations: Sequence[Operation], machine: Machine, look: tuple[str, str, int, str]
) -> go.Scatter:
    """One operation at several numbers of tokens; where they coincide, one label names them all."""
    colour, symbol, size, position = look
    same = len({op.intensity for op in operations}) == 1
    counts = ["any number of tokens"] if same else [f"{op.tokens:,}" for op in operations]
    return go.Scatter(
        name=operations[0].label,
        x=[op.intensity for op in operations][: len(counts)],
        y=[machine.reachable(op.intensity) / 1e12 for op in operations][: len(counts)],
        customdata=counts,
        text=counts,
        textposition=position,
        mode="markers+text",
        marker={"color": colour, "symbol": symbol, "size": size},
        hovertemplate="%{customdata} tokens: %{x:.3~g} FLOP per byte, up to %{y:.3~g} TFLOP/s on "
        f"{machine.name}<extra>{operations[0].label}</extra>",
    )


def timeline(
    samples: Sequence[Sample], *, title: str, source: str, series: Sequence[str] = ("rss",)
) -> go.Figure:
    """Memory over time, with a dashed line at each mark of the probe.

    Args:
        samples: the timeline of a memory report.
        title: what was running.
        source: where the numbers come from.
        series: which of ``allocated``, ``reserved`` and ``rss`` to draw.
    """
    names = {
        "allocated": ("allocated: live tensors on the GPU", BLUE, None),
        "reserved": ("reserved: allocated and torch's cache", SKY, "dash"),
        "rss": ("RSS: this process in host memory", ORANGE, "dot"),
    }
    fig = _figure(title, height=420, source=source)
    fig.update_layout(margin_t=106)  # the marks' names stand between the source and the curves
    for which in series:
        name, colour, dash = names[which]
        sizes = [getattr(sample, which) for sample in samples]
        fig.add_scatter(
            name=name,
            x=[sample.seconds for sample in samples],
            y=[size / GIGA for size in sizes],
            customdata=sizes,
            mode="lines",
            line={"color": colour, "width": 2.5, "dash": dash},
            hovertemplate="%{x:.2f} s: %{customdata:,} bytes<extra>" + which + "</extra>",
        )
    for sample in samples:
        if sample.event is not None:
            fig.add_vline(
                x=sample.seconds,
                line={"color": GREY, "dash": "dash", "width": 1.5},
                annotation={"text": sample.event, "y": 1, "yanchor": "bottom", "xanchor": "center"},
            )
    fig.update_xaxes(title="seconds")
    fig.update_yaxes(title="GB (10⁹ bytes)", rangemode="tozero")
    return fig


def _figure(title: str, *, height: int, source: str = "") -> go.Figure:
    """An empty figure in the house style: title and source above, legend below."""
    heading = {"text": title, "font": {"size": 16}, "x": 0, "xref": "paper", "xanchor": "left"}
    if source:
        heading["subtitle"] = {"text": source, "font": {"size": 12}}
    fig = go.Figure()
    fig.update_layout(
        template=None,
        title=heading | {"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 14}},
        height=height,
        margin={"l": 10, "r": 20, "t": 84 if source else 60, "b": 56},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": GREY, "size": 13},
        legend={
            "orientation": "h",
            "x": 0,
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        hoverlabel={"namelength": -1},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": GREY},
    )
    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GREY, "automargin": True}
    fig.update_xaxes(**axis)
    fig.update_yaxes(**axis)
    return fig
