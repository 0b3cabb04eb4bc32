"""Notebook helpers: quiet libraries, figures that draw anywhere, the cells that all notebooks share."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from plotly.offline import get_plotlyjs, get_plotlyjs_version

import pleviz
from pleviz import notebook
from pleviz.notebook import FIRST_CELL, SOURCE, mime_bundle, progress, quiet, seed_all, stamp

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLOTLY, HTML, TEXT = "application/vnd.plotly.v1+json", "text/html", "text/plain"


def figure(**layout: Any) -> go.Figure:
    return go.Figure(go.Bar(x=[1, 2], y=["a", "</script>"]), layout={"height": 300, **layout})


# --- figures ---------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags:
            self.text[self.tags[-1][0]] = self.text.get(self.tags[-1][0], "") + data


def test_equal_figures_give_equal_bundles() -> None:
    first, second = (mime_bundle(figure(), "k", alt="Two bars.") for _ in range(2))
    assert first == second
    assert list(first) == [PLOTLY, HTML, TEXT]


def test_text_is_the_description_alone() -> None:
    assert mime_bundle(figure(), "01-k", alt="Two bars.")[TEXT] == "[figure 01-k] Two bars."


def test_page_part_is_a_described_div_and_one_script() -> None:
    alt = 'Bars of "a" & <b>.'
    page = Tags(mime_bundle(figure(), "01-k", alt=alt)[HTML])
    (div, attributes), (script, script_attributes) = page.tags
    assert (div, script, script_attributes) == ("div", "script", {})
    assert attributes["id"] == "pleviz-01-k"
    assert attributes["role"] == "img"
    assert attributes["aria-label"] == alt
    assert attributes["style"] == "width:100%;height:300px"
    assert page.text["div"].strip() == f"Figure: {alt}"  # stands there where nothing can draw


def test_script_holds_the_figure_and_survives_awkward_labels() -> None:
    fig = figure()
    text = mime_bundle(fig, "k", alt="A.")[HTML]
    assert text.count("</script>") == 1
    data = re.search(r"figure = (\{.*\});\n", text)
    assert json.loads(data[1].replace("<\\/", "</"))["data"] == json.loads(fig.to_json())["data"]


def test_plotlyjs_is_the_page_s_own_or_the_cdn_s_and_is_checked() -> None:
    text = mime_bundle(figure(), "k", alt="A.")[HTML]
    digest = hashlib.sha256(get_plotlyjs().encode()).digest()
    assert f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js" in text
    assert f"sha256-{base64.b64encode(digest).decode()}" in text
    assert "if (window.Plotly) return draw();" in text
    assert "require" not in text
    assert len(text) < 20_000  # plotly.js itself is not in it


def test_labs_get_the_figure_as_json() -> None:
    found = mime_bundle(figure(), "k", alt="A.")[PLOTLY]
    assert set(found) == {"data", "layout", "config"}
    assert found["config"] == {"responsive": True, "displayModeBar": False}
    assert json.loads(json.dumps(found)) == found


def test_figures_may_describe_themselves() -> None:
    fig = figure(meta={"alt": "From the figure."})
    assert mime_bundle(fig, "k")[TEXT].endswith("From the figure.")
    assert mime_bundle(fig, "k", alt="From the call.")[TEXT].endswith("From the call.")


@pytest.mark.parametrize("alt", [None, "", "  "])
def test_no_figure_without_a_description(alt: str | None) -> None:
    with pytest.raises(ValueError, match="figure 'k' has no alt text"):
        mime_bundle(figure(), "k", alt=alt)


@pytest.mark.parametrize("key", ["", "a b", 'a"b', "-a", "a<b"])
def test_key_must_be_usable_as_an_id(key: str) -> None:
    with pytest.raises(ValueError, match="cannot name a figure"):
        mime_bundle(figure(), key, alt="A.")


def test_show_displays_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[Any, bool]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append((bundle, raw)))
    assert pleviz.show(figure(), "k", alt="A.") is None
    assert shown == [(mime_bundle(figure(), "k", alt="A."), True)]


# --- quiet, seeds, progress, stamp -----------------------------------------------------------

NOISY = """
import sys, tempfile, warnings
{first}
{before}
import pleviz
pleviz.quiet()
import transformers
from pleviz.notebook import progress
folder = tempfile.mkdtemp()
pleviz.build("gemma-4-E2B").save_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
transformers.logging.get_logger("transformers").warning("chatter")
warnings.warn("old", FutureWarning)
warnings.warn_explicit("inner", UserWarning, "x.py", 1, module="transformers.modeling_utils")
print(sum(progress(range(4))), "ipywidgets" in sys.modules)
warnings.warn("pleviz speaks")
"""
BLOCKED = "sys.modules['ipywidgets'] = None"


@pytest.mark.parametrize(
    ("first", "before"),
    [("", ""), (BLOCKED, "import transformers, huggingface_hub")],
    ids=["first thing", "late and without ipywidgets"],
)
def test_quiet_leaves_only_what_the_code_says(first: str, before: str) -> None:
    code = NOISY.format(first=first, before=before)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_HUB_DIS", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"PYTHONPATH": str(ROOT), "PLEVIZ_PROGRESS": "0", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6 ")
    assert re.fullmatch(r"\S+: UserWarning: pleviz speaks\n.*\n?", done.stderr), done.stderr


def test_the_noise_would_be_there_without_quiet() -> None:
    code = NOISY.format(first=BLOCKED, before="").replace("pleviz.quiet()", "")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_HUB_DIS", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    for noise in ("chatter", "FutureWarning: old", "UserWarning: inner", "Loading weights"):
        assert noise in done.stderr


def test_seeds_are_set() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    with warnings.catch_warnings():
        quiet(seed=3)
        first = draws()
        quiet(seed=3)
        assert draws() == first
        seed_all(4)
        assert draws() != first


def test_progress_is_off_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLEVIZ_PROGRESS", "0")
    assert list(progress(iter("abc"), "letters", total=3)) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_stamp_names_versions_and_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    stamp()
    out = capsys.readouterr().out
    assert re.search(r"Python 3\.\d+\.\d+, pleviz \S+.*, torch \S+, transformers \S+, plotly ", out)
    assert re.search(r"cores, (no CUDA GPU|\S+)", out)


# --- the first cell --------------------------------------------------------------------------


def run_first_cell(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> list[list[str]]:
    commands: list[list[str]] = []
    spec = importlib.util.find_spec("json") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    exec(FIRST_CELL, {})
    return commands


def test_first_cell_does_nothing_where_pleviz_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_first_cell(monkeypatch, installed=True) == []


def test_first_cell_installs_pleviz_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = run_first_cell(monkeypatch, installed=False)
    wanted = f"pleviz[notebooks] @ {SOURCE}"  # pip keeps a torch that satisfies pleviz
    assert command == [sys.executable, "-m", "pip", "install", "-q", wanted]


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each_notebook
def test_notebook_begins_with_the_first_cell_and_quiet(path: Path) -> None:
    code = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert code[0] == FIRST_CELL, "copy pleviz.notebook.FIRST_CELL into the first cell"
    assert "pleviz.quiet()" in code[1]
    assert "stamp()" in code[-1]


@each_notebook
def test_figures_of_a_notebook_are_complete_and_their_ids_unique(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    bundles = [o.data for c in cells for o in c.get("outputs", []) if PLOTLY in o.get("data", {})]
    assert bundles
    assert all(set(bundle) == {PLOTLY, HTML, TEXT} for bundle in bundles)
    ids = [Tags(bundle[HTML]).tags[0][1]["id"] for bundle in bundles]
    assert len(set(ids)) == len(ids)
    assert all(i.startswith(f"pleviz-{path.stem[:2]}-") for i in ids)
    assert all(html.unescape(b[TEXT]).startswith("[figure ") for b in bundles)
    assert path.stat().st_size < 3_000_000


def test_notebook_module_needs_no_torch_to_be_imported() -> None:
    code = "import sys, pleviz.notebook, pleviz.exercises; print({'torch', 'plotly'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set()"
    assert notebook.quiet is pleviz.quiet
