"""Settings that had another name before: old flags, keys of files and Python names, read until version 0.2.

next: config/axes.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

RENAMED = {
    "grpo.bits": "grpo.bitwise",
    "grpo.pull": "grpo.ratio_penalty",
    "grpo.right": "grpo.pass_reward",
    "grpo.slots": "grpo.rollout_slots",
    "grpo.tries": "grpo.resample",
    "model.moe.columns": "model.moe.max_top_k",
    "parallel.cp_by": "parallel.cp_exchange",
    "parallel.whole_gib": "parallel.gathered_gib",
    "parallel.wire": "parallel.dispatch_dtype",
}

Made = TypeVar("Made", bound=type)


def flag_of(name: str, no: bool = False) -> str:
    """The flag of a dotted setting; no: the one that turns the setting off."""
    section, _, last = name.replace("_", "-").rpartition(".")
    return f"--{section}.{'no-' if no else ''}{last}"


def note_of(old: str) -> str:
    """The line that a user of an old name reads. old: dotted, with - or _."""
    new = RENAMED[old.replace("-", "_")]
    return f"{old} is called {new} now; the old name is read until version 0.2"


def former_names(section: str) -> Callable[[Made], Made]:
    """Decorates a dataclass of settings: old names are keywords and read-only attributes, with a warning."""
    pairs = [(old.rpartition("."), new.rpartition(".")[2]) for old, new in RENAMED.items()]
    names = {old[2]: new for old, new in pairs if old[0] == section}

    def decorate(cls: Made) -> Made:
        make: Callable[..., None] = vars(cls)["__init__"]

        @wraps(make)
        def init(self: Any, *args: Any, **settings: Any) -> None:
            for old in names.keys() & settings.keys():
                _warn(f"{section}.{old}")
                settings[names[old]] = settings.pop(old)
            make(self, *args, **settings)

        cls.__init__ = init
        for old, new in names.items():
            setattr(cls, old, _former(f"{section}.{old}", new))
        return cls

    return decorate


def _former(old: str, new: str) -> Any:
    @property
    def read(self: Any) -> Any:
        _warn(old)
        return getattr(self, new)

    return read


def _warn(old: str) -> None:
    warnings.warn(note_of(old), DeprecationWarning, stacklevel=3)


def with_new_names(settings: Any, within: str = "") -> tuple[Any, list[str]]:
    """Nested settings of a file under the names of today, and the old dotted names that were found.

    settings: what JSON or TOML holds; anything but a dict is returned as it is. Where a file has both names,
    the new one is kept.
    """
    if not isinstance(settings, dict):
        return settings, []
    named, old = {}, []
    for name, value in settings.items():
        dotted = f"{within}{name}"
        value, inside = with_new_names(value, f"{dotted}.")
        new = RENAMED.get(dotted.replace("-", "_"))
        old += [*inside, *([dotted] if new else [])]
        if new is None or new.rpartition(".")[2] not in settings:
            named[new.rpartition(".")[2] if new else name] = value
    return named, old


def with_new_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """A command line with the flags of today, and a line for each old one."""
    new_words, notes = [], []
    for word in words:
        flag, equals, value = word.partition("=")
        section, dot, last = flag.removeprefix("--").replace("-", "_").rpartition(".")
        on = f"{section.removeprefix('no_')}{dot}{last.removeprefix('no_')}"
        if flag.startswith("--") and on in RENAMED:
            notes.append(
                f"{flag_of(on)} is called {flag_of(RENAMED[on])} now; the old name is read until version 0.2"
            )
            off = section.startswith("no_") or last.startswith("no_")
            word = f"{flag_of(RENAMED[on], off)}{equals}{value}"
        new_words.append(word)
    return new_words, notes
