"""On GPUs one MoE layer through the peers' memory equals the nccl dispatcher's.

It waits for no host, compiles whole and replays in a graph. As a test it starts itself under torchrun on
up to four GPUs of the machine; four ranks share a single one (benchmarks/shared.py):
    torchrun --nproc-per-node 2 tests/moe/test_symm_gpu.py

next: test_symm_shared.py
"""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from symm_ranks import SHARED, routes, rule, run


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.timeout(920)  # four ranks on one GPU take two minutes where they have it to themselves
def test_on_gpus():
    gpus = torch.cuda.device_count()
    world = 2 if gpus in (2, 3) else 4  # the layer has 16 experts
    shared = [] if gpus >= world else ["-m", "benchmarks.shared"]
    run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world}",
        *shared,
        __file__,
        limit=900,
    )


def way(dispatcher, moe):
    """From x, its routing and the experts to (y,), or to (y, the shared expert's y)."""

    def through(x, routing, experts):
        if moe.shared is None:
            return (dispatcher(x, routing, experts),)
        return dispatcher.run_with_shared(x, routing, experts, moe.shared)

    return through


def layer(through, moe, x, w, ids, dy):
    """y, all gradients, and the shared expert's y if there is one."""
    from tmoe.moe.router import Routing

    x = x.clone().requires_grad_()
    w = w.clone().requires_grad_()
    moe.zero_grad(set_to_none=True)
    ys = moe.experts(lambda experts: through(x, Routing(w, ids, torch.empty(0)), experts))
    torch.autograd.backward(ys, [dy, -dy][: len(ys)])
    grads = [p.grad.to_local() for p in moe.experts.parameters()]
    grads += [p.grad for p in moe.shared.parameters()] if moe.shared else []
    return [ys[0].detach(), x.grad, w.grad, *grads, *(y.detach() for y in ys[1:])]


@functools.cache
def mesh():
    """One for all layers: NCCL keeps the buffers of every group, and four ranks may share one GPU."""
    from tmoe.parallel import build_mesh

    return build_mesh(ep=dist.get_world_size())


def make_layer(dtype, dim=128, experts=16, K=4, shared=0):
    from tmoe import MoE, MoEConfig
    from tmoe.model.parallelize import apply_ep

    torch.manual_seed(0)
    cfg = MoEConfig(experts=experts, top_k=K, ffn_dim=64, shared_dim=shared, shared_gate=shared > 0)
    moe = MoE(dim, cfg).cuda().to(dtype)
    apply_ep(moe, mesh(), "auto")
    return moe


NAMES = "y", "dx", "dw", "gate_up", "down", "shared gate_up", "shared down", "shared y"


def check_against_nccl(dtype, kind, tokens, fp8=False, shared=0):
    from tmoe.moe.exchange.dispatch import AllToAllDispatcher, SymmDispatcher

    world = dist.get_world_size()
    rank = dist.get_rank()
    moe = make_layer(dtype, shared=shared)
    E, K, D = 16, 4, 128
    assert isinstance(moe.dispatcher, SymmDispatcher), "auto"
    n = tokens[rank % len(tokens)]
    draw = torch.Generator().manual_seed(rank)
    ids = routes(kind, n, E, K, draw).cuda()
    x, dy = (torch.randn(n, D, generator=draw).to(dtype).cuda() for _ in range(2))
    w = torch.rand(n, K, generator=draw).cuda()
    assert moe.dispatcher.width == shared
    ours = SymmDispatcher(dist.group.WORLD, E // world, max(tokens), fp8, shared)
    want = layer(way(AllToAllDispatcher(dist.group.WORLD, E // world), moe), moe, x, w, ids, dy)
    for again in range(4):  # from the third on it is replayed
        got = layer(way(ours, moe), moe, x, w, ids, dy)
        for name, g, t in zip(NAMES[: len(want)], got, want, strict=True):
            assert g.isfinite().all(), (name, again)
            # silu and its gradient are written down in other orders
            of_shared = shared > 0 and (name == "dx" or name.startswith("shared"))
            if dtype == torch.float32 and len(set(tokens)) == 1 and not of_shared:
                assert torch.equal(g, t), (kind, name, again, (g - t).abs().max())
            error = (g.double() - t.double()).norm() / t.double().norm().clamp(min=1e-30)
            limit = 0.1 if fp8 else 1e-5 if dtype == torch.float32 else 1e-2 if of_shared else 5e-3
            assert error < limit, (kind, name, again, error)


def check_no_sync_and_graph(shared=0):
    """No host sync, one compiled graph, and a CUDA graph that replays with new routing.

    All give eager's bits.
    """
    torch.compiler.reset()  # other rules, and other layers, from the same code
    rank = dist.get_rank()
    n = 96
    D = 128
    K = 4
    E = 16
    moe = make_layer(torch.bfloat16, shared=shared)
    draw = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(n, D, generator=draw).bfloat16().cuda() for _ in range(2))
    w = torch.rand(n, K, generator=draw).cuda()
    ids = routes("random", n, E, K, draw).cuda()
    other = routes("first rank", n, E, K, draw).cuda()
    eager = way(moe.dispatcher, moe)
    want = [layer(eager, moe, x, w, i, dy) for i in (ids, other)]
    dist.barrier()
    torch.cuda.set_sync_debug_mode("error")
    layer(eager, moe, x, w, ids, dy)
    torch.cuda.set_sync_debug_mode("default")

    def compare(got, want, what):
        assert all(torch.equal(g, t) for g, t in zip(got, want, strict=True)), what

    compiled = torch.compile(eager, fullgraph=True, dynamic=False)
    for i, t in zip((ids, other, ids), (*want, want[0]), strict=True):
        compare(layer(compiled, moe, x, w, i, dy), t, "compiled")

    static_ids = ids.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer(eager, moe, x, w, static_ids, dy)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        got = layer(eager, moe, x, w, static_ids, dy)
    for i, t in zip((ids, other, ids), (*want, want[0]), strict=True):
        static_ids.copy_(i)
        graph.replay()
        torch.cuda.synchronize()
        compare(got, t, "captured")


def check_whole_layer(shared=0):
    """MoE under fullgraph compile, forward and backward, no sync: as eager."""
    torch.compiler.reset()
    moe = make_layer(torch.bfloat16, shared=shared)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(64, 128, device="cuda").bfloat16().requires_grad_()
    y, _ = moe.experts(moe.route, x, None)
    y.sum().backward()
    want = (y.detach(), x.grad)
    x.grad = None
    route = torch.compile(moe.route, fullgraph=True, dynamic=False)
    moe.experts(route, x, None)[0].sum().backward()
    x.grad = None
    torch.cuda.set_sync_debug_mode("error")
    y, _ = moe.experts(route, x, None)
    y.sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    for g, t in zip((y, x.grad), want, strict=True):
        assert (g.double() - t.double()).norm() < 1e-2 * t.double().norm()


CASES = [
    ("random", [200]), ("one expert", [64]), ("first rank", [150]), ("nowhere", [16]), ("holes", [33]),
    ("random", [40, 0]), ("random", [0, 7]), ("random", [0]), ("random", [900]),
]  # fmt: skip


def traces(world):
    """All kernels of all cases, as tmoe/ops/launch/precompile.py takes them."""
    from tmoe.moe.exchange.dispatch import pairs_bound
    from tmoe.ops import exchange
    from tmoe.ops.experts import swiglu
    from tmoe.ops.experts.op import trace

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        found.append((swiglu.trace, 1, SHARED, dtype))
        found.append((exchange.trace_routes, 900, 4, world, dtype))
        for tokens in {max(1, max(tokens)) for _, tokens in CASES} | {64, 96}:
            pairs = pairs_bound(tokens, 4, world, 16 // world)
            found.append((trace, tokens * world, 128, 64, 16 // world, 4, dtype, pairs))
            found.append((exchange.trace, tokens, 128, 4, world, dtype, True))
    return found


def warm():
    """All kernels of all cases, compiled by many processes before the process group exists."""
    from tmoe.commands.warmup import local_arch
    from tmoe.ops.launch.precompile import precompile

    precompile(local_arch(), traces(int(os.environ["WORLD_SIZE"])), 8)


def on_gpus():
    from tmoe.moe.exchange import symm

    warm()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    for hides in (False, True):  # layers as small as these would not
        symm.hides = rule(False, hides)
        # before a captured graph fixes the buffers
        check_against_nccl(torch.bfloat16, "random", [900], fp8=True)
        for dtype in (torch.float32, torch.bfloat16):
            for kind, tokens in CASES if dtype == torch.float32 else CASES[::3]:
                check_against_nccl(dtype, kind, tokens)
        check_no_sync_and_graph()
        check_whole_layer()
        # which then stays in the graph
        check_against_nccl(torch.bfloat16, "random", [900], fp8=True, shared=SHARED)
        check_against_nccl(torch.float32, "random", [40, 0], shared=SHARED)
        symm.hides = rule(True, hides)
        for dtype in (torch.float32, torch.bfloat16):
            for kind, tokens in CASES if dtype == torch.float32 else CASES[::3]:
                check_against_nccl(dtype, kind, tokens, shared=SHARED)
        check_no_sync_and_graph(SHARED)
        check_whole_layer(SHARED)
        if dist.get_rank() == 0:
            print("hidden" if hides else "shown", "all right", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    on_gpus()
    print("all right")
