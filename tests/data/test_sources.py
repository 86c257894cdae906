"""What a source is taken for, by its first bytes: rows, texts, or a folder of several kinds.

Rows may have any name and compression.

next: tmoe/data/row_files.py
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import corpora
import forked
import numpy as np
import pytest
from corpora import data

from tmoe.data import row_files as rows
from tmoe.data.convert import convert
from tmoe.data.shards import open_shard
from tmoe.data.sources import Skips, beginning, read_documents
from tmoe.data.survey import survey
from tmoe.data.tokenizer import DataError

ROOT = Path(__file__).parents[2]
texts, bpe, shards, jsonl = corpora.texts, corpora.bpe, corpora.shards, corpora.jsonl  # fixtures

TEXTS = [f'document {i}, {{"braces": [1, 2]}} naïve\n\u2028 专家' for i in range(20)]
ROWS = [dict(id=i, text=text, meta=dict(text="not this")) for i, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS).encode()
PRETTY = "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()


def found(source: object) -> list[str | bytes]:
    return [document.text for document in read_documents(str(source))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            (name, LINES)
            for name in ("a.jsonl", "a.json", "a.ndjson", "a.JSONL", "a.txt", "a", "a.JSON", "a.data")
        ),
        *((name, ARRAY) for name in ("a.json", "a.jsonl", "a.txt", "a")),
        ("a.json", json.dumps(ROWS, indent=4).encode()),
        ("a.json", PRETTY),
        ("a.json", b"\xef\xbb\xbf" + ARRAY),
        ("a.jsonl", b"\xef\xbb\xbf" + LINES),
        ("a.jsonl", b"\n  \n" + LINES.replace(b"\n", b"\r\n\n")),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.json.gz", gzip.compress(ARRAY, mtime=0)),
        ("a.jsonl", gzip.compress(LINES[:700], mtime=0) + gzip.compress(LINES[700:], mtime=0)),
        ("a.jsonl.bz2", bz2.compress(LINES)),
        ("a.jsonl.xz", lzma.compress(LINES)),
    ],
)
def test_rows_are_read_whatever_their_name(tmp_path: Path, name: str, content: bytes):
    path = tmp_path / name
    path.write_bytes(content)
    assert found(path) == TEXTS
    folder = tmp_path / "set" / "more"
    folder.mkdir(parents=True)
    path.rename(folder / name)
    assert found(folder.parent) == TEXTS


def test_one_row_and_long_rows(tmp_path: Path):
    """A first line longer than what is looked at first, and rows longer than a reader takes at a time."""
    for number, content in enumerate((["x" * 5_000_000, "y"], ["one"])):
        rows_ = [dict(text=text) for text in content]
        (tmp_path / f"{number}.json").write_text("\n".join(map(json.dumps, rows_)))
        (tmp_path / f"{number}-array.json").write_text(json.dumps(rows_))
        assert found(tmp_path / f"{number}.json") == found(tmp_path / f"{number}-array.json") == content


@pytest.mark.parametrize("kind", ["zstd", "parquet"])
def test_libraries_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\x28\xb5\x2f\xfd rest" if kind == "zstd" else b"PAR1 rest")
    monkeypatch.setattr(rows.importlib.util, "find_spec", lambda name: None)
    package = dict(zstd="zstandard", parquet="pyarrow")[kind]
    with pytest.raises(DataError, match=rf"a\.jsonl: .*needs the package {package}, .*pip install"):
        found(path)


def test_zstd(tmp_path: Path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    pack = zstandard.ZstdCompressor().compress
    path.write_bytes(pack(LINES[:700]) + pack(LINES[700:]))
    assert found(path) == TEXTS
    for content in (pack(LINES)[:-9], pack(LINES) + b"more", pack(LINES[:700]) + pack(LINES)[:20]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.jsonl\.zst: damaged zstd"):
            found(path)


def test_parquet(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number in range(2):
        some = ROWS[number * 10 : number * 10 + 10]
        parquet.write_table(pyarrow.Table.from_pylist(some), tmp_path / f"{number}.x")
    assert found(tmp_path) == TEXTS
    assert data(tmp_path, text_field="text").tokens > 0
    with pytest.raises(
        DataError, match=r'0\.x: row 1: .*string field "body"; its fields are: id, text, meta'
    ):
        data(tmp_path, text_field="body")
    (tmp_path / "0.x").write_bytes((tmp_path / "0.x").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"0\.x: damaged parquet"):
        found(tmp_path)


# Without the time of now: workers that collect this file at different seconds would give the case
# different names.
TGZ = gzip.compress(b"x" + bytes(256) + b"ustar" + bytes(99), mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-20], r"damaged gzip"),
        ("a.json", ARRAY[:-5], r"a\.json: row 20: not JSON"),
        ("a.json", ARRAY[:-1], r"ends within the array"),
        ("a.json", ARRAY + b"{}", r"something follows the array"),
        ("a.json", b'{"text": "x"\n{"text": "y"}\n', r"a\.json:1: not JSON"),
        ("a.json", b'["one", "two"]', r"a\.json: row 1: needs an object .* here is str"),
        (
            "a.json",
            b'{"content": "x", "id": 3}\n',
            r'string field "text"; its fields are: content, id; --data\.text-field',
        ),
        ("a.zip", b"PK\x03\x04rest", r"a zip archive; unpack it"),
        ("a.tar", b"x" + bytes(256) + b"ustar" + bytes(99), r"a tar archive; unpack it"),
        ("a.tgz", TGZ, r"a tar archive; unpack it"),
        (
            "a.arrow",
            b"\xff\xff\xff\xff" + bytes(99),
            r"an Arrow stream, as datasets.save_to_disk writes; save the data set as parquet",
        ),
        ("a.txt", "text".encode("utf-16"), r"text in UTF-16"),
    ],
)
def test_what_is_neither_text_nor_whole_rows_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        found(tmp_path / name)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (dict(messages=[dict(role="user", content="hi")]), "chat rows"),
        (dict(conversations=[{"from": "human", "value": "hi"}]), "chat rows"),
        (dict(prompt="p", chosen="c", rejected="r"), "preference rows"),
        (dict(prompt="p", completion="c"), "prompt and completion rows"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_rows_of_another_use_are_named_and_not_trained_on(tmp_path: Path, row: dict, kind: str, name: str):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(200)))
    for call in (
        lambda: data(path),
        lambda: convert((str(path),), out=tmp_path / "out", skip_malformed=1000),
    ):
        with pytest.raises(
            DataError,
            match=rf"{name}:1: {kind} \(fields: {next(iter(row))}.*train.py --task (sft|preference)",
        ):
            call()
    assert not (tmp_path / "out").exists()


def test_another_text_field(tmp_path: Path):
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps(dict(content=text, messages="x")) + "\n" for text in TEXTS))
    convert((str(path),), out=tmp_path / "out", text_field="content")
    _, run = open_shard(tmp_path / "out/00000.bin", 256)
    assert run.tokens.astype(np.uint8).tobytes() == b"".join(text.encode() + b"\0" for text in TEXTS)
    assert sum(data(path, text_field="content", split=split).tokens for split in ("train", "val")) == len(
        run.tokens
    )


# ---- folders ----


def test_a_folder_of_several_kinds_needs_a_word(tmp_path: Path, shards: Path):
    (tmp_path / "set").mkdir()
    for name in ("a.jsonl", "b.jsonl.gz"):
        (tmp_path / "set" / name).write_bytes(LINES if name == "a.jsonl" else gzip.compress(LINES))
    assert found(tmp_path / "set") == TEXTS * 2
    (tmp_path / "set" / "README.md").write_text("# A data set\n")
    kinds = r"several kinds, JSON lines: 2 \(a\.jsonl, b\.jsonl\.gz\); plain text: 1 \(README\.md\)"
    with pytest.raises(DataError, match=rf"set: holds files of {kinds}\. .*set/\*\*/\*\.jsonl"):
        data(tmp_path / "set")
    assert found(tmp_path / "set" / "*.jsonl*") == TEXTS * 2
    assert found(f"{tmp_path}/s*/**/*.jsonl") == TEXTS
    assert data(f"{tmp_path / 'set'}/*.md:2", seq=4, val_fraction=0.5).weights == [2]
    with pytest.raises(DataError, match=r"set/\*\.csv: no file of such a name"):
        data(tmp_path / "set" / "*.csv")
    (shards / "README.md").write_text("# Shards\n")
    with pytest.raises(DataError, match=r"token shards: \d+ \(00000\.bin, .*plain text: 1 \(README\.md\)"):
        data(shards)
    assert data(shards / "*.bin").tokens > 1000
    (shards / "00000.bin").rename(tmp_path / "one.shard")
    assert data(tmp_path / "one.shard").tokens > 100, "a shard under another name"


def test_json_among_texts_is_text_unless_it_holds_rows(tmp_path: Path):
    """A folder of sources stays one, and its files are read as they are."""
    folder = tmp_path / "sources"
    folder.mkdir()
    files = {
        "a.py": b"{1: 2}[1]\n",
        "b.c": b"{ int i; }\n",
        "c.md": b"[link](x) and more\n",
        "d.txt": b"[1] a list\n[2] of references\n",
        "empty.py": b"",
        "package.json": b'{\n  "name": "x",\n  "version": "1"\n}\n',
        "one.json": b'{"text": "a single object"}',
        "list.json": b"[1, 2]",
        "noise.json": b"{ // a comment\n}",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert found(folder) == [content for _, content in sorted(files.items()) if content]
    assert (
        ", 2 of them JSON, read as text like the other files"
        in data(folder, seq=4, val_fraction=0.5).sources[0].taken
    )
    (folder / "rows.json").write_bytes(LINES)
    with pytest.raises(DataError, match=r"plain text: \d+ .*JSON lines: 1 \(rows\.json\)"):
        survey(str(folder))


def test_texts_may_be_compressed(tmp_path: Path):
    for name, raw in (("a.txt.gz", b"first"), ("b", b"second")):
        (tmp_path / name).write_bytes(gzip.compress(raw))
    assert found(tmp_path) == [b"first", b"second"]


def test_what_a_source_was_taken_for_is_said(tmp_path: Path, texts: Path):
    (tmp_path / "a.json").write_bytes(LINES)
    done = forked.run(["-m", "tmoe.data", "a.json", texts, "--out", "out"], cwd=tmp_path)
    said = done.stdout.splitlines()
    tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    first = repr(TEXTS[0][:60])
    assert f"a.json: JSON lines in 1 file, 20 documents, the first begins {first}; {tokens:,} tokens" in said
    assert any(
        line.startswith(f"{texts}: plain text in 30 files, 30 documents, the first begins") for line in said
    )
    assert (
        data(tmp_path / "out")
        .sources[0]
        .taken.startswith(f"token shards in 1 file, 50 documents, the first begins {first}")
    )
    assert beginning(("专" * 100).encode()) == beginning("专" * 100) == "专" * 60
    taken = data(tmp_path / "a.json").sources[0].taken
    assert taken == f"JSON lines in 1 file, 20 documents, the first begins {first}"


# ---- malformed documents ----

MALFORMED = [
    b'{"text": "cut',
    b'{"text": 3}',
    b'{"other": "x"}',
    rb'{"text": "a\u0000b"}',
    rb'{"text": "\ud800"}',
    b"nothing",
]


def test_malformed_rows_are_left_out_up_to_a_limit(tmp_path: Path):
    lines = LINES.splitlines()
    for at, line in enumerate(MALFORMED):
        lines.insert(3 * at + 1, line)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    want = b"".join(text.encode() + b"\0" for text in TEXTS)
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON: .*--skip-malformed N"):
        convert((str(path),), out=tmp_path / "none")
    with pytest.raises(
        DataError, match=r"more than 5 malformed documents .* the first: .*a\.jsonl:2: not JSON"
    ):
        convert((str(path),), out=tmp_path / "none", skip_malformed=5)
    assert not (tmp_path / "none").exists()
    convert((str(path),), out=tmp_path / "out", skip_malformed=6)
    assert open_shard(tmp_path / "out/00000.bin", 256)[1].tokens.astype(np.uint8).tobytes() == want
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON: .*--data\.skip-malformed N"):
        data(path)
    parts = [data(path, split=split, skip_malformed=6) for split in ("train", "val")]
    assert sum(part.tokens for part in parts) == len(want)
    assert (
        "malformed left out: " in parts[0].sources[0].taken
        and "a.jsonl:2: not JSON" in parts[0].sources[0].taken
    )


def test_skips_count_a_row_once():
    skips = Skips(1)
    for _ in range(3):
        skips.add("a:1", DataError("a:1: bad"))
    assert skips.tell() == "1 malformed left out: a:1: bad"
