"""The keys tokenizer.ggml.* of a GGUF file, from the files of a Hugging Face folder or of a run on bytes.

Byte-level BPE (gpt2 in llama.cpp's words), sentencepiece's BPE (llama), and bytes, which are byte-level BPE
without merges. Other tokenizers are refused by name.

next: extras/gguf/splits.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from tmoe.config.check import ConfigError
from tmoe.data.chat.format import SETTINGS, json_object, templates_in
from tmoe.data.tokenizer import NAMES
from tmoe.extras.gguf.splits import split_of
from tmoe.hf.foreign import CONFIG, GENERATION

TOKENIZER, MODEL = NAMES
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType
SPECIAL = ("bos", "eos", "unk", "pad")
FAR = -1000.0  # score of a token that no merge makes


class Vocabulary(NamedTuple):
    """A tokenizer as llama.cpp has it; `model` "none": ids alone."""

    model: str
    pre: str = ""
    tokens: tuple[str, ...] = ()
    types: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    """of sentencepiece: the pair that makes the token of the highest score is merged first"""
    merges: tuple[str, ...] = ()
    ids: Mapping[str, int] = {}
    """bos, eos, unk, pad, eot"""
    adds: Mapping[str, bool] = {}
    """whether a text begins with bos, or ends with eos; and whether a space is put in front"""
    template: str | None = None
    tools: str | None = None
    """the chat template for conversations with tools, where it is another one"""


def vocabulary(content: Mapping[str, bytes], size: int, pre: str = "") -> Vocabulary:
    """The vocabulary of `size` ids, from the files of a folder by name.

    pre: llama.cpp's name of the pre-tokenizer; "": the one that splits as tokenizer.json does.
    ConfigError for a tokenizer that llama.cpp does not have.
    """
    told = json_object(content.get(TOKENIZER))
    if "model" in told:
        found = _of_json(told, size, pre)
    elif MODEL in content:
        found = _of_sentencepiece(content[MODEL], size)
    else:
        return Vocabulary("none")
    template, tools = templates_in(content)
    found = found._replace(template=template, tools=tools)
    return _with_specials(found, content)


def bytes_vocabulary(size: int) -> Vocabulary:
    """Every byte is its own id, and 0 ends a text."""
    letters = byte_letters()
    tokens, types = _padded({byte: letters[byte] for byte in range(256)}, {0: CONTROL}, size)
    # llama.cpp wants a merge; no pair of letters makes a token
    return Vocabulary(
        "gpt2", "gpt-2", tokens, types, (), (f"{letters[0]} {letters[0]}",), dict(eos=0), NO_ADDS
    )


NO_ADDS = dict(add_bos_token=False, add_eos_token=False)


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in byte-level BPE (GPT-2's bytes_to_unicode)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _padded(by_id: Mapping[int, str], kinds: Mapping[int, int], size: int) -> tuple[tuple, tuple]:
    """Tokens and types of all ids; unused ones are [PAD7]."""
    if most := [f"{text!r} ({i})" for i, text in by_id.items() if not 0 <= i < size]:
        raise ConfigError(f"tokenizer: {most[0]} is not below the model's vocabulary, {size}")
    tokens = tuple(by_id.get(i, f"[PAD{i}]") for i in range(size))
    return tokens, tuple(kinds.get(i, NORMAL) if i in by_id else UNUSED for i in range(size))


# ---- tokenizer.json ----


def _of_json(told: dict[str, Any], size: int, pre: str) -> Vocabulary:
    model = told.get("model") or {}
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise ConfigError(f"tokenizer.json: a {model.get('type')} model; only BPE is written")
    _require_normalizer(told.get("normalizer"), bool(model.get("byte_fallback")))
    by_id = {i: text for text, i in model["vocab"].items()}
    kinds = {}
    for token in told.get("added_tokens") or []:
        if token["id"] >= size and token["content"] not in model["vocab"]:
            continue  # it has no row in the embedding: a padding token, which no text needs
        by_id[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token.get("special") else USER
    adds = dict(NO_ADDS) | _added(told.get("post_processor"), by_id)
    merges = tuple(one if isinstance(one, str) else " ".join(one) for one in model["merges"])
    if model.get("byte_fallback"):
        return _of_fallback(told, by_id, kinds, merges, size)._replace(adds=adds | _spaced(told))
    tokens, types = _padded(by_id, kinds, size)
    letters = byte_letters()[0]
    return Vocabulary(
        "gpt2", split_of(told, pre), tokens, types, (), merges or (f"{letters} {letters}",), {}, adds
    )


def _require_normalizer(stated: Any, fallback: bool) -> None:
    steps = (
        stated.get("normalizers", []) if isinstance(stated, dict) and "normalizers" in stated else [stated]
    )
    valid = ("Prepend", "Replace") if fallback else ("NFC",)
    odd = [step.get("type") for step in steps if isinstance(step, dict) and step.get("type") not in valid]
    if odd:
        raise ConfigError(f"tokenizer.json: normalizer {odd[0]}: llama.cpp does not apply it")


def _of_fallback(
    told: dict[str, Any], by_id: dict[int, str], kinds: dict[int, int], merges: tuple[str, ...], size: int
) -> Vocabulary:
    """sentencepiece's BPE in a tokenizer.json: a token's score is the place of the merge that makes it."""
    vocab = {text: i for i, text in by_id.items()}
    places: dict[int, int] = {}
    made = [vocab.get(merge.replace(" ", "", 1), -1) for merge in merges]
    for place, i in enumerate(made):
        places.setdefault(i, place)
    runs = 1 + sum(a != b for a, b in pairwise(made))
    plain = {i: 0 for i in by_id if i not in kinds}
    if runs > len(places) or {tuple(one.split(" ", 1)) for one in merges} != _pairs(vocab, plain):
        raise ConfigError(
            "tokenizer.json: byte_fallback with merges that are not those of tokens with scores"
        )
    unknown = (told.get("model") or {}).get("unk_token")
    for i, text in list(by_id.items()):
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            kinds[i] = BYTE
        elif text == unknown:
            kinds[i] = UNKNOWN
        elif kinds.get(i) == USER:
            by_id[i] = text.replace("▁", " ")  # llama.cpp looks for such a token in the text as it is
    tokens, types = _padded(by_id, kinds, size)
    scores = tuple(float(-places[i]) if i in places else FAR * 100 for i in range(size))
    return Vocabulary("llama", "default", tokens, types, scores)


def _pairs(vocab: Mapping[str, int], made: Mapping[int, Any]) -> set[tuple[str, str]]:
    """All pairs of tokens that make one of the tokens `made`."""
    texts = [text for text, i in vocab.items() if i in made]
    cuts = ((text[:at], text[at:]) for text in texts for at in range(1, len(text)))
    return {(left, right) for left, right in cuts if left in vocab and right in vocab}


def _spaced(told: dict[str, Any]) -> dict[str, bool]:
    """Whether a space is put in front of a text: by the normalizer, or by Metaspace."""
    text = json.dumps([told.get("normalizer"), told.get("pre_tokenizer")])
    return dict(add_space_prefix='"Prepend"' in text or '"always"' in text or '"first"' in text)


def _added(stated: Any, by_id: Mapping[int, str]) -> dict[str, bool]:
    """Whether bos and eos are added to a text, by the template of a post-processor."""
    steps = stated.get("processors", []) if isinstance(stated, dict) and "processors" in stated else [stated]
    for step in steps:
        if isinstance(step, dict) and step.get("type") == "TemplateProcessing":
            single = [next(iter(part)) for part in step.get("single", [])]
            if "Sequence" in single:
                at = single.index("Sequence")
                return dict(add_bos_token=at > 0, add_eos_token=at < len(single) - 1)
    return {}


# ---- tokenizer.model ----


def _of_sentencepiece(raw: bytes, size: int) -> Vocabulary:
    try:
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    except ImportError as error:
        raise ConfigError(
            f"tokenizer.model needs sentencepiece and protobuf: pip install sentencepiece ({error})"
        ) from None
    proto = sentencepiece_model_pb2.ModelProto.FromString(raw)
    if proto.trainer_spec.model_type != 2:
        raise ConfigError(
            "tokenizer.model: a unigram model; llama.cpp merges pairs by scores, which only BPE does"
        )
    normal = proto.normalizer_spec
    if normal.name != "identity" or normal.remove_extra_whitespaces:
        words = f"{normal.name}{', extra spaces removed' * normal.remove_extra_whitespaces}"
        raise ConfigError(f"tokenizer.model: normalizer {words}: llama.cpp does not apply it")
    if not proto.trainer_spec.byte_fallback:
        raise ConfigError("tokenizer.model: no tokens for bytes (byte_fallback), which llama.cpp needs")
    read = SentencePieceProcessor(model_proto=raw)
    by_id = {i: read.IdToPiece(i) for i in range(read.vocab_size())}
    kinds = {}
    for i in by_id:
        checks = (
            (read.IsUnknown, UNKNOWN),
            (read.IsControl, CONTROL),
            (read.IsUnused, UNUSED),
            (read.IsByte, BYTE),
        )
        kinds[i] = next((kind for check, kind in checks if check(i)), NORMAL)
    tokens, types = _padded(by_id, kinds, size)
    scores = tuple(read.GetScore(i) if i in by_id else FAR * 10 for i in range(size))
    ids = dict(bos=read.bos_id(), eos=read.eos_id(), unk=read.unk_id(), pad=read.pad_id())
    adds = dict(NO_ADDS) | dict(add_space_prefix=bool(normal.add_dummy_prefix))
    found = {name: i for name, i in ids.items() if i >= 0}
    return Vocabulary("llama", "default", tokens, types, scores, (), found, adds)


# ---- special tokens ----


def _with_specials(found: Vocabulary, content: Mapping[str, bytes]) -> Vocabulary:
    """With the ids of special tokens that the folder's settings name.

    The tokenizer's own end, or the first of several, is eos; the next one is eot.
    """
    settings, config = json_object(content.get(SETTINGS)), json_object(content.get(CONFIG))
    generation = json_object(content.get(GENERATION))
    ids = _special_ids(found, settings, generation, config)
    adds = dict(found.adds)
    adds |= {name: settings[name] for name in NO_ADDS if isinstance(settings.get(name), bool)}
    types = list(found.types)
    for name in ("bos", "eos", "eot"):
        if (i := ids.get(name)) is not None and i < len(types) and types[i] == NORMAL:
            types[i] = CONTROL
    return found._replace(ids={n: i for n, i in ids.items() if i < len(types)}, adds=adds, types=tuple(types))


def _special_ids(
    found: Vocabulary, settings: dict[str, Any], generation: dict[str, Any], config: dict[str, Any]
) -> dict[str, int]:
    """The ids of bos, eos, unk, pad and eot."""
    by_text = {text: i for i, text in enumerate(found.tokens)}
    ids = dict(found.ids)
    for name in SPECIAL:
        told = settings.get(f"{name}_token")
        text = told.get("content") if isinstance(told, dict) else told
        stated = [one.get(f"{name}_token_id") for one in (generation, config)]
        if isinstance(text, str) and text in by_text:
            ids[name] = by_text[text]
        elif named := [one for one in stated if isinstance(one, int)]:
            ids[name] = named[0]
    ends = [one.get("eos_token_id") for one in (generation, config)]
    listed = next((one for one in ends if one is not None), [])
    listed = listed if isinstance(listed, list) else [listed]
    if listed:
        ids.setdefault("eos", listed[0])
        if others := [one for one in listed if one != ids["eos"]]:
            ids["eot"] = others[0]
    return ids
