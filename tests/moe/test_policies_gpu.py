"""Every routing policy on a GPU: as on the CPU, in one graph, without a host sync; Sinkhorn's kernel.

next: test_moe_gpu.py
"""

import pytest
import torch

from tmoe.config.model import MoEConfig
from tmoe.config.routing_choices import SELECTIONS
from tmoe.moe.router import Router
from tmoe.ops import reference
from tmoe.ops.router.sinkhorn import sinkhorn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("T", "E"), [(0, 8), (1, 8), (5, 3), (1000, 60), (4096, 64), (32768, 64), (16384, 128), (5000, 512)]
)
def test_sinkhorns_kernel_is_its_definition(T, E, padded):
    torch.manual_seed(T)
    logits = 6 * torch.randn(T, E, device="cuda") + torch.randn(E, device="cuda")
    live = torch.rand(T, device="cuda") < 0.8 if padded else None
    got = sinkhorn(logits, live, 32)
    for a, b in zip(got, reference.sinkhorn(logits.double(), live, 32), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=2e-3)
    if T >= 8 * E:
        assert got[1] < 1e-3
    for _ in range(20):  # programs meet in any order, and the bits stay
        assert all(map(torch.equal, sinkhorn(logits, live, 32), got))


def test_sinkhorn_is_captured_in_a_graph():
    logits = torch.randn(4096, 64, device="cuda")
    want = sinkhorn(logits, None, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sinkhorn(logits, None, 32)
    for _ in range(3):
        graph.replay()
    assert all(map(torch.equal, got, want))


POLICIES = [
    *(dict(selection=name) for name in SELECTIONS),
    dict(score="sigmoid", choice_bias=True, groups=8, top_groups=4, group_score="top2"),
    dict(score="sqrtsoftplus", router_dtype="fp64"),
    dict(score="cosine"),
    dict(identity_experts=16),
    dict(force="even"),
]


@pytest.mark.parametrize("kw", POLICIES, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_policies_are_the_cpus_without_a_sync_and_in_one_graph(kw, padded):
    T, D = 2048, 256
    cfg = MoEConfig(experts=64, top_k=8, ffn_dim=4, tile=64, **kw)
    router = Router(D, cfg)
    for p in router.parameters():
        torch.nn.init.normal_(p, 0, 0.2)
    x = torch.randn(T, D)
    padding = torch.rand(T) < 0.3 if padded else None
    want = router(x, padding)
    router = router.cuda()
    x, padding = x.cuda(), None if padding is None else padding.cuda()
    router(x, padding)  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = router(x, padding)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.compiler.reset()  # a recompilation for each policy would reach dynamo's limit
    compiled = torch.compile(router, fullgraph=True, dynamic=False)(x, padding)
    for routing in (got, compiled):
        # fp32 sums differ in their last bits, so near ties may be chosen otherwise
        chosen = [weights_of(r, cfg.outputs) for r in (routing, want)]
        same = ((chosen[0] > 0) == (chosen[1] > 0)).all(-1)
        assert same.double().mean() > 0.99
        torch.testing.assert_close(chosen[0][same], chosen[1][same], rtol=1e-3, atol=1e-5)


def weights_of(routing, outputs: int) -> torch.Tensor:
    """The weights of all experts, [T, E], on the CPU."""
    ids, weights = routing.ids_TK.cpu().long(), routing.weights_TK.detach().cpu()
    return torch.zeros(len(ids), outputs + 1).scatter(1, ids + 1, weights)[:, 1:]
