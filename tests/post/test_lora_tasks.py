"""Adapters in --task preference and grpo: the reference is their base, and no second model is kept.

next: tests/end_to_end/test_lora_train.py
"""

import json
import math
import random
from contextlib import nullcontext

import pytest
import runs
import torch

import train
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.log.metrics_file import read_steps
from tmoe.model.lora import off
from tmoe.plan.memory import memory_per_rank
from tmoe.post import grpo
from tmoe.post.reference_model import ReferenceStore
from tmoe.run import process as runtime

LORA = "--lora.rank 4 --train.dtype fp32 --optim.lr 3e-3 --train.seq 64 --resume none".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    draw = random.Random(0)
    pairs, prompts = [], []
    for _ in range(64):
        a, b = draw.randrange(1000), draw.randrange(10)
        asked, right = f"{a}+{b}?", str(a + b)
        pairs.append(dict(prompt=asked, chosen=right, rejected=str(a + b + draw.randrange(1, 99))))
        prompts.append(dict(prompt=asked, answer=right))
    for name, rows in dict(pairs=pairs, prompts=prompts).items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text("def some(sample):\n    return sum(sample.answer.encode()) % 7 / 7\n")
    return folder


def references(out):
    """The log-probs that a run has kept of its reference."""
    facts = json.loads((out / "reference/identity.json").read_text())
    return ReferenceStore(out / "reference", facts).read()


def test_pairs_begin_at_ln_2_and_their_reference_is_the_base(data, tmp_path, gloo):
    words = [*runs.SMALL, "--task", "preference", "--data.path", str(data / "pairs.jsonl")]
    words += "--train.seq 64 --train.dtype fp32".split()
    for name, more in (
        ("whole", ["--steps", "1"]),
        ("lora", LORA),
        ("kto", [*LORA, "--preference.loss", "kto"]),
    ):
        gloo(
            1,
            runs.run,
            [*words, "--train.seq", "64", "--train.dtype", "fp32", *more, "--out", str(tmp_path / name)],
        )
    assert torch.equal(references(tmp_path / "lora"), references(tmp_path / "whole"))
    steps = [line for _, line in read_steps(tmp_path / "lora/metrics.jsonl")]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-7) and steps[0]["rewards/margin"] == 0.0
    assert steps[-1]["loss"] < steps[0]["loss"] - 1e-3


class Kept(Exception):
    """A run has come to its second step."""


def answers(rank, world, words):
    """For each step, whether reference and policy give equal log-probs; and the model that the task keeps."""
    cfg = parse(words, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    task, same = trainer.task, []
    of_frozen = task.of_frozen

    def both(*args):
        reference = of_frozen(*args)
        grpo.off = lambda model: nullcontext()
        try:
            policy = of_frozen(*args)
        finally:
            grpo.off = off
        pairs = zip(reference[0], policy[0], strict=True)
        same.append(all(torch.equal(a, b) for a, b in pairs))
        return reference

    task.of_frozen = both
    with trainer.metrics:
        trainer.train()
    return same, task.frozen


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_answers_are_compared_with_the_base(data, tmp_path, gloo, world):
    """Before the first update the reference has the policy's bits; no second model is kept."""
    words = [*runs.SMALL, "--task", "grpo", "--data.path", str(data / "prompts.jsonl")]
    words += "--grpo.prompts 4 --grpo.group 4 --grpo.max-tokens 6 --grpo.kl 0.1 --steps 3".split()
    words += ["--out", str(tmp_path), "--parallel.ep", str(world)]
    words += ["--grpo.rewards", f"{data / 'reward.py'}:some", *LORA]
    assert gloo(world, answers, words) == [([True, False, False], None)] * world


def test_the_dry_run_counts_no_reference(data):
    words = [
        "tiny",
        "--dry-run",
        "--task",
        "grpo",
        "--data.path",
        "x",
        "--grpo.rewards",
        "exact",
        "--grpo.kl",
        "1",
    ]
    found = [memory_per_rank(parse([*words, *more], ""), Axes()) for more in ([], ["--lora.rank", "4"])]
    assert found[0]["reference"] > 0 and found[1]["reference"] == 0
