"""Chat data as training reads it: kinds of rows, errors, what is too long, batches, order, the cache."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_tokenizers import chat_tokenizer

from tmoe.config.model import IGNORE
from tmoe.config.run import Config, DataConfig, GrpoConfig, TrainConfig
from tmoe.data.chat import chat_dataset as chat_dataset
from tmoe.data.chat.chat_dataset import ChatDataset, open_chat
from tmoe.data.chat.prompt_data import open_prompts
from tmoe.data.dataset import Loader
from tmoe.data.synthetic_chat import chat_rows, preference_rows, small_facts, write_facts
from tmoe.data.tokenizer import DataError
from tmoe.hf.tokenizer_files import carried_by


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))


def write(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chat(
    *paths: Path | str, task: str = "sft", seq: int = 128, split: str = "train", **settings
) -> ChatDataset:
    return open_chat(DataConfig(path=tuple(map(str, paths)), **settings), seq, 256, split, task)


def user(text: str) -> dict:
    return dict(role="user", content=text)


def answer(text: str) -> dict:
    return dict(role="assistant", content=text)


def texts(dataset: ChatDataset) -> list[tuple[str, str]]:
    """Each sequence of an epoch as its text and what is trained of it, sorted."""
    found = []
    for index in range(dataset.samples):
        for _, ids, trained in dataset.row(index):
            found.append((bytes(ids).decode(), bytes(ids[trained]).decode()))
    return sorted(found)


# ---- kinds of rows ----

SAME = ("user\nq{}\0\nassistant\na{}\0", "a{}\0")
KINDS = {
    "messages": lambda n: dict(messages=[user(f"q{n}"), answer(f"a{n}")]),
    "messages as text": lambda n: dict(messages=json.dumps([user(f"q{n}"), answer(f"a{n}")])),
    "parts": lambda n: dict(messages=[user([dict(type="text", text=f"q{n}")]), answer(f"a{n}")]),
    "conversations": lambda n: dict(
        conversations=[{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": f"a{n}"}]
    ),
    "lists": lambda n: dict(prompt=[user(f"q{n}")], completion=[answer(f"a{n}")]),
    "text and list": lambda n: dict(prompt=f"q{n}", completion=[answer(f"a{n}")]),
    "response": lambda n: dict(prompt=[user(f"q{n}")], response=f"a{n}"),
    "instruction": lambda n: dict(instruction=f"q{n}", input="", output=f"a{n}"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_conversations(tmp_path: Path, kind: str):
    path = write(tmp_path / "rows.jsonl", [KINDS[kind](n) for n in range(20)])
    found = texts(chat(path)) + texts(chat(path, split="val"))
    assert sorted(found) == sorted(tuple(part.format(n, n) for part in SAME) for n in range(20))


def test_columns_make_texts_a_conversation(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [dict(prompt=f"q{n}", completion=f"a{n}") for n in range(20)])
    found = texts(chat(path, columns=("instruction=prompt",)))
    assert found and all(text.startswith("user\nq") and text.count("\0") == 2 for text, _ in found)


def test_texts_are_taken_as_they_are(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [dict(prompt=f"q{n}:", completion=f" a{n}") for n in range(20)])
    dataset = chat(path)
    assert ("q3:a3\0".replace(":", ": "), " a3\0") in texts(dataset) + texts(chat(path, split="val"))
    assert "of prompt/completion, texts without a chat template, " in dataset.sources[0].taken
    mixed = [dict(prompt=[user(f"q{n}")] if n % 2 else f"q{n}", completion=f"a{n}") for n in range(20)]
    taken = chat(write(tmp_path / "mixed.jsonl", mixed)).sources[0].taken
    assert "the model has none, but rows of texts without it, " in taken


PAIRS = {
    "lists": lambda n: dict(prompt=[user(f"q{n}")], chosen=[answer(f"a{n}")], rejected=[answer(f"b{n}")]),
    "no prompt": lambda n: dict(
        chosen=[user(f"q{n}"), answer(f"a{n}")], rejected=[user(f"q{n}"), answer(f"b{n}")]
    ),
    "prompt twice": lambda n: dict(
        prompt=f"q{n}", chosen=[user(f"q{n}"), answer(f"a{n}")], rejected=[user(f"q{n}"), answer(f"b{n}")]
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_kinds_of_preferences(tmp_path: Path, kind: str):
    path = write(tmp_path / "rows.jsonl", [PAIRS[kind](n) for n in range(20)])
    found = []
    for split in ("train", "val"):
        dataset = chat(path, task="preference", split=split)
        for index in range(dataset.samples):
            row = [
                (bytes(ids).decode(), bytes(ids[trained]).decode()) for _, ids, trained in dataset.row(index)
            ]
            found += zip(row[::2], row[1::2], strict=True)
    want = [
        tuple((SAME[0].format(n, n).replace(f"a{n}", name + str(n)), f"{name}{n}\0") for name in "ab")
        for n in range(20)
    ]
    assert sorted(found) == sorted(want)


def test_tools_and_arguments_for_the_template(tmp_path: Path):
    tools = [dict(type="function", function=dict(name="look"))]
    rows = [
        dict(messages=[user(f"q{n}"), answer("a")], tools=one, chat_template_kwargs=dict(style="x"))
        for n, one in enumerate([tools, json.dumps(tools)] * 5)
    ]
    template = tmp_path / "t.jinja"
    template.write_text(
        "{{ tools[0].function.name }}{{ style }}{% for m in messages %}|{{ m.content }}{% endfor %}"
        "{{ eos_token if not add_generation_prompt else '|' }}"
    )
    dataset = chat(write(tmp_path / "rows.jsonl", rows), chat_template=str(template))
    assert {text[:5] for text, _ in texts(dataset)} == {"lookx"}
    assert str(template) in dataset.sources[0].taken


def test_parquet(tmp_path: Path):
    """Parquet gives every object the fields of all others: null ones are not there."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [dict(messages=[user(f"q{n}"), answer(f"a{n}") | dict(weight=1)]) for n in range(20)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = texts(chat(tmp_path / "rows.parquet")) + texts(chat(tmp_path / "rows.parquet", split="val"))
    assert sorted(found) == sorted(tuple(part.format(n, n) for part in SAME) for n in range(20))


def test_nulls_of_arrow_in_any_file(tmp_path: Path):
    """Calls of two tools share one struct: each has the other's arguments as null, and so has a JSON file."""

    def row(n: int, **given: object) -> dict:
        function = dict(name="look", arguments=given)
        return dict(messages=[user(f"q{n}"), dict(role="assistant", tool_calls=[dict(function=function)])])

    def union(n: int, **given: object) -> dict:
        made = row(n, **dict(city=None, days=None, deep=None) | given)
        for message in made["messages"]:
            message |= dict.fromkeys(("content", "tool_calls", "name", "weight"), None) | message
        return made

    each = [dict(city="Paris") if n % 2 else dict(days=n, deep=dict(a=[1])) for n in range(20)]
    rows, filled = ([made(n, **one) for n, one in enumerate(each)] for made in (row, union))
    paths = [write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", filled)]
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
        paths.append(tmp_path / "c.parquet")
    found = []
    for path in paths:
        both = [chat(path, split=split) for split in ("train", "val")]
        found.append(sorted(texts(both[0]) + texts(both[1])))
        told = "arguments and tools that are null in 20 rows" in both[0].sources[0].taken
        assert told == (path.name == "b.jsonl"), both[0].sources[0].taken
    assert all(one == found[0] for one in found)
    assert not any("null" in text or "None" in text for text, _ in found[0])
    assert any('"arguments": {"days": 2, "deep": {"a": [1]}}' in trained for _, trained in found[0])


def test_what_the_template_leaves_out_is_told(tmp_path: Path):
    """The start names each row; an empty rest of a row is refused."""
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + ':' + (m.content or '') + eos_token }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}"
    )
    call = dict(id="c1", function=dict(name="look", arguments=dict(a=1)))
    rows = [dict(messages=[user(f"q{n}"), answer(f"a{n}") | dict(reasoning_content="hm")]) for n in range(3)]
    rows += [dict(messages=[user("r"), answer("b") | dict(tool_calls=[call])], tools=[dict(name="look")])]
    path = write(tmp_path / "rows.jsonl", rows)
    dataset = chat(path, chat_template=str(template), val_fraction=1e-9)
    assert dataset.sources[0].taken.endswith(
        f"left out by the chat template ({template}): reasoning_content in 3 rows, tool_calls in 1 row, "
        "tool_calls: id in 1 row, tools in 1 row"
    )
    path = write(
        tmp_path / "more.jsonl", [*rows, dict(messages=[user("s"), answer("") | dict(tool_calls=[call])])]
    )
    with pytest.raises(DataError, match=r"more.jsonl:5: messages\[1\]: .*leaves out tool_calls, and so all"):
        chat(path, chat_template=str(template))
    prompts = write(
        tmp_path / "prompts.jsonl", [dict(prompt=[user(f"q{n}")], tools=rows[3]["tools"]) for n in range(9)]
    )
    cfg = Config(
        data=DataConfig(path=(str(prompts),), chat_template=str(template)),
        train=TrainConfig(seq=64),
        grpo=GrpoConfig(max_tokens=8),
    )
    assert (
        f"left out by the chat template ({template}): tools in 9 rows"
        in open_prompts(cfg, "train").sources[0].taken
    )


def test_pairs_that_become_equal(tmp_path: Path):
    """The template makes them equal, or the cut to a row does."""
    same = dict(prompt="q", chosen=[answer("a ")], rejected=[answer("a")])
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + ':' + m.content | trim + eos_token }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}"
    )
    good = [dict(prompt=f"q{n}", chosen=[answer("a")], rejected=[answer("b")]) for n in range(5)]
    path = write(tmp_path / "pairs.jsonl", [*good, same])
    with pytest.raises(DataError, match=r":6: chosen and rejected are equal as the template shows them"):
        chat(path, task="preference", chat_template=str(template))
    assert chat(path, task="preference", chat_template=str(template), skip_malformed=1).counts.skipped == 1
    long = dict(prompt="q", chosen=[answer("a" * 90 + "b")], rejected=[answer("a" * 90 + "c")])
    path = write(tmp_path / "long.jsonl", [*good, long])
    how = dict(task="preference", overlong="truncate", val_fraction=1e-9)
    with pytest.raises(DataError, match=r"1 pairs are equal once cut to --train.seq=128.*long.jsonl:6"):
        chat(path, **how)
    left = chat(path, skip_malformed=1, **how)
    assert left.counts.sequences == 8 and f"equal once cut left out: {path}:6" in left.sources[0].taken
    assert chat(path, **how | dict(overlong="drop")).counts.dropped == 1
    assert chat(path, seq=512, **how).counts.sequences == 10


def test_splits_share_no_prompt(tmp_path: Path):
    rows = [dict(messages=[user(f"q{n % 10}"), answer(f"a{n}")]) for n in range(100)]
    path = write(tmp_path / "rows.jsonl", rows)
    asked = [
        {text.split("\0")[0] for text, _ in texts(chat(path, split=split))} for split in ("train", "val")
    ]
    assert not asked[0] & asked[1] and len(asked[0] | asked[1]) == 10 and asked[1]


def test_mixtures_keep_their_weights(tmp_path: Path):
    first = write(tmp_path / "a.jsonl", [KINDS["messages"](n) for n in range(60)])
    second = write(tmp_path / "b.jsonl", [KINDS["lists"](n + 1000) for n in range(60)])
    dataset = chat(f"{first}:3", f"{second}:1")
    where = Counter(dataset.place(index)[0] for index in range(80))
    assert where == {0: 60, 1: 20}
    numbers = {number for index in range(80) for number, *_ in dataset.row(index)}
    assert len(numbers) == dataset.counts.sequences and max(numbers) < dataset.sequences == 120


# ---- errors ----

GOOD = dict(messages=[user("q"), answer("a")])
BAD = {
    '{"messages": [': r":2: not JSON",
    '["a"]': r":2: needs an object with fields for messages",
    json.dumps(dict(messages=[])): r":2: messages: needs a list of messages",
    json.dumps(dict(messages=3)): r":2: messages: must be a list; here is int",
    json.dumps(dict(messages=["hi"])): r":2: messages\[0\]: needs .*here is str",
    json.dumps(
        dict(messages=[dict(role="critic", content="x")])
    ): r":2: messages\[0\]: role 'critic'; valid: sys",
    json.dumps(dict(messages=[dict(content="x")])): r":2: messages\[0\]: role None",
    json.dumps(dict(messages=[dict(role="user")])): r":2: messages\[0\]: no content",
    json.dumps(dict(messages=[user([dict(type="image")]), answer("a")])): r":2: .*parts image; only text",
    json.dumps(dict(messages=[user(7)])): r":2: messages\[0\]: content is int",
    json.dumps(dict(messages=[user("q")])): r":2: messages: no turn of the assistant to learn",
    json.dumps(dict(messages=[user("q"), answer("a") | dict(weight=2)])): r":2: .*weight 2: must be 0 or 1",
    json.dumps(
        dict(messages=[user("q"), answer("a") | dict(weight=0)])
    ): r":2: messages: no turn of the assist",
    json.dumps(dict(messages=[user("q\0"), answer("a")])): r":2: messages\[0\]: content holds '\\x00'",
    json.dumps(
        dict(prompt="a", completion="b")
    ): r":2: the source's first row has messages, this one has not",
    json.dumps(GOOD | dict(tools="{")): r":2: tools: text that is no JSON",
    json.dumps(dict(messages=[user("q"), answer("\ud800")])): r":2: not Unicode text",
    json.dumps(dict(messages=[user("q"), dict(role="assistant", tool_calls=[5])])): (
        r":2: messages\[1\]: tool_calls: must be .* here is 5"
    ),
    json.dumps(dict(messages=[user("q"), answer("a") | dict(tool_calls=[dict(function="f")])])): (
        r":2: messages\[1\]: tool_calls: must be .* here is \{'function': 'f'\}"
    ),
    json.dumps(GOOD | dict(chat_template_kwargs=dict(messages=[], add_generation_prompt=True))): (
        r":2: chat_template_kwargs: messages, add_generation_prompt: cannot be set there"
    ),
}


@pytest.mark.parametrize("line", BAD)
def test_a_malformed_row_is_named(tmp_path: Path, line: str):
    path = write(tmp_path / "rows.jsonl", [GOOD, line, dict(messages=[user("r"), answer("b")])])
    with pytest.raises(DataError, match=BAD[line]):
        chat(path)
    dataset = chat(path, skip_malformed=1)
    assert dataset.counts.skipped == 1 and dataset.counts.rows == 2
    assert "1 malformed left out: " in dataset.sources[0].taken


def test_a_table_as_text_is_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\na,b\n")
    with pytest.raises(
        DataError, match=r"rows\.csv: is a table as text, .*\(write it as JSON lines or parquet\)"
    ):
        chat(path)


@pytest.mark.parametrize(
    "task, rows, match",
    [
        ("sft", [PAIRS["lists"](1)], "rows of preference, which --task preference trains on, not --task sft"),
        ("preference", [GOOD], "rows of messages, which --task sft trains on"),
        ("sft", [dict(text="hello")], "its fields are: text; valid: rows with fields for messages"),
        ("sft", ["plain text"], "valid: rows with fields for messages"),
        (
            "preference",
            [dict(chosen=[user("a"), answer("b")], rejected=[user("c"), answer("d")])],
            r":1: .*begin diff",
        ),
        ("preference", [dict(prompt="a", chosen="", rejected="b")], ":1: chosen: is empty"),
        ("preference", [dict(prompt="a", chosen="b", rejected="b")], ":1: chosen and rejected are equal"),
        (
            "preference",
            [dict(prompt="a", chosen="b", rejected=4)],
            ":1: rejected: must be text or a list of mess.* int",
        ),
        ("sft", [dict(prompt="a", completion=None)], r"fields are: prompt, completion \(null\)"),
        ("sft", ['{"messages": ['], r"rows\.jsonl:1: not JSON"),
        ("sft", [], r"rows\.jsonl: is empty; valid: rows with fields for messages"),
        ("sft", [None], r"rows\.jsonl: holds no rows; valid: rows with fields"),
        (
            "sft",
            [GOOD],
            r"none of its rows is in its train split \(those of equal prompts stay together\).*val-path",
        ),
    ],
)
def test_rows_of_another_use(tmp_path: Path, task: str, rows: list, match: str):
    path = tmp_path / ("rows.txt" if rows == ["plain text"] else "rows.jsonl")
    with pytest.raises(DataError, match=match):
        chat(write(path, rows), task=task)


def test_answers_of_several_turns_that_the_template_rewrites(tmp_path: Path):
    tokenizer = tmp_path / "qwen"
    tokenizer.mkdir()
    files = chat_tokenizer("qwen3").files
    (tokenizer / "tokenizer.json").write_bytes(files.raw)
    (tokenizer / "tokenizer_config.json").write_bytes(files.settings)
    (tokenizer / "chat_template.jinja").write_bytes(files.template)
    turns = [answer("a"), user("more"), answer("b")]
    cfg = dict(path=(str(write(tmp_path / "pairs.jsonl", [dict(prompt="q", chosen=turns, rejected="c")])),))
    with pytest.raises(DataError, match=":1: an answer of several turns"):
        open_chat(DataConfig(**cfg, tokenizer=str(tokenizer)), 256, 400, "train", "preference")
    rows = [dict(messages=[user(f"q{n}"), *turns]) for n in range(10)]
    cfg = dict(path=(str(write(tmp_path / "rows.jsonl", rows)),))
    dataset = open_chat(DataConfig(**cfg, tokenizer=str(tokenizer)), 256, 400, "train", "sft")
    assert "of which the template made 20 sequences" in dataset.sources[0].taken
    with pytest.raises(DataError, match=r"--model.vocab=256 is too small"):
        open_chat(DataConfig(**cfg, tokenizer=str(tokenizer)), 256, 256, "train", "sft")


# ---- too long ----


def lengths_of(dataset: ChatDataset) -> list[int]:
    return sorted(len(ids) for index in range(dataset.samples) for _, ids, _ in dataset.row(index))


def test_rows_that_are_too_long(tmp_path: Path):
    """Around an answer of n are 20 bytes and its end: a row of 100 has room for one of 79."""
    rows = [dict(messages=[user(f"{n:03}"), answer("a" * n)]) for n in range(1, 121)]
    rows.append(dict(messages=[user("x" * 200), answer("a")]))
    path = write(tmp_path / "rows.jsonl", rows)

    def both(**how) -> list[ChatDataset]:
        return [chat(path, seq=100, val_fraction=0.3, split=split, **how) for split in ("train", "val")]

    kept = both()
    assert sum(one.counts.sequences for one in kept) == 79
    assert sum(one.counts.dropped for one in kept) == 42
    taken = " ".join(one.sources[0].taken for one in kept)
    assert "rows longer than --train.seq=100 left out" in taken and f"{path}:80" in taken
    cut = both(overlong="truncate")
    assert sum(one.counts.truncated for one in cut) == 41
    assert sum(one.counts.dropped for one in cut) == 1, "a prompt that is too long leaves nothing to train"
    for one in cut:
        assert lengths_of(one)[-one.counts.truncated :] == [100] * one.counts.truncated
        total = sum(int(trained[1:].sum()) for i in range(one.samples) for _, _, trained in one.row(i))
        assert total == one.counts.trained
    with pytest.raises(DataError, match=r"rows are longer than --train.seq=100: .*rows.jsonl:\d+"):
        chat(path, seq=100, overlong="error")
    with pytest.raises(DataError, match="no row of its train split is left to train on"):
        chat(path, seq=10)


def test_preferences_that_are_too_long(tmp_path: Path):
    """Both answers share a row: the longer is cut to what the shorter leaves, or both to half."""
    rows = [
        dict(prompt="p" * n, chosen="a" * 10, rejected="b" * m) for n, m in ((5, 40), (5, 90), (60, 40))
    ] * 5
    rows += [dict(prompt="q", chosen="c", rejected="d" * 20)] * 3
    path = write(tmp_path / "pairs.jsonl", rows)
    cut = chat(path, seq=100, task="preference", overlong="truncate", val_fraction=1e-9)
    for index in range(cut.samples):
        row = cut.row(index)
        assert sum(len(ids) for _, ids, _ in row) <= 100 and len(row) % 2 == 0
        assert all(trained[1:].any() for _, _, trained in row)
    both = Counter(
        (len(row[i][1]), len(row[i + 1][1]))
        for row in map(cut.row, range(cut.samples))
        for i in range(0, len(row), 2)
    )
    assert (16, 84) in both, "5 + 10 + 1, and what that leaves"
    assert all(one in ((16, 46), (16, 84), (3, 22)) for one in both), (
        "prompts of 60 leave no answer in half a row"
    )


# ---- batches ----


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    write_facts(tmp_path / "facts")
    return tmp_path / "facts"


def test_a_batch(facts: Path):
    dataset = chat(facts / "chat.jsonl", seq=200)
    batch = dataset.batch(0, batch=2, accumulate=3)
    assert batch.tokens_ABS.shape == (3, 2, 200)
    for a, micro in enumerate(batch.micros(torch.device("cpu"), True)):
        sequences_BS, numbers_N = micro.given["sequences"], micro.given["numbers"]
        assert sequences_BS.max() + 1 == len(numbers_N) == len(set(numbers_N.tolist()))
        at = 0
        for b in range(2):
            row = dataset.row(dataset.indices(0, batch=2, accumulate=3)[2 * a + b])
            place = 0
            for document, (number, ids, trained) in enumerate(row):
                part = slice(place, place + len(ids))
                assert batch.tokens_ABS[a, b, part].tolist() == ids.tolist()
                want = [int(i) if t else IGNORE for i, t in zip(ids[1:], trained[1:], strict=True)]
                assert batch.targets_ABS[a, b, part].tolist() == [*want, IGNORE]
                assert set(batch.documents_ABS[a, b, part].tolist()) == {document}
                assert set(sequences_BS[b, part].tolist()) == {at} and numbers_N[at] == number
                place += len(ids)
                at += 1
            assert (batch.targets_ABS[a, b, place:] == IGNORE).all() and (sequences_BS[b, place:] == -1).all()
            assert set(batch.documents_ABS[a, b, place:].tolist()) <= {len(row)}
        assert torch.equal(micro.tokens_BS, batch.tokens_ABS[a])
        assert torch.equal(micro.documents_BS, batch.documents_ABS[a])


def test_pairs_stay_in_one_row(facts: Path):
    dataset = chat(facts / "pairs.jsonl", seq=256, task="preference")
    batch = dataset.batch(0, batch=2, accumulate=2)
    for micro in batch.micros(torch.device("cpu"), True):
        sequences_BS, numbers_N = micro.given["sequences"], micro.given["numbers"]
        assert len(numbers_N) % 2 == 0
        for pair in range(len(numbers_N) // 2):
            rows = [
                set((sequences_BS == one).any(1).nonzero().flatten().tolist())
                for one in (2 * pair, 2 * pair + 1)
            ]
            assert rows[0] == rows[1] and len(rows[0]) == 1
            chosen, rejected = numbers_N[2 * pair : 2 * pair + 2].tolist()
            assert chosen % 2 == 0 and rejected == chosen + 1
            line = json.loads((facts / "pairs.jsonl").read_text().splitlines()[chosen // 2])
            for number, name in ((2 * pair, "chosen"), (2 * pair + 1, "rejected")):
                text = bytes(micro.tokens_BS[sequences_BS == number].tolist()).decode()
                assert text.endswith(line[name][0]["content"] + "\0")


def test_every_layout_has_the_same_rows_and_resumes_at_any_step(facts: Path):
    dataset = chat(facts / "chat.jsonl", seq=200)
    whole = [dataset.batch(step, batch=4) for step in range(9)]
    for world, batch, accumulate in ((2, 2, 1), (4, 1, 1), (1, 1, 4), (2, 1, 2)):
        for step in range(9):
            parts = [
                dataset.batch(step, batch=batch, accumulate=accumulate, rank=rank, world=world)
                for rank in range(world)
            ]
            tokens = torch.stack([part.tokens_ABS for part in parts], 1).flatten(0, 2)
            assert torch.equal(tokens, whole[step].tokens_ABS[0])
    with Loader(dataset, start_step=6, batch=4) as loader:
        for step in (6, 7, 8):
            assert all(torch.equal(x, y) for x, y in zip(next(loader), whole[step], strict=True))
    again = chat(facts / "chat.jsonl", seq=200)
    again.go_on(3, 3 * 8 * 200, batch=4)  # three steps of eight rows
    assert torch.equal(again.batch(3, batch=4).tokens_ABS, whole[6].tokens_ABS)


def test_seeds_and_epochs_shuffle_anew(facts: Path):
    dataset = chat(facts / "chat.jsonl", seq=200)
    n = dataset.samples
    epochs = [[number for i in range(e * n, e * n + n) for number, *_ in dataset.row(i)] for e in range(2)]
    other = chat(facts / "chat.jsonl", seq=200, seed=1)
    epochs.append([number for i in range(n) for number, *_ in other.row(i)])
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] and epochs[0] != epochs[2]
    assert dataset.extent("training") == other.extent("training")
    assert dataset.facts()["template"] == dataset.template.digest and "trained" in dataset.describe()


# ---- the cache ----


def opened(rank: int, world: int, path: str, folder: str) -> tuple[list[list[int]] | str, int]:
    tempfile.tempdir = folder
    calls = []
    make = chat_dataset._Rows._make
    chat_dataset._Rows._make = lambda self, made: calls.append(1) or make(self, made)
    try:
        dataset = chat(path)
    except DataError as error:
        return str(error), len(calls)
    finally:
        chat_dataset._Rows._make = make
    return dataset.batch(0, batch=4).tokens_ABS.tolist(), len(calls)


def test_one_rank_tokenises_for_all(gloo, tmp_path: Path, facts: Path):
    folder = str(tmp_path / "cache")
    found = gloo(2, opened, str(facts / "chat.jsonl"), folder)
    assert found[0][0] == found[1][0] and sum(calls for _, calls in found) == 1
    assert chat(facts / "chat.jsonl").batch(0, batch=4).tokens_ABS.tolist() == found[0][0]
    path = write(tmp_path / "bad.jsonl", [GOOD, "{"])
    said = gloo(2, opened, str(path), folder)
    assert said[0][0] == said[1][0] and "bad.jsonl:2: not JSON" in said[0][0]


def test_another_template_is_another_text(tmp_path: Path, facts: Path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}{{ 'a' if add_generation_prompt }}"
    )
    first, second = chat(facts / "chat.jsonl"), chat(facts / "chat.jsonl", chat_template=str(template))
    assert first.tokens > second.tokens and first.facts()["template"] != second.facts()["template"]


def test_the_template_of_the_weights_that_a_run_starts_from(tmp_path: Path, facts: Path):
    """--data.tokenizer auto: tokenizer and template of --init's folder."""
    files = chat_tokenizer("chatml").files
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(model_type="x")))
    (folder / "tokenizer.json").write_bytes(files.raw)
    (folder / "tokenizer_config.json").write_bytes(files.settings)
    (folder / "chat_template.jinja").write_bytes(files.template)
    cfg = DataConfig(path=(str(facts / "chat.jsonl"),))
    dataset = open_chat(cfg, 200, 400, "train", "sft", carried_by(folder))
    assert dataset.tokenizer.decode(dataset.row(0)[0][1]).startswith("<|im_start|>user\n")
    assert "chat_template.jinja" in dataset.sources[0].taken
    with pytest.raises(DataError, match=r"leave --data.tokenizer out"):
        open_chat(replace(cfg, tokenizer="bytes"), 200, 400, "train", "sft", carried_by(folder))


# ---- the tiny set ----


def test_small_facts(facts: Path):
    known = small_facts()
    assert known == small_facts() != small_facts(seed=1)
    assert len(known) == 24 and len(chat_rows(known)) == len(preference_rows(known)) == 72
    assert all(fact.answer != fact.wrong for fact in known)
    questions = [question for fact in known for question in fact.questions]
    assert len(set(questions)) == 72
    asked = [json.loads(line) for line in (facts / "questions.jsonl").read_text().splitlines()]
    assert asked[0] == dict(prompt=known[0].questions[0], answer=known[0].answer)
    with pytest.raises(DataError, match="exists already"):
        write_facts(facts)
    with pytest.raises(DataError, match="--people=99: must be from 1 to 24"):
        small_facts(99)
