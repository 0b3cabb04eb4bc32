"""Execute the notebooks headless: into a folder of results, or in place before a commit.

python scripts/run_notebooks.py --out results      # .ipynb and .html copies, sources untouched
python scripts/run_notebooks.py --in-place         # new outputs, and the .py pairs in sync
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nbformat
from jupytext.cli import jupytext
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbconvert import HTMLExporter
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
CELL_TIMEOUT_S = 300
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(notebook: NotebookNode) -> NotebookNode:
    """Run all cells in a fresh kernel; keep nothing that would differ in the next run."""
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(NOTEBOOKS)}},
        extra_arguments=["--log-level=ERROR"],  # the kernel's own remarks are not the notebook's
    ).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def write(path: Path, text: str) -> None:
    """Write through a temporary name, so that an interrupted run leaves no half file."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def run_copy(source: Path, out: Path) -> None:
    """Execute a notebook into ``out`` as .ipynb and .html, finished or not."""
    notebook = nbformat.read(source, as_version=4)
    try:
        execute(notebook)
    finally:  # a failed notebook is the one whose outputs you want to see
        write(out / source.name, nbformat.writes(notebook) + "\n")
        html, _ = HTMLExporter().from_notebook_node(notebook)
        write(out / f"{source.stem}.html", html)


def run_in_place(source: Path) -> None:
    """Bring the pair in sync (the newer file wins), execute, and write the .ipynb and its .py."""
    present = source if source.exists() else source.with_suffix(".py")
    jupytext(["--quiet", "--sync", str(present)])
    notebook = execute(nbformat.read(source, as_version=4))
    write(source, nbformat.writes(notebook) + "\n")
    jupytext(["--quiet", "--sync", str(source)])


def main() -> None:
    """Run every notebook, in the order of their numbers; stop at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="folder for the executed copies")
    target.add_argument("--in-place", action="store_true", help="renew the committed notebooks")
    options = parser.parse_args()

    names = {path.stem for path in NOTEBOOKS.glob("[0-9]*") if path.suffix in (".ipynb", ".py")}
    sources = [NOTEBOOKS / f"{name}.ipynb" for name in sorted(names)]
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        sources = [source for source in sources if source.exists()]
    if not sources:
        print("There are no notebooks yet.")
    for number, source in enumerate(sources, 1):
        print(f"[{number}/{len(sources)}] {source.stem} ... ", end="", flush=True)
        started = time.perf_counter()
        try:
            run_in_place(source) if options.in_place else run_copy(source, options.out)
        except (CellExecutionError, CellTimeoutError) as error:
            sys.exit(f"failed\n{error}")
        print(f"{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
