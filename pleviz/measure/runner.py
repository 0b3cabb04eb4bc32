"""Run functions in processes of their own, one CUDA context each, and survive what happens there."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import re
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

Emit = Callable[[str, Any], None]
"""``emit("partial", {...})`` sends what is known so far; ``emit("ready", None)`` asks for the turn."""
Turn = Callable[[], None]
"""Blocks until the parent gives the turn (or is gone)."""
Target = str
"""``"module:function"``; the process calls ``function(job, emit, turn)``. A name, so that the parent
need not import what the function needs."""


class UnavailableError(RuntimeError):
    """Raised by a target for what cannot exist here, which is no failure; the message says why."""


@dataclass
class Outcome:
    """How a process ended."""

    status: str
    """``"ok"``, ``"unavailable"`` or ``"failed"``."""
    value: Any = None
    """What the target returned."""
    reason: str | None = None
    """Why not ``"ok"``: the exception's text, the signal, or the time limit."""
    partial: dict[str, Any] = field(default_factory=dict)
    """What was known before it failed."""


class Worker:
    """One process that runs ``target(job, emit, turn)``.

    Args:
        target: the function's name.
        job: its first argument; pickled.
        seconds: the time limit, from now on until the process asks for its turn, and anew after.
    """

    def __init__(self, target: Target, job: Any, seconds: float) -> None:
        context = _context()
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_main, args=(child_end, target, job), daemon=True)
        self._process.start()
        child_end.close()  # so that the pipe ends when the process does
        self._partial: dict[str, Any] = {}
        self._outcome: Outcome | None = None

    def until_ready(self) -> bool:
        """Wait until the process asks for its turn. False: it ended before that."""
        return self._listen() == "ready"

    def result(self) -> Outcome:
        """Give the process its turn and wait for its end."""
        self._deadline = time.monotonic() + self._seconds
        with contextlib.suppress(OSError):  # it is gone already: its outcome says so
            self._pipe.send("go")
        while self._outcome is None:
            self._listen()
        return self._outcome

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()

    def _listen(self) -> str | None:
        """Read messages until the process is ready or its outcome is known."""
        while self._outcome is None:
            left = self._deadline - time.monotonic()
            if not wait([self._pipe, self._process.sentinel], timeout=max(left, 0)):
                self.kill()
                self._end("failed", reason=f"gave up after {self._seconds:g} s")
                break
            try:  # the pipe first: it may hold the last words of a process that has ended
                kind, value = self._pipe.recv()
            except (EOFError, OSError):
                self._process.join()
                self._end("failed", reason=_how_it_died(self._process.exitcode))
                break
            if kind == "partial":
                self._partial.update(value)
            elif kind == "ready":
                return "ready"
            elif kind == "ok":
                self._end("ok", value=value)
            else:
                self._end(kind, reason=value)
        return None

    def _end(self, status: str, *, value: Any = None, reason: str | None = None) -> None:
        self._outcome = Outcome(status, value, reason, self._partial)
        # ended or about to; a process that does not get out of the way would disturb the next row
        self._process.join(timeout=10)
        self.kill()


def run_alone(target: Target, job: Any, seconds: float) -> Outcome:
    """Run ``target`` in a process of its own and wait for it."""
    worker = Worker(target, job, seconds)
    try:
        return worker.result()
    finally:
        worker.kill()


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():  # Windows
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pleviz.measure.preload"])
    return context


def _main(pipe: Connection, target: Target, job: Any) -> None:
    """Body of the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it kills us
    warnings.simplefilter("ignore")

    def emit(kind: str, value: Any) -> None:
        pipe.send((kind, value))

    def turn() -> None:
        pipe.recv()

    try:
        _quiet_transformers()
        module, _, function = target.partition(":")
        message = ("ok", getattr(importlib.import_module(module), function)(job, emit, turn))
    except UnavailableError as reason:
        message = ("unavailable", str(reason))
    except EOFError:  # the parent is gone
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the row's result
        message = ("failed", f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError):
        pipe.send(message)


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _how_it_died(code: int | None) -> str:
    if code is None or code >= 0:
        return f"the process ended by itself, with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"the process was ended by {name}{hint}"


def without_paths(text: str, limit: int = 600) -> str:
    """An error's text as it may stand in a record: shortened, and of a path only the file's name."""
    text = re.sub(r"(?<![\w.])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@-]+)+[/\\]([\w.+@-]+)", r"…/\1", text)
    return text if len(text) <= limit else f"{text[:limit]} …"
