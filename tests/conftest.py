"""In CI nothing is skipped: a test that lacks a tool fails. Workers that share the machine run torch with one thread each. Every
test starts with the same random numbers."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: threads of torch would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    import torch

    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI"):
        report.outcome, report.longrepr = "failed", f"skipped, which CI does not allow: {report.longrepr}"
    return report
