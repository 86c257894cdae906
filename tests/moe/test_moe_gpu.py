"""A whole MoE layer on a GPU, router to combined output: no host sync, one graph for all routings.

next: tests/ops/test_ops_gpu.py
"""

import pytest
import torch

from tmoe.config.model import MoEConfig
from tmoe.moe.layer import MoE

pytestmark = pytest.mark.gpu

CASES = {
    "qwen3": MoEConfig(experts=64, top_k=8, ffn_dim=256),
    "mixtral": MoEConfig(experts=8, top_k=2, ffn_dim=448, softmax="after"),
    "shared": MoEConfig(
        experts=16, top_k=4, ffn_dim=128, shared_dim=256, shared_gate=True, renormalize=False
    ),
}
SIZES = 700, 512  # T, D


def build(name):
    torch.manual_seed(0)
    return MoE(SIZES[1], CASES[name]).cuda().bfloat16()


def step(moe, call, x, dy):
    """y and every gradient; `call` is the layer or its compiled form."""
    y = call(x)
    grads = torch.autograd.grad(y, [x, *moe.parameters()], dy)
    return [y.detach(), *grads]


def inputs(T=SIZES[0]):
    return (torch.randn(T, SIZES[1], device="cuda", dtype=torch.bfloat16) for _ in range(2))


@pytest.mark.parametrize("name", CASES)
def test_no_host_sync(name):
    moe = build(name)
    (x, dy) = inputs()
    step(moe, moe, x.requires_grad_(), dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(moe, moe, x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_eager(name):
    torch.compiler.reset()  # another case's layer runs the same code, and would be a recompilation
    moe = build(name)
    (x, dy) = inputs()
    compiled = torch.compile(moe, fullgraph=True, dynamic=False)
    x.requires_grad_()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            with torch.no_grad():
                x.normal_()
            for got, want in zip(step(moe, compiled, x, dy), step(moe, moe, x, dy), strict=True):
                assert (got.float() - want.float()).norm() <= 1e-2 * want.float().norm()


def test_compiled_load_of_one_long_sequence():
    """Inductor of torch 2.11 gave the sums of its experts without the dimension of the one sequence."""
    torch.compiler.reset()
    torch.manual_seed(0)
    moe = MoE(SIZES[1], MoEConfig(experts=128, top_k=2, ffn_dim=128)).cuda().bfloat16()
    (x, dy) = inputs(65536)
    x.requires_grad_()
    found = []
    for call in (moe, torch.compile(moe, fullgraph=True, dynamic=False)):
        grads = step(moe, call, x, dy)
        found.append([*grads, *(t for t in moe.load if t is not None)])
    for want, got in zip(*found, strict=True):
        assert got.shape == want.shape
        assert (got.float() - want.float()).norm() <= 1e-2 * want.float().norm()


@pytest.mark.parametrize("name", CASES)
def test_graph_replays_with_new_routing(name):
    moe = build(name)
    (x, dy) = inputs()
    x.requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(moe, moe, x, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step(moe, moe, x, dy)
    for scale in (1.0, 0.0, 30.0):  # random routing, all logits equal, other experts
        with torch.no_grad():
            x.normal_().mul_(scale)
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(out, step(moe, moe, x, dy), strict=True):
            assert torch.equal(got, want)
