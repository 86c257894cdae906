"""Lists for messages: twenty lines at most; a longer list has one line for each kind of item.

next: config/run.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable

LINES = 20  # most lines of a message, its first line included
NUMBERED = re.compile(r"([A-Za-z_]+\.)\d+(?=\.)")  # layers.7. and experts.3. inside a tensor's name


def listed(head: str, items: Iterable[str], indent: str = "  ") -> str:
    """`head`, if there is one, then a line for each item, indented by `indent`: at most LINES lines in all.

    A longer list has one line for each kind: items that differ only in the numbers of layers and experts are
    counted together, with * for the numbers. If the list is still too long, it ends with "… N more", for N
    items.
    """
    shown = [line for item in items for line in item.splitlines()]
    room = LINES - len(head.splitlines())
    counts = [1] * len(shown)
    if len(shown) > room:
        kinds: dict[str, list[str]] = {}
        for line in shown:
            kinds.setdefault(NUMBERED.sub(r"\1*", line), []).append(line)
        shown = [_counted(kind, alike) for kind, alike in kinds.items()]
        counts = [len(alike) for alike in kinds.values()]
    if len(shown) > room:
        left = sum(counts[room - 1 :])
        shown = [*shown[: room - 1], f"… {left:,} more"]
    return f"\n{indent}".join([head, *shown] if head else shown)


def counted(number: int, what: str) -> str:
    """A number with its noun: `1 file`, `2 files`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _counted(kind: str, alike: list[str]) -> str:
    """The line of a kind: its only item, or the number of its items with the numbers in one of them."""
    if len(alike) == 1:
        return alike[0]
    first = " ".join(match[0] for match in NUMBERED.finditer(alike[0]))
    return f"{kind} ({len(alike):,}, one is {first})"
