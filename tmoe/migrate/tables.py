"""Tables of another framework's flags, each with what it becomes; a command read by one, and what came of it.

A flag is one of four kinds: it has a counterpart of the same meaning (`same`), it becomes settings together
with others (`worked`), nothing need be said because tmoe always does so or decides for itself (`nothing`), or
tmoe cannot do it (`refused`). The last two say why. docs/migrate.md shows the tables.

next: megatron.py
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tmoe.config.check import ConfigError

Kind = Literal["same", "worked", "nothing", "refused"]


class Row(NamedTuple):
    """A flag of theirs."""

    flag: str
    kind: Kind
    becomes: str
    """the flag of tmoe; of `worked` what becomes of it in words, of the others why nothing does"""
    takes: Literal["nothing", "one", "some"] = "one"
    """values behind it"""
    only: tuple[str, ...] = ()
    """the values for which this holds; with others the flag is refused"""
    shown: str = ""
    """how the page shows it, if not as its name"""

    @property
    def page(self) -> str:
        """What the page's second column says."""
        values = f" where it is {' or '.join(self.only)}, else refused" if self.only else ""
        return {
            "same": f"`{self.becomes}`",
            "worked": self.becomes,
            "nothing": f"nothing{values}: {self.becomes}",
            "refused": f"refused: {self.becomes}",
        }[self.kind]


def same(flag: str, becomes: str) -> Row:
    return Row(flag, "same", becomes)


def worked(flag: str, becomes: str, takes: Literal["nothing", "one", "some"] = "one") -> Row:
    return Row(flag, "worked", becomes, takes)


def switch(flag: str, becomes: str) -> Row:
    return Row(flag, "worked", becomes, "nothing")


def nothing(flag: str, why: str, takes: Literal["nothing", "one", "some"] = "one", *only: str) -> Row:
    return Row(flag, "nothing", why, takes, only)


def refused(flag: str, why: str, takes: Literal["nothing", "one", "some"] = "one") -> Row:
    return Row(flag, "refused", why, takes)


@dataclass
class Outcome:
    """The command that is made, and what is said beside it."""

    flags: dict[str, list[str]] = field(default_factory=dict)
    """flags of train.py with their values"""
    notes: list[str] = field(default_factory=list)
    """what the command does otherwise, or leaves out for a reason"""
    refused: list[str] = field(default_factory=list)
    """a line for each flag without a counterpart"""
    world: int = 1
    preset: str = "tiny"

    def set(self, flag: str, *values: object) -> None:
        self.flags[flag] = [_word(value) for value in values]

    def refuse(self, flag: str, why: str) -> None:
        self.refused.append(f"{flag}: {why}")

    @property
    def words(self) -> list[str]:
        """The arguments of train.py."""
        return [self.preset, *(word for flag, values in self.flags.items() for word in (flag, *values))]

    def command(self, nodes_of: int = 8) -> str:
        """The whole command; nodes_of: the most processes on a node."""
        if self.world == 1:
            return shlex.join(["python", "train.py", *self.words])
        local = min(self.world, nodes_of)
        several = ["--nnodes", str(self.world // local)] if self.world > local else []
        start = ["torchrun", *several, "--nproc-per-node", str(local)]
        return shlex.join([*start, "train.py", *self.words])


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class Given:
    """The flags of a command, by the names of a table."""

    def __init__(self, rows: Sequence[Row], words: Sequence[str], outcome: Outcome) -> None:
        """Reads a command. What is refused, or not in the table, goes to the outcome.

        Whatever stands before the first flag is left out, up to a script's name: launchers and variables.
        """
        self.values: dict[str, list[str]] = {}
        self.outcome = outcome
        table = {spell(row.flag): row for row in rows}
        scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
        words = list(words[scripts[0] + 1 :] if scripts else words)
        while words:
            word = words.pop(0)
            flag, equals, value = word.partition("=")
            if not flag.startswith("--"):
                if self.values or not re.match(r"\w+=", word):
                    outcome.refuse(word, "no flag stands before this value")
                continue
            values = [value] if equals else []
            while words and not re.match(r"--\w", words[0]) and not equals:
                values.append(words.pop(0))
            row = table.get(spell(flag))
            if row is None:
                outcome.refuse(flag, "not in the table of this framework's flags")
                continue
            self._take(row, values)

    def _take(self, row: Row, values: list[str]) -> None:
        self.values[spell(row.flag)] = values
        if row.takes == "one" and len(values) != 1 and (row.kind != "nothing" or row.only):
            raise ConfigError(f"{row.flag}={' '.join(values)!r}: takes one value")
        if row.takes == "nothing" and [v.lower() for v in values] not in ([], ["true"], ["false"]):
            raise ConfigError(f"{row.flag}={' '.join(values)!r}: takes no value")
        if [v.lower() for v in values] == ["false"] and row.takes == "nothing":
            del self.values[spell(row.flag)]
            return
        other = bool(row.only) and values[0].lower() not in [text.lower() for text in row.only]
        if row.kind == "refused" or other:
            said = f"={' '.join(values)}" if values else ""
            self.outcome.refuse(f"{row.flag}{said}", row.becomes)
        elif row.kind == "same":
            self.outcome.set(row.becomes, *values)

    def has(self, flag: str) -> bool:
        return spell(flag) in self.values

    def list(self, flag: str) -> list[str]:
        return self.values.get(spell(flag), [])

    def text(self, flag: str, default: str = "") -> str:
        return (self.list(flag) or [default])[0]

    def number(self, flag: str, default: float) -> float:
        """A number. ConfigError for what is none."""
        text = self.text(flag, str(default))
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{flag}={text}: must be a number") from None

    def whole(self, flag: str, default: int) -> int:
        """A whole number. ConfigError for what is none."""
        value = self.number(flag, default)
        if value != value or value in (float("inf"), -float("inf")) or value != int(value):
            raise ConfigError(f"{flag}={self.text(flag)}: must be a whole number")
        return int(value)


def spell(flag: str) -> str:
    """One spelling of a flag: `--num_local_experts`, `--num-local-experts`, `num_local_experts`."""
    return flag.lstrip("-").replace("_", "-")


def page(rows: Iterable[Row]) -> str:
    """A table of flags in Markdown."""
    lines = [f"| `{row.shown or row.flag}` | {row.page.replace('|', chr(92) + '|')} |" for row in rows]
    return "\n".join(["| theirs | tmoe |", "| --- | --- |", *lines])
