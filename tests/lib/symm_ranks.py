"""Ranks of one expert group in one process, for the exchange's kernels under the interpreter."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

D, K = 8, 2


def operands(shared=True):
    x, w, ids = torch.zeros(4, D), torch.zeros(4, K), torch.zeros(4, K, dtype=torch.int32)
    matrices = (torch.zeros(2 * 6, D), torch.zeros(D, 6)) if shared else (None, None)
    return x, w, ids, torch.zeros(2, 8, D), torch.zeros(2, D, 4), None, *matrices


ROOT = Path(__file__).parents[2]


def run(*command, limit=340, **env):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **env}
    ran = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=limit)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    assert "all right" in ran.stdout.splitlines()


def routes(kind, tokens, E, K, draw):
    """ids [T, K]: distinct experts of a token, or -1."""
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


class Ranks:
    """The sections of all ranks of a group, full of NaN and of -7 before anything arrives."""

    def __init__(self, world, capacity, D, K, dtype):
        from tmoe.ops import exchange

        R = world * capacity
        kinds = dict(x=(R, D, dtype), dy=(R, D, dtype), y=(R, D, dtype), sums=(R, D, dtype), ids=(R, K, torch.int32),
                     weights=(R, K, torch.float32), d_weights=(R, K, torch.float32), state=(1, exchange.STATE, torch.int32),
                     side=(1, exchange.STATE, torch.int32))  # fmt: skip
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

    def exchange(self, p):
        """What rank p of a real group would have."""
        from tmoe.moe import symm

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


def fork(world, work, *arguments):
    """work(rank, *arguments) as processes, forked so that addresses hold in all of them."""
    import torch.multiprocessing as mp

    processes = [
        mp.get_context("fork").Process(target=work, args=(rank, *arguments)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + 120
    while (
        any(p.is_alive() for p in processes)
        and not any(p.exitcode for p in processes)
        and time.monotonic() < end
    ):
        time.sleep(0.05)
    failed = [p.exitcode for p in processes]  # None: it still waits for others
    for process in processes:
        process.kill()
    assert not any(failed) and None not in failed, (
        f"exit codes {failed}: ranks wait for each other for ever, or one failed"
    )


SHARED = 96  # width of a shared expert; that of K experts' products is another


def rule(beside, hidden):
    """In place of symm.hides, which would let none of these small layers overlap."""
    return lambda ranks, itemsize, width: beside if width == SHARED else hidden
