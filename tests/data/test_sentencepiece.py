"""Sentencepiece models, as Llama 2's tokenizer.model: the library's ids; found, refused, carried."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import corpora
import numpy as np
import pytest
from corpora import data, prose

from tmoe.data.convert import convert
from tmoe.data.tokenizer import DataError, SentencePieceTokenizer, load_tokenizer
from tmoe.hf.tokenizer_files import carried_by

spm = pytest.importorskip("sentencepiece")
texts, bpe = corpora.texts, corpora.bpe


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A BPE with byte fallback, of 290 ids, as Llama 2's is made: unk 0, bos 1, eos 2."""
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([prose(n, 30) for n in range(100)]),
        model_writer=written,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("llama") / "tokenizer.model"
    path.write_bytes(written.getvalue())
    return path


@pytest.mark.parametrize("name", ["tokenizer.model", ".", "renamed"])
def test_ids_are_those_of_the_library(model, name):
    path = model.parent / name
    if name == "renamed":
        path.write_bytes(model.read_bytes())
    tokenizer = load_tokenizer(str(path))
    path.unlink() if name == "renamed" else None
    reference = spm.SentencePieceProcessor(model_file=str(model))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert (tokenizer.vocab, tokenizer.eos) == (reference.vocab_size(), 2)
    for text in ("expert router", "naïve 专家 🙂", "", "</s><s>"):
        assert tokenizer.encode(text).tolist() == reference.encode(text)
        assert 2 not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_is_tokenised_and_made_into_shards(model, texts, tmp_path):
    convert((str(texts),), out=tmp_path / "shards", tokenizer=str(model))
    for path in (texts, tmp_path / "shards"):
        found = data(path, tokenizer=str(model), vocab=300)
        assert found.eos == 2
        assert found.fingerprint == load_tokenizer(str(model)).fingerprint
        assert 2 in np.concatenate([found.sample(i) for i in range(found.samples)])


def test_refused(model, tmp_path, monkeypatch):
    cut = tmp_path / "tokenizer.model"
    cut.write_bytes(model.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"tokenizer.model: no sentencepiece model: "):
        load_tokenizer(str(cut))
    cut.write_bytes(b"")
    with pytest.raises(DataError, match=r"tokenizer.model: no sentencepiece model|no token to end"):
        load_tokenizer(str(cut))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs the package sentencepiece: pip install"):
        load_tokenizer(str(model))


def test_a_folder_of_weights_carries_it(model, bpe, tmp_path):
    """Alone it is the tokenizer; beside a tokenizer.json data of either are of these weights."""
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="mixtral")))
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    fingerprint = load_tokenizer(str(model)).fingerprint
    alone = carried_by(tmp_path)
    assert alone and alone.fingerprint == fingerprint
    assert isinstance(alone.load(), SentencePieceTokenizer)
    (tmp_path / "tokenizer.json").write_bytes(bpe.read_bytes())
    both = carried_by(tmp_path)
    assert both and both.fingerprint == load_tokenizer(str(bpe)).fingerprint
    both.require("data", fingerprint)
    with pytest.raises(DataError, match="of tokenizer bytes"):
        both.require("data", "bytes")
