"""What every test needs: no downloads, one thread, and an honest answer where there is no GPU."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports transformers
os.environ.setdefault("PLEVIZ_PROGRESS", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Generator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(1)  # tests run side by side, and tiny tensors gain nothing from threads


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With PLEVIZ_REQUIRE_GPU=1 a skipped GPU test counts as failed: a GPU run proves what ran."""
    report = yield
    required = os.environ.get("PLEVIZ_REQUIRE_GPU") == "1"
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if required and skipped and item.get_closest_marker("gpu"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"PLEVIZ_REQUIRE_GPU=1, but this GPU test was skipped: {reason}"
    return report
