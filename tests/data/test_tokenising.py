"""Tokenising: long documents in windows, written-out separators, bounded memory.

And one process of a node does it for all.

next: tmoe/data/tokenizer.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import corpora
import forked
import numpy as np
import pytest
from corpora import data, prose
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tmoe.data import shards
from tmoe.data import sources as corpus
from tmoe.data.convert import convert
from tmoe.data.tokenizer import DataError, JsonTokenizer, TokenizerFiles, load_tokenizer

ROOT = Path(__file__).parents[2]
bpe = corpora.bpe  # a fixture

EOS = "<|endoftext|>"
SPLIT = (
    r"""(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def awkward(seed: int, pieces: int) -> str:
    """Combining marks, blanks, numbers, words without blanks between them: places where a cut can do harm."""
    some = [
        "naïve ",
        "cafe\u0301 ",
        "专家",
        "Grüße, ",
        "🙂🏽",
        "\n\n\n",
        "   ",
        "1234567 ",
        "don't ",
        "\t",
        "foo_bar",
    ]
    return "".join(np.random.default_rng(seed).choice(some, pieces))


def made(kind: str) -> JsonTokenizer:
    if kind in ("byte-level", "prefix space"):
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix space")
        model.post_processor = processors.ByteLevel(trim_offsets=True)
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=[EOS], initial_alphabet=ALPHABET, show_progress=False
        )
    elif kind == "split, NFC":
        model = Tokenizer(models.BPE())
        model.normalizer = normalizers.NFC()
        by_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(SPLIT), "isolated"), by_level]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=[EOS], initial_alphabet=ALPHABET, show_progress=False
        )
    elif kind == "no pre-tokenizer":  # Llama 2's
        model = Tokenizer(models.BPE(fuse_unk=True, unk_token="<unk>"))
        model.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", EOS], show_progress=False)
    elif kind == "unigram":
        model = Tokenizer(models.Unigram())
        model.normalizer = normalizers.Sequence(
            [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
        )
        model.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>", EOS], unk_token="<unk>", show_progress=False
        )
    else:
        model = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        model.normalizer = normalizers.BertNormalizer()
        model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[UNK]", EOS], show_progress=False
        )
    model.train_from_iterator([prose(1, 2000), *(awkward(seed, 200) for seed in range(20))], trainer)
    if kind == "no pre-tokenizer":
        model.pre_tokenizer = None
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.add_tokens([AddedToken("\n\n\n", normalized=False), AddedToken("foo", lstrip=True, rstrip=True)])
    return JsonTokenizer(TokenizerFiles(kind, model.to_str().encode(), None))


@pytest.mark.parametrize(
    "kind", ["byte-level", "prefix space", "split, NFC", "no pre-tokenizer", "unigram", "word pieces"]
)
def test_windows_give_the_ids_of_the_whole_text(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Where a run is longer than the overlap there is no seam: two windows become one."""
    tokenizer = made(kind)
    runs = [letter * 30_000 for letter in ("a", " ", "\n", "-", "e\u0301")]
    mixed = "".join(part for n, run in enumerate(runs) for part in (awkward(n, 4000), run))
    for text in (awkward(99, 30_000), mixed, prose(5, 20_000), "ab" * 60_000):
        whole = tokenizer.encode(text)
        monkeypatch.setattr(JsonTokenizer, "LONG", 1000)
        for window, around in ((40_000, 128), (30_011, 16)):
            monkeypatch.setattr(JsonTokenizer, "WINDOW", window)
            monkeypatch.setattr(JsonTokenizer, "AROUND", around)
            joined = []
            seam = JsonTokenizer._seam
            monkeypatch.setattr(
                JsonTokenizer,
                "_seam",
                lambda *a, seam=seam, joined=joined: joined.append(seam(*a)) or joined[-1],
            )
            found = tokenizer.encode(text)
            monkeypatch.setattr(JsonTokenizer, "_seam", seam)
            assert np.array_equal(found, whole)
            assert text != prose(5, 20_000) or all(joined), "words have seams"
        monkeypatch.undo()


# ---- separators ----


def with_separator(kind: str) -> JsonTokenizer:
    """Tokenizers that take the written-out name of their separator for the separator itself.

    Each does it in another way.
    """
    if kind == "added, not special":
        model = Tokenizer(models.BPE(vocab={chr(c): c - 33 for c in range(33, 127)} | {"Ġ": 94}, merges=[]))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.add_tokens([AddedToken(EOS, special=False)])
    elif kind == "unigram's best piece":  # T5's
        letters = sorted(set("<|endoftext|> abc▁"))
        model = Tokenizer(
            models.Unigram([("<unk>", 0.0), (EOS, 0.0), *((c, -5.0) for c in letters)], unk_id=0)
        )
        model.add_special_tokens([EOS])
    else:
        model = Tokenizer(models.WordLevel({EOS: 0, "[UNK]": 1, "a": 2, "b": 3}, unk_token="[UNK]"))
        model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return JsonTokenizer(TokenizerFiles(kind, model.to_str().encode(), None))


@pytest.mark.parametrize("kind", ["added, not special", "unigram's best piece", "a word of its own"])
def test_a_written_out_separator_is_ordinary_text(kind: str, monkeypatch: pytest.MonkeyPatch):
    tokenizer = with_separator(kind)
    for text in (f"a {EOS} b", EOS, f"a{EOS}{EOS}", f"{EOS} b"):
        ids = tokenizer.encode(text)
        assert len(ids) and tokenizer.eos not in ids, (text, ids)
    assert list(tokenizer.encode("a b")) == list(tokenizer.encode_many(["x", "a b"])[1])
    monkeypatch.setattr(JsonTokenizer, "LONG", 1000)
    monkeypatch.setattr(JsonTokenizer, "WINDOW", 20_000)
    assert tokenizer.eos not in tokenizer.encode(f"a b {EOS} " * 5000)


def test_documents_with_a_separator_in_them_stay_one_each(tmp_path: Path, bpe: Path):
    """In text, in rows and in shards; with the tokenizer's own word for the separator, not the file's."""
    told = json.loads(bpe.read_text())
    assert told["added_tokens"][0].pop("special")
    told["added_tokens"][0]["special"] = False
    bpe.write_text(json.dumps(told))
    words = [f"one {EOS} two", EOS, "three"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in words))
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(words):
        (tmp_path / f"texts/{number}.txt").write_text(text)
    tokenizer = load_tokenizer(str(bpe.parent))  # the folder
    for source in ("a.jsonl", "texts"):
        convert((str(tmp_path / source),), out=tmp_path / f"{source}-out", tokenizer=str(bpe))
        ids = shards.open_shard(tmp_path / f"{source}-out/00000.bin", 300)[1].tokens
        parts = np.split(ids, np.flatnonzero(ids == tokenizer.eos) + 1)[:-1]
        assert [tokenizer.decode(part[:-1]) for part in parts] == words


# ---- memory and processes ----

MEASURE = """if True:
    import resource, sys
    import numpy as np
    from pathlib import Path
    from tmoe.data import tokenizer
    from tmoe.data.convert import convert
    chosen = tokenizer.load_tokenizer(sys.argv[2])
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    before = peak()
    convert((sys.argv[1],), out=Path(sys.argv[3]), tokenizer=sys.argv[2])
    print("MiB", peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_a_hundred_bytes_for_each_of_text(tmp_path: Path, bpe: Path):
    """8 MB: a document takes at most 7 bytes for each of its own; windows in work take 400 MiB.

    The 7 bytes are the text, its characters and the ids twice.
    """
    size = 8_000_000
    path = tmp_path / "a.txt"
    line = prose(1, 1000) + "\n"
    path.write_text(line * (size // len(line)))
    command = [sys.executable, "-c", MEASURE, str(path), str(bpe), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    used = float(done.stdout.splitlines()[-1].split()[1])
    assert used < 7 * size / 2**20 + 400, f"{used} MiB"


def opened(rank: int, world: int, paths: list[str], tokenizer: str, folder: str, **settings):
    """What each rank finds, and how often it encoded."""
    corpus.IN_MEMORY = 1000
    tempfile.tempdir = folder
    calls = []
    many = JsonTokenizer.encode_many
    JsonTokenizer.encode_many = lambda self, texts: calls.append(len(texts)) or many(self, texts)
    try:
        parts = [data(*paths, vocab=300, tokenizer=tokenizer, split=s, **settings) for s in ("train", "val")]
    except DataError as error:
        return str(error), len(calls)
    finally:
        JsonTokenizer.encode_many = many
    return (
        [bytes(part.sample(i)) for part in parts for i in range(part.samples)],
        parts[0].sources[0].taken,
        len(calls),
    )


@pytest.mark.parametrize("kind", ["texts", "lines", "one text"])
def test_one_rank_tokenises_for_all(gloo, tmp_path: Path, bpe: Path, kind: str):
    path, temporary = tmp_path / "source", tmp_path / "temporary"
    temporary.mkdir()
    path.mkdir()
    for number in range(1 if kind == "one text" else 40):
        text = prose(number, 3000 if kind == "one text" else 60)
        (path / f"{number}.x").write_text(json.dumps(dict(text=text)) + "\n" if kind == "lines" else text)
    first, second = gloo(2, opened, [str(path)], str(bpe), str(temporary))
    mine = [data(path, vocab=300, tokenizer=str(bpe), split=split) for split in ("train", "val")]
    want = [bytes(part.sample(i)) for part in mine for i in range(part.samples)]
    assert first[:2] == second[:2] == (want, mine[0].sources[0].taken)
    assert min(first[2], second[2]) == 0 < max(first[2], second[2]), "one of them"
    assert gloo(1, opened, [str(path)], str(bpe), str(temporary))[0][2] == 0, "a later start maps them too"
    (path / "0.x").write_text((path / "0.x").read_text().replace("o", "0"))
    assert gloo(1, opened, [str(path)], str(bpe), str(temporary))[0][2] > 0, "a changed file does not"
    assert not list(Path(temporary).rglob("*.tmp"))


def test_an_error_met_by_one_rank_is_said_by_all(gloo, tmp_path: Path, bpe: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps(dict(text="fine")) + "\n" + '{"text": 3}\n' + " " * 2000)
    said = gloo(2, opened, [str(tmp_path / "a.jsonl")], str(bpe), str(tmp_path))
    assert said[0][0] == said[1][0] and 'a.jsonl:2: needs a string in "text"; here is int' in said[0][0]


def test_whoever_waits_goes_on_where_the_one_that_tokenised_was_killed(
    tmp_path: Path, bpe: Path, monkeypatch
):
    """The killed rank's lock is gone with it, and what it began is not taken for whole."""
    monkeypatch.setattr(corpus, "IN_MEMORY", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(text=prose(n, 50))) + "\n" for n in range(40)))
    code = (
        "import os, sys, tempfile; from pathlib import Path; from tmoe.data import sources as corpus\n"
        "tempfile.tempdir, corpus.IN_MEMORY = sys.argv[3], 1000\n"
        "write = corpus._write_shard\n"
        "corpus._write_shard = lambda path, *a: (write(path, *a), os.kill(os.getpid(), 9))\n"
        "corpus.open_corpus(sys.argv[1], corpus_tokenizer(sys.argv[2]), 300, corpus.HeldOut(0.05), 'train')"
    ).replace("corpus_tokenizer", "__import__('tmoe.data.tokenizer').data.tokenizer.load_tokenizer")
    done = forked.run(["-c", code, tmp_path / "a.jsonl", bpe, tmp_path / "t"])
    assert done.returncode == -9, done.stderr
    found = data(tmp_path / "a.jsonl", vocab=300, tokenizer=str(bpe))
    monkeypatch.setattr(corpus, "IN_MEMORY", 10**9)
    assert found.tokens == data(tmp_path / "a.jsonl", vocab=300, tokenizer=str(bpe)).tokens
