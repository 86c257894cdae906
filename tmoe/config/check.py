"""How a setting is checked: its type, its range, and one message that names flag, value and what is valid.

next: model.py"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

FLAG = re.compile(r"--([a-z][a-z0-9_-]*(?:\.[a-z][a-z0-9_-]*)*)")
HEAD = re.compile(
    r"--(?P<setting>[a-z][a-z0-9_.-]*)(?:=(?P<value>.*?))?: (?P<wrong>.*?)(?:; valid: (?P<valid>.*))?", re.S
)
TOP: set[str] = set()  # settings outside of any section; run.py fills it


class ConfigError(ValueError):
    """A setting that cannot work: its name and value, what is wrong, what is valid, whence the value is.

    It is made of these fields (`of`), or of a text in which settings are written as flags; a text that begins
    with one is taken apart. `spelt` writes it for a front. str() is Python's: `top_k=9: must be 1 to
    experts=8`, where a command prints `--model.moe.top-k=9: must be 1 to --model.moe.experts=8`.
    """

    def __init__(self, text: str, whence: str = ""):
        super().__init__(text)
        head = HEAD.fullmatch(text)
        self.setting = head["setting"].replace("-", "_") if head else ""
        """dotted name: "model.moe.top_k"; "" where the text begins with no setting"""
        self.value = (head["value"] or "") if head else ""
        """as text; "" for a switch"""
        self.wrong = head["wrong"] if head else text
        self.valid = (head["valid"] or "") if head else ""
        self.whence = whence
        """the file with the value; "" where a flag or a program gave it"""

    @classmethod
    def of(cls, setting: str, value: Any, wrong: str, valid: str = "", whence: str = "") -> ConfigError:
        """The error of a setting by its fields. setting: a dotted name."""
        flag = f"--{setting.replace('_', '-')}={value}"
        return cls(f"{flag}: {wrong}{'; valid: ' if valid else ''}{valid}", whence)

    def within(self, place: str) -> ConfigError:
        """The same error, in a place that stands before it."""
        return ConfigError(f"{place}: {self.args[0]}")

    def spelt(self, front: Literal["flag", "name", "key"] | Mapping[str, str]) -> str:
        """The line of this error for a front: the one place where settings are renamed.

        front: "flag", a command line; "name", Python, without the sections that all settings of the line
        share; "key", a file of settings; or another file's key of each setting that it has.
        """
        text = str(self.args[0])
        if self.setting and self.whence:
            flag = f"--{self.setting.replace('_', '-')}={self.value}"
            text = text.replace(flag, f"{flag} (from {self.whence})", 1)
        if front == "flag":
            return text
        shared = _shared(text) if front == "name" else 0

        def renamed(found: re.Match[str]) -> str:
            path = found[1].replace("-", "_")
            if isinstance(front, Mapping):
                return front.get(path, found[0])
            if not _is_setting(found[1]):
                return found[0]
            *sections, last = path.split(".")[shared:]
            name = ".".join([*sections, last.removeprefix("no_")])
            return f"{name}=False" if last.startswith("no_") else name

        return FLAG.sub(renamed, text)

    def __str__(self) -> str:
        return self.spelt("name")


def _is_setting(path: str) -> bool:
    """Whether a flag, without its dashes, is a setting's: --nproc-per-node is torchrun's."""
    return "." in path or path.replace("-", "_") in TOP


def _shared(text: str) -> int:
    """The number of sections that all settings of a message begin with."""
    paths = [path.split(".")[:-1] for path in FLAG.findall(text) if _is_setting(path)]
    parts = zip(*paths, strict=False)
    return next((i for i, names in enumerate(parts) if len(set(names)) > 1), min(map(len, paths), default=0))


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "an object"}
KINDS |= {Path: "a path"}
# The largest whole number of some settings: far above any model, and small enough that no product of them,
# in bytes, overflows 63 bits.
MOST = dict(layers=4096, chunks=4096, sinkhorn_iterations=4096)
MOST |= dict.fromkeys(("heads", "kv_heads", "window_kv_heads", "experts", "world", "dp", "ep"), 2**16)
MOST |= dict.fromkeys(("tp", "cp", "pp", "replicate", "etp"), 2**16)
FLOATS = 2.0**-126, 2.0**128 - 2.0**104, 1 - 2.0**-24  # float32: least normal, largest, largest below 1
COLDEST = 1e-6  # least temperature above 0: logits divided by less than about 1e-36 are infinite in float32


def spell(kind: Any) -> str:
    """A type of a setting in words."""
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, options))}"
    if get_origin(kind) is tuple:
        return f"a list{'' if ... in options else f' of {len(options)}'}, each {spell(options[0])}"
    return " or ".join(map(spell, options)) or KINDS.get(
        kind, "none" if kind is type(None) else kind.__name__
    )


def options_of(kind: Any) -> tuple[Any, ...]:
    """The values of a setting that has a few; () for another one."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(one for part in get_args(kind) for one in options_of(part))


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of this type.

    A list is taken for a tuple, and a whole number for a float. True, false and NaN are no numbers.
    """
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return isinstance(value, type(options[0])) and value in options
    if get_origin(kind) is tuple:
        listed = isinstance(value, (list, tuple)) and (... in options or len(value) == len(options))
        return listed and all(fits(one, options[0]) for one in value)
    if options:
        return any(fits(value, option) for option in options)
    if kind is float:
        if isinstance(value, float):
            return value == value  # NaN is not
        return fits(value, int) and abs(value) <= sys.float_info.max
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def check(
    cfg: Any, flags: str, *, one: str = "", zero: str = "", positive: str = "", share: str = ""
) -> None:
    """Raises ConfigError for the first setting of a wrong type or out of its range.

    Types are checked too, as library users pass settings past the command line. None is fine where the type
    says so.

    flags: what the settings' flags start with, "--train." for example.
    one, zero, positive, share: names of settings ("batch seq") that must be from 1 to MOST, from 0 to MOST,
    above 0 and finite in float32, at least 0 and below 1.
    """
    section = flags.removeprefix("--").replace("-", "_")
    for name, kind in _kinds(type(cfg)).items():
        value = getattr(cfg, name)

        def must(ok: bool, wrong: str, shown: Any = value, setting: str = section + name) -> None:
            if not ok:
                raise ConfigError.of(setting, shown, wrong)

        must(
            fits(value, kind), f"must be {spell(kind)}", value if get_origin(kind) is Literal else repr(value)
        )
        must(value != "", "must not be empty", "''")

        most = MOST.get(name, 2**31 - 1) if isinstance(value, int) else FLOATS[1]
        end = f"at most {most}" if isinstance(value, int) else "finite in float32"
        for low, names in enumerate((zero, one)):
            ok = value is None or name not in names.split() or low <= value <= most
            must(ok, f"must be at least {low} and {end}")
        ok = value is None or name not in positive.split() or FLOATS[0] <= value <= most
        must(ok, "must be positive and finite in float32")
        must(name not in share.split() or 0 <= value <= FLOATS[2], "must be at least 0 and below 1")


_kinds = functools.cache(get_type_hints)  # of a class's settings


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
