"""--data.split: training, validation and test data, of every kind of source, apart from each other."""

import dataclasses
import json

import numpy as np
import pytest
import runs

from tmoe.config.check import ConfigError
from tmoe.config.run import DataConfig
from tmoe.data.convert import convert
from tmoe.data.corpus import HeldOut, TokenRun, cut
from tmoe.data.dataset import open_data, require_alike
from tmoe.data.tokenizer import DataError
from tmoe.log.metrics_file import read_steps

WORDS = [f"document number {i} of a small set, " * 3 for i in range(400)]


def tokens(path, split, shares) -> bytes:
    data = open_data(DataConfig(path=(str(path),), split=shares), 8, 256, split)
    return b"".join(np.asarray(run.tokens).astype(np.uint8).tobytes() for run in data.sources[0].runs)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "set").mkdir()
    for i, words in enumerate(WORDS):
        (tmp_path / "set" / f"{i}.txt").write_text(words)
    return tmp_path / "set"


def test_documents_are_divided(folder):
    parts = {split: tokens(folder, split, (70, 20, 10)) for split in ("train", "val", "test")}
    found = {split: {d for d in text.split(b"\0") if d} for split, text in parts.items()}
    assert set().union(*found.values()) == {words.encode() for words in WORDS}
    assert sum(map(len, found.values())) == len(WORDS)
    shares = {split: len(documents) / len(WORDS) for split, documents in found.items()}
    assert shares["train"] == pytest.approx(0.7, abs=0.07)
    assert shares["val"] == pytest.approx(0.2, abs=0.06)
    assert shares["test"] == pytest.approx(0.1, abs=0.05)


def test_a_test_set_takes_nothing_from_training(folder):
    """The same documents are held out; only they are divided again."""
    assert tokens(folder, "train", (70, 20, 10)) == tokens(folder, "train", (70, 30, 0))


def test_shards_are_cut_in_order(folder, tmp_path):
    convert((str(folder),), out=tmp_path / "shards")
    parts = [tokens(tmp_path / "shards", split, (70, 20, 10)) for split in ("train", "val", "test")]
    shards = sorted((tmp_path / "shards").iterdir())
    whole = b"".join(np.fromfile(p, "<u2", offset=1024).astype(np.uint8).tobytes() for p in shards)
    assert b"".join(parts) == whole
    sizes = [len(part) / sum(map(len, parts)) for part in parts]
    assert sizes == pytest.approx([0.7, 0.2, 0.1], abs=0.02)
    assert all(part.endswith(b"\0") for part in parts)


def test_cut_without_a_test_is_as_before():
    run = TokenRun(np.arange(100) % 10, "here")
    train, val = (cut(run, HeldOut(0.25), split, 0).tokens for split in ("train", "val"))
    assert len(train) == 81  # 75, then to the end of the document
    assert len(val) == 19


def test_validation_data_of_their_own(folder, tmp_path):
    """All of --data.path is trained on, and all of --data.val-path validated with, rows as well as shards."""
    rows = tmp_path / "val.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {i} to validate with"}) + "\n" for i in range(9)))
    convert((str(folder),), out=tmp_path / "shards")
    for path in (folder, tmp_path / "shards"):
        cfg = DataConfig(path=(str(path),), val_path=(str(rows),))
        train, val = (open_data(cfg, 8, 256, split) for split in ("train", "val"))
        require_alike(train, val)
        texts = [
            b"".join(np.asarray(run.tokens).astype(np.uint8).tobytes() for run in data.sources[0].runs)
            for data in (train, val)
        ]
        assert {d for d in texts[0].split(b"\0") if d} == {words.encode() for words in WORDS}
        assert texts[1].count(b"to validate with") == 9
    with pytest.raises(DataError, match=r"--data\.val-path=nowhere: no such file"):
        open_data(dataclasses.replace(cfg, val_path=("nowhere",)), 8, 256, "val")
    val.fingerprint = "sha256:other"
    with pytest.raises(DataError, match=r"--data\.val-path: of tokenizer sha256:other, eos 0; --data"):
        require_alike(train, val)
    with pytest.raises(ConfigError, match=r"--data.val-path=a: not with --data.split"):
        DataConfig(val_path=("a",), split=(8, 1, 1))


def test_one_file_of_rows_is_divided_by_rows(tmp_path):
    """However many files hold them: the share is of the rows."""
    rows = [f"row {i}" for i in range(200)]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    cfg = DataConfig(path=(str(tmp_path / "one.jsonl"),), val_fraction=0.2)
    train, val = (open_data(cfg, 4, 256, split).sources[0].tokens for split in ("train", "val"))
    assert train + val == sum(len(row) + 1 for row in rows) and 0.1 < val / (train + val) < 0.3


@pytest.mark.parametrize("split", [(1.0,), (1.0, 0.0, 0.0), (1.0, -1.0, 0.0), (0.0, 1.0, 0.0), (1, 2, 3, 4)])
def test_refused(split):
    with pytest.raises(ConfigError, match=r"--data.split=.* three shares, as 949 50 1"):
        DataConfig(split=split)


def test_a_run_measures_the_test_loss_once(gloo, tmp_path, folder):
    flags = [*runs.SMALL, "--steps", "2", "--out", str(tmp_path / "run"), "--data.path", str(folder)]
    gloo(1, runs.run, [*flags, "--data.split", "80", "10", "10", "--train.eval-every", "1"])
    lines = [line for _, line in read_steps(tmp_path / "run" / "metrics.jsonl")]
    assert [line.get("test_loss") is not None for line in lines] == [False, True]
    assert lines[1]["test_loss"] == pytest.approx(lines[1]["val_loss"], rel=0.1)
