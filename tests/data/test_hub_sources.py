"""Data sets of the hub as sources, against a stand-in for the hub; columns under other names.

next: tmoe/data/hub_datasets.py
"""

import json
from dataclasses import replace
from pathlib import Path

import corpora
import pytest
from corpora import data
from hub_server import COMMIT, forget, serving
from huggingface_hub import constants

from tmoe.cli.parse import flags_of, parse
from tmoe.config.check import ConfigError
from tmoe.config.run import Config, DataConfig
from tmoe.data import hub_datasets
from tmoe.data.chat.chat_dataset import open_chat
from tmoe.data.chat.prompt_data import open_prompts
from tmoe.data.convert import convert
from tmoe.data.dataset import parse_sources
from tmoe.data.show import show
from tmoe.data.sources import read_documents
from tmoe.data.tokenizer import DataError

NAME = "org/small.set"
jsonl = corpora.jsonl  # a fixture


def rows(*fields: str, n: int = 30) -> bytes:
    return b"".join(json.dumps({f: f"{f} {i}" for f in fields}).encode() + b"\n" for i in range(n))


CARD = b"""---
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train-*
  - split: held
    path: [main/held.jsonl]
- config_name: other
  data_dir: more
---
A set.
"""
FILES = {
    "README.md": CARD,
    "main/train-0.jsonl": rows("question", "answer"),
    "main/train-1.jsonl": rows("question", "answer", n=3),
    "main/held.jsonl": rows("question", "answer", n=5),
    "more/dev.jsonl": rows("content"),
    "big.csv": b"a,b\n",
}


@pytest.fixture
def served(monkeypatch, tmp_path):
    with serving(NAME, FILES, monkeypatch, tmp_path / "cache") as server:
        yield server


def names(spec: str) -> list[str]:
    root, files = hub_datasets.files_of(spec)
    return [path.relative_to(root).as_posix() for path in files]


def test_config_split_and_revision(served):
    """The files of the split alone are downloaded; a name without a split is the usual config's "train"."""
    train = ["main/train-0.jsonl", "main/train-1.jsonl"]
    assert names(f"hub:{NAME}") == names(f"hub:{NAME}:train") == names(f"hub:{NAME}@main:main:train") == train
    assert served.given == ["README.md", *train] or sorted(served.given) == ["README.md", *train]
    assert names(f"hub:{NAME}:held") == ["main/held.jsonl"]
    assert names(f"hub:{NAME}:other") == names(f"hub:{NAME}@{COMMIT}:other:validation") == ["more/dev.jsonl"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (":tset", "no split 'tset'; valid: train, held; configs: main, other"),
        (":other:train", "no split 'train'; valid: validation"),
        (":third:train", "no config 'third'; valid: main, other"),
        (":train[:1000]", f"cannot be named; valid: hub:{NAME}:train, all of it, with fewer --steps"),
        (":main:train[10%:20%]", f"cannot be named; valid: hub:{NAME}:main:train, all of it"),
        ("@v9", "no such revision on the hub (branch, tag or commit)"),
        (":a:b:c", "must be hub:ORG/NAME[@REVISION][:CONFIG][:SPLIT]"),
        ("::train", "must be hub:ORG/NAME[@REVISION][:CONFIG][:SPLIT]"),
        ("x", "no such data set on the hub for this login (hf auth whoami)"),
    ],
)
def test_what_is_not_there_is_one_line(served, spec, says):
    with pytest.raises(DataError) as error:
        data(f"hub:{NAME}{spec}")
    said = str(error.value)
    assert said.startswith(f"--data.path=hub:{NAME}") and says in said and "\n" not in said


def test_a_gated_set_and_a_hub_that_is_away_are_one_line(monkeypatch, tmp_path):
    given = pytest.raises(DataError, match=r"^hub:org/small.set: access is restricted")
    with serving(NAME, FILES, monkeypatch, tmp_path / "cache", gated=True), given:
        names(f"hub:{NAME}")
    with pytest.raises(DataError, match=r"no download from the hub .*: hf download org/small.set --repo"):
        names("hub:org/small.set@v2")
    forget()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"^hub:org/small.set: no download from the hub") as error:
        names(f"hub:{NAME}")
    assert "\n" not in str(error.value)


def test_files_by_their_names(monkeypatch, tmp_path):
    """Without a card, as Hugging Face's datasets tell splits. Another format is named, with what to do."""
    plain = {
        "train_sft-00000-of-00001.jsonl": b"{}\n",
        "data/test.jsonl": b"{}\n",
        "data/val-set.jsonl": b"{}\n",
        "dataset_infos.json": b"{}",
        "_hidden.jsonl": b"{}\n",
    }
    found, usual = hub_datasets.configs_of(plain, None)
    assert usual == "default" and found["default"] == {
        "train_sft": ["train_sft-00000-of-00001.jsonl"],
        "test": ["data/test.jsonl"],
        "validation": ["data/val-set.jsonl"],
    }
    converted = ["main/partial-train_sft/0000.parquet", "main/test/0000.parquet", "other/train/0000.parquet"]
    found, usual = hub_datasets.configs_of(converted, None)
    assert not usual and found["main"] == {"train_sft": converted[:1], "test": converted[1:2]}
    assert hub_datasets.configs_of(["a.jsonl", "b.jsonl"], None)[0] == {
        "default": {"train": ["a.jsonl", "b.jsonl"]}
    }
    shards = ["data/train-00000-of-00001-b.parquet", "data/validation-00000-of-00001-c.parquet"]
    stories = ["Stories-train.txt", "Stories-valid.txt", "StoriesV2-train.txt", *shards]  # the set thrice
    both = {"train": shards[:1], "validation": shards[1:]}
    assert hub_datasets.configs_of(stories, None)[0] == {"default": both}
    twice = ["train.jsonl.gz", "train.parquet", "test.parquet", "README.txt"]
    assert hub_datasets.configs_of(twice, None)[0]["default"] == {"train": twice[1:2], "test": twice[2:3]}
    few = ["README.txt", "data.jsonl", "metadata.json"]
    assert hub_datasets.configs_of(few, None)[0]["default"] == {"train": ["data.jsonl"]}
    other = pytest.raises(DataError, match=r"\(train.csv\) are not parquet.*@refs/convert/parquet:CONFIG")
    with serving(NAME, {"train.csv": b"a,b\n"}, monkeypatch, tmp_path / "cache"), other:
        names(f"hub:{NAME}")
    pattern = hub_datasets._pattern("./data/**/train-[0-9]?.json*")
    assert pattern.fullmatch("data/a/b/train-1x.jsonl") and pattern.fullmatch("data/train-1x.json")
    assert not pattern.fullmatch("data/train-xx.json") and not pattern.fullmatch("other/train-1x.json")


def test_a_run_pins_the_revision_and_then_needs_no_hub(served, monkeypatch, tmp_path):
    words = ["tiny", "--task", "sft", "--data.path", f"hub:{NAME}:train:2", f"hub:{NAME}:held:1"]
    words += ["--data.columns", "prompt=question", "completion=answer", "--out", str(tmp_path / "run")]
    cfg = parse(words, "")
    assert cfg.data.path == (f"hub:{NAME}@{COMMIT}:train:2", f"hub:{NAME}@{COMMIT}:held:1")
    assert flags_of(cfg)["--data.path"] == repr(list(cfg.data.path))
    assert parse_sources(cfg.data.path) == ([one[:-2] for one in cfg.data.path], [2, 1])
    opened = open_chat(cfg.data, 64, 256, "train", "sft")
    assert opened.counts.rows == 38 and COMMIT in opened.facts()["is"]
    asked = served.asked
    served.commit = "f" * 40  # the set has changed
    forget()
    assert parse(["tiny", "--dry-run", *words[1:]], "").data.path[0] == f"hub:{NAME}:train:2"
    again = open_chat(parse([*words[:4], *cfg.data.path, *words[6:]], "").data, 64, 256, "train", "sft")
    assert served.asked == asked and again.facts() == opened.facts()
    assert parse(words, "").data.path[0] == f"hub:{NAME}@{'f' * 40}:train:2"
    with pytest.raises(SystemExit):
        parse([*words[:4], "hub:nobody", *words[6:]], "")


def test_offline_the_cache_is_read(served, monkeypatch, tmp_path):
    """Also what another program downloaded, of which there is no listing."""
    held = names(f"hub:{NAME}:held")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    forget()
    assert names(f"hub:{NAME}:held") == held
    forget()
    with pytest.raises(DataError, match=r"hub:org/small.set: .*hf download org/small.set --repo-t"):
        names(f"hub:{NAME}:train")
    forget()
    for path in (tmp_path / "cache").glob(".tmoe*/*.json"):
        path.unlink()
    folder = tmp_path / f"cache/datasets--org--small.set/snapshots/{COMMIT}"
    refs = folder.parents[1] / "refs/main"
    refs.parent.mkdir(exist_ok=True)
    refs.write_text(COMMIT)
    assert names(f"hub:{NAME}:held") == held


def test_every_task_and_tool_takes_a_set_with_columns(served, tmp_path, capsys):
    spec = f"hub:{NAME}:train"
    asked = ("prompt=question", "completion=answer")
    text = data(f"hub:{NAME}:other", columns=("text=content",))
    assert text.tokens > 100
    assert data(spec, columns=("text=question",)).tokens > 100
    grpo = replace(Config().grpo, rewards=("exact",), max_tokens=8)
    cfg = Config(task="grpo", data=DataConfig(path=(spec,), columns=asked[:1]), grpo=grpo)
    first = open_prompts(cfg, "train").sources[0].prompts[0]
    assert first.text.startswith("question ") and first.row["answer"] == first.text.replace(
        "question", "answer"
    )
    pairs = ("chosen=question", "rejected=answer", "prompt=question")
    chosen = open_chat(DataConfig(path=(spec,), columns=pairs), 64, 256, "train", "preference")
    assert chosen.counts.sequences > 2
    convert((f"hub:{NAME}:other",), out=tmp_path / "shards", columns=("text=content",))
    show(spec, columns=asked)
    said = capsys.readouterr().out
    assert "30 documents" in said and "question 0⟦answer 0" in said


# ---- columns, of local rows as well ----


def test_columns_are_renamed_before_the_kind_is_told(tmp_path: Path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path = tmp_path / "a.jsonl"
    asked = [[turns[0] | dict(content=f"hi {i}"), turns[1]] for i in range(5)]
    lines = [dict(dialog=one, id=i, messages="not these") for i, one in enumerate(asked[:4])]
    lines.append(dict(messages=asked[4]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    opened = open_chat(DataConfig(path=(str(path),), columns=("messages=dialog",)), 64, 256, "train", "sft")
    assert opened.counts.rows == 5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:4]))
    swapped = DataConfig(path=(str(path),), columns=("messages=dialog", "dialog=messages"))
    assert open_chat(swapped, 64, 256, "train", "sft").counts.rows == 4


def test_columns_that_are_not_there_are_named(tmp_path: Path, jsonl: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows("body", "title"))
    says = r"a\.jsonl:1: --data\.columns=text=boyd: no column 'boyd'; valid: body, title"
    with pytest.raises(DataError, match=says):
        list(data(path, columns=("text=boyd",), skip_malformed=99).sources)
    assert next(iter(read_documents(str(jsonl)))).text  # which has the column that is asked for
    (tmp_path / "b.txt").write_text("text")
    for source in (tmp_path / "b.txt", "stdlib"):
        with pytest.raises(DataError, match=f"{source}: is plain text, which has no columns"):
            data(source, columns=("text=body",))
    for wrong in (("text",), ("text=",), ("=body",), ("text=a", "text=b")):
        with pytest.raises(ConfigError, match=r"--data.columns=.*: must be OURS=THEIRS"):
            DataConfig(columns=wrong)
    with pytest.raises(ConfigError, match="--columns=text: must be OURS=THEIRS"):
        convert((str(path),), out=tmp_path / "out", columns=("text",))
