"""What a block's attention keeps under tp and cp, against autograd's own tensors; etp worked by hand."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from held import kept_of
from tiers import slow_but
from torch.testing._internal.distributed.fake_pg import FakeStore

from tmoe.config.axes import Axes
from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from tmoe.config.run import Config, ParallelConfig, TrainConfig
from tmoe.model.attention_backend import position_mask
from tmoe.model.attention_parallel import Spread
from tmoe.model.block_bytes import loss_bytes
from tmoe.model.rope import turns_of
from tmoe.model.transformer import Block
from tmoe.moe.moe_bytes import moe_bytes, slice_bytes, uses_symm, window_bytes
from tmoe.parallel.mesh import build_mesh
from tmoe.plan.block_memory import backward_bytes, layer_bytes

S = 256
GROUPED = ModelConfig(dim=256, heads=8, kv_heads=4, head_dim=32, dense_layers=1, ffn_dim=512)
LATENT = ModelConfig(
    dim=256,
    heads=8,
    attention="mla",
    mla=MLAConfig(q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=48),
    dense_layers=1,
    ffn_dim=512,
)
DIRECT = dataclasses.replace(LATENT, mla=dataclasses.replace(LATENT.mla, q_rank=0))
NARROW = dataclasses.replace(LATENT, mla=dataclasses.replace(LATENT.mla, v_dim=40))
SHARED = dataclasses.replace(GROUPED, kv_heads=1, qk_norm="head")
SLIM = dataclasses.replace(GROUPED, v_head_dim=16, value_multiplier=0.5)
PADDED = (NARROW, SLIM)  # whose values attention pads here

OFTEN = [
    (dataclasses.replace(GROUPED, qk_norm="head"), 2, 1, "keys"),
    (GROUPED, 1, 2, "keys"),
    (LATENT, 2, 2, "keys"),
]
ALL = [
    *OFTEN,
    (dataclasses.replace(GROUPED, qk_norm="full"), 2, 1, "keys"),
    (dataclasses.replace(GROUPED, qk_norm="head"), 1, 2, "keys"),
    (dataclasses.replace(GROUPED, qk_norm="head"), 1, 8, "heads"),
    (GROUPED, 2, 2, "heads"),
    (SHARED, 2, 2, "keys"),
    (SHARED, 2, 2, "heads"),
    *((LATENT, *how) for how in ((2, 1, "keys"), (1, 2, "keys"), (1, 2, "heads"), (2, 2, "heads"))),
    *((DIRECT, *how) for how in ((2, 1, "keys"), (1, 2, "keys"), (2, 2, "keys"), (2, 2, "heads"))),
    *((NARROW, *how) for how in ((2, 1, "keys"), (1, 2, "heads"), (2, 2, "heads"))),
    (dataclasses.replace(SHARED, attention_gate=True, norms="sandwich"), 1, 1, "keys"),
    (dataclasses.replace(SHARED, attention_gate=True, norms="sandwich"), 2, 2, "keys"),
    (dataclasses.replace(GROUPED, attention_gate=True), 2, 2, "heads"),
    (dataclasses.replace(GROUPED, norms="post", rotary=(0,)), 1, 1, "keys"),
    *((SLIM, *how) for how in ((1, 1, "keys"), (2, 1, "keys"), (1, 2, "heads"))),
    (dataclasses.replace(GROUPED, value_multiplier=0.5), 1, 1, "keys"),
    (dataclasses.replace(GROUPED, norms="post", rope=RopeConfig(dim=16, interleave=True)), 2, 1, "keys"),
]


@pytest.mark.parametrize(("model", "tp", "cp", "by"), slow_but(OFTEN, ALL))
def test_attention_keeps_what_autograd_keeps(model, tp, cp, by):
    torch.compiler.reset()  # every case compiles the same code, which may be compiled eight times
    axes = Axes(dp=tp * cp, tp=tp, cp=cp)
    cfg = Config(
        model=model,
        train=TrainConfig(batch=2, seq=S, isolate_documents=model not in PADDED),
        parallel=ParallelConfig(tp=tp, cp=cp, cp_exchange=by),
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=axes.world)
    try:
        block = Block(model, 0).bfloat16()
        spread = block.attention.spread = Spread.over(build_mesh(tp=tp, cp=cp), by, 1)
        block.compute = torch.compile(
            block.compute, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition"
        )
        tables = turns_of(model, S, torch.device("cpu"))[block.rope]
        rotated, mask = spread.queries(S, torch.device("cpu")), None
        if rotated is not None:
            tables = tuple(table[rotated] for table in tables)
            mask = position_mask(None, 0, S, rotated) if spread.by_keys else None
        x = torch.randn(2, S // axes.parts, 256, dtype=torch.bfloat16, requires_grad=True)
        context = (*tables, mask, None, None)
        kept = kept_of(block, x, *context)
    finally:
        dist.destroy_process_group()
    # the mask as the CPU's kernel wants it, of x's type, is none of a GPU's
    here = sum(t.untyped_storage().nbytes() for t in kept if t.shape[:2] != (1, 1))
    assert layer_bytes(cfg, axes, 0) == pytest.approx(here, rel=0.001)


def test_a_part_of_the_tokens_keeps_a_part_of_everything_else():
    """Of the feed-forward, of the loss and of the windows 1/4 of the tokens keep 1/4."""
    model = dataclasses.replace(GROUPED, dense_layers=0, moe=MoEConfig(experts=8, top_k=2, ffn_dim=128))
    cfg = Config(model=model, train=TrainConfig(batch=4, seq=1024))
    fewer = Config(model=model, train=TrainConfig(batch=1, seq=1024))
    parts, one = Axes(dp=1, ep=4, tp=2, cp=2), Axes(ep=4)
    for count in (moe_bytes, loss_bytes):
        assert count(cfg, parts) == count(fewer, one) < count(cfg, one)
    assert window_bytes(cfg, parts, 0) == window_bytes(fewer, one, 0) > 0


def test_tp_gathers_tokens_again_in_the_backward():
    cfg = Config(model=GROUPED, train=TrainConfig(batch=2, seq=S))
    kept = layer_bytes(cfg, Axes(dp=4, tp=4), 0)
    # x and its gradient of the three other ranks' tokens
    assert backward_bytes(cfg, Axes(dp=4, tp=4), 0) - kept == 2 * 3 * (2 * S // 4) * 256 * 2


def test_etp_worked_by_hand():
    """Twice the rows of half the width, and a copy of the slices, which recomputing frees."""
    T, D, F, E, K = 2 * S, 256, 128, 8, 2
    model = dataclasses.replace(GROUPED, dense_layers=0, moe=MoEConfig(experts=E, top_k=K, ffn_dim=F))
    cfg = Config(model=model, train=TrainConfig(batch=2, seq=S))
    axes, plain = Axes(etp=2), Axes(dp=2)
    slices = 3 * E * F // 2 * D * 2
    assert slice_bytes(cfg, axes) == slices and slice_bytes(cfg, plain) == 0
    # rows of both ranks, and what is kept of each of their slots; H is as large
    more = 2 * T * D * 2 + T * K * (4 + 3 * 4)
    assert moe_bytes(cfg, axes) - moe_bytes(cfg, plain) == more
    for policy in ("none", "attention"):
        assert layer_bytes(cfg, axes, 0, policy) - layer_bytes(cfg, plain, 0, policy) == more + slices
    assert layer_bytes(cfg, axes, 0, "block") == layer_bytes(cfg, plain, 0, "block")
    assert not uses_symm(cfg, Axes(ep=2, etp=2)) and uses_symm(cfg, Axes(ep=2))


def test_adaptive_r_worked_by_hand():
    """r = 0: rows stay as on one rank; in backward all experts of a layer and their gradients are here."""
    D, F, E = 256, 128, 8
    model = dataclasses.replace(GROUPED, dense_layers=0, moe=MoEConfig(experts=E, top_k=2, ffn_dim=F))
    cfg = Config(model=model, train=TrainConfig(batch=2, seq=S))
    stay = dataclasses.replace(cfg, parallel=ParallelConfig(ep=4, adaptive_r=0))
    assert moe_bytes(stay, Axes(ep=4)) == moe_bytes(cfg, Axes(dp=4))
    more = backward_bytes(stay, Axes(ep=4), 0) - backward_bytes(cfg, Axes(dp=4), 0)
    assert more == 2 * 3 * E * F * D * 2
    assert not uses_symm(stay, Axes(ep=4))
    whole = dataclasses.replace(cfg, parallel=ParallelConfig(etp=4, adaptive_r=1))
    assert moe_bytes(whole, Axes(etp=4)) == moe_bytes(cfg, Axes(dp=4))
    assert slice_bytes(whole, Axes(etp=4)) == 0


def test_padding_worked_by_hand():
    """E C slots of one pair each, C = T K / E f, of which x is kept; and where the pairs of a token lie."""
    T, D, F, E, K = 2 * S, 256, 128, 8, 2
    moe = MoEConfig(experts=E, top_k=K, ffn_dim=F, capacity_factor=2.0, pad=True)
    plain = dataclasses.replace(moe, capacity_factor=None, pad=False)
    padded, without = (
        Config(model=dataclasses.replace(GROUPED, dense_layers=0, moe=m), train=TrainConfig(batch=2, seq=S))
        for m in (moe, plain)
    )
    slots = 2 * T * K
    more = slots * D * 2 + T * K * 2 * 4 + (slots - T * K) * (4 + 3 * 4)
    assert moe_bytes(padded, Axes()) - moe_bytes(without, Axes()) == more
    assert not uses_symm(padded, Axes(ep=4))
