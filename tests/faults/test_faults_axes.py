"""Cases 29 to 34 of the fault list: a rank stops or dies inside an exchange of tp, cp, pp or etp.

All others end within seconds and say which rank it was.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist
from faulty import LIMIT, TIMEOUT, before_step, finish, start
from gloo import shared
from orphans import no_orphans  # noqa: F401
from runs import SMALL

from benchmarks.launch import launch
from tmoe.parallel import pipelining, token_exchange

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]


def fails(rank: int, world: int, argv: list[str], failing: int, where: str, how: str) -> None:
    """In step 3 a rank stops or dies where it comes to an exchange of this kind."""
    trainer = start(rank, world, argv)

    def fail() -> None:
        print("failed", time.monotonic(), flush=True)
        if how == "dies":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSTOP)

    def arm(_: object) -> None:
        if rank != failing:
            return
        owner, name = dict(
            gather=(token_exchange, "_all_gather"),
            exchange=(dist, "all_to_all_single"),
            receive=(pipelining.Edges, "receive"),
        )[where]
        setattr(owner, name, lambda *args, **kwargs: fail())

    before_step(trainer, 3, arm)
    finish(trainer)


TP = ["--parallel.tp", "2", "--train.batch", "2"]
CP = ["--parallel.cp", "2", "--parallel.cp-exchange", "heads", "--train.batch", "2"]
PP = ["--parallel.pp", "2", "--train.batch", "1", "--train.accumulate", "2"]
ETP = ["--parallel.etp", "2", "--train.batch", "1"]


@pytest.mark.parametrize(
    ("flags", "failing", "where", "how"),
    [
        (TP, 1, "gather", "stops"),
        (TP, 0, "gather", "dies"),
        (CP, 1, "exchange", "stops"),
        (PP, 1, "receive", "stops"),
        (PP, 0, "receive", "dies"),
        (ETP, 1, "exchange", "dies"),
    ],
)
def test_29_to_34_a_rank_fails_in_an_exchange(tmp_path, flags, failing, where, how):
    timeout = shared(TIMEOUT)
    words = [*SMALL, *flags, "--out", str(tmp_path)]
    ends = launch(
        2, fails, words, failing, where, how, timeout=timeout, waits=1 + (how == "dies"), limit=LIMIT
    )
    failed_at = float(ends[failing].said.split("failed ")[1].split()[0])
    other = ends[1 - failing]
    assert other.code == 1 and other.at - failed_at < timeout + shared(4), other.said
    assert f"rank {failing} is silent for" in other.said, other.said
    assert "ended in step 4" in other.said, other.said
