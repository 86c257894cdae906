"""Reads prompts from a file, and writes answers as lines of JSON.

next: generate/command_line.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tmoe.config.check import ConfigError, Setting, require

if TYPE_CHECKING:
    from tmoe.generate.engine import Piece, Sample

ROW = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """A row for each prompt: each object of a .jsonl or .json file, or each line of another file.

    Other fields of a row are kept. Empty lines are left out. ValueError, which names the line, for a line
    that is not a row.
    """
    require(path.is_file(), "file", path, "no such file")
    place = Setting("file", path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError.of("file", path, f"not UTF-8 at byte {error.start}") from None
    if path.suffix == ".json":
        numbered = enumerate(_parsed(text, place, list), 1)
        rows = [_row(value, f"{place}: row {i}") for i, value in numbered]
    else:
        lines = [(f"{place}:{i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        jsonl = path.suffix == ".jsonl"
        rows = [
            _row(_parsed(line, where, dict), where) if jsonl else dict(prompt=line.removesuffix("\r"))
            for where, line in lines
        ]
    require(len(rows) > 0, "file", path, "holds no prompt")
    return rows


def _parsed(text: str, where: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    require(isinstance(value, kind), f"{where}: must be {'a list of rows' if kind is list else ROW}")
    return value


def _row(value: Any, where: str) -> dict[str, Any]:
    ok = isinstance(value, dict) and (isinstance(value.get("prompt"), str) or is_chat(value))
    require(ok, f"{where}: must be {ROW}")
    return value


def is_chat(row: dict[str, Any]) -> bool:
    """Whether a row has a list of messages."""
    messages = row.get("messages")
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(m, dict) and "role" in m for m in messages)
    )


def write_answers(
    rows: Sequence[dict[str, Any]], n: int, pieces: Iterable[Piece], write: Callable[[str], Any]
) -> Iterator[Sample]:
    """Writes a line for each answer, in the order of the rows, as soon as the lines before it are written.

    A line has its row's fields and sample, text, finish, tokens, logprob (the sum over the answer's tokens,
    in nats). Yields each answer when it is done.
    n: answers to each prompt. pieces: the pieces of all answers.
    """
    due = 0  # number of the next line
    waiting: dict[int, str] = {}
    for piece in pieces:
        if piece.done is None:
            continue
        done = piece.done
        made = dict(
            sample=piece.sample,
            text=done.text,
            finish=done.finish,
            tokens=len(done.ids),
            logprob=round(done.logprobs.sum().item(), 4),
        )
        waiting[piece.prompt * n + piece.sample] = json.dumps(rows[piece.prompt] | made, ensure_ascii=False)
        while due in waiting:
            write(waiting.pop(due) + "\n")
            due += 1
        yield done
