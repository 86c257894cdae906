"""Encodes and decodes texts as transformers' tokenizers do, which published tasks and scores are made with.

In training, tmoe reads "<|im_end|>" in a text as ordinary tokens. Harness and chat templates mean the token.

next: eval/harness.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tokenizers

from tmoe.base.disk import BOM
from tmoe.data.tokenizer import JsonTokenizer, Tokenizer


class Tokens:
    """A tokenizer for evaluations.

    begin: tokens that precede every text, as in `Loaded`.
    """

    def __init__(self, tokenizer: Tokenizer, begin: Sequence[int]) -> None:
        self.plain, self.begin = tokenizer, list(begin)
        self.eos = tokenizer.eos
        self.eos_text = tokenizer.decode([tokenizer.eos])
        self.marked = with_specials(tokenizer) if isinstance(tokenizer, JsonTokenizer) else None
        self.by_file = self._by_file()
        self.prefix = self._prefix()
        """the token before a text without a context: bos, or else eos"""
        self.prefix_text = tokenizer.decode([self.prefix])

    def _by_file(self) -> bool:
        """Whether the file of the tokenizer puts `begin`, and else nothing, before a text.

        A run may have been trained without it.
        """
        if self.marked is None:
            return False
        whole, plain = self.marked.encode("a").ids, self.marked.encode("a", add_special_tokens=False).ids
        start = len(self.begin)
        return whole[:start] == self.begin and whole[start : start + len(plain)] == plain

    def _prefix(self) -> int:
        if self.marked is not None:
            assert isinstance(self.plain, JsonTokenizer)
            bos = _content(_settings(self.plain).get("bos_token"))
            if bos is not None and (number := self.marked.token_to_id(bos)) is not None:
                return number
        return self.begin[0] if self.begin else self.eos

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Ids of a text. special: put the tokenizer's own tokens around it; None: unless it has them."""
        if special is None:
            special = not (self.prefix_text and text.startswith(self.prefix_text))
        if self.by_file and self.marked is not None:
            return self.marked.encode(text, add_special_tokens=special).ids
        before = self.begin if special else ()
        if self.marked is None:
            return [*before, *self.plain.encode(text).tolist()]
        return [*before, *self.marked.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens."""
        if self.marked is not None:
            return self.marked.decode(list(ids), skip_special_tokens=True)
        text = self.plain.decode([i for i in ids if i != self.eos])
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def with_specials(tokenizer: JsonTokenizer) -> tokenizers.Tokenizer:
    """A tokenizer that reads and skips all special tokens that its settings name, as transformers does."""
    marked = tokenizer.marked()
    known = {i for i, token in marked.get_added_tokens_decoder().items() if token.special}
    new = [marked.id_to_token(i) for i in sorted(tokenizer.special - known)]
    marked.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in new])
    return marked


def _content(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _settings(tokenizer: JsonTokenizer) -> dict[str, Any]:
    raw = tokenizer.files.settings
    return json.loads(raw.removeprefix(BOM)) if raw else {}
