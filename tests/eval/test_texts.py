"""Perplexity of texts and pass@k: by whole forwards of transformers, by hand, and kept over interruptions.

next: tests/eval/test_tree.py
"""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from eval_models import POSITIONS, save_model

from tmoe.eval import command_line, texts
from tmoe.eval.worker import Worker
from tmoe.generate.engine import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("window, stride", [(5, 5), (8, 3), (30, 1), (100, 50)])
@pytest.mark.parametrize("length", [1, 7, 29, 30, 31, 64])
def test_windows_predict_each_token_once(window, stride, length):
    ids = list(range(100, 100 + length))
    predicted = []
    for number, (inputs, targets) in enumerate(texts.windows([1], ids, window, stride)):
        assert len(inputs) <= window and targets
        # the inputs are the tokens before each target, without a gap
        whole = [1, *ids]
        end = whole.index(targets[-1])
        assert inputs == whole[end - len(inputs) : end]
        if number:
            assert len(targets) <= stride and len(inputs) == window
        predicted += targets
    assert predicted == ids


def run(folder: Path, *words: str) -> None:
    command_line.main([str(folder), *words])


def test_figures_are_those_of_whole_forwards(folder, tmp_path, capsys):
    """A file within a window by transformers' whole forward; a longer one by its forward of each window."""
    short, rows = tmp_path / "short.txt", tmp_path / "rows.jsonl"
    short.write_text("The é is it? <|eot_id|> Paris.")
    parts = ["It is Paris. " * 12, "Again, please."]
    rows.write_text("\n".join(json.dumps(dict(text=text)) for text in parts) + "\n\n")
    out = tmp_path / "out.json"
    run(folder, "--text", str(short), str(rows), "--window", "40", "--stride", "15", "--out", str(out))
    found = json.loads(out.read_text())["text"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    plain = command_line.load(folder, device="cpu").tokenizer
    bos = transformers.AutoTokenizer.from_pretrained(folder).bos_token_id

    def nats(inputs: list[int], targets: list[int]) -> float:
        with torch.no_grad():
            logp = model(torch.tensor([inputs])).logits[0].double().log_softmax(-1)
        return -logp[-len(targets) :].gather(1, torch.tensor(targets)[:, None]).sum().item()

    ids = plain.encode(short.read_text()).tolist()
    want = nats([bos, *ids[:-1]], ids)
    first, second = found["files"]
    assert first["nats"] == pytest.approx(want, abs=1e-4)
    assert first["tokens"] == len(ids) and first["bytes"] == len(short.read_bytes())
    assert first["nats_a_token"] == pytest.approx(want / len(ids))
    assert first["bits_a_byte"] == pytest.approx(want / math.log(2) / len(short.read_bytes()))
    assert first["perplexity"] == pytest.approx(math.exp(want / len(ids)))
    total = 0.0
    for text in parts:
        ids = plain.encode(text).tolist()
        total += sum(nats(*pair) for pair in texts.windows([bos], ids, 40, 15))
    assert second["nats"] == pytest.approx(total, abs=2e-4) and second["documents"] == 2
    both = found["all"]
    assert both["nats"] == pytest.approx(want + total, abs=2e-4)
    assert both["bytes"] == len(short.read_bytes()) + sum(map(len, parts))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in shown] == [str(short), str(rows), "all texts"]


REWARDS = """
def vowels(sample):
    assert sample.row["answer"] == "a"
    return float(sum(map(ord, sample.answer)) % 4 == 0)
"""


def test_pass_at_k(folder, tmp_path, monkeypatch):
    """The estimator by its binomials; a call that was interrupted continues with the same answers."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    prompts = [dict(prompt=f"What is {i}?", answer="a") for i in range(5)]
    chats = [dict(prompt=[dict(role="user", content=f"What is {i}?")], answer="a") for i in range(3)]
    for name, some in (("texts", prompts), ("chats", chats)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    shared = ["--rewards", f"{tmp_path / 'my_rewards.py'}:vowels"]
    shared += "--pass-at 1,3 -n 6 --slots 4 --max-tokens 5 --reward-workers 1 --file".split()

    def call(name: str, out: str) -> tuple[dict, list]:
        run(folder, *shared, str(tmp_path / f"{name}.jsonl"), "--out", str(tmp_path / f"{out}.json"))
        lines = (tmp_path / f"{out}.samples.jsonl").read_text().splitlines()
        return json.loads((tmp_path / f"{out}.json").read_text())["pass_at"], list(map(json.loads, lines))

    found, samples = call("texts", "whole")
    right = [[s["reward"] for s in samples if s["prompt"] == i] for i in range(5)]
    assert all(len(some) == 6 for some in right) and 0 < sum(map(sum, right)) < 30
    for k in (1, 3):
        each = [1 - math.comb(6 - int(sum(some)), k) / math.comb(6, k) for some in right]
        assert found[f"pass@{k}"] == pytest.approx(sum(each) / 5)
    assert found["prompts"] == 5 and found["n"] == 6 and len({s["answer"] for s in samples}) > 20

    add, kept = command_line.Store.add, []

    def limited(self, key, value):
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.append(key)
        add(self, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(command_line.Store, "add", limited)
        with pytest.raises(SystemExit) as end:
            call("texts", "cut")
        assert end.value.code == "error: interrupted"
    asked = []
    stream = Engine.stream
    monkeypatch.setattr(
        Engine, "stream", lambda self, p, *rest, **more: asked.extend(p) or stream(self, p, *rest, **more)
    )
    again, same = call("texts", "cut")
    assert (again, same) == (found, samples) and len(asked) == 3
    _, said = call("chats", "chats")
    assert len(said) == 18 and len(asked) == 6
    header = command_line.load(folder, device="cpu").tokenizer.decode(asked[-1])
    assert header.count("<|start_header_id|>user") == 1 and header.endswith("assistant<|end_header_id|>\n\n")


WRONG = [
    ("", "nothing to evaluate: give --tasks, --text, --pass-at"),
    ("--text NONE", "--text=NONE: no such file"),
    ("--text LATIN", "--text=LATIN: not UTF-8 at byte 1"),
    ("--text EMPTY", "--text=EMPTY: holds no text"),
    ("--text ROWS.jsonl", '--text=ROWS.jsonl:2: must be a row; valid: {"text": "..."}'),
    ("--text TEXT --window 97", "--window=97: must be smaller; valid: at most 96, the model's positions"),
    ("--text TEXT --window 9 --stride 10", "--stride=10: must be at most --window=9"),
    ("--text TEXT --limit 3", "--limit=3.0: needs --tasks"),
    ("--text TEXT --max-len 1", "--max-len=1: must be at least 2"),
    ("--text TEXT --out NONE/a.json", "--out=NONE/a.json: its folder is not there"),
    ("--text TEXT --parallel.ep 2", "--parallel.ep=2: must divide the 1 processes"),
    ("--pass-at 1,x --rewards exact --file P.jsonl", "--pass-at=1,x: must be whole numbers above 0"),
    ("--pass-at 4 --file P.jsonl", "--pass-at=4: needs --rewards"),
    ("--pass-at 4 --rewards exact", "--pass-at=4: needs --file"),
    ("--pass-at 4 -n 3 --rewards exact --file P.jsonl", "-n=3: is too few for --pass-at=4; valid: 4 or more"),
    ("--pass-at 1 --rewards best --file P.jsonl", "--rewards=best: valid: exact, number"),
    (
        "--pass-at 1 --rewards code --file P.jsonl",
        "--rewards=code: runs programs that the model has written; allow that with --code",
    ),
    (
        "--pass-at 1 --rewards exact --file P.jsonl",
        "--file: prompt 1: --rewards=exact: the row has no field answer",
    ),
    (
        "--pass-at 2 --rewards exact --file P.jsonl --temperature 0",
        "--temperature=0: all 2 answers to a prompt",
    ),
    ("--tasks x", "--tasks needs the package lm_eval: pip install 'tmoe[eval]'"),
    ("--taks x", "--taks: no such flag; did you mean --tasks?"),
]


@pytest.mark.parametrize("words, said", WRONG)
def test_what_cannot_be_done_is_one_line(words, said, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "tasks" in words:
        monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    Path("LATIN").write_bytes(b"a\xe9 ")
    Path("EMPTY").write_text("")
    Path("TEXT").write_text("What is it?")
    Path("ROWS.jsonl").write_text('{"text": "a"}\n{"tekst": "b"}\n')
    Path("P.jsonl").write_text('{"prompt": "What?"}\n')
    with pytest.raises(SystemExit) as end:
        run(folder, *words.split())
    assert end.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {said}")


def test_logits_that_are_not_finite_end_the_call(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("What is it?")
    score = Worker.score

    def broken(self, given):
        self.engine.model.norm.weight.data.fill_(math.nan)
        return score(self, given)

    monkeypatch.setattr(Worker, "score", broken)
    with pytest.raises(SystemExit) as end:
        run(folder, "--text", str(tmp_path / "text"))
    assert (
        end.value.code == 2 and "log-prob nan: the model's logits are not finite" in capsys.readouterr().err
    )


def test_the_models_positions_bound_a_window(folder):
    assert command_line.load(folder, device="cpu").model.cfg.rope.max_seq == POSITIONS
