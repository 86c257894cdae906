"""Small corpora in every format that training reads, as fixtures: texts, JSON lines, shards, a tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers

from tmoe.config.run import DataConfig
from tmoe.data.convert import convert
from tmoe.data.dataset import Dataset, open_data

WORDS = ["expert", "router", "token", "gate", "shard", "batch", "mesh", "world", "step", "norm"]


def prose(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    for number in range(30):
        path = folder / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(prose(number, 40 + number))
    return folder


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": prose(100 + n, 30) + "z" * (n == 17)}) for n in range(40)) + "\n\n"
    )
    return path


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    """A byte-level BPE of 300 ids, trained on WORDS, with an end-of-text token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose(0, 500)], trainer)
    path = tmp_path / "bpe" / "tokenizer.json"
    path.parent.mkdir()
    tokenizer.save(str(path))
    return path


def data(
    *paths: Path | str, seq: int = 16, vocab: int = 256, split: str = "train", **settings: object
) -> Dataset:
    return open_data(DataConfig(path=tuple(map(str, paths)), **settings), seq, vocab, split)


@pytest.fixture
def shards(texts: Path, jsonl: Path, tmp_path: Path) -> Path:
    convert((str(texts), str(jsonl)), out=tmp_path / "made" / "shards", shard_tokens=2000)
    return tmp_path / "made" / "shards"
