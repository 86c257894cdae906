"""How a setting is checked: its type, its range, and one message that names flag, value and what is valid.

next: model.py"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

# Around the name of a setting in a text. A noncharacter of Unicode: no text of a user holds it.
MARK = "\ufdd0"


class Setting(str):
    """A setting in the text of an error: `f"must divide {Setting('model.heads', 8)}"`; `spelt` writes it.

    name: dotted, "model.moe.top_k". value: True for the name alone, False for a switch that is off.
    """

    def __new__(cls, name: str, value: Any = True) -> Setting:
        section, dot, last = name.rpartition(".")
        off = "no_" if value is False else ""
        said = "" if isinstance(value, bool) else f"={value}"
        return super().__new__(cls, f"{MARK}{section}{dot}{off}{last}{MARK}{said}")

    def __reduce__(self) -> Any:
        return str, (str(self),)  # a copy has the mark already


Front = Literal["flag", "name", "key"] | Mapping[str, str]


def spelt(text: str, front: Front = "flag") -> str:
    """A text with its settings written for a front: the one place where settings are renamed.

    front: "flag", a command line; "name", Python, without the sections that all settings of the text share;
    "key", a file of settings; or another file's key of each setting that it has.
    """
    parts = text.split(MARK)
    names = parts[1::2]
    shared = _shared(names) if front == "name" else 0
    parts[1::2] = [_written(name, front, shared) for name in names]
    return "".join(parts)


def _written(name: str, front: Front, shared: int) -> str:
    """A setting's name for a front. shared: the sections to leave out."""
    flag = f"{'--' if name[1:] else '-'}{name.replace('_', '-')}"
    if isinstance(front, Mapping):
        return front.get(name, flag)
    if front == "flag":
        return flag
    *sections, last = name.split(".")[shared:]
    switch = last.removeprefix("no_")
    return ".".join([*sections, switch]) + ("" if switch == last else "=False")


def _shared(names: Sequence[str]) -> int:
    """The number of sections that all settings of a text begin with."""
    paths = [name.split(".")[:-1] for name in names]
    parts = zip(*paths, strict=False)
    return next((i for i, one in enumerate(parts) if len(set(one)) > 1), min(map(len, paths), default=0))


class ConfigError(ValueError):
    """A setting that cannot work: its name and value, what is wrong, what is valid, whence the value is.

    `of` makes it of these fields; a text alone is an error that no setting is at the head of. `spelt` writes
    it for a front. str() is Python's: `top_k=9: must be 1 to experts=8`, where a command prints
    `--model.moe.top-k=9: must be 1 to --model.moe.experts=8`.
    """

    def __init__(self, wrong: str, setting: str = "", value: Any = True, valid: Any = "", whence: str = ""):
        super().__init__(wrong, setting, value, valid, whence)
        self.setting = setting
        """dotted name: "model.moe.top_k"; "" where the error begins with no setting"""
        self.value = "" if isinstance(value, bool) else spelt(str(value))
        """as text; "" for a switch"""
        self.wrong, self.valid = spelt(wrong), spelt(str(valid))
        """what is wrong, and what is valid; other settings as flags"""
        self.whence = whence
        """the file with the value; "" where a flag or a program gave it"""
        head = f"{Setting(setting, value)}{f' (from {whence})' if whence else ''}: " if setting else ""
        self.text = f"{head}{wrong}{f'; valid: {valid}' if self.valid else ''}"
        """the whole, its settings marked"""

    @classmethod
    def of(cls, setting: str, value: Any, wrong: str, valid: Any = "", whence: str = "") -> ConfigError:
        """The error of a setting by its fields. setting, value: as of `Setting`."""
        return cls(wrong, setting, value, valid, whence)

    def within(self, place: str) -> ConfigError:
        """The same error, in a place that stands before it."""
        return ConfigError(f"{place}: {self.text}")

    def spelt(self, front: Front) -> str:
        """The line of this error for a front."""
        return spelt(self.text, front)

    def __str__(self) -> str:
        return self.spelt("name")


def require(ok: bool, *fields: Any) -> None:
    """Raise ConfigError unless ok. fields: a text alone, or setting, value, what is wrong, what is valid."""
    if not ok:
        raise ConfigError.of(*fields) if fields[1:] else ConfigError(*fields)


class Section(NamedTuple):
    """Settings that are checked: their values, and what their dotted names begin with."""

    cfg: Any
    prefix: str = ""
    """ "model.moe." of a MoEConfig, "" of a whole run"""

    def value(self, name: str) -> Any:
        return functools.reduce(getattr, name.split("."), self.cfg)

    def said(self, name: str) -> Setting:
        """The setting with its value, for the text of an error."""
        return Setting(self.prefix + name, self.value(name))

    def require(self, ok: bool, name: str, wrong: str, valid: Any = "") -> None:
        """Raise ConfigError for this setting unless ok."""
        if not ok:
            raise ConfigError.of(self.prefix + name, self.value(name), wrong, valid)


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
    cfg: Any, section: str, *, one: str = "", zero: str = "", positive: str = "", share: str = ""
) -> Section:
    """Raises ConfigError for the first setting of a wrong type or out of its range. Returns the section.

    Types are checked too, as library users pass settings past the command line. None is fine where the type
    says so.

    section: what the settings' dotted names begin with, "train." for example.
    one, zero, positive, share: names of settings ("batch seq") that must be from 1 to MOST, from 0 to MOST,
    above 0 and finite in float32, at least 0 and below 1.
    """
    for name, kind in _kinds(type(cfg)).items():
        value = getattr(cfg, name)

        def must(ok: bool, wrong: str, shown: Any = value, setting: str = section + name) -> None:
            if not ok:
                raise ConfigError.of(setting, str(shown), wrong)

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
    return Section(cfg, section)


_kinds = functools.cache(get_type_hints)  # of a class's settings


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
