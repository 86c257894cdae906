"""Refuses names of tasks that no file of lm_eval mentions, before lm_eval is imported and reads all of them.

lm_eval parses 14,000 YAML files to know its tasks, in about as many milliseconds; their bytes take a tenth.

next: eval/harness.py
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from tmoe.config.check import ConfigError, require

NAME = re.compile(rb"""^["']?(?:task|group|tag)["']?:[ \t]*["']?([\w.+-]+)""", re.MULTILINE)
INCLUDED = re.compile(rb"^include:[ \t]*(.+)$|^-[ \t]+(\S*yaml\S*)[ \t]*$", re.MULTILINE)
PATTERN = re.compile(r"[*?]|\[[^\]]*\]")


def words_of(names: Iterable[str]) -> list[str]:
    """The names and patterns of --tasks, of which each may hold several with commas between."""
    return [word for name in names for word in name.split(",") if word]


def require_mentioned(names: Sequence[str], paths: Sequence[Path]) -> None:
    """ConfigError for a name, or the longest part of a pattern, that is in no file of lm_eval or `paths`."""
    for path in paths:
        require(path.is_dir(), "tasks_path", path, "no such folder")
    words = words_of(names)
    left = {max(PATTERN.split(word), key=len).encode() for word in words}
    known: set[str] = set()
    for raw in _contents(paths):
        left = {part for part in left if part not in raw}
        if not left:
            return
        known |= {name.decode() for name in NAME.findall(raw)}
    refuse(next(w for w in words if max(PATTERN.split(w), key=len).encode() in left), known, paths)


def _contents(paths: Sequence[Path]) -> Iterator[bytes]:
    """YAML files of these folders, then lm_eval's own, each with the files that it includes."""
    spec = importlib.util.find_spec("lm_eval")
    places = spec.submodule_search_locations if spec is not None else None
    seen: set[Path] = set()
    for folder in (*paths, *(Path(place) / "tasks" for place in places or ())):
        left = list(folder.rglob("*.yaml"))
        while left:
            if (file := left.pop()) not in seen and file.is_file():
                seen.add(file)
                yield (raw := file.read_bytes())
                left += [file.parent / os.fsdecode(a or b).strip("[] \"'") for a, b in INCLUDED.findall(raw)]


def refuse(word: str, known: Iterable[str], paths: Sequence[Path]) -> NoReturn:
    """ConfigError for a name or pattern without a task."""
    near = get_close_matches(word, known, 1)
    hint = f"did you mean {near[0]}?" if near else "--tasks-path names a folder of tasks of your own"
    raise ConfigError.of("tasks", word, f"lm_eval has no such task; {'; '.join([*unread(paths), hint])}")


def unread(paths: Sequence[Path]) -> Iterator[str]:
    """Files of these folders that are no YAML, with the reason; lm_eval leaves them out in silence."""
    import yaml  # a dependency of lm_eval

    for file in (file for path in paths for file in sorted(path.rglob("*.yaml"))):
        try:
            for _ in yaml.parse(file.read_text("utf-8", "replace"), Loader=yaml.SafeLoader):
                pass
        except yaml.YAMLError as error:
            yield f"{file} is no YAML: {' '.join(str(error).split())}"
