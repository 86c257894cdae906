"""The additions of a pipeline's step: receives that wait during experts' products, and fp32 gradients."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from machines import free

from benchmarks.cost import constants, points, step_time
from benchmarks.cost.pipeline import Timed, run
from benchmarks.moe_layer import ALL
from tmoe.config.axes import ALONE, Axes
from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.config.presets import presets
from tmoe.config.run import Config, TrainConfig
from tmoe.model.block_time import expert_kernels
from tmoe.ops.experts import gpu
from tmoe.parallel import pipelining
from tmoe.parallel.pipeline_posts import posts
from tmoe.parallel.pipeline_schedule import StageCost, messages, simulate, table
from tmoe.parallel.pipelining import Edges, Shape
from tmoe.parallel.shared_copies import WAVES
from tmoe.plan.memory import plan

# Slow: the model is frozen, so its tests need not run with every change of the trainer.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
M = constants.values(json.loads(constants.CONSTANTS.read_text()))
OLMOE = presets()["olmoe-1b-7b"]
NOTHING = StageCost(0, 0, 0)


def laid(axes: Axes, batch: int = 2, micros: int = 4, **parallel) -> Config:
    degrees = {name: n for name, n in vars(axes).items() if name != "dp"}
    train = replace(OLMOE.train, batch=batch, accumulate=micros)
    return replace(OLMOE, train=train, parallel=replace(OLMOE.parallel, **degrees, **parallel))


@pytest.mark.parametrize(
    ("schedule", "pp", "micros", "chunks"),
    [("1f1b", 2, 4, 1), ("1f1b", 4, 7, 1), ("interleaved", 4, 8, 2), ("v", 4, 8, 2), ("v", 2, 5, 2)],
)
@pytest.mark.parametrize("deferred", [False, True])
def test_where_nothing_is_lost_a_table_takes_what_simulate_says(schedule, pp, micros, chunks, deferred):
    made = table(schedule, pp, micros, chunks, deferred=deferred)
    costs = [StageCost(1 + i / 7, 2 - i / 9, 0.5) for i in range(pp * chunks)]
    timed = run(made, costs, [NOTHING] * len(costs), 0.25)
    assert timed.time == pytest.approx(simulate(made, costs, 0.25).time)
    assert timed.lost == pytest.approx([0.0] * pp)


def test_two_stages_worked_by_hand():
    """Everything takes twice as long while a message waits; F alone 1 s, B 2.

    Stage 1 computes F0 from 1 to 2. F1 arrives at 2, as B0 begins, so its receive is posted before B0. Stage
    0 is idle when its gradients arrive, and posts each before its backward. No kernel runs while a message
    waits: F0 0-1, F1 1-2, F0 of stage 1 1-2, B0 2-4, F1 4-5, B1 5-7, then stage 0's B1 7-9.
    """
    costs = [StageCost(1, 1, 1)] * 2
    timed = run(table("1f1b", 2, 2), costs, costs, 0.0)
    assert timed.time == pytest.approx(9)
    assert timed.lost == pytest.approx((0, 0))
    # one micro-batch, and messages that take 1 s: stage 0 is idle while they wait
    one = run(table("1f1b", 2, 1), costs, costs, 1.0)
    assert one.time == pytest.approx(1 + 1 + 1 + 2 + 1 + 2)
    assert one.lost == pytest.approx((0, 0))


def test_a_send_without_its_receive_slows_its_sender():
    """Stage 1 computes F0 for 4 s and posts F1's receive then; stage 0 sends F1 at 2 and begins F2.

    F1 arrives during F0 of stage 1, which begins at 1. Its receive is posted before F0, and waits from 1 to
    2. F0 has then done half of a second, and takes until 5.5.
    """
    costs = [StageCost(1, 1, 1), StageCost(4, 1, 1)]
    made = table("1f1b", 2, 2)
    timed = run(made, costs, [NOTHING, StageCost(4, 0, 0)], 0.0)
    assert timed.lost == pytest.approx((0, 0.5))
    # the receive of stage 0's gradient is posted when stage 0 is idle
    assert posts(made, costs)[0][2] and not posts(made, costs)[0][1]


def test_losses_are_spread_over_an_action():
    """A third of stage 1's F are products that lose all their time again: 4/3 of it during a receive."""
    costs, lost = [StageCost(3, 3, 0), StageCost(6, 3, 0)], [NOTHING, StageCost(2, 0, 0)]
    timed = run(table("1f1b", 2, 2), costs, lost, 0.0)
    # stage 1's F0 from 3 on; F1's receive waits until 6, in which F0 has done 9/4 of its 6 s
    assert timed.lost == pytest.approx((0, 3 / 4))
    assert timed.time == pytest.approx(3 + 6 + 3 / 4 + 3 + 6 + 3 + 3)


def test_the_trainer_posts_receives_as_the_model_does(monkeypatch):
    """Edges: before each action those of `posts`, in the order of sending, and none twice."""
    made = table("1f1b", 3, 4)
    posted: list[int] = []  # sources
    monkeypatch.setattr(pipelining, "first_by_host", lambda: False)
    monkeypatch.setattr(pipelining, "_wait", lambda work, x: None)
    monkeypatch.setattr(dist, "irecv", lambda buffer, source, group: posted.append(source))
    edges = Edges.__new__(Edges)
    edges.here, edges.ranks, edges.passed = 1, {0: 0, 1: 1, 2: 2}, set()
    edges.order = {edge: sent for edge, sent in messages(made).items() if 1 in edge}
    edges.groups = edges.hosts = dict.fromkeys([(0, 1), (2, 1)])
    edges.blocks, edges.posts = 3, posts(made, [StageCost(1, 1, 1)] * 3)[1]
    edges.begin(Shape((1,), torch.float32, torch.device("cpu")), "FB")
    assert not posted
    for place, action in enumerate(made.ranks[1]):
        posted.clear()
        edges.post(place)
        assert posted == [0 if message.kind == "F" else 2 for message in edges.posts[place]]
        for message in made.needs(action):
            edges.receive(message)
    assert not edges.posted and sum(map(len, edges.posts)) == 8


def test_a_chunk_loses_of_its_products_alone():
    """In FLOPs: 6 T K D F in each of the forward, the gradients of rows and those of weights."""
    m = free(product_rate=1e12, held=[[1, 0.5], [4, 0.1]])
    products = 8 * 6 * 2 * 4096 * 8 * 2048 * 1024 / 1e12  # of 8 layers
    axes = Axes(pp=2)
    chunk = step_time.chunk_seconds(laid(axes), axes, range(8), m, 1.0)
    assert chunk.lost == pytest.approx([0.5 * products] * 3)
    again = step_time.chunk_seconds(laid(axes, checkpoint="moe"), axes, range(8), m, 1.0)
    assert again.lost == pytest.approx([0.5 * products, 2 * 0.5 * products, 0.5 * products])
    attention = step_time.chunk_seconds(laid(axes, checkpoint="attention"), axes, range(8), m, 1.0)
    assert attention.lost == pytest.approx(chunk.lost)
    # sums over a token's rows are launches of many short programs
    rows = step_time.chunk_seconds(laid(axes), axes, range(8), free(memory_rate=1e12, held=m.held), 1.0)
    x, w = 2 * 4096 * 8 * 2048, 64 * 2048 * 1024  # rows in and out; a matrix: up, down, and no sum
    moved = 2 * (x + 2 * w + 3 * x // 2 + x // 2 + w + x)
    assert rows.lost.forward == pytest.approx(0.5 * 8 * moved / 1e12)
    dense = replace(laid(axes), model=replace(OLMOE.model, dense_layers=8, ffn_dim=64))
    assert step_time.chunk_seconds(dense, axes, range(8), m, 1.0).lost == (0, 0, 0)


def test_ranks_that_share_whole_experts_lose_less():
    """Their launches have four waves (gathered_copies.py); where FSDP2 has the experts, one."""
    assert (gpu.waves, WAVES) == (1, 4)
    m = free(product_rate=1e12, held=[[1, 0.5], [4, 0.1]])
    products = 8 * 6 * 2 * 4096 * 8 * 2048 * 1024 / 1e12
    for axes, gib, loses in (
        (Axes(pp=2, dp=2), 16.0, 0.1),
        (Axes(pp=2, dp=2), 0.0, 0.5),
        (Axes(pp=2, replicate=2), 16.0, 0.5),
    ):
        chunk = step_time.chunk_seconds(laid(axes, gathered_gib=gib), axes, range(8), m, 1.0)
        assert chunk.lost.forward == pytest.approx(loses * products)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", None), ("interleaved", 2), ("v", None)])
def test_a_step_is_its_table_with_what_is_lost(schedule, chunks):
    m = free(product_rate=1e12, held=[[1, 0.8], [4, 0.2]])
    axes = Axes(pp=4)
    cfg = laid(axes, micros=8, schedule=schedule, chunks=chunks)
    spans = step_time.chunk_spans(cfg, axes)

    def timed(cfg: Config) -> Timed:
        made = [step_time.chunk_seconds(cfg, axes, span, m, 1.0) for span in spans]
        costs = [chunk.cost(cfg.train.accumulate) for chunk in made]
        return run(plan(cfg, axes), costs, [chunk.lost for chunk in made], 0.0)

    step = step_time.predict(cfg, axes, m)
    assert step.seconds == pytest.approx(timed(cfg).time)
    assert step.parts["beside receives"] in timed(cfg).lost
    alone = step_time.predict(cfg, axes, free(product_rate=1e12)).seconds
    assert 1.02 * alone < step.seconds < 1.8 * alone
    # further micro-batches than are run in thought lose as much each
    longer = replace(cfg, train=replace(cfg.train, accumulate=24))
    assert step_time.predict(longer, axes, m).seconds == pytest.approx(timed(longer).time, rel=1e-3)


def test_without_a_pipeline_no_receive_waits():
    m = free(product_rate=1e12, held=[[1, 0.8], [4, 0.2]])
    for axes in (ALONE, Axes(dp=2), Axes(ep=2)):
        assert step_time.predict(laid(axes), axes, m).parts["beside receives"] == 0


def test_what_products_lose_is_what_was_measured():
    """The first run of the file: whole layers alone, and with programs that hold multiprocessors."""
    text = (ROOT / "benchmarks/results/moe_layer/2026-11-22-h200-drawn-tiles.txt").read_text()
    lines = text.split("Second run")[0].splitlines()
    measured = {(r["shape"], r["held"]): r for r in map(json.loads, (t for t in lines if t.startswith("{")))}
    # layers of 512 tokens run few_rows, which draws its tiles
    many = [(name, n) for name, n in measured if n and not name.endswith("-512")]
    assert len(many) == 18
    for (waves, value), code in zip(M.held, ("old", "waves"), strict=True):
        shares = []
        for name, n in many:
            T, D, F, E, K = ALL[name]
            model = ModelConfig(dim=D, moe=MoEConfig(experts=E, top_k=K, ffn_dim=F))
            cfg = Config(model=model, train=TrainConfig(batch=T // 512, seq=512))
            *products, _ = expert_kernels(cfg, ALONE, M, 1.0)
            lost = (measured[name, n][code] - measured[name, 0][code]) / 1e3
            shares.append(lost / sum(products))
        assert value == pytest.approx(statistics.median(shares), abs=0.005), waves
        # in one wave at most as long again, in four a quarter more: what the launches' programs say
        assert max(shares) < 1 / waves


def test_gradients_that_add_up_are_read_in_fp32():
    """The norm and AdamW read four bytes more of what a rank holds whole, with micro-batches."""
    m = free(memory_rate=1e12, optimizer_bytes=30.0)
    span = [range(16)]
    whole = sum(n for n, _ in step_time.parameter_groups(OLMOE, ALONE))
    for axes, micros, moved in (
        (ALONE, 1, 30 * whole),
        (ALONE, 4, 34 * whole),
        (Axes(dp=2), 4, 30 * whole / 2),
    ):
        got = step_time.optimizer_seconds(laid(axes, micros=micros), axes, span, m)
        assert got == pytest.approx(moved / 1e12)


def test_the_measured_pipeline():
    """Two H200s, olmoe's first 4 layers, 3 on the first stage: what 104-a-planner-held-to-others.md says."""
    (point,) = points.read_points([points.RESULTS / "axes/2xH200-pp.jsonl"])
    assert point.ahead and point.cfg.parallel.cut == (3, 1)
    step = step_time.predict(point.cfg, point.axes, M, point.skew, ahead=True)
    ms = {name: 1e3 * t for name, t in step.parts.items()}
    assert 1e3 * point.seconds == pytest.approx(160.6, abs=0.05)
    page = (ROOT / "docs/decisions/104-a-planner-held-to-others.md").read_text()
    rows = [f"| {name} | {part:.1f} |" for name, part in sorted(ms.items(), key=lambda row: -row[1]) if part]
    assert "\n".join(rows) in page
    assert f"| all | {sum(ms.values()):.1f} |" in page
