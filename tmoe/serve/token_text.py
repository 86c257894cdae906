"""The text and the bytes of one token, also of a token that is a part of a character.

next: serve/answers.py
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

from tmoe.data.tokenizer import ByteTokenizer, Tokenizer
from tmoe.generate.text import BROKEN

OF_A_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=2**16)
def token_text(tokenizer: Tokenizer, i: int) -> tuple[str, bytes | None]:
    """A token's text, with U+FFFD for a part of a character, and its bytes; None if they are not known.

    The text is that within a text: many tokenizers remove a blank at the beginning of a text.
    """
    before = [*tokenizer.encode("a").tolist()]
    text = tokenizer.decode([*before, i]).removeprefix(tokenizer.decode(before))
    if BROKEN not in text:
        raw = text.encode("utf-8", "surrogateescape")
        return raw.decode("utf-8", "replace"), raw
    return text, _bytes_of(tokenizer, i, text)


def _bytes_of(tokenizer: Tokenizer, i: int, text: str) -> bytes | None:
    """The bytes of a token whose text has U+FFFD, by the token's name in its vocabulary."""
    name = "" if isinstance(tokenizer, ByteTokenizer) else tokenizer.name_of(i) or ""
    if match := OF_A_BYTE.fullmatch(name):
        return bytes([int(match[1], 16)])
    if BROKEN in name:  # the character itself is a part of the vocabulary
        return text.encode()
    alphabet = byte_alphabet()
    return bytes(alphabet[c] for c in name) if name and set(name) <= alphabet.keys() else None


@cache
def byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes (GPT-2's): printable ones as they are."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
