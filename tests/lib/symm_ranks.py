"""Ranks of one expert group on one machine, for the exchange's kernels under the interpreter.

Their sections of memory are tensors, in one process (Ranks) or shared by forked processes (fork).
tmoe is imported inside functions, because kernels are defined at import, and TRITON_INTERPRET must be set
before.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import forked
import torch
import torch.multiprocessing as mp
from torch import Tensor

if TYPE_CHECKING:
    from tmoe.moe.exchange.symm import Exchange

ROOT = Path(__file__).parents[2]
D, K = 8, 2  # sizes of `operands`
STILL_S = 120  # seconds without progress that are allowed; ranks normally synchronise every few seconds
SHARED = 96  # width of the shared expert; it differs from the width of the routed experts' products


# ---- what ranks work on ----


def operands(shared: bool = True) -> tuple[Tensor | None, ...]:
    """Zeros for one call of the op.

    x, weights, ids, up, down, no bias, with `shared` the two matrices of a shared expert, and no codes.
    """
    x, w, ids = torch.zeros(4, D), torch.zeros(4, K), torch.zeros(4, K, dtype=torch.int32)
    matrices = (torch.zeros(2 * 6, D), torch.zeros(D, 6)) if shared else (None, None)
    return x, w, ids, torch.zeros(2, 8, D), torch.zeros(2, D, 4), None, *matrices, None, None


def routes(kind: str, tokens: int, E: int, K: int, draw: torch.Generator) -> Tensor:
    """ids [tokens, K] int32: distinct experts of each token, or -1.

    kind: "one expert" (all tokens to expert 5), "first rank" (to experts 0 and 1), "nowhere" (all -1),
    "holes" (random, half of them -1); any other word: random.
    """
    ids = torch.rand(tokens, E, generator=draw).topk(K).indices if tokens else torch.empty(0, K)
    if kind == "one expert":
        ids = torch.where(torch.arange(K) == 1, 5, -1).expand(tokens, K)
    elif kind == "first rank":
        ids = torch.where(torch.arange(K) < 2, ids % 2, -1)
    elif kind == "nowhere":
        ids = torch.full((tokens, K), -1)
    elif kind == "holes":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.5, -1)
    return ids.int().contiguous()


def rule(beside: bool, hidden: bool) -> Callable[[int, int, int], bool]:
    """A replacement for symm.hides, which would allow no overlap for layers as small as these.

    It returns the first argument for the width of the shared expert, the second for any other width.
    """
    return lambda ranks, itemsize, width: beside if width == SHARED else hidden


# ---- the ranks ----


class Ranks:
    """The sections of all ranks of a group, filled with NaN and with -7 until data arrives.

    of[name][rank]: the rank's section as [rows, width].
    at[name] [world] int64: the addresses at which the sections begin.
    """

    def __init__(self, world: int, capacity: int, D: int, K: int, dtype: torch.dtype) -> None:
        from tmoe.ops import exchange

        R = world * capacity
        kinds = dict(
            x=(R, D, dtype),
            dy=(R, D, dtype),
            y=(R, D, dtype),
            sums=(R, D, dtype),
            ids=(R, K, torch.int32),
            weights=(R, K, torch.float32),
            d_weights=(R, K, torch.float32),
            state=(1, exchange.STATE, torch.int32),
            side=(1, exchange.STATE, torch.int32),
        )
        sizes = {name: -(-rows * width * t.itemsize // 256) * 256 for name, (rows, width, t) in kinds.items()}
        self.starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        self.memory = [
            torch.zeros(sum(sizes.values()), dtype=torch.uint8).share_memory_() for _ in range(world)
        ]
        self.of = {}
        for name, (rows, width, t) in kinds.items():
            cut = slice(self.starts[name], self.starts[name] + rows * width * t.itemsize)
            self.of[name] = [memory[cut].view(t).view(rows, width) for memory in self.memory]
            for section in self.of[name]:
                section.fill_(dict(ids=-7, state=0, side=0).get(name, float("nan")))
        self.at = {name: torch.tensor([t.data_ptr() for t in ts]) for name, ts in self.of.items()}
        self.world, self.capacity = world, capacity

    def exchange(self, p: int) -> Exchange:
        """The Exchange that rank p of a real group would have."""
        from tmoe.moe.exchange import symm

        ex = object.__new__(symm.Exchange)
        ex.rank = p
        ex.world = self.world
        ex.capacity = self.capacity
        ex.sections = {name: ts[p].view(-1).view(torch.uint8) for name, ts in self.of.items()}
        ex.peers = self.memory
        ex.starts = self.starts
        ex.tables = {}
        ex.addresses = self.at | dict(main=self.at["state"])
        return ex


# ---- processes ----


def fork(world: int, work: Callable, *arguments: object) -> None:
    """Runs work(rank, *arguments) in `world` processes, forked so that addresses are valid in all of them.

    Raises AssertionError if a process fails, or if there is no progress for STILL_S: no rank has ended, and
    no counter on which the ranks of a Ranks, or of its `of`, synchronise has changed.
    """
    sections = [a.of if isinstance(a, Ranks) else a for a in arguments if isinstance(a, (Ranks, dict))]
    counts = [t for section in sections for name in ("state", "side") for t in section.get(name, ())]
    processes = [
        mp.get_context("fork").Process(target=work, args=(rank, *arguments)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    seen = None
    while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes):
        if (now := [[p.exitcode for p in processes], *(t.tolist() for t in counts)]) != seen:
            seen = now
            moved = time.monotonic()
        if time.monotonic() > moved + STILL_S:
            break
        time.sleep(0.05)
    failed = [p.exitcode for p in processes]  # None: the process still waits for other ranks
    for process in processes:
        process.kill()
    assert not any(failed) and None not in failed, (
        f"exit codes {failed}: ranks wait for each other for ever, or one failed"
    )


def run(*command: object, limit: float = 600, **env: str) -> None:
    """Runs python with this command line; it must end with 0 and print a line "all right".

    limit: seconds.
    env: variables of its environment in addition to this process's own.
    """
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **env}
    if "TRITON_INTERPRET" in env:
        ran = forked.run([str(word) for word in command], env=env, timeout=limit)
    else:
        how = dict(env=env, capture_output=True, text=True, timeout=limit)
        ran = subprocess.run([sys.executable, *map(str, command)], **how)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    assert "all right" in ran.stdout.splitlines()
