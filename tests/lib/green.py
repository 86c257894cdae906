"""Runs both tiers in one pytest call, for the test files whose inputs changed since their last green run.

    python tests/lib/green.py           # those files, files without a record, and CORE; --all: every file
    python tests/lib/green.py --list    # prints the files that would run, in order, and runs none

The inputs of a test file are the files that inputs.py finds, the files that its tests opened in their last
green run, and the platform: Python, the installed packages, constraints.txt. A file gets a record when its
session ended, all its tests passed, none was skipped, and no input changed meanwhile. The record of a file
that was never green holds only its seconds.

next: inputs.py, seen.py, warm.py
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import seen
import warm
from inputs import Inputs, outline

ROOT = Path(__file__).parents[2]
CORE = "model/test_model moe/test_router parallel/test_grad_norm optim/test_optim checkpoint/test_checkpoint"
CORE_TESTS = tuple(
    f"tests/{name}.py" for name in (*CORE.split(), "test_green")
)  # some 220 tests, in every run
# Whole files in the given order, longest first: at the end a worker is idle only as long as a short file
# takes. Three workers for two cores, because some tests wait for a time limit, a rank or a disk: with two
# workers a fifth of both cores was idle.
HOW = "--numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 10".split()
SLOW_S, FAST_S = 4.0, 0.3  # estimate for a slow and a fast test of a file that no run has measured
LONG_S = 100.0  # estimate for a file of LONG, each of which takes 90 s or more
LONG = "axes_layouts ops_kernels ahead faults_ranks faults completes_python readers multinode lora_layouts"
LONG += " ops_interpreter tutel_golden"
LONG_FILES = tuple(f"/test_{name}.py" for name in LONG.split())


class Green(NamedTuple):
    """The last green run of a test file: hash of its inputs, its seconds, and the files its tests opened.

    The hash is empty if no run was green; the seconds are then those of the first run.
    """

    key: str
    seconds: float
    opened: list[str]


class Selection:
    """The test files of a checkout, their inputs, and the record of their last green runs."""

    def __init__(self, root: Path, record: Path, runs_on: str) -> None:
        self.root, self.record, self.runs_on = root, record, runs_on
        self.green = read(record)
        self.tests = sorted(p.relative_to(root).as_posix() for p in (root / "tests").rglob("test_*.py"))
        inputs = Inputs(root)
        self.inputs = {test: inputs.of(test) for test in self.tests}
        self.kernels = {test for test in self.tests if inputs.runs_kernels(self.inputs[test])}
        self.keys = {test: self.key(test, self.opened(test)) for test in self.tests}

    def opened(self, test: str) -> list[str]:
        return self.green[test].opened if test in self.green else []

    def key(self, test: str, opened: list[str]) -> str:
        """The hash of a test file's current inputs."""
        whole = test in self.kernels
        paths = sorted({*self.inputs[test], *opened})
        parts = [f"{path} {contents(self.root / path, path in opened or whole)}" for path in paths]
        return hashlib.sha256("\n".join([self.runs_on, *parts]).encode()).hexdigest()

    def chosen(self, everything: bool = False) -> list[str]:
        """The files to run, longest first."""
        known = {test: green.key for test, green in self.green.items()}
        changed = {test for test in self.tests if known.get(test) != self.keys[test]}
        chosen = [test for test in self.tests if everything or test in changed or test in CORE_TESTS]
        return sorted(chosen, key=self.seconds, reverse=True)

    def seconds(self, test: str) -> float:
        if test in self.green:
            return self.green[test].seconds
        text = (self.root / test).read_text()
        guess = SLOW_S * text.count("mark.slow") + FAST_S * text.count("def test_")
        return max(guess, LONG_S) if test.endswith(LONG_FILES) else guess

    def keep(self, seconds: dict[str, float], green: Iterable[str], opened: dict[str, set[str]]) -> None:
        """Records green files whose inputs are the same as when this selection was made.

        seconds: those of all files that ran; they order the files of the next run.
        """
        inputs = Inputs(self.root)
        greens = read(self.record)  # another run may have written it meanwhile
        for test in seconds:
            greens.setdefault(test, Green("", round(seconds[test], 1), []))
        for test in green:
            same = inputs.of(test) == self.inputs[test]
            if same and self.key(test, self.opened(test)) == self.keys[test]:
                more = sorted(opened.get(test, set()) - self.inputs[test])
                greens[test] = Green(self.key(test, more), round(seconds[test], 1), more)
        partial = self.record.with_name(f"{self.record.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # without the record, the next run has more to do
            partial.write_text(
                json.dumps({test: green._asdict() for test, green in greens.items()}, indent=1)
            )
            partial.replace(self.record)


def read(record: Path) -> dict[str, Green]:
    """The records of a file; none if the file is absent or damaged."""
    try:
        return {test: Green(**fields) for test, fields in json.loads(record.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def contents(place: Path, whole: bool = True) -> str:
    """The hash of a file, or of the names in a folder. whole: with the bodies of Triton's functions."""
    if place.is_dir():
        data = "\n".join(sorted(name for name in os.listdir(place) if name != "__pycache__")).encode()
    else:
        data = place.read_bytes() if place.is_file() else b"absent"
        data = data if whole or "/tmoe/ops/" not in place.as_posix() else outline(data.decode()).encode()
    return hashlib.sha256(data).hexdigest()


def runs_on(root: Path) -> str:
    packages = sorted(f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions())
    return "\n".join([sys.version, platform.platform(), *packages, (root / "constraints.txt").read_text()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every file, whatever the record says")
    parser.add_argument("--list", action="store_true", help="print the files, run none")
    args = parser.parse_args()
    os.chdir(ROOT)
    with contextlib.nullcontext(warm.folder() or ROOT) if args.list else warm.kept() as folder:
        selection = Selection(ROOT, folder / "green.json", runs_on(ROOT))
        files = selection.chosen(everything=args.all)
        if args.list:
            return print("\n".join(files))
        print(
            f"{len(files)} of {len(selection.tests)} test files run; record: {selection.record}", flush=True
        )
        recorder = seen.Recorder()
        code = pytest.main(["-m", "not gpu", "-p", "seen", *HOW, *files], plugins=[recorder])
        if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # any other session was cut short
            selection.keep(recorder.seconds, recorder.green(), recorder.opened)
        if code != pytest.ExitCode.OK:
            raise SystemExit(int(code))


if __name__ == "__main__":
    main()
