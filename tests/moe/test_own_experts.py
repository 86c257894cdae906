"""Experts of somebody's own: as tmoe's own where they compute the same, on any number of ranks.

Also where weights apply, and latent experts.
"""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

import tmoe
from tmoe.base.activations import ACTIVATIONS
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.hf.config import write_config
from tmoe.model.parallelize import apply_ep
from tmoe.moe.exchange.sorted_rows import sort_pairs
from tmoe.moe.layer import MoE

ROOT = Path(__file__).parents[2]
D, E, K, F_ = 12, 4, 2, 8
CFG = MoEConfig(experts=E, top_k=K, ffn_dim=F_)


class Same(nn.Module):
    """What tmoe's experts compute, in plain PyTorch, with parameters in a module of its own."""

    def __init__(self, like):
        super().__init__()
        self.inner = nn.Module()
        self.inner.gate_up = nn.Parameter(like.gate_up.detach().clone())
        self.inner.down = nn.Parameter(like.down.detach().clone())

    def forward(self, x_ND, ends_L):
        ends = [0, *ends_L.tolist()]
        parts = []
        for e, (a, b) in enumerate(itertools.pairwise(ends)):
            gate, up = (x_ND[a:b] @ self.inner.gate_up[e].T).chunk(2, -1)
            parts.append((F.silu(gate) * up) @ self.inner.down[e].T)
        return torch.cat([*parts, x_ND[ends[-1] :]])


def layers(cfg=CFG, dtype=torch.float32):
    """tmoe's layer, and one with experts of one's own of the same weights."""
    torch.manual_seed(0)
    ours = MoE(D, cfg)
    own = MoE(D, cfg, experts=Same(ours.experts))
    own.load_state_dict({n: p for n, p in ours.state_dict().items() if "experts" not in n}, strict=False)
    return ours.to(dtype), own.to(dtype)


def results(moe, x, padding=None):
    """y, dx, and the gradients by name; experts' under their last name."""
    x = x.clone().requires_grad_()
    y = moe(x, padding)
    grads = torch.autograd.grad(y.square().sum(), [x, *moe.parameters()])
    names = ["x", *(name.rpartition(".")[2] + str(p.dim()) for name, p in moe.named_parameters())]
    return {"y": y.detach()} | dict(zip(names, grads, strict=True))


def assert_equal(got, want, **limits):
    assert got.keys() == want.keys()
    for name in got:
        torch.testing.assert_close(got[name], want[name], **limits, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_experts_give_the_same(dtype):
    ours, own = layers(dtype=dtype)
    x = torch.randn(30, D).to(dtype)
    padding = torch.arange(30) > 25
    limits = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=0.1, atol=2e-3)
    assert_equal(results(own, x, padding), results(ours, x, padding), **limits)


def test_pairs_are_sorted_by_expert_and_then_by_row():
    ids = torch.tensor([[1, -1], [0, 1], [-1, -1], [7, 1]])
    loose, exact = (sort_pairs(ids, 3, exact) for exact in (False, True))
    assert exact.rows_N.tolist() == [1, 0, 1, 3] and exact.slots_N.tolist() == [2, 0, 3, 7]
    assert loose.rows_N.tolist() == [1, 0, 1, 3, -1, -1, -1, -1]
    assert loose.slots_N.tolist() == [2, 0, 3, 7, -1, -1, -1, -1]
    assert loose.ends_L.tolist() == exact.ends_L.tolist() == [1, 4, 4]


def test_a_function_without_parameters():
    """Experts that double: a token gets twice the sum of its weights, times itself."""
    moe = MoE(D, CFG, experts=lambda x_ND, ends_L: 2 * x_ND)
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(moe(x), 2 * x)  # renormalised weights sum to 1
    assert not list(moe.experts.parameters())


def test_its_parameters_keep_their_values():
    ours = MoE(D, CFG)
    moe = MoE(D, CFG, experts=Same(ours.experts))
    assert torch.equal(moe.experts.own.inner.down, ours.experts.down)
    assert moe.router.weight.std() < 0.1  # while the router's are drawn


def test_autocast_reaches_them():
    ours, own = layers()
    x = torch.randn(9, D)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = own(x), ours(x)
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0.1, atol=1e-3)
    got.sum().backward()
    assert own.experts.own.inner.down.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (nn.Linear(3, 3), r"experts: parameter weight: got shape \(3, 3\), valid is \[E=4, \.\.\.\]"),
        (3, r"experts: got 3, valid is a module or a function \(x_ND, ends_L\)"),
        (lambda x, ends: x[:, :1], r"experts: result: got shape \(10, 1\), valid is a tensor of the shape"),
        (lambda x, ends: None, "experts: result: got None"),
    ],
)
def test_bad_experts_are_named(own, said):
    with pytest.raises(ValueError, match=said):
        MoE(D, CFG, experts=own)(torch.randn(5, D))


# ---- on several ranks ----


def spread(rank, world, axes):
    """y of this rank's tokens and all gradients, whole, of the layer of `layers`, spread over the mesh."""
    _, own = layers()
    mesh = tmoe.parallel.build_mesh(**axes)
    tmoe.parallel.parallelize(own, mesh)
    x = torch.randn(4, 6, D, generator=torch.Generator().manual_seed(2)).chunk(world)[rank].clone()
    x = x[:, :0] if world > 1 and rank == 1 else x  # a rank without tokens takes part
    y = own(x.requires_grad_())
    y.square().sum().backward()
    held = {n: (tuple(p.to_local().shape), str(p.placements)) for n, p in own.experts.named_parameters()}
    grads = {n: p.grad.full_tensor() for n, p in own.named_parameters()}
    return y.detach(), x.grad, grads, held


@pytest.mark.parametrize("axes", [dict(ep=2), dict(dp=2), dict(dp=2, ep=2)], ids=str)
def test_on_several_ranks_as_on_one(gloo, axes):
    world = axes.get("dp", 1) * axes.get("ep", 1)
    ranks = gloo(world, spread, axes)
    _, whole = layers()
    chunks = torch.randn(4, 6, D, generator=torch.Generator().manual_seed(2)).chunk(world)
    x = torch.cat([c for i, c in enumerate(chunks) if i != 1]).requires_grad_()
    y = whole(x)
    y.square().sum().backward()
    torch.testing.assert_close(torch.cat([r[0] for i, r in enumerate(ranks) if i != 1]), y)
    torch.testing.assert_close(torch.cat([r[1] for i, r in enumerate(ranks) if i != 1]), x.grad)
    for _, _, grads, held in ranks:
        for name, p in whole.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6)
        shape, placements = held["own.inner.down"]
        assert shape == (E // world, D, F_)
        assert "Shard" in placements


EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "docs/experts.md").read_text(), re.S).group(1)


def example(rank, world, folder, load):
    """The example of docs/experts.md on this many ranks, saved, or loaded from where it was saved."""
    place = {}
    exec(EXAMPLE.replace("ep=2", f"ep={min(world, 2)}"), place)  # on four ranks dp shares the experts
    moe = place["moe"]
    state = get_model_state_dict(moe)
    if load:
        for t in state.values():
            t.zero_()
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(moe, state)
    else:
        dcp.save(state, checkpoint_id=folder)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    wide = {n: p.full_tensor() for n, p in moe.named_parameters() if isinstance(p, DTensor)}
    y = moe(x).detach()
    dist.barrier()
    return y, wide


def test_the_example_on_1_2_and_4_ranks_and_through_a_checkpoint(gloo, tmp_path):
    """Saved by two ranks, loaded by one and by four; all give the same."""
    saved = gloo(2, example, str(tmp_path / "two"), False)
    assert {name for name in saved[0][1] if "experts" in name} == {"experts.own.up", "experts.own.down"}
    for world in (1, 4):
        for y, parameters in gloo(world, example, str(tmp_path / "two"), True):
            torch.testing.assert_close(y, saved[0][0])
            for name, p in parameters.items():
                assert torch.equal(p, saved[0][1][name]), name


def refused(rank, world):
    _, own = layers()
    mesh = tmoe.parallel.build_mesh(ep=1, dp=1, etp=2)
    with pytest.raises(ValueError, match=r"--parallel\.etp: got 2, valid is 1 with experts of your own"):
        tmoe.parallel.parallelize(own, mesh)
    return True


def test_expert_tensor_parallelism_is_refused(gloo):
    assert gloo(2, refused) == [True, True]


def compiled(rank, world):
    """The layer as one graph, inside the experts' scope, beside eager; with weights before as well."""
    found = []
    for weigh in ("after", "before"):
        torch.manual_seed(0)
        cfg = MoEConfig(experts=E, top_k=K, ffn_dim=F_, weigh=weigh)
        relu = lambda x, ends: x.relu()  # noqa: E731
        moe = MoE(D, cfg, experts=relu if weigh == "before" else Grouped())
        apply_ep(moe, tmoe.parallel.build_mesh(ep=world), "nccl")
        run = torch.compile(moe.route, fullgraph=True)
        for n in (7, 10):
            x = torch.randn(n, D, requires_grad=True)
            both = []
            for route in (run, moe.route):
                y = moe.experts(route, x, None)[0]
                both.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
            found.append(both)
    return found


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(E, D, D))

    def forward(self, x_ND, ends_L):
        return tmoe.ops.grouped_mm(x_ND, self.w, ends_L)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_one_graph(gloo, world):
    for found in gloo(world, compiled):
        for got, want in found:
            torch.testing.assert_close(got, want)


# ---- where weights apply ----


def weighed(moe, x, where):
    """y by the definition, expert by expert."""
    cfg, experts = moe.router.cfg, moe.experts
    routing = moe.router(x)
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for w, e in zip(routing.weights_TK[t].to(x.dtype), routing.ids_TK[t].tolist(), strict=True):
            h = experts.gate_up[e] @ (w * x[t] if where == "before" else x[t])
            h = h if experts.gate_up_bias is None else h + experts.gate_up_bias[e]
            out = experts.down[e] @ ACTIVATIONS[cfg.activation].of(h)
            out = out if experts.down_bias is None else out + experts.down_bias[e]
            y[t] += out if where == "before" else w * out
    return y


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("where", ["before", "activation", "after"])
def test_weights_apply_where_the_setting_says(where, bias):
    torch.manual_seed(0)
    activation = "relu2" if bias else "swiglu"
    cfg = replace(CFG, weigh=where, bias=bias, activation=activation, scaling=3.0)
    moe = MoE(D, cfg)
    for p in moe.experts.parameters():
        nn.init.normal_(p)
    x = torch.randn(11, D)
    leaves = [x.requires_grad_(), *moe.parameters()]
    got, want = moe(x), weighed(moe, x, where)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    g = torch.randn_like(x)
    grads, wanted = (torch.autograd.grad(y, leaves, g) for y in (got, want))
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    other = weighed(moe, x, "after" if where == "before" else "before")
    assert (got - other).abs().max() > 0.1, "the places differ"


def test_the_default_is_the_op_itself():
    """Bit for bit what it was: one call of moe_mlp on the rows as they lie."""
    moe, _ = layers()
    x = torch.randn(20, D)
    routing = moe.router(x)
    direct = tmoe.ops.moe_mlp(x, moe.experts.gate_up, moe.experts.down, routing.weights_TK, routing.ids_TK)
    assert torch.equal(moe(x), direct)


# ---- latent experts ----


def test_identity_projections_change_nothing():
    torch.manual_seed(0)
    cfg = MoEConfig(experts=E, top_k=K, ffn_dim=F_, shared_dim=8, shared_gate=True)
    plain = MoE(D, cfg)
    latent = MoE(D, MoEConfig(experts=E, top_k=K, ffn_dim=F_, shared_dim=8, shared_gate=True, latent_dim=D))
    for p in (latent.to_latent.weight, latent.from_latent.weight):
        nn.init.eye_(p)
    latent.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(3, 7, D)
    assert torch.equal(latent(x), plain(x))
    got, want = results(latent, x), results(plain, x)
    assert torch.equal(got["x"], want["x"]) or (got["x"] - want["x"]).abs().max() < 1e-6


def test_latent_experts_by_the_definition():
    """Narrow rows for the experts, all of the token for router and shared expert."""
    torch.manual_seed(0)
    cfg = MoEConfig(experts=E, top_k=K, ffn_dim=F_, shared_dim=8, latent_dim=5)
    moe = MoE(D, cfg)
    assert moe.experts.gate_up.shape == (E, 2 * F_, 5) and moe.router.weight.shape == (E, D)
    x = torch.randn(9, D)
    routing = moe.router(x)
    low = x @ moe.to_latent.weight.T
    y = tmoe.ops.moe_mlp(low, moe.experts.gate_up, moe.experts.down, routing.weights_TK, routing.ids_TK)
    torch.testing.assert_close(moe(x), y @ moe.from_latent.weight.T + moe.shared(x))
    assert moe.from_latent.weight.std() < 0.85 * moe.to_latent.weight.std()  # it writes to the stream


@pytest.mark.parametrize("changes", [dict(latent_dim=5), dict(weigh="before")], ids=str)
def test_no_hugging_face_model_has_it(changes):
    plain = ModelConfig(rope=RopeConfig(max_seq=64), moe=replace(CFG, balance="none"))
    write_config(plain, "float32")
    with pytest.raises(ConfigError, match=r"none of llama, .* computes this model"):
        write_config(replace(plain, moe=replace(plain.moe, **changes)), "float32")


def latent_spread(rank, world):
    torch.manual_seed(0)
    moe = MoE(D, MoEConfig(experts=E, top_k=K, ffn_dim=F_, shared_dim=8, latent_dim=5, weigh="before"))
    x = torch.randn(8, 3, D)
    want = results(moe, x)
    tmoe.parallel.parallelize(moe, tmoe.parallel.build_mesh(ep=world))
    mine = x.chunk(world)[rank].clone().requires_grad_()
    y = moe(mine)
    y.square().sum().backward()
    grads = {n.rpartition(".")[2] + str(p.dim()): p.grad.full_tensor() for n, p in moe.named_parameters()}
    return want, y.detach(), mine.grad, grads


def test_latent_experts_on_two_ranks(gloo):
    ranks = gloo(2, latent_spread)
    want = ranks[0][0]
    torch.testing.assert_close(torch.cat([r[1] for r in ranks]), want.pop("y"))
    torch.testing.assert_close(torch.cat([r[2] for r in ranks]), want.pop("x"))
    for name, grad in want.items():
        torch.testing.assert_close(ranks[1][3][name], grad, rtol=1e-4, atol=1e-6)
