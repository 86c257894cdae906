"""Encodes text in which special tokens are written out by name, and checks that no row forges such a token.

next: data/chat/pieces.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from tmoe.data.chat.template import CLOSE, OPEN, ChatTemplate
from tmoe.data.tokenizer import DataError, JsonTokenizer, Tokenizer


class Encoded(NamedTuple):
    """Ids of a text, and for each id its first character and its end."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Marker:
    """Encodes what a template rendered, in which special tokens are written out by name."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        """template: its marks of turns may be vocabulary words that are not special tokens (DeepSeek)."""
        self.plain = tokenizer
        words: list[str] = []
        if isinstance(tokenizer, JsonTokenizer):
            self._tokenizer = tokenizer.marked()
            added = self._tokenizer.get_added_tokens_decoder().items()
            self.special = {token.content: number for number, token in added if token.special}
            words = [token.content for _, token in added if not token.special and token.content.strip()]
            self.opening = tokenizer.opening
        else:
            self._tokenizer = None
            self.special = {tokenizer.decode([tokenizer.eos]): tokenizer.eos}
            self.opening = ""
        longest_first = sorted((text for text in self.special if text), key=len, reverse=True)
        self.names = re.compile("|".join(map(re.escape, [*longest_first, OPEN, CLOSE])))
        known = {*self.special, *words}
        tags = {text for text in known if text.replace("</", "<", 1) in known - {text}}
        self.closers = {text for text in known if any(opener in known - {text} for opener in _openers(text))}
        """tokens that end a part of a turn (</tool_call> ends the part that <tool_call> begins) or a turn"""
        shown = _turns(template) if template and words else ""
        tags |= {text.replace("</", "<", 1) for text in tags}
        turns = [text for text in words if text in shown and text not in tags]
        forged = sorted((text for text in [*self.special, *turns] if text), key=len, reverse=True)
        self.forged = re.compile("|".join(map(re.escape, [*forged, OPEN, CLOSE])))
        """texts that no string of a row may hold: special tokens, and the words that mark turns"""
        self._normal, self._normalized = self._looked_for_in_normalized()

    def _looked_for_in_normalized(self) -> tuple[Callable[[str], str], re.Pattern[str] | None]:
        """The tokenizer's normalizer, and a pattern of the special tokens to search for in normalized text.

        A normalizer that makes text lower case turns <|END|> into <|end|>, for example.
        """
        normalizer = self._tokenizer.normalizer if self._tokenizer else None
        if self._tokenizer is None or normalizer is None:
            return str, None
        added = self._tokenizer.get_added_tokens_decoder().values()
        texts = [
            normalizer.normalize_str(token.content) for token in added if token.special and token.normalized
        ]
        kept: list[str] = sorted((text for text in texts if text.strip()), key=len, reverse=True)
        return normalizer.normalize_str, re.compile("|".join(map(re.escape, kept))) if kept else None

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """The tokens of each text. UnicodeError for a lone surrogate."""
        raw = [text.encode() for text in texts]
        if self._tokenizer is None:
            return [_of_bytes(text) for text in raw]
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        dtype = np.uint16 if self.plain.vocab <= 1 << 16 else np.uint32
        encoded = []
        for encoding in encodings:
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            encoded.append(Encoded(np.array(encoding.ids, dtype), offsets[:, 0], offsets[:, 1]))
        return encoded

    def require_text(
        self, messages: Sequence[dict[str, Any]], tools: list | None = None, more: dict | None = None
    ) -> None:
        """DataError if a string of a row holds a special token, which would end a turn or begin another.

        Every string is checked: contents, thoughts, calls with their keys and nested values, names, ids,
        tools and `more`, the other values that the row gives the template (chat_template_kwargs).
        """
        given = [(f"messages[{i}]: ", message) for i, message in enumerate(messages)]
        for start, value in (*given, ("tools", tools), ("chat_template_kwargs", more)):
            for place, text in _strings(value, ""):
                match = self.forged.search(text)
                if not match and self._normalized:
                    match = self._normalized.search(self._normal(text))
                if match:
                    shown = start + (place.removeprefix(".") if start.endswith(" ") else place)
                    mark = f"{match.group()!r}, which the tokenizer would read as a special token"
                    raise DataError(f"{shown} holds {mark}")


def _openers(closer: str) -> list[str]:
    """Tokens that may begin the part that `closer` ends: <x> for </x>, <|x> for <x|>, x_begin for x_end."""
    bar = re.fullmatch(r"<([^|]+)\|>", closer)
    openers = [closer.replace("</", "<", 1), closer.replace("end", "begin")]
    return openers + ([f"<|{bar.group(1)}>"] if bar else [])


def _turns(template: ChatTemplate) -> str:
    """Short conversations as the template renders them; those that it refuses are left out."""
    asked, answer = dict(role="user", content="a"), dict(role="assistant", content="b")
    rendered = []
    for messages in ([asked], [asked, answer, asked], [dict(role="system", content="c"), asked]):
        with suppress(DataError):
            rendered.append(template.render(messages))
    return "".join(rendered)


def _strings(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every string within a value, keys included, with its place in the value."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield f"{place}: a key", str(name)
            yield from _strings(item, f"{place}.{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _strings(item, f"{place}[{i}]")


def _of_bytes(raw: bytes) -> Encoded:
    ids = np.frombuffer(raw, np.uint8)
    characters = np.cumsum((ids & 0xC0) != 0x80) - 1
    return Encoded(ids, characters, characters + 1)
