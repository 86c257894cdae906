"""Tokenizers in GGUF files: their keys, what llama.cpp lacks, and the way back to a tokenizer.json."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("gguf")

import gguf_words as words
import numpy as np
import tokenizers
from gguf_words import END, START, UNSEEN

from tmoe.config.check import ConfigError
from tmoe.data.tokenizer import ByteTokenizer
from tmoe.extras.gguf.back import tokenizer_files
from tmoe.extras.gguf.splits import SPLITS, pre_tokenizer, split_of
from tmoe.extras.gguf.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER,
    Vocabulary,
    byte_letters,
    bytes_vocabulary,
    vocabulary,
)

LONG = dict(bos="bos", eos="eos", unk="unknown", pad="padding", eot="eot")


def keys_of(found: Vocabulary) -> dict:
    """The keys of a file, "tokenizer." taken off."""
    told = dict(model=found.model, pre=found.pre, tokens=[*found.tokens], token_type=[*found.types])
    told |= dict(merges=[*found.merges], scores=[*found.scores]) | dict(found.adds)
    told |= {f"{LONG[name]}_token_id": i for name, i in found.ids.items()}
    template = {} if found.template is None else dict(chat_template=found.template)
    return {f"ggml.{name}": value for name, value in told.items()} | template


def as_bytes(value: dict) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("split", ["gpt-2", "qwen2", "llama-bpe", "gpt-4o", "tekken"])
def test_byte_pairs_and_back(split):
    """The tokenizer.json made of the keys gives the ids of the one that the keys were made of."""
    told = words.byte_level(split)
    found = vocabulary({"tokenizer.json": as_bytes(told)}, 410)
    assert (found.model, found.pre) == ("gpt2", split)
    assert found.tokens[:2] == (END, START) and found.types[:2] == (CONTROL, CONTROL)
    assert found.tokens[409] == "[PAD409]" and found.types[409] == UNUSED
    files, said = tokenizer_files(keys_of(found))
    assert not said
    before, after = (
        tokenizers.Tokenizer.from_str(raw) for raw in (json.dumps(told), files["tokenizer.json"].decode())
    )
    for text in [*UNSEEN, f"{START}a{END}"]:
        assert after.encode(text, add_special_tokens=False).ids == before.encode(text).ids, text
        assert after.decode(before.encode(text).ids) == text.replace(START, "").replace(END, "")


def test_every_split_is_found_again():
    """deepseek-v3's three expressions and single digits, too."""
    for split in SPLITS:
        told = dict(pre_tokenizer=pre_tokenizer(split.name), model=dict(ignore_merges=split.whole))
        assert split_of(told, "") == split.name


def test_digits_and_byte_level_as_granite_writes_them():
    steps = [dict(type="Digits", individual_digits=True), dict(type="ByteLevel", add_prefix_space=False)]
    assert split_of(dict(pre_tokenizer=dict(type="Sequence", pretokenizers=steps)), "") == "starcoder"
    alone = dict(type="ByteLevel", add_prefix_space=False, use_regex=True)
    assert split_of(dict(pre_tokenizer=alone), "") == "gpt-2"


def test_special_tokens_ends_and_templates():
    """eos is the tokenizer's; another end of generation_config.json is eot; bos is added as settings say."""
    told = words.byte_level()
    told["added_tokens"].append(dict(id=405, content="<tool>", special=False))
    content = {
        "tokenizer.json": as_bytes(told),
        "tokenizer_config.json": as_bytes(
            dict(eos_token=dict(content=END), add_bos_token=True, bos_token=START)
        ),
        "generation_config.json": as_bytes(dict(eos_token_id=[0, 300])),
        "config.json": as_bytes(dict(pad_token_id=7)),
        "chat_template.jinja": b"{{ messages }}",
    }
    found = vocabulary(content, 410)
    assert found.ids == dict(bos=1, eos=0, eot=300, pad=7) and found.template == "{{ messages }}"
    assert found.adds == dict(add_bos_token=True, add_eos_token=False)
    assert found.types[405] == USER and found.types[300] == CONTROL and found.types[7] == NORMAL
    files, _ = tokenizer_files(keys_of(found))
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["bos_token"] == START and settings["eos_token"] == END and settings["add_bos_token"]
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [0, 300]
    assert files["chat_template.jinja"] == b"{{ messages }}"
    after = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    assert after.encode("a").ids[0] == 1 and after.token_to_id("<tool>") == 405


def test_added_tokens_without_a_row_are_left_out():
    """A padding token that was added later; its id is not written either."""
    told = words.byte_level()
    told["added_tokens"].append(dict(id=410, content="<pad>", special=True))
    settings = as_bytes(dict(pad_token="<pad>", eos_token=END))
    found = vocabulary({"tokenizer.json": as_bytes(told), "tokenizer_config.json": settings}, 410)
    assert len(found.tokens) == 410 and found.ids == dict(eos=0)


def test_a_post_processor_says_that_bos_is_added():
    told = words.byte_level()
    single = [{"SpecialToken": dict(id=START, type_id=0)}, {"Sequence": dict(id="A", type_id=0)}]
    told["post_processor"] = dict(type="TemplateProcessing", single=single, pair=[], special_tokens={})
    assert vocabulary({"tokenizer.json": as_bytes(told)}, 410).adds["add_bos_token"]


def test_sentencepiece_and_back():
    """Types and scores are the model's; the tokenizer.json of the keys gives its ids."""
    sentencepiece = pytest.importorskip("sentencepiece")
    raw = words.sentencepiece_model()
    read = sentencepiece.SentencePieceProcessor(model_proto=raw)
    found = vocabulary({"tokenizer.model": raw}, 410)
    assert (found.model, found.pre) == ("llama", "default")
    assert found.types[:4] == (UNKNOWN, CONTROL, CONTROL, BYTE) and found.tokens[3] == "<0x00>"
    assert found.scores[300] == read.GetScore(300) and found.types[405] == UNUSED
    assert found.ids == dict(bos=1, eos=2, unk=0) and found.adds["add_space_prefix"]
    files, said = tokenizer_files(keys_of(found))
    assert not said
    after = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in UNSEEN[:-1]:
        ids = read.encode(text)
        assert after.encode(text, add_special_tokens=False).ids == ids, text
        assert after.decode(ids) == text
    again = vocabulary({"tokenizer.json": files["tokenizer.json"]}, 410)
    assert again.model == "llama" and again.tokens == found.tokens and again.types == found.types
    made = [i for i in range(410) if again.scores[i] > -1000]
    order = sorted(made, key=lambda i: -again.scores[i])
    assert order == sorted(made, key=lambda i: -found.scores[i]) and len(made) > 30


def test_bytes_are_their_own_ids():
    found = bytes_vocabulary(260)
    letters = byte_letters()
    text = "Grüße\n"
    assert [found.tokens.index(letters[byte]) for byte in text.encode()] == ByteTokenizer().encode(
        text
    ).tolist()
    assert found.ids == dict(eos=0) and found.types[0] == CONTROL and found.types[259] == UNUSED
    (merge,) = found.merges  # llama.cpp wants one; it makes no token
    assert merge.replace(" ", "") not in found.tokens
    files, _ = tokenizer_files(keys_of(found))
    after = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    assert np.array_equal(after.encode(text).ids, ByteTokenizer().encode(text))


def refused(content: dict[str, bytes], size: int = 420) -> str:
    with pytest.raises(ConfigError) as error:
        vocabulary(content, size)
    return str(error.value)


def test_what_llama_cpp_lacks_is_refused_by_name():
    told = words.byte_level()
    odd = told | dict(normalizer=dict(type="Lowercase"))
    assert "normalizer Lowercase" in refused({"tokenizer.json": as_bytes(odd)})
    odd = told | dict(model=dict(type="Unigram", vocab=[]))
    assert "a Unigram model" in refused({"tokenizer.json": as_bytes(odd)})
    split = dict(type="Split", pattern=dict(Regex="[a-z]+"), behavior="Isolated", invert=False)
    odd = told | dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[split]))
    assert "'[a-z]+'" in (said := refused({"tokenizer.json": as_bytes(odd)})) and "--pre NAME" in said
    assert vocabulary({"tokenizer.json": as_bytes(odd)}, 420, "viking").pre == "viking"
    whole = told | dict(model=told["model"] | dict(ignore_merges=True))  # qwen2 merges in llama.cpp
    assert "taken whole" in refused({"tokenizer.json": as_bytes(whole)})
    assert "is not below the model's vocabulary, 300" in refused({"tokenizer.json": as_bytes(told)}, 300)


def test_other_sentencepiece_models_are_refused_by_name():
    pytest.importorskip("sentencepiece")
    said = refused({"tokenizer.model": words.sentencepiece_model(370, "unigram")})
    assert "unigram" in said
    usual = words.sentencepiece_model(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    assert "nmt_nfkc, extra spaces removed" in refused({"tokenizer.model": usual})
    assert "byte_fallback" in refused(
        {"tokenizer.model": words.sentencepiece_model(100, byte_fallback=False)}
    )


def test_merges_without_scores_are_refused():
    """A pair is left out: llama.cpp would merge it, as it has tokens and scores alone."""
    pytest.importorskip("sentencepiece")
    files, _ = tokenizer_files(keys_of(vocabulary({"tokenizer.model": words.sentencepiece_model()}, 410)))
    told = json.loads(files["tokenizer.json"])
    del told["model"]["merges"][-1]
    assert "not those of tokens with scores" in refused({"tokenizer.json": as_bytes(told)})


def test_no_tokenizer():
    assert vocabulary({"config.json": b"{}"}, 9).model == "none"
    assert tokenizer_files({"ggml.model": "none"}) == ({}, "")
    files, said = tokenizer_files({"ggml.model": "bert", "ggml.tokens": ["a"], "ggml.token_type": [1]})
    assert "tokenizer.json" not in files and "bert" in said


FAULTS = [
    ("token_type", [1] * 255, "token_type: must be a list of 256 numbers"),
    ("scores", [0.0], "scores: must be a list of 256 numbers"),
    ("tokens", [1] * 256, "tokens: must be a list of texts"),
    ("merges", ["ab"], "merges: must be a list of texts, each two tokens"),
    ("bos_token_id", 256, "bos_token_id=256: must be the number of a token, below 256"),
    ("eos_token_id", "0", "eos_token_id='0': must be"),
]


@pytest.mark.parametrize(("name", "value", "said"), FAULTS)
def test_a_key_that_does_not_fit_the_tokens_is_refused_by_name(name, value, said):
    keys = keys_of(bytes_vocabulary(256)) | {"ggml.add_bos_token": True}
    with pytest.raises(ConfigError, match=f"tokenizer.ggml.{said}"):
        tokenizer_files(keys | {f"ggml.{name}": value})


def test_tokens_without_types_are_ordinary():
    """llama.cpp takes a file without tokenizer.ggml.token_type."""
    keys = keys_of(bytes_vocabulary(256))
    del keys["ggml.token_type"]
    told = json.loads(tokenizer_files(keys)[0]["tokenizer.json"])
    assert len(told["model"]["vocab"]) == 256 and told["added_tokens"] == []
