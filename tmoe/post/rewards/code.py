"""code: the share of the row's tests that the program in an answer passes, each run in a sandbox.

The program is the answer's last block between ``` that is marked as python; without such a block the last
block; without any block the whole answer. The row's "tests" is a list, or one of

    "assert add(1, 2) == 3"                     Python that uses the program; passed if it raises nothing
    {"input": "1 2\\n", "output": "3"}           the program as a script: its output for this input

Such a list or object may be JSON text.

next: post/rewards/sandbox.py
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import time
from typing import Any

from tmoe.post.rewards import sandbox
from tmoe.post.rewards.reward_sample import RewardSample

BLOCK = re.compile(r"^[ \t]*```[ \t]*([^\n`]*)\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
PYTHON = "python", "python3", "py"


DEFINED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda  # code that runs only if called


def code(sample: RewardSample, seconds: float) -> float:
    """The reward. seconds: for all tests of an answer; tests that have not ended by then are not passed."""
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
    """The last block marked as Python, else the last block, else the whole answer."""
    blocks = [(language.strip().lower(), text) for language, text in BLOCK.findall(answer)]
    python = [text for language, text in blocks if language in PYTHON]
    return (python or [text for _, text in blocks] or [answer])[-1]


def tests_of(sample: RewardSample) -> list[Any]:
    """The row's tests; JSON text is decoded. ValueError for something that is no test, or cannot fail."""
    field = sample.row.get("tests")
    if isinstance(field, str):
        with contextlib.suppress(ValueError, RecursionError):
            read = json.loads(field)
            field = read if isinstance(read, list | dict) else field
    tests = field if isinstance(field, list) else [field]
    if not tests or not all(_may_judge(test) for test in tests):
        raise ValueError(
            'the row\'s "tests" must be Python text, an object with input and output as text, or a list of '
            f"these; it is {str(field)[:80]}"
        )
    for test in tests:
        if isinstance(test, str):
            _refuse_what_cannot_fail(test)
    return tests


def _may_judge(test: Any) -> bool:
    """Whether a test is of a supported kind: Python text, or input and output of a script as text or numbers.

    Tests that call a function by name are not supported.
    """
    if not isinstance(test, dict):
        return isinstance(test, str)
    kind = test.get("type") or test.get("testtype") or ""
    called = test.get("fn_name") or test.get("func_name") or "func" in str(kind)
    return not called and all(type(test.get(end)) in (str, int, float) for end in ("input", "output"))


def _refuse_what_cannot_fail(test: str) -> None:
    """ValueError for text that is not Python (no program passes) or checks nothing (every program passes)."""
    try:
        nodes: list[ast.AST] = list(ast.parse(test).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f'the row\'s "tests" has text that is no Python: {error}; it is {test[:80]!r}'
        ) from error
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Assert | ast.Call | ast.Raise):
            return
        if not isinstance(node, DEFINED) and not (isinstance(node, ast.If) and _asks_for_main(node)):
            nodes += ast.iter_child_nodes(node)
    raise ValueError(
        'the row\'s "tests" has text that asserts nothing and calls nothing, so each program passes it; '
        f"call the functions that the text defines, as check(NAME), not in `if __name__`; it is {test[:80]!r}"
    )


def _asks_for_main(node: ast.If) -> bool:
    return any(isinstance(child, ast.Name) and child.id == "__name__" for child in ast.walk(node.test))


def passes(program: str, test: str | dict[str, Any], seconds: float) -> bool:
    if isinstance(test, str):
        return sandbox.passes(program, test, seconds)
    done = sandbox.script(program, str(test["input"]), seconds)
    return done.whole and _lines(done.said) == _lines(str(test["output"]))


def _lines(text: str) -> list[str]:
    """The lines of an output, without white space at the ends of lines and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
