"""What a notebook needs around its lesson: quiet libraries, figures that show everywhere, a stamp.

A figure is shown as three things at once, and each reader takes the best it can:

* ``application/vnd.plotly.v1+json``: JupyterLab and VS Code draw it with the plotly they have, also
  without a network and in notebooks that are not trusted;
* ``text/html``: Colab, nbconvert and static sites. It draws with a plotly.js that the page already
  has, and loads plotly's CDN otherwise; no require.js. Its id is fixed, so that outputs of two runs
  are equal, and it follows the text colour of the page, light or dark. Where nothing can draw (GitHub,
  no network) the description of the figure stands in its place;
* ``text/plain``: the description alone.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib.metadata
import json
import os
import platform
import random
import re
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import plotly.graph_objects as go

T = TypeVar("T")

SOURCE = "git+https://github.com/pleviz/pleviz"
"""Where the notebooks install pleviz from when it is missing. Change it here; a test compares."""

FIRST_CELL = f"""\
# Installs pleviz where it is missing (Colab). A torch that is already there stays as it is.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("pleviz") is None:
    source = "pleviz[notebooks] @ {SOURCE}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)\
"""
"""The first code cell of every notebook."""

_LIBRARIES = "accelerate|bitsandbytes|datasets|huggingface_hub|peft|torch|transformers"


def quiet(seed: int = 0) -> None:
    """Make a notebook's outputs depend on its code alone: no bars, no library chatter, fixed seeds.

    Turns off progress bars and warnings of the Hugging Face libraries, torch's included, and leaves
    pleviz' own warnings on. Call it once, before transformers is imported; later works too.
    """
    os.environ.update(
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        TRANSFORMERS_VERBOSITY="error",
        DATASETS_VERBOSITY="error",
        TOKENIZERS_PARALLELISM="false",
    )
    _quieten_imported()
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)
    warnings.filterwarnings("ignore", module=rf"({_LIBRARIES})(\.|$)")
    warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, without ipywidgets
    seed_all(seed)


def _quieten_imported() -> None:
    """Tell libraries that have read their environment variables already."""
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    if "datasets" in sys.modules:
        import datasets

        datasets.logging.set_verbosity_error()
        datasets.disable_progress_bars()


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 libraries draw from the global generator
    torch.manual_seed(seed)


def progress(items: Iterable[T], description: str = "", total: int | None = None) -> Iterable[T]:
    """``items`` behind a progress bar that leaves nothing in the output.

    ``PLEVIZ_PROGRESS=0`` turns it off, as tests and stored notebooks need it: a text bar prints
    timings.
    """
    from tqdm.auto import tqdm

    off = os.environ.get("PLEVIZ_PROGRESS") == "0"
    return tqdm(items, desc=description, total=total, leave=False, disable=off)


def stamp() -> None:
    """Print versions and hardware: what an output that differs from yours was made with."""
    versions = [f"Python {platform.python_version()}"]
    for name in ("pleviz", "torch", "transformers", "plotly"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    import torch

    cores = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA GPU"
    print(f"{', '.join(versions)}\n{cores}, {gpu}")  # noqa: T201


def show(fig: go.Figure, key: str, *, alt: str | None = None) -> None:
    """Display a plotly figure in any notebook front end, and in the site made of the notebook.

    Args:
        fig: the figure; its height should be set.
        key: short name, unique in the notebook: letters, digits, ``-`` and ``.``; the id of the
            figure in the page is ``pleviz-<key>``.
        alt: what a reader who cannot see the figure must know. The figures of
            :mod:`pleviz.plots` describe themselves.

    Raises:
        ValueError: a key that cannot be an id, or no description.
    """
    from IPython.display import display

    display(mime_bundle(fig, key, alt=alt), raw=True)


def mime_bundle(fig: go.Figure, key: str, *, alt: str | None = None) -> dict[str, Any]:
    """The outputs of :func:`show`, by MIME type. Equal figures give equal bundles."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", key):
        raise ValueError(
            f"key={key!r} cannot name a figure: use letters, digits, '-' and '.', such as "
            "key='01-table-sizes'."
        )
    alt = alt or (fig.layout.meta or {}).get("alt", "")
    if not alt.strip():
        raise ValueError(
            f"figure '{key}' has no alt text: say in a sentence what it shows, for readers who "
            "cannot see it and for places where plotly cannot draw."
        )
    figure = json.loads(fig.to_json())
    figure["config"] = {"responsive": True, "displayModeBar": False}
    return {
        "application/vnd.plotly.v1+json": figure,
        "text/html": _html(figure, f"pleviz-{key}", alt),
        "text/plain": f"[figure {key}] {alt}",
    }


_SCRIPT = """\
(() => {
  const div = document.getElementById(%(id)s), figure = %(figure)s;
  const ink = () => getComputedStyle(div.parentElement).color;
  const draw = () => {
    let colour = ink();
    figure.layout.font = {...figure.layout.font, color: colour};
    div.textContent = "";
    Plotly.newPlot(div, figure.data, figure.layout, figure.config);
    new MutationObserver(() => {  // the page switched between light and dark
      if (ink() !== colour) Plotly.relayout(div, {"font.color": colour = ink()});
    }).observe(document.documentElement, {attributes: true});
  };
  if (window.Plotly) return draw();
  let script = document.querySelector('script[src*="plotly"]');
  if (!script) {
    window.PlotlyConfig = {MathJaxConfig: "local"};  // leave the page's formulas alone
    script = document.createElement("script");
    Object.assign(script, %(source)s);
    document.head.append(script);
  }
  script.addEventListener("load", draw);
})();"""


def _html(figure: dict[str, Any], div_id: str, alt: str) -> str:
    """A ``<div>`` with the description in it, and the script that draws over it."""
    height = figure["layout"].get("height", 450)
    script = _SCRIPT % {
        "id": json.dumps(div_id),
        "figure": json.dumps(figure).replace("</", "<\\/"),
        "source": json.dumps(_plotlyjs()),
    }
    return (
        f'<div id="{div_id}" class="pleviz-figure" role="img" aria-label="{html.escape(alt)}" '
        f'style="width:100%;height:{height}px">Figure: {html.escape(alt)}</div>\n'
        f"<script>{script}</script>"
    )


def _plotlyjs() -> dict[str, str]:
    """Attributes of the script tag for the plotly.js that belongs to the installed plotly."""
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    url = f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js"
    return {"src": url, "integrity": _sri(get_plotlyjs()), "crossOrigin": "anonymous"}


@functools.cache
def _sri(text: str) -> str:
    """Subresource integrity: the browser refuses a file that is not this one."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
