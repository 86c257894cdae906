"""lm_eval's model `local-completions` over `tmoe serve`: its sums and texts are those of `tmoe eval`.

next: tests/eval/test_harness.py
"""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import served
from eval_models import OFFLINE, TASKS, offline, save_model, save_tasks  # noqa: F401
from safetensors.torch import load_file, save_file

with patch.dict(os.environ, OFFLINE):
    from lm_eval import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

from tmoe.eval import command_line

MAX_LEN = 96
SCORED = [task for task in TASKS if task != "tiny_until"]
SUM = 1e-4  # as in test_harness.py


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    return save_tasks(tmp_path_factory.mktemp("tasks"), count=6)


def ours(folder: Path, tasks: Path, out: Path, *words: str) -> dict[str, list]:
    """The samples of `tmoe eval`, by task."""
    command_line.main([str(folder), "--tasks-path", str(tasks), "--out", str(out), *words])
    lines = [json.loads(line) for line in out.with_suffix(".samples.jsonl").read_text().splitlines()]
    return {task: [line for line in lines if line["task"] == task] for task in TASKS}


def make_special(folder: Path) -> Path:
    """Raises the logits of two special tokens, so that answers have them inside."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    decoder = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ends = json.loads((folder / "config.json").read_text())["eos_token_id"]
    for token in [token["id"] for token in decoder if token["special"] and token["id"] != ends][:2]:
        tensors["lm_head.weight"][token] *= 3
    save_file(tensors, path, dict(format="pt"))
    return folder


@pytest.mark.parametrize("kind, bos, concurrent", [("qwen3_moe", False, 4), ("llama", True, 1)])
def test_scores_through_the_server_are_those_of_eval(kind, bos, concurrent, tasks, tmp_path, monkeypatch):
    """Contexts longer than the model, none, examples, letters, whole texts, and answers with special tokens.

    The server needs room for one more token than a text has, and lm_eval leaves it another one. So
    `max_length=N` is N - 2 tokens of an input where texts are scored, and N - 1 where answers are made.
    """
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    folder = make_special(save_model(tmp_path / kind, kind))
    with served.server(folder, tmp_path / "log", slots=8, max_len=MAX_LEN) as found:
        model = LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{found.port}/v1/completions",
            model=kind,
            tokenizer=str(folder),
            max_length=MAX_LEN,
            add_bos_token=bos,
            num_concurrent=concurrent,
            batch_size=3,
        )
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        how = dict(task_manager=manager, bootstrap_iters=0)
        theirs = simple_evaluate(model, tasks=list(TASKS), **how)["samples"]
        prompt = theirs["tiny_until"][0]["arguments"][0][0]
        asked = dict(prompt=prompt, max_tokens=24, temperature=0)
        with_and_without = [
            served.post(found.port, served.TEXT, asked | more).json["choices"][0]["text"]
            for more in (dict(skip_special_tokens=False), {})
        ]
        assert "<|" in with_and_without[0] and "<|" not in with_and_without[1]
        served.settled(found.port)
    want = ours(folder, tasks, tmp_path / "a.json", "--tasks", *SCORED, "--max-len", str(MAX_LEN - 2))
    want |= ours(
        folder, tasks, tmp_path / "b.json", "--tasks", "tiny_until", "--max-len", str(MAX_LEN - 1)
    ) | {task: want[task] for task in SCORED}
    for task in TASKS:
        got = sorted(theirs[task], key=lambda sample: sample["doc_id"])
        for a, b in zip(got, sorted(want[task], key=lambda sample: sample["doc_id"]), strict=True):
            if task == "tiny_until":
                assert a["filtered_resps"] == b["filtered_resps"]
                continue
            for (x,), (y,) in zip(a["resps"], b["resps"], strict=True):
                if task == "tiny_rolling":
                    assert x == pytest.approx(y, abs=2 * SUM, rel=1e-7)
                else:
                    assert float(x[0]) == pytest.approx(float(y[0]), abs=SUM) and x[1] == y[1]
