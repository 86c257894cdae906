"""Files of a Hugging Face tokenizer from the keys tokenizer.ggml.* of a GGUF file.

next: extras/gguf/vocabulary.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tmoe.config.check import require
from tmoe.data.chat.format import SETTINGS, TEMPLATE
from tmoe.extras.gguf.splits import BY_NAME, pre_tokenizer
from tmoe.extras.gguf.vocabulary import CONTROL, NORMAL, SPECIAL, TOKENIZER, UNKNOWN, UNUSED, USER, _pairs
from tmoe.hf.foreign import GENERATION

# Other names that llama.cpp has for the same splits.
SAME = {name: "qwen2" for name in ("hunyuan", "solar-open", "stablelm2", "megrez", "deepseek-r1-qwen")}
SAME |= {name: "llama-bpe" for name in ("llama3", "llama-v3", "glm4", "falcon3", "pixtral", "lfm2")}
SAME |= {
    name: "gpt-2" for name in ("olmo", "mpt", "phi-2", "jais", "granite-docling", "trillion", "gigachat")
}
SAME |= {name: "starcoder" for name in ("refact", "smollm", "command-r", "codeshell", "exaone", "mellum2")}
SAME |= {"smaug-bpe": "dbrx", "llama4": "gpt-4o", "minimax-m2": "gpt-4o", "hunyuan-dense": "deepseek-v3"}


def tokenizer_files(keys: Mapping[str, Any]) -> tuple[dict[str, bytes], str]:
    """(files by name, what is said of a tokenizer that is not written).

    keys: the file's, with "tokenizer." taken off. No tokenizer.json is written of another model than
    byte-level or sentencepiece BPE, or of splits that are not known. ConfigError names a key that is no list
    of one value for each token, or no token's id.
    """
    model, pre = keys.get("ggml.model"), str(keys.get("ggml.pre", ""))
    tokens = keys.get("ggml.tokens") or []
    require(_are_texts(tokens), "tokenizer.ggml.tokens: must be a list of texts")
    types = keys.get("ggml.token_type") or [NORMAL] * len(tokens)
    _require_sound(keys, tokens, types)
    settings = _settings(keys, tokens)
    files = {SETTINGS: _json(settings)}
    ends = [keys[f"ggml.{name}_token_id"] for name in ("eos", "eot") if f"ggml.{name}_token_id" in keys]
    if ends:
        generation = dict(eos_token_id=ends if len(ends) > 1 else ends[0])
        files[GENERATION] = _json(generation)
    if isinstance(template := keys.get("chat_template"), str):
        files[TEMPLATE] = template.encode()
    pre = SAME.get(pre, pre)
    if model == "llama":
        built = _fallback(keys, tokens, types)
    elif model == "gpt2" and pre in BY_NAME:
        built = _byte_level(keys, tokens, types, pre)
    else:
        known = "gpt2 with pre " + ", ".join(BY_NAME)
        return (
            ({}, "")
            if model in (None, "none")
            else (files, f"no tokenizer.json is written of {model} {pre}; known are llama and {known}")
        )
    files[TOKENIZER] = _json(built)
    return files, ""


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _require_sound(keys: Mapping[str, Any], tokens: list[str], types: list[int]) -> None:
    """ConfigError names the first key that is malformed, or of another length than the list of tokens."""
    for name, found in (("token_type", types), ("scores", keys.get("ggml.scores") or [0.0] * len(tokens))):
        listed = isinstance(found, list) and len(found) == len(tokens)
        require(listed, f"tokenizer.ggml.{name}: must be a list of {len(tokens)} numbers, one for each token")
    merges = keys.get("ggml.merges") or []
    pairs = _are_texts(merges) and all(" " in one[1:] for one in merges)
    require(
        pairs, "tokenizer.ggml.merges: must be a list of texts, each two tokens with a space between them"
    )
    for name in ("bos", "eos", "eot", "unknown", "padding"):  # of the last two a number beyond means none
        i = keys.get(f"ggml.{name}_token_id", 0)
        number = isinstance(i, int) and not isinstance(i, bool)
        inside = name in ("unknown", "padding") or not tokens or (number and 0 <= i < len(tokens))
        wrong = f"tokenizer.ggml.{name}_token_id={i!r}: must be the number of a token, below {len(tokens)}"
        require(number and inside, wrong)


def _settings(keys: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = dict(
        tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False
    )
    for name, theirs in zip(SPECIAL, ("bos", "eos", "unknown", "padding"), strict=True):
        i = keys.get(f"ggml.{theirs}_token_id")
        if i is not None and i < len(tokens):
            found[f"{name}_token"] = tokens[i]
    for name in ("add_bos_token", "add_eos_token"):
        if name.removeprefix("") and f"ggml.{name}" in keys:
            found[name] = bool(keys[f"ggml.{name}"])
    return found


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    return [
        dict(id=i, content=tokens[i], **flags, special=kind != USER)
        for i, kind in enumerate(types)
        if kind in (CONTROL, USER, UNKNOWN)
    ]


def _vocab(tokens: list[str], types: list[int]) -> dict[str, int]:
    """All tokens that are used, the added ones too: the library gives others new ids."""
    return {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}


def _template(keys: Mapping[str, Any], tokens: list[str], usual: bool) -> dict[str, Any] | None:
    """The post-processor that adds bos and eos to a text."""
    parts: list[dict[str, Any]] = [{"Sequence": dict(id="A", type_id=0)}]
    special = {}
    for name, at in (("bos", 0), ("eos", 2)):
        i = keys.get(f"ggml.{name}_token_id")
        if not keys.get(f"ggml.add_{name}_token", usual and name == "bos") or i is None:
            continue
        parts.insert(at, {"SpecialToken": dict(id=tokens[i], type_id=0)})
        special[tokens[i]] = dict(id=tokens[i], ids=[i], tokens=[tokens[i]])
    if not special:
        return None
    return dict(type="TemplateProcessing", single=parts, pair=parts, special_tokens=special)


def _byte_level(keys: Mapping[str, Any], tokens: list[str], types: list[int], pre: str) -> dict[str, Any]:
    vocab = _vocab(tokens, types)
    pairs = [
        one[0 : one.index(" ", 1)] + "\n" + one[one.index(" ", 1) + 1 :]
        for one in keys.get("ggml.merges") or []
    ]
    merges = [one.split("\n") for one in pairs if one.replace("\n", "") in vocab]
    kept = dict(add_prefix_space=False, trim_offsets=False, use_regex=False)
    processors = [dict(type="ByteLevel", **kept), _template(keys, tokens, BY_NAME[pre].name == "llama-bpe")]
    return dict(
        version="1.0",
        added_tokens=_added_tokens(tokens, types),
        pre_tokenizer=pre_tokenizer(pre),
        post_processor=dict(type="Sequence", processors=[one for one in processors if one]),
        decoder=dict(type="ByteLevel", **kept),
        model=dict(type="BPE", vocab=vocab, merges=merges, ignore_merges=BY_NAME[pre].whole),
    )


def _fallback(keys: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """sentencepiece's BPE: pairs are merged by the score of what they make."""
    vocab = _vocab(tokens, types)
    plain = {text: i for text, i in vocab.items() if types[i] == 1}
    scores = keys.get("ggml.scores") or [0.0] * len(tokens)
    ordered = sorted(
        _pairs(plain, {i: 0 for i in plain.values()}),
        key=lambda p: (-scores[plain[p[0] + p[1]]], plain[p[0]], plain[p[1]]),
    )
    space = bool(keys.get("ggml.add_space_prefix", True))
    steps = [dict(type="Prepend", prepend="▁")] * space + [
        dict(type="Replace", pattern=dict(String=" "), content="▁")
    ]
    decoders = [
        dict(type="Replace", pattern=dict(String="▁"), content=" "),
        dict(type="ByteFallback"),
        dict(type="Fuse"),
    ]
    decoders += [dict(type="Strip", content=" ", start=1, stop=0)] * space
    unknown = keys.get("ggml.unknown_token_id", 0)
    return dict(
        version="1.0",
        added_tokens=_added_tokens(tokens, types),
        normalizer=dict(type="Sequence", normalizers=steps),
        post_processor=_template(keys, tokens, True),
        decoder=dict(type="Sequence", decoders=decoders),
        model=dict(
            type="BPE",
            vocab=vocab,
            merges=[list(pair) for pair in ordered],
            unk_token=tokens[unknown] if unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        ),
    )


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
