"""A rank dies or stops in a rollout: the other ends within seconds and says which it was."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from faulty import LIMIT, TIMEOUT, finish, start
from gloo import shared
from orphans import no_orphans  # noqa: F401
from runs import SMALL

from benchmarks.launch import launch
from tmoe.generate.slots import Slots

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]


def fails(rank: int, world: int, argv: list[str], how: str) -> None:
    """In step 2 rank 1 ends, or stands still, where it is to make a token."""
    trainer = start(rank, world, argv)
    step = Slots.step

    def fail(slots: Slots):
        if rank != 1 or trainer.step != 2:
            return step(slots)
        print("failed", time.monotonic(), flush=True)
        if how == "dies":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSTOP)

    Slots.step = fail
    finish(trainer)


@pytest.mark.parametrize(("how", "axis"), [("dies", "ep"), ("dies", "dp"), ("stops", "dp")])
def test_a_rank_fails_in_a_rollout(tmp_path, how, axis):
    rows = (json.dumps(dict(prompt=f"{a}+1=", answer=str(a + 1))) for a in range(30))
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    timeout = shared(TIMEOUT)
    words = [*SMALL, f"--parallel.{axis}", "2", "--task", "grpo", "--grpo.rewards", "exact"]
    words += ["--grpo.prompts", "4", "--grpo.group", "2", "--grpo.max-tokens", "6"]
    words += ["--data.path", str(tmp_path / "sums.jsonl"), "--out", str(tmp_path / "run")]
    ends = launch(2, fails, words, how, timeout=timeout, waits=1 + (how == "dies"), limit=LIMIT)
    failed_at = float(ends[1].said.split("failed ")[1].split()[0])
    assert ends[0].code == 1 and ends[0].at - failed_at < timeout + shared(4), ends[0].said
    assert "rank 1 is silent for" in ends[0].said, ends[0].said
    assert "ended in step 3" in ends[0].said, ends[0].said
