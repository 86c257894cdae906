"""Text to token ids and back: raw bytes, or any Hugging Face tokenizer.json.

next: corpus.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers


class DataError(ValueError):
    """Data that cannot be trained on: names the file, the place in it, and what would be valid."""


class Tokenizer(Protocol):
    """What data needs of a tokenizer; `ByteTokenizer` and `JsonTokenizer` have it."""

    vocab: int
    """ids are below this"""
    eos: int
    """id that ends a document; `encode` never gives it for ordinary text"""
    fingerprint: str
    """equal for two tokenizers that give the same ids"""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids [n] of a text, without a separator. UnicodeError where the text cannot be represented."""
        ...

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of each text, in parallel where that pays."""
        ...

    def decode(self, ids: np.ndarray | Sequence[int]) -> str: ...


class ByteTokenizer:
    """Every byte is its own id; 0 (NUL), which text does not hold, separates documents.

    Bytes that are not UTF-8 decode to lone surrogates ("surrogateescape"), so decode and encode lose nothing.
    """

    vocab, eos, fingerprint = 256, 0, "bytes"

    def encode(self, text: str | bytes) -> np.ndarray:
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8)

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        return bytes(np.asarray(ids, dtype=np.uint8)).decode("utf-8", "surrogateescape")


class JsonTokenizer:
    """A Hugging Face tokenizer.json.

    Special tokens are neither added nor recognised: "<|endoftext|>" written out in a text becomes ordinary tokens, so
    that no document can forge a separator. `eos` is the `eos_token` of a tokenizer_config.json in the same folder, or
    else the first of `EOS_NAMES` in the vocabulary. DataError if there is neither, or the file is not a tokenizer.
    """

    EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        except Exception as error:  # the Rust side raises bare Exception
            raise DataError(f"--data.tokenizer={path}: not a Hugging Face tokenizer.json: {error}") from error
        self._tokenizer.encode_special_tokens = True  # encode them as the text that they are
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab = max(ids.values()) + 1  # ids may have gaps, so the number of entries would not do
        self.eos = self._find_eos(path, ids)
        self.fingerprint = "sha256:" + hashlib.sha256(raw).hexdigest()[:32]
        self._dtype = np.uint16 if self.vocab <= 1 << 16 else np.uint32

    @classmethod
    def _find_eos(cls, path: Path, ids: dict[str, int]) -> int:
        settings = path.with_name("tokenizer_config.json")
        try:
            told = json.loads(settings.read_bytes()) if settings.exists() else {}
        except (ValueError, RecursionError) as error:
            raise DataError(f"{settings}: not JSON: {error}") from error
        if not isinstance(told, dict):
            raise DataError(f'{settings}: must hold an object, {{"eos_token": "..."}}')
        named = told.get("eos_token")
        named = named.get("content", named) if isinstance(named, dict) else named
        if not isinstance(named, str | None):
            raise DataError(f'{settings}: eos_token={named!r}: must be a token, "..." or {{"content": "..."}}')
        for name in cls.EOS_NAMES if named is None else (named,):
            if name in ids:
                return ids[name]
        wanted = f"{named!r} of {settings}" if named else f"any of {', '.join(cls.EOS_NAMES)}"
        raise DataError(
            f"--data.tokenizer={path}: no token to end documents with: the vocabulary lacks {wanted}; "
            f'name one in {settings}, {{"eos_token": "..."}}'
        )

    def encode(self, text: str | bytes) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        raw = [text.encode() if isinstance(text, str) else text for text in texts]  # finds lone surrogates
        # encode_batch_fast leaves out the character offsets, which nobody reads here
        encodings = self._tokenizer.encode_batch_fast([text.decode() for text in raw], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer named by `--data.tokenizer`: 'bytes', or the path of a tokenizer.json."""
    if spec == "bytes":
        return ByteTokenizer()
    if not Path(spec).is_file():
        raise DataError(f"--data.tokenizer={spec}: no such file; valid: 'bytes' or the path of a tokenizer.json")
    return JsonTokenizer(Path(spec))
