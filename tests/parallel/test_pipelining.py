"""Messages between pipeline stages, a first pass from host to host, and replays of recorded choices."""

import functools

import layouts
import pytest
import torch
import torch.distributed as dist
from tiers import slow_but

from tmoe.config.run import ParallelConfig
from tmoe.moe.balance import Totals
from tmoe.moe.trace import keeping, layers_of, replaying
from tmoe.parallel import build_mesh, clip_grad_norm_, pipeline, pipelining
from tmoe.parallel.pipeline_schedule import messages, table


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks"),
    [("1f1b", 2, 1), ("1f1b", 5, 1), ("interleaved", 4, 2), ("interleaved", 3, 2), ("v", 4, 2), ("v", 5, 2)],
)
def test_rounds_have_every_pair_once_and_each_stage_once_a_round(schedule, pp, chunks):
    made = table(schedule, pp, 2 * pp, chunks)
    found = pipelining.rounds(made)
    pairs = [pair for one in found for pair in one]
    assert sorted(pairs) == sorted({(min(edge), max(edge)) for edge in messages(made)})
    for one in found:
        stages = [stage for pair in one for stage in pair]
        assert len(stages) == len(set(stages))


def first_pass_by_host(rank: int, world: int, **how) -> layouts.Curve:
    """Trains as layouts.train does; the first pass takes the way that it takes on GPUs."""
    pipelining.first_by_host = lambda: True
    return layouts.train(rank, world, **how)


def test_a_first_pass_from_host_to_host_is_the_same(gloo):
    how = dict(axes=dict(pp=2), micros=4, parallel=dict(schedule="interleaved"))
    plain = gloo(2, functools.partial(layouts.train, **how))[0]
    found = gloo(2, functools.partial(first_pass_by_host, **how))[0]
    layouts.assert_same(found, plain, limit=1e-9)


def ids_of(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Three of eight experts for each token of these sequences: another rule in each block."""
    start = rows[:, None] * (2 * block + 1) + torch.arange(layouts.SEQ) * (block + 1)
    return (start[..., None] + torch.tensor([0, 2, 3])) % 8


def replayed_step(rank, world, axes: dict, micros: int, parallel: dict, wrong: str = ""):
    """A step with given ids: loss, norm, gradients, and the ids that the layers say they took."""
    cfg = layouts.config(ParallelConfig(**axes, **parallel), "gqa", micros)
    mesh = build_mesh(**axes)
    pp = mesh.axes.pp > 1
    net = pipeline(cfg, mesh) if pp else layouts.transformer(cfg, mesh, True)
    net.to_empty(device="cpu")
    net.init_weights(0)
    tokens, targets, marks = next(layouts.batches(True))
    totals = Totals(*(torch.tensor(float(n)) for n in ((targets != -100).sum(), targets.numel(), 8)))
    readers, per = mesh.axes.readers, 8 // mesh.axes.readers // micros
    rows = [torch.arange(per) + (m * readers + mesh.place.reader) * per for m in range(micros)]
    parts = [(tokens[r], targets[r], marks[r]) for r in rows]
    blocks = [int(i) for part in (net if pp else [net]) for i, b in part.blocks.named_children() if b.moe]
    calls = [[ids_of(r, block) for block in blocks] for r in rows]
    if wrong:
        calls = calls[1:] if wrong == "micros" else [[ids[:, 1:] for ids in call] for call in calls]
    if pp:
        with keeping(net) as kept, replaying(net, calls):
            loss = net.forward_backward(parts, totals)
        norm = net.clip_grad_norm_(1e9)
        assert net.replayed is None and all(moe.given_TK is None for moe in layers_of(net))
    else:
        net.balancer.start_step()
        loss, kept = torch.zeros(()), []
        for part, call in zip(parts, calls, strict=True):
            with keeping(net) as one, replaying(net, call):
                net(part[0], part[1], documents_BS=part[2], totals=totals).backward()
            loss, kept = loss + net.task_loss, kept + one
        norm = clip_grad_norm_(net.parameters(), 1e9)
    for call, took in zip(calls if blocks else [], kept, strict=True):
        assert torch.equal(torch.stack([ids.flatten(0, 1) for ids in call]), took.long())
    dist.all_reduce(loss)
    return loss.item(), norm.item(), {name: layouts._whole(p.grad) for name, p in net.named_parameters()}


REPLAYS = [
    (2, dict(pp=2), 4, dict(schedule="v", checkpoint="block")),
    (2, dict(pp=2), 2, dict(checkpoint="moe")),
    (4, dict(pp=4), 4, {}),  # the first stage without MoE layers
    (4, dict(pp=2, ep=2), 4, dict(schedule="interleaved")),
]


@pytest.mark.parametrize(("world", "axes", "micros", "parallel"), slow_but(REPLAYS[:1], REPLAYS))
def test_a_replay_goes_through_a_pipeline_by_micro_batch(gloo, world, axes, micros, parallel):
    """In recomputation too: a layer that chose anew, or took another micro-batch's, has other gradients."""
    loss, norm, whole = gloo(1, replayed_step, {}, 1, {})[0]
    stages = gloo(world, replayed_step, axes, micros, parallel)
    for found in stages:
        assert found[0] == pytest.approx(loss, rel=1e-6) and found[1] == pytest.approx(norm, rel=1e-5)
        for name, grad in found[2].items():
            torch.testing.assert_close(grad, whole[name], atol=1e-6, rtol=1e-4)
    assert set().union(*(found[2] for found in stages)) == set(whole)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("micros", "ids: got ids of 1 micro-batches, valid"),
        ("tokens", "ids: got ids of 124 tokens, valid"),
    ],
)
def test_a_replay_of_other_micro_batches_is_refused_before_anything_travels(gloo, wrong, said):
    with pytest.raises(Exception, match=said):
        gloo(2, replayed_step, dict(pp=2), 2, {}, wrong)


def uneven_step(rank: int, world: int, axes: dict, parallel: dict, lengths: list[int]) -> str:
    """What a stage says of micro-batches of these lengths."""
    mesh = build_mesh(**axes)
    net = pipeline(layouts.config(ParallelConfig(**axes, **parallel), "gqa", len(lengths)), mesh)
    net.to_empty(device="cpu")
    net.init_weights(0)
    parts = [(torch.zeros(1, S, dtype=torch.int64),) * 2 for S in lengths]
    with pytest.raises(ValueError) as error:
        net.forward_backward(parts, Totals(*(torch.ones(()) for _ in range(3))))
    return str(error.value)


@pytest.mark.parametrize(
    ("axes", "parallel", "lengths", "said"),
    [
        (
            dict(pp=2, dp=2, tp=2),
            {},
            [15, 15],
            "--train.seq=15 with --parallel.tp=2: must be a multiple of tp",
        ),
        (
            dict(pp=2, dp=2, cp=2),
            dict(cp_exchange="heads"),
            [15, 15],
            "--parallel.cp=2 --parallel.cp-exchange=heads",
        ),
        (dict(pp=2), {}, [16, 12], "micros: got tokens of shapes [(1, 12), (1, 16)]"),
    ],
)
def test_what_cannot_be_divided_is_refused_on_every_stage(gloo, axes, parallel, lengths, said):
    """Once a stage alone knew, and the others waited for it."""
    found = gloo(2 * axes.get("dp", 1), uneven_step, axes, parallel, lengths)
    assert all(said in words for words in found), found
