"""Tables of another framework's flags and their counterparts, the reader of a command, and its outcome.

A flag is one of four kinds. It has a counterpart with the same meaning (`same`); it becomes settings together
with other flags (`worked`); it needs no setting, because tmoe always does the same or decides automatically
(`nothing`); or tmoe cannot do it (`refused`). The last two have a reason. docs/migrate.md shows the tables.

next: megatron.py
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf, isfinite, nan
from typing import Any, Literal, NamedTuple, get_args, get_origin

from tmoe.config.check import fits
from tmoe.config.check import spell as spell_kind

Kind = Literal["same", "worked", "nothing", "refused"]


class FlagRow(NamedTuple):
    """A flag of the other framework."""

    flag: str
    kind: Kind
    becomes: str
    """same: the flag of tmoe; worked: the result in words; nothing, refused: the reason"""
    takes: Literal["nothing", "one", "some"] = "one"
    """how many values follow the flag"""
    only: tuple[str, ...] = ()
    """the values for which the row holds; with other values the flag is refused"""
    shown: str = ""
    """the flag's text in docs/migrate.md, if not its name"""

    @property
    def page(self) -> str:
        """The text of the second column in docs/migrate.md."""
        values = f" where it is {' or '.join(self.only)}, else refused" if self.only else ""
        return {
            "same": f"`{self.becomes}`",
            "worked": self.becomes,
            "nothing": f"nothing{values}: {self.becomes}",
            "refused": f"refused: {self.becomes}",
        }[self.kind]


def same(flag: str, becomes: str) -> FlagRow:
    return FlagRow(flag, "same", becomes)


def worked(flag: str, becomes: str, takes: Literal["nothing", "one", "some"] = "one") -> FlagRow:
    return FlagRow(flag, "worked", becomes, takes)


def switch(flag: str, becomes: str) -> FlagRow:
    return FlagRow(flag, "worked", becomes, "nothing")


def nothing(flag: str, why: str, takes: Literal["nothing", "one", "some"] = "one", *only: str) -> FlagRow:
    return FlagRow(flag, "nothing", why, takes, only)


def refused(flag: str, why: str, takes: Literal["nothing", "one", "some"] = "one") -> FlagRow:
    return FlagRow(flag, "refused", why, takes)


@dataclass
class TranslatedCommand:
    """The resulting command, its notes, and all faults of the original command."""

    flags: dict[str, list[str]] = field(default_factory=dict)
    """flags of train.py with their values"""
    notes: list[str] = field(default_factory=list)
    """differences of the command, and parts that are left out, each with a reason"""
    refused: list[str] = field(default_factory=list)
    """a line for each flag without a counterpart"""
    wrong: list[str] = field(default_factory=list)
    """a line for each flag with an invalid value, and for each missing flag"""
    given: list[tuple[FlagRow, list[str]]] = field(default_factory=list)
    """the original flags with their values, for messages about values that tmoe refuses"""
    world: int = 1
    per_node: int = 8
    """the most processes on a node"""
    read: set[str] = field(default_factory=set)
    """environment variables of the command that the translation has read"""
    preset: str = "tiny"
    """preset of the model; "" if --init names the model"""

    def set(self, flag: str, *values: object) -> None:
        self.flags[flag] = [_word(value) for value in values]

    def refuse(self, flag: str, why: str) -> None:
        self.refused.append(f"{flag}: {why}")

    def reject(self, flag: str, why: str) -> None:
        """flag: the flag with its value, as `--lr=x`, or only the name of a missing flag."""
        self.wrong.append(f"{flag}: {why}")

    def source(self, flag: str, value: str) -> str:
        """The other framework's flag that gave this value to a flag of train.py; "" if none did.

        Other flags may have equal values: only a row that names the flag of train.py is taken.
        """
        named = re.compile(rf"{re.escape(flag)}(?![\w.-]*\w)")
        rows = [row for row, values in self.given if named.search(row.becomes) and _among(value, values)]
        return rows[0].flag if rows else ""

    @property
    def words(self) -> list[str]:
        """The arguments of train.py."""
        preset = [self.preset] if self.preset else []
        return [*preset, *(word for flag, values in self.flags.items() for word in (flag, *values))]

    def command(self) -> str:
        """The whole command, quoted for a shell. Shell variables in values are kept."""
        local = min(self.world, self.per_node)
        several = ["--nnodes", str(self.world // local)] if self.world > local else []
        start = ["torchrun", *several, "--nproc-per-node", str(local)] if self.world > 1 else ["python"]
        return " ".join(map(_quoted, [*start, "train.py", *self.words]))


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _among(value: str, values: Sequence[str]) -> bool:
    """Whether a value is one of these, as text or as a number."""
    return value in values or any(_is_number(text) and _word(float(text)) == value for text in values)


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _quoted(word: str) -> str:
    return f'"{word}"' if re.fullmatch(r"[\w/.:-]*\$\{?\w+\}?[\w/.:-]*", word) else shlex.quote(word)


class GivenFlags:
    """The flags of a command, by the names of a table."""

    def __init__(
        self,
        rows: Sequence[FlagRow],
        words: Sequence[str],
        outcome: TranslatedCommand,
        abbreviated: bool = False,
    ) -> None:
        """Reads a command. Flags that are refused, wrong, or not in the table are reported in the outcome.

        abbreviated: whether a flag may be shortened to an unambiguous beginning, as in argparse.
        """
        self.values: dict[str, list[str]] = {}
        self.outcome = outcome
        self.abbreviated = abbreviated
        self.table = {spell(row.flag): row for row in rows}
        words = list(words)
        while words:
            word = words.pop(0)
            flag, equals, value = word.partition("=")
            if not flag.startswith("--"):
                of_shell = re.fullmatch(r"\$\{?\w+(\[[@*]\])?\}?", word)
                why = "a shell's variable: write out the flags that it holds" if of_shell else ""
                outcome.refuse(word, why or "no flag precedes this value")
                continue
            values = [value] if equals else []
            while words and not re.match(r"--\w", words[0]) and not equals:
                values.append(words.pop(0))
            row = self._row(flag)
            if row is None:
                near = get_close_matches(spell(flag), self.table, 1, 0.75)
                hint = f"; did you mean {self.table[near[0]].flag}?" if near else ""
                outcome.refuse(flag, f"not in the table of this framework's flags{hint}")
                continue
            self._take(row, values)

    def _row(self, flag: str) -> FlagRow | None:
        name = spell(flag)
        if name in self.table or not self.abbreviated:
            return self.table.get(name)
        longer = [row for other, row in self.table.items() if other.startswith(name) and row.flag[0] == "-"]
        return longer[0] if len(longer) == 1 else None

    def _take(self, row: FlagRow, values: list[str]) -> None:
        if row.takes == "one" and len(values) != 1 and (row.kind != "nothing" or row.only):
            return self.outcome.reject(_shown(row.flag, values), "takes one value")
        if row.takes == "nothing" and [v.lower() for v in values] not in ([], ["true"], ["false"]):
            return self.outcome.reject(_shown(row.flag, values), "takes no value")
        if [v.lower() for v in values] == ["false"] and row.takes == "nothing":
            self.values.pop(spell(row.flag), None)
            return None
        self.values[spell(row.flag)] = values
        self.outcome.given.append((row, values))
        other = bool(row.only) and values[0].lower() not in [text.lower() for text in row.only]
        if row.kind == "refused" or other:
            self.outcome.refuse(_shown(row.flag, values), row.becomes)
        elif row.kind == "same":
            self.outcome.set(row.becomes, *values)
        return None

    def has(self, flag: str) -> bool:
        return spell(flag) in self.values

    def list(self, flag: str) -> list[str]:
        return self.values.get(spell(flag), [])

    def text(self, flag: str, default: str = "") -> str:
        return (self.list(flag) or [default])[0]

    def number(self, flag: str, default: float, least: float = -inf) -> float:
        """The flag's number, at least `least`; any other value is reported and the default returned."""
        if not self.has(flag):
            return default
        text = self.text(flag)
        try:
            value = float(text)
        except ValueError:
            value = nan
        if isfinite(value) and value >= least:
            return value
        bound = f", at least {least:g}" if isfinite(least) else ""
        self._reject(flag, f"must be a number{bound}")
        return default

    def whole(self, flag: str, default: int, least: int = 0) -> int:
        """The flag's whole number, at least `least`; any other value is reported and the default returned."""
        if not self.has(flag):
            return default
        value = self.number(flag, nan)
        if isfinite(value) and value == int(value) and value >= least:
            return int(value)
        if isfinite(value):
            self._reject(flag, f"must be a whole number, at least {least}")
        return default

    def _reject(self, flag: str, why: str) -> None:
        line = f"{self.table[spell(flag)].flag}={self.text(flag)}: {why}"
        if line not in self.outcome.wrong:
            self.outcome.wrong.append(line)


def _shown(flag: str, values: Sequence[str]) -> str:
    """A flag in the form of messages: `--flag=value`."""
    return f"{flag}={' '.join(values)}" if values else flag


def misfits(out: TranslatedCommand, kinds: dict[str, Any]) -> None:
    """Adds a line to `out.wrong` for every value that does not have the type of its setting.

    kinds: the type of each flag of train.py.
    """
    for flag, values in out.flags.items():
        if flag not in kinds or not values:
            continue
        kind = kinds[flag]
        listed = get_origin(kind) is tuple
        item_kind = get_args(kind)[0] if listed else kind
        bad = [value for value in values if not any(fits(reading, item_kind) for reading in _readings(value))]
        for value in bad[:1]:
            their_flag = out.source(flag, value)
            line = f"{their_flag or flag}={value}: "
            if not any(problem.startswith(line) for problem in out.wrong):
                out.wrong.append(
                    f"{line}must be {spell_kind(item_kind)}" + (f" ({flag})" if their_flag else "")
                )


def _readings(text: str) -> list[Any]:
    """All values that a word of a command line can stand for: the text, a bool, an int, a float."""
    readings: list[Any] = [text, *{"true": [True], "false": [False]}.get(text.lower(), [])]
    for kind in (int, float):
        with suppress(ValueError):
            readings.append(kind(text))
    return readings


def spell(flag: str) -> str:
    """The one spelling that `--num_local_experts`, `--num-local-experts` and `num_local_experts` share."""
    return flag.lstrip("-").replace("_", "-")


def page(rows: Iterable[FlagRow]) -> str:
    """A table of flags in Markdown."""
    lines = [f"| `{row.shown or row.flag}` | {row.page.replace('|', chr(92) + '|')} |" for row in rows]
    return "\n".join(["| theirs | tmoe |", "| --- | --- |", *lines])
