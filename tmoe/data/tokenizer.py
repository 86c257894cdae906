"""Encodes text as token ids and decodes it: bytes, a Hugging Face tokenizer.json, or a sentencepiece model.

next: data/sources.py
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tokenizers

from tmoe.base.disk import BOM, pointer_words
from tmoe.data.chat.format import SETTINGS, TEMPLATE, TOOLS_FILE, ChatFormat, ends_in, json_object


class DataError(ValueError):
    """Raised for data that cannot be trained on; it names the file, the place in it, and valid data."""


class Tokenizer(Protocol):
    """The interface that ByteTokenizer, JsonTokenizer and SentencePieceTokenizer implement."""

    vocab: int
    """ids are below this"""
    eos: int
    """id that ends a document; `encode` never returns it for ordinary text"""
    ordinary: int
    """ids of texts and `eos` are below this; only other special tokens have higher ids"""
    fingerprint: str
    """equal for two tokenizers that give the same ids"""
    special: frozenset[int]
    """ids of special tokens that `decode` shows; readers of answers may leave them out"""
    named: bool
    """whether the settings or the weights name this tokenizer"""
    chat: ChatFormat | None
    """the weights' format of conversations, if they have one; it is preferred to the tokenizer's files"""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids [n] of a text, without a separator. UnicodeError if the text cannot be represented."""
        ...

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of each text, in parallel if that is faster."""
        ...

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of ids. An id without a token is left out: a model may have more ids."""
        ...


class ByteTokenizer:
    """Uses each byte as its id; 0 (NUL), which text does not hold, separates documents.

    Bytes that are not UTF-8 decode to lone surrogates ("surrogateescape"), so decode and encode lose nothing.
    """

    vocab = ordinary = 256
    eos = 0
    fingerprint = "bytes"
    special: frozenset[int] = frozenset()
    chat: ChatFormat | None = None

    def __init__(self, named: bool = True) -> None:
        """named: False if it is only the default, so that ids may be of a tokenizer that no setting names."""
        self.named = named

    def encode(self, text: str | bytes) -> np.ndarray:
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8)

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        known = np.asarray(ids, dtype=np.int64)
        return bytes(known[known < self.vocab].astype(np.uint8)).decode("utf-8", "surrogateescape")


class TokenizerFiles(NamedTuple):
    """The contents of a tokenizer's files, such as tokenizer.json and tokenizer_config.json."""

    name: str
    """name of the tokenizer.json or tokenizer.model, for messages"""
    raw: bytes
    settings: bytes | None
    settings_name: str = "tokenizer_config.json"
    template: bytes | None = None
    """the folder's chat_template.jinja; older folders have the template in the settings"""
    tools: bytes | None = None
    """a second template, for conversations with tools (additional_chat_templates/tool_use.jinja)"""

    @property
    def fingerprint(self) -> str:
        return "sha256:" + hashlib.sha256(self.raw).hexdigest()[:32]


def own_files(tokenizer: object) -> dict[str, bytes]:
    """The files that a tokenizer was read from, by their names on Hugging Face; {} for a ByteTokenizer."""
    files = getattr(tokenizer, "files", None)
    if not isinstance(files, TokenizerFiles):
        return {}
    JSON, PIECES = NAMES
    content = {PIECES if isinstance(tokenizer, SentencePieceTokenizer) else JSON: files.raw}
    content |= {} if files.settings is None else {SETTINGS: files.settings}
    return content | ({} if files.template is None else {TEMPLATE: files.template})


class Carried(NamedTuple):
    """The tokenizer and the format of conversations that are stored with a model's weights."""

    where: str
    """the folder in which they were found"""
    fingerprint: str
    """fingerprint of the tokenizer; "" if it is not known"""
    files: TokenizerFiles | None
    """files of the tokenizer; None: only its fingerprint is known"""
    others: tuple[str, ...] = ()
    """fingerprints of the same tokenizer in other formats, such as tokenizer.model next to tokenizer.json"""
    chat: ChatFormat | None = None
    """how the model's conversations are written, and where answers end"""
    generation: dict[str, Any] = {}  # noqa: RUF012
    """generation_config.json of the published folder from which the weights were first read"""

    def load(self, flag: str = "--data.tokenizer") -> Tokenizer:
        """The tokenizer, with the weights' `chat`. `files` must be given.

        Raises DataError if it is no tokenizer, which names the flag for another copy.
        """
        assert self.files
        try:
            tokenizer = of_files(self.files)
        except DataError as error:
            raise DataError(f"{error}; or name another copy of it with {flag}") from error
        tokenizer.chat = self.chat
        return tokenizer

    def require(self, what: str, fingerprint: str) -> None:
        """DataError unless `what`, of tokenizer `fingerprint`, has ids of these weights' tokenizer."""
        if not self.fingerprint or fingerprint in (self.fingerprint, *self.others):
            return
        do = (
            "name that tokenizer with --data.tokenizer"
            if self.files is None
            else "leave --data.tokenizer out"
        )
        raise DataError(
            f"{what}: of tokenizer {fingerprint}; the weights of {self.where} are of {self.fingerprint}, "
            f"for which ids mean other text: {do}, make shards with it, or, with --init and another "
            "vocabulary in mind, say --data.new-tokenizer"
        )


class JsonTokenizer:
    """A Hugging Face tokenizer.json.

    Special tokens are neither added nor recognised: "<|endoftext|>" written out in a text becomes ordinary
    tokens. So no document can forge a separator, whatever the file states about that token. `eos` is the
    `eos_token` of a tokenizer_config.json in the same folder, or else the first of `EOS_NAMES` in the
    vocabulary. DataError if there is neither, or the file is not a tokenizer.

    A text longer than LONG is encoded in overlapping windows, because a tokenizer needs a hundred or more
    bytes of memory for each byte of text. Two windows are joined at a seam: AROUND tokens on each side of it
    are equal, and at the same place in the text, in both windows. So the ids are those of the whole text for
    every tokenizer whose choices depend on fewer tokens than that. If there is no such seam, as in 20,000
    equal characters, the two windows are encoded as one.
    """

    EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
    LISTS = "additional_special_tokens", "extra_special_tokens"  # settings that name several special tokens
    LONG = 1_000_000  # characters
    WINDOW = 250_000
    OVERLAP = 16_384
    AROUND = 128  # tokens
    AT_ONCE = 8  # windows, encoded in parallel
    named = True
    chat: ChatFormat | None = None

    def __init__(self, files: TokenizerFiles) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files.raw.removeprefix(BOM))
        except Exception as error:  # the Rust side raises bare Exception
            raise DataError(f"{files.name}: not a Hugging Face tokenizer.json: {error}") from error
        self.files = files
        self._tokenizer.encode_special_tokens = True  # encode their names as ordinary text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab = max(ids.values()) + 1  # ids may have gaps, so the number of entries may be too low
        self.eos_text = self._find_eos(files, ids)
        self.eos = ids[self.eos_text]
        self.fingerprint = files.fingerprint
        self._dtype = np.uint16 if self.vocab <= 1 << 16 else np.uint32
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        # A padding token that was added after the model's vocabulary is special and never occurs in a text.
        self.ordinary = max({*ids.values()} - special | {self.eos}) + 1
        added = self._tokenizer.get_added_tokens_decoder().get(self.eos)
        # An added token that is not special would be recognised in a text, so eos is made special.
        if added is not None and not added.special:
            self._tokenizer.add_special_tokens([added])
        self.special = frozenset(special | {self.eos} | {ids[text] for text in self._named() if text in ids})

    @property
    def opening(self) -> str:
        """The special token that the tokenizer adds before every text; "" if there is none."""
        encoding = self._tokenizer.encode("")
        return encoding.tokens[0] if encoding.ids and encoding.ids[0] != self.eos else ""

    def marked(self) -> tokenizers.Tokenizer:
        """A second tokenizer, which encodes the names of special tokens in a text as these tokens."""
        marked = tokenizers.Tokenizer.from_buffer(self.files.raw.removeprefix(BOM))
        marked.no_truncation()
        marked.no_padding()
        marked.add_special_tokens([tokenizers.AddedToken(self.eos_text, special=True, normalized=False)])
        return marked

    def _named(self) -> list[str]:
        """Names of special tokens in the settings, as transformers reads them."""
        fields = json.loads(self.files.settings) if self.files.settings else {}
        given = [value for name, value in fields.items() if name.endswith("_token")]
        for name in self.LISTS:
            values = fields.get(name) or ()
            given += values.values() if isinstance(values, dict) else values
        texts = [value.get("content") if isinstance(value, dict) else value for value in given]
        return [text for text in texts if isinstance(text, str) and text]

    @classmethod
    def _find_eos(cls, files: TokenizerFiles, ids: dict[str, int]) -> str:
        """The token that ends documents: eos_token of the settings, else the first of EOS_NAMES in `ids`.

        DataError if the vocabulary has no such token.
        """
        settings = files.settings_name
        try:
            fields = {} if files.settings is None else json.loads(files.settings)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{settings}: not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise DataError(f'{settings}: must hold an object, {{"eos_token": "..."}}')
        named = fields.get("eos_token")
        named = named.get("content", named) if isinstance(named, dict) else named
        if not isinstance(named, str | None):
            raise DataError(
                f'{settings}: eos_token={named!r}: must be a token, "..." or {{"content": "..."}}'
            )
        for name in cls.EOS_NAMES if named is None else (named,):
            if name in ids:
                return name
        wanted = f"{named!r} of {settings}" if named else f"any of {', '.join(cls.EOS_NAMES)}"
        raise DataError(
            f"{files.name}: no token to end documents with: the vocabulary lacks {wanted}; "
            f'name one in {settings}, {{"eos_token": "..."}}'
        )

    def encode(self, text: str | bytes) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        decoded = [text.decode() if isinstance(text, bytes) else text for text in texts]
        for text in decoded:
            text.encode()  # UnicodeEncodeError names a lone surrogate and where it is
        encoded = self._encode_texts(decoded)
        return [
            self._in_parts(text) if self.eos in ids else ids
            for text, ids in zip(decoded, encoded, strict=True)
        ]

    def _encode_texts(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text: short texts are encoded in one call, long texts in windows."""
        short = [text for text in texts if len(text) <= self.LONG]
        # encode_batch_fast leaves out the character offsets, which are unused here.
        encodings = iter(self._tokenizer.encode_batch_fast(short, add_special_tokens=False))
        return [
            self._ids(next(encodings)) if len(text) <= self.LONG else self._encode_long(text)
            for text in texts
        ]

    def _in_parts(self, text: str) -> np.ndarray:
        """Ids of a text for which the tokenizer's own model makes the separator from its written-out name.

        The text is cut in the middle of each such name, and the parts are encoded separately.
        """
        middle = len(self.eos_text) // 2
        halves = re.escape(self.eos_text[:middle]), re.escape(self.eos_text[middle:])
        parts = re.split(f"(?<={halves[0]})(?={halves[1]})", text) if middle else [text]
        return np.concatenate(self._encode_texts(parts))

    def _encode_long(self, text: str) -> np.ndarray:
        """Ids of a text, encoded in windows that overlap (see the class)."""
        starts = range(0, len(text) - self.OVERLAP, self.WINDOW - self.OVERLAP)
        parts: list[np.ndarray] = []
        before: tokenizers.Encoding | None = None
        begun = 0  # first character of the window `before`
        first = 0  # first token of `before` that is not in `parts` yet
        for low in range(0, len(starts), self.AT_ONCE):
            some = starts[low : low + self.AT_ONCE]
            texts = [text[at : at + self.WINDOW] for at in some]
            for start, after in zip(some, self._encode_windows(texts), strict=True):
                if before is None:
                    before = after
                    continue
                overlap = text[start : start + self.OVERLAP]
                if seam := self._seam(overlap, before, after, start - begun):
                    parts.append(self._ids(before)[first : seam[0]])
                    before = after
                    begun = start
                    first = seam[1]
                    continue

                # Without a seam the two become one window, if that begins with the tokens already used.
                (longer,) = self._encode_windows([text[begun : start + self.WINDOW]])
                used = first + self.AROUND if first else 0
                if longer.ids[:used] != before.ids[:used]:
                    return self._ids(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])
                before = longer
        assert before is not None
        return np.concatenate([*parts, self._ids(before)[first:]])

    def _encode_windows(self, texts: list[str]) -> list[tokenizers.Encoding]:
        return self._tokenizer.encode_batch(texts, add_special_tokens=False)

    def _seam(
        self, overlap: str, before: tokenizers.Encoding, after: tokenizers.Encoding, shift: int
    ) -> tuple[int, int] | None:
        """The token of `before` and the token of `after` at which to switch; None if the windows differ.

        The window `after` begins `shift` characters later, with the text `overlap`.
        """
        low = self.OVERLAP // 4
        high = self.OVERLAP * 3 // 4
        words = [match.end() for match in re.compile(r"\s(?=\S)").finditer(overlap, low, high)]
        old = np.array(before.ids)
        new = np.array(after.ids)
        around = range(-self.AROUND, self.AROUND)
        for at in (*words[:: max(len(words) // 16, 1)], *range(low, high, (high - low) // 16)):
            i = before.char_to_token(shift + at)
            j = after.char_to_token(at)
            if i is None or j is None or min(i, j) < self.AROUND or i + self.AROUND > len(old):
                continue
            old_ids = old[i - self.AROUND : i + self.AROUND]
            new_ids = new[j - self.AROUND : j + self.AROUND]
            if np.array_equal(old_ids, new_ids) and all(
                (old_at := before.token_to_chars(i + k)) is not None
                and (new_at := after.token_to_chars(j + k)) is not None
                and old_at == (new_at[0] + shift, new_at[1] + shift)
                for k in around
            ):
                return i, j
        return None

    def _ids(self, encoding: tokenizers.Encoding) -> np.ndarray:
        return np.array(encoding.ids, dtype=self._dtype)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def name_of(self, i: int) -> str | None:
        """The token's name in the vocabulary; None if no token has this id."""
        return self._tokenizer.id_to_token(i)


class SentencePieceTokenizer:
    """A sentencepiece model, such as Llama 2's tokenizer.model.

    Neither bos nor eos is added, and no control symbol is recognised in a text. `eos` is the model's own, or
    else the first of JsonTokenizer.EOS_NAMES in its vocabulary. DataError if there is no eos, the file is no
    such model, or the package sentencepiece is not installed.
    """

    named = True
    special: frozenset[int] = frozenset()  # control symbols have no text
    chat: ChatFormat | None = None

    def __init__(self, files: TokenizerFiles) -> None:
        if importlib.util.find_spec("sentencepiece") is None:
            raise DataError(
                f"{files.name}: a sentencepiece model needs the package sentencepiece: "
                "pip install 'tmoe[sentencepiece]'; or name the tokenizer.json of the same tokenizer"
            )
        import sentencepiece

        self.files = files
        self._pieces = sentencepiece.SentencePieceProcessor()
        try:
            self._pieces.LoadFromSerializedProto(files.raw)
            self.vocab = self.ordinary = self._pieces.vocab_size()
        except RuntimeError as error:
            if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", files.raw):  # Llama 3's format
                raise DataError(
                    f"{files.name}: a file of tiktoken, which is not read; transformers' AutoTokenizer"
                    ".from_pretrained(DIR).save_pretrained(NEW_DIR) writes a tokenizer.json, and the same "
                    "repository may have one"
                ) from None
            why = str(error) if files.raw else "the file is empty"
            raise DataError(f"{files.name}: no sentencepiece model: {why}") from error
        known = {self._pieces.id_to_piece(i): i for i in range(self.vocab)}
        named = (known[name] for name in JsonTokenizer.EOS_NAMES if name in known)
        self.eos = self._pieces.eos_id() if self._pieces.eos_id() >= 0 else next(named, -1)
        if not 0 <= self.eos < self.vocab:
            raise DataError(f"{files.name}: no token to end documents with: the model has no eos")
        self.fingerprint = files.fingerprint
        self._dtype = np.uint16 if self.vocab <= 1 << 16 else np.uint32

    def encode(self, text: str | bytes) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        decoded = [text.decode() if isinstance(text, bytes) else text for text in texts]
        for text in decoded:
            text.encode()  # UnicodeEncodeError names a lone surrogate and where it is
        return [np.array(ids, dtype=self._dtype) for ids in self._pieces.encode(decoded, out_type=int)]

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        return self._pieces.decode([int(i) for i in ids if i < self.vocab])

    def name_of(self, i: int) -> str | None:
        """The token's name in the vocabulary, `<0xE6>` for a byte; None if no token has this id."""
        return self._pieces.id_to_piece(i) if i < self.vocab else None


def require_vocab(tokenizer: Tokenizer, vocab: int, what: str) -> None:
    """DataError unless all ids of texts are below `vocab`, the model's; `what` begins the message."""
    if tokenizer.ordinary > vocab:
        raise DataError(
            f"{what} gives ids up to {tokenizer.ordinary - 1}: --model.vocab={vocab} is too small; "
            f"valid: {tokenizer.ordinary} or more"
        )


def require_ids(ids: np.ndarray | Sequence[int], tokenizer: Tokenizer, vocab: int, what: str) -> None:
    """DataError if ids of rendered rows hold a special token that a model of `vocab` ids lacks."""
    if tokenizer.vocab > vocab and (largest := int(np.max(ids, initial=0))) >= vocab:
        raise DataError(
            f"{what}: holds the id {largest} ({tokenizer.decode([largest])!r}), but --model.vocab={vocab}; "
            f"valid: ids below it, or --model.vocab {tokenizer.vocab} or more"
        )


NAMES = "tokenizer.json", "tokenizer.model"


def of_files(files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of these files: a sentencepiece model if named .model or binary, else tokenizer.json."""
    parts = (files.name, files.raw), (files.settings_name, files.settings), (TEMPLATE, files.template)
    for name, raw in parts:
        if raw is not None and (words := pointer_words(raw)):
            raise DataError(f"{name}: {words}")
    is_json = files.raw.removeprefix(BOM).lstrip().startswith((b"{", b"["))
    named = files.name.endswith(".model")
    return (
        SentencePieceTokenizer(files)
        if named or (b"\0" in files.raw and not is_json)
        else JsonTokenizer(files)
    )


def tokenizer_files(spec: str, flag: str = "--data.tokenizer") -> TokenizerFiles:
    """Reads a tokenizer's files. spec: path of a tokenizer.json or .model, or of a folder that holds one."""
    inside = [path for name in NAMES if (path := Path(spec, name)).is_file()]
    path = (inside or [Path(spec, NAMES[0])])[0] if Path(spec).is_dir() else Path(spec)
    if not path.is_file():
        what = f"this folder holds no {' and no '.join(NAMES)}" if Path(spec).is_dir() else "no such file"
        raise DataError(
            f"{flag}={spec}: {what}; valid: 'bytes', or the path of a tokenizer.json, of a "
            "sentencepiece model, or of a folder that holds one"
        )
    settings = path.with_name("tokenizer_config.json")
    template, tools = path.with_name(TEMPLATE), path.parent / TOOLS_FILE
    return TokenizerFiles(
        f"{flag}={path}",
        path.read_bytes(),
        settings.read_bytes() if settings.exists() else None,
        str(settings),
        template.read_bytes() if template.exists() else None,
        tools.read_bytes() if tools.exists() else None,
    )


def load_tokenizer(spec: str, flag: str = "--data.tokenizer") -> Tokenizer:
    """The tokenizer named by `flag`: 'bytes', or the path of its file or folder.

    If its folder has a generation_config.json, answers also end at the ids listed there.
    """
    if spec == "bytes":
        return ByteTokenizer()
    tokenizer = of_files(tokenizer_files(spec, flag))
    generation = (Path(spec) if Path(spec).is_dir() else Path(spec).parent) / "generation_config.json"
    if generation.is_file() and (ends := ends_in(json_object(generation.read_bytes()), {})):
        tokenizer.chat = ChatFormat(None, ends=ends, source=str(generation))
    return tokenizer
