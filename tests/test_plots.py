"""Figures show the numbers they were given, with units, and can be read by everyone."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go
import pytest

import pleviz
from pleviz import plots
from pleviz.memory import Sample
from pleviz.plots import Bar
from pleviz.plots.style import GREY, PARTS
from pleviz.roofline import MACHINES, Machine, operations, tokens_to_reach

OKABE_ITO = {
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
}
E4B = {home: pleviz.budget("gemma-4-E4B", home=home).components for home in ("gpu", "mapped")}
BARS = [
    Bar("E4B, before", E4B["gpu"], measured=14_930_000_000),
    Bar("E4B, after", E4B["mapped"]),
    Bar("E2B, before", pleviz.budget("gemma-4-E2B").components),
]
SAMPLES = [
    Sample(0.0, 0, 0, 2_000_000_000),
    Sample(1.0, 14_000_000_000, 15_000_000_000, 2_500_000_000, "model built"),
    Sample(2.5, 9_000_000_000, 9_500_000_000, 8_000_000_000, "table moved"),
]


def bar_traces(fig: go.Figure) -> list[Any]:
    return [trace for trace in fig.data if trace.type == "bar"]


def all_figures() -> dict[str, go.Figure]:
    sizes = {"gemma-4-E4B": (21_504, 5_637_144_576), "small": (10_000, 2_621_440_000)}
    return {
        "bars": plots.stacked_bars(BARS, title="Bars", source="live"),
        "views": plots.stacked_bars({"bf16": BARS[:2], "nf4": BARS[:2]}, title="Views"),
        "row": plots.row_and_table(sizes, title="Row"),
        "intensity": plots.intensity_chart(operations("gemma-4-E4B"), title="Intensity"),
        "timeline": plots.timeline(
            SAMPLES, title="Timeline", source="recorded: H200", levels={"predicted": 9 * 10**9}
        ),
    }


each_figure = pytest.mark.parametrize("name", all_figures())


# --- bars ------------------------------------------------------------------------------------


def test_bars_add_up_to_the_budget() -> None:
    traces = bar_traces(plots.stacked_bars(BARS, title="t"))
    for index, bar in enumerate(BARS):
        exact = [trace.customdata[index][0] for trace in traces]
        assert sum(exact) == sum(bar.parts.values()) == bar.total
        assert [trace.x[index] for trace in traces] == [size / 1e9 for size in exact]
        assert all(trace.customdata[index][1] == bar.label for trace in traces)


def test_the_table_is_at_the_end_of_the_bar_and_leaves_it() -> None:
    *_, last = bar_traces(plots.stacked_bars(BARS, title="t"))
    assert last.name == "PLE table"
    assert [size for size, _ in last.customdata[:2]] == [5_637_144_576, 0]


def test_small_components_are_summed_and_unknown_ones_not_lost() -> None:
    folded = Bar("b", {"altup": 3, "laurel": 4, "norms": 5, "something new": 6, "ffn": 7}).folded()
    assert folded["small"] == 18
    assert sum(folded.values()) == 25


def test_components_that_no_bar_has_are_left_out() -> None:
    names = [trace.name for trace in bar_traces(plots.stacked_bars(BARS, title="t"))]
    assert PARTS["towers"][0] not in names
    assert PARTS["kv_cache"][0] not in names


@pytest.mark.parametrize(("most", "unit", "scale"), [(10**9, "GB", 1e9), (999_999_999, "MB", 1e6)])
def test_bars_have_a_unit_that_fits(most: int, unit: str, scale: float) -> None:
    fig = plots.stacked_bars([Bar("b", {"ffn": most})], title="t")
    assert fig.layout.xaxis.title.text.startswith(f"{unit} (10")
    assert fig.data[0].x[0] == most / scale
    assert fig.layout.xaxis.range[1] > fig.data[0].x[0]


def test_measured_values_are_diamonds_where_they_belong() -> None:
    fig = plots.stacked_bars(BARS, title="t")
    (diamonds,) = [trace for trace in fig.data if trace.name == "measured"]
    assert list(diamonds.x) == [14.93]
    assert list(diamonds.y) == [bar_traces(fig)[0].y[0]]
    measured, error, label = diamonds.customdata[0]
    assert (measured, label) == (14_930_000_000, "E4B, before")
    assert math.isclose(error, 14_930_000_000 / BARS[0].total - 1)
    assert not [t for t in plots.stacked_bars(BARS[1:], title="t").data if t.name == "measured"]


def test_groups_stand_together() -> None:
    first, second, third = plots.stacked_bars(BARS, title="t").layout.yaxis.tickvals
    assert third - second > second - first
    lone = [Bar("a", {"ffn": 1}), Bar("b", {"ffn": 1}), Bar("c", {"ffn": 1})]
    first, second, third = plots.stacked_bars(lone, title="t").layout.yaxis.tickvals
    assert third - second == second - first


def test_buttons_swap_all_data_of_a_view() -> None:
    halved = [Bar(b.label, {k: v // 2 for k, v in b.parts.items()}, measured=1) for b in BARS]
    whole = [Bar(b.label, b.parts, measured=2) for b in BARS]
    fig = plots.stacked_bars({"bf16": whole, "nf4": halved}, title="t")
    alone = plots.stacked_bars(halved, title="t")
    (menu,) = fig.layout.updatemenus
    assert [button.label for button in menu.buttons] == ["bf16", "nf4"]
    (restyle,) = menu.buttons[1].args
    assert len(restyle["x"]) == len(fig.data) == len(alone.data)
    for trace, x, exact in zip(alone.data, restyle["x"], restyle["customdata"], strict=True):
        assert list(trace.x) == list(x)
        assert (trace.customdata is None) == (exact is None)
        assert exact is None or [list(e) for e in trace.customdata] == [list(e) for e in exact]
    assert fig.layout.xaxis.range[1] > max(bar.total for bar in whole) / 1e9  # stays for both


def test_views_must_have_the_same_bars() -> None:
    with pytest.raises(ValueError, match="same bars, in the same order"):
        plots.stacked_bars({"a": BARS, "b": BARS[::-1]}, title="t")


def test_row_and_table_are_where_they_should_be() -> None:
    fig = plots.row_and_table({"E4B": (21_504, 5_637_144_576)}, title="t")
    by_name = {trace.name: trace for trace in fig.data if trace.name}
    assert by_name["one token's row"].x == (21_504,)
    assert by_name["the table"].x == (5_637_144_576,)
    assert fig.layout.xaxis.type == "log"
    texts = [text for trace in fig.data for text in trace.text or ()]
    assert texts == ["21.50 kB", "5.64 GB", "× 262,144"]


# --- curves ----------------------------------------------------------------------------------


def test_points_lie_on_the_roof() -> None:
    fig = plots.intensity_chart(operations("gemma-4-E4B"), title="t")
    h200 = MACHINES[0]
    points = [(x, y) for t in fig.data if "markers" in t.mode for x, y in zip(t.x, t.y)]  # noqa: B905
    assert len(points) == 1 + 4 + 4  # the row once: its intensity does not depend on the tokens
    for x, y in points:
        assert y * 1e12 == min(h200.flop_per_s, h200.bytes_per_s * x)
    assert fig.layout.shapes[0].x0 == fig.layout.shapes[0].x1 == h200.balance
    for line, machine in zip(fig.data, MACHINES, strict=False):
        assert list(line.x) == [0.1, machine.balance, 10**4]
        assert line.y[1] * 1e12 == pytest.approx(machine.flop_per_s)


def test_intensities_by_hand() -> None:
    found = {(op.label, op.tokens): op.intensity for op in operations("gemma-4-E4B", (1, 256))}
    shape, tokens = (10_240, 2_560), 256
    moved = 2 * (shape[0] * shape[1] + tokens * sum(shape))
    assert found["feed-forward weight", 256] == pytest.approx(2 * tokens * math.prod(shape) / moved)
    assert found["PLE row", 1] == found["PLE row", 256] == 0.5
    assert 0.99 < found["attention weight (keys)", 1] < 1


def test_no_number_of_tokens_reaches_an_impossible_balance() -> None:
    odd = Machine("odd", 1e15, 1e9, "nowhere")
    with pytest.raises(ValueError, match="stays below 1000000 FLOP per byte"):
        tokens_to_reach("gemma-4-E4B", odd)


def test_timeline_marks_the_move() -> None:
    fig = plots.timeline(
        SAMPLES,
        title="t",
        source="live",
        series=("allocated", "rss"),
        levels={"predicted": 9 * 10**9},
    )
    assert [trace.customdata for trace in fig.data] == [
        tuple(s.allocated for s in SAMPLES),
        tuple(s.rss for s in SAMPLES),
    ]
    assert list(fig.data[0].y) == [0, 14, 9]
    vertical = [shape.x0 for shape in fig.layout.shapes if shape.x0 == shape.x1]
    assert vertical == [1.0, 2.5]
    assert [s.y0 for s in fig.layout.shapes if s.y0 == s.y1] == [9]
    texts = [annotation.text for annotation in fig.layout.annotations]
    assert texts == ["predicted: 9.00 GB", "model built", "table moved"]


# --- every figure ----------------------------------------------------------------------------


@each_figure
def test_axes_carry_units(name: str) -> None:
    layout = all_figures()[name].layout
    titles = [axis.title.text or "" for axis in (layout.xaxis, layout.yaxis)]
    quantities = [title for title in titles if title]
    assert quantities
    assert all(
        any(unit in title for unit in ("GB", "MB", "bytes", "byte", "FLOP/s", "seconds"))
        for title in quantities
    )


@each_figure
def test_figures_describe_themselves(name: str) -> None:
    fig = all_figures()[name]
    alt = fig.layout.meta["alt"]
    assert alt.startswith(fig.layout.title.text)
    assert alt.endswith(".")
    assert 40 < len(alt) < 1500
    for source in ("live", "recorded: H200"):
        assert (f"({source})" in alt) == (fig.layout.title.subtitle.text == source)


def test_descriptions_give_the_numbers() -> None:
    alts = {name: fig.layout.meta["alt"] for name, fig in all_figures().items()}
    assert "E4B, before: 14.93 GB, measured 14.93 GB; E4B, after: 9.29 GB" in alts["bars"]
    assert "Buttons choose bf16, nf4" in alts["views"]
    assert "a row of 21.50 kB, a table of 5.64 GB, a factor of 262,144" in alts["row"]
    assert "PLE row: 0.5 for any number of tokens" in alts["intensity"]
    assert "marks at: model built, table moved" in alts["timeline"]


@each_figure
def test_data_are_plain_lists(name: str) -> None:
    """Typed arrays (``bdata``) are new: older plotly.js, as in some editors, draws nothing."""
    assert "bdata" not in all_figures()[name].to_json()


@each_figure
def test_figures_fit_light_and_dark_pages(name: str) -> None:
    layout = all_figures()[name].layout
    assert {layout.paper_bgcolor, layout.plot_bgcolor} == {"rgba(0,0,0,0)"}
    assert layout.font.color == GREY
    assert layout.template.layout.to_plotly_json() == {}  # nothing is hidden in a template
    assert layout.height


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    bright, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_text_has_contrast_in_both_themes() -> None:
    assert contrast(GREY, "#ffffff") > 4
    assert contrast(GREY, "#111111") > 4


def test_parts_have_colour_blind_safe_colours_of_their_own() -> None:
    components = [part for part in PARTS if part not in ("allocated", "cache", "outside")]
    for parts in (components, ["allocated", "cache", "outside"]):
        colours = [PARTS[part][1] for part in parts]
        assert len(set(colours)) == len(colours)
        assert {c for c in colours if c not in OKABE_ITO} <= {"#AAAAAA"}  # grey: the small rest
