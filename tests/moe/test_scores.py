"""Scores and weights: formulas in fp64, gradients, scores that vanish, Tutel's cosine router, noise, fp64.

next: tests/moe/test_selection.py
"""

import math
from dataclasses import replace

import pytest
import router_policies as plain
import torch
import torch.nn.functional as F
from tiers import slow_but
from torch.autograd import gradcheck

from tmoe.config import routing_choices
from tmoe.config.check import ConfigError
from tmoe.config.model import MoEConfig
from tmoe.moe.balance import measure
from tmoe.moe.layer import MoE
from tmoe.moe.router import Router
from tmoe.moe.select.scores import SCORES, normalised

FIXED = [[1.0, 2.0, 0.0, -1.0], [0.5, 0.0, 1.5, 1.0], [2.0, 1.9, -1.0, 0.0], [0.0, 0.0, 3.0, 1.0]]
LOGITS = [name for name in SCORES if name != "cosine"]  # made of the logits alone


def of_logits(cfg: MoEConfig) -> Router:
    """A router whose logits are its input."""
    router = Router(cfg.outputs, cfg)
    with torch.no_grad():
        router.weight.copy_(torch.eye(cfg.outputs))
    return router


def as_dict(routing, t: int) -> dict[int, float]:
    """A token's experts and their weights."""
    pairs = zip(routing.ids_TK[t].tolist(), routing.weights_TK[t].tolist(), strict=True)
    return {e: w for e, w in pairs if e >= 0}


def test_every_score_has_a_formula_and_the_facts_that_settings_ask_for():
    assert SCORES.keys() == routing_choices.SCORES.keys()
    logits = torch.randn(5, 7, dtype=torch.float64)
    for name, score in SCORES.items():
        assert routing_choices.SCORES[name].softmax == torch.allclose(score.of(logits), logits.softmax(-1))


@pytest.mark.parametrize(
    ("score", "row"),
    [("softmax", (0.2689, 0.7311)), ("sigmoid", (0.4536, 0.5464)), ("sqrtsoftplus", (0.44, 0.56))],
)
def test_fixed_values(score, row):
    """FEATURES, section 3, row 0: experts 0 and 1; the softmax's are .2369 and .6439 divided by their sum."""
    cfg = MoEConfig(experts=4, top_k=2, ffn_dim=4, score=score)
    got = as_dict(of_logits(cfg)(torch.tensor(FIXED)), 0)
    assert (got[0], got[1]) == pytest.approx(row, abs=5e-3 if score == "sqrtsoftplus" else 5e-5)


POLICIES = [
    (score, softmax, renormalize, groups, group_score, K)
    for score in LOGITS
    for softmax in ("before", "after")
    for renormalize in (True, False)
    for groups in ((1, 1), (4, 2))
    for group_score in ("max", "top2", "top")
    for K in (1, 2, 4, 6)
    if (softmax == "before" or score == "softmax") and (groups != (1, 1) or group_score == "max")
]


@pytest.mark.parametrize(
    ("score", "softmax", "renormalize", "groups", "group_score", "K"),
    slow_but(lambda case: case[-1] in (2, 6), POLICIES),
    ids=str,
)
def test_choice_and_weights_follow_megatrons_formulas(score, softmax, renormalize, groups, group_score, K):
    for biased in (False, True) if softmax == "before" else (False,):
        cfg = MoEConfig(
            experts=16, top_k=K, ffn_dim=4, score=score, softmax=softmax, renormalize=renormalize,
            scaling=1.7, groups=groups[0], top_groups=groups[1], group_score=group_score, choice_bias=biased,
        )  # fmt: skip
        torch.manual_seed(K)
        router = of_logits(cfg)
        logits = 2 * torch.randn(30, 16)
        bias = None
        if biased:
            router.choice_bias.normal_(0, 0.2)
            bias = router.choice_bias.tolist()
        got = router(logits)
        for t, row in enumerate(logits.tolist()):
            assert as_dict(got, t) == pytest.approx(plain.top_k(row, cfg, bias), rel=2e-5)


@pytest.mark.parametrize("K", range(1, 9))
def test_any_k_in_any_call(K):
    """From 1 to E, without another router; one k is the configured one's."""
    cfg = MoEConfig(experts=8, top_k=2, ffn_dim=4)
    router = of_logits(cfg)
    logits = torch.randn(20, 8)
    got = router(logits, top_k=K)
    other = of_logits(replace(cfg, top_k=K))(logits)
    assert torch.equal(got.ids_TK, other.ids_TK) and torch.equal(got.weights_TK, other.weights_TK)
    assert got.ids_TK.shape == (20, K)


def test_a_k_that_cannot_be_chosen_is_named():
    router = of_logits(MoEConfig(experts=8, top_k=2, ffn_dim=4, groups=4, top_groups=2))
    for k in (0, 5, -1, 2.0, True):
        with pytest.raises(ValueError, match=r"top_k: got .*, valid is a whole number from 1 to 4"):
            router(torch.randn(3, 8), top_k=k)


@pytest.mark.parametrize("score", LOGITS)
@pytest.mark.parametrize("low", [-30.0, -60.0, -90.0, -300.0])
def test_trap_sigmoid_scores_below_the_epsilon(score, low):
    """Megatron divides by the sum + 1e-20: at logits of -60 the weights add up to 1.4e-6, here to 1."""
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 3.0, 1.0, 2.0]]) + low
    logits.requires_grad_()
    cfg = MoEConfig(experts=4, top_k=3, ffn_dim=4, score=score)
    got = of_logits(cfg)(logits)
    torch.testing.assert_close(got.weights_TK.sum(-1), torch.ones(2), rtol=1e-6, atol=0)
    half = 0.5 if score == "sqrtsoftplus" else 1.0  # far below 0 scores are exp(x) or exp(x / 2)
    want = (half * logits.gather(1, got.ids_TK.long())).softmax(-1)
    torch.testing.assert_close(got.weights_TK, want, rtol=1e-4, atol=1e-6)
    (gradient,) = torch.autograd.grad(got.weights_TK[:, 0].sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(want[:, 0].sum(), logits)
    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-6)
    load = measure(got, 1, None, score)  # and so the shares of the balancing losses
    assert load.probs_BE.sum().item() == pytest.approx(2.0, rel=5e-5)


@pytest.mark.parametrize("score", LOGITS)
def test_shares_of_the_losses(score):
    cfg = MoEConfig(experts=5, top_k=2, ffn_dim=4, score=score)
    logits = 2 * torch.randn(12, 5)
    load = measure(of_logits(cfg)(logits), 1, None, score)
    want = [sum(column) for column in zip(*(plain.share(row, score) for row in logits.tolist()), strict=True)]
    assert load.probs_BE[0].tolist() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("score", SCORES)
def test_formulas_and_gradients_in_fp64(score):
    logits = torch.linspace(-40, 40, 33, dtype=torch.float64)[:, None].repeat(1, 2).requires_grad_()
    formula = SCORES[score]
    if score == "sqrtsoftplus":
        want = torch.tensor([math.sqrt(math.log1p(math.exp(v))) for v in logits[:, 0].tolist()])
        torch.testing.assert_close(formula.of(logits)[:, 0], want.double(), rtol=1e-7, atol=0)
    small = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(formula.of, (small,)) and gradcheck(formula.log, (small,))
    assert gradcheck(lambda x: normalised(formula.of(x), formula.log(x)), (small,))
    here = torch.rand(4, 5) < 0.6
    here[0] = False
    assert gradcheck(lambda x: normalised(formula.of(x), formula.log(x), here), (small,))
    assert not normalised(formula.of(small), formula.log(small), here)[~here].any()


@pytest.mark.parametrize(
    ("softmax", "score"),
    [
        (w, s)
        for w in ("before", "after")
        for s in SCORES
        if w == "before" or routing_choices.SCORES[s].softmax
    ],
)
def test_router_gradients_in_fp64(score, softmax):
    cfg = MoEConfig(
        experts=6, top_k=3, ffn_dim=4, score=score, softmax=softmax, router_dtype="fp64", cosine_dim=4,
        router_bias=True, scaling=1.3,
    )  # fmt: skip
    router = Router(5, cfg).double()
    for p in router.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    names = list(dict(router.named_parameters()))

    def weights(x, *tensors):
        routing = torch.func.functional_call(router, dict(zip(names, tensors, strict=True)), (x,))
        assert routing.weights_TK.dtype == routing.logits_TE.dtype == torch.float64
        return routing.weights_TK, routing.logits_TE

    assert gradcheck(weights, (x, *router.parameters()))


def test_fp64_rounds_once_and_at_the_end():
    """Under bf16 the choice is that of an fp64 product of the same inputs; what leaves is fp32."""
    cfg = MoEConfig(experts=64, top_k=8, ffn_dim=4, router_dtype="fp64")
    router = Router(32, cfg).bfloat16()
    torch.nn.init.normal_(router.weight)
    x = torch.randn(300, 32).bfloat16()
    got = router(x)
    exact = x.double() @ router.weight.double().T
    assert torch.equal(got.logits_TE, exact.float()) and got.weights_TK.dtype == torch.float32
    want, ids = exact.softmax(-1).topk(8)
    assert torch.equal(got.ids_TK.long(), ids)
    assert torch.equal(got.weights_TK, (want / want.sum(-1, keepdim=True)).float())


# ---- cosine ----


def test_cosine_is_tutels():
    """Cosines of a projection with one vector an expert, times exp(min(t, log 100)), then a softmax."""
    cfg = MoEConfig(experts=6, top_k=2, ffn_dim=4, score="cosine", cosine_dim=5, renormalize=False)
    moe = MoE(8, cfg)
    router = moe.router
    assert router.log_scale.tolist() == [0.0] and router.projection.bias.eq(0).all()
    x = torch.randn(40, 8)
    for temperature in (
        math.log(1 / 0.5),
        math.log(1 / 0.07),
        9.0,
    ):  # Tutel's parameter; it begins with the first
        with torch.no_grad():
            router.log_scale.fill_(temperature - math.log(1 / cfg.cosine_temperature))
        projected = F.normalize(x.double() @ router.projection.weight.double().T, dim=1)
        logits = projected @ F.normalize(router.weight.double(), dim=1).T
        logits = logits * math.exp(min(temperature, math.log(100.0)))
        got = router(x)
        torch.testing.assert_close(got.logits_TE.double(), logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            got.weights_TK.double(), logits.softmax(-1).topk(2).values, rtol=1e-4, atol=1e-6
        )


def test_cosine_trains_its_three_parameters_and_not_beyond_the_clamp():
    cfg = MoEConfig(experts=6, top_k=2, ffn_dim=4, score="cosine", cosine_dim=5)
    moe = MoE(8, cfg)
    moe(torch.randn(9, 8)).square().sum().backward()
    grads = {name: p.grad.abs().sum().item() for name, p in moe.router.named_parameters()}
    assert set(grads) == {"weight", "log_scale", "projection.weight", "projection.bias"}
    assert all(v > 0 for v in grads.values())
    with torch.no_grad():
        moe.router.log_scale.fill_(5.0)  # a scale of 297
    moe.zero_grad()
    moe(torch.randn(9, 8)).square().sum().backward()
    assert moe.router.log_scale.grad.item() == 0


# ---- noise ----


def test_noise_is_tutels_and_only_in_training():
    """logits + noise * normal / E; what leaves are the noisy logits, the clean ones beside them."""
    cfg = MoEConfig(experts=8, top_k=2, ffn_dim=4, noise=2.0)
    router = of_logits(cfg)
    logits = torch.randn(6000, 8)
    got = router.train()(logits)
    assert torch.equal(got.clean_TE, logits)
    spread = (got.logits_TE - logits).std().item()
    assert spread == pytest.approx(2.0 / 8, rel=5 / math.sqrt(2 * logits.numel()))
    assert torch.equal(got.ids_TK.long(), got.logits_TE.topk(2).indices)
    assert torch.equal(router.eval()(logits).logits_TE, logits)


# ---- settings ----


@pytest.mark.parametrize(
    ("kw", "words"),
    [
        (dict(score="relu"), "--model.moe.score=relu: must be one of softmax, sigmoid, sqrtsoftplus, cosine"),
        (
            dict(softmax="after", score="sqrtsoftplus"),
            "--model.moe.softmax=after: not with --model.moe.score=sqrt",
        ),
        (dict(router_dtype="bf16"), "--model.moe.router-dtype=bf16: must be one of fp32, fp64"),
        (dict(noise=-1.0), "--model.moe.noise=-1.0: must be at least 0"),
        (dict(cosine_dim=0), "--model.moe.cosine-dim=0: must be at least 1"),
        (dict(cosine_temperature=0.0), "--model.moe.cosine-temperature=0.0: must be positive"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(kw, words):
    with pytest.raises(ConfigError) as error:
        MoEConfig(**kw)
    assert str(error.value).startswith(words)
