"""Filters are those of transformers, draws have the probabilities they should, numbers depend on no batch."""

import math

import pytest
import torch

from tmoe.config.check import ConfigError
from tmoe.generate.sampler import Sampling, draw, keep, uniforms

LOGITS = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3
LOGITS[1, 7:12] = LOGITS[1].max()  # equal ones, at the edge of every filter


@pytest.mark.parametrize(
    "settings",
    [
        dict(top_k=3),
        dict(top_k=100),
        dict(top_p=0.7),
        dict(top_p=0.01),
        dict(min_p=0.1),
        dict(min_p=1.0),
        dict(temperature=0.6, top_k=12, top_p=0.8, min_p=0.15),
        dict(temperature=1.7, top_k=20, top_p=0.95, min_p=0.05),
    ],
    ids=str,
)
def test_filters_are_those_of_transformers(settings):
    from transformers.generation import logits_process as theirs

    want = LOGITS / settings.get("temperature", 1.0)
    if "top_k" in settings:
        want = theirs.TopKLogitsWarper(settings["top_k"])(None, want)
    if "top_p" in settings:
        want = theirs.TopPLogitsWarper(settings["top_p"])(None, want)
    if "min_p" in settings:
        want = theirs.MinPLogitsWarper(settings["min_p"])(None, want)
    got = keep(LOGITS / settings.get("temperature", 1.0), Sampling(**settings))
    assert torch.equal(got, want)


def test_their_order_is_ours():
    """Temperature, top_k, top_p, min_p: as transformers' generate builds its list."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    how = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, top_p=0.5, min_p=0.5)
    processors = model._get_logits_processor(how, device="cpu")
    names = [type(one).__name__ for one in processors]
    assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"]


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """How improbable counts of these probabilities are, in standard deviations of a normal distribution.

    (Wilson and Hilferty 1931: the cube root of chi-square is nearly normal.)
    """
    assert counts[p == 0].sum() == 0, "a token that was left out came"
    want = (p * counts.sum())[p > 0]
    k = len(want) - 1
    x = ((counts[p > 0] - want) ** 2 / want).sum().item()
    return ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


@pytest.mark.parametrize(
    "settings",
    [{}, dict(temperature=0.7), dict(top_k=4), dict(top_p=0.8), dict(min_p=0.1), dict(top_k=6, top_p=0.9)],
    ids=str,
)
def test_draws_have_their_probabilities(settings):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(**settings)
    p = keep(logits[None] / sampling.temperature, sampling)[0].double().softmax(-1)
    n = 20_000
    drawn = draw(logits.expand(n, -1), uniforms(5, 0, 0, n), sampling)
    counts = drawn.tokens_B.bincount(minlength=12).double()
    assert chi_square(counts, p) < 4
    # both log-probabilities, by their definitions
    full = (logits / sampling.temperature).log_softmax(-1)[drawn.tokens_B]
    assert torch.allclose(drawn.logprobs_B, full, atol=1e-6)
    assert torch.allclose(drawn.sampler_logprobs_B.double(), p.log()[drawn.tokens_B], atol=1e-5)


def test_edges_of_the_sum():
    """The least and the largest number choose the first and the last token that may come."""
    logits = torch.tensor([[-math.inf, 1.0, 2.0, -math.inf]]).expand(2, -1)
    uniform = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(logits, uniform, Sampling()).tokens_B.tolist() == [1, 2]


def test_barred_tokens_never_come_and_change_no_log_probability():
    barred = torch.zeros(40, dtype=torch.bool)
    barred[LOGITS.argmax(-1)] = True
    free = draw(LOGITS, torch.full((5,), 0.3, dtype=torch.float64), Sampling(), barred)
    assert not barred[free.tokens_B].any()
    assert torch.allclose(free.logprobs_B, LOGITS.log_softmax(-1).gather(1, free.tokens_B[:, None])[:, 0])
    greedy = draw(LOGITS, torch.zeros(5, dtype=torch.float64), Sampling(temperature=0), barred)
    assert torch.equal(greedy.tokens_B, LOGITS.masked_fill(barred, -math.inf).argmax(-1))


def test_uniforms_are_functions_of_their_keys_alone():
    a = uniforms(3, 5, 2, 50)
    assert torch.equal(uniforms(3, 5, 2, 7), a[:7])
    others = [uniforms(4, 5, 2, 50), uniforms(3, 6, 2, 50), uniforms(3, 5, 3, 50), uniforms(3, 2**40, 2, 50)]
    for other in others:
        assert not torch.equal(other, a) and (other - a).abs().min() > 0
    many = torch.cat([uniforms(1, prompt, sample, 20) for prompt in range(20) for sample in range(20)])
    assert many.min() >= 0 and many.max() < 1
    counts = (many * 50).long().bincount(minlength=50).double()
    assert chi_square(counts, torch.full((50,), 1 / 50, dtype=torch.float64)) < 4
    assert a[0].item() == 0.37567911995227465, "a seed means the same answers in every version"


@pytest.mark.parametrize(
    "settings, names",
    [
        (dict(temperature=-0.1), "--temperature=-0.1"),
        (dict(temperature=math.nan), "--temperature=nan"),
        (dict(temperature=1e-38), "--temperature=1e-38: must be 0, or at least 1e-06"),
        (dict(top_k=-1), "--top-k=-1"),
        (dict(top_p=0.0), "--top-p=0.0: must be above 0 and at most 1"),
        (dict(min_p=1.5), "--min-p=1.5: must be from 0 to 1"),
        (dict(max_tokens=0), "--max-tokens=0"),
        (dict(repetition_penalty=0), "--repetition-penalty=0: must be above 0, in float32"),
        (dict(suppress=(-1,)), "--suppress=-1: must be 0 or more"),
        (dict(max_tokens=4, min_tokens=5), "--min-tokens=5: must be at most --max-tokens=4"),
        (dict(stop=("a", "")), "must not hold an empty text"),
        (dict(stop="abc"), "--stop='abc'"),
        (dict(seed=-1), "--seed=-1"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_named(settings, names):
    with pytest.raises(ConfigError) as error:
        Sampling(**settings)
    assert names in str(error.value)
