"""Losses of post-training: the values of the published formulas, gradients, what adds up over a step.

next: test_loss_shares.py
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tmoe import ops
from tmoe.model.loss import cross_entropy_sum
from tmoe.post import losses
from tmoe.post.losses.pairs import Pairs, log1mexp, pairs_of
from tmoe.post.losses.policy import Rollouts
from tmoe.post.losses.sequences import (
    Completions,
    advantages,
    baseline_of,
    gspo,
    has_unequal_rewards,
    kto,
    overlong_penalty,
    rloo,
    without_truncated,
)
from tmoe.post.losses.sums import StepCounts, add_up, count, sequence_sums, token_weights, trained_tokens
from tmoe.post.losses.tokens import (
    cispo,
    clipped,
    correction,
    document_lengths,
    dppo,
    is_clipped,
    kl,
    neftune,
    sft,
)


def t(*values, **how):
    return torch.tensor(values, dtype=torch.float64, **how)


def near(got, *want):
    torch.testing.assert_close(got.double().flatten(), t(*want), rtol=0, atol=1e-5)


def pair(**changes):
    """A pair of 5 and 8 tokens."""
    given = dict(chosen=t(-10), rejected=t(-12), chosen_tokens=t(5), rejected_tokens=t(8))
    return Pairs(**given | dict(chosen_ref=t(-11), rejected_ref=t(-11.5)) | changes)


# ---- values ----


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("sigmoid", dict(beta=0.1), 0.620957),
        ("sigmoid", dict(beta=0.1, smoothing=0.1), 0.635957),
        ("robust", dict(beta=0.1, noise=0.1), 0.602207),
        ("hinge", dict(beta=0.1), 0.85),
        ("ipo", dict(beta=0.1), 22.4439),
        ("simpo", dict(beta=2.0, gamma=1.0), 2.126928),
        ("orpo", dict(weight=0.1), 2.104206),
    ],
)
def test_preferences_have_the_published_values(name, options, value):
    formula = losses.LOSSES[name].formula
    assert abs(formula(pair(), **options).item() - value) < (1e-5 if name != "ipo" else 5e-5)
    if name == "ipo":
        near(formula(pair(), **options), 4.7375**2)
    if name == "orpo":
        near((formula(pair()) - 2.0) / 0.1, 1.042058)
    if losses.LOSSES[name].needs_reference:
        with pytest.raises(ValueError, match="needs the reference's log-probs"):
            formula(pair(chosen_ref=None), **options)


def test_kto_has_the_published_values():
    both = Completions(t(-10, -12), t(-11, -11.5), torch.tensor([True, False]))
    near(kto(both, t(0.3)[0]), 0.482507, 0.480011)
    near(kto(both, t(0.3)[0], 0.1, 2.0, 0.5), 2 * 0.482507, 0.5 * 0.480011)
    assert baseline_of(t(6.0)[0], t(20)[0]) == 0.3 and baseline_of(t(-6.0)[0], t(20)[0]) == 0


def test_preferences_begin_at_ln_2():
    same = pair(chosen_ref=t(-10), rejected_ref=t(-12))
    for name in ("sigmoid", "robust"):
        assert abs(losses.LOSSES[name].formula(same).item() - math.log(2)) < 1e-15


def test_advantages_have_the_published_values():
    rewards, prompts = t(1, 0, 0, 1), torch.tensor([7, 7, 7, 7])
    near(advantages(rewards, prompts), 0.865875, -0.865875, -0.865875, 0.865875)
    near(advantages(rewards, prompts, epsilon=1e-6), 0.866024, -0.866024, -0.866024, 0.866024)
    near(advantages(rewards, prompts, "mean"), 0.5, -0.5, -0.5, 0.5)
    near(advantages(rewards, prompts, "leave-one-out"), 2 / 3, -2 / 3, -2 / 3, 2 / 3)
    with pytest.raises(ValueError, match="baseline='median': must be normalised, mean or leave-one-out"):
        advantages(rewards, prompts, "median")


def test_groups_are_found_by_prompt_and_none_counts_nowhere():
    nan = float("nan")
    rewards = t(1, 5, 0, nan, 0, 5, 1, 2)
    prompts = torch.tensor([3, 9, 3, 3, 3, 9, 3, 4])
    near(advantages(rewards, prompts, "mean"), 0.5, 0, -0.5, 0, -0.5, 0, 0.5, 0)
    near(advantages(rewards, prompts)[[0, 2, 3, 4, 6, 7]], 0.865875, -0.865875, 0, -0.865875, 0.865875, 0)
    assert has_unequal_rewards(rewards, prompts).tolist() == [
        True,
        False,
        True,
        True,
        True,
        False,
        True,
        False,
    ]
    assert has_unequal_rewards(t(nan, nan), torch.tensor([1, 1])).tolist() == [False, False]
    assert len(advantages(t(), torch.tensor([], dtype=torch.long))) == 0


def test_kl_has_the_published_values():
    lp, ref = t(-1), t(-1.5)
    near(torch.cat([kl(lp, ref, name) for name in ("k1", "k2", "k3")]), 0.5, 0.125, 0.106531)
    assert all(kl(t(-100), t(-1), name).isfinite().all() for name in ("k1", "k2", "k3"))
    with pytest.raises(ValueError, match="estimator='k4': must be k1, k2 or k3"):
        kl(lp, ref, "k4")


def test_gradients_of_kl_estimators_in_the_mean():
    """Over all tokens of a softmax, weighed by the policy: k2's is the gradient of the KL, k1's is 0."""
    z = torch.randn(50, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(50, dtype=torch.float64).log_softmax(0)
    lp = z.log_softmax(0)
    (want,) = torch.autograd.grad((lp.exp() * (lp - ref)).sum(), z, retain_graph=True)
    grads = {
        name: torch.autograd.grad((lp.detach().exp() * kl(lp, ref, name)).sum(), z, retain_graph=True)[0]
        for name in ("k1", "k2", "k3")
    }
    torch.testing.assert_close(grads["k2"], want)
    assert grads["k1"].abs().max() < 1e-12 < 0.1 * want.norm() < (grads["k3"] - want).norm()


def test_gspo_takes_the_mean_of_a_sequence():
    new, old = t(-1, -2, -0.5), t(-1.2, -1.8, -0.8)
    free = dict(low=1e9, high=1e9)
    near(-gspo(new.sum()[None], old.sum()[None], t(3), t(1), **free), 1.105171)
    near(-rloo(new.sum()[None], old.sum()[None], t(3), t(1), **free), 1.349859)
    assert gspo(new.sum()[None], old.sum()[None], t(3), t(1)).item() == pytest.approx(-1.0004)


def test_gspo_is_grpo_with_the_sequences_ratio_at_each_token():
    new = torch.randn(6, dtype=torch.float64, requires_grad=True)
    old, A, low, high = new.detach() + 0.01 * t(1, -2, 3, -1, 2, 1), -0.7, 0.1, 0.1
    a_sequence = gspo(new.sum()[None], old.sum()[None], t(6), t(A), low, high).sum()
    s = (new - old).mean().exp().detach()
    rho = s * (new - new.detach()).exp()
    a_token = -torch.minimum(rho * A, rho.clamp(1 - low, 1 + high) * A).mean()
    torch.testing.assert_close(a_sequence, a_token)
    for a, b in zip(*(torch.autograd.grad(x, new) for x in (a_sequence, a_token)), strict=True):
        torch.testing.assert_close(a, b)


def test_clipped_by_hand():
    """rho 1.5, 1.25 and 0.5, with either sign of the advantage."""
    old = t(-1, -1, -1, -1, -1, -1)
    lp = old + t(1.5, 1.25, 0.5, 1.5, 1.25, 0.5).log()
    A = t(2, 2, 2, -2, -2, -2)
    near(clipped(lp, old, A), -2.4, -2.4, -1.0, 3.0, 2.5, 1.6)
    near(clipped(lp, old, A, high=0.28), -2.56, -2.5, -1.0, 3.0, 2.5, 1.6)
    near(clipped(lp, old, A, dual=1.3), -2.4, -2.4, -1.0, 2.6, 2.5, 1.6)
    near(clipped(lp, old, A, cap=1.3), -2.4, -2.4, -1.0, 2.6, 2.5, 1.6)
    assert is_clipped(lp, old, A).tolist() == [True, True, False, False, False, True]
    assert clipped(t(0), t(-1e4), t(0)).item() == 0  # not infinity times 0


def test_cispo_and_dppo_by_hand():
    lp = t(-1, -1, -0.1, -2).requires_grad_()
    old = t(-1.5, -3, -0.5, -0.5)
    A = t(1, 2, 1, -1)
    near(cispo(lp, old, A), math.exp(0.5), 2 * 5, math.exp(0.4) * 0.1, -math.exp(-1.5) * 2)
    (grad,) = torch.autograd.grad(cispo(lp, old, A).sum(), lp)
    near(grad, -math.exp(0.5), -10, -math.exp(0.4), math.exp(-1.5))
    moved = (lp.exp() - old.exp()).tolist()
    assert moved[0] < 0.2 < min(moved[1], moved[2]) and moved[3] < -0.2
    near(dppo(lp, old, A), -math.exp(0.5) + 0.00025, 0.004, 0.00016, 0.00225)
    (grad,) = torch.autograd.grad(dppo(lp, old, A).sum(), lp)
    near(grad, -math.exp(0.5) + 0.001, 0.004, 0.0008, -0.003)


def test_overlong_answers():
    near(overlong_penalty(torch.tensor([10, 80, 90, 100, 500]), 100, 20), 0, 0, -0.5, -1, -1)
    mask, segments = torch.tensor([1, 0, 1, 1, 1]).bool(), torch.tensor([0, 0, 1, 1, 2])
    got = without_truncated(mask, segments, torch.tensor([False, True, False]))
    assert got.tolist() == [True, False, False, False, True]
    with pytest.raises(ValueError, match="margin=0: must be above 0 and at most longest=5"):
        overlong_penalty(torch.ones(1), 5, 0)


def test_corrections_are_of_tokens():
    """Eighty tokens with a ratio of .993: the sequence's product is .57, the mean of the tokens' stays."""
    train = torch.full((80,), -1.0, dtype=torch.float64)
    rollout = train - math.log(0.993)
    assert correction(train, rollout).mean().item() == pytest.approx(0.993)
    assert (train - rollout).sum().exp().item() == pytest.approx(0.570, abs=1e-3)
    lp = t(0.2, 3.0, 0.4, 1.0).log()
    near(correction(lp, t(0, 0, 0, 0)), 0.2, 2.0, 0.4, 1.0)
    near(correction(lp, t(0, 0, 0, 0), how="mask"), 0, 0, 0, 1.0)
    assert not correction(lp.requires_grad_(), t(0, 0, 0, 0)).requires_grad
    for wrong, words in ((dict(cap=1.0), "cap=1.0"), (dict(how="drop"), "how='drop'")):
        with pytest.raises(ValueError, match=words):
            correction(lp, lp, **wrong)


def test_dft_weighs_by_probability_without_its_gradient():
    lp = t(-0.5, -3).requires_grad_()
    near(sft(lp), 0.5, 3)
    near(sft(lp, dft=True), 0.5 * math.exp(-0.5), 3 * math.exp(-3))
    (grad,) = torch.autograd.grad(sft(lp, dft=True).sum(), lp)
    near(grad, -math.exp(-0.5), -math.exp(-3))


def test_sft_is_the_loss_of_pretraining():
    h, weight, targets, _, _ = rollouts()
    losses_of = (
        ops.token_loss(h, weight, targets, sft).loss.float(),
        cross_entropy_sum(h, weight, targets),
    )
    grads = [torch.autograd.grad(loss, (h, weight)) for loss in losses_of]
    torch.testing.assert_close(*losses_of)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_neftune_goes_by_the_length_of_the_document():
    documents = torch.tensor([[0, 0, 0, 1, 1], [2, 2, 2, 2, 5]])
    lengths = document_lengths(documents)
    assert lengths.tolist() == [[3, 3, 3, 2, 2], [4, 4, 4, 4, 1]]
    x, noise = torch.randn(10, 6), torch.rand(10, 6) * 2 - 1
    got = neftune(x, lengths.flatten(), noise, alpha=5.0)
    want = [x[i] + noise[i] * 5 / math.sqrt(n * 6) for i, n in enumerate(lengths.flatten().tolist())]
    torch.testing.assert_close(got, torch.stack(want))


def test_log1mexp_is_exact_near_both_ends():
    x = t(-1e-3, -0.1, -0.6, -0.7, -5, -800).requires_grad_()
    log1mexp(x).sum().backward()
    want = [math.log(-math.expm1(v)) for v in x.tolist()]
    torch.testing.assert_close(log1mexp(x), t(*want), rtol=1e-14, atol=0)
    torch.testing.assert_close(x.grad, t(*[-1 / math.expm1(-v) if v > -700 else 0.0 for v in x.tolist()]))
    sure = t(0.0).requires_grad_()
    orpo = losses.LOSSES["orpo"].formula
    (grad,) = torch.autograd.grad(orpo(pair(chosen=sure)).sum(), sure)
    assert grad.isfinite().all()


# ---- gradients ----


@pytest.mark.parametrize("name", [n for n, loss in losses.LOSSES.items() if loss.of == "pairs"])
def test_gradients_of_preferences(name):
    """By finite differences, on both sides of the hinge."""
    formula = losses.LOSSES[name].formula
    chosen, rejected = t(-10, -3, -20, -1).requires_grad_(), t(-12, -2.5, -4, -30).requires_grad_()
    rest = [t(5, 4, 9, 2), t(8, 3, 6, 7), t(-11, -3.5, -18, -2), t(-11.5, -2, -5, -20)]
    assert torch.autograd.gradcheck(lambda c, r: formula(Pairs(c, r, *rest)), (chosen, rejected))


@pytest.mark.parametrize("name", ["sft", "grpo", "dapo", "dr_grpo", "kto"])
def test_gradients_of_losses_of_tokens_and_completions(name):
    """By finite differences; cispo and dppo, which stop a gradient, have theirs by hand above."""
    formula, options = losses.LOSSES[name].formula, losses.LOSSES[name].options
    lp = (-torch.rand(40, dtype=torch.float64) * 3).requires_grad_()
    old = lp.detach() + torch.randn(40, dtype=torch.float64)
    A = torch.randn(40, dtype=torch.float64)
    if name == "kto":
        f = lambda x: kto(Completions(x, old, A > 0), t(0.3)[0])  # noqa: E731
    else:
        extra = () if name == "sft" else (old, A)
        f = lambda x: formula(x, *extra, **options)  # noqa: E731
    assert torch.autograd.gradcheck(f, lp)


# ---- sums, the table, whole losses ----


def rollouts(D=8, V=13):
    """Three sequences in a row of 16 tokens, prompts and padding untrained; the head and hidden states."""
    draw = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    h, weight = rand(16, D).requires_grad_(), rand(V, D).requires_grad_()
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0]).bool()
    segments = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0, 0])
    targets = torch.randint(V, (16,), generator=draw).where(mask, -100)
    logp, _ = ops.logprobs(h.detach(), weight.detach(), targets, entropy=True)
    lengths = trained_tokens(mask, segments, 3)
    batch = Rollouts(
        logp + 0.2 * rand(16), rand(3), mask, segments, lengths, logp + 0.1 * rand(16), 1 + 0.1 * rand(16)
    )
    return h, weight, targets, batch, add_up([count(mask, lengths)], None)


def by_loops(name, batch, logp, H, kl_factor, bonus, max_tokens):
    """A policy loss by Python's own loops over sequences and tokens."""
    total = 0.0
    trained = [[i for i in range(16) if batch.mask_T[i] and batch.segments_T[i] == n] for n in range(3)]
    tokens = sum(map(len, trained))
    for n, members in enumerate(trained):
        A = batch.advantages_N[n]
        mean = sum(logp[i] - batch.old_T[i] for i in members) / len(members)
        for i in members:
            lp, old = logp[i], batch.old_T[i]
            weight = {"grpo": 1 / (3 * len(members)), "dr_grpo": 1 / (3 * max_tokens)}.get(name, 1 / tokens)
            if name in ("gspo", "rloo"):
                weight = 1 / (3 * len(members))
            low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(name, (0.2, 0.2))
            rho = (lp - old).exp()
            if name == "gspo":
                rho = mean.exp()
            if name == "rloo":
                rho = (mean * len(members)).exp()
            if name == "cispo":
                loss = -min(rho.detach(), t(5.0)[0]) * A * lp
            elif name == "dppo":
                moved = lp.exp() - old.exp()
                keep = not ((A > 0 and moved > 0.2) or (A < 0 and moved < -0.2))
                loss = -keep * rho * A + 1e-3 * (lp - old) ** 2
            else:
                loss = -torch.minimum(rho * A, rho.clamp(1 - low, 1 + high) * A)
            if name not in ("gspo", "rloo"):
                loss = loss * batch.correction_T[i]
            loss = loss + kl_factor * (batch.reference_T[i] - lp) ** 2 / 2 - bonus * H[i]
            total = total + weight * loss
    return total


@pytest.mark.parametrize("kl_factor", [0.0, 0.3])
@pytest.mark.parametrize("bonus", [0.0, 0.02])
@pytest.mark.parametrize("name", [n for n, loss in losses.LOSSES.items() if loss.task == "grpo"])
def test_policy_losses_are_their_loops_fused_or_not(name, bonus, kl_factor):
    h, weight, targets, batch, counts = rollouts()
    policy = losses.make_policy(name, kl=kl_factor, entropy=bonus, max_tokens=6)
    if not policy.fused:
        batch = batch._replace(correction_T=None)
    logp, H = ops.logprobs(h, weight, targets, 0.9, entropy=True)
    share = policy.share(logp, batch, counts, H)
    want = by_loops(name, batch, logp, H, kl_factor, bonus, 6)
    found = [share]
    if policy.fused:
        inputs = policy.inputs(batch, counts)
        found.append(
            ops.token_loss(h, weight, targets, policy, inputs, 0.9, entropy=policy.needs_entropy).loss
        )
    wants = torch.autograd.grad(want, (h, weight), retain_graph=True)
    for got in found:
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=1e-9)
        for a, b in zip(torch.autograd.grad(got, (h, weight), retain_graph=True), wants, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_what_a_policy_loss_lacks_is_named():
    h, weight, targets, batch, counts = rollouts()
    logp = ops.logprobs(h, weight, targets)
    with pytest.raises(ValueError, match=r"kl=0\.1: needs the reference's log-probs"):
        losses.make_policy("dapo", kl=0.1).share(logp, batch._replace(reference_T=None), counts)
    with pytest.raises(ValueError, match=r"entropy=0\.1: needs entropy_T"):
        losses.make_policy("dapo", entropy=0.1).share(logp, batch, counts)
    with pytest.raises(ValueError, match="gspo: is a loss of whole sequences: call share"):
        losses.make_policy("gspo")(logp)
    with pytest.raises(ValueError, match="correction_T: a loss of whole sequences"):
        losses.make_policy("gspo").share(logp, batch, counts)


def test_the_table_refuses_what_there_is_not():
    with pytest.raises(ValueError, match="loss='ppo': must be one of grpo, dapo, dr_grpo, gspo"):
        losses.make_policy("ppo")
    with pytest.raises(ValueError, match=r"loss='dapo': must be one of sigmoid, .*, kto for preference"):
        losses.find("dapo", "preference", {})
    with pytest.raises(ValueError, match="gamma=1: is no option of sigmoid, which has beta, smoothing"):
        losses.find("sigmoid", "preference", dict(gamma=1))
    with pytest.raises(ValueError, match="max_tokens=None: dr_grpo needs the most tokens"):
        losses.make_policy("dr_grpo")
    with pytest.raises(ValueError, match="baseline: is for kto"):
        losses.preference_share("sigmoid", pair(), None, t(0.3)[0])
    assert losses.LOSSES["dapo"].options == dict(low=0.2, high=0.28, dual=None, cap=None)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_loss_says_formula_unit_and_paper(name):
    words = losses.LOSSES[name].formula.__doc__
    assert "arXiv" in words and ("nat" in words or "unit" in words)


def test_sums_over_sequences():
    values = torch.randn(7, requires_grad=True)
    segments = torch.tensor([0, 0, 2, 2, 2, 1, 0])
    got = sequence_sums(values, segments, 4)
    assert got.dtype == torch.float64
    near(got, *(values[segments == n].double().sum().item() for n in range(4)))
    (got * t(1, 2, 3, 4)).sum().backward()
    assert values.grad.tolist() == [1, 1, 3, 3, 3, 2, 1]
    assert len(sequence_sums(values[:0], segments[:0], 0)) == 0


def test_pairs_come_in_turn():
    found = pairs_of(t(1, 2, 3, 4), t(5, 0, 7, 8), t(9, 10, 11, 12))
    assert [x.tolist() for x in found] == [[1, 3], [2, 4], [5, 7], [1, 8], [9, 11], [10, 12]]
    with pytest.raises(ValueError, match="sequences: got 3, must be chosen and rejected in turn"):
        pairs_of(t(1, 2, 3), t(1, 2, 3))


def test_a_step_without_a_trained_token_is_0():
    h, weight, targets, batch, _ = rollouts()
    none = torch.zeros_like(batch.mask_T)
    lengths = trained_tokens(none, batch.segments_T, 3)
    counts = add_up([count(none, lengths)], None)
    assert counts == StepCounts(*torch.zeros(3))
    logp = ops.logprobs(h, weight, torch.full_like(targets, -100))
    for name in ("grpo", "dapo", "dr_grpo", "rloo"):
        policy = losses.make_policy(name, max_tokens=3)
        batch = batch._replace(mask_T=none, lengths_N=lengths, correction_T=None)
        assert policy.share(logp, batch, counts).item() == 0


def test_weights_of_tokens_and_rows():
    """The mean over sum(w m): a row of weight 3 counts as three of them."""
    lp = -torch.rand(6)
    weight = torch.tensor([1.0, 1.0, 3.0, 3.0, 3.0, 0.0])
    segments = torch.tensor([0, 0, 1, 1, 1, 1])
    lengths = trained_tokens(weight, segments, 2)
    assert lengths.tolist() == [2, 3]
    counts = add_up([count(weight, lengths)], None)
    assert counts.tokens == 11
    got = (token_weights(weight, segments, lengths, counts) * sft(lp)).sum()
    torch.testing.assert_close(got, -(lp[:2].sum() + 3 * lp[2:5].sum()) / 11)
    plain = F.cross_entropy(torch.stack([lp, torch.log1p(-lp.exp())], 1), torch.zeros(6, dtype=torch.long))
    ones = token_weights(torch.ones(6), segments, trained_tokens(torch.ones(6), segments, 2),
                         StepCounts(*t(6, 2, 0)))  # fmt: skip
    torch.testing.assert_close((ones * sft(lp)).sum().float(), plain)
