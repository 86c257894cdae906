"""Activation checkpointing changes memory, not numbers: gradients are the same to the bit.

The load is counted once, and fewer tensors are kept.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch._dynamo.utils import counters

from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.config.run import Config, ParallelConfig, TrainConfig
from tmoe.model.transformer import Transformer
from tmoe.parallel import build_mesh, parallelize

SEQ = 32
MODEL = ModelConfig(
    vocab=64,
    dim=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    dense_layers=1,
    ffn_dim=48,
    dropout=0.1,
    rope=RopeConfig(max_seq=SEQ),
    moe=MoEConfig(experts=4, top_k=2, ffn_dim=48, jitter=0.1),
)


def step(rank: int, world: int, policy: str, ep: int, compile: bool, dtype: str) -> dict:
    """One forward and backward: loss, gradients, routed pairs, bytes kept between them, graph breaks."""
    model = replace(MODEL, dropout=0.0, moe=replace(MODEL.moe, jitter=0.0)) if compile else MODEL
    parallel = ParallelConfig(ep=ep, checkpoint=policy)
    cfg = Config(compile=compile, model=model, train=TrainConfig(seq=SEQ, dtype=dtype), parallel=parallel)
    net = Transformer(cfg.model)
    net.init_weights(0)
    parallelize(net, build_mesh(ep=ep), cfg)
    tokens = torch.randint(64, (2, SEQ), generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(rank)
    kept: dict[int, int] = {}
    held = {t.untyped_storage().data_ptr() for p in net.parameters() for t in [p.to_local()]}

    def pack(t):
        if t.untyped_storage().data_ptr() not in held:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = net(tokens, tokens.roll(-1, 1), documents_BS=torch.arange(SEQ).expand(2, SEQ) // 20)
    loss.backward()
    grads = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
    counts = net.balancer.read_log().counts_LE
    breaks = sum(counters["graph_break"].values())
    return dict(loss=loss.detach(), grads=grads, counts=counts, kept=sum(kept.values()), breaks=breaks)


@pytest.fixture(scope="module")
def without(gloo):
    """`without(world, ep, compile, dtype)`: the step that recomputes nothing, once for all policies."""
    return cache(lambda world, *how: gloo(world, step, "none", *how))


@pytest.mark.parametrize("policy", ["moe", "attention", "block"])
@pytest.mark.parametrize(
    ("world", "ep", "compile", "dtype"),
    [
        (1, 1, False, "fp32"),
        (1, 1, False, "bf16"),
        (2, 2, False, "fp32"),
        (2, 1, False, "bf16"),
        pytest.param(1, 1, True, "fp32", marks=pytest.mark.slow),
    ],
)
def test_recomputing_changes_no_bit(gloo, without, policy, world, ep, compile, dtype):
    every = without(world, ep, compile, dtype)
    fewer = gloo(world, step, policy, ep, compile, dtype)
    for want, got in zip(every, fewer, strict=True):
        assert torch.equal(got["loss"], want["loss"])
        assert torch.equal(got["counts"], want["counts"]) and got["counts"].sum() == world * 2 * SEQ * 2
        for name, grad in want["grads"].items():
            if compile:  # another graph fuses otherwise
                torch.testing.assert_close(got["grads"][name], grad, rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(got["grads"][name], grad), name
        assert got["kept"] < 0.85 * want["kept"]
        assert got["breaks"] == 0
