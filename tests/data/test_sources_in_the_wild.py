"""Sources as they are found: marks of other programs next to parts, pointers, binary text, zstd as it may be.

next: tmoe/data/row_files.py, tmoe/data/sources.py
"""

from __future__ import annotations

import gzip
import json
import re
import struct
from pathlib import Path

import corpora
import numpy as np
import pytest
from corpora import data

from tmoe.config.run import DataConfig
from tmoe.data.chat.chat_dataset import open_chat
from tmoe.data.row_files import packing
from tmoe.data.sources import read_documents
from tmoe.data.tokenizer import DataError, load_tokenizer

bpe = corpora.bpe  # a fixture
LINES = b"".join(json.dumps(dict(text=f"document {i} " * 20)).encode() + b"\n" for i in range(50))
TEXTS = [json.loads(line)["text"] for line in LINES.splitlines()]


def found(source: object) -> list[str | bytes]:
    return [document.text for document in read_documents(str(source))]


def test_marks_of_spark_and_hadoop_are_no_rows(tmp_path: Path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/part-0.json").write_bytes(LINES)
    marks = (
        "_SUCCESS",
        "_metadata",
        "_common_metadata",
        "part-0.json.crc",
        ".part-0.json.crc",
        "_committed_12",
    )
    for name in marks:
        (tmp_path / "set" / name).write_bytes(b"PAR1 or a checksum")
    assert found(tmp_path / "set") == found(f"{tmp_path}/set/*") == TEXTS
    for name in ("_temporary/0/part-1.json", "_spark_metadata/0"):
        (tmp_path / "set" / name).parent.mkdir(parents=True)
        (tmp_path / "set" / name).write_bytes(LINES)
    assert found(tmp_path / "set") == found(f"{tmp_path}/set/**/*") == TEXTS


@pytest.mark.parametrize(
    ("train", "test", "pattern"),
    [
        ("data/train-00000-of-00001.json", "data/test-00000-of-00001.json", "data/train-00000-of-00001.json"),
        ("train.jsonl", "validation.jsonl", "train.jsonl"),
        ("train/a.json", "test/a.json", "train/a.json"),
    ],
)
def test_a_folder_of_several_splits_is_not_trained_whole(tmp_path: Path, train: str, test: str, pattern: str):
    """A clone of a hub's set would be trained on its test rows."""
    for name in (train, test):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(LINES)
    with pytest.raises(DataError, match=rf"of several splits, .*train \(1\).*, {tmp_path}/{pattern}, and"):
        found(tmp_path)
    assert found(tmp_path / pattern) == TEXTS
    (tmp_path / test).rename(tmp_path / "parsers-00000-of-00001.jsonl")
    assert found(tmp_path) == 2 * TEXTS


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("_delta_log/0.json", "set: _delta_log: is the log of a Delta table, whose files may hold rows"),
        (".hoodie/x", r"set: \.hoodie: is the log of a Hudi table"),
        ("metadata/v1.metadata.json", "set: an Iceberg table, whose files may hold rows that are deleted"),
    ],
)
def test_tables_that_keep_deleted_rows_are_refused(tmp_path: Path, name: str, says: str):
    (tmp_path / "set" / name).parent.mkdir(parents=True)
    (tmp_path / "set" / name).write_bytes(b"{}")
    (tmp_path / "set/part-0.json").write_bytes(LINES)
    with pytest.raises(DataError, match=says):
        found(tmp_path / "set")


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("a.txt", b"/annex/objects/SHA256E-s9--a.txt\n", "is a pointer of git-annex, not the file itself"),
        (
            "a.parquet",
            b"<!DOCTYPE html><html>404",
            "no parquet, which begins with PAR1, but '<!DOCTYPE html>",
        ),
        ("a.parquet", b"PARE" + bytes(9), "parquet that is encrypted"),
        ("a", gzip.compress(gzip.compress(LINES)), "gzip within gzip; unpack it once"),
        ("a.avro", b"Obj\x01...", "an Avro file; save the data set as parquet or JSON lines"),
        ("a.jsonl.lz4", b"\x04\x22\x4d\x18...", "compressed by lz4; unpack it, or compress it by zstd"),
        ("a.jsonl", b'{"text": null}\n', 'a.jsonl:1: needs a string in "text"; here is null'),
        ("a.jsonl", b'{"text": ["a"]}\n', 'a.jsonl:1: needs a string in "text"; here is list'),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, name: str, raw: bytes, says: str):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=re.escape(says)):
        found(tmp_path / name)


@pytest.mark.parametrize("target", ["../.git/annex/objects/a", "nowhere"])
def test_a_link_to_nothing_says_what_is_missing(tmp_path: Path, target: str):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.jsonl").symlink_to(target)
    says = "git annex get" if "annex" in target else "a link to nothing, nowhere (cp -L follows links)"
    with pytest.raises(DataError, match=re.escape(says)):
        found(tmp_path / "set")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt"])
def test_a_git_lfs_pointer_is_no_text(tmp_path: Path, name: str):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(DataError, match=rf"{name}: is a Git LFS pointer, not the file itself: run git lfs"):
        data(tmp_path / name)


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfHello")
    assert found(tmp_path / "a.txt") == [b"Hello"]


def with_pad(bpe: Path, special: bool) -> Path:
    """The tokenizer with one more token, whose id is the first that its vocabulary has not."""
    raw = json.loads(bpe.read_text())
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=special)
    raw["added_tokens"].append(dict(id=load_tokenizer(str(bpe)).vocab, content="<pad>") | flags)
    path = bpe.with_name(f"padded-{special}.json")
    path.write_text(json.dumps(raw))
    return path


def test_a_pad_token_behind_the_vocabulary_is_no_obstacle(tmp_path: Path, bpe: Path):
    """No text holds it: special tokens are not recognised in text. A template that writes it is refused."""
    vocab = load_tokenizer(str(bpe)).vocab
    padded = str(with_pad(bpe, special=True))
    (tmp_path / "a.jsonl").write_bytes(LINES.replace(b"document 7", b"<pad> 7"))
    tokens = data(tmp_path / "a.jsonl", vocab=vocab, tokenizer=padded)
    assert tokens.tokens > 0 and tokens.sample(0).max() < vocab
    ordinary = str(with_pad(bpe, special=False))
    with pytest.raises(DataError, match=rf"ids up to {vocab}: --model.vocab={vocab} is too small"):
        data(tmp_path / "a.jsonl", vocab=vocab, tokenizer=ordinary)

    chat = dict(messages=[dict(role="user", content="hello"), dict(role="assistant", content="hello")])
    rows = tmp_path / "chat.jsonl"
    rows.write_text("".join(json.dumps(chat | dict(id=i)) + "\n" for i in range(2)))
    template = tmp_path / "t.jinja"
    turns = (
        "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endfor %}"
    )
    for opening, fails in (("", False), ("<pad>", True)):
        template.write_text(opening + turns)
        cfg = DataConfig(
            path=(str(rows),), tokenizer=padded, chat_template=str(template), val_path=(str(rows),)
        )
        if not fails:
            assert open_chat(cfg, 64, vocab, "train", "sft").tokens > 0
            continue
        with pytest.raises(DataError, match=rf"holds the id {vocab} \('<pad>'\), but --model.vocab={vocab}"):
            open_chat(cfg, 64, vocab, "train", "sft")


SKIPPED = struct.pack("<II", 0x184D2A53, 7) + b"abcdefg"


def test_skippable_frames_at_the_head_say_zstd(tmp_path: Path):
    """RFC 8878, 3.1.2; pzstd writes one before each frame. lz4's format has them, too."""
    for content, packed in (
        (SKIPPED + SKIPPED + b"\x28\xb5\x2f\xfd rest", "zstd"),
        (SKIPPED, "zstd"),
        (SKIPPED + b"\x04\x22\x4d\x18 lz4", ""),
    ):
        (tmp_path / "a.zst").write_bytes(content)
        assert packing(tmp_path / "a.zst") == packed


def test_zstd_of_a_long_window_and_skippable_frames(tmp_path: Path):
    zstandard = pytest.importorskip("zstandard")
    long = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)
    pack = zstandard.ZstdCompressor(compression_params=long).compressobj()
    raw = pack.compress(LINES) + pack.flush()
    path = tmp_path / "a.jsonl.zst"
    with pytest.raises(zstandard.ZstdError, match="too much memory"):  # by default
        zstandard.ZstdDecompressor().decompressobj().decompress(raw)
    end = LINES.index(b"\n", 2000) + 1
    parts = [zstandard.compress(part) for part in (LINES[:end], LINES[end:])]
    for content in (raw, SKIPPED + raw + SKIPPED, SKIPPED.join([b"", *parts, b""])):
        path.write_bytes(content)
        assert found(path) == TEXTS
    path.write_bytes(raw + SKIPPED[:-2])
    with pytest.raises(DataError, match="damaged zstd: the file ends within a frame"):
        found(path)


def test_parquet_with_text_in_binary_columns(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [dict(text=text.encode(), image=b"\xff\xd8\xff") for text in TEXTS]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "part-0.parquet")
    parquet.write_metadata(table.schema, tmp_path / "_metadata")
    assert found(tmp_path) == TEXTS
    chat = [dict(messages=[dict(role=b"user", content=b"hi"), dict(role=b"assistant", content=b"ho")])] * 2
    parquet.write_table(pyarrow.Table.from_pylist(chat), tmp_path / "chat.x")
    cfg = DataConfig(path=(str(tmp_path / "chat.x"),), val_path=(str(tmp_path / "chat.x"),))
    opened = open_chat(cfg, 64, 256, "train", "sft")
    ids, trained = opened.sources[0].sequence(0)
    assert b"ho" in ids[trained].astype(np.uint8).tobytes()
    with pytest.raises(DataError, match=r'row 1: the binary field "image" is not UTF-8, and so no text'):
        data(tmp_path / "part-0.parquet", text_field="image")
