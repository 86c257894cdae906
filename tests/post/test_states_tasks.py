"""Narrow states and Muon in finetuning, preferences and GRPO: resumed in every bit, and the reference.

next: tests/end_to_end/test_states_train.py
"""

import json
import random
import shutil
from unittest.mock import patch

import pytest
import runs
import torch
from tiers import slow_but

import train
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.plan.memory import memory_per_rank
from tmoe.run import process as runtime

WIDE = """--model.dim 64 --model.moe.ffn-dim 64 --train.seq 64 --train.dtype bf16 --optim.lr 3e-3 --steps 4
    --checkpoint.every 2""".split()
TASKS = dict(
    sft="--task sft --train.accumulate 2",
    preference="--task preference --train.accumulate 2",
    grpo="--task grpo --grpo.prompts 4 --grpo.group 4 --grpo.max-tokens 6 --grpo.kl 0.1",
)
HALF = "--optim.states bf16 --optim.sums bf16 --optim.masters bf16"
FP16 = "--train.dtype fp16 --train.initial-loss-scale 16777216 --train.loss-scale-window 2"  # it overflows
MUON = "--optim.muon . --optim.states bf16 --optim.qk-clip 1"
ADAPTERS = "--lora.rank 32 --optim.states int8 --optim.sums bf16"
CASES = [  # task, states, types of the weights and of the moments
    ("preference", HALF, {"bfloat16"}, {"bfloat16"}),
    ("grpo", HALF, {"bfloat16"}, {"bfloat16"}),
    ("sft", f"{HALF} --optim.freeze moe.experts --optim.ema 0.9", {"bfloat16"}, {"bfloat16"}),
    ("sft", ADAPTERS, {"float32"}, {"float32", "uint8"}),
    ("grpo", f"{ADAPTERS} --lora.base nf4", {"float32"}, {"float32", "uint8"}),
    ("preference", f"{ADAPTERS} --optim.ema 0.9", {"float32"}, {"float32", "uint8"}),
    ("preference", FP16, {"float32"}, {"float32"}),
    (
        "sft",
        f"{FP16} --optim.freeze moe.experts --optim.states int8",
        {"float32", "float16"},
        {"float32", "uint8"},
    ),
    ("grpo", f"{FP16} --lora.rank 32 --lora.base nf4 --grpo.updates 2", {"float32"}, {"float32"}),
    ("grpo", MUON, {"float32"}, {"bfloat16"}),
    ("sft", f"{MUON} {FP16} --optim.ema 0.9", {"float32"}, {"bfloat16"}),
]


@pytest.fixture(scope="module")
def made(gloo, tmp_path_factory):
    """Rows of each task, and a step of two steps to begin with."""
    folder = tmp_path_factory.mktemp("states")
    draw = random.Random(0)
    rows: dict[str, list[dict[str, str]]] = {name: [] for name in TASKS}
    for _ in range(64):
        a, b = draw.randrange(1000), draw.randrange(10)
        asked, right = f"{a}+{b}?", str(a + b)
        rows["sft"].append(dict(prompt=asked, completion=right))
        rows["preference"].append(dict(prompt=asked, chosen=right, rejected=str(a + b + 1)))
        rows["grpo"].append(dict(prompt=asked, answer=right))
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))
    (folder / "reward.py").write_text("def some(sample):\n    return sum(sample.answer.encode()) % 7 / 7\n")
    gloo(1, runs.run, [*runs.SMALL, *WIDE, "--steps", "2", "--out", str(folder / "base")])
    return folder


def words(made, task: str, states: str) -> list[str]:
    rewards = ["--grpo.rewards", f"{made / 'reward.py'}:some"] if task == "grpo" else []
    data = ["--data.path", str(made / f"{task}.jsonl"), "--init", str(made / "base/checkpoints/step-2")]
    return [*runs.SMALL, *WIDE, *TASKS[task].split(), *rewards, *data, *states.split()]


@pytest.mark.parametrize(("task", "states", "weights", "moments"), slow_but(CASES[:2], CASES))
def test_a_resumed_task_goes_on_in_every_bit(gloo, made, tmp_path, task, states, weights, moments):
    flags = words(made, task, states)
    straight = gloo(1, runs.run, [*flags, "--out", str(tmp_path / "a")])[0]

    def kinds(group):
        return {str(t.dtype).removeprefix("torch.") for n, t in straight.items() if n.startswith(group)}

    assert (kinds("model."), kinds("optim.exp_avg.")) == (weights, moments)
    assert kinds("ema.") <= {"float32"}
    shutil.copytree(tmp_path / "a/checkpoints/step-2", tmp_path / "b/checkpoints/step-2")
    if (tmp_path / "a/reference").exists():
        shutil.copytree(tmp_path / "a/reference", tmp_path / "b/reference")
    again = gloo(1, runs.run, [*flags, "--out", str(tmp_path / "b")])[0]
    runs.assert_equal_state(again, straight)


def references(rank: int, world: int, flags: list[str]):
    """For each step, whether the reference gives the log-probs of the policy; types of the kept weights."""
    cfg = parse(flags, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    task, same = trainer.task, []
    of_frozen = task.of_frozen

    def both(*args):
        reference = of_frozen(*args)
        first, task.frozen.in_place = task.frozen.in_place, lambda: torch.no_grad()
        try:
            policy = of_frozen(*args)
        finally:
            task.frozen.in_place = first
        same.append(all(torch.equal(a, b) for a, b in zip(reference[0], policy[0], strict=True)))
        return reference

    task.of_frozen = both
    with trainer.metrics:
        trainer.train()
    return same, {t.dtype for t in task.frozen.weights.tensors().values()}


def test_the_reference_of_bf16_masters_is_bf16(gloo, made, tmp_path):
    flags = [*words(made, "grpo", HALF), "--steps", "2", "--out", str(tmp_path)]
    assert gloo(1, references, flags) == [([True, False], {torch.bfloat16})]
    half, wide = (memory_per_rank(parse(words(made, "grpo", s), ""), Axes()) for s in (HALF, ""))
    assert 2 * half["reference"] == wide["reference"] > 0


def skipped(rank: int, world: int, flags: list[str]):
    """A run whose first update of the first step is not finite; returns its number of updates."""
    finite, calls = train.all_finite, []

    def first_is_not(*tensors):
        calls.append(len(calls))
        return finite(*tensors) * (calls[-1] > 0)

    with patch.object(train, "all_finite", first_is_not):
        runs.run(rank, world, flags)
    return len(calls)


def test_a_skipped_update_counts_although_the_next_is_finite(gloo, made, tmp_path):
    flags = [*words(made, "grpo", "--grpo.updates 2"), "--steps", "2", "--out", str(tmp_path)]
    assert gloo(1, skipped, flags) == [4]
    assert [line["skipped"] for line in runs.lines(tmp_path)] == [1, 1]
