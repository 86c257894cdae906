"""No layout changes the mathematics: one process and every mixture of the axes train the same model."""

import functools
import itertools

import layouts
import pytest
from tiers import slow_but

from tmoe.config.axes import Axes

EAGER = dict(compile=True, inductor=False)  # graphs that PyTorch runs
DIVIDED = dict(heavy_head=True, parallel=dict(head="divided"))
LAYOUTS = [  # (processes, axes, model, what else differs)
    (2, dict(tp=2), "gqa", {}),
    (2, dict(tp=2, ep=2), "gqa", dict(micros=2)),
    (4, dict(tp=2, ep=4), "gqa", dict(parallel=dict(checkpoint="block"))),
    (4, dict(tp=2, ep=2), "gqa", dict(parallel=dict(tp_pieces=2))),
    (4, dict(tp=4, ep=2), "gqa", {}),  # more ranks than key heads
    (4, dict(tp=2, ep=2), "gpt_oss", dict(documents=False)),
    (4, dict(tp=2, ep=2), "olmoe", {}),
    (4, dict(tp=4), "olmoe", {}),
    (4, dict(tp=2, ep=2), "latent", {}),
    (2, dict(tp=2, ep=2), "latent_0", {}),
    (2, dict(cp=2), "gqa", {}),
    (2, dict(cp=2, ep=2), "gqa", dict(parallel=dict(cp_exchange="heads"))),
    (4, dict(cp=4, ep=2), "gqa", dict(parallel=dict(cp_exchange="heads"))),
    (4, dict(cp=2), "gpt_oss", {}),
    (2, dict(cp=2), "gpt_oss", dict(documents=False, parallel=dict(cp_exchange="heads"))),
    (4, dict(cp=2, tp=2, ep=4), "latent", {}),
    (4, dict(cp=2, tp=2), "latent_0", dict(parallel=dict(cp_exchange="heads"))),
    (8, dict(cp=2, tp=2, ep=4), "gqa", {}),
    (4, dict(cp=2, tp=2, ep=2), "olmoe", dict(balance="global")),
    # one reader of rows, so that not even losses of a micro-batch may differ
    (
        4,
        dict(cp=2, tp=2, ep=2),
        "gqa",
        dict(balance=("gshard:0.1", "batch:0.05", "global:0.05", "sequence:0.1")),
    ),
    (4, dict(replicate=2, ep=2), "gqa", dict(balance=("sequence:0.1", "global:0.05"))),
    (4, dict(replicate=2, ep=2), "gqa", {}),
    (2, dict(replicate=2), "gqa", {}),
    (8, dict(replicate=2, ep=2), "gqa", {}),
    (4, dict(replicate=2), "gqa", dict(micros=2)),
    (4, dict(etp=2, ep=2), "gqa", {}),
    (4, dict(etp=2, ep=1), "gpt_oss", {}),
    (2, dict(etp=2), "gpt_oss", dict(parallel=dict(gathered_gib=0))),
    (8, dict(replicate=2, etp=2, ep=2, tp=2), "gqa", dict(balance="global")),
    (8, dict(replicate=2, etp=2, cp=2, tp=2), "latent", {}),
    (2, dict(pp=2), "gqa", dict(micros=2)),
    (4, dict(pp=2, ep=2), "gqa", dict(micros=4)),
    (4, dict(pp=2), "gqa", dict(micros=4, parallel=dict(schedule="interleaved"))),
    (4, dict(pp=2, ep=2), "gqa", dict(micros=4, parallel=dict(schedule="v"))),
    (4, dict(pp=2, dp=2), "deep", dict(micros=4, parallel=dict(schedule="v", checkpoint="block"))),
    (4, dict(pp=2, dp=2), "gpt_oss", dict(micros=4, parallel=dict(schedule="v"))),
    (4, dict(pp=4), "deep", dict(micros=8, parallel=dict(schedule="v"))),
    (4, dict(pp=2, ep=2), "gpt_oss", dict(micros=4, parallel=dict(schedule="v", checkpoint="moe"))),
    (
        4,
        dict(pp=2, dp=2),
        "gqa",
        dict(micros=2, parallel=dict(schedule="v", gathered_gib=0)),
    ),  # none deferred
    (2, dict(pp=2), "gqa", dict(micros=4, documents=False, compile=True, parallel=dict(schedule="v"))),
    (4, dict(pp=2), "olmoe", dict(micros=4)),  # a table on both ends
    # both ends on one stage: alone, gathered once a step, and beside replicas
    (2, dict(pp=2), "olmoe", dict(micros=4, parallel=dict(schedule="v"))),
    (4, dict(pp=2, ep=2), "olmoe", dict(micros=4, parallel=dict(schedule="v", shard=1))),
    (4, dict(pp=2, replicate=2), "olmoe", dict(micros=4, parallel=dict(schedule="v"))),
    (4, dict(pp=4), "latent", dict(micros=8)),  # the first stage without MoE layers
    # the head's tokens divided: a copy on each stage, and of a tied table; or all of it on the first stage
    (2, dict(pp=2), "gqa", DIVIDED | dict(micros=4)),
    (2, dict(pp=2), "gqa", dict(micros=4, parallel=dict(head="divided"))),
    (2, dict(pp=2), "olmoe", DIVIDED | dict(micros=4, parallel=dict(head="divided", schedule="v"))),
    (4, dict(pp=2, ep=2), "gqa", DIVIDED | dict(micros=4, parallel=dict(head="divided", schedule="v"))),
    (4, dict(pp=2), "gqa", DIVIDED | dict(micros=4, parallel=dict(head="divided", schedule="interleaved"))),
    (4, dict(pp=4), "olmoe", DIVIDED | dict(micros=8, parallel=dict(head="divided", cut=(1, 1, 1, 1)))),
    (8, dict(pp=2, cp=2, tp=2, ep=4), "gqa", DIVIDED | dict(micros=2)),
    (4, dict(pp=2, dp=2), "gpt_oss", DIVIDED | dict(micros=2, parallel=dict(head="divided", shard=2))),
    (4, dict(pp=2, tp=2, ep=2), "gqa", dict(micros=2, parallel=dict(checkpoint="block"))),
    (8, dict(pp=2, cp=2, tp=2, ep=4), "gqa", dict(micros=2)),
    (8, dict(pp=2, tp=2, ep=4), "gqa", dict(micros=2, parallel=dict(schedule="interleaved"))),
    (4, dict(pp=2, replicate=2), "gqa", dict(micros=2)),
    (8, dict(pp=2, replicate=2, etp=2), "gpt_oss", dict(micros=2)),
    (4, dict(ep=2, dp=2), "gpt_oss", dict(parallel=dict(adaptive_r=0))),
    (4, dict(ep=2, dp=2), "gqa", dict(micros=2, parallel=dict(adaptive_r=0, gathered_gib=0))),
    (4, dict(ep=1, etp=4), "gpt_oss", dict(parallel=dict(adaptive_r=2, gathered_gib=0))),
    (4, dict(pp=2, ep=2, dp=1), "gqa", dict(micros=4, parallel=dict(schedule="v", adaptive_r=0))),
    (2, dict(ep=2, tp=2), "gqa", EAGER | dict(parallel=dict(adaptive_r=0, checkpoint="moe"))),
    (4, dict(etp=2, ep=2), "narrow", {}),
    (4, dict(dp=2, ep=2), "narrow", dict(parallel=dict(gathered_gib=0, checkpoint="moe"))),
    (4, dict(pp=2, ep=2), "narrow", dict(micros=4, parallel=dict(schedule="v"))),
    (2, dict(ep=2), "narrow", EAGER | dict(documents=False)),
    (2, dict(tp=2), "by_position", {}),
    (2, dict(cp=2), "by_position", {}),
    (4, dict(cp=2, tp=2), "by_position", dict(parallel=dict(cp_exchange="heads"))),
    (2, dict(tp=2), "kinds", {}),
    (2, dict(cp=2), "kinds", {}),
    (2, dict(cp=2), "kinds", dict(parallel=dict(cp_exchange="heads"))),
    (2, dict(pp=2), "kinds", dict(micros=4, parallel=dict(schedule="v"))),
    (2, dict(ep=2), "kinds", dict(parallel=dict(checkpoint="attention"))),
    (4, dict(tp=2, cp=2), "mimo", {}),
    (2, dict(cp=2), "mimo", dict(parallel=dict(cp_exchange="heads"))),
    (2, dict(pp=2), "mimo", dict(micros=4, parallel=dict(schedule="v"))),
    (2, dict(tp=2), "linear", {}),
    (4, dict(cp=2, tp=2, ep=2), "linear", dict(parallel=dict(cp_exchange="heads"))),
    (4, dict(cp=4), "linear", dict(parallel=dict(cp_exchange="heads", checkpoint="block"))),
    (4, dict(pp=2, tp=2), "linear", dict(micros=2, documents=False)),
    (2, dict(ep=2), "linear", dict(parallel=dict(checkpoint="attention"))),
    (4, dict(ep=2), "linear", dict(micros=2, parallel=dict(gathered_gib=0, checkpoint="block"))),
    (4, dict(pp=2, ep=2), "linear", dict(micros=4, parallel=dict(schedule="v"))),
    (4, dict(pp=2, replicate=2), "linear", dict(micros=2, parallel=dict(shard=1))),
    (8, dict(replicate=2, etp=2, ep=2), "linear", dict(documents=False)),
    (2, dict(tp=2), "mamba2", {}),
    (4, dict(tp=4), "mamba2", {}),  # ranks share groups, and their norm
    (4, dict(cp=2, tp=2, ep=2), "mamba2", dict(parallel=dict(cp_exchange="heads"))),
    (4, dict(cp=4), "mamba2", dict(parallel=dict(cp_exchange="heads", checkpoint="block"))),
    (4, dict(pp=2, ep=2), "mamba2", dict(micros=4, parallel=dict(schedule="v"))),
    (4, dict(tp=2, ep=2), "branches", dict(parallel=dict(checkpoint="attention"))),
    (4, dict(cp=2, ep=4), "branches", dict(parallel=dict(cp_exchange="heads", checkpoint="block"))),
    (4, dict(pp=2, ep=2), "branches", dict(micros=4, parallel=dict(schedule="v"))),
    (4, dict(pp=2, etp=2), "branches", dict(micros=2, parallel=dict(checkpoint="moe"))),
]


@pytest.fixture(scope="module")
def one_process(gloo):
    """The curve of one process, for each model, balance and kind of batch."""

    @functools.cache
    def curve(model: str, documents: bool, balance: str | tuple[str, ...]) -> layouts.Curve:
        return gloo(
            1, functools.partial(layouts.train, axes={}, model=model, documents=documents, balance=balance)
        )[0]

    return curve


# One layout of each axis and a mixture stay in the fast tier.
FAST = [LAYOUTS[i] for i in (1, 3, 4, 9, 11, 14, 15)]
FAST += [case for case in LAYOUTS if case[0] < 8 and case[1:] == (dict(replicate=2, ep=2), "gqa", {})]
FAST += [case for case in LAYOUTS if case[0] < 8 and case[1] == dict(etp=2, ep=2)]
FAST += [case for case in LAYOUTS if case[1] == dict(pp=2, ep=2) and case[0] == 4][:2]


@pytest.mark.parametrize(("world", "axes", "model", "more"), slow_but(FAST, LAYOUTS), ids=str)
def test_layout(gloo, one_process, world, axes, model, more):
    expected = one_process(model, more.get("documents", True), more.get("balance", "sequence"))
    (found, *_) = gloo(world, functools.partial(layouts.train, axes=axes, model=model, **more), timeout=240)
    layouts.assert_same(found, expected)


def test_the_layouts_contain_every_pair_of_axes():
    """tp, cp, pp, replicate, ep, etp, and dp, the degree outside the expert group."""
    names = ("dp", "ep", "etp", "tp", "cp", "pp", "replicate")
    met = set()
    for world, axes, _, _ in LAYOUTS:
        full = Axes.over(world, **axes)
        met |= set(itertools.combinations([name for name in names if getattr(full, name) > 1], 2))
    wanted = set(itertools.combinations(names, 2))
    assert wanted <= met, f"no layout has {sorted(wanted - met)}"
    assert len(LAYOUTS) >= 20
