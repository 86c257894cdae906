"""The train.py commands that README.md and docs/*.md show, each with its page, world size and arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tmoe.config.presets import presets
from tmoe.extras.migrate import launchers as launch

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"map.md", "migrate.md"}  # a list of files; commands of other programs
NODES = "4"  # number of nodes in the batch script of multinode.md
PLACES = ("--init", "--config", "--out")  # flags whose values are the reader's files


class Shown(NamedTuple):
    """One command of a page."""

    place: str
    """page and line"""
    world: int
    words: list[str]
    """arguments of train.py, without the reader's files; the model is a preset"""
    around: str
    """the line, and the paragraphs before and after its block"""


def shown() -> Iterator[Shown]:
    """Yields every command that names a model: a preset, or a published model by --init."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if page.name in LEFT_OUT:
            continue
        lines = page.read_text().splitlines()
        for at, text in _commands(lines):
            if (command := _read(text)) is not None:
                yield Shown(f"{page.relative_to(ROOT)}:{at + 1}", *command, _around(lines, at))


def _commands(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yields line numbers and complete commands, with continued lines joined."""
    at = 0
    while at < len(lines):
        start, text = at, lines[at]
        while text.endswith("\\") and at + 1 < len(lines):
            at += 1
            text = f"{text[:-1].rstrip()} {lines[at].strip()}"
        at += 1
        inside = text.startswith("    ") or _fenced(lines, start)
        if inside and re.search(r"(^|\s)train\.py\s", text) and "…" not in text:
            yield start, text


def _fenced(lines: list[str], at: int) -> bool:
    return sum(line.startswith("```") for line in lines[:at]) % 2 == 1


def _read(text: str) -> tuple[int, list[str]] | None:
    """(world, words) of a command; None if it names no published model."""
    text = text.strip().replace('"$RUN"', "RUN").replace('"$SLURM_NNODES"', NODES)
    words = shlex.split(re.sub(r"(\s#|\s&$|  +[a-z]).*", "", text))
    front = launch.read(words, {})
    if "train.py" not in front.program:
        return None
    others, model = [], ""
    words = list(front.words)
    if words and words[0] in presets():
        model = words.pop(0)
    while words:
        word = words.pop(0)
        if word in PLACES:
            value = words.pop(0)
            name = value.rstrip("/").rpartition("/")[2].lower()
            model = model or (name if word == "--init" and name in presets() else "")
        else:
            others.append(word)
    world = front.world or 1
    if "--world" in others:
        at = others.index("--world")
        world = int(others[at + 1])
        del others[at : at + 2]
    return (world, [model, *others]) if model else None


def _around(lines: list[str], at: int) -> str:
    """The block of a line, with the paragraphs above and below it."""
    text = "\n".join(lines)
    before, after = "\n".join(lines[:at]), "\n".join(lines[at:])
    return "\n\n".join([*before.split("\n\n")[-2:], *after.split("\n\n")[:2]]) if text else ""
