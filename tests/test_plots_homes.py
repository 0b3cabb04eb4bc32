"""Figures of homes and of parity show what they were given, and can be read by everyone."""

from __future__ import annotations

import math
import re

import plotly.graph_objects as go
import pytest
import torch

import pleviz
from pleviz import plots_homes, plots_parity, rounding
from pleviz.advice import Advice, advise
from pleviz.lookups import Lookup
from pleviz.notebook import mime_bundle
from pleviz.plots.style import GREY, PALE
from tests.tiny import tiny_model

OKABE_ITO = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
ROWS = [
    {"home": home, "peak_decode_bytes": peak, "prefill_s": prefill, "decode_tok_s": speed}
    for home, peak, prefill, speed in (
        ("gpu", 14_950_000_000, 0.373, 19.0),
        ("mapped", 9_330_000_000, 0.376, 19.8),
        ("device_map", 14_960_000_000, 1.1, 1.4),
    )
]
SLOW = [row | {"decode_tok_s": row["decode_tok_s"] / 2} for row in ROWS[:2]]
LOOKUPS = [
    Lookup("mapped", 1, 14e-6, 100),
    Lookup("device_map", 1, 0.1, 9000),
    Lookup("mapped", 64, 30e-6, 6400),
    Lookup("device_map", 64, 0.11, 9000),
]


def grid() -> dict[str, dict[tuple[str, str], Advice]]:
    return {
        model: {
            (f"{gpu} GiB", f"{ram} GiB"): advise(
                model, gpu_bytes=gpu * 2**30, ram_bytes=ram * 2**30
            )
            for gpu in (4, 8, 12, 24)
            for ram in (8, 32)
        }
        for model in ("gemma-4-E4B", "gemma-3n-E2B")
    }


@pytest.fixture(scope="module")
def parities() -> dict[str, pleviz.parity.Parity]:
    from pleviz.faults import plant

    model, ids = tiny_model(), torch.arange(3, 19)[None]
    faulty = plant(model, "layers.1.post_attention_layernorm.weight")
    with torch.no_grad():  # float32: a fault of one ULP would drown in rounding
        faulty.model.layers[1].post_attention_layernorm.weight[0] += 0.01
    return {
        "moved": pleviz.diff(model, "cpu", ids),
        "planted": pleviz.diff(model, faulty, ids),
    }


def all_figures(parities: dict[str, pleviz.parity.Parity]) -> dict[str, go.Figure]:
    return {
        "costs": plots_homes.home_costs({"E4B": ROWS, "E2B": SLOW}, title="Costs", source="H200"),
        "lookups": plots_homes.lookup_times(LOOKUPS, title="Lookups", source="live"),
        "grid": plots_homes.home_grid(grid(), title="Grid"),
        "ruler": plots_parity.number_ruler(),
        "fp16": plots_parity.fp16_window(0.02),
        "divergence": plots_parity.divergence(parities, title="Divergence", alt="Flat, then not."),
    }


# --- homes -----------------------------------------------------------------------------------


def test_costs_are_the_rows_in_their_units() -> None:
    fig = plots_homes.home_costs({"E4B": ROWS}, title="t", source="s")
    memory, prefill, decode = fig.data
    assert memory.y == ("gpu", "mapped", "device_map")  # in the order of WAYS
    assert memory.x == (14.95, 9.33, 14.96)
    assert prefill.x == (0.373, 0.376, 1.1)
    assert decode.x == (19.0, 19.8, 1.4)
    assert decode.text == ("19.0", "19.8", "1.4")
    assert [fig.layout[f"xaxis{n}"].title.text for n in ("", 2, 3)] == [
        "peak GPU memory, GB",
        "prefill, seconds",
        "decode, tokens/s",
    ]
    assert [trace.xaxis for trace in fig.data] == ["x", "x2", "x3"]
    assert not fig.layout.updatemenus


def test_costs_leave_room_for_every_view_and_out_what_was_not_measured() -> None:
    broken = [{"home": "cpu", "peak_decode_bytes": 1, "prefill_s": 1.0}]  # no decode_tok_s
    views = {"E4B": [*ROWS, *broken], "E2B": SLOW, "none": broken}
    fig = plots_homes.home_costs(views, title="t", source="s")
    assert "cpu" not in fig.data[0].y
    (menu,) = fig.layout.updatemenus
    assert [button.label for button in menu.buttons] == ["E4B", "E2B"]
    (restyle,) = menu.buttons[1].args
    assert restyle["x"][2] == [9.5, 9.9, None]  # device_map was not measured for E2B
    assert restyle["text"][2] == ["9.5", "9.9", ""]
    for axis, longest in (("xaxis", 14.96), ("xaxis2", 1.1), ("xaxis3", 19.8)):
        assert fig.layout[axis].range[1] > longest
    with pytest.raises(ValueError, match="is this a 'speed' record"):
        plots_homes.home_costs({"none": broken}, title="t", source="s")


def test_lookups_are_microseconds_and_their_description_holds_on_any_machine() -> None:
    fig = plots_homes.lookup_times(LOOKUPS, title="t", source="live on this CPU")
    mapped, copied = fig.data
    assert (mapped.x, copied.x) == ((1, 64), (1, 64))
    assert mapped.y == pytest.approx((14, 30))
    assert copied.y == pytest.approx((100_000, 110_000))
    assert [list(d) for d in copied.customdata] == [[9000], [9000]]
    other = [Lookup(lk.way, lk.tokens, 2 * lk.seconds, lk.moved_bytes) for lk in LOOKUPS]
    again = plots_homes.lookup_times(other, title="u", source="live on a GPU")
    assert fig.layout.meta == again.layout.meta


def test_every_cell_of_the_grid_has_one_advice_and_its_colour() -> None:
    views = grid()
    fig = plots_homes.home_grid(views, title="t")
    (menu,) = fig.layout.updatemenus
    for number, (model, cells) in enumerate(views.items()):
        (restyle,) = menu.buttons[number].args
        assert menu.buttons[number].label == model
        for (gpu, ram), advice in cells.items():
            row, column = fig.data[0].y.index(gpu), fig.data[0].x.index(ram)
            here = [kind for kind, z in enumerate(restyle["z"]) if z[row][column] is not None]
            assert len(here) == 1
            assert restyle["text"][here[0]][row][column] == advice.short
            name = fig.data[here[0]].name
            assert ("bf16" in name) == (advice.precision == "bf16")
            assert ("on the GPU" in name) == (advice.home == "gpu")
            assert ("not fit" in name) == (advice.home is None)
            assert restyle["customdata"][0][row][column].replace("<br>", " ") == str(advice)
    shown = [[list(row) for row in trace.text] for trace in fig.data]
    assert shown == menu.buttons[0].args[0]["text"]


# --- parity ----------------------------------------------------------------------------------


def test_ruler_has_a_mark_for_every_number() -> None:
    fig = plots_parity.number_ruler(low=0.98, high=1.045, example=1.01)
    by_row = {trace.y[0]: trace for trace in fig.data if trace.marker.symbol == "line-ns"}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        marks = list(by_row[name].x)
        assert marks == rounding.numbers_between(0.98, 1.045, dtype)
        assert {float(torch.tensor(mark, dtype=dtype)) for mark in marks} == set(marks)
    gaps = torch.tensor(by_row["bfloat16"].x).diff()
    assert set(gaps.tolist()) == {2.0**-8, 2.0**-7}  # twice as far apart above 1
    (rings,) = [trace for trace in fig.data if trace.marker.symbol == "circle-open"]
    assert rings.x[0] == 1 + 2**-7
    assert rings.x[1] == float(torch.tensor(1.01).half())


def test_fp16_figure_shows_all_weights_and_those_that_change() -> None:
    fig = plots_parity.fp16_window(0.02)
    every, changed = fig.data
    assert sum(every.y) == pytest.approx(1, abs=1e-6)
    total = sum(share or 0 for share in changed.y)
    assert total == pytest.approx(rounding.changed_by_fp16(0.02), abs=1e-6)
    for exponent, share, lost in zip(every.x, every.y, changed.y, strict=True):
        assert (lost is None) == (exponent >= -17)
        assert lost is None or 0 < lost <= share
    assert fig.layout.shapes[0].x0 == -17.5  # between the last bar that changes and the next


def test_divergence_is_zero_before_the_fault_and_nowhere_zero_after(parities) -> None:
    fig = plots_parity.divergence(parities, title="t", alt="a")
    moved, planted = fig.data
    assert set(moved.y) == {0}
    place = planted.x.index("layer 1")
    assert set(planted.y[:place]) == {0}
    assert min(planted.y[place:]) > 0
    assert planted.x[-1] == "logits"
    assert max(planted.y) <= 100
    differing, total, ulp = planted.customdata[-1]
    assert planted.y[-1] == 100 * differing / total
    assert ulp == parities["planted"].max_ulp


# --- every figure ----------------------------------------------------------------------------


def test_every_figure_describes_itself_and_has_a_title_and_a_height(parities) -> None:
    for name, fig in all_figures(parities).items():
        assert fig.layout.height > 200, name
        assert fig.layout.title.text, name
        assert len(fig.layout.meta["alt"]) > 20, name
        bundle = mime_bundle(fig, f"03-{name}")
        assert bundle["text/plain"].startswith(f"[figure 03-{name}] ")


def test_colours_are_okabe_and_ito_s(parities) -> None:
    for name, fig in all_figures(parities).items():
        used = set(re.findall(r"#[0-9A-Fa-f]{6}", fig.to_json()))
        assert used <= OKABE_ITO | {GREY, PALE}, name


def test_nothing_is_hard_wired_to_a_light_page(parities) -> None:
    for fig in all_figures(parities).values():
        assert fig.layout.paper_bgcolor == fig.layout.plot_bgcolor == "rgba(0,0,0,0)"
        assert fig.layout.font.color == GREY


def test_numbers_in_figures_are_finite(parities) -> None:
    def numbers(value: object) -> list[float]:
        if isinstance(value, (list, tuple)):
            return [n for inner in value for n in numbers(inner)]
        return [value] if isinstance(value, float) else []

    for name, fig in all_figures(parities).items():
        for trace in fig.data:
            found = numbers(trace.x) + numbers(trace.y)
            assert all(math.isfinite(n) for n in found), name
        assert "bdata" not in fig.to_json()  # older plotly.js does not know typed arrays
