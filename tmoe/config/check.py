"""Checks settings: types and ranges; an error is one message that names flag, value and what is valid.

next: model.py"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

# Marks the name of a setting in a text, on both sides. A noncharacter of Unicode: no user's text holds it.
MARK = "\ufdd0"


class Setting(str):
    """A setting in the text of an error: `f"must divide {Setting('model.heads', 8)}"`; `spelt` spells it.

    name: dotted, "model.moe.top_k". value: True for the name alone, False for a switch that is off.
    """

    def __new__(cls, name: str, value: Any = True) -> Setting:
        section, dot, last = name.rpartition(".")
        off = "no_" if value is False else ""
        shown = "" if isinstance(value, bool) else f"={words_of(value)}"
        return super().__new__(cls, f"{MARK}{section}{dot}{off}{last}{MARK}{shown}")

    def __reduce__(self) -> Any:
        return str, (str(self),)  # the text of a copy is marked already


def words_of(value: Any) -> str:
    """The value of a setting as a command line has it: a list is its words, and an empty list is "none"."""
    if not isinstance(value, (list, tuple)):
        return str(value)
    return " ".join(str(word) or "''" for word in value) or "none"


Front = Literal["flag", "name", "key"] | Mapping[str, str]


def spelt(text: str, front: Front = "flag") -> str:
    """A text with its settings spelled for a front (a user's way in): the one place that renames settings.

    front: "flag" for a command line; "name" for Python, without the sections that all settings of the text
    share; "key" for a file of settings; or a mapping from settings to the keys of another kind of file.
    """
    parts = text.split(MARK)
    names = parts[1::2]
    shared = _shared(names) if front == "name" else 0
    parts[1::2] = [_written(name, front, shared) for name in names]
    return "".join(parts)


def _written(name: str, front: Front, shared: int) -> str:
    """A setting's name as a front spells it. shared: number of leading sections to leave out."""
    flag = f"{'--' if name[1:] else '-'}{name.replace('_', '-')}"
    if isinstance(front, Mapping):
        return front.get(name, flag)
    if front == "flag":
        return flag
    *sections, last = name.split(".")[shared:]
    switch = last.removeprefix("no_")
    return ".".join([*sections, switch]) + ("" if switch == last else "=False")


def _shared(names: Sequence[str]) -> int:
    """The number of leading sections that all settings of a text have in common."""
    paths = [name.split(".")[:-1] for name in names]
    parts = zip(*paths, strict=False)
    return next(
        (i for i, sections in enumerate(parts) if len(set(sections)) > 1), min(map(len, paths), default=0)
    )


class ConfigError(ValueError):
    """A setting that cannot work: its name and value, what is wrong, what is valid, the source of the value.

    `of` makes the error from these fields; a text alone is an error that does not begin with a setting.
    `spelt` spells it for a front. str() gives Python's spelling: `top_k=9: must be 1 to experts=8`, where a
    command prints `--model.moe.top-k=9: must be 1 to --model.moe.experts=8`.
    """

    def __init__(self, wrong: str, setting: str = "", value: Any = True, valid: Any = "", whence: str = ""):
        super().__init__(wrong, setting, value, valid, whence)
        self.setting = setting
        """dotted name: "model.moe.top_k"; "" where the error begins with no setting"""
        self.value = "" if isinstance(value, bool) else spelt(words_of(value))
        """as text; "" for a switch"""
        self.wrong, self.valid = spelt(wrong), spelt(str(valid))
        """what is wrong, and what is valid; other settings as flags"""
        self.whence = whence
        """the file with the value; "" where a flag or a program gave it"""
        head = f"{Setting(setting, value)}{f' (from {whence})' if whence else ''}: " if setting else ""
        self.text = f"{head}{wrong}{f'; valid: {valid}' if self.valid else ''}"
        """the whole line, with its settings marked"""

    @classmethod
    def of(cls, setting: str, value: Any, wrong: str, valid: Any = "", whence: str = "") -> ConfigError:
        """The error of a setting, from its fields. setting, value: the arguments of `Setting`."""
        return cls(wrong, setting, value, valid, whence)

    def within(self, place: str) -> ConfigError:
        """The same error with a place, a file for example, before it."""
        return ConfigError(f"{place}: {self.text}")

    def spelt(self, front: Front) -> str:
        """The line of this error as a front spells it."""
        return spelt(self.text, front)

    def __str__(self) -> str:
        return self.spelt("name")


def require(ok: bool, *fields: Any) -> None:
    """Raise ConfigError unless ok.

    fields: a text alone; or setting, value, what is wrong and, if known, what is valid.
    """
    if not ok:
        raise ConfigError.of(*fields) if fields[1:] else ConfigError(*fields)


class Section(NamedTuple):
    """Settings to be checked: their values, and the beginning of their dotted names."""

    cfg: Any
    prefix: str = ""
    """ "model.moe." for a MoEConfig, "" for a whole run"""

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
# The largest whole number for some settings: far above any model's, and small enough that no product of
# them, in bytes, overflows 63 bits.
MOST = dict(layers=4096, depth=4096, chunks=4096, sinkhorn_iterations=4096)
MOST |= dict.fromkeys(("heads", "kv_heads", "window_kv_heads", "experts", "world", "dp", "ep"), 2**16)
MOST |= dict.fromkeys(("tp", "cp", "pp", "replicate", "etp"), 2**16)
FLOATS = 2.0**-126, 2.0**128 - 2.0**104, 1 - 2.0**-24  # float32: least normal, largest, largest below 1
COLDEST = 1e-6  # least temperature above 0: logits divided by less than about 1e-36 are infinite in float32


def spell(kind: Any) -> str:
    """The type of a setting in words."""
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, options))}"
    if get_origin(kind) is tuple:
        return f"a list{'' if ... in options else f' of {len(options)}'}, each {spell(options[0])}"
    return " or ".join(map(spell, options)) or KINDS.get(
        kind, "none" if kind is type(None) else kind.__name__
    )


def options_of(kind: Any) -> tuple[Any, ...]:
    """The values of a setting with a fixed list of values; () for another setting."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(option for part in get_args(kind) for option in options_of(part))


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of this type.

    A list is accepted as a tuple, and a whole number as a float. True, false and NaN are not numbers.
    """
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return isinstance(value, type(options[0])) and value in options
    if get_origin(kind) is tuple:
        listed = isinstance(value, (list, tuple)) and (... in options or len(value) == len(options))
        return listed and all(fits(item, options[0]) for item in value)
    if options:
        return any(fits(value, option) for option in options)
    if kind is float:
        if isinstance(value, float):
            return value == value  # false for NaN
        return fits(value, int) and abs(value) <= sys.float_info.max
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def check(
    cfg: Any, section: str, *, one: str = "", zero: str = "", positive: str = "", share: str = ""
) -> Section:
    """Raises ConfigError for the first setting of a wrong type or out of its range. Returns the section.

    Types are checked too, because library users give settings without the command line. None is valid where
    the type allows it.

    section: the beginning of the settings' dotted names, "train." for example.
    one: names of settings ("batch seq") that must be from 1 to MOST.
    zero: names of settings that must be from 0 to MOST.
    positive: names of settings that must be above 0 and finite in float32.
    share: names of settings that must be at least 0 and below 1.
    """
    lows = dict.fromkeys(zero.split(), 0) | dict.fromkeys(one.split(), 1)
    above, parts = positive.split(), share.split()
    for name, kind in _kinds(type(cfg)).items():
        value = shown = getattr(cfg, name)
        wrong = ""
        if not fits(value, kind):
            wrong, shown = f"must be {spell(kind)}", value if get_origin(kind) is Literal else repr(value)
        elif value == "":
            wrong, shown = "must not be empty", "''"
        elif value is None:
            continue
        elif name in lows or name in above:
            whole = isinstance(value, int)
            limit = MOST.get(name, 2**31 - 1) if whole else FLOATS[1]
            if name in lows and not lows[name] <= value <= limit:
                end = f"at most {limit}" if whole else "finite in float32"
                wrong = f"must be at least {lows[name]} and {end}"
            elif name in above and not FLOATS[0] <= value <= limit:
                wrong = "must be positive and finite in float32"
        elif name in parts and not 0 <= value <= FLOATS[2]:
            wrong = "must be at least 0 and below 1"
        if wrong:
            raise ConfigError.of(section + name, str(shown), wrong)
    return Section(cfg, section)


_kinds = functools.cache(get_type_hints)  # the types of a class's settings, by name


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
