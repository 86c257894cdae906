"""The gated delta rule in chunks and its convolution, against loops over tokens, document by document.

Without the correction it is Mamba-2's rule, whose keys have any length and whose beta may exceed 1.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tmoe.ops import reference
from tmoe.ops.delta.rule import delta_rule, delta_rule_from
from tmoe.ops.delta.runs import runs_of
from tmoe.ops.delta.short_conv import short_conv

ROWS = ([70, 1, 58, 71], [64, 64, 64], [3, 5, 190], [1] * 65, [33])


def inputs(S, H=4, G=2, K=8, V=12, decay=1.0, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def r(*shape):
        return torch.randn(1, S, *shape, generator=gen, dtype=torch.float64)

    q, k = F.normalize(r(G, K), dim=-1), F.normalize(r(G, K), dim=-1)
    made = [q.to(dtype), k.to(dtype), r(H, V).to(dtype), (-decay * F.softplus(r(H))).to(wide)]
    return [t.requires_grad_() for t in [*made, r(H).sigmoid().to(wide)]]


def documents(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def gradients(fn, given, seed=7):
    y = fn(*given)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return y, torch.autograd.grad((y * weight.to(y.dtype)).sum(), given)


def worst(got, want):
    return max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)).item()
        for a, b in zip(got, want, strict=True)
    )


BOTH = pytest.mark.parametrize("correct", [True, False], ids=["delta", "mamba2"])


def of_any_length(given):
    """Other queries, keys and beta: longer than 1, above 1."""
    q, k, v, g, beta = (t.detach() for t in given)
    return [t.requires_grad_() for t in (3 * q, 3 * k, v, g, 4 * beta)]


@BOTH
@pytest.mark.parametrize("decay", [1e-4, 1.0, 8.0, 20.0])
@pytest.mark.parametrize(("S", "H", "G"), [(1, 2, 1), (17, 4, 4), (64, 3, 1), (131, 4, 2)])
def test_chunks_are_the_recurrence(S, H, G, decay, correct):
    """Also where no chunk divides the row, a key head serves several value heads, and decays are extreme."""
    given = inputs(S, H, G, decay=decay)
    given = given if correct else of_any_length(given)
    rule = partial(delta_rule, run_BS=None, correct=correct)
    got, got_g = gradients(rule, given)
    want, want_g = gradients(partial(reference.delta_rule, correct=correct), given)
    assert worst([got], [want]) < 1e-12
    scale = max(g.abs().max() for g in want_g)  # a sum of differences: the error is that of its terms
    assert all((a - b).abs().max() < 1e-12 * max(1, scale) for a, b in zip(got_g, want_g, strict=True))
    single = [t.detach().float() for t in given]
    assert worst([rule(*single)], [want]) < 2e-6


def dual_form(C, B, x, a, dt):
    """Mamba-2's dual form (Dao & Gu 2024, section 3.2): y = (L * C B^T) (dt x), L_ij = exp(a_{j+1} + .. a_i).

    It has neither states nor chunks. The sums of decays are added up one by one, not subtracted.
    """
    H, S = x.shape[2], x.shape[1]
    C, B = (t.repeat_interleave(H // t.shape[2], 2) for t in (C, B))
    inside = torch.ones(S, S).tril().bool()
    later = a.transpose(1, 2)[..., None].expand(-1, -1, -1, S).masked_fill(~inside.tril(-1), 0)  # i, j: j < i
    L = later.cumsum(-2).masked_fill(~inside, -torch.inf).exp()
    return torch.einsum("bihk,bjhk,bhij,bjh,bjhv->bihv", C, B, L, dt, x)


@pytest.mark.parametrize("decay", [1e-4, 1.0, 20.0])
def test_mamba2_is_its_dual_form(decay):
    """Outputs and gradients; the state after a row is the sum of its tokens' shares."""
    given = of_any_length(inputs(131, decay=decay))
    got, got_g = gradients(partial(delta_rule, run_BS=None, correct=False), given)
    want, want_g = gradients(dual_form, given)
    assert worst([got, *got_g], [want, *want_g]) < 1e-12
    C, B, x, a, dt = (t.detach() for t in given)
    _, state = delta_rule_from((C, B, x, a, dt), torch.zeros(1, 4, 8, 12, dtype=x.dtype), correct=False)
    rest = F.pad(a[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1).exp()  # of the tokens after each
    shares = torch.einsum("bshk,bsh,bshv->bhkv", B.repeat_interleave(2, 2), rest * dt, x)
    assert worst([state], [shares]) < 1e-12


def test_gradients_by_finite_differences():
    given = inputs(19, 2, 1, K=3, V=2)
    run = runs_of(documents([4, 9, 6]), None, 0).number_BS
    assert torch.autograd.gradcheck(lambda *t: delta_rule(*t, run), given)
    given = inputs(19, 1, 1, K=2, V=1)
    assert torch.autograd.gradcheck(lambda *t: delta_rule(*t, run, False), given)
    u, w = torch.randn(1, 19, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    bias = torch.randn(3, dtype=torch.float64).requires_grad_()
    some = runs_of(documents([4, 9, 6]), torch.arange(19)[None] % 5 == 2, 3)
    for runs in (None, some):
        assert torch.autograd.gradcheck(
            lambda u, w, b, runs=runs: short_conv(u, w, runs, b),
            [u.requires_grad_(), w.requires_grad_(), bias],
        )


@BOTH
@pytest.mark.parametrize("lengths", ROWS, ids=str)
def test_a_row_of_documents_is_the_documents_one_by_one(lengths, correct):
    given = inputs(sum(lengths), decay=0.3)
    given = given if correct else of_any_length(given)
    run = runs_of(documents(lengths), None, 0).number_BS

    def one_by_one(*given):
        parts = zip(*(t.split(lengths, 1) for t in given), strict=True)
        return torch.cat([reference.delta_rule(*part, correct) for part in parts], 1)

    got, got_g = gradients(lambda *t: delta_rule(*t, run, correct), given)
    want, want_g = gradients(one_by_one, given)
    assert worst([got, *got_g], [want, *want_g]) < 1e-12

    u, w = torch.randn(1, sum(lengths), 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    every = [u.requires_grad_(), w.requires_grad_()]
    every += [] if correct else [torch.randn(6, dtype=torch.float64).requires_grad_()]
    runs = runs_of(documents(lengths), None, 3)
    got, got_g = gradients(lambda u, w, *bias: short_conv(u, w, runs, *bias), every)

    def plain(u, w, bias=None):
        parts = (F.pad(part.mT, (3, 0)) for part in u.split(lengths, 1))
        return torch.cat([F.silu(F.conv1d(part, w[:, None], bias, groups=6)).mT for part in parts], 1)

    want, want_g = gradients(plain, every)
    assert worst([got, *got_g], [want, *want_g]) < 1e-12


def test_padding_is_as_if_it_were_not_there():
    """Before, within and after documents: the tokens around a gap are neighbours."""
    doc = torch.tensor([[9, 9, 3, 3, 3, 3, 5, 5, 5, 5, 5, 5], [7] * 12])
    pad = torch.tensor([[1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1], [0] * 12]).bool()
    runs = runs_of(doc, pad, 3)
    assert runs.back_BSJ[0].tolist()[:7] == [
        [-1] * 3,
        [-1] * 3,
        [-1] * 3,
        [-1] * 3,
        [-1] * 3,
        [2, -1, -1],
        [-1] * 3,
    ]
    assert runs.back_BSJ[0, 9].tolist() == [7, 6, -1] and runs.ahead_BSJ[0, 2].tolist() == [5, -1, -1]
    assert runs.number_BS[0, ~pad[0]].diff().tolist() == [1, 0, 1, 0, 0]
    alone = runs_of(doc[1:], None, 3)
    for got, want in zip(runs[:3], alone[:3], strict=True):
        assert torch.equal(got[1:], want)
    given = [t.detach() for t in inputs(24, H=2, G=1)]
    given = [t.view(2, 12, *t.shape[2:]).clone() for t in given]
    for t in given[3:]:
        t.masked_fill_(pad[..., None], 0.0)
    got = delta_rule(*given, runs.number_BS)
    for number in (9, 3, 5):
        live = (doc[0] == number) & ~pad[0]
        want = reference.delta_rule(*(t[:1, live] for t in given))
        torch.testing.assert_close(got[:1, live], want, rtol=1e-12, atol=1e-12)


@BOTH
@pytest.mark.parametrize("what", range(5))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_document(what, value, correct):
    lengths = [20, 30, 16]
    run = runs_of(documents(lengths), None, 3).number_BS
    given = inputs(66)
    clean, clean_g = gradients(lambda *t: delta_rule(*t, run, correct), given)
    bad = [t.detach().clone() for t in given]
    bad[what][0, 25, 0] = value
    bad = [t.requires_grad_() for t in bad]
    y = delta_rule(*bad, run, correct)
    heads = [0, 1] if what < 2 else [0]  # key head 0 serves both
    assert y[0, 25:50, heads].isnan().all() and y.isnan().sum() == 25 * 12 * len(heads)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    others = torch.cat([torch.arange(20), torch.arange(50, 66)])
    for a, b in zip(torch.autograd.grad(y, bad, weight), clean_g, strict=True):
        torch.testing.assert_close(a[:, others], b[:, others], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y[:, others], clean[:, others], rtol=1e-12, atol=1e-12)


def test_a_decay_of_minus_infinity_forgets():
    given = [t.detach() for t in inputs(40)]
    given[3][0, 13] = float("-inf")
    got = delta_rule(*given)
    want = torch.cat(
        [reference.delta_rule(*(t[:, part] for t in given)) for part in (slice(13), slice(13, None))], 1
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@BOTH
def test_states_are_passed_on(correct):
    given = [t.detach() for t in inputs(150)]
    want = delta_rule(*given, None, correct)
    state = torch.zeros(1, 4, 8, 12, dtype=torch.float64)
    out = []
    for begin, end in ((0, 70), (70, 71), (71, 72), (72, 150)):
        o, state = delta_rule_from(tuple(t[:, begin:end] for t in given), state, correct)
        out.append(o)
    torch.testing.assert_close(torch.cat(out, 1), want, rtol=1e-12, atol=1e-12)


def test_empty_rows_and_bad_arguments():
    assert delta_rule(*(t[:, :0] for t in inputs(3))).shape == (1, 0, 4, 12)
    assert short_conv(torch.zeros(1, 0, 3), torch.zeros(3, 4)).shape == (1, 0, 3)
    q, k, v, g, beta = (t.detach() for t in inputs(5))
    for args, says in (
        ((q[:, :, :1].expand(1, 5, 3, 8), k, v, g, beta), "q: got shape .* valid is .*divisor of H=4"),
        ((q, k[..., :3], v, g, beta), "k: got shape"),
        ((q, k, v, g.float(), beta), "g: got torch.float32, valid is torch.float64"),
        ((q, k, v, g, beta[:, :2]), "beta: got shape"),
        ((q, k, v, g, beta, torch.zeros(1, 4, dtype=torch.long)), "run: got shape"),
    ):
        with pytest.raises(ValueError, match=says):
            delta_rule(*args)
