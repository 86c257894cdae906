"""Data that is damaged, malformed or does not fit: every error names its file and place.

next: tmoe/data/sources.py
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import corpora
import forked
import pytest
from corpora import data
from tiers import slow_but

from tmoe.data.convert import convert
from tmoe.data.shards import HEADER_BYTES, open_shard
from tmoe.data.tokenizer import DataError, load_tokenizer

ROOT = Path(__file__).parents[2]
# 1024 brackets: beyond Python 3.11's depth, not beyond that of later ones, which reach the end
TOO_DEEP = "RecursionError" if sys.version_info < (3, 12) else "JSONDecodeError"
texts, jsonl, bpe, shards = corpora.texts, corpora.jsonl, corpora.bpe, corpora.shards  # fixtures


def rewrite(path: Path, **fields: object) -> None:
    raw = path.read_bytes()
    header = {**json.loads(raw[:HEADER_BYTES]), **fields}
    path.write_bytes(json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n" + raw[HEADER_BYTES:])


def test_id_above_the_vocabulary_names_file_and_byte(shards: Path):
    path = sorted(shards.iterdir())[2]
    _, run = open_shard(path, 256)
    highest = int(run.tokens.argmax())
    offset = HEADER_BYTES + 2 * highest
    with pytest.raises(
        DataError, match=rf"{path.name}: token id {run.tokens[highest]} at byte {offset}: .*=100 - 1"
    ):
        open_shard(path, 100)


@pytest.mark.parametrize("split", ["train", "val"])
def test_id_that_the_header_hides_is_found_when_sampled(shards: Path, split: str):
    path = sorted(shards.iterdir())[1]
    runs = data(shards, split=split, val_fraction=0.3).sources[0].runs
    offset = next(run.offset for run in runs if run.where == str(path)) + 2 * 40
    with path.open("r+b") as file:
        file.seek(offset)
        file.write((777).to_bytes(2, "little"))
    dataset = data(shards, split=split, val_fraction=0.3)
    with pytest.raises(DataError, match=rf"{path.name}: token id 777 at byte {offset}: "):
        for index in range(dataset.samples):
            dataset.sample(index)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda p: os.truncate(p, p.stat().st_size - 3),
            r"truncated: ends at byte \d+, its header promises \d+ tokens",
        ),
        (lambda p: os.truncate(p, 500), r"truncated: ends at byte 500, inside the header"),
        (lambda p: os.truncate(p, 0), r"empty shard: ends at byte 0"),
        (
            lambda p: (os.truncate(p, HEADER_BYTES), rewrite(p, tokens=0)),
            r"empty shard: no tokens after .*byte 1024",
        ),
        (lambda p: p.write_bytes(p.read_bytes() + b"xx"), r"too long: ends at byte"),
        (lambda p: p.write_bytes(bytes(2000)), r"byte 0 begins no tmoe-shard header"),
        (lambda p: rewrite(p, version=2), r"version 1: .*version 2"),
        (lambda p: rewrite(p, dtype="float32"), r"dtype 'float32'"),
        (lambda p: rewrite(p, tokens="114951"), r"tokens '114951'"),
        (lambda p: rewrite(p, tokens=114951.0), r"tokens 114951\.0"),
        (lambda p: rewrite(p, tokens=-1), r"of -1"),
        (lambda p: rewrite(p, max_id=None), r"max_id None"),
        (lambda p: rewrite(p, max_id=300, max_at=10**9), r"max_id 300 at token 1000000000 of \d+"),
        (lambda p: rewrite(p, eos="0"), r"eos '0'"),
        (lambda p: rewrite(p, eos=256), r"eos 256 of 256 ids"),
        (lambda p: rewrite(p, tokenizer=None), r"tokenizer None"),
        (
            lambda p: p.write_bytes(b"[" * 2000),
            rf"byte 0 begins no tmoe-shard header .*{TOO_DEEP}",
        ),
        (lambda p: (p.unlink(), os.mkfifo(p)), r"no regular file"),
        (lambda p: (p.unlink(), p.symlink_to("nowhere")), r"no regular file"),
        (lambda p: rewrite(p, tokenizer="sha256:other"), r"tokenizer sha256:other"),
    ],
)
def test_broken_shard(shards: Path, request: pytest.FixtureRequest, harm, message: str):
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)  # Python's own, which libraries raise for the whole process
    path = sorted(shards.iterdir())[1]
    harm(path)
    with pytest.raises(DataError, match=rf"{path.name}: .*{message}"):
        data(shards)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', r"l\.jsonl:2: not JSON"),
        (b'{"body": "x"}', r'l\.jsonl:2: needs an object with a string field "text"'),
        (b"[" * 200_000, r"l\.jsonl:2: not JSON"),
        (b'["text"]', r'l\.jsonl:2: needs an object with a string field "text"'),
        (b'{"text": "\xff"}', r"l\.jsonl:2: not JSON"),
        (rb'{"text": "ab\ud800"}', r"l\.jsonl:2: not Unicode text at offset 2"),
        (rb'{"text": "ab\u0000"}', r"l\.jsonl:2: holds the document separator \(id 0\) at token 2"),
    ],
)
def test_malformed_jsonl_names_the_line(tmp_path: Path, line: bytes, message: str):
    path = tmp_path / "l.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        convert((str(path),), out=tmp_path / "out")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere", r"nowhere: no such file or folder"),
        ("nowhere:3", r"nowhere: no such file or folder"),
        ("stdlib:", r"--data\.path stdlib:: .*PATH:WEIGHT"),
        ("stdlib:much", r"'much' is no weight"),
        ("hf:org/name", r"'org/name' is no weight; valid: PATH, PATH:WEIGHT or hub:ORG/NAME"),
        ("stdlib:-1", r"'-1' is no weight"),
        ("stdlib:0", r"weight > 0"),
        ("stdlib:1/0", r"'1/0' is no weight"),
        ("stdlib:1e99999999", r"'1e99999999' is no weight.* at most 40 digits"),
        ("stdlib:1e-99999999", r"'1e-99999999' is no weight"),
        ("stdlib:" + "1" * 100, r"1' is no weight"),
        (":2", r"PATH, PATH:WEIGHT or hub:ORG/NAME"),
    ],
)
def test_bad_source(spec: str, message: str):
    with pytest.raises(DataError, match=message):
        data(spec)


def test_bad_combinations(texts: Path, shards: Path, bpe: Path, tmp_path: Path):
    with pytest.raises(DataError, match=rf"{shards}: has no weight"):
        data(f"{texts}:1", shards)
    with pytest.raises(DataError, match=r"tokenizer bytes, eos 0, not sha256:"):
        data(shards, tokenizer=str(bpe), vocab=300)
    chat = tmp_path / "chat"
    chat.mkdir()
    (chat / "tokenizer.json").write_bytes(bpe.read_bytes())
    other = next(
        t
        for t, i in json.loads(bpe.read_text())["model"]["vocab"].items()
        if i != load_tokenizer(str(bpe)).eos
    )
    (chat / "tokenizer_config.json").write_text(json.dumps({"eos_token": other}))
    for name, tokenizer in (("base", bpe), ("chat", chat / "tokenizer.json")):
        convert((str(texts),), out=tmp_path / f"{name}-shards", tokenizer=str(tokenizer))
    with pytest.raises(
        DataError,
        match=r"chat-shards: made with .*, eos \d+, not .*, eos \d+; .* end documents with the same id",
    ):
        data(tmp_path / "base-shards", tmp_path / "chat-shards", vocab=300)
    with pytest.raises(DataError, match=r"base-shards: made with .* end documents with the same id"):
        data(tmp_path / "base-shards", tokenizer=str(chat / "tokenizer.json"), vocab=300)
    with pytest.raises(DataError, match=r"ids up to 255: .*vocab=128 is too small; valid: 256 or more"):
        data(texts, vocab=128)
    with pytest.raises(DataError, match=r"\d+ tokens in its val split, one sample needs 50001"):
        data(texts, split="val", seq=50000)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: the folder holds no files"):
        data(tmp_path / "empty")
    (tmp_path / "empty" / "nothing.txt").touch()
    with pytest.raises(DataError, match=r"empty: 0 tokens"):
        data(tmp_path / "empty")
    with pytest.raises(DataError, match=r"--data\.tokenizer=gone\.json: no such file"):
        data(texts, tokenizer="gone.json")
    says = r"--data\.tokenizer=.*empty: this folder holds no tokenizer\.json and no tokenizer\.model; valid"
    with pytest.raises(DataError, match=says):
        data(texts, tokenizer=str(tmp_path / "empty"))


@pytest.mark.parametrize("kind", ["pipe", "link to nothing", "link to a folder"])
def test_what_is_no_text_file_is_named_and_not_left_out(texts: Path, tmp_path: Path, kind: str):
    odd = texts / "part1" / "odd"
    os.mkfifo(odd) if kind == "pipe" else odd.symlink_to(
        "nowhere" if kind == "link to nothing" else texts / "part2"
    )
    with pytest.raises(DataError, match=rf"{odd}: (neither a file nor a folder|a link to nothing, nowhere)"):
        convert((str(texts),), out=tmp_path / "out")
    odd.rename(odd.with_name(".odd"))  # hidden ones are left out
    (texts / "linked.txt").symlink_to(texts / "part1/1.txt")
    convert((str(texts),), out=tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("[]", r"must hold an object"),
        ('"x"', r"must hold an object"),
        ("null", r"must hold an object"),
        ('{"eos_token": {}}', r"eos_token=\{\}: must be a token"),
        ('{"eos_token": ["</s>"]}', r"eos_token=\['</s>'\]: must be a token"),
        ('{"eos_token": {"content": 3}}', r"eos_token=3: must be a token"),
        ("[" * 200_000, r"not JSON"),
        ("{", r"not JSON"),
    ],
)
def test_settings_of_a_tokenizer_that_are_none(bpe: Path, settings: str, message: str):
    bpe.with_name("tokenizer_config.json").write_text(settings)
    with pytest.raises(DataError, match=rf"tokenizer_config\.json: {message}"):
        load_tokenizer(str(bpe))


SMALL_DISK = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
runpy.run_module("tmoe.data", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("out", "says"),
    slow_but(
        lambda case: case[0] == "full",
        [
            ("text.txt/x", "/text.txt must be a folder that can be written"),
            ("/proc/x", "No such file or directory: '/proc/"),
            ("full", "File too large: '.full."),
        ],
    ),
)
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, out: str, says: str):
    (tmp_path / "text.txt").write_text("some words " * 10_000)
    said = forked.run(["-c", SMALL_DISK, "text.txt", "--out", out], cwd=tmp_path)
    assert said.returncode == (1 if "large" in says else 2), said.stderr
    assert says in said.stderr and len(said.stderr.splitlines()) == 1, said.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_text_that_is_none_names_file_and_offset(tmp_path: Path, bpe: Path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"abc\xff")
    assert bytes(data(bad, seq=1).sources[0].runs[0].tokens) == b"abc\xff\0", "bytes need not be UTF-8"
    with pytest.raises(DataError, match=r"bad\.txt: not Unicode text at offset 3"):
        data(bad, tokenizer=str(bpe), vocab=300)
    bad.write_bytes(b"abcd\0")
    with pytest.raises(DataError, match=r"bad\.txt: holds the document separator \(id 0\) at token 4"):
        data(bad)
    bpe.write_text("{}")
    with pytest.raises(
        DataError, match=r"^--data\.tokenizer=.*tokenizer\.json: not a Hugging Face tokenizer\.json"
    ):
        load_tokenizer(str(bpe))
