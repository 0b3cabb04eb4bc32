"""pleviz: see, measure and move Per-Layer Embeddings (PLE) in Gemma 3n and Gemma 4.

Everything a user needs is a name on this module. Names are loaded on first use, so that
``import pleviz`` itself stays cheap (no torch, no transformers).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> module that defines it
_EXPORTS = {
    "SPECS": "pleviz.specs",
    "Spec": "pleviz.specs",
    "spec_of": "pleviz.specs",
    "build": "pleviz.specs",
    "budget": "pleviz.arithmetic",
    "Budget": "pleviz.arithmetic",
    "find_table": "pleviz.table",
    "Table": "pleviz.table",
    "NoTableError": "pleviz.specs",
    "offload": "pleviz.homes",
    "restore": "pleviz.homes",
    "home_of": "pleviz.homes",
    "load": "pleviz.homes.loading",
    "Offload": "pleviz.homes",
    "MemoryProbe": "pleviz.memory",
    "diff": "pleviz.parity",
    "Record": "pleviz.records",
    "load_records": "pleviz.records",
    "check": "pleviz.exercises",
    "quiet": "pleviz.notebook",
    "show": "pleviz.notebook",
    "fmt_bytes": "pleviz.format",
}

__all__ = ["__version__", *sorted(_EXPORTS)]

if TYPE_CHECKING:  # what the lazy names are, for editors and type checkers
    from pleviz.arithmetic import Budget, budget
    from pleviz.exercises import check
    from pleviz.format import fmt_bytes
    from pleviz.homes import Offload, home_of, offload, restore
    from pleviz.homes.loading import load
    from pleviz.memory import MemoryProbe
    from pleviz.notebook import quiet, show
    from pleviz.parity import diff
    from pleviz.records import Record, load_records
    from pleviz.specs import SPECS, NoTableError, Spec, build, spec_of
    from pleviz.table import Table, find_table


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'pleviz' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # next time it is an ordinary attribute
    return value


def __dir__() -> list[str]:
    return __all__
