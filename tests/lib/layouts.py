"""One tiny model trained on the same global batches in any layout, for tests that compare the axes.

next: tests/end_to_end/test_axes_layouts.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tmoe.config.linear_settings import LinearConfig
from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, MTPConfig, RopeConfig
from tmoe.config.run import Config, OptimConfig, ParallelConfig, TrainConfig
from tmoe.model import parallelize as laying
from tmoe.model import stage_times
from tmoe.model.freeze import settle
from tmoe.model.multi_token import count_further, read_measured
from tmoe.model.muon import parts_of
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Totals
from tmoe.optim.adamw import build_optimizer
from tmoe.parallel import Mesh, build_mesh, clip_grad_norm_, parallelize, pipeline
from tmoe.parallel.pipeline_schedule import StageCost

SEQUENCES, SEQ, STEPS, VOCAB = 8, 32, 3, 64  # steps 2 and 3 read the moments of step 1
ROUTED = MoEConfig(
    experts=8,
    top_k=3,
    ffn_dim=16,
    shared_dim=16,
    shared_gate=True,
    balance="sequence",
    balance_coeff=0.1,
    z_coeff=0.01,
)
GQA = ModelConfig(
    vocab=VOCAB,
    dim=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    qk_norm="head",
    dense_layers=1,
    ffn_dim=48,
    rope=RopeConfig(max_seq=SEQ),
    moe=ROUTED,
)
OLMOE = replace(GQA, qk_norm="full", tied=True)
GPT_OSS = replace(
    GQA,
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    window=5,
    windowed=(1, 0),
    qk_norm="none",
    moe=replace(
        ROUTED,
        softmax="after",
        router_bias=True,
        bias=True,
        activation="clamped",
        shared_dim=0,
        shared_gate=False,
    ),
)
LATENT = replace(
    GQA,
    attention="mla",
    qk_norm="none",
    mla=MLAConfig(q_rank=24, kv_rank=16, nope_dim=8, rope_dim=8, v_dim=8),
)
# most tokens are beyond original_max_seq, so the position factor changes them
BY_POSITION = replace(LATENT, rope=replace(LATENT.rope, query_beta=0.5, original_max_seq=3))
LATENT_0 = replace(LATENT, mla=replace(LATENT.mla, q_rank=0))
DEEP = replace(GQA, layers=8)  # two chunks for each of four stages
NARROW = replace(GQA, moe=replace(ROUTED, latent_dim=12, weigh="before"))
# position settings of other families, and each kind of block in one model
KINDS = replace(
    GQA,
    rope=replace(GQA.rope, dim=4, interleave=True, window_theta=300.0),
    window=5,
    windowed=(1, 1, 0),
    rotary=(1, 1, 1, 0),
    norms="sandwich",
    attention_gate=True,
)
# MiMo-V2-Flash's blocks: narrow values with a factor; windowed blocks have twice the key heads, and sinks
MIMO = replace(
    GQA,
    qk_norm="none",
    kv_heads=1,
    window=5,
    windowed=(1, 1, 0),
    window_kv_heads=2,
    window_sinks=True,
    v_head_dim=6,
    value_multiplier=0.7,
)
WIDE = replace(GQA, dim=64, moe=replace(ROUTED, ffn_dim=64))  # moments in 8 bits need rows of 64
# three linear blocks, then one of attention; a convolution and a chunk that no document fills
LINEAR = replace(
    GQA,
    attention_gate=True,
    norm_offset=True,
    rope=replace(GQA.rope, dim=4),
    linear=LinearConfig("deltanet", key_heads=4, value_heads=8, key_dim=8, value_dim=6),
)
# Mamba-2, whose two groups are fewer than the ranks of some layouts
MAMBA2 = replace(
    GQA,
    rotary=(0,),
    residual_multiplier=0.5,
    linear=LinearConfig("mamba2", key_heads=2, value_heads=8, key_dim=6, value_dim=4),
)
# Nemotron-H's blocks of one branch; feed-forwards of relu squared, experts on a latent
BRANCHES = replace(
    MAMBA2,
    dense_layers=0,
    layers=6,
    residual_multiplier=1.0,
    layer_types=("linear", "moe", "full", "moe", "linear", "dense"),
    moe=replace(
        ROUTED,
        activation="relu2",
        shared_activation="relu2",
        latent_dim=12,
        shared_gate=False,
        score="sigmoid",
    ),
)
FURTHER = replace(GQA, mtp=MTPConfig(depth=2, coeff=0.5))
MODELS = dict(
    further=FURTHER,
    latent_1=replace(LATENT, mtp=MTPConfig(depth=1, detach=True)),
    tied_1=replace(OLMOE, mtp=MTPConfig(depth=1), moe=replace(ROUTED, choice_bias=True, bias_speed=0.01)),
    wide=WIDE,
    linear=LINEAR,
    mamba2=MAMBA2,
    branches=replace(BRANCHES, mtp=MTPConfig(depth=1)),
    kinds=KINDS,
    mimo=MIMO,
    narrow=NARROW,
    gqa=GQA,
    deep=DEEP,
    olmoe=OLMOE,
    gpt_oss=GPT_OSS,
    latent=LATENT,
    latent_0=LATENT_0,
    by_position=BY_POSITION,
    capacity=replace(GQA, moe=replace(ROUTED, capacity_factor=1.0)),
    padded=replace(GQA, moe=replace(ROUTED, capacity_factor=2.0, pad=True)),
)


class Curve(NamedTuple):
    """The results of a training, the same numbers on every rank."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


def config(parallel: ParallelConfig, model: str, micros: int, **changes: Any) -> Config:
    """Settings of one training. changes: fields of Config; `balance` is a field of the routers.

    `optim`, `train` and `dtype`: fields of OptimConfig and TrainConfig, and the compute type.
    """
    cfg = MODELS[model]
    optim, dtype = changes.pop("optim", {}), changes.pop("dtype", "fp32")
    more = changes.pop("train", {})
    if balance := changes.pop("balance", None):
        cfg = replace(cfg, moe=replace(cfg.moe, balance=balance))
    return Config(
        model=cfg,
        train=TrainConfig(seq=SEQ, dtype=dtype, accumulate=micros, **more),
        parallel=parallel,
        optim=OptimConfig(**(dict(lr=3e-3, eps=1e-4) | optim)),
        **({"compile": False} | changes),
    )


def batches(documents: bool, seed: int = 0):
    """Yields tokens, targets and documents of each step, [SEQUENCES, SEQ]; one target in four is ignored.

    Each token is 3 times the previous one plus 0 or 1: on random tokens a step would amplify rounding. The
    ignored targets are spread unevenly over sequences, so that a mean over a rank's own targets would be
    wrong.
    """
    draw = torch.Generator().manual_seed(1 + seed)
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (SEQUENCES, SEQ), generator=draw)
        more = torch.randint(2, tokens.shape, generator=draw)
        for t in range(1, SEQ):
            tokens[:, t] = (3 * tokens[:, t - 1] + more[:, t]) % VOCAB
        targets = tokens.roll(-1, 1)
        targets[torch.rand(tokens.shape, generator=draw) < torch.linspace(0, 0.5, SEQUENCES)[:, None]] = -100
        marks = (torch.rand(tokens.shape, generator=draw) < 0.15).long().cumsum(1)
        yield tokens, targets, marks if documents else None


def train(
    rank: int,
    world: int,
    axes: dict[str, int],
    model: str = "gqa",
    micros: int = 1,
    documents: bool = True,
    parallel: dict[str, Any] | None = None,
    whole_forwards: bool = True,
    heavy_head: bool = False,
    inductor: bool = True,
    seed: int = 0,
    **changes: Any,
) -> Curve:
    """Trains STEPS steps in the layout given by `axes`.

    heavy_head: cuts a pipeline as if the head took as long as eight blocks.
    inductor: compiles blocks with Inductor; otherwise PyTorch runs the graphs of Inductor's partition.
    seed: of the weights and of the tokens.
    """
    if not inductor:
        partitioned()
    if heavy_head:
        stage_times.ends_cost = lambda cfg, axes, m: (0.0, heavy(cfg, axes, m))
    cfg = config(ParallelConfig(**axes, **(parallel or {})), model, micros, **changes)
    mesh = build_mesh(**axes)
    net = pipeline(cfg, mesh) if mesh.axes.pp > 1 else transformer(cfg, mesh, whole_forwards)
    net.to_empty(device="cpu")
    net.init_weights(seed)
    parts = parts_of(net, cfg.optim.muon_heads)
    optimizer = build_optimizer(net.named_parameters(), cfg.optim, torch.device("cpu"), parts=parts)
    readers, reader = mesh.axes.readers, mesh.place.reader
    per = SEQUENCES // readers // micros
    losses, norms = [], []
    for tokens, targets, marks in batches(documents, seed):
        counts = ((targets != -100).sum(), targets.numel(), SEQUENCES)
        further = count_further(cfg.model.mtp.depth, targets, marks) if cfg.model.mtp.depth else None
        totals = Totals(*(torch.as_tensor(float(count)) for count in counts), further)
        rows = [slice((a * readers + reader) * per, (a * readers + reader + 1) * per) for a in range(micros)]
        parts = [(tokens[r], targets[r], None if marks is None else marks[r]) for r in rows]
        loss = net.forward_backward(parts, totals) if mesh.axes.pp > 1 else accumulate(net, parts, totals)
        measured = read_measured(net, cfg.model.mtp.depth, loss)
        dist.all_reduce(loss)
        dist.all_reduce(measured)
        norm = net.clip_grad_norm_(0.5) if mesh.axes.pp > 1 else clip_grad_norm_(net.parameters(), 0.5)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        net.update_bias()
        losses += [loss.item(), *(measured + 1).tolist()]  # of equal tokens there may be none
    found = [None] * world
    dist.all_gather_object(found, whole_parameters(net))
    return Curve(losses, norms, {name: p for stage in found for name, p in stage.items()})


def partitioned() -> None:
    """Compiled blocks of this process are graphs of Inductor's partition, which PyTorch runs."""
    backend = "aot_eager_decomp_partition"
    laying.compiled = partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)


def heavy(cfg: Config, axes: Any, m: Any) -> StageCost:
    """The cost of eight blocks as that of a head."""
    return StageCost(8 * sum(stage_times.block_cost(cfg, axes, cfg.model.layers - 1, m)), 0.0, 0.0)


def transformer(cfg: Config, mesh: Mesh, whole_forwards: bool) -> Transformer:
    with torch.device("meta"):
        net = Transformer(cfg.model)
        settle(net, cfg)
    return parallelize(net, mesh, cfg, whole_forwards)


def accumulate(net: Transformer, parts: list, totals: Totals) -> Tensor:
    """This rank's share of the cross-entropy; gradients are communicated with the last micro-batch."""
    net.start_step()
    loss = torch.zeros(())
    for a, (tokens, targets, marks) in enumerate(parts):
        net.set_requires_gradient_sync(a == len(parts) - 1)
        net(tokens, targets, documents_BS=marks, totals=totals).backward()
        loss += net.task_loss
    return loss


def whole_parameters(net: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's parameters by name, gathered; a collective of the ranks of a stage."""
    return {name: _whole(p) for name, p in net.named_parameters()}


def _whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def assert_same(found: Curve, expected: Curve, limit: float = 1e-5) -> None:
    """Asserts that losses, norms and parameters (norm of difference over norm) agree within the limit."""
    for ours, theirs in ((found.losses, expected.losses), (found.norms, expected.norms)):
        assert max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)) < limit, (ours, theirs)
    assert found.parameters.keys() == expected.parameters.keys()
    for name, p in expected.parameters.items():
        far = (found.parameters[name] - p).norm() / p.norm().clamp(min=1e-3)
        assert far < limit, (name, far.item())
