"""Measurements with their provenance: what was measured, on what, with which versions, when.

A record is one JSON file. It names hardware and software versions and nothing of the person who
measured: no host name, user, path or environment. A file is only ever replaced as a whole, so a
reader never sees half of one, and a measurement that is cut short keeps the rows it had finished.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pleviz import __version__
from pleviz.format import fmt_bytes, html_table, text_table

SCHEMA = 1
_ROOT = Path(__file__).resolve().parent.parent  # of a checkout
_PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "safetensors")
# a name ends with its unit, so that a number cannot be misread
_UNITS = {"_bytes": int, "_s": (int, float), "_tokens": int, "_tok_s": (int, float)}


class RecordError(ValueError):
    """A file is not a record that this version can read; the message names it and says why."""


@dataclass(frozen=True)
class Record:
    """Rows of numbers measured under the same conditions, and those conditions."""

    kind: str
    """What was measured: ``"speed"`` (memory and time), ``"vram"`` (memory alone), …"""
    created: str
    """When measuring began: UTC, ISO 8601."""
    commit: str | None
    """Git commit of pleviz; ``None`` where it is not known."""
    dirty: bool
    """Whether files under version control differed from that commit."""
    hardware: Mapping[str, Any]
    """``gpu`` (name or ``None``), ``gpu_bytes``, ``driver``, ``cpu``, ``cpu_count``, ``ram_bytes`` …"""
    versions: Mapping[str, str | None]
    """Of Python, pleviz and the libraries; ``None``: not installed."""
    command: str
    """What to type to measure this again, without paths."""
    arguments: Mapping[str, Any]
    """The conditions that all rows share."""
    method: Mapping[str, str] = field(default_factory=dict)
    """What the numbers count and how they were taken, in words."""
    link_bytes_per_s: float | None = None
    """Host-to-device copy from page-locked memory, measured in the same run."""
    rows: tuple[Mapping[str, Any], ...] = ()
    """One mapping per measurement; names end with their unit (``resident_bytes``, ``prefill_s``)."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def provenance(self) -> str:
        """One line for beneath a table or a figure: machine, versions, date, commit."""
        gpu = self.hardware.get("gpu")
        machine = gpu or f"CPU only ({self.hardware.get('cpu') or 'unknown'})"
        names = ("torch", "transformers", "bitsandbytes")
        used = [f"{name} {self.versions[name]}" for name in names if self.versions.get(name)]
        if gpu and self.hardware.get("driver"):
            used.insert(0, f"driver {self.hardware['driver']}")
        parts = [machine, *used, self.created[:10]]
        if self.commit:
            parts.append(f"pleviz {self.commit[:10]}{' with local changes' if self.dirty else ''}")
        return ", ".join(parts)

    def select(self, **wanted: Any) -> tuple[Mapping[str, Any], ...]:
        """The rows whose fields have the given values, e.g. ``select(home="mapped")``."""
        return tuple(
            row for row in self.rows if all(row.get(key) == value for key, value in wanted.items())
        )

    def with_rows(self, rows: Iterable[Mapping[str, Any]]) -> Record:
        """The same record with other rows."""
        return dataclasses.replace(self, rows=tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"schema": plain.pop("schema"), **plain, "rows": [dict(row) for row in self.rows]}

    def __str__(self) -> str:
        header, rows = self._table()
        return f"{text_table(header, rows)}\n{self.provenance}"

    def _repr_html_(self) -> str:
        return html_table(*self._table(), caption=self.provenance)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells: what rows hold directly, lists and mappings inside them left out."""
        names = list(dict.fromkeys(key for row in self.rows for key in row))
        plain = [
            n for n in names if not any(isinstance(r.get(n), (Mapping, list)) for r in self.rows)
        ]
        return plain or ["(no rows)"], [
            [_cell(name, row.get(name)) for name in plain] for row in self.rows
        ]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return fmt_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def new_record(
    kind: str,
    *,
    command: str,
    hardware: Mapping[str, Any],
    arguments: Mapping[str, Any],
    versions: Mapping[str, str | None] | None = None,
    method: Mapping[str, str] | None = None,
    link_bytes_per_s: float | None = None,
    rows: Iterable[Mapping[str, Any]] = (),
) -> Record:
    """A record made now, with the date, the commit and (unless given) the versions filled in."""
    commit, dirty = git_commit()
    return Record(
        kind=kind,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=commit,
        dirty=dirty,
        hardware=dict(hardware),
        versions=dict(versions) if versions is not None else library_versions(),
        command=command,
        arguments=dict(arguments),
        method=dict(method or {}),
        link_bytes_per_s=link_bytes_per_s,
        rows=tuple(rows),
    )


def write_record(path: str | Path, record: Record) -> None:
    """Write ``record`` to ``path`` so that there is always a whole file: the old or the new one.

    The text goes to a temporary file beside it, is forced to the disk, and takes the name in one
    step. Raises ``OSError`` where that cannot be done; the old file is then untouched.
    """
    path = Path(path)
    text = json.dumps(record.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # lists of plain values on one line; no string holds a line break, so this is inside none
    text = re.sub(r"\[\n\s+([^\[\]{}]*?)\n\s+\]", _one_line, text)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)  # mkstemp's files are private
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _one_line(match: re.Match[str]) -> str:
    return f"[{', '.join(line.strip().rstrip(',') for line in match[1].splitlines())}]"


def read_record(path: str | Path) -> Record:
    """The record in one file.

    Raises:
        RecordError: not JSON, not a record, or written by a newer pleviz.
        OSError: it cannot be read.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(
            f"{path} is not JSON ({error}). Is it cut off, or another file?"
        ) from None
    try:
        return from_dict(data)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def from_dict(data: Any) -> Record:
    """The record in plain values, as :meth:`Record.to_dict` gives them.

    Raises:
        RecordError: something is missing, unknown or of the wrong type.
    """
    if not isinstance(data, dict) or "schema" not in data:
        raise RecordError("not a pleviz record: there is no 'schema' at the top level")
    if isinstance(data["schema"], int) and data["schema"] > SCHEMA:
        raise RecordError(
            f"written in schema {data['schema']} by a newer pleviz; this one ({__version__}) knows "
            f"{SCHEMA}. Update pleviz to read it."
        )
    known = {f.name for f in dataclasses.fields(Record)}
    required = {f.name for f in dataclasses.fields(Record) if f.default is dataclasses.MISSING}
    missing = sorted(required - {"method"} - data.keys())
    if missing:
        raise RecordError(f"missing: {', '.join(missing)}")
    if unknown := sorted(data.keys() - known):
        raise RecordError(f"unknown: {', '.join(unknown)}")
    if not isinstance(data.get("rows", []), list):
        raise RecordError("'rows' must be a list")
    return Record(**data | {"rows": tuple(data.get("rows", ()))})


def load_records(path: str | Path | None = None) -> tuple[Record, ...]:
    """All records of a folder (or one file), oldest first.

    Args:
        path: a folder with ``*.json`` files, or one such file. By default the ``records`` folder of
            the checkout that pleviz is imported from, or the copy of it in the installed package.

    Raises:
        RecordError: a file is malformed or from a newer pleviz.
        FileNotFoundError: ``path`` was given and is not there.
    """
    folder = Path(path) if path is not None else _own_records()
    if folder.is_dir():
        files = sorted(folder.glob("*.json"))
    elif folder.is_file():
        files = [folder]
    elif path is None:
        files = []
    else:
        raise FileNotFoundError(f"there are no records at {folder}: no such file or folder")
    return tuple(sorted(map(read_record, files), key=lambda record: record.created))


def _own_records() -> Path:
    if (_ROOT / "pyproject.toml").exists():
        return _ROOT / "records"
    return Path(__file__).parent / "data" / "records"  # where the wheel has them


def git_commit() -> tuple[str | None, bool]:
    """Commit of pleviz, and whether tracked files differ from it.

    ``PLEVIZ_COMMIT`` says it where there is no history (``abc123``, or ``abc123-dirty``).
    """
    if given := os.environ.get("PLEVIZ_COMMIT", "").strip():
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    top = _git("rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != _ROOT:  # another project's repository around site-packages
        return None, False
    commit = _git("rev-parse", "HEAD")
    return commit or None, bool(_git("status", "--porcelain", "--untracked-files=no"))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def library_versions() -> dict[str, str | None]:
    """Versions of Python, pleviz, the libraries and the CUDA that torch was built for."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "pleviz": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    import torch.version

    return versions | {"cuda": torch.version.cuda}


def _validate(record: Record) -> None:
    """Raise RecordError unless types are right, names carry their unit, and numbers are finite."""
    if record.schema != SCHEMA:
        raise RecordError(f"'schema' must be {SCHEMA}, not {record.schema!r}")
    for name, types in (
        ("kind", str),
        ("created", str),
        ("commit", str | None),
        ("dirty", bool),
        ("hardware", Mapping),
        ("versions", Mapping),
        ("command", str),
        ("arguments", Mapping),
        ("method", Mapping),
        ("link_bytes_per_s", int | float | None),
    ):
        value = getattr(record, name)
        if not isinstance(value, types):
            raise RecordError(f"'{name}' must be {types}, not {value!r}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record.created):
        raise RecordError(f"'created' must look like 2026-01-31T12:00:00Z, not {record.created!r}")
    for number, row in enumerate(record.rows):
        if not isinstance(row, Mapping):
            raise RecordError(f"row {number} must be a mapping, not {row!r}")
        _validate_values(row, f"row {number}")


def _validate_values(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            unit = next((u for u in sorted(_UNITS, key=len, reverse=True) if key.endswith(u)), None)
            numbers = inner if isinstance(inner, list) else [inner]
            if unit and not all(
                n is None or (isinstance(n, _UNITS[unit]) and not isinstance(n, bool))
                for n in numbers
            ):
                raise RecordError(f"{where}: '{key}' must be a number ({unit[1:]}), not {inner!r}")
            _validate_values(inner, f"{where}, '{key}'")
    elif isinstance(value, (list, tuple)):
        for item in value:
            _validate_values(item, where)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise RecordError(f"{where}: {value} is not a finite number")
    elif value is not None and not isinstance(value, (str, int, bool)):
        raise RecordError(f"{where}: {type(value).__name__} cannot be stored")
