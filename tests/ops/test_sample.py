"""The sampler's kernel: tokens and log-probabilities of its plain twin, its numbers those of numpy's Philox.

The twin's own tests are tests/generate/test_sampler.py.

next: tests/ops/test_decoding_kernels.py
"""

import math
import os

import numpy as np
import pytest
import torch
from chips import CHIPS, assert_fits, measure
from interpreter import poison, repair_interpreter
from tiers import slow_but

from tmoe.generate.sampler import Sampling, keep
from tmoe.ops.decode import sample as module
from tmoe.ops.decode import sample_kernels as kernels
from tmoe.ops.decode import sample_row
from tmoe.ops.decode.sample import Keys, RowFilters, draw, forward, sample, uniforms, uniforms_at
from tmoe.ops.launch.kernel_launch import compile_only

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_decoding_kernels")
compiled = pytest.mark.skipif(INTERPRETED, reason="compiles")
fp32, bf16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module", autouse=INTERPRETED)
def _interpreter():
    repair_interpreter()
    poison()
    # several of each in a row of 300, of which none with a filter is listed whole
    module.BLOCK, module.HELD, module.LISTED, module.SAMPLED = 256, 128, 128, 64


def keys(B, seed=7):
    return Keys(seed, torch.arange(B) * 2**33, torch.arange(B) + 5, torch.arange(B) * 3)


def logits(V=300, dtype=fp32, ties=True):
    """The last row is -inf but for one number; another row has five equal largest numbers.

    Which of equal ones top_p leaves out is torch.sort's choice in the twin.
    """
    x = torch.randn(4, V, generator=torch.Generator().manual_seed(0)) * 3
    if ties:
        x[1, V // 2 : V // 2 + 5] = x[1].max()
    x[-1] = -math.inf
    x[-1, V // 3] = 1.0
    return x.to(dtype)


def assert_twins(x, sampling, barred=None):
    got = forward(x, keys(len(x)), sampling, barred)
    want = draw(x, uniforms_at(keys(len(x))), sampling, barred)
    assert got.tokens_B.tolist() == want.tokens_B.tolist()
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    return got


SETTINGS = [
    {},
    dict(temperature=0.0),
    dict(temperature=0.7),
    dict(top_k=3),
    dict(top_k=20),  # more than there are groups
    dict(top_p=0.7),
    dict(top_p=0.01),
    dict(min_p=0.1),
    dict(top_k=3, top_p=0.8),
    dict(temperature=1.7, top_k=20, top_p=0.95, min_p=0.05),
    dict(temperature=0.6, top_k=4, top_p=0.8, min_p=0.15),
    dict(temperature=5.0, top_p=0.95),  # more tokens than the list has room for, as in the next
    dict(top_k=200),
    dict(temperature=5.0, top_k=250, top_p=0.8, min_p=0.3),
    dict(temperature=5.0, min_p=0.3),
]


@interpreted
@pytest.mark.parametrize(
    "settings", slow_but(lambda s: s.get("temperature") == 0.6 or s.get("top_k") == 250, SETTINGS), ids=str
)
def test_the_kernel_draws_what_the_twin_draws(settings):
    assert_twins(logits(ties="top_p" not in settings), Sampling(**settings))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("V", [8, 64, 65, 257])
@pytest.mark.parametrize("settings", [{}, dict(top_k=3, top_p=0.9)], ids=str)
def test_any_vocabulary(V, settings):
    x = logits(V=V, ties=False)
    assert_twins(x.to(bf16) if not settings else x, Sampling(**settings))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, dict(top_p=0.7), dict(top_k=3), dict(temperature=0.0)], ids=str)
def test_barred_tokens(settings):
    """The greatest may not come; log-probabilities over all know nothing of it."""
    x = logits(ties=False)[:3]
    barred = torch.zeros(3, 300, dtype=torch.bool)
    barred[torch.arange(3), x.argmax(-1)] = True
    barred[:, 64:128] = True  # a whole group
    got = assert_twins(x, Sampling(**settings), barred)
    assert not barred[torch.arange(3), got.tokens_B].any()
    assert_twins(x, Sampling(**settings), barred[0])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(top_k=2), dict(top_p=0.5), dict(min_p=1.0)], ids=str)
def test_equal_logits(settings):
    """At the edge of top_k all stay, at that of top_p those with higher ids.

    As in the twin: torch.sort keeps the order of so few.
    """
    x = torch.zeros(40, 8)
    x[:, 6:] = -1.0
    got = assert_twins(x, Sampling(**settings))
    # of all, 6.74, the last two and two of the others are less than half
    assert set(got.tokens_B.tolist()) == ({2, 3, 4, 5} if "top_p" in settings else set(range(6)))


def flat_rows(kind: str) -> torch.Tensor:
    """Rows in which the filters keep more tokens than are listed whole."""
    x = torch.randn(3, 600, generator=torch.Generator().manual_seed(1)) * 0.5
    if kind == "ties":
        return torch.cat([x * 0, (x[:2] * 4).round(), x[:2].to(bf16).float()])
    if kind == "sorted":
        return x.sort(-1).values
    misled = x[:1].clone()
    misled.view(75, 8)[torch.arange(8) * 75 // 8] = -3.0  # all tokens of the first sample
    return torch.cat([x, misled])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "ties", "sorted"])
@pytest.mark.parametrize(
    "settings",
    [
        dict(top_p=0.95),
        dict(top_p=0.5),
        dict(top_p=0.9, min_p=0.2),
        dict(top_k=200),
        dict(top_k=300, top_p=0.8, min_p=0.1),
    ],
    ids=str,
)
def test_flat_rows(kind, settings, monkeypatch):
    """A stable sort leaves out the tokens with the lowest ids of equal ones, as the kernel does."""
    x, sort = flat_rows(kind), torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda *args, **given: sort(*args, stable=True, **given))
    assert_twins(x, Sampling(**settings))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
def test_a_poor_sample_changes_no_token(wide, monkeypatch):
    """The interval misses the threshold, or has more tokens than the list has room for."""
    x, how = flat_rows("random"), Sampling(top_p=0.8)
    found = []

    def poor(*given):
        """A single key above the threshold, or all keys."""
        low, high = given[4], given[5]
        found.append(1)
        return (low, high) if wide else (high - 1, high)

    monkeypatch.setattr(sample_row, "sampled_interval", poor)
    assert_twins(x, how)
    assert len(found) == 2 * len(x)


@interpreted
@pytest.mark.slow
def test_a_row_depends_on_itself_alone():
    x, sampling = logits(), Sampling(top_k=7, top_p=0.9)
    whole = forward(x, keys(4), sampling, None)
    order = torch.tensor([2, 0, 3, 1])
    turned = forward(
        torch.cat([x[order], x], 1)[:, :300], Keys(7, *(t[order] for t in keys(4)[1:])), sampling, None
    )
    for a, b in zip(turned, whole, strict=True):
        assert torch.equal(a, b[order])


def rows_of(settings, seeds) -> tuple[torch.Tensor, RowFilters]:
    """Seeds and settings of rows, as `sample` takes them."""
    every = [Sampling(**one) for one in settings]
    seed_B = torch.tensor([seed if seed < 2**63 else seed - 2**64 for seed in seeds])
    real = [[s.temperature for s in every], [1 - s.top_p for s in every], [s.min_p for s in every]]
    heat, cut, least = (torch.tensor(values, dtype=fp32) for values in real)
    return seed_B, RowFilters(heat, torch.tensor([s.top_k for s in every]), cut, least)


SEEDS = [0, 7, 2**63 + 5, 2**64 - 3]


@interpreted
@pytest.mark.parametrize("barred", slow_but([False], [False, True]))
def test_rows_with_settings_of_their_own_mixed(barred):
    """Each row has the token and the bits that a launch with its setting alone gives it."""
    own = SETTINGS + [dict(top_k=300), dict(top_k=7, min_p=0.1)]  # 300: as many as there are, which is all
    x = logits(ties=False)[[0, 1, 2] * 6][: len(own)]
    seeds = [SEEDS[i % 4] for i in range(len(own))]
    left = torch.zeros(300, dtype=torch.bool)
    left[x.argmax(-1)] = True
    left = left if barred else None
    given = keys(len(own))
    seed_B, filters = rows_of(own, seeds)
    got = forward(x, given._replace(seed=seed_B), filters, left)
    for row, (settings, seed) in enumerate(zip(own, seeds, strict=True)):
        one = Keys(seed, *(t[row : row + 1] for t in given[1:]))
        want = forward(x[row : row + 1], one, Sampling(**settings), left)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[row : row + 1], b), settings


def assert_probable(row: torch.Tensor, how: Sampling, tokens: torch.Tensor) -> None:
    """Chi-square of tokens that were drawn from a row of logits."""
    p = keep(row[None] / how.temperature, how)[0].double().softmax(-1)
    counts, n = tokens.bincount(minlength=len(row)).double(), len(tokens)
    assert counts[p == 0].sum() == 0
    x2, k = ((counts - p * n) ** 2 / (p * n))[p > 0].sum().item(), int((p > 0).sum()) - 1
    assert x2 < k + 5 * math.sqrt(2 * k), (how, x2, k)


def test_rows_of_the_twin():
    """The same on a CPU. Rows of one batch have the probabilities of their settings."""
    own = SETTINGS[:-1]
    x = logits(ties=False)[[0, 1, 2] * 5][: len(own)]
    barred = torch.zeros(len(own), 300, dtype=torch.bool)
    barred[::2, x[0].argmax()] = True
    seed_B, filters = rows_of(own, [SEEDS[i % 4] for i in range(len(own))])
    got = sample(x, keys(len(own))._replace(seed=seed_B), filters, barred)
    for row, settings in enumerate(own):
        one = Keys(SEEDS[row % 4], *(t[row : row + 1] for t in keys(len(own))[1:]))
        want = sample(x[row : row + 1], one, Sampling(**settings), barred[row : row + 1])
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[row : row + 1], b), settings

    kinds, n = [dict(temperature=0.7), dict(top_k=4), dict(top_p=0.8), dict(temperature=0.0)], 20_000
    row = torch.randn(12, generator=torch.Generator().manual_seed(2))
    _, filters = rows_of(kinds * n, [0] * 4 * n)
    uniform_B = uniforms(5, 0, 0, 4 * n)
    drawn = draw(row.expand(4 * n, -1), uniform_B, filters).tokens_B.view(n, 4)
    for kind, tokens in zip(kinds, drawn.T, strict=True):
        how = Sampling(**kind)
        if how.temperature == 0:
            assert (tokens == row.argmax()).all()
            continue
        assert_probable(row, how, tokens)


@pytest.mark.gpu
@compiled
def test_rows_of_a_gpu_have_their_probabilities():
    """Mixed rows at a real width have the bits of launches with one setting; chi-square at a small one."""
    V, B = 151_936, 42
    x = torch.randn(B, V, generator=torch.Generator().manual_seed(0)).cuda() * 3
    own = [SETTINGS[i % len(SETTINGS)] for i in range(B)]
    seed_B, filters = rows_of(own, [7] * B)
    filters = RowFilters(*(t.cuda() for t in filters))
    number_B = torch.arange(B).cuda()
    given = Keys(seed_B.cuda(), number_B, number_B, number_B)
    got = sample(x, given, filters)
    for settings in SETTINGS:
        want = sample(x, given._replace(seed=7), Sampling(**settings))
        rows = [row for row in range(B) if own[row] == settings]
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[rows], b[rows]), settings

    kinds, n = [dict(temperature=0.7), dict(top_k=4), dict(top_p=0.8), dict(min_p=0.1)], 20_000
    row = torch.randn(50, generator=torch.Generator().manual_seed(2))
    seed_B, filters = rows_of(kinds * n, [5] * 4 * n)
    filters = RowFilters(*(t.cuda() for t in filters))
    number_B = torch.arange(4 * n).cuda()
    given = Keys(seed_B.cuda(), number_B, torch.zeros_like(number_B), torch.zeros_like(number_B))
    drawn = sample(row.cuda().expand(4 * n, -1).contiguous(), given, filters).tokens_B.cpu().view(n, 4)
    for kind, tokens in zip(kinds, drawn.T, strict=True):
        assert_probable(row, Sampling(**kind), tokens)


@interpreted
def test_the_kernels_numbers_are_numpys_bit_for_bit():
    """Equal logits and no filter: the token tells the number's first bits; and whole numbers themselves."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(prompts, numbers, places, out, seed):
        i = tl.program_id(0)
        u = kernels.uniform(seed, tl.load(prompts + i), tl.load(numbers + i), tl.load(places + i))
        tl.store(out + i, u)

    kernel.fn.__globals__.update(tl=tl, kernels=kernels)
    for seed in (0, 7, 2**63 - 1, 2**64 - 3):
        given = keys(9, seed)
        out = torch.zeros(9, dtype=torch.float64)
        kernel[(9,)](*given[1:], out, seed if seed < 2**63 else seed - 2**64)
        assert torch.equal(out, uniforms_at(given))


def test_numbers_at_places_are_those_of_the_stream():
    for seed, prompt, number in [(0, 0, 0), (2**64 - 1, 2**40, 3)]:
        stream = uniforms(seed, prompt, number, 9)
        at = [torch.full((9,), n, dtype=torch.int64) for n in (prompt, number)]
        assert torch.equal(uniforms_at(Keys(seed, *at, torch.arange(9))), stream)
    assert uniforms_at(Keys(0, *[torch.zeros(0, dtype=torch.int64)] * 3)).shape == (0,)
    assert np.all(stream.numpy() < 1)


def test_on_a_cpu_it_is_the_twin():
    x, sampling = logits(), Sampling(top_k=5)
    want = draw(x, uniforms_at(keys(4)), sampling)
    for a, b in zip(sample(x, keys(4), sampling), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(logits_BV=torch.zeros(4)), "logits: got shape (4,)"),
        (dict(logits_BV=torch.zeros(4, 8).double()), "logits: got torch.float64"),
        (dict(keys=keys(3)), "prompt_B"),
        (dict(keys=keys(4, -1)), "seed: got -1"),
        (dict(keys=keys(4, torch.zeros(4, dtype=torch.int64))), "seed: got tensor"),
        (dict(filters=rows_of([{}] * 4, [0] * 4)[1]), "seed_B: got 7"),
        (
            dict(keys=keys(4, torch.zeros(4, dtype=torch.int64)), filters=rows_of([{}] * 3, [0] * 3)[1]),
            "temperature_B: got ((3,), torch.float32)",
        ),
        (dict(barred=torch.zeros(5, dtype=torch.bool)), "barred"),
        (dict(barred=torch.zeros(300)), "barred"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change, words):
    with pytest.raises(ValueError) as error:
        sample(**{"logits_BV": logits(), "keys": keys(4), "filters": Sampling(), "barred": None, **change})
    assert words in str(error.value)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_the_kernel_fits(arch):
    """256 rows are one wave: two on a multiprocessor of NVIDIA's, one on each of an MI300X's 304 units.

    NVIDIA's compiler computes addresses early, and spills some: no more than 1 KB, all outside the loops over
    a row.
    """
    programs = 1 if arch.startswith("hip") else 2
    found = []
    with compile_only(arch, lambda name, key, compile: found.append(measure(arch, name, compile))):
        module.trace(151936, bf16, Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01))
        module.trace(151936, fp32, Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01))
        module.trace(49155, fp32, Sampling())
        module.trace(8, bf16, Sampling(temperature=0.0))
        module.trace_rows(151936, bf16)
        module.trace_rows(151936, fp32)
    assert len(found) == 12
    for binary in found:
        assert binary.spilled <= 1024
        assert_fits(binary._replace(programs=programs, spilled=0), CHIPS[arch])
