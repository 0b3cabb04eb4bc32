"""How nbval compares the notebooks of this repository (tests/conftest.py serves the other tests)."""

from __future__ import annotations

from typing import Any

# A figure holds thousands of floats whose last digits differ between processors, and the HTML of a
# result says what its text says. The text of every output, stdout and stderr, is compared exactly.
NOT_COMPARED = ("application/vnd.plotly.v1+json", "text/html", "image/svg+xml")


def pytest_collectstart(collector: Any) -> None:
    """Extend nbval's list of output types that it does not compare."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += NOT_COMPARED
