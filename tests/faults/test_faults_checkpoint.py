"""Cases 1 to 15 and 18 of the fault list on tmoe's checkpoints: none of the injected faults goes wrong.

`python -m benchmarks.faults` injects them. Each case in benchmarks/faults.py states what it does and
what it complains about. Stock DCP fails most of them with the same complaints, and must: a case that
nothing fails tests nothing.
"""

from __future__ import annotations

import time

import pytest
from gloo import shared
from orphans import no_orphans  # noqa: F401
from tiers import slow_but

from benchmarks.faults import CASES, NOT_OFFERED, disk_full
from benchmarks.inject import Stock, Tmoe

pytestmark = [
    pytest.mark.usefixtures("no_orphans"),
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is (disabled|unavailable)", "ignore:Detected pickle protocol"
    ),
]
# on torch 2.13: a fresh step, an error that is asked for, another world
STOCK_PASSES = {
    "1",
    "3a",
    "4",
    "7",
    "18",
}


@pytest.mark.parametrize("case", slow_but(["1"], CASES), ids=lambda c: f"{c}-{CASES[c][1].__name__}")
def test_tmoe_has_nothing_to_complain_about(tmp_path, case):
    begin = time.monotonic()
    assert CASES[case][1](Tmoe, tmp_path) == []
    assert time.monotonic() - begin < shared(20)


@pytest.mark.slow
def test_5_disk_full_in_the_background(tmp_path):
    assert disk_full(Tmoe, tmp_path, background=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES.keys() - STOCK_PASSES - {c for _, c in NOT_OFFERED} - {"3b"}))
def test_the_injection_bites(tmp_path, case):
    assert CASES[case][1](Stock, tmp_path), "stock DCP withstood it: is the fault still injected?"
