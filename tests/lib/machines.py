"""Machines for the cost model on which all costs are zero except those that a test names.

next: tests/benchmarks/cost/test_step_time.py
"""

import json
from types import SimpleNamespace
from typing import Any

from benchmarks.cost import constants

INFINITE = 1e60
CONSTANTS = json.loads(constants.CONSTANTS.read_text())


def backend(curve: list[list[float]], **costs: float) -> dict:
    return {"curve": curve, "moves": 4, "experts": 1.0, "copies": 0.0, "fixed": 0.0, **costs}


def free(**costs: Any) -> SimpleNamespace:
    """A machine on which all costs are zero except the named ones."""
    curve = [[0, 0.0], [1, 0.0], [2, 0.0]]
    nothing = dict(
        product_rate=INFINITE,
        memory_rate=INFINITE,
        attention_rate=[[1, INFINITE]],
        isolated_attention_rate=[[1, INFINITE]],
        window_more=0,
        nic_rate=INFINITE,
        collective=curve,
        exchange={"auto": "nccl", "nccl": backend(curve)},
        **dict.fromkeys(
            "kernel_overlap layer_fixed glue_passes logit_bytes optimizer_bytes copy_factor".split(), 0.0
        ),
        **dict.fromkeys("fsdp_overlap slowed nic_hop link_hop message others_held".split(), 0.0),
        **dict.fromkeys("tp_factor cp_factor etp_factor".split(), 1.0),
        held=[[1, 0.0], [4, 0.0]],
        skew=1.0,
    )
    return SimpleNamespace(**{**vars(constants.values(CONSTANTS)), **nothing, **costs})


def line(rate: float) -> list[list[float]]:
    return [[0, 0.0], [1e6, 1e6 / rate], [2e6, 2e6 / rate]]
