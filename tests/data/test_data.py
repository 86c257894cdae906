"""Data: order, splits, mixing, shards and their converter, tokenizers, the loader.

Every error is in test_data_errors.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import corpora
import forked
import numpy as np
import pytest
import torch
from corpora import data, prose

from tmoe.data.convert import convert
from tmoe.data.dataset import IGNORE, Dataset, Loader, choose, parse_sources, permute, unigram_entropy
from tmoe.data.shards import HEADER_BYTES, open_shard
from tmoe.data.sources import Document, encode_documents, held_out, read_documents
from tmoe.data.survey import stdlib_files
from tmoe.data.tokenizer import ByteTokenizer, DataError, load_tokenizer

ROOT = Path(__file__).parents[2]
texts, jsonl, bpe, shards = corpora.texts, corpora.jsonl, corpora.bpe, corpora.shards  # fixtures


# ---- order ----


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 16, 17, 97, 1000, 4097])
def test_permute_is_a_bijection_that_depends_on_its_key(n: int):
    first, second = ([permute(i, n, key) for i in range(n)] for key in ("0/0/0", "0/1/0"))
    assert sorted(first) == sorted(second) == list(range(n))
    assert n < 16 or first != second


def test_permute_spreads_every_index_evenly():
    """Chi-square of the places to which 2,000 keys send each of 13 indices.

    12 degrees of freedom: mean 12, standard deviation sqrt(24).
    """
    n, keys = 13, 2000
    for index in range(n):
        hits = Counter(permute(index, n, f"{key}/0/0") for key in range(keys))
        chi2 = sum((hits[place] - keys / n) ** 2 / (keys / n) for place in range(n))
        assert chi2 < 12 + 5 * 24**0.5


@pytest.mark.parametrize(
    "weights", [[1], [3, 1], [1, 999], [5, 3, 2], [1] * 7, [70, 1, 1, 13, 2, 40, 9, 5, 1, 1, 1]]
)
def test_mixing_is_exact_to_a_constant_at_every_prefix(weights: list[int]):
    """The bound of choose's docstring; the counts that it returns must also be what happened."""
    total = sum(weights)
    depth = max(len(weights) - 1, 0).bit_length()
    given = [0] * len(weights)
    for index in range(3 * total):
        source, nth = choose(index, weights)
        assert nth == given[source]
        given[source] += 1
        for have, weight in zip(given, weights, strict=True):
            assert abs(have - (index + 1) * weight / total) <= depth
        if (index + 1) % total == 0:
            assert given == [(index + 1) // total * weight for weight in weights]


def test_mixing_jumps_far_ahead_exactly():
    weights = [7, 3, 5]
    periods = 10**15
    for index in range(2 * sum(weights)):
        source, nth = choose(index, weights)
        assert choose(index + periods * sum(weights), weights) == (source, nth + periods * weights[source])


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order(texts: Path, jsonl: Path):
    dataset = data(texts, jsonl)
    epochs = [
        [dataset.sample(e * dataset.samples + i).tobytes() for i in range(dataset.samples)] for e in range(2)
    ]
    windows = [source.window(i).tobytes() for source in dataset.sources for i in range(source.samples)]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(windows)
    assert epochs[0] != epochs[1]
    assert epochs[0] != windows
    other = data(texts, jsonl, seed=1)
    assert [other.sample(i).tobytes() for i in range(other.samples)] != epochs[0]


def test_windows_are_seq_apart_and_overlap_by_the_target(texts: Path):
    source = data(texts).sources[0]
    stream = np.concatenate([run.tokens for run in source.runs])
    for index in (0, 1, source.samples - 1):
        assert np.array_equal(source.window(index), stream[index * 16 : index * 16 + 17])


@pytest.mark.parametrize(("tokens", "samples"), [(17, 1), (32, 1), (33, 2), (48, 2), (49, 3)])
def test_a_sample_needs_one_token_more_than_it_has_inputs(tmp_path: Path, tokens: int, samples: int):
    (tmp_path / "one.txt").write_text("a" * (tokens - 1))  # eos is the last
    dataset = data(tmp_path / "one.txt", val_fraction=1e-9)
    assert (dataset.tokens, dataset.samples) == (tokens, samples)
    assert dataset.sample(0).shape == (17,)


@pytest.mark.parametrize(
    ("world", "batch", "accumulate"), [(1, 12, 1), (2, 3, 2), (4, 3, 1), (3, 1, 4), (1, 1, 12)]
)
def test_global_batch_does_not_depend_on_how_it_is_split(
    texts: Path, world: int, batch: int, accumulate: int
):
    dataset = data(texts)
    for step in (0, 1, 57):
        parts = [
            dataset.batch(step, batch=batch, accumulate=accumulate, rank=r, world=world).tokens_ABS
            for r in range(world)
        ]
        together = torch.stack(parts, dim=1).reshape(12, 16)  # [A, world, B, S]
        expected = np.stack([dataset.sample(step * 12 + i)[:-1] for i in range(12)])
        assert np.array_equal(together.numpy(), expected)


def test_loader_resumes_at_any_step(texts: Path):
    dataset = data(texts)
    with Loader(dataset, batch=2, accumulate=2, rank=1, world=2) as whole:
        batches = [next(whole) for _ in range(9)]
        assert whole.step == 9
    for start in (0, 4, 8):
        with Loader(data(texts), start_step=start, batch=2, accumulate=2, rank=1, world=2) as resumed:
            for expected in batches[start:]:
                assert all(torch.equal(a, b) for a, b in zip(next(resumed), expected, strict=True))


def digest_of_order(*paths: str) -> str:
    dataset = data(*paths)
    return hashlib.sha256(b"".join(dataset.sample(index).tobytes() for index in range(200))).hexdigest()


def test_order_is_the_same_in_another_process(texts: Path, jsonl: Path):
    paths = f"{texts}:2", f"{jsonl}:0.5"
    code = "import sys, test_data; print(test_data.digest_of_order(*sys.argv[1:]))"
    python_path = os.pathsep.join(map(str, (ROOT, ROOT / "tests/data", ROOT / "tests/lib")))
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": python_path}
    run = subprocess.run([sys.executable, "-c", code, *paths], env=env, capture_output=True, text=True)
    assert run.stdout.strip() == digest_of_order(*paths), run.stderr


# ---- batches ----


def test_targets_and_documents_stop_at_borders(tmp_path: Path):
    for name, text in (("a.txt", "one"), ("b.txt", "two2"), ("c.txt", "three" * 9)):
        (tmp_path / name).write_text(text)
    dataset = data(tmp_path, seq=8)
    batch = dataset.batch(0, batch=dataset.samples)
    assert (
        batch.tokens_ABS.shape
        == batch.targets_ABS.shape
        == batch.documents_ABS.shape
        == (1, dataset.samples, 8)
    )
    assert all(tensor.dtype == torch.int64 for tensor in batch)
    assert (batch.tokens_ABS == 0).any(), "the case needs a border inside a row"
    for b in range(dataset.samples):
        window = dataset.sample(b)
        number = 0
        for s in range(8):
            assert batch.documents_ABS[0, b, s] == number
            assert batch.targets_ABS[0, b, s] == (IGNORE if window[s] == 0 else window[s + 1])
            number += int(window[s] == 0)


def test_unigram_entropy_by_hand(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"ab" * 500)
    (tmp_path / "b.txt").write_bytes(b"c" * 1000)
    held = dict(zip("ab", held_out(["a.txt", "b.txt"], 0.05), strict=True))
    letters = [b"ab" * 500, b"c" * 1000][0 if not held["a"] else 1] + b"\0"
    shares = np.array(list(Counter(letters).values())) / len(letters)
    mine = data(tmp_path)
    assert unigram_entropy(mine) == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)
    mine.fingerprint = "sha256:abc"
    assert unigram_entropy(mine) is None, "tokens that are no bytes"


# ---- sources and splits ----


def test_stdlib_is_a_corpus():
    train, val = (data("stdlib", split=split) for split in ("train", "val"))
    assert 4e6 < train.tokens < 4e7
    assert 0.01 < val.tokens / train.tokens < 0.12
    assert 2.8 < unigram_entropy(train) < 3.5
    names = [path.as_posix() for path in stdlib_files()]
    assert len(names) == len(set(names))
    assert not [
        name for name in names if "/encodings/" in name or "site-packages" in name or "/test/" in name
    ]
    assert any(name.endswith("/argparse.py") for name in names)


def documents_of(dataset: Dataset) -> list[bytes]:
    streams = [
        b"".join(run.tokens.astype(np.uint8).tobytes() for run in source.runs) for source in dataset.sources
    ]
    return [document for stream in streams for document in stream.split(b"\0")[:-1]]


def test_split_is_by_document_disjoint_and_complete(texts: Path, jsonl: Path):
    for source in (texts, jsonl, "stdlib"):
        train, val = (documents_of(data(source, split=split, val_fraction=0.3)) for split in ("train", "val"))
        everything = [
            d.text if isinstance(d.text, bytes) else d.text.encode() for d in read_documents(str(source))
        ]
        assert val and train
        assert Counter(train) + Counter(val) == Counter(everything)
    assert 0.1 < len(val) / len(everything) < 0.5


def test_split_of_a_file_does_not_depend_on_the_others():
    keys = [f"{n}.txt" for n in range(400)]
    held = dict(zip(keys, held_out(keys, 0.2), strict=True))
    assert 40 < sum(held.values()) < 120
    fewer = keys[::3]
    assert sum(held[key] != now for key, now in zip(fewer, held_out(fewer, 0.2), strict=True)) <= 2
    assert sorted(held_out(["a", "b"], 1e-9)) == sorted(held_out(["a", "b"], 1 - 1e-9)) == [False, True]


def test_equal_jsonl_documents_stay_on_one_side(tmp_path: Path):
    path = tmp_path / "twice.jsonl"
    path.write_text("\n".join(json.dumps({"text": prose(n % 20, 30)}) for n in range(60)))
    train, val = (set(documents_of(data(path, split=split, val_fraction=0.3))) for split in ("train", "val"))
    assert train and val and not train & val


def test_one_document_is_cut_at_its_end(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text(prose(3, 500))
    train, val = (
        data(path, split=split, val_fraction=0.1).sources[0].runs[0].tokens for split in ("train", "val")
    )
    assert bytes(train) + bytes(val) == path.read_bytes() + b"\0"
    assert len(val) == (len(train) + len(val)) // 10


def test_weights_are_exact_proportions(texts: Path, jsonl: Path):
    assert parse_sources(["a:0.3", "b:0.1", "c:1e0"]) == (["a", "b", "c"], [3, 1, 10])
    assert parse_sources(["a", "b"]) == (["a", "b"], [])
    dataset = data(f"{texts}:0.3", f"{jsonl}:0.1")
    assert dataset.weights == [3, 1]
    unweighted = data(texts, jsonl)
    assert unweighted.weights == [source.samples for source in unweighted.sources]
    odd = texts.parent / "name:7"
    odd.mkdir()
    assert parse_sources([str(odd)]) == ([str(odd)], [])


# ---- tokenizers ----


def test_bytes_lose_nothing():
    tokenizer = ByteTokenizer()
    raw = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8).tobytes() + "naïve 专家".encode()
    assert tokenizer.encode(raw).tobytes() == raw
    assert tokenizer.encode(tokenizer.decode(tokenizer.encode(raw))).tobytes() == raw


def test_tokenizer_json(bpe: Path):
    tokenizer = load_tokenizer(str(bpe))
    text = prose(1, 50) + " naïve 专家 <|endoftext|>!"
    ids = tokenizer.encode(text)
    assert len(ids) < len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos not in ids, "a separator written out in a text must not become one"
    assert ids.max() < tokenizer.vocab <= 300
    assert np.array_equal(tokenizer.encode(text.encode()), ids)
    assert [list(i) for i in tokenizer.encode_many([text, "a"])] == [list(ids), list(tokenizer.encode("a"))]
    assert tokenizer.fingerprint == load_tokenizer(str(bpe)).fingerprint != ByteTokenizer.fingerprint


def test_eos_is_the_one_that_the_settings_name(bpe: Path):
    settings = bpe.with_name("tokenizer_config.json")
    settings.write_text(json.dumps({"eos_token": {"content": "!"}}))
    tokenizer = load_tokenizer(str(bpe))
    assert tokenizer.decode([tokenizer.eos]) == "!"
    settings.write_text(json.dumps({"eos_token": "<nowhere>"}))
    with pytest.raises(DataError, match=r"<nowhere>"):
        load_tokenizer(str(bpe))


def test_text_through_a_tokenizer_json(texts: Path, bpe: Path):
    tokenizer = load_tokenizer(str(bpe))
    found = []
    for split in ("train", "val"):
        dataset = data(texts, vocab=300, tokenizer=str(bpe), split=split)
        assert dataset.eos == tokenizer.eos
        found += tokenizer.decode(dataset.sources[0].runs[0].tokens).split("<|endoftext|>")[:-1]
    assert sorted(found) == sorted(path.read_text() for path in texts.rglob("*.txt"))


# ---- shards ----


def test_shards_hold_what_the_texts_held(shards: Path, texts: Path, jsonl: Path):
    files = sorted(shards.iterdir())
    assert len(files) > 5
    opened = [open_shard(path, 256) for path in files]
    documents = [
        d.text if isinstance(d.text, bytes) else d.text.encode()
        for p in (texts, jsonl)
        for d in read_documents(str(p))
    ]
    stream = np.concatenate([run.tokens for _, run in opened]).astype(np.uint8).tobytes()
    assert stream == b"".join(document + b"\0" for document in documents)
    assert all(header.tokens <= 2000 and run.tokens[-1] == 0 for header, run in opened)
    assert all(header.max_id == run.tokens.max() == run.tokens[header.max_at] for header, run in opened)
    assert json.loads(files[0].open().readline())["tokenizer"] == "bytes"


def test_shards_split_at_document_borders_whatever_the_sequence(shards: Path):
    for seq in (16, 33):
        train, val = (data(shards, split=split, seq=seq, val_fraction=0.3) for split in ("train", "val"))
        for first, second in zip(train.sources[0].runs, val.sources[0].runs, strict=True):
            assert first.tokens[-1] == second.tokens[-1] == 0
            assert first.offset == HEADER_BYTES
            assert second.offset == HEADER_BYTES + 2 * len(first.tokens)
            whole = np.memmap(first.where, dtype="<u2", mode="r", offset=HEADER_BYTES)
            assert np.array_equal(whole, np.concatenate([first.tokens, second.tokens]))


def test_windows_cross_shards(shards: Path):
    source = data(shards, seq=100).sources[0]
    stream = np.concatenate([run.tokens for run in source.runs])
    assert all(
        np.array_equal(source.window(i), stream[i * 100 : i * 100 + 101]) for i in range(source.samples)
    )


def test_converter_command_with_a_tokenizer_json(texts: Path, bpe: Path, tmp_path: Path):
    command = ["-m", "tmoe.data", texts, "--out", "out", "--tokenizer", bpe]
    first = forked.run(command, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    dataset, direct = data(tmp_path / "out", vocab=300), data(texts, vocab=300, tokenizer=str(bpe))
    assert dataset.fingerprint == direct.fingerprint and dataset.eos == direct.eos
    again = forked.run(command, cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.strip() == "error: --out=out: exists already; name a new folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bpe", "out", "texts"]


def test_a_tokenizer_is_given_256_documents_or_4_mb(monkeypatch: pytest.MonkeyPatch):
    """It takes a hundred times the memory of the text that it is given at once."""
    given = []
    sizes = [10] * 600 + [3_000_000, 1_500_000, 9_000_000, 5]
    documents = [Document(b"x" * size, f"{i}", f"{i}", size) for i, size in enumerate(sizes)]
    encode = ByteTokenizer.encode_many
    monkeypatch.setattr(
        ByteTokenizer, "encode_many", lambda self, texts: given.append(len(texts)) or encode(self, texts)
    )
    assert [len(ids) for ids in encode_documents(documents, ByteTokenizer())] == [size + 1 for size in sizes]
    assert given == [256, 256, 90, 1, 1]
    assert not list(encode_documents([], ByteTokenizer()))


def test_a_failed_conversion_leaves_nothing(texts: Path, tmp_path: Path):
    (tmp_path / "zz.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"zz\.jsonl:2: "):
        convert((str(texts), str(tmp_path / "zz.jsonl")), out=tmp_path / "out", shard_tokens=500)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts", "zz.jsonl"]


# ---- loader ----


def test_loader_prefetches_and_raises_the_error_of_its_step(texts: Path, monkeypatch: pytest.MonkeyPatch):
    made = Dataset.batch
    seen = threading.Event()

    def batch(self: Dataset, step: int, **shape: int):
        if step == 2:
            raise OSError("disk gone at step 2")
        if step == 1:
            seen.set()
        return made(self, step, **shape)

    monkeypatch.setattr(Dataset, "batch", batch)
    with Loader(data(texts), batch=2) as loader:
        next(loader)
        assert seen.wait(300), "step 1 is made before anyone asks for it"
        next(loader)
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone at step 2"):
                next(loader)
        assert loader.step == 2


def test_loader_closes_its_thread(texts: Path):
    loader = Loader(data(texts), batch=2)
    next(loader)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("tmoe-data")]
    loader.close()
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tmoe-data")]


@pytest.mark.gpu
def test_loader_pins(texts: Path):
    with Loader(data(texts), batch=2, pin=True) as loader:
        assert all(tensor.is_pinned() for tensor in next(loader))
