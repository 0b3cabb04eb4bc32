"""Figures of homes: what each costs, how long a lookup takes, which one a machine should use.

As in :mod:`pleviz.plots`, each function returns a figure for :func:`pleviz.show` that carries its
description. Figures of measurements say under the title where those come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from pleviz.advice import Advice
from pleviz.format import fmt_bytes
from pleviz.plots.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    SKY,
    VERMILION,
    empty_figure,
)

if TYPE_CHECKING:
    from pleviz.lookups import Lookup

WAYS: Mapping[str, tuple[str, str, str]] = {
    # home, or way to look up -> name, colour, symbol
    "gpu": ("gpu: the table on the GPU", GREY, "circle"),
    "mapped": ("mapped: the GPU reads host memory", BLUE, "square"),
    "file": ("file: the GPU reads the file's pages", SKY, "diamond"),
    "cpu": ("cpu: gathered on the CPU", GREEN, "triangle-up"),
    "workaround": ("workaround: patched forward", ORANGE, "cross"),
    "device_map": ("device_map: the whole table each time", VERMILION, "x"),
}
"""In the order in which they are drawn."""

_COSTS: Mapping[str, tuple[str, float, str]] = {
    # field of a row -> title of the panel, unit, format of the number at the bar's end
    "peak_decode_bytes": ("peak GPU memory, GB", 1e9, "{:.1f}"),
    "prefill_s": ("prefill, seconds", 1, "{:.2f}"),
    "decode_tok_s": ("decode, tokens/s", 1, "{:.1f}"),
}


def home_costs(
    views: Mapping[str, Sequence[Mapping[str, Any]]], *, title: str, source: str
) -> go.Figure:
    """GPU memory, prefill and decoding of every home, side by side, a button for each view.

    Args:
        views: name, such as a model's -> rows of a ``"speed"`` record (``home``,
            ``peak_decode_bytes``, ``prefill_s``, ``decode_tok_s``). Rows that lack one are left out.
        title: what was measured.
        source: the record's provenance.

    Raises:
        ValueError: no view has a complete row.
    """
    whole = {
        name: {row["home"]: row for row in rows if all(row.get(key) for key in _COSTS)}
        for name, rows in views.items()
    }
    whole = {name: rows for name, rows in whole.items() if rows}
    if not whole:
        raise ValueError(f"no row has all of {', '.join(_COSTS)}: is this a 'speed' record?")
    first, rows = next(iter(whole.items()))
    homes = [home for home in WAYS if any(home in some for some in whole.values())]
    facts = [f"{home}: {_costs_in_words(row)}" for home, row in rows.items()]
    alt = f"Bars for each home. {first}: {'; '.join(facts)}."
    fig = empty_figure(title, height=190 + 40 * len(homes), alt=alt, source=source)
    width = (1 - 0.05 * (len(_COSTS) - 1)) / len(_COSTS)
    for number, (key, (panel, _, _)) in enumerate(_COSTS.items(), 1):
        start = (number - 1) * (width + 0.05)
        sizes = [v for some in whole.values() for v in _panel(some, homes, key)[0] if v]
        axis = {"domain": [start, start + width], "range": [0, 1.3 * max(sizes)], "title": panel}
        fig.update_layout({f"xaxis{number}": fig.layout.xaxis.to_plotly_json() | axis})
        fig.add_bar(
            y=homes,
            x=_panel(rows, homes, key)[0],
            text=_panel(rows, homes, key)[1],
            xaxis=f"x{number}",
            orientation="h",
            width=0.68,
            textposition="outside",
            cliponaxis=False,
            marker={"color": [WAYS[home][1] for home in homes]},
            hovertemplate="%{y}: %{x:.4g}<extra>" + panel + "</extra>",
            showlegend=False,
        )
    fig.update_yaxes(autorange="reversed", showgrid=False)
    if len(whole) > 1:
        panels = {
            name: [_panel(some, homes, key) for key in _COSTS] for name, some in whole.items()
        }
        args = {
            name: {"x": [p[0] for p in some], "text": [p[1] for p in some]}
            for name, some in panels.items()
        }
        buttons = [{"label": n, "method": "restyle", "args": [a]} for n, a in args.items()]
        fig.update_layout(updatemenus=[_buttons(buttons, 0)], margin_t=124)
    return fig


def _panel(
    rows: Mapping[str, Mapping[str, Any]], homes: Sequence[str], key: str
) -> tuple[list[float | None], list[str]]:
    """Lengths and labels of the bars of one panel."""
    _, unit, form = _COSTS[key]
    lengths = [rows[home][key] / unit if home in rows else None for home in homes]
    return lengths, ["" if length is None else form.format(length) for length in lengths]


def _costs_in_words(row: Mapping[str, Any]) -> str:
    peak = fmt_bytes(row["peak_decode_bytes"])
    return f"{peak} peak, prefill {row['prefill_s']:.2f} s, {row['decode_tok_s']:.1f} tokens/s"


_LOOKUPS_ALT = (
    "Time of one lookup against tokens looked up at once, on logarithmic axes. Copying the table "
    "takes as long for one token as for thousands; the other ways begin far below and rise with the "
    "number of tokens."
)


def lookup_times(lookups: Sequence[Lookup], *, title: str, source: str) -> go.Figure:
    """Time per lookup against tokens looked up at once; both axes are logarithmic.

    Args:
        lookups: from :func:`pleviz.lookups.time_lookups`.
        title: which table.
        source: which machine.
    """
    fig = empty_figure(title, height=430, alt="", source=source)
    # what holds on every machine: outputs of notebooks are compared, and measured times differ
    fig.update_layout(meta={"alt": _LOOKUPS_ALT})
    for way, (name, colour, symbol) in WAYS.items():
        points = [lookup for lookup in lookups if lookup.way == way]
        if points:
            fig.add_scatter(
                name=name,
                x=[point.tokens for point in points],
                y=[point.seconds * 1e6 for point in points],
                customdata=[[point.moved_bytes] for point in points],
                mode="lines+markers",
                line={"color": colour, "width": 2.5},
                marker={"symbol": symbol, "size": 11},
                hovertemplate="%{x:,} tokens: %{y:,.0f} µs, %{customdata[0]:,} bytes moved"
                f"<extra>{way}</extra>",
            )
    counts = sorted({lookup.tokens for lookup in lookups})
    fig.update_xaxes(
        type="log",
        title="tokens looked up at once",
        tickvals=counts,
        ticktext=[f"{n:,}" for n in counts],
    )
    fig.update_yaxes(type="log", title="microseconds", dtick=1, tickformat=",")
    return fig


def home_grid(views: Mapping[str, Mapping[tuple[str, str], Advice]], *, title: str) -> go.Figure:
    """Your GPU, your RAM, your home: a table in colours, with a button for each model.

    Args:
        views: model -> (GPU, RAM) -> advice. All models have the same keys.
        title: what was assumed.
    """
    first = next(iter(views.values()))
    gpus = list(dict.fromkeys(gpu for gpu, _ in first))
    rams = list(dict.fromkeys(ram for _, ram in first))
    kinds = {
        "the table on the GPU, bf16": (GREEN, "black"),
        "the table moved, bf16": (BLUE, "white"),
        "quantised, the table on the GPU": (SKY, "black"),
        "quantised, the table moved": (ORANGE, "black"),
        "does not fit": (PALE, "black"),
    }
    name = next(iter(views))
    facts = [
        f"{gpu}: {', '.join(f'{first[gpu, ram].short} with {ram}' for ram in rams)}" for gpu in gpus
    ]
    fig = empty_figure(
        title,
        height=190 + 46 * len(gpus),
        alt=f"Buttons choose the model. {name}: {'; '.join(facts)}.",
    )
    grids = {model: _grids(cells, gpus, rams, list(kinds)) for model, cells in views.items()}
    for kind, (colour, ink) in kinds.items():
        z, text, hover = grids[name][kind]
        fig.add_heatmap(
            name=kind,
            x=rams,
            y=gpus,
            z=z,
            text=text,
            customdata=hover,
            texttemplate="%{text}",
            textfont={"color": ink, "size": 13},
            colorscale=[[0, colour], [1, colour]],
            showscale=False,
            xgap=3,
            ygap=3,
            hovertemplate="%{customdata}<extra></extra>",
            hoverongaps=False,
        )
    buttons = [
        {
            "label": model,
            "method": "restyle",
            "args": [
                {
                    "z": [grids[model][kind][0] for kind in kinds],
                    "text": [grids[model][kind][1] for kind in kinds],
                    "customdata": [grids[model][kind][2] for kind in kinds],
                }
            ],
        }
        for model in views
    ]
    if len(views) > 1:
        fig.update_layout(updatemenus=[_buttons(buttons, list(views).index(name))], margin_t=96)
    fig.update_xaxes(title="host memory", type="category", showgrid=False)
    fig.update_yaxes(title="GPU memory", type="category", showgrid=False, autorange="reversed")
    return fig


def _buttons(buttons: list[dict[str, Any]], active: int) -> dict[str, Any]:
    menu = {"type": "buttons", "direction": "right", "buttons": buttons, "active": active}
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 6}}
    # the button in use has a near-white ground in every theme, so its text must stay grey
    look = {"bgcolor": "rgba(0,0,0,0)", "bordercolor": GREY, "font": {"color": GREY}}
    return menu | place | look


def _grids(
    cells: Mapping[tuple[str, str], Advice], gpus: list[str], rams: list[str], kinds: list[str]
) -> dict[str, tuple[list[list[Any]], list[list[str]], list[list[str]]]]:
    """For each kind of advice: colour values (``None`` where another kind is), texts, hover texts."""
    grids: dict[str, tuple[list[list[Any]], list[list[str]], list[list[str]]]] = {}
    for kind in kinds:
        mine = [[_kind(cells[gpu, ram]) == kind for ram in rams] for gpu in gpus]
        grids[kind] = (
            [[1 if here else None for here in row] for row in mine],
            [
                [cells[gpu, ram].short if here else "" for ram, here in zip(rams, row, strict=True)]
                for gpu, row in zip(gpus, mine, strict=True)
            ],
            [[str(cells[gpu, ram]).replace(". ", ".<br>") for ram in rams] for gpu in gpus],
        )
    return grids


def _kind(advice: Advice) -> str:
    if advice.home is None:
        return "does not fit"
    where = "on the GPU" if advice.home == "gpu" else "moved"
    if advice.precision == "bf16":
        return f"the table {where}, bf16"
    return f"quantised, the table {where}"
