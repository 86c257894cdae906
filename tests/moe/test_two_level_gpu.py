"""On GPUs, over NCCL, the exchange in two hops gives a layer the flat one's bits, eager and compiled.

As a test it starts itself under torchrun: four ranks, two to each pretended node, share the GPUs there are.
    torchrun --nproc-per-node 4 -m benchmarks.shared tests/moe/test_two_level_gpu.py

next: test_two_level.py
"""

import os

import pytest
import torch
import torch.distributed as dist
from symm_ranks import routes, run


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.timeout(920)
def test_on_gpus():
    words = "-m torch.distributed.run --standalone --nproc-per-node=4 -m benchmarks.shared".split()
    run(*words, __file__, limit=900)


def layer(dispatcher, moe, x, w, ids, dy, compiled=False):
    """y and all gradients of the layer's experts, reached by this dispatcher."""
    from tmoe.moe.router import Routing

    def through(x, w, experts):
        rows, plan = dispatcher.dispatch(x, Routing(w, ids, torch.empty(0)))
        return dispatcher.combine(experts(rows), plan)

    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    moe.zero_grad(set_to_none=True)
    y = moe.experts(torch.compile(through, fullgraph=True, dynamic=False) if compiled else through, x, w)
    y.backward(dy)
    return [w.grad, *(p.grad.to_local() for p in moe.experts.parameters())], [y.detach(), x.grad]


def check(mesh, dtype, kind, tokens, compiled):
    from tmoe import MoE, MoEConfig
    from tmoe.model.parallelize import apply_ep
    from tmoe.moe.exchange.dispatch import AllToAllDispatcher
    from tmoe.moe.exchange.two_level import TwoLevelDispatcher, over_nodes

    rank, world = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    E, K, D = 16, 4, 128
    moe = MoE(D, MoEConfig(experts=E, top_k=K, ffn_dim=64)).to(device, dtype)
    apply_ep(moe, mesh, "nccl")
    flat = moe.dispatcher
    two = over_nodes(flat, mesh.nodes, K)
    assert isinstance(flat, AllToAllDispatcher) and isinstance(two, TwoLevelDispatcher)
    draw = torch.Generator().manual_seed(rank)
    n = tokens[rank]
    ids = routes(kind, n, E, K, draw).to(device)
    x, dy = (torch.randn(n, D, generator=draw).to(device, dtype) for _ in range(2))
    w = torch.rand(n, K, generator=draw).to(device)
    want, sums = layer(flat, moe, x, w, ids, dy)
    for again in range(2):
        got, others = layer(two, moe, x, w, ids, dy, compiled)
        for g, t in zip(got, want, strict=True):
            assert torch.equal(g, t), (kind, again, (g - t).abs().max())
        for g, t in zip(others, sums, strict=True):
            close = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(g, t, **close)
    assert world == 4


def on_gpus():
    from tmoe.parallel import build_mesh

    os.environ["GROUP_RANK"] = str(int(os.environ["RANK"]) // 2)
    mesh = build_mesh(ep=4, ep_across_nodes=True)
    for kind, tokens in (
        ("random", [96, 96, 96, 96]),
        ("random", [40, 0, 7, 300]),
        ("holes", [33, 5, 96, 1]),
        ("first rank", [20, 20, 0, 20]),
        ("nowhere", [6, 6, 6, 6]),
        ("random", [0, 0, 0, 0]),
    ):
        check(mesh, torch.float32, kind, tokens, False)
    check(mesh, torch.bfloat16, "random", [96, 40, 7, 0], False)
    check(mesh, torch.float32, "random", [96, 40, 7, 5], True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    on_gpus()
    print("all right")
