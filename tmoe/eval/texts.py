"""The perplexity of texts: nats a token, and bits a byte, which tokenizers can be compared by.

next: eval/evaluator.py
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tmoe.config.check import ConfigError, Setting, require
from tmoe.eval.evaluator import Evaluator

LONE = re.compile("[\ud800-\udfff]")
WINDOW = 8192  # most tokens of a window, if nothing else says how long the model's sequences are


class TextFile(NamedTuple):
    """The documents of a file."""

    path: Path
    sha256: str
    documents: list[str]


def read_texts(path: Path) -> TextFile:
    """The documents of a file: the field "text" of each row of a .jsonl, or the whole of another file."""
    require(path.exists(), "text", path, "no such file")
    require(path.is_file(), "text", path, "is no file")
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError.of("text", path, f"not UTF-8 at byte {error.start}") from None
    documents = [text]
    if path.suffix == ".jsonl":
        documents = []
        for number, line in enumerate(text.split("\n"), 1):
            try:
                row = json.loads(line) if line.strip() else dict(text="")
            except (ValueError, RecursionError) as error:
                raise ConfigError.of("text", f"{path}:{number}", f"not JSON: {error}") from None
            ok = isinstance(row, dict) and isinstance(row.get("text"), str)
            require(ok, "text", f"{path}:{number}", "must be a row", '{"text": "..."}')
            surrogate = LONE.search(row["text"])
            wrong = f"holds {surrogate[0]!r}, which is no Unicode text" if surrogate else ""
            require(not surrogate, "text", f"{path}:{number}", wrong)
            documents.append(row["text"])
    documents = [document for document in documents if document]
    require(len(documents) > 0, "text", path, "holds no text")
    return TextFile(path, hashlib.sha256(raw).hexdigest(), documents)


def windows(context: Sequence[int], ids: Sequence[int], window: int, stride: int) -> list[tuple[Any, Any]]:
    """Inputs and targets of windows that predict each of `ids` once.

    The first window predicts as many tokens as it has room for, after `context`. Each further one predicts at
    most `stride` tokens, after at least window - stride tokens.
    """
    whole = [*context, *ids]
    total = len(whole) - 1
    end = min(max(window, len(context)), total)
    pairs = [(whole[:end], whole[len(context) : end + 1])]
    while end < total:
        new = min(end + stride, total)
        pairs.append((whole[max(new - window, 0) : new], whole[end + 1 : new + 1]))
        end = new
    return pairs


def lengths(evaluator: Evaluator, window: int | None, stride: int | None) -> tuple[int, int]:
    """Tokens of a window, and of its stride. ConfigError for lengths that the model does not have."""
    own = evaluator.loaded.seq or WINDOW
    window = min(own, evaluator.longest) if window is None else window
    valid = f"at most {evaluator.longest}, the model's positions or --max-len"
    require(window <= evaluator.longest, "window", window, "must be smaller", valid)
    stride = max(window // 2, 1) if stride is None else stride
    require(stride <= window, "stride", stride, f"must be at most {Setting('window', window)}")
    return window, stride


def evaluate(evaluator: Evaluator, files: Sequence[TextFile], window: int, stride: int) -> dict[str, Any]:
    """The figures of each file, and of all files together."""
    tokens = evaluator.tokens
    context = tokens.begin or [tokens.prefix]
    encode = evaluator.loaded.tokenizer.encode  # as in training: special tokens in a text are ordinary text
    found = []
    for file in files:
        pairs = []
        for document in file.documents:
            if ids := encode(document).tolist():
                pairs += windows(context, ids, window, stride)
        require(len(pairs) > 0, "text", file.path, "holds no text that the tokenizer keeps")
        scores = evaluator.score(pairs)
        size = sum(len(document.encode()) for document in file.documents)
        count = sum(len(targets) for _, targets in pairs)
        nats = -math.fsum(total for total, _ in scores)
        told = dict(file=str(file.path), sha256=file.sha256, documents=len(file.documents))
        found.append(told | figures(count, size, nats))
    sums = (sum(one[name] for one in found) for name in ("tokens", "bytes", "nats"))
    return dict(files=found, all=figures(*sums), window=window, stride=stride)


def figures(tokens: int, size: int, nats: float) -> dict[str, Any]:
    """The figures of a text of `size` bytes."""
    mean = nats / tokens
    return dict(
        tokens=tokens,
        bytes=size,
        nats=nats,
        nats_a_token=mean,
        bits_a_byte=nats / math.log(2) / size,
        perplexity=math.exp(mean) if mean < 700 else math.inf,
    )
