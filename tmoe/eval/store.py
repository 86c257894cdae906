"""Finished results of an evaluation in a file, so that an interrupted one continues.

A line of NAME.answers.jsonl is a result, under a key that is a hash of everything the result depends on
besides the model. The first line names the model, its tokenizer and its type. Each process appends to its
own file: NAME.answers-1.jsonl is that of rank 1.

next: eval/evaluator.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from tmoe.config.check import ConfigError
from tmoe.log.metrics_file import COMPACT, append


def key_of(*parts: Any) -> str:
    """A hash of values that JSON can represent."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class Store:
    """Results by key. Without a path, results are kept in memory alone.

    Args:
        path: the file with the results of the evaluation, NAME.json.
        identity: the facts by which results of one model differ from those of another.
        rank: of this process.

    Raises ConfigError, which names the facts that differ, if the files hold results of another model.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any], rank: int = 0) -> None:
        self.known: dict[str, Any] = {}
        self.path, self.identity = path, identity
        self.own = None if path is None else path.with_name(f"{path.stem}.answers{-rank or ''}.jsonl")
        self.file: BinaryIO | None = None
        if path is not None and rank == 0:
            for file in sorted(path.parent.glob(f"{path.stem}.answers*.jsonl")):
                self._read(file)

    def _read(self, file: Path) -> None:
        for text in file.read_text("utf-8", "replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # torn by an interruption
                continue
            if "key" in line:
                self.known[line["key"]] = line["value"]
                continue
            others = [name for name, value in self.identity.items() if line.get(name) != value]
            if others:
                wrong = f"{file.name} there holds results of another {', '.join(others)}"
                raise ConfigError.of("out", self.path, wrong, "a new file")

    def add(self, key: str, value: Any) -> None:
        """Keeps a result, also in the file if there is one."""
        self.known[key] = value
        if self.own is None:
            return
        lines = b""
        if self.file is None:
            self.file = open(self.own, "ab", buffering=0)  # noqa: SIM115
            end = self.file.tell()
            with self.own.open("rb") as before:
                before.seek(max(end - 1, 0))
                lines = b"\n" if end and before.read() != b"\n" else b""
            lines += b"" if end else json.dumps(self.identity, separators=COMPACT).encode() + b"\n"
        line = json.dumps(dict(key=key, value=value), separators=COMPACT).encode() + b"\n"
        append(self.file, lines + line)

    def close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            file.close()
