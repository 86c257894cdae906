"""Plugins of pytest in CI: they record the files that each test file opens, and which test files were green.

PYTEST_DONT_REWRITE, because green.py imports this file before pytest does.

next: green.py
"""

import contextlib
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INSIDE = "runs inside "  # skip reason of a test that another test of the suite runs in a separate process

# ---- in the workers, by `-p seen` ----

running = ""  # the test file that is being imported, or whose test is running
opened: dict[str, set[str]] = defaultdict(set)


def see(event: str, values: tuple) -> None:
    """The audit hook. A compiled file counts as its source; a listed folder gets a slash at its end."""
    if running and event in ("open", "os.listdir", "os.scandir") and isinstance(values[0], str):
        path = os.path.relpath(values[0], ROOT)
        if "__pycache__" in path:
            path = f"{path.partition('__pycache__')[0]}{os.path.basename(path).partition('.')[0]}.py"
        if not path.startswith((".", "runs/")):  # not outside, hidden, or written by `make train`
            opened[running].add(path if event == "open" else f"{path}/")


@contextlib.contextmanager
def noting(nodeid: str) -> Iterator[None]:
    global running
    running, before = nodeid.partition("::")[0], running
    try:
        yield
    finally:
        running = before


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        sys.addaudithook(see)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    with noting(collector.nodeid if isinstance(collector, pytest.Module) else ""):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with noting(item.nodeid):
        return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["opened"] = {test: sorted(paths) for test, paths in opened.items()}


# ---- in the first process ----


class Recorder:
    """Records which test files were green, the seconds that they took, and the files that they opened."""

    def __init__(self) -> None:
        self.left: Counter[str] = Counter()  # by file: tests that have not passed yet
        self.seconds: dict[str, float] = defaultdict(float)
        self.opened: dict[str, set[str]] = defaultdict(set)

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.left = Counter(nodeid.partition("::")[0] for nodeid in ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("::")[0]
        self.seconds[test] += report.duration
        inside = report.skipped and INSIDE in str(report.longrepr)
        self.left[test] -= inside or (report.when == "call" and report.passed)
        self.left[test] += 10**6 * (not inside and not report.passed)

    def pytest_testnodedown(self, node: Any) -> None:
        for test, paths in getattr(node, "workeroutput", {}).get("opened", {}).items():
            self.opened[test] |= set(paths)

    def green(self) -> list[str]:
        return [test for test, left in self.left.items() if not left]
