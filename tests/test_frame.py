"""The frame holds together: packaging files agree, imports stay cheap, notebooks are what they claim."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
import yaml
from nbformat import NotebookNode
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pleviz

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CONDA_NAMES = {"pytorch": "torch"}
SKIP_TAGS = {"nbval-skip", "nbval-ignore-output"}


def requirements() -> dict[str, Requirement]:
    """Every direct requirement of pyproject.toml, all extras, by canonical name."""
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r for r in parsed if r.name != "pleviz"}


def pins() -> dict[str, str]:
    """constraints.txt as name -> version; anything but a plain pin is an error."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").open()]
    found = [re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines if line]
    assert all(found), "constraints.txt holds lines that are not name==version"
    return {canonicalize_name(match[1]): match[2] for match in found if match}


# --- packaging -------------------------------------------------------------------------------


def test_environment_yml_has_the_requirements_of_pyproject() -> None:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert conda["channels"] == ["conda-forge"]
    plain = [line for line in conda["dependencies"] if isinstance(line, str)]
    nested = [line for line in conda["dependencies"] if not isinstance(line, str)]
    assert nested == [{"pip": ["-e ."]}]
    parsed = {CONDA_NAMES.get(r.name, r.name): r for r in map(Requirement, plain)}
    assert str(parsed.pop("python").specifier) == PROJECT["project"]["requires-python"]
    parsed.pop("pip")
    here = {canonicalize_name(name): r.specifier for name, r in parsed.items()}
    assert here == {name: r.specifier for name, r in requirements().items()}


def test_every_requirement_is_pinned_to_a_version_that_satisfies_it() -> None:
    wanted = requirements()
    assert pins().keys() == wanted.keys()
    outside = {
        name: version for name, version in pins().items() if version not in wanted[name].specifier
    }
    assert outside == {}


def test_extras_nest_as_documented() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"notebooks", "gpu", "book", "dev", "all"}
    assert extras["all"] == ["pleviz[notebooks,gpu,book,dev]"]


def test_version_is_the_package_s() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("pleviz")
    except PackageNotFoundError:  # run from the source tree, without an install
        installed = pleviz.__version__
    assert installed == pleviz.__version__


def test_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text  # the whole text, not a summary
    assert PROJECT["project"]["license"] == "Apache-2.0"


# --- the package -----------------------------------------------------------------------------

IMPORT = """
import sys, time
started = time.perf_counter()
import pleviz
seconds = time.perf_counter() - started
heavy = sorted({"torch", "transformers", "plotly", "numpy", "accelerate"} & set(sys.modules))
import json
print(json.dumps({"seconds": seconds, "heavy": heavy}))
"""


def in_fresh_python(*arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_cheap() -> None:
    runs = [json.loads(in_fresh_python("-c", IMPORT)) for _ in range(5)]
    assert runs[0]["heavy"] == []
    assert min(run["seconds"] for run in runs) < 0.3


@pytest.mark.parametrize("name", pleviz.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(pleviz, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        pleviz.nonsense  # noqa: B018


def test_type_checkers_see_the_names_that_exist_at_run_time() -> None:
    tree = ast.parse((ROOT / "pleviz/__init__.py").read_text())
    guard = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {alias.name: node.module for node in guard.body for alias in node.names}  # type: ignore[attr-defined]
    assert seen == pleviz._EXPORTS


def test_modules_are_small() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in (ROOT / "pleviz").rglob("*.py")
    }
    assert {name: count for name, count in lines.items() if count > 400} == {}


# --- scripts and commands --------------------------------------------------------------------


def test_torch_is_installed_with_care() -> None:
    from scripts.install import CPU_INDEX, torch_attempts

    ask = {"installed": None, "has_gpu": False, "registry_is_cuda": False}
    plain, cpu = ["torch==2.13.0"], ["torch==2.13.0", "--index-url", CPU_INDEX]
    assert torch_attempts("torch==2.13.0", **ask | {"installed": "2.9.1+cu128"}) == []
    assert torch_attempts("torch==2.13.0", **ask | {"installed": "2.9", "has_gpu": True}) == []
    assert torch_attempts("torch==2.13.0", **ask) == [plain]
    assert torch_attempts("torch==2.13.0", **ask | {"registry_is_cuda": True}) == [cpu, plain]
    assert torch_attempts("torch==2.13.0", **ask | {"has_gpu": True}) == [plain]
    both = ask | {"has_gpu": True, "registry_is_cuda": True}
    assert torch_attempts("torch==2.13.0", **both) == [plain]


@pytest.mark.parametrize(
    ("requires", "cuda"),
    [
        ([], False),
        (["filelock", "sympy>=1.13.3", "setuptools; python_version >= '3.12'"], False),
        (["filelock", 'nvidia-cublas-cu12==12.8.4.1; platform_system == "Linux"'], True),
        (["cuda-bindings<14,>=13.0.3; platform_system == 'Linux'"], True),
        (["nvidia_nccl-cu13"], True),
        (["barracuda-tools"], False),
    ],
)
def test_cuda_build_is_recognised(requires: list[str], cuda: bool) -> None:
    from scripts.install import is_cuda_build

    assert is_cuda_build(requires) is cuda


def test_constraints_keep_the_torch_that_is_there() -> None:
    from scripts.install import constraints_for, pinned

    text = "numpy==2.4.6\ntorch==2.13.0\ntorchfoo==1.0\n"
    assert pinned(text, "torch") == "torch==2.13.0"
    assert constraints_for(text, None) == text
    assert constraints_for(text, None, ["numpy==1.26.4"]).startswith("numpy==1.26.4\ntorch==2.13.0")
    kept = constraints_for(text, "2.11.0+cu128")
    assert kept == "numpy==2.4.6\ntorch==2.11.0+cu128\ntorchfoo==1.0\n"
    with pytest.raises(ValueError, match="no pin for peft"):
        pinned(text, "peft")


def make_targets() -> set[str]:
    return set(re.findall(r"(?m)^([a-z][a-z-]*):", (ROOT / "Makefile").read_text()))


def test_commands_in_the_readme_are_make_targets() -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"run", "test", "lab", "help"} <= named
    assert named <= make_targets()


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", *arguments]  # as from a shell, though `make test` may have started us
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_make_help_lists_every_target() -> None:
    done = make("help")
    listed = set(re.findall(r"(?m)^  ([a-z-]+) ", done.stdout))
    assert listed == make_targets() - {"check-python"}
    assert make().stdout == done.stdout


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert re.search(r"(?m)^make test\b", script.read_text())


def test_old_python_is_refused_with_a_message(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")  # answers the version question as an old Python does
    old.chmod(0o755)
    done = make("lint", f"PYTHON={old}", f"VENV={tmp_path}/venv")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_pre_commit_needs_nothing_but_the_dev_extra() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    brought = requirements().keys() | pre_commit_hooks_scripts()
    assert {hook["entry"].split()[0] for hook in hooks} <= brought


def pre_commit_hooks_scripts() -> set[str]:
    from importlib.metadata import distribution

    return {entry.name for entry in distribution("pre-commit-hooks").entry_points}


@pytest.mark.parametrize("required", ["0", "1"])
def test_a_required_gpu_test_may_not_be_skipped(tmp_path: Path, required: str) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_it():\n    pytest.skip('no such thing here')\n"
    )
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *config, "-m", "gpu", "-p", "no:cacheprovider", tmp_path],
        env=os.environ | {"PLEVIZ_REQUIRE_GPU": required},
        capture_output=True,
        text=True,
    )
    complaint = "PLEVIZ_REQUIRE_GPU=1, but this GPU test was skipped"
    assert (done.returncode != 0, complaint in done.stdout) == (required == "1", required == "1")
    assert ("1 skipped" in done.stdout) == (required == "0"), done.stdout


# --- README ----------------------------------------------------------------------------------


def test_readme_python_runs() -> None:
    blocks = re.findall(r"(?s)```python\n(.*?)```", README)
    assert blocks
    for block in blocks:
        in_fresh_python("-W", "ignore", "-c", block)


def test_readme_lists_the_notebooks_that_exist() -> None:
    listed = set(re.findall(r"notebooks/([\w-]+\.ipynb)", README))
    assert listed == {path.name for path in NOTEBOOKS}


def test_readme_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#\s]+)", README)
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_readme_headline_comes_from_the_records() -> None:
    between = re.search(r"(?s)<!-- headline:start -->\n(.*?)<!-- headline:end -->", README)
    assert between, "README.md lost its headline markers"
    if any((ROOT / "records").glob("*.json")):
        assert (
            between[1].strip() == in_fresh_python("-m", "pleviz", "headline", "--markdown").strip()
        )
    else:
        assert not re.search(r"\d GB", between[1]), "numbers without a record"


# --- notebooks -------------------------------------------------------------------------------


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def content(notebook: NotebookNode) -> list[tuple[str, str, list[str]]]:
    return [(cell.cell_type, cell.source, sorted(tags(cell))) for cell in notebook.cells]


def shows_something(source: str) -> bool:
    """Whether the cell ends in a value or a call, which would normally leave an output."""
    body = ast.parse(re.sub(r"(?m)^\s*[%!].*$", "pass", source)).body
    return bool(body) and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";")


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_every_notebook_has_its_script_and_the_reverse() -> None:
    scripts = {path.stem for path in (ROOT / "notebooks").glob("[0-9]*.py")}
    assert scripts == {path.stem for path in NOTEBOOKS}


@each_notebook
def test_pair_is_in_sync(path: Path) -> None:
    notebook, script = read(path), jupytext.read(path.with_suffix(".py"), fmt="py:percent")
    assert content(notebook) == content(script)
    # and the other way: the script that jupytext would write is the one that is there
    config = jupytext.config.load_jupytext_config(str(path))
    written = jupytext.writes(notebook, fmt="py:percent", config=config)
    assert written.rstrip() == path.with_suffix(".py").read_text().rstrip()


@each_notebook
def test_notebook_was_executed_in_order(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    errors = [o for cell in cells for o in cell.outputs if o.output_type == "error"]
    assert errors == []
    stderr = [o.text for cell in cells for o in cell.outputs if o.get("name") == "stderr"]
    assert stderr == [], "warnings and progress bars do not belong in stored outputs"


@each_notebook
def test_cells_that_show_something_have_outputs(path: Path) -> None:
    """nbval compares nothing where nothing is stored, so an empty cell must say that it is meant."""
    bare = [
        cell.source
        for cell in code_cells(path)
        if not cell.outputs and shows_something(cell.source) and "no-output" not in tags(cell)
    ]
    assert bare == []
    cells = code_cells(path)
    unchecked = [cell for cell in cells if tags(cell) & SKIP_TAGS]
    assert len(unchecked) <= max(1, len(cells) // 10), "at most one cell in ten may go unchecked"


@each_notebook
def test_code_cells_are_short(path: Path) -> None:
    assert [cell.source for cell in code_cells(path) if len(cell.source.splitlines()) > 25] == []


@each_notebook
def test_notebook_holds_no_secrets_or_local_paths(path: Path) -> None:
    text = path.read_text() + path.with_suffix(".py").read_text()
    assert re.findall(r"\bhf_[A-Za-z0-9]{16,}", text) == []
    assert re.findall(r"(?:/home|/root|/Users|/work|/tmp)/[\w.-]+", text) == []
