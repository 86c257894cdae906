"""An export of a model trained here generates: tokenizer and end id come along, or are said to be missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import corpora
import pytest
from corpora import prose

from tmoe.checkpoint.manifest import Manifest
from tmoe.config.run import DataConfig
from tmoe.data.convert import convert
from tmoe.data.dataset import open_data
from tmoe.data.tokenizer import load_tokenizer
from tmoe.hf.tokenizer_files import GENERATION, of_run

bpe = corpora.bpe  # a fixture


@pytest.fixture
def shards(tmp_path: Path, bpe: Path) -> Path:
    (tmp_path / "a.txt").write_text(prose(1, 3000))
    convert((str(tmp_path / "a.txt"),), out=tmp_path / "shards", tokenizer=str(bpe))
    return tmp_path / "shards"


def manifest_of(shards: Path, **data) -> Manifest:
    dataset = open_data(DataConfig(path=(str(shards),)), 8, 300, "train")
    config = dict(data=dict(path=[f"{shards}:1"], tokenizer="auto"))
    info = dict(config=config, data=dataset.facts() | data)
    return Manifest(3, 0, 1, 0, info, {}, {}, {})


def test_shards_carry_their_tokenizer_and_an_export_takes_it(shards, bpe, capsys):
    tokenizer = load_tokenizer(str(bpe))
    assert (shards / "tokenizer.json").read_bytes() == bpe.read_bytes()
    config, files = of_run(Path("step-3"), manifest_of(shards), {"eos_token_id": None, "x": 1}, {})
    assert config == {"eos_token_id": tokenizer.eos, "x": 1}
    assert files["tokenizer.json"]() == bpe.read_bytes()
    assert json.loads(files[GENERATION]()) == {"eos_token_id": tokenizer.eos}
    assert not capsys.readouterr().out


def test_what_is_missing_is_said(shards, tmp_path, capsys):
    manifest = manifest_of(shards)
    shutil.rmtree(shards)
    _, files = of_run(Path("step-3"), manifest, {}, {})
    assert list(files) == [GENERATION]
    assert "no tokenizer is written: it was trained on data of sha256:" in capsys.readouterr().out


def test_a_tokenizer_of_another_hash_is_not_taken(shards, capsys):
    (shards / "tokenizer.json").write_text("{}")
    _, files = of_run(Path("step-3"), manifest_of(shards), {}, {})
    assert "tokenizer.json" not in files and "no tokenizer is written" in capsys.readouterr().out


def test_what_is_there_stays(shards):
    ours = {"tokenizer.json": lambda: b"theirs", GENERATION: lambda: b"theirs"}
    config, files = of_run(Path("step-3"), manifest_of(shards), {"eos_token_id": 7}, ours)
    assert config == {"eos_token_id": 7} and files == ours


def test_bytes_have_no_file(shards, capsys):
    config, files = of_run(Path("step-3"), manifest_of(shards, tokenizer="bytes", eos=0), {}, {})
    assert config == {"eos_token_id": 0} and list(files) == [GENERATION]
    assert "trained on bytes: there is no tokenizer file" in capsys.readouterr().out
