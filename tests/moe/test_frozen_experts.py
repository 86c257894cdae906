"""Frozen experts cost neither products nor traffic of weight gradients, with every exchange of rows.

next: tests/ops/test_frozen.py
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tmoe.config.model import MoEConfig
from tmoe.config.run import Config, ParallelConfig, TrainConfig
from tmoe.model.freeze import freeze
from tmoe.moe.exchange import symm
from tmoe.moe.experts import LocalExperts
from tmoe.moe.layer import MoE
from tmoe.ops import grouped_mm
from tmoe.ops.experts import cpu
from tmoe.ops.experts.fp8_codes import Codes
from tmoe.parallel import build_mesh, parallelize
from tmoe.parallel.copies import make_stale

D, E, K = 6, 4, 2
BASE = MoEConfig(experts=E, top_k=K, ffn_dim=8)
WAYS = dict(
    local=(dict(dp=2), {}, {}),
    nccl=(dict(ep=2), {}, {}),
    dp_of_gathered=(dict(dp=2), {}, dict(gathered_gib=0.0)),
    padded=(dict(ep=2), dict(pad=True, capacity_factor=2.0), {}),
    etp=(dict(ep=1, etp=2), {}, dict(etp=2)),
    weights=(dict(ep=2), dict(bias=True), dict(adaptive_r=0)),
    weighed_before=(dict(ep=2), dict(weigh="before"), {}),
    without_gate=(dict(ep=2), dict(activation="relu2", bias=True), {}),
)


def one_layer(rank, axes, kw, parallel, frozen):
    """Gradients of one layer by name, the products of weights' gradients, and bytes of its collectives."""
    torch.manual_seed(0)
    moe = MoE(D, replace(BASE, **kw))
    if frozen:
        freeze(moe, r"experts\.(gate_up|down)$")
    cfg = Config(compile=False, train=TrainConfig(dtype="fp32"), parallel=ParallelConfig(**parallel))
    parallelize(moe, build_mesh(**axes), cfg)
    make_stale(moe.parameters())
    x = torch.randn(10, D, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    products, sent = [], [0]
    both, a2a = cpu.gradients_of_matrices, dist.all_to_all_single

    def counting(*args, **kwargs):
        products.append(1)
        return both(*args, **kwargs)

    def sending(out, given, *args, **kwargs):
        sent[0] += given.nbytes
        return a2a(out, given, *args, **kwargs)

    y = moe(x)
    cpu.gradients_of_matrices, dist.all_to_all_single = counting, sending
    try:
        y.square().sum().backward()
    finally:
        cpu.gradients_of_matrices, dist.all_to_all_single = both, a2a
    grads = {name: p.grad.full_tensor() for name, p in moe.named_parameters() if p.grad is not None}
    return dict(y=y.detach(), dx=x.grad, **grads), len(products), sent[0]


def every_way(rank, world):
    return {name: [one_layer(rank, *way, frozen) for frozen in (False, True)] for name, way in WAYS.items()}


def test_no_way_makes_gradients_of_frozen_experts(gloo):
    for found in gloo(2, every_way):
        for name, ((want, products, sent), (got, none, less)) in found.items():
            gone = {"experts.gate_up", "experts.down"}
            assert want.keys() - got.keys() == gone and products == 1 and none == 0, name
            for what, t in got.items():
                torch.testing.assert_close(t, want[what], rtol=1e-6, atol=1e-6, msg=f"{name}: {what}")
            # r = 0 sends the parts of the experts' gradients to their owners; then the biases' alone
            experts = E * 3 * 8 * D * 4
            assert sent - less == (experts if name == "weights" else 0), name


class Calls(TorchDispatchMode):
    """Writes down the calls of one op."""

    def __init__(self, name):
        super().__init__()
        self.name, self.found = name, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == self.name:
            self.found.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trained", [(), ("gate_up",), ("gate_up", "down")])
def test_symm_gets_what_is_frozen(trained):
    """Shapes alone; tests/moe/test_symm.py tests the kernels."""
    with torch.device("meta"):
        x, weights = torch.randn(5, D, requires_grad=True), torch.rand(5, K, requires_grad=True)
        ids = torch.zeros(5, K, dtype=torch.int32)
        local = LocalExperts(torch.randn(2, 16, D), torch.randn(2, D, 8), torch.randn(2, 16))
    for name in ("gate_up", "down", "gate_up_bias"):
        getattr(local, name).requires_grad_(name in (*trained, "gate_up_bias"))
    own = symm.Local(local.gate_up, local.down, local.gate_up_bias, "swiglu")
    y, _ = symm.moe(x, weights, ids, own, symm.SymmOptions(5, 128, False, "g"))
    with Calls("tmoe::symm_moe_backward") as calls:
        y.sum().backward()
    ((*_, frozen, group, summed),) = calls.found
    assert not summed and group == "g" and frozen == (not trained)
    for name in ("gate_up", "down"):
        grad = getattr(local, name).grad
        assert (grad is not None) == (name in trained)
        assert grad is None or grad.shape == getattr(local, name).shape
    assert x.grad.shape == x.shape and local.gate_up_bias.grad.shape == (2, 16)
    y, _ = symm.moe(x, weights, ids, own._replace(summed=True), symm.SymmOptions(5, 128, False, "g"))
    local.gate_up.grad = local.down.grad = None
    with Calls("tmoe::symm_moe_backward") as calls:
        y.sum().backward()
    ((*_, frozen, group, summed),) = calls.found
    assert summed and not frozen and local.gate_up.grad is None and local.down.grad is None
    sizes = Codes.size((2, 16, D), 2), Codes.size((2, D, 8), 1)
    codes = tuple(torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes)
    y, _ = symm.moe(x, weights, ids, own._replace(codes=codes), symm.SymmOptions(5, 128, True, "g"))
    with Calls("tmoe::symm_moe_backward") as calls:
        y.sum().backward()
    ((*args,),) = calls.found
    assert args[10] is codes[0] and args[11] is codes[1] and args[5].shape == local.gate_up.shape


def test_grouped_mm_of_a_frozen_matrix(monkeypatch):
    """grouped_mm in a user's experts: products of a frozen matrix's gradient are left out."""
    a, b = torch.randn(7, D, dtype=torch.float64), torch.randn(3, 4, D, dtype=torch.float64)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    a.requires_grad_(), b.requires_grad_()
    want = torch.autograd.grad(grouped_mm(a, b, ends).square().sum(), a)[0]
    monkeypatch.setattr(cpu, "grouped_mm_backward", None)  # a call would raise
    assert torch.equal(torch.autograd.grad(grouped_mm(a, b.detach(), ends).square().sum(), a)[0], want)
