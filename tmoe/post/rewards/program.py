"""Runs a program in its sandbox: as a script, or as a module from which a judge elsewhere requests values.

The program can change everything in this process, so nothing in it decides a verdict: all its messages count
as messages of the program.

next: post/rewards/judge.py
"""

from __future__ import annotations

import io
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, ItemsView, KeysView
from types import CodeType, ModuleType
from typing import Any

from tmoe.post.rewards.wire import Gone, Wire

BASES: tuple[Any, ...] = (
    *(bool, int, float, complex, bytes, bytearray),
    *(tuple, list, dict, set, frozenset, deque),
)
OPERATORS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and_", "or_", "xor", "lshift", "rshift", "getitem", "setitem", "delitem", "neg", "pos", "invert"),
    "index",
)


def view(value: Any) -> tuple[Any, ...]:
    """An instance of a program's own class as plain data: (data,), or () if it is an instance of none."""
    if isinstance(value, str):
        return (str.__str__(value),)  # a member of an Enum prints its name
    for kind in BASES:
        if isinstance(value, kind):
            return (kind(value),)
    if isinstance(value, KeysView | ItemsView):
        return (set(value),)
    return ()


OPS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in OPERATORS},
    **{
        function.__name__: function
        for function in (getattr, setattr, isinstance, len, iter, next, str, repr, bool, int)
    },
    **{function.__name__: function for function in (float, complex, round, abs, view)},
    "call": lambda function, words, named: function(*words, **named),
}


class JudgeObject:
    """Represents a function of the judge's test, or an object of its classes, that the program was given."""

    def __init__(self, wire: Wire, number: int) -> None:
        object.__setattr__(self, "_wire", wire)
        object.__setattr__(self, "_number", number)

    def __call__(self, *words: Any, **named: Any) -> Any:
        return self._wire.ask("call", self, words, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._wire.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._wire.ask("setattr", self, name, value)


class OfProgram(Wire):
    def __init__(self, link: int, code: CodeType, names: dict[str, Any]) -> None:
        self.given: dict[int, JudgeObject] = {}
        self.code, self.names = code, names
        self.screen = io.TextIOWrapper(io.BytesIO(), "utf-8", "replace", write_through=True)
        sys.stdout = self.screen
        super().__init__(
            link, self.stand_in, lambda value: value._number if type(value) is JudgeObject else None
        )

    def stand_in(self, number: int) -> JudgeObject:
        return self.given.setdefault(number, JudgeObject(self, number))

    def serve(self, op: str, given: list[Any]) -> Any:
        if op == "load":
            return exec(self.code, self.names)
        if op == "name":
            if given[0] not in self.names:
                raise NameError(f"name {given[0]!r} is not defined")
            return self.names[given[0]]
        return OPS[op](*given)

    def printed(self) -> str:
        memory = self.screen.buffer
        assert isinstance(memory, io.BytesIO)
        output = memory.getvalue()
        memory.seek(0)
        memory.truncate()
        return output.decode("utf-8", "replace")


def main(job: dict[str, Any], link: int) -> None:
    """Runs a script to its end, or answers the judge's requests to a module until the judge has ended."""
    name = "__main__" if link < 0 else "program"
    module = sys.modules[name] = ModuleType(name)
    if link < 0:
        exec(compile(job["program"], "program.py", "exec"), module.__dict__)
        return
    try:
        code = compile(job["program"], "program.py", "exec")
    except BaseException as error:  # not Python: the judge gets this error when the module is loaded
        code = compile(f"raise SyntaxError({str(error)!r})", "program.py", "exec")
    wire = OfProgram(link, code, module.__dict__)
    try:
        wire.answer(dict(ask="load"))
        while True:
            wire.answer(wire.receive())
    except Gone:
        os._exit(0)
