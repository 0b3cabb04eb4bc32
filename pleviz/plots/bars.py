"""Bytes as lengths: stacked bars by component, and a row beside its table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from pleviz.format import fmt_bytes
from pleviz.plots.style import GREY, PARTS, SKY, VERMILION, empty_figure, unit_for


@dataclass(frozen=True)
class Bar:
    """One stacked bar."""

    label: str
    """Neighbours with the same text up to the first comma stand together as a group."""
    parts: Mapping[str, int]
    """Bytes by component; names that are not in :data:`PARTS` are summed up as ``small``."""
    measured: int | None = None
    """Bytes to mark with a diamond: the measurement beside the prediction that the bar shows."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def most(self) -> int:
        """How far the bar reaches, its diamond included."""
        return max(self.total, self.measured or 0)

    def folded(self) -> dict[str, int]:
        """Bytes of each of :data:`PARTS`."""
        folded = dict.fromkeys(PARTS, 0)
        for name, nbytes in self.parts.items():
            folded[name if name in PARTS else "small"] += nbytes
        return folded

    def __str__(self) -> str:
        measured = "" if self.measured is None else f", measured {fmt_bytes(self.measured)}"
        return f"{self.label}: {fmt_bytes(self.total)}{measured}"


def stacked_bars(
    bars: Sequence[Bar] | Mapping[str, Sequence[Bar]], *, title: str, source: str = ""
) -> go.Figure:
    """Horizontal stacked bars of bytes, from top to bottom.

    Args:
        bars: the bars; or several such lists by name, to choose from with buttons in the figure.
            All have the same labels, and measured values in the same bars.
        title: what the bars show.
        source: where the numbers come from, for figures of measurements.

    Raises:
        ValueError: the lists do not have the same labels.
    """
    views = dict(bars) if isinstance(bars, Mapping) else {"": bars}
    first, *others = views.values()
    labels = [bar.label for bar in first]
    if any([bar.label for bar in view] != labels for view in others):
        raise ValueError("all views must have the same bars, in the same order")
    every = [bar for view in views.values() for bar in view]
    shown = [part for part in PARTS if any(bar.folded()[part] for bar in every)]
    scale, unit = unit_for(max(bar.most for bar in every))
    alt = f"Stacked bars. {'; '.join(map(str, first))}."
    if others:
        alt = f"Buttons choose {', '.join(views)}. With {next(iter(views))}: {alt}"

    at = _positions(labels)
    traces = {name: [*_traces(view, at, shown, scale)] for name, view in views.items()}
    height = round(150 + 34 * (at[-1] + 1) + 20 * -(-len(shown) // 2))
    fig = empty_figure(title, height=height, alt=alt, source=source)
    fig.add_traces(next(iter(traces.values())))
    fig.update_layout(barmode="stack")
    fig.update_xaxes(title=unit, range=[0, 1.16 * max(bar.most for bar in every) / scale])
    fig.update_yaxes(
        tickvals=at, ticktext=labels, range=[at[-1] + 0.7, -0.7], showgrid=False, zeroline=False
    )
    if others:
        _add_buttons(fig, traces)
    return fig


def _positions(labels: Sequence[str]) -> list[float]:
    """Heights of the bars, with a gap wherever the text before the comma changes."""
    groups = [label.partition(",")[0] for label in labels]
    at = [0.0]
    for before, group in itertools.pairwise(groups):
        at.append(at[-1] + (1.0 if group == before or len(set(groups)) == len(groups) else 1.6))
    return at


def _traces(
    bars: Sequence[Bar], at: Sequence[float], shown: Sequence[str], scale: int
) -> Iterable[Any]:
    for part in shown:
        label, colour = PARTS[part]
        sizes = [bar.folded()[part] for bar in bars]
        yield go.Bar(
            name=label,
            y=at,
            x=[size / scale for size in sizes],
            customdata=[[size, bar.label] for size, bar in zip(sizes, bars, strict=True)],
            orientation="h",
            width=0.74,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=f"{label}: %{{customdata[0]:,}} bytes<extra>%{{customdata[1]}}</extra>",
        )
    marked = any(bar.measured is not None for bar in bars)
    gap = "\u2003" if marked else "\u2009"  # room for the diamond; plain spaces would collapse
    yield go.Scatter(
        y=at,
        x=[bar.most / scale for bar in bars],
        text=[f"{gap}{fmt_bytes(bar.total)}" for bar in bars],
        mode="text",
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )
    if marked:
        yield _diamonds(bars, at, scale)


def _diamonds(bars: Sequence[Bar], at: Sequence[float], scale: int) -> go.Scatter:
    marked = [(bar, y) for bar, y in zip(bars, at, strict=True) if bar.measured is not None]
    return go.Scatter(
        name="measured",
        y=[y for _, y in marked],
        x=[bar.measured / scale for bar, _ in marked],
        customdata=[[bar.measured, bar.measured / bar.total - 1, bar.label] for bar, _ in marked],
        mode="markers",
        marker={
            "symbol": "diamond",
            "size": 13,
            "color": "white",
            "line": {"width": 2.5, "color": "black"},
        },
        hovertemplate="measured: %{customdata[0]:,} bytes, %{customdata[1]:+.3%} off the prediction"
        "<extra>%{customdata[2]}</extra>",
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
    place = {"x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "pad": {"b": 6}}
    # the button in use has a near-white ground in every theme, so its text must stay grey
    look = {"bgcolor": "rgba(0,0,0,0)", "bordercolor": GREY, "font": {"color": GREY}}
    room = 36 if fig.layout.title.subtitle.text else 0  # the source may reach below the buttons
    fig.update_layout(
        updatemenus=[menu | place | look],
        margin_t=fig.layout.margin.t + room,
        height=fig.layout.height + room,
    )


def row_and_table(sizes: Mapping[str, tuple[int, int]], *, title: str) -> go.Figure:
    """One token's row against the whole table, on a logarithmic axis.

    Args:
        sizes: model -> bytes of a row, bytes of the table.
        title: what the figure shows.
    """
    models = list(sizes)
    facts = [
        f"{m}: a row of {fmt_bytes(row)}, a table of {fmt_bytes(table)}, a factor of {table // row:,}"
        for m, (row, table) in sizes.items()
    ]
    fig = empty_figure(title, height=160 + 44 * len(sizes), alt=f"{'; '.join(facts)}.")
    for model, pair in sizes.items():
        line = {"color": GREY, "width": 2}
        fig.add_scatter(
            x=pair, y=[model] * 2, mode="lines", line=line, hoverinfo="skip", showlegend=False
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
    fig.update_yaxes(range=[len(sizes) - 0.4, -0.6])
    return fig
