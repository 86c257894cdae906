"""A tiny set of conversations is learned by heart on two processes, and pairs of answers move its preference.

The commands of docs/finetune.md, on half as many facts.
"""

import json
import math
from pathlib import Path

import forked
import pytest

from tmoe.data.chat.encoding import chat_prompt
from tmoe.data.synthetic_chat import write_facts
from tmoe.generate.load import load
from tmoe.generate.sampler import Sampling
from tmoe.log.metrics_file import read_steps

SFT_STEPS, DPO_STEPS, PEOPLE = 80, 20, 4


def train(out: Path, *words: str) -> None:
    flags = ["--out", str(out), "--resume", "none", "--parallel.ep", "2", "--train.seq", "256"]
    flags += ["--train.batch", "2"]
    command = ["train.py", "tiny", *flags, "--log.no-progress", "--log.no-report", *words]
    done = forked.torchrun(2, command, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr


def exact_match(step: Path, questions: Path) -> float:
    """The share of questions whose greedy answer is the one that was taught, letter for letter."""
    asked = [json.loads(line) for line in questions.read_text().splitlines()]
    engine = load(step).engine()
    prompts = [
        chat_prompt([dict(role="user", content=row["prompt"])], engine.tokenizer).tolist() for row in asked
    ]
    samples = engine.generate(prompts, 1, Sampling(temperature=0, max_tokens=48))
    right = [sample.text == row["answer"] for (sample,), row in zip(samples, asked, strict=True)]
    return sum(right) / len(right)


@pytest.mark.slow
def test_facts_are_learned_and_pairs_move_the_preference(tmp_path):
    facts, sft, dpo = tmp_path / "facts", tmp_path / "sft", tmp_path / "dpo"
    write_facts(facts, people=PEOPLE)
    train(sft, "--task", "sft", "--data.path", str(facts / "chat.jsonl"), "--steps", str(SFT_STEPS))
    step = sft / "checkpoints" / f"step-{SFT_STEPS}"
    assert exact_match(step, facts / "questions.jsonl") >= 0.9

    words = ["--data.path", str(facts / "pairs.jsonl"), "--init", str(step), "--optim.lr", "1e-4"]
    train(dpo, "--task", "preference", "--no-compile", "--steps", str(DPO_STEPS), *words)
    lines = [line for _, line in read_steps(dpo / "metrics.jsonl")]
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[-1]["rewards/margin"] > lines[1]["rewards/margin"] + 0.1
    assert lines[-1]["rewards/accuracy"] > 0.9
