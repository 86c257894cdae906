"""Sums of digits are learned from rewards on two processes, from a model that is right once in eight times.

The commands of docs/grpo.md, on 16 sums instead of 36 and with a quarter of the answers.
"""

import runpy
from pathlib import Path

import forked
import pytest

from tmoe.log.metrics_file import read_steps
from tmoe.post.rollouts import read_rollouts

ROOT = Path(__file__).parents[2]
FLAGS = "--train.seq 64 --train.eval-every 0 --train.eval-batches 2 --no-compile --log.no-progress".split()
GRPO = """--grpo.rewards exact --grpo.prompts 8 --grpo.group 16 --grpo.max-tokens 3 --grpo.rollout-slots 256
    --grpo.temperature 1.2 --optim.schedule constant --optim.warmup 0""".split()

STEPS = "100"


def train(out: Path, *words: str) -> None:
    command = ["train.py", "tiny", *FLAGS, "--out", str(out), "--parallel.ep", "2", *words]
    done = forked.torchrun(2, command, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_sums_are_learned_from_rewards(tmp_path):
    example = runpy.run_path(str(ROOT / "examples/digit_sums.py"))["main"]
    example.__globals__["DIGITS"] = range(4)
    example(tmp_path)
    mistakes, sums = (str(tmp_path / f"{name}.jsonl") for name in ("mistakes", "sums"))
    words = "--task sft --steps 80 --train.batch 2 --optim.lr 3e-3 --log.no-report".split()
    train(tmp_path / "sft", *words, "--data.path", mistakes)
    step = str(tmp_path / "sft/checkpoints/step-80")
    words = ["--task", "grpo", "--steps", STEPS, "--train.batch", "8", "--optim.lr", "1e-3", *GRPO]
    train(tmp_path / "rl", *words, "--data.path", sums, "--init", step)
    rewards = [line["reward/mean"] for _, line in read_steps(tmp_path / "rl/metrics.jsonl")]
    assert 0.05 < rewards[0] < 0.25
    assert sum(rewards[-20:]) / 20 >= 0.8  # a step asks 8 of 16 sums
    assert (tmp_path / "rl/report.png").stat().st_size > 0
    last = [one for one in read_rollouts(tmp_path / "rl") if one.step == int(STEPS)]
    assert last and all(
        (one.reward == 1.0) == (eval(one.prompt[:-1]) == int(one.answer or -1)) for one in last
    )
