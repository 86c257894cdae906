"""code: the share of the row's tests that the program in an answer passes, each run in a sandbox.

The program is the answer's last block between ```, or all of it. The row's "tests" is a list, or one of

    "assert add(1, 2) == 3"                     Python that uses the program; passed if nothing is raised
    {"input": "1 2\\n", "output": "3"}           the program as a script: what it prints for this input

next: post/rewards/sandbox.py
"""

from __future__ import annotations

import re
import time
from typing import Any

from tmoe.post.rewards import sandbox
from tmoe.post.rewards.sample import RewardSample

BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def code(sample: RewardSample, seconds: float) -> float:
    """A test that has not ended after the answer's `seconds` is not passed, nor are those after it."""
    tests = tests_of(sample)
    program = program_of(sample.answer)
    deadline = time.monotonic() + seconds
    passed = 0
    for test in tests:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        passed += passes(program, test, left)
    return passed / len(tests)


def program_of(answer: str) -> str:
    blocks = BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def tests_of(sample: RewardSample) -> list[Any]:
    """The row's tests. ValueError for what cannot be one."""
    told = sample.row.get("tests")
    tests = told if isinstance(told, list) else [told]
    fit = [
        isinstance(test, str) or (isinstance(test, dict) and {"input", "output"} <= test.keys())
        for test in tests
    ]
    if not tests or not all(fit):
        raise ValueError(
            'the row\'s "tests" must be Python text, an object with input and output, or a list of these; '
            f"it is {str(told)[:80]}"
        )
    return tests


def passes(program: str, test: str | dict[str, Any], seconds: float) -> bool:
    if isinstance(test, str):
        return sandbox.passes(program, test, seconds)
    done = sandbox.script(program, str(test["input"]), seconds)
    return done.whole and _lines(done.said) == _lines(str(test["output"]))


def _lines(text: str) -> list[str]:
    """White space at the ends of lines, and empty lines at the end, are no difference."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
