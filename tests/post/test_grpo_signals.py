"""A signal in a rollout is heard between two tokens, by all ranks; the run goes on bit for bit."""

import json
import os
import signal

import pytest
import runs
import torch.distributed as dist
from tiers import slow_but

import train
from tmoe.cli.parse import parse
from tmoe.generate.slots import Slots
from tmoe.log.metrics_file import read_steps
from tmoe.run import process as runtime

# Of dp's ranks each has prompts whose 8 answers are made one after the other: some 48 passes for each.
FLAGS = """--task grpo --train.dtype fp32 --steps 2 --grpo.prompts 4 --grpo.group 8
    --grpo.max-tokens 6 --data.val-fraction 0.2 --train.eval-batches 1 --grpo.rewards length(6,6)""".split()


def told_between_tokens(rank, world, argv, at):
    """A run whose last rank gets SIGTERM in the second step's rollout, before its pass number `at`.

    Returns the steps that were done, and the passes of that rollout.
    """
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    step, passes = Slots.step, 0

    def counted(self):
        nonlocal passes
        if trainer.step == 1:
            passes += 1
            if passes == at and rank == world - 1:
                os.kill(os.getpid(), signal.SIGTERM)
                trainer.run.stop_requested()
            if passes == at and world > 1:
                dist.barrier()  # the word is out before the other rank looks for it
        return step(self)

    Slots.step = counted
    with trainer.metrics:
        trainer.train()
    return trainer.step, passes


LAYOUTS = [
    (2, ["--parallel.ep", "2", "--grpo.rollout-slots", "8"]),
    (2, ["--parallel.dp", "2", "--grpo.rollout-slots", "1"]),
    (1, ["--grpo.rollout-slots", "8"]),
]


@pytest.mark.parametrize(("world", "layout"), slow_but(LAYOUTS[:1], LAYOUTS), ids=str)
def test_a_signal_is_heard_between_tokens(tmp_path, gloo, world, layout):
    rows = [dict(prompt="+" * (1 + i % 5) + str(i)) for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [*runs.SMALL, *FLAGS, "--data.path", str(tmp_path / "rows.jsonl"), *layout]
    flags += ["--train.batch", "4"]
    want = gloo(world, runs.run, [*flags, "--out", str(tmp_path / "whole")])[0]
    parts = [*flags, "--out", str(tmp_path / "parts")]
    for steps, passes in gloo(world, told_between_tokens, parts, 3):
        assert steps == 1
        # ranks of a group stop together; others when they look into the store next
        assert passes <= (3 + runtime.STORE_EVERY if "--parallel.dp" in layout else 4)
    got = gloo(world, runs.run, parts)[0]
    runs.assert_equal_state(got, want)
    names = ("loss", "grad_norm", "reward/mean", "policy/entropy")
    both = [
        [[line[name] for name in names] for _, line in read_steps(tmp_path / out / "metrics.jsonl")]
        for out in ("whole", "parts")
    ]
    assert both[0] == both[1] and len(both[0]) == 2
