"""Perplexity of texts and pass@k: by whole forwards of transformers, by hand, and kept over interruptions.

next: tests/eval/test_tree.py
"""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from eval_models import POSITIONS, save_model

from tmoe.config.check import ConfigError
from tmoe.eval import command_line, evaluation, texts
from tmoe.eval.store import Store
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
    plain = evaluation.load(folder, device="cpu").tokenizer
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

    add, kept = evaluation.Store.add, []

    def limited(self, key, value):
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.append(key)
        add(self, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation.Store, "add", limited)
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
    header = evaluation.load(folder, device="cpu").tokenizer.decode(asked[-1])
    assert header.count("<|start_header_id|>user") == 1 and header.endswith("assistant<|end_header_id|>\n\n")


WRONG = [
    ("", "nothing to evaluate: give --tasks, --text, --pass-at"),
    ("--text NONE", "--text=NONE: no such file"),
    ("--text LATIN", "--text=LATIN: not UTF-8 at byte 1"),
    ("--text EMPTY", "--text=EMPTY: holds no text"),
    ("--text FOLDER", "--text=FOLDER: is no file"),
    ("--text LONE.jsonl", r"--text=LONE.jsonl:1: holds '\ud800', which is no Unicode text"),
    ("--text ROWS.jsonl", '--text=ROWS.jsonl:2: must be a row; valid: {"text": "..."}'),
    ("--text TEXT --window 97", "--window=97: must be smaller; valid: at most 96, the model's positions"),
    ("--text TEXT --window 9 --stride 10", "--stride=10: must be at most --window=9"),
    ("--text TEXT --limit 3", "--limit=3.0: needs --tasks"),
    ("--text TEXT --max-len 1", "--max-len=1: must be at least 2"),
    ("--text TEXT --chat", "--chat: needs --pass-at"),
    ("--text TEXT --system Hi.", "--system=Hi.: needs --tasks or --pass-at"),
    ("--text TEXT --seed 3", "--seed=3: needs --tasks or --pass-at"),
    ("--tasks x --chat-template F", "--chat-template=F: needs --apply-chat-template or --pass-at"),
    ("--tasks x --no-fewshot-as-multiturn", "--no-fewshot-as-multiturn: needs --apply-chat-template"),
    ("--tasks x,", "--tasks=x,: holds an empty name; valid: names of tasks"),
    ("--tasks x --limit 0", "--limit=0.0: must be a whole number of documents, or a share between 0 and 1"),
    ("--tasks x --limit inf", "--limit=inf: must be a whole number of documents, or a share between 0 and 1"),
    ("--tasks x --limit 2.5", "--limit=2.5: must be a whole number of documents, or a share between 0 and 1"),
    (
        "--text TEXT --out a.jsonl",
        "--out=a.jsonl: is no .json file and no folder; valid: NAME.json, or a fol",
    ),
    ("--text TEXT --out TEXT", "--out=TEXT: is no .json file and no folder; valid: NAME.json, or a folder"),
    ("--text TEXT --out P.json", "--out=P.json: it is there, and holds no results of an evaluation"),
    ("--text TEXT --out NONE/a.json", "--out=NONE/a.json: its folder is not there"),
    ("--text TEXT --parallel.ep 2", "--parallel.ep=2: must divide the 1 processes"),
    ("--text TEXT --out TEXT/a", "--out=TEXT/a: is no .json file and no folder"),
    ("--text TEXT --out TAKEN", "--out=TAKEN: is no .json file and no folder; valid: NAME.json, or a folder"),
    ("--text TEXT --out /dev/null", "--out=/dev/null: is no .json file and no folder"),
    (
        "--pass-at 1,x --rewards exact --file P.jsonl",
        "--pass-at=1,x: must be whole numbers from 1 to 100,000",
    ),
    ("--pass-at 3000000000 --rewards exact --file P.jsonl", "--pass-at=3000000000: must be whole numbers"),
    ("--pass-at 1 -n 100001 --rewards exact --file P.jsonl", "-n=100001: must be at most 100,000"),
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
    ("--pass-at 1 --rewards exact --file P.jsonl --right nan", "--right=nan: must be a number"),
    (
        "--pass-at 1 --rewards exact --file P.jsonl --reward-workers 0",
        "--reward-workers=0: must be at least 1",
    ),
    (
        "--pass-at 1 --rewards exact --file P.jsonl --reward-timeout 0",
        "--reward-timeout=0.0: must be above 0",
    ),
    ("--pass-at 1 --rewards exact --file P.jsonl --max-len 9", "--max-len=9: needs --tasks or --text"),
    (
        "--pass-at 1 --rewards exact --file P.jsonl --system Hi.",
        "--system=Hi.: --file=P.jsonl has no conversations; valid: with --chat, or rows with messages",
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
    if words == "--tasks x":
        monkeypatch.setattr(evaluation.importlib.util, "find_spec", lambda name: None)
    Path("LATIN").write_bytes(b"a\xe9 ")
    Path("EMPTY").write_text("")
    Path("FOLDER").mkdir()
    Path("TAKEN/results.json").mkdir(parents=True)
    Path("LONE.jsonl").write_text('{"text": "a\\ud800"}')
    Path("P.json").write_text("[]")
    Path("TEXT").write_text("What is it?")
    Path("ROWS.jsonl").write_text('{"text": "a"}\n{"tekst": "b"}\n')
    Path("P.jsonl").write_text('{"prompt": "What?"}\n')
    with pytest.raises(SystemExit) as end:
        run(folder, *words.split())
    assert end.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {said}")


def poisoned(folder: Path, new: Path, text: str) -> Path:
    """A copy of a model whose logits are not finite after this text of one token."""
    shutil.copytree(folder, new)
    (number,) = evaluation.load(folder, device="cpu").tokenizer.encode(text).tolist()
    weights = safetensors.torch.load_file(new / "model.safetensors")
    weights["model.embed_tokens.weight"][number] = math.nan
    safetensors.torch.save_file(weights, new / "model.safetensors", metadata=dict(format="pt"))
    return new


def test_logits_that_are_not_finite_end_the_call(folder, tmp_path, monkeypatch, capsys):
    """Sums of texts in other rows are kept, of rows before and after the bad one."""
    monkeypatch.setattr("tmoe.generate.gathered_model.ON_CPU", 4)
    parts = "!" * 40, "z" * 40, "~" * 40
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(dict(text=text)) for text in parts))
    new, out = poisoned(folder, tmp_path / "new", "z"), tmp_path / "out.json"
    with pytest.raises(SystemExit) as end:
        run(new, "--text", str(tmp_path / "rows.jsonl"), "--out", str(out))
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2
    assert said == "error: a text of 40 tokens: log-prob nan: the model's logits are not finite"
    kept = [line for line in map(json.loads, (tmp_path / "out.answers.jsonl").open()) if "key" in line]
    assert len(kept) == 2 and all(math.isfinite(line["value"][0]) for line in kept)


def test_a_rank_whose_logits_are_not_finite_ends_all(tmp_path):
    """Rank 0 needs the experts of rank 1, which has the bad prompt and would be waited for."""
    new = poisoned(save_model(tmp_path / "gpt_oss", "gpt_oss"), tmp_path / "new", "z")
    rows = [dict(prompt="What is it? " * 3, answer="x"), dict(prompt="zz", answer="x")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = "--pass-at 1 --rewards exact --max-tokens 4 --parallel.ep 2 --file".split()
    done = forked.torchrun(2, ["-m", "tmoe.eval", str(new), *words, str(tmp_path / "rows.jsonl")])
    assert done.returncode == 2
    told = "rank 1: prompt 2, answer 0, token 0: log-prob nan: the model's logits are not finite"
    assert [line for line in done.stderr.splitlines() if "rror" in line] == [f"error: {told}"]


def test_texts_without_tokens(tmp_path):
    """A tokenizer may drop a text, as one that reads words drops a blank line."""

    def evaluated(*documents: str) -> dict:
        loaded = SimpleNamespace(
            tokenizer=SimpleNamespace(encode=lambda text: np.frombuffer(text.strip().encode(), "u1"))
        )
        evaluator = SimpleNamespace(
            tokens=SimpleNamespace(begin=[], prefix=0),
            loaded=loaded,
            score=lambda pairs: [(-float(len(targets)), True) for _, targets in pairs],
        )
        return texts.evaluate(evaluator, [texts.TextFile(tmp_path, "", list(documents))], 8, 4)

    assert evaluated("\n", "ab")["all"] | dict(tokens=2, nats=2.0) == evaluated("\n", "ab")["all"]
    with pytest.raises(ConfigError, match="holds no text that the tokenizer keeps"):
        evaluated("\n", " ")


def test_kept_results_need_the_line_of_their_model(tmp_path):
    """That line may be torn, and a file's name may hold a pattern's characters."""
    path, facts = tmp_path / "a[1].json", dict(model="m", dtype="float32")
    one = Store(path, facts)
    one.add("a", 1)
    one.close()
    assert Store(path, facts).known == {"a": 1}
    with pytest.raises(ConfigError, match=r"a\[1\].answers.jsonl there holds results of another quantize"):
        Store(path, facts | dict(quantize="int8"))
    kept = tmp_path / "a[1].answers.jsonl"
    kept.write_bytes(kept.read_bytes()[9:] + b'{"key": "b", "val')
    again = Store(path, dict(model="n"))
    assert again.known == {}
    again.add("c", 3)
    again.close()
    assert Store(path, dict(model="n")).known == {"c": 3}
    kept.write_text("[1]\n")
    with pytest.raises(ConfigError, match="there holds no results of an evaluation"):
        Store(path, facts)


def test_the_models_positions_bound_a_window(folder):
    assert evaluation.load(folder, device="cpu").model.cfg.rope.max_seq == POSITIONS
