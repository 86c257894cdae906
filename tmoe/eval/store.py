"""Finished results of an evaluation in a file, so that an interrupted one continues.

A line of NAME.answers.jsonl is a result, under a key that is a hash of everything the result depends on
besides the model. The first line names the model, its tokenizer and its type. Each process appends to its
own file: NAME.answers-1.jsonl is that of rank 1.

next: eval/evaluator.py
"""

from __future__ import annotations

import hashlib
import json
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

from tmoe.config.check import ConfigError
from tmoe.log.metrics_file import COMPACT, append

# the facts of an identity, some of which a model may not have
FACTS = "model", "tokenizer", "dtype", "base", "adapter", "quantize"


def key_of(*parts: Any) -> str:
    """A hash of values that JSON can represent."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class Store:
    """Results by key. Without a path, results are kept in memory alone.

    Args:
        path: the file with the results of the evaluation, NAME.json.
        identity: the facts by which results of one model differ from those of another.
        rank: of this process. Rank 0 reads the files of all ranks, and each other rank its own.

    Raises ConfigError, which names the facts that differ, if the files hold results of another model, or
    anything else.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any], rank: int = 0) -> None:
        self.known: dict[str, Any] = {}
        self.path, self.identity = path, identity
        self.own = None if path is None else path.with_name(f"{path.stem}.answers{-rank or ''}.jsonl")
        self.file: BinaryIO | None = None
        if path is None or self.own is None:
            return
        if rank == 0 and path.is_file():
            self._compare_results(path)
        others = path.parent.glob(f"{escape(path.stem)}.answers*.jsonl") if rank == 0 else [self.own]
        for file in sorted(others):
            if file.is_file():
                self._read(file)

    def _compare_results(self, path: Path) -> None:
        """Refuses to write over results of another model, or over another file."""
        try:
            model = json.loads(path.read_text("utf-8", "replace"))["model"]
            model = {name: model[name] for name in FACTS if name in model}
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._refusal("it is there, and holds no results of an evaluation") from None
        self._compare(path, model)

    def _read(self, file: Path) -> None:
        named = False
        for text in file.read_text("utf-8", "replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # torn by an interruption
                continue
            if not isinstance(line, dict):
                raise self._refusal(f"{file.name} there holds no results of an evaluation")
            if "key" not in line:
                self._compare(file, line)
                named = True
            elif named:  # the line of the model before it may have been torn
                self.known[line["key"]] = line.get("value")

    def _compare(self, file: Path, facts: dict[str, Any]) -> None:
        others = [name for name in self.identity | facts if facts.get(name) != self.identity.get(name)]
        if others:
            raise self._refusal(f"{file.name} there holds results of another {', '.join(others)}")

    def _refusal(self, wrong: str) -> ConfigError:
        return ConfigError.of("out", self.path, wrong, "a new file")

    def add(self, key: str, value: Any) -> None:
        """Keeps a result, also in the file if there is one."""
        self.known[key] = value
        if self.own is None:
            return
        lines = b""
        if self.file is None:
            torn = self.own.is_file() and not self.own.read_bytes().endswith(b"\n")
            self.file = open(self.own, "ab", buffering=0)  # noqa: SIM115
            # again in each call: a call that was killed at once may have left a part of this line
            lines = b"\n" * torn + json.dumps(self.identity, separators=COMPACT).encode() + b"\n"
        line = json.dumps(dict(key=key, value=value), separators=COMPACT).encode() + b"\n"
        append(self.file, lines + line)

    def close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            file.close()
