"""Runs a test in a different sandbox from the program that it judges; values of the program arrive as data.

The test's names are looked up in the test, then in Python, then in the program. A function of the program is
called in the program's sandbox; its result is compared in this one, by this Python's own `==`. The program
never has the test, nor the values that the test expects, so it cannot return them, and nothing that it does
to its own Python has an effect in this sandbox.

An object of a class that the program defines stays in the program's sandbox, and an `Away` represents it. For
two such objects, the program's class compares or adds them. An object and plain data are compared or added in
this sandbox, because the program would otherwise decide `f(2) == 3` and `abs(f(2) - 3)`. The object is first
converted to plain data. An object that is no instance of a plain type (int, list, ...) differs from all data.

next: post/rewards/code.py
"""

from __future__ import annotations

import ast
import builtins
import importlib
import operator
import os
from collections.abc import Callable
from typing import Any

from tmoe.post.rewards.wire import Gone, Wire

PASSED = 43  # exit code
TEST = "test"  # module of a test's classes
MODULES = frozenset(
    (
        *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq"),
        *("itertools", "json", "math", "numpy", "operator", "random", "re", "statistics", "string"),
    )
)  # modules that a test may use without an import, as many published tests do
SHORT = dict(np="numpy")
SAID = "__name__", "__dict__"  # the only names with two underscores that are asked for; others have effects
BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and_", "or_", "xor", "lshift", "rshift"),
)
ORDERS = dict(eq=False, ne=True, lt=NotImplemented, le=NotImplemented, gt=NotImplemented, ge=NotImplemented)
OF_ONE = (
    *("len", "iter", "next", "str", "repr", "bool", "int", "float", "complex", "index", "round"),
    *("abs", "neg", "pos", "invert", "getitem", "setitem", "delitem"),
)


class Away:
    """Represents an object that is in the program's sandbox."""

    __slots__ = ("_number",)
    wire: Wire

    def __init__(self, number: int) -> None:
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in SAID:
            raise AttributeError(name)
        return self.wire.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.wire.ask("setattr", self, name, value)

    def __call__(self, *words: Any, **named: Any) -> Any:
        """Calls the object. Replaces a StopIteration of the program, which would end the test's own loop."""
        try:
            return self.wire.ask("call", self, words, named)
        except StopIteration as error:
            raise RuntimeError("the program raised StopIteration") from error

    def __hash__(self) -> int:
        return hash(("away", self._number))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Away) and self.wire.ask("isinstance", value, self) is True

    def __contains__(self, value: Any) -> bool:
        plain = self.wire.ask("view", self)
        return any(value is other or value == other for other in (plain[0] if plain else self))

    def __enter__(self) -> Any:
        return self.wire.ask("call", self.wire.ask("getattr", self, "__enter__"), (), {})

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> Any:
        return self.wire.ask("call", self.wire.ask("getattr", self, "__exit__"), (kind, None, None), {})

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def _asked(op: str) -> Callable[..., Any]:
    def method(self: Away, *more: Any) -> Any:
        return self.wire.ask(op, self, *more)

    return method


def _both(op: str, swapped: bool = False, missing: Any = NotImplemented) -> Callable[..., Any]:
    """A binary operation: the program does it for two of its objects, this sandbox for an object and data."""

    def method(self: Away, other: Any) -> Any:
        if isinstance(other, Away):
            return self.wire.ask(op, *((other, self) if swapped else (self, other)))
        plain = self.wire.ask("view", self)
        if not plain:
            return missing
        return getattr(operator, op)(*((other, plain[0]) if swapped else (plain[0], other)))

    return method


for _op in OF_ONE:
    setattr(Away, f"__{_op}__", _asked(_op))
for _op in BINARY:
    setattr(Away, f"__{_op.strip('_')}__", _both(_op))
    setattr(Away, f"__r{_op.strip('_')}__", _both(_op, swapped=True))
for _op, _missing in ORDERS.items():
    setattr(Away, f"__{_op}__", _both(_op, missing=_missing))


def of_test(value: Any) -> bool:
    """Whether this is an object of a class that the test defines."""
    return type(value).__module__ == TEST


class OfJudge(Wire):
    """The judge's side. The program may call functions that the test has passed to it.

    It may also read and set attributes of objects of the test's classes, if the name begins with no
    underscore. Everything else is refused.
    """

    def __init__(self, link: int) -> None:
        self.away: dict[int, Away] = {}
        super().__init__(link, self.stand_in, lambda value: value._number if type(value) is Away else None)

    def stand_in(self, number: int) -> Away:
        return self.away.setdefault(number, Away(number))

    def _write_other(self, value: Any) -> Any:
        written = super()._write_other(value)
        if "mine" in written and not (callable(value) or of_test(value)):
            raise TypeError(f"the program cannot be given a {type(value).__name__} of the test")
        return written

    def serve(self, op: str, given: list[Any]) -> Any:
        target, *rest = given or [None]
        if not any(target is other for other in self.own):
            raise Gone
        if op == "call" and len(rest) == 2:
            return target(*rest[0], **rest[1])
        if op not in ("getattr", "setattr") or len(rest) != 1 + (op == "setattr"):
            raise Gone
        name = str(rest[0])
        if name.startswith("_") or not of_test(target):
            raise AttributeError(name)
        before = getattr(target, name, None) if op == "setattr" else None
        if callable(before) and type(before) is not Away:  # the verdict of the test may depend on it
            raise AttributeError(name)
        return getattr(target, name) if op == "getattr" else setattr(target, name, rest[1])


class Names(dict):
    """The globals of a test. Other names are looked up in Python, in MODULES, then in the program."""

    def __init__(self, wire: Wire, test: str) -> None:
        super().__init__(__name__=TEST)
        self.wire = wire
        nodes = [node.func for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
        self.called = {node.id for node in nodes if isinstance(node, ast.Name)}

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        module = SHORT.get(name, name)
        if module in MODULES and name not in self.called:
            return importlib.import_module(module)
        return self.wire.ask("name", name)


def main(job: dict[str, Any], link: int) -> None:
    """Exits with PASSED if the program was loaded and the test reached its end, else with 1."""
    code = compile(job["test"], "test.py", "exec")
    wire = Away.wire = OfJudge(link)
    try:
        wire.take(wire.receive(), [])
        exec(code, Names(wire, job["test"]))
    except BaseException:
        os._exit(1)
    os._exit(PASSED)
