"""Megatron's .bin and .idx: types of ids, documents, its own split, blends, cut and hostile files."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import corpora
import indexed
import numpy as np
import pytest
import runs
from hypothesis import given, settings
from hypothesis import strategies as st

from tmoe.config.run import DataConfig
from tmoe.data.corpus import HeldOut
from tmoe.data.dataset import open_data
from tmoe.data.indexed import open_indexed
from tmoe.data.tokenizer import DataError

bpe = corpora.bpe
EOS = 9
# Documents of 1 to 5 ids below 9, each with its eos.
ENDED = [[(7 * n + i) % 9 for i in range(1 + n % 5)] + [EOS] for n in range(100)]
OPEN = [ids[:-1] for ids in ENDED]


def joined(parts) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def stream(path: Path, part: str = "train", tokenizer: str = "auto", **more) -> list[int]:
    cfg = DataConfig(path=(str(path),), tokenizer=tokenizer, **more)
    source = open_data(cfg, 2, 300, part).sources[0]
    return np.concatenate([np.asarray(run.tokens[0 : len(run.tokens)]) for run in source.runs]).tolist()


@pytest.mark.parametrize("dtype", indexed.CODES)
@pytest.mark.parametrize("per", [1, 3])
def test_every_type_is_read(tmp_path, dtype, per):
    prefix = indexed.write(tmp_path / "data", ENDED, dtype, per)
    parts = [stream(prefix, split, split=(80, 15, 5)) for split in ("train", "val", "test")]
    assert joined(parts) == joined(ENDED)


@pytest.mark.parametrize("name", ["data", "data.bin", "data.idx", "."])
def test_by_any_name(tmp_path, name):
    """The prefix that Megatron takes, either file, or the folder."""
    indexed.write(tmp_path / "data", ENDED)
    assert stream(tmp_path / name)[:10] == joined(ENDED)[:10]


def test_split_is_that_of_megatron(tmp_path):
    """round(share * sequences), in order: of 100 sequences 949,50,1 are 95, 5 and none."""
    prefix = indexed.write(tmp_path / "data", ENDED)
    wanted = ENDED[:90], ENDED[90:98], ENDED[98:]
    for split, documents in zip(("train", "val", "test"), wanted, strict=True):
        assert stream(prefix, split, split=(90, 8, 2)) == joined(documents)
    assert stream(prefix, "train", split=(949, 50, 1)) == joined(ENDED[:95])
    with pytest.raises(DataError, match=r"0 tokens in its test split"):
        stream(prefix, "test", split=(949, 50, 1))


@pytest.mark.parametrize("per", [1, 3])
def test_documents_without_eos_are_told_apart(tmp_path, bpe, per):
    """Made without --append-eod: the boundaries of the index become the tokenizer's eos."""
    prefix = indexed.write(tmp_path / "data", [[i + 1 for i in ids] for ids in OPEN], "int32", per)
    eos = json.loads(bpe.read_text())["model"]["vocab"]["<|endoftext|>"]
    found = stream(prefix, "train", str(bpe), split=(80, 15, 5))
    documents = OPEN if per == 1 else OPEN[:80]
    assert found == joined([*(i + 1 for i in ids), eos] for ids in documents[:80])
    batch = open_data(DataConfig(path=(str(prefix),), tokenizer=str(bpe)), 8, 300, "train").batch(0, batch=4)
    assert batch.documents_ABS.max() > 0


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 8), min_size=0, max_size=6), min_size=1, max_size=12).filter(any),
    st.integers(1, 3),
    st.integers(0, 90),
    st.integers(0, 40),
)
def test_any_slice(tmp_path_factory, documents, per, low, length):
    """A slice of ids with separators is that of the whole list, empty documents left out."""
    folder = tmp_path_factory.mktemp("indexed")
    found = open_indexed(indexed.write(folder / "data", documents, "uint8", per).with_suffix(".bin"))
    run = found.run(HeldOut(1e-9), "train", 200)
    whole = joined([*ids, 200] for ids in documents if ids)
    assert len(run.tokens) == len(whole)
    assert run.tokens[low : low + length].tolist() == whole[low : low + length]


def test_blend(tmp_path):
    """Megatron's `0.3 a 0.7 b`: of 100 samples 30 come from a."""
    indexed.write(tmp_path / "a", [[1] * 200 + [EOS]] * 40)
    indexed.write(tmp_path / "b", [[2] * 200 + [EOS]] * 40)
    data = open_data(DataConfig(path=(f"{tmp_path / 'a'}:0.3", f"{tmp_path / 'b'}:0.7")), 4, 10, "train")
    assert sum(1 in data.sample(i) for i in range(100)) == 30


def test_the_tokenizer_must_be_named_where_documents_do_not_tell(tmp_path):
    prefix = indexed.write(tmp_path / "data", OPEN)
    with pytest.raises(DataError, match=r"data.bin: a Megatron data set does not say .*--data.tokenizer"):
        stream(prefix)


def test_ids_outside_the_vocabulary_name_their_byte(tmp_path):
    """A negative id as well as a large one, also behind separators that the file does not hold."""
    documents = [[1, 2], [3, 4], [5, -1, 6], [1, 1]] * 3
    prefix = indexed.write(tmp_path / "data", documents, "int16")
    found = open_indexed(prefix.with_suffix(".bin"))
    assert str(found.run(HeldOut(0.1), "train", 7).bad_id(7, 9)).startswith(
        f"{tmp_path / 'data.bin'}: token id -1 at byte 10:"
    )
    ended = indexed.write(tmp_path / "ended", [[*ids, 7] for ids in documents], "int16")
    data = open_data(DataConfig(path=(str(ended),)), 4, 8, "train")
    with pytest.raises(DataError, match=r"ended.bin: token id -1 at byte 14: valid ids are 0 to .*=8 - 1"):
        for i in range(data.samples):
            data.sample(i)
    half = indexed.write(tmp_path / "half", [[1, 2, EOS]] * 9, "float32")
    raw = np.fromfile(half.with_suffix(".bin"), "<f4")
    raw[4] = 1.5
    raw.tofile(half.with_suffix(".bin"))
    with pytest.raises(DataError, match=r"half.bin: holds numbers that are no whole ids, as 1.5"):
        stream(half)


HOSTILE = {
    "empty": (lambda raw: b"", "truncated: ends at byte 0, inside its head of 34"),
    "cut head": (lambda raw: raw[:20], "truncated: ends at byte 20, inside its head of 34"),
    "cut": (lambda raw: raw[:-3], "truncated: ends at byte"),
    "longer": (lambda raw: raw + b"\0" * 5, "too long: ends at byte"),
    "other": (lambda raw: b"PK\3\4" + raw[4:], "not as the index of a Megatron data set"),
    "version": (lambda raw: raw[:9] + struct.pack("<Q", 2) + raw[17:], "version 2 at byte 9"),
    "type": (lambda raw: raw[:17] + b"\x09" + raw[18:], "type 9 of ids at byte 17"),
    "huge": (lambda raw: raw[:18] + struct.pack("<QQ", 2**60, 2**60) + raw[34:], "truncated: ends at byte"),
    "none": (lambda raw: raw[:18] + struct.pack("<QQ", 0, 0), "empty: 0 sequences"),
    "pictures": (lambda raw: raw + b"\0" * 100, "a mode for each sequence"),
    "negative": (lambda raw: raw[:34] + struct.pack("<i", -1) + raw[38:], "sequence 0 has -1 ids"),
    "pointer": (lambda raw: raw[: 34 + 408] + struct.pack("<q", 2) + raw[34 + 416 :], "sequence 1 begins at"),
    "documents": (lambda raw: raw[:-8] + struct.pack("<q", 7), "do not rise from 0 to 100"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_indexes(tmp_path, case):
    damage, words = HOSTILE[case]
    prefix = indexed.write(tmp_path / "data", ENDED)
    index = prefix.with_suffix(".idx")
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(DataError, match=words) as raised:
        stream(prefix)
    assert f"--data.path={prefix}: {index}: " in str(raised.value)


def test_a_cut_bin_and_a_lonely_index(tmp_path):
    prefix = indexed.write(tmp_path / "data", ENDED)
    ids = prefix.with_suffix(".bin")
    ids.write_bytes(ids.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"data.bin: truncated: ends at byte \d+, its .idx promises"):
        stream(prefix)
    ids.unlink()
    with pytest.raises(DataError, match=r"data.idx: the index of a Megatron data set, whose .bin is not"):
        stream(prefix.with_suffix(".idx"))
    indexed.write(tmp_path / "data", ENDED)
    prefix.with_suffix(".idx").unlink()
    with pytest.raises(DataError, match=r"data.bin: .*a Megatron data set needs data.idx in its folder"):
        stream(ids)


def test_a_run_trains_on_it(gloo, tmp_path):
    prefix = indexed.write(tmp_path / "data", [[n % 200 for n in range(50)] + [255]] * 30)
    flags = [*runs.SMALL, "--steps", "1", "--out", str(tmp_path / "run"), "--data.path", f"{prefix}.bin"]
    gloo(1, runs.run, flags)
