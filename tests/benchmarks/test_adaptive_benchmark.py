"""What benchmarks/adaptive.py does without a GPU: it times every r on two processes, and fits constants.

next: test_exchange_rivals.py
"""

from dataclasses import replace

import pytest

from benchmarks import adaptive
from tmoe.moe.exchange.adaptive import MACHINES, LayerCost, Machine

COST = LayerCost(MACHINES["nvlink"], 64, 8, 2048, 1024, ep=2, element=2, waits=True, backward=True)


def timed(rank: int, world: int) -> list[dict]:
    moe = adaptive.layer("tiny", dict(ep=world, etp=1), "auto", "cpu")
    return [adaptive.measure(moe, tokens, True, 1) for tokens in (16, 64)]


def test_every_r_is_timed(gloo):
    first, second = gloo(2, timed)
    for mine, theirs in zip(first, second, strict=True):
        assert mine == theirs, "ranks disagree"
        assert list(mine["ms"]) == [0, 1] and min(mine["ms"].values()) > 0
        assert mine["auto_of_best"] == mine["ms"][mine["auto"]] / min(mine["ms"].values())
        assert adaptive.show(mine).split()[:2] == [str(mine["tokens"]), "tokens"]


def test_crossover():
    def lines(*ms: tuple[float, float]) -> list[dict]:
        return [dict(tokens=10 * i, ms={0: a, 1: b}) for i, (a, b) in enumerate(ms, 1)]

    assert adaptive.crossover(lines((2, 1), (2, 3), (2, 4))) == 20
    assert adaptive.crossover(lines((1, 2), (3, 2), (2, 4))) == 30
    assert adaptive.crossover(lines((2, 3), (5, 4))) is None


def test_fit_finds_the_constants():
    """Of times that the formula made; a term that no time has stays 0."""
    machine = Machine(1 / 180e9, 30e-6, 80e-6, 1 / 2e12, 1 / 400e12)
    cost = replace(COST, machine=machine)
    lines = [dict(tokens=2**i, ms={r: 1e3 * cost.seconds(r, 2**i) for r in (0, 1, 2)}) for i in range(4, 18)]
    assert list(adaptive.fitted(COST, lines)) == pytest.approx(list(machine), rel=1e-6)
    silent = replace(cost, waits=False)
    lines = [dict(tokens=2**i, ms={r: 1e3 * silent.seconds(r, 2**i) for r in (0, 1)}) for i in range(4, 18)]
    found = adaptive.fitted(replace(COST, waits=False), lines)
    assert found.wait == 0 and found.byte == pytest.approx(machine.byte, rel=1e-6)
