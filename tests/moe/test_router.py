"""Router, balancing losses and the MoE layer against formulas token by token, and against Hugging Face.

next: tests/model/test_attention.py
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from router_references import naive_losses, reference_loss
from torch.nn.functional import one_hot

from tmoe.config.model import MoEConfig
from tmoe.moe.balance import Balancer, Load, Totals, measure, stack
from tmoe.moe.layer import MoE
from tmoe.moe.router import Router, Routing

FIXED = [[1.0, 2.0, 0.0, -1.0], [0.5, 0.0, 1.5, 1.0], [2.0, 1.9, -1.0, 0.0], [0.0, 0.0, 3.0, 1.0]]


def config(**kw) -> MoEConfig:
    return replace(MoEConfig(experts=6, top_k=2, ffn_dim=5, balance_coeff=1.0, z_coeff=0.0), **kw)


def router(dim: int, cfg: MoEConfig, scale: float = 1.0) -> Router:
    r = Router(dim, cfg)
    with torch.no_grad():
        r.weight.normal_(0, scale)
    return r


def identity_router(cfg: MoEConfig) -> Router:
    """A router whose logits are its input."""
    r = Router(cfg.experts, cfg)
    with torch.no_grad():
        r.weight.copy_(torch.eye(cfg.experts))
    return r


def totals_of(load: Load) -> Totals:
    tokens = load.tokens_B.sum()
    return Totals(tokens, tokens, torch.tensor(float(load.tokens_B.shape[0])))


def balance_loss(cfg: MoEConfig, load: Load, totals: Totals | None = None) -> torch.Tensor:
    return Balancer(cfg).loss(stack([load]), totals)


# ---- router ----


def test_fixed_values():
    """The numbers of FEATURES, section 3."""
    cfg = config(experts=4, renormalize=False, balance="batch")
    routing = identity_router(cfg)(torch.tensor(FIXED))
    assert routing.ids_TK[0].tolist() == [1, 0] and routing.ids_TK.dtype == torch.int32
    torch.testing.assert_close(routing.weights_TK[0], torch.tensor([0.6439, 0.2369]), atol=5e-5, rtol=0)
    load = measure(routing, 1, None)
    assert (load.z_B / load.tokens_B).item() == pytest.approx(7.2472, abs=5e-5)
    assert balance_loss(cfg, load).item() == pytest.approx(1.0, abs=5e-5)
    assert balance_loss(replace(cfg, balance="none", z_coeff=0.5), load).item() == pytest.approx(
        7.2472 / 2, abs=5e-5
    )
    assert reference_loss(routing.logits_TE, routing.ids_TK).item() == pytest.approx(1.0, abs=5e-5)


@pytest.mark.parametrize("scaling", [1.0, 2.5])
@pytest.mark.parametrize("softmax, renormalize", [("before", False), ("before", True), ("after", True)])
def test_weights_follow_their_formula(softmax, renormalize, scaling):
    cfg = config(softmax=softmax, renormalize=renormalize, scaling=scaling, top_k=3)
    r = router(7, cfg)
    x = torch.randn(20, 7)
    got = r(x)
    for t in range(20):
        logits = [sum(a * b for a, b in zip(x[t].tolist(), w, strict=True)) for w in r.weight.tolist()]
        best = sorted(range(6), key=lambda e: -logits[e])[:3]
        assert got.ids_TK[t].tolist() == best
        over = best if softmax == "after" or renormalize else range(6)
        total = sum(math.exp(logits[e]) for e in over)
        want = [scaling * math.exp(logits[e]) / total for e in best]
        assert got.weights_TK[t].tolist() == pytest.approx(want, rel=1e-5)


def test_after_is_before_renormalised():
    before, after = (router(5, config(softmax=s)) for s in ("before", "after"))
    after.load_state_dict(before.state_dict())
    x = torch.randn(30, 5)
    torch.testing.assert_close(before(x).weights_TK, after(x).weights_TK)
    assert torch.equal(before(x).ids_TK, after(x).ids_TK)


FAR_APART = [[0.0, -300.0, -200.0, -150.0], [-150.0, -300.0, 0.0, -200.0], [-400.0, -120.0, -121.0, 5.0]]


@pytest.mark.parametrize(
    "kw",
    [
        dict(softmax="after"),
        dict(),
        dict(renormalize=False),
        dict(score="sigmoid"),
        dict(groups=2, top_groups=2),
        dict(groups=2, top_groups=1, top_k=1, renormalize=False),
    ],
    ids=str,
)
def test_underflowed_scores_are_chosen_by_logit(kw):
    """exp(-150) is 0 in fp32, so the second weight is 0 whichever expert has it.

    But counts and balancing losses see which expert it is.
    """
    cfg = replace(MoEConfig(experts=4, top_k=2, ffn_dim=4), **kw)
    logits = torch.tensor(FAR_APART) - 200.0 * (cfg.score == "sigmoid")
    got = identity_router(cfg)(logits)
    want = [[0, 3], [2, 0], [3, 1]]
    assert got.ids_TK.tolist() == [row[: cfg.top_k] for row in want]
    if cfg.score == "softmax":
        assert torch.equal(got.weights_TK, torch.tensor([[1.0, 0.0][: cfg.top_k]] * 3))


def test_saturated_sigmoids_are_chosen_by_logit():
    """In fp32 the sigmoid of 20 and that of 40 are both 1."""
    logits = torch.tensor([[20.0, 40.0, 30.0, -1.0], [30.0, -1.0, 20.0, 40.0]])
    cfg = MoEConfig(experts=4, top_k=2, ffn_dim=4, score="sigmoid", renormalize=False)
    got = identity_router(cfg)(logits)
    assert got.ids_TK.tolist() == [[1, 2], [3, 0]] and torch.equal(got.weights_TK, torch.ones(2, 2))


def test_the_best_group_of_underflowed_scores_is_that_of_the_best_logit():
    logits = torch.tensor([[0.0, -170.0, -400.0, -190.0, -160.0, -390.0]])
    cfg = MoEConfig(experts=6, top_k=3, ffn_dim=4, groups=3, top_groups=2, renormalize=False)
    assert identity_router(cfg)(logits).ids_TK.tolist() == [[0, 4, 1]]


@pytest.mark.parametrize("autocast", [False, True])
def test_fp32_under_bf16(autocast):
    cfg = config(experts=64, top_k=8)
    r = router(32, cfg).bfloat16()
    x = torch.randn(400, 32, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = r(x)
    probs = (x.float() @ r.weight.float().T).softmax(-1)
    want, ids = probs.topk(8)
    assert torch.equal(got.ids_TK.long(), ids)
    assert got.weights_TK.dtype == got.logits_TE.dtype == torch.float32
    torch.testing.assert_close(got.weights_TK, want / want.sum(-1, keepdim=True))
    rounded = F.linear(x, r.weight).float().topk(8).indices
    # a bf16 product would choose otherwise: the test can see the difference
    assert not torch.equal(rounded, ids)


def test_jitter_is_bounded_and_only_in_training():
    cfg = config(jitter=0.1)
    r = identity_router(cfg)
    x = torch.ones(4000, 6)
    logits = r.train()(x).logits_TE
    assert logits.min() >= 0.9 and logits.max() <= 1.1  # both ends are met within 1e-3 of their distance
    assert logits.min() < 0.9002 and logits.max() > 1.0998
    assert logits.mean().item() == pytest.approx(1.0, abs=5 * 0.1 / math.sqrt(3 * logits.numel()))
    assert torch.equal(r.eval()(x).logits_TE, x)
    assert torch.equal(identity_router(config()).train()(x).logits_TE, x)


def test_jitter_leaves_the_experts_input_alone():
    moe = MoE(4, config(experts=1, top_k=1, jitter=0.5))
    x = torch.randn(9, 4)
    assert torch.equal(moe.train()(x), moe.eval()(x))


def test_padding_goes_nowhere_and_changes_nobody():
    cfg = config(z_coeff=0.1, balance="batch", shared_dim=3)
    moe = MoE(8, cfg)
    x = torch.randn(3, 7, 8)
    padding = torch.rand(3, 7) < 0.4
    keep = ~padding

    def run(x, padding):
        moe.zero_grad()
        y = moe(x, padding)
        live = y if padding is None else y[~padding]
        (balance_loss(cfg, moe.load) + live.square().sum()).backward()
        return live, moe.load, [p.grad.clone() for p in moe.parameters()]

    y, load, grads = run(x, padding)
    other = torch.where(padding[..., None], 100 * torch.randn_like(x), x)
    y2, load2, grads2 = run(other, padding)
    for a, b in zip([y, *load[:7], *grads], [y2, *load2[:7], *grads2], strict=True):
        assert torch.equal(a, b)
    y3, load3, grads3 = run(x[keep], None)  # the kept tokens alone, as one sequence
    for a, b in zip(
        [y, *(v.sum(0) for v in load[:7]), *grads], [y3, *(v[0] for v in load3[:7]), *grads3], strict=True
    ):
        torch.testing.assert_close(a, b)
    routing = moe.router(x.flatten(0, 1), padding.flatten())
    assert (routing.ids_TK[padding.flatten()] == -1).all() and (routing.ids_TK[keep.flatten()] >= 0).all()


def test_gradient_matches_finite_differences_of_the_formula():
    """Through the weights, the balancing loss and the z-loss at once."""
    cfg = config(experts=4, z_coeff=0.3, balance="sequence", renormalize=True, scaling=1.7)
    r = router(3, cfg)
    x, c = torch.randn(10, 3), torch.randn(10, 2)
    routing = r(x)
    load = measure(routing, 2, None)
    (grad,) = torch.autograd.grad((routing.weights_TK * c).sum() + balance_loss(cfg, load), r.weight)
    ids = routing.ids_TK.long()

    def formula(w_ED):
        logits = x.double() @ w_ED.T
        chosen = logits.softmax(-1).gather(1, ids)
        weights = 1.7 * chosen / chosen.sum(-1, keepdim=True)
        aux, z = naive_losses(logits.view(2, 5, 4), ids.view(2, 5, 2), torch.ones(2, 5), "sequence")
        return (weights * c.double()).sum() + aux + 0.3 * z

    w = r.weight.detach().double()
    eps = 1e-6
    want = torch.zeros_like(w)
    for i in range(w.numel()):
        step = torch.zeros_like(w)
        step.view(-1)[i] = eps
        want.view(-1)[i] = (formula(w + step) - formula(w - step)) / (2 * eps)
    torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-5)


# ---- balance ----


def routed(cfg: MoEConfig, B=4, S=9, padded=0.3, dim=5) -> tuple[Routing, torch.Tensor]:
    """A routing of B sequences whose logits are leaves, and its padding [B, S]."""
    padding = torch.rand(B, S) < padded
    routing = router(dim, cfg, scale=1.5)(torch.randn(B * S, dim), padding.flatten())
    return routing._replace(logits_TE=routing.logits_TE.detach().requires_grad_()), padding


@pytest.mark.parametrize("scope", ["sequence", "batch", "global"])
def test_losses_equal_the_loop(scope):
    cfg = config(balance=scope, balance_coeff=0.7, z_coeff=0.2)
    routing, padding = routed(cfg)
    loss = balance_loss(cfg, measure(routing, 4, padding.flatten()))
    exact = routing.logits_TE.detach().double().requires_grad_()
    aux, z = naive_losses(exact.view(4, 9, 6), routing.ids_TK.view(4, 9, 2), ~padding, scope)
    want = 0.7 * aux + 0.2 * z
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    grad = torch.autograd.grad(loss, routing.logits_TE)[0]
    grad_want = torch.autograd.grad(want, exact)[0]
    assert ((grad - grad_want).norm() / grad_want.norm()).item() < 1e-5


def test_balanced_routing_costs_the_coefficient():
    """1, the least value, at uniform probabilities; E/K when one set of K experts takes all."""
    cfg = config(experts=4, top_k=2)
    ids = torch.tensor([[0, 1], [2, 3]]).repeat(5, 1)
    assert balance_loss(cfg, measure(Routing(ids, ids, torch.zeros(10, 4)), 1, None)).item() == pytest.approx(
        1.0
    )
    collapsed = torch.tensor([[50.0, 50.0, 0.0, 0.0]]).repeat(10, 1)
    loss = balance_loss(cfg, measure(Routing(ids, torch.tensor([[0, 1]]).repeat(10, 1), collapsed), 1, None))
    # exp(50 - logsumexp) carries logsumexp's rounding, 2e-6
    assert loss.item() == pytest.approx(2.0, rel=1e-5)


@pytest.mark.parametrize("scope", ["sequence", "batch", "global"])
@pytest.mark.parametrize("padded", [0.0, 0.3])
def test_one_sequence_has_one_scope(scope, padded):
    cfg = config(balance=scope)
    routing, padding = routed(cfg, B=1, S=30, padded=padded)
    load = measure(routing, 1, padding.flatten())
    assert balance_loss(cfg, load).item() == pytest.approx(balance_loss(config(), load).item(), rel=1e-6)


@pytest.mark.parametrize("split", [(1, 1, 1, 1), (2, 2), (3, 1)])
def test_sequence_and_z_loss_do_not_see_the_split(split):
    """Parts add up to the whole: every layout and number of micro-batches is such a split."""
    cfg = config(z_coeff=0.4)
    routing, padding = routed(cfg)
    whole = measure(routing, 4, padding.flatten())
    totals = totals_of(whole)
    parts = 0.0
    start = 0
    for n in split:
        rows = slice(start * 9, (start + n) * 9)
        part = Routing(*(t[rows] for t in routing[:3]))
        parts += balance_loss(cfg, measure(part, n, padding.flatten()[rows]), totals)
        start += n
    want = balance_loss(cfg, whole)
    torch.testing.assert_close(parts, want)
    torch.testing.assert_close(
        *(torch.autograd.grad(v, routing.logits_TE, retain_graph=True)[0] for v in (parts, want))
    )


def parts_of(routing, padding, sizes):
    """The loads of consecutive groups of sequences."""
    S = padding.shape[1]
    start = 0
    loads = []
    for n in sizes:
        rows = slice(start * S, (start + n) * S)
        loads.append(measure(Routing(*(t[rows] for t in routing[:3])), n, padding.flatten()[rows]))
        start += n
    return loads


def test_batch_loss_weighs_micro_batches_by_tokens():
    cfg = config(balance="batch")
    routing, padding = routed(cfg)
    loads = parts_of(routing, padding, (1, 3))
    totals = totals_of(measure(routing, 4, padding.flatten()))
    got = sum(balance_loss(cfg, load, totals) for load in loads)
    want = sum(balance_loss(cfg, load) * load.tokens_B.sum() for load in loads) / totals.tokens
    torch.testing.assert_close(got, want)


def test_global_loss_of_two_ranks_is_the_loss_of_their_union():
    cfg = config(balance="global", z_coeff=0.2)
    routing, padding = routed(cfg)
    whole = measure(routing, 4, padding.flatten())
    loads = parts_of(routing, padding, (3, 1))
    shares = []
    for mine, other in (loads, loads[::-1]):
        rank = Balancer(cfg)
        rank.all_reduce = lambda t, other=other: t + other.counts_BE.sum(0)
        shares.append(rank.loss(stack([mine]), totals_of(whole)))
    want = balance_loss(replace(cfg, balance="batch"), whole)
    torch.testing.assert_close(sum(shares), want)
    grads = [torch.autograd.grad(v, routing.logits_TE, retain_graph=True)[0] for v in (sum(shares), want)]
    torch.testing.assert_close(*grads)


def test_global_counts_run_over_a_steps_micro_batches():
    """Micro-batch m is weighed with the counts of micro-batches 1 to m; a new step starts from zero."""
    cfg = config(balance="global")
    routing, padding = routed(cfg)
    loads = parts_of(routing, padding, (1, 1, 2))
    totals = totals_of(measure(routing, 4, padding.flatten()))
    balancer = Balancer(cfg)
    for _ in range(2):
        balancer.start_step()
        counts = torch.zeros(6)
        for load in loads:
            counts = counts + load.counts_BE.sum(0)
            want = 6 * (counts / counts.sum() * load.probs_BE.sum(0)).sum() / totals.tokens
            torch.testing.assert_close(balancer.loss(stack([load]), totals), want)


def test_a_call_that_is_all_remembers_nothing():
    """Without totals each call is a step of its own.

    A plain training loop gets the same loss for the same batch.
    """
    cfg = config(balance="global")
    first, second = (measure(routed(cfg, padded=0.0)[0], 4, None) for _ in range(2))
    balancer = Balancer(cfg)
    want = balancer.loss(stack([first]), None)
    balancer.loss(stack([second]), None)
    assert torch.equal(balancer.loss(stack([first]), None), want)


def test_log_equals_a_recount():
    cfg = config()
    balancer = Balancer(cfg)
    recount = torch.zeros(2, 6, dtype=torch.long)
    entropies = [[], []]
    dropped = [0, 0]
    assert balancer.read_log() is None
    for _ in range(3):  # micro-batches
        loads = []
        for layer in range(2):
            routing, padding = routed(cfg)
            routing.ids_TK[0] = torch.tensor([-1, 3])  # a choice that reached no expert
            loads.append(measure(routing, 4, padding.flatten()))
            keep = ~padding.flatten()
            live = routing.ids_TK[keep].long()
            recount[layer] += one_hot(live[live >= 0], 6).sum(0)
            dropped[layer] += (live < 0).sum().item()
            probs = routing.logits_TE[keep].detach().double().softmax(-1)
            entropies[layer].append(-(probs * probs.log()).sum(-1))
        balancer.record(stack(loads))
    stats = balancer.read_log()
    assert torch.equal(stats.counts_LE.long(), recount) and stats.dropped_L.tolist() == dropped
    want = torch.stack([torch.cat(e).mean() for e in entropies])
    torch.testing.assert_close(stats.entropy_L.double(), want, rtol=1e-5, atol=0)
    assert balancer.read_log() is None


@pytest.mark.parametrize("padded", [0.0, 0.4])
def test_hugging_faces_loss_where_it_is_right(padded):
    """For one layer, with counts over the batch.

    Theirs does not divide by K, and pools layers (transformers #31464), so it is right for one layer only.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    cfg = config(balance="batch", top_k=3)
    routing, padding = routed(cfg, padded=padded)
    theirs = load_balancing_loss_func((routing.logits_TE,), 6, 3, (~padding).long() if padded else None)
    ours = balance_loss(cfg, measure(routing, 4, padding.flatten()))
    assert ours.item() == pytest.approx(theirs.item() / 3, rel=1e-5)


def test_layers_add_up_each_on_its_own_counts():
    """Pooled layers, as in Hugging Face, would hide a collapse.

    Two layers that collapse onto different experts would be called balanced.
    """
    cfg = config(balance="batch", balance_coeff=0.5)
    loads = [measure(routed(cfg, padded=0.0)[0], 4, None) for _ in range(3)]
    together = Balancer(cfg).loss(stack(loads), None)
    torch.testing.assert_close(together, sum(balance_loss(cfg, load) for load in loads))


# ---- the layer ----


def layer(dim: int, cfg: MoEConfig) -> MoE:
    """fp64 weights so large that every nonlinearity bends."""
    moe = MoE(dim, cfg).double()
    with torch.no_grad():
        for p in moe.parameters():
            p.normal_(0, 0.5)
    return moe


def naive_layer(moe: MoE, x_TD, routing: Routing):
    """One token and one expert at a time."""
    rows = []
    for t, x in enumerate(x_TD):
        y = torch.zeros_like(x)
        for weight, e in zip(routing.weights_TK[t].double(), routing.ids_TK[t].tolist(), strict=True):
            gate, up = (moe.experts.gate_up[e] @ x).chunk(2)
            y = y + weight * (moe.experts.down[e] @ (gate * gate.sigmoid() * up))
        if moe.shared is not None:
            gate, up = (moe.shared.gate_up.weight @ x).chunk(2)
            shared = moe.shared.down.weight @ (gate * gate.sigmoid() * up)
            y = y + (
                shared if moe.shared_gate is None else shared * (moe.shared_gate.weight[0] @ x).sigmoid()
            )
        rows.append(y)
    return torch.stack(rows)


LAYERS = {
    "plain": {},
    "mixtral": {"softmax": "after"},
    "not renormalised, scaled": {"renormalize": False, "scaling": 1.5},
    "one expert": {"experts": 1, "top_k": 1},
    "all experts": {"top_k": 6},
    "top-1": {"top_k": 1, "renormalize": False},
    "most experts empty": {"experts": 40, "top_k": 1, "renormalize": False},
    "shared": {"shared_dim": 3},
    "shared, gated": {"shared_dim": 3, "shared_gate": True},
}


@pytest.mark.parametrize("kw", LAYERS.values(), ids=LAYERS)
def test_layer_equals_the_loop(kw):
    cfg = config(**kw)
    moe = layer(7, cfg)
    x = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    c = torch.randn_like(x)
    y = moe(x)
    routing = moe.router(x.flatten(0, 1))
    want = naive_layer(moe, x.flatten(0, 1), routing).view_as(x)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    inputs = [x, *moe.parameters()]
    # a gradient that a fp64 input gets through the router has passed through fp32
    for a, b in zip(*(torch.autograd.grad((v * c).sum(), inputs) for v in (y, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    empty = torch.bincount(routing.ids_TK.flatten(), minlength=cfg.experts) == 0
    moe(x).sum().backward()
    assert (
        moe.experts.gate_up.grad[empty].count_nonzero() == moe.experts.down.grad[empty].count_nonzero() == 0
    )


def test_flat_and_batched_inputs_agree():
    moe = layer(5, config())
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    y = moe(x)
    load = moe.load
    assert torch.equal(moe(x.flatten(0, 1)).view_as(x), y)
    assert load.counts_BE.shape == (4, 6) and moe.load.counts_BE.shape == (1, 6)
    assert torch.equal(load.counts_BE.sum(0), moe.load.counts_BE[0])


def test_gated_shared_expert_equals_qwen2_moe():
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    hf_cfg = Qwen2MoeConfig(
        hidden_size=8,
        moe_intermediate_size=5,
        shared_expert_intermediate_size=7,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        experts_implementation="eager",
    )
    hf = Qwen2MoeSparseMoeBlock(hf_cfg)
    with torch.no_grad():
        for p in hf.parameters():
            p.normal_(0, 0.5)
    moe = MoE(8, config(renormalize=False, shared_dim=7, shared_gate=True))
    moe.load_state_dict(
        {
            "router.weight": hf.gate.weight,
            "experts.gate_up": hf.experts.gate_up_proj,
            "experts.down": hf.experts.down_proj,
            "shared.gate_up.weight": torch.cat(
                [hf.shared_expert.gate_proj.weight, hf.shared_expert.up_proj.weight]
            ),
            "shared.down.weight": hf.shared_expert.down_proj.weight,
            "shared_gate.weight": hf.shared_expert_gate.weight,
        }
    )
    x = torch.randn(2, 9, 8)
    torch.testing.assert_close(moe(x), hf(x))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 3, 5)])
def test_no_tokens(shape):
    cfg = config(shared_dim=3, z_coeff=0.1)
    moe = MoE(5, cfg)
    x = torch.zeros(shape, requires_grad=True)
    y = moe(x)
    loss = y.sum() + balance_loss(cfg, moe.load, Totals(*torch.ones(3)))
    loss.backward()
    assert y.shape == shape and loss.item() == 0
    assert all(p.grad is not None and p.grad.count_nonzero() == 0 for p in moe.parameters())
    assert balance_loss(cfg, moe.load).item() == 0  # as all there is


def test_bf16_in_bf16_out():
    moe = MoE(16, config(shared_dim=8, shared_gate=True, ffn_dim=24))
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(p.normal_(0, 0.3).bfloat16())
    x = torch.randn(50, 16).bfloat16()
    want = moe(x.float())
    y = moe.bfloat16()(x)
    assert y.dtype == torch.bfloat16 and moe.load.probs_BE.dtype == torch.float32
    # 2^-9 a rounding: h, silu(gate) * up, the sum of the experts, the shared expert, their sum
    assert ((y.float() - want).norm() / want.norm()).item() < 5 * 2**-9
