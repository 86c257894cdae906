"""The messages between a judge and the program that it judges: values as data, over one socket.

Each side runs this file in its own sandbox (sandbox.py). A message is four bytes of length and JSON with a
fixed set of kinds. A message holds no code, and creates no class of the other side: an object that is not
data stays on its side and is named by a number. If a call changes a container that was sent with the request,
the container is changed on the sending side as well, as in Python.

next: post/rewards/program.py, post/rewards/judge.py
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MOST_BYTES = 2**24  # largest size of a message
HELD = (
    list,
    set,
    bytearray,
    deque,
    dict,
    Counter,
    OrderedDict,
    defaultdict,
)  # containers that a call may change
PAIRS = dict, Counter, OrderedDict, defaultdict
AS_TEXT = Fraction, Decimal
AS_NUMBERS: dict[str, tuple[type, Callable[[Any], Iterable[int]]]] = dict(
    range=(range, lambda v: (v.start, v.stop, v.step)),
    timedelta=(timedelta, lambda v: (v.days, v.seconds, v.microseconds)),
    date=(date, lambda v: (v.year, v.month, v.day)),
    datetime=(datetime, lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond)),
)
NUMBERS = bool, int, float, complex
TYPES = *NUMBERS, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, object, type(None)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*HELD, *AS_TEXT, *TYPES)}
ARRAYS = "biufc"  # kinds of numpy's dtypes that are numbers


class Gone(BaseException):
    """The other side has ended, or has sent something that is not in this protocol."""


def exception_of(names: list[str], known: dict[str, type[BaseException]]) -> type[BaseException]:
    """The class of an exception, from its own name and the names of its bases in order.

    A built-in exception gives that class. Other classes are created, derived from the first built-in base,
    and kept in `known`.
    """
    unknown: list[str] = []
    base: Any = Exception
    for name in names:
        builtin = getattr(builtins, name, None)
        if isinstance(builtin, type) and issubclass(builtin, BaseException):
            base = builtin
            break
        unknown.append(name)
    for name in reversed(unknown):
        base = known.setdefault(name, type(name, (base,), {}))
    return base


def names_of(kind: type) -> list[str]:
    return [base.__name__ for base in kind.__mro__]


class Wire:
    """One side of the socket.

    Args:
        link: the socket's descriptor.
        far: makes the object that represents an object of the other side, from its number.
        number_of: the number of the other side's object that a value represents; None for other values.
    """

    def __init__(self, link: int, far: Callable[[int], Any], number_of: Callable[[Any], int | None]) -> None:
        self.link, self.far, self.number_of = link, far, number_of
        self.own: list[Any] = []  # objects that the other side knows by number
        self.numbers: dict[int, int] = {}
        self.known: dict[str, type[BaseException]] = {}

    # ---- messages ----

    def send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        if len(text) > MOST_BYTES:
            raise ValueError(f"a value of {len(text)} bytes; valid: up to {MOST_BYTES}")
        frame = memoryview(len(text).to_bytes(4, "big") + text)
        while frame:
            try:
                frame = frame[os.write(self.link, frame) :]
            except OSError as error:
                raise Gone from error

    def receive(self) -> dict[str, Any]:
        length = int.from_bytes(self._exactly(4), "big")
        if length > MOST_BYTES:
            raise Gone
        try:
            message = json.loads(self._exactly(length))
        except (ValueError, RecursionError) as error:
            raise Gone from error
        if not isinstance(message, dict):
            raise Gone
        return message

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                some = os.read(self.link, length - len(data))
            except OSError as error:
                raise Gone from error
            if not some:
                raise Gone
            data += some
        return bytes(data)

    # ---- values ----

    def write(self, value: Any, table: list[Any], places: dict[int, int]) -> Any:
        """A value as JSON. `table`: the containers of this exchange. `places`: their indices, by id."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -(2**63) < value < 2**63 else {"int": hex(value)}
        if kind in HELD:
            return self._write_held(value, table, places)
        if kind in (tuple, frozenset):
            return {kind.__name__: [self.write(item, table, places) for item in value]}
        if kind is bytes:
            return {"bytes": value.decode("latin1")}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is slice:
            ends = value.start, value.stop, value.step
            return {"slice": [self.write(item, table, places) for item in ends]}
        if kind in AS_TEXT:
            return {kind.__name__: str(value)}
        for name, (number_kind, numbers) in AS_NUMBERS.items():
            if kind is number_kind and getattr(value, "tzinfo", None) is None:
                return {name: list(numbers(value))}
        return self._write_other(value)

    def _write_held(self, value: Any, table: list[Any], places: dict[int, int]) -> Any:
        if (n := places.get(id(value))) is not None:
            return {"held": n}
        places[id(value)] = len(table)
        table.append(value)
        return {type(value).__name__: self.contents(value, table, places)}

    def contents(self, value: Any, table: list[Any], places: dict[int, int]) -> Any:
        """The contents of a container, as JSON."""
        if isinstance(value, bytearray):
            return value.decode("latin1")
        items = [item for pair in value.items() for item in pair] if isinstance(value, dict) else list(value)
        return [self.write(item, table, places) for item in items]

    def _write_other(self, value: Any) -> Any:
        if isinstance(value, type):
            if issubclass(value, BaseException):
                return {"exception": names_of(value)}
            if value in TYPES:
                return {"type": value.__name__}
        numpy = sys.modules.get("numpy")
        arrays = () if numpy is None else (numpy.ndarray, numpy.generic)
        if isinstance(value, arrays) and value.dtype.kind in ARRAYS:
            return {"array": [value.dtype.str, list(value.shape), value.tobytes().decode("latin1")]}
        if (n := self.number_of(value)) is not None:
            return {"yours": n}
        if (n := self.numbers.get(id(value))) is None:
            n = self.numbers[id(value)] = len(self.own)
            self.own.append(value)
        return {"mine": n}

    def read(self, told: Any, table: list[Any]) -> Any:
        """A value from JSON. Raises Gone for anything that `write` does not make."""
        if told is None or isinstance(told, bool | int | float | str):
            return told
        try:
            ((name, what),) = told.items()
            return self._read(name, what, table)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise Gone from error

    def _read(self, name: str, what: Any, table: list[Any]) -> Any:
        if name == "int":
            return int(what, 16)
        if name == "held":
            return table[what]
        if name in ("tuple", "frozenset"):
            return KINDS[name](self.read(item, table) for item in what)
        if name == "bytes":
            return what.encode("latin1")
        if name == "complex":
            return complex(*map(float, what))
        if name == "slice":
            return slice(*(self.read(item, table) for item in what))
        if name in AS_NUMBERS:
            return AS_NUMBERS[name][0](*map(int, what))
        if name == "exception":
            return exception_of([str(item) for item in what], self.known)
        if name == "array":
            return self._read_array(*what)
        if name == "type":
            return {kind.__name__: kind for kind in TYPES}[what]
        if name == "yours":
            return self.own[what]
        if name == "mine":
            return self.far(int(what))
        kind = KINDS[name]
        if kind in AS_TEXT:
            return kind(what)
        if kind not in HELD:
            raise KeyError(name)
        container: Any = kind()
        table.append(container)
        self.fill(container, what, table)
        return container

    @staticmethod
    def _read_array(kind: str, shape: list[int], text: str) -> Any:
        import numpy

        dtype = numpy.dtype(kind)
        if dtype.kind not in ARRAYS:
            raise ValueError(kind)
        array = numpy.empty(0, dtype) if 0 in shape else numpy.frombuffer(text.encode("latin1"), dtype)
        array = array.reshape(shape).copy()
        return array if shape else array[()]

    def fill(self, held: Any, what: Any, table: list[Any]) -> None:
        """Replaces the contents of a container by those in JSON."""
        if isinstance(held, bytearray):
            held[:] = what.encode("latin1")
            return
        items = [self.read(item, table) for item in what]
        held.clear()
        if isinstance(held, PAIRS):
            for key, value in zip(items[::2], items[1::2], strict=True):
                held[key] = value
        else:
            (held.update if isinstance(held, set) else held.extend)(items)

    # ---- an exchange ----

    def ask(self, op: str, *given: Any) -> Any:
        """The other side's result of a request; an exception of the other side is raised here."""
        table: list[Any] = []
        places: dict[int, int] = {}
        self.send(dict(ask=op, given=[self.write(value, table, places) for value in given]))
        while "ask" in (reply := self.receive()):  # the other side may send requests before it answers
            self.answer(reply)
        return self.take(reply, table)

    def take(self, reply: dict[str, Any], table: list[Any]) -> Any:
        """Takes over a reply: prints its output, changes containers, and returns its value or raises."""
        sys.stdout.write(str(reply.get("said", "")))
        value = self.read(reply.get("value"), table)
        try:
            for n, what in reply.get("changed", ()):
                self.fill(table[n], what, table)
            raised, arguments = None, []
            if (exception := reply.get("raised")) is not None:
                raised = exception_of([str(item) for item in exception[0]], self.known)
                arguments = [self.read(item, table) for item in exception[1]]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise Gone from error
        if raised is not None:
            raise raised.__new__(raised, *arguments)
        return value

    def answer(self, message: dict[str, Any]) -> None:
        """Serves one request of the other side."""
        table: list[Any] = []
        given = [self.read(value, table) for value in message.get("given", ())]
        places = {id(value): n for n, value in enumerate(table)}
        before = [self.contents(value, table, places) for value in table]
        try:
            reply = dict(value=self.write(self.serve(str(message["ask"]), given), table, places))
        except Gone:
            raise
        except BaseException as error:  # SystemExit too: the process that made the request handles it
            reply = dict(raised=[names_of(type(error)), self._arguments(error)])
        changed = [[n, self.contents(table[n], table, places)] for n in range(len(before))]
        reply |= dict(
            changed=[change for change in changed if change[1] != before[change[0]]], said=self.printed()
        )
        self.send(reply)

    def _arguments(self, error: BaseException) -> list[Any]:
        try:
            return [
                argument if type(argument) in (int, float, str, bool) else str(argument)
                for argument in error.args
            ]
        except BaseException:
            return []

    def serve(self, op: str, given: list[Any]) -> Any:
        """Executes a request. Each side has its own method."""
        raise NotImplementedError

    def printed(self) -> str:
        """The text printed since the last reply."""
        return ""
