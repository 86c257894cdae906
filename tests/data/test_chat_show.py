"""The commands of chat data: --show, with colour and without, and --facts."""

from __future__ import annotations

import json
from pathlib import Path

import forked
from chat_tokenizers import chat_tokenizer


def test_facts_are_made_and_shown(tmp_path: Path):
    facts = tmp_path / "facts"
    done = forked.run(["-m", "tmoe.data", "--facts", facts, "--people", "2"])
    assert done.returncode == 0, done.stderr
    assert f"{facts / 'chat.jsonl'}: 18 rows" in done.stdout
    row = json.loads((facts / "chat.jsonl").read_text().splitlines()[0])
    asked, told = (message["content"] for message in row["messages"])
    done = forked.run(["-m", "tmoe.data", "--show", facts / "chat.jsonl", "--rows", "1"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith("JSON lines of messages; plain built-in template: the model has none")
    assert lines[-4:] == ["user", asked + r"\u0000", "assistant", f"⟦{told}" + r"\u0000⟧"]
    assert f"chat.jsonl:1: {18 + len(asked + told)} tokens" in done.stdout
    done = forked.run(["-m", "tmoe.data", "--facts", facts])
    assert done.returncode == 2 and "exists already" in done.stderr
    done = forked.run(["-m", "tmoe.data", "--facts", facts / "chat.jsonl/more"])
    assert done.returncode == 2 and "chat.jsonl must be a folder that can be written" in done.stderr


def test_colours_tokenizer_and_errors(tmp_path: Path):
    files = chat_tokenizer("qwen3").files
    (tmp_path / "tokenizer.json").write_bytes(files.raw)
    (tmp_path / "tokenizer_config.json").write_bytes(files.settings)
    (tmp_path / "chat_template.jinja").write_bytes(files.template)
    turns = [dict(role="user", content="a"), dict(role="assistant", content="b")]
    rows = [dict(messages=turns * 2), dict(messages=[dict(role="critic", content="c")]), dict(messages=turns)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["-m", "tmoe.data", "--show", path, "--tokenizer", tmp_path, "--rows", "2"]
    done = forked.run(command, env=dict(FORCE_COLOR="1", TERM="xterm-256color"))
    assert done.returncode == 0, done.stderr
    assert "chat_template.jinja" in done.stdout and "sequence 2 of 2" in done.stdout
    assert done.stdout.count("\x1b[1;32mb<|im_end|>\x1b[0m") == 2, "one turn in each sequence"
    assert "⟦" not in done.stdout and "role 'critic'" in done.stdout and ":3" not in done.stdout
    call = dict(
        role="assistant", content="b", name="Ann", tool_calls=[dict(function=dict(name="f", arguments="{}"))]
    )
    path.write_text(json.dumps(dict(messages=[turns[0], call])) + "\n")
    done = forked.run(command)
    assert f"{path}:1: left out by the template: name\n" in done.stdout and '{"name": "f"' in done.stdout
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps(dict(prompt="p", completion="c", label=False, id=3)) + "\n")
    done = forked.run(["-m", "tmoe.data", "--show", pairs])
    assert "pairs.jsonl:1 undesirable: 3 tokens, 2 trained" in done.stdout and "p⟦c" in done.stdout
    assert "pairs.jsonl:1: fields that are not read: id\n" in done.stdout
    assert "pairs.jsonl:1: texts without a chat template\n" in done.stdout
    pairs.write_text(json.dumps(dict(prompt="p", chosen="c", rejected="r")) + "\n")
    done = forked.run(["-m", "tmoe.data", "--show", pairs])
    assert "pairs.jsonl:1 chosen: 3 tokens, 2 trained" in done.stdout and "p⟦r" in done.stdout
    (tmp_path / "a.txt").write_text("hello")
    done = forked.run(["-m", "tmoe.data", "--show", tmp_path / "a.txt"])
    assert done.returncode == 2 and "valid: rows with fields for messages" in done.stderr
