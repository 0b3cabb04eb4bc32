"""Colours, names and the empty figure that all figures start from."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import plotly.graph_objects as go

GREY = "#777777"
"""Text and lines: contrast 4.5 on white, 4.2 on JupyterLab's dark background."""
GRID = "rgba(127,127,127,0.25)"

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


def unit_for(most: int) -> tuple[int, str]:
    """Scale and axis title for bytes up to ``most``."""
    return (10**9, "GB (10⁹ bytes)") if most >= 10**9 else (10**6, "MB (10⁶ bytes)")


def empty_figure(title: str, *, height: int, alt: str, source: str = "") -> go.Figure:
    """A figure in the house style: title and source above, legend below.

    Args:
        title: what the figure shows.
        height: pixels, all but the lines of the source included.
        alt: the figure in words, for readers who cannot see it.
        source: where measured numbers come from.
    """
    heading = {"text": title, "font": {"size": 16}, "x": 0, "xref": "paper", "xanchor": "left"}
    lines = textwrap.wrap(source, 90)
    if lines:
        heading["subtitle"] = {"text": "<br>".join(lines), "font": {"size": 12}}
    fig = go.Figure()
    fig.update_layout(
        template=None,
        title=heading | {"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 14}},
        meta={"alt": f"{title}{f' ({source})' if source else ''}. {alt}"},
        height=height + 16 * len(lines),
        margin={"l": 10, "r": 20, "t": 52 + 16 * len(lines), "b": 56},
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
    )
    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GREY, "automargin": True}
    fig.update_xaxes(**axis)
    fig.update_yaxes(**axis)
    return fig
