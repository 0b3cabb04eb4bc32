"""The measurement as a whole: machine, checkpoints, one process per row, a record that only grows."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pleviz.format import fmt_bytes
from pleviz.measure.method import method_notes
from pleviz.measure.plan import (
    BuildJob,
    Machine,
    Options,
    Row,
    RowJob,
    ram_bytes,
    row_of,
    with_ratios,
)
from pleviz.measure.runner import Outcome, Worker, run_alone, without_paths
from pleviz.records import Record, new_record, read_record, write_record
from pleviz.specs import SPECS

_COMPLETE = ".complete"
OnRow = Callable[[Mapping[str, Any]], None]


class MeasureError(RuntimeError):
    """The measurement cannot begin or go on; the message says why."""


def measure(
    options: Options,
    out: str | Path,
    *,
    keep: Path | None = None,
    on_row: OnRow | None = None,
) -> Record:
    """Measure the rows that ``options`` ask for and that ``out`` does not have yet.

    Each row runs in a process of its own and is written as soon as it is finished, so an interrupted
    measurement goes on where it was when it is started again. A row that failed is tried again.

    Args:
        options: what to measure.
        out: the record, a JSON file; made if it is not there.
        keep: a folder to keep the checkpoints in, and to find them in the next time; by default they
            are temporary.
        on_row: called with every finished row.

    Raises:
        MeasureError: no such device or checkpoint; nowhere to write; ``out`` holds a record of
            another machine, version or condition.
        RecordError: ``out`` is not a record.
    """
    return _Run(options, Path(out), keep, on_row).execute()


class _Run:
    def __init__(
        self, options: Options, out: Path, keep: Path | None, on_row: OnRow | None
    ) -> None:
        self.options, self.out, self.keep, self.on_row = options, out, keep, on_row
        if not out.parent.is_dir():
            raise MeasureError(f"there is no folder {out.parent} to write {out.name} into")
        old = read_record(out) if out.exists() else None
        self.machine = self._inspect()
        self.record = self._new_record()
        if old is not None:
            _refuse_other_conditions(old, self.record, out)
            self.record = _continued(old, self.record)

    def execute(self) -> Record:
        finished = {row_of(row) for row in self.record.rows if row["status"] != "failed"}
        pending = [row for row in self.options.rows(self._models()) if row not in finished]
        with (
            tempfile.TemporaryDirectory(prefix="pleviz-", ignore_cleanup_errors=True) as folder,
            _progress(len(pending)) as self.advance,
        ):
            self.folder = Path(folder)
            if self.options.compiled:
                with self._checkpoints(pending) as checkpoints:
                    self._compiled(
                        [row for row in pending if row.model in checkpoints], checkpoints
                    )
            else:  # one checkpoint on disk at a time
                for model in dict.fromkeys(row.model for row in pending):
                    rows = [row for row in pending if row.model == model]
                    with self._checkpoints(rows) as checkpoints:
                        self._eager(rows if checkpoints else [], checkpoints)
        return self.record

    # -- rows ------------------------------------------------------------------------------------

    def _eager(self, rows: Iterable[Row], checkpoints: Mapping[str, str]) -> None:
        for row in rows:
            file = self.folder / f"reference-{row.model}-{row.precision}.safetensors"
            job = self._job(row, checkpoints, reference=str(file))
            if not self.options.only_memory and row.home != "gpu" and not file.exists():
                self._reference_again(job, file)
            self.advance(str(row))
            self._add(
                row, run_alone("pleviz.measure.jobs:measure_row", job, self.options.row_timeout)
            )

    def _reference_again(self, job: RowJob, file: Path) -> None:
        """The gpu row is not in this run: compute what it would have left behind, once."""
        tried = file.with_suffix(".tried")
        if not tried.exists():
            tried.touch()
            run_alone("pleviz.measure.jobs:save_reference", job, self.options.row_timeout)

    def _compiled(self, rows: list[Row], checkpoints: Mapping[str, str]) -> None:
        """All rows load and compile at the same time; then each decodes alone, in order."""
        target, seconds = "pleviz.measure.jobs:measure_compiled", self.options.row_timeout
        workers: dict[Row, Worker] = {}
        reference: dict[tuple[str, str], dict[int, Any]] = {}
        try:
            for row in rows:
                workers[row] = Worker(target, self._job(row, checkpoints), seconds)
            for worker in workers.values():
                worker.until_ready()
            for row, worker in workers.items():
                self.advance(str(row))
                outcome = worker.result()
                if outcome.status == "ok":
                    tokens = outcome.value["tokens"]
                    if row.home == "gpu":
                        reference[row.model, row.precision] = tokens
                    _compare_tokens(outcome, reference.get((row.model, row.precision)))
                self._add(row, outcome)
        finally:
            for worker in workers.values():
                worker.kill()

    def _job(
        self, row: Row, checkpoints: Mapping[str, str], reference: str | None = None
    ) -> RowJob:
        return RowJob(row, checkpoints[row.model], self.machine.device, self.options, reference)

    def _add(self, row: Row, outcome: Outcome) -> None:
        """Put a finished row into the record, in place of a failed one, and write the file."""
        stored: dict[str, Any] = {**row.fields(), "status": outcome.status}
        if outcome.reason is not None:
            stored["reason"] = without_paths(outcome.reason)
        stored |= outcome.partial
        stored = rounded(stored)
        stored["link_bytes_per_s"] = self.machine.link_bytes_per_s
        stored["measured"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        others = [old for old in self.record.rows if row_of(old) != row]
        hardware = dict(self.record.hardware)
        hardware["ram_bytes"] = max(hardware["ram_bytes"], ram_bytes())
        self.record = replace(self.record, hardware=hardware, rows=with_ratios((*others, stored)))
        write_record(self.out, self.record)
        if self.on_row is not None:
            self.on_row(self.record.rows[-1])

    # -- what rows need --------------------------------------------------------------------------

    def _inspect(self) -> Machine:
        outcome = run_alone("pleviz.measure.machine:inspect_machine", self.options.device, 300)
        if outcome.status != "ok":
            raise MeasureError(f"cannot use device {self.options.device!r}: {outcome.reason}")
        return outcome.value

    def _new_record(self) -> Record:
        return new_record(
            self.options.kind,
            command=self.options.command(),
            hardware=self.machine.hardware,
            versions=self.machine.versions,
            arguments=self.options.shared(self.machine.device.partition(":")[0]),
            method=method_notes(self.options),
            link_bytes_per_s=self.machine.link_bytes_per_s,
        )

    def _models(self) -> tuple[str, ...]:
        if self.options.checkpoint is None:
            return self.options.models
        name = _name_of_checkpoint(self.options.checkpoint)
        if self.options.models and self.options.models != (name,):
            raise MeasureError(f"the checkpoint is {name}, not {self.options.models[0]}")
        return (name,)

    @contextlib.contextmanager
    def _checkpoints(self, rows: list[Row]) -> Iterator[dict[str, str]]:
        """Folder of each model's checkpoint: the given one, or one made of random weights.

        Where one cannot be made, the model is left out and its rows are recorded as failed.
        """
        models = list(dict.fromkeys(row.model for row in rows))
        if self.options.checkpoint is not None:
            yield dict.fromkeys(models, self.options.checkpoint)
            return
        root = self.keep or self.folder
        root.mkdir(parents=True, exist_ok=True)
        folders = {model: root / f"{model}-{self.options.scale}" for model in models}
        made = {}
        for model, folder in folders.items():
            self.advance(f"{model}: making a checkpoint", started=0)
            outcome = self._make_checkpoint(model, folder)
            if outcome.status == "ok":
                made[model] = str(folder)
                continue
            reason = f"no checkpoint could be made: {outcome.reason}"
            for row in rows:
                if row.model == model:
                    self.advance(str(row))
                    self._add(row, Outcome("failed", reason=reason))
        yield made
        if self.keep is None:
            for folder in folders.values():
                shutil.rmtree(folder, ignore_errors=True)

    def _make_checkpoint(self, model: str, folder: Path) -> Outcome:
        if (folder / _COMPLETE).exists():
            return Outcome("ok")
        shutil.rmtree(folder, ignore_errors=True)  # half of an earlier one
        needed, free = 2 * SPECS[model].parameters(), shutil.disk_usage(folder.parent).free
        if self.options.scale == "real" and needed > free:
            return Outcome(
                "failed",
                reason=f"it takes {fmt_bytes(needed)} and the disk has {fmt_bytes(free)} free. Set "
                "TMPDIR, or --keep, to a folder on a larger disk",
            )
        job = BuildJob(model, self.options.scale, self.machine.device, str(folder))
        outcome = run_alone("pleviz.measure.jobs:build_checkpoint", job, self.options.row_timeout)
        if outcome.status == "ok":
            (folder / _COMPLETE).touch()
        return outcome


def rounded(value: Any) -> Any:
    """Floats to six significant digits: no clock is better than that."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def _compare_tokens(outcome: Outcome, reference: dict[int, Any] | None) -> None:
    """Say in each batch size's entry whether the compiled gpu row chose the same tokens."""
    tokens = outcome.value["tokens"]
    for entry in outcome.partial.get("decode", ()):
        if reference is not None:
            entry["greedy_equal_to_gpu"] = tokens[entry["batch"]] == reference[entry["batch"]]
            entry["greedy_tokens"] = len(tokens[entry["batch"]][0])


def _continued(old: Record, new: Record) -> Record:
    """The record on disk, to which this run adds."""
    commands = old.command.split("\n")
    if new.command not in commands:
        commands.append(new.command)
    return replace(old, command="\n".join(commands), method={**old.method, **new.method})


def _refuse_other_conditions(old: Record, new: Record, path: Path) -> None:
    """Rows under one head must be comparable, and the head must be true of all of them."""
    differences = [
        f"{what}: {a!r} there, {b!r} now"
        for what, a, b in (
            ("kind", old.kind, new.kind),
            ("gpu", old.hardware.get("gpu"), new.hardware.get("gpu")),
            ("driver", old.hardware.get("driver"), new.hardware.get("driver")),
            ("commit", (old.commit, old.dirty), (new.commit, new.dirty)),
            *(
                (name, old.versions.get(name), new.versions.get(name))
                for name in {**old.versions, **new.versions}
            ),
            *(
                (name, old.arguments.get(name), new.arguments.get(name))
                for name in {**old.arguments, **new.arguments}
            ),
        )
        if a != b
    ]
    if differences:
        raise MeasureError(
            f"{path.name} was measured under other conditions ({'; '.join(differences)}). "
            "Write to another file with --out, or delete it to measure anew."
        )


def _name_of_checkpoint(checkpoint: str) -> str:
    """The model's name if it is a known one, else its type: never the checkpoint's path."""
    from transformers import AutoConfig

    from pleviz.specs import spec_of

    try:
        config = AutoConfig.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        raise MeasureError(f"cannot read the checkpoint {checkpoint}: {error}") from None
    name = spec_of(config).name
    return name if name in SPECS else config.model_type


class _Advance(Protocol):
    def __call__(self, what: str, started: int = 1) -> None: ...


@contextlib.contextmanager
def _progress(rows: int) -> Iterator[_Advance]:
    """A bar that says what runs now, on a terminal or in a notebook. Off with PLEVIZ_PROGRESS=0."""
    from tqdm.auto import tqdm

    shown = sys.stderr.isatty() or "ipykernel" in sys.modules
    off = os.environ.get("PLEVIZ_PROGRESS") == "0" or not shown
    begun = 0
    with tqdm(total=rows, desc="rows", unit="row", disable=off, leave=False) as bar:

        def advance(what: str, started: int = 1) -> None:
            nonlocal begun
            bar.update(begun - bar.n)  # those begun before this one are finished
            begun += started
            bar.set_postfix_str(what)

        yield advance
