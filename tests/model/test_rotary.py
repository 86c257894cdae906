"""Which channels of a head turn, by which angles: the first ones, in neighbouring pairs, by kind of block."""

import cmath

import pytest
import torch

from tmoe.config.check import ConfigError
from tmoe.config.model import MLAConfig, ModelConfig, RopeConfig
from tmoe.config.same import build_config, differences, facts
from tmoe.model.rope import rope_table, rotate

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dim", "interleave"), [(8, True), (4, True), (6, False)])
def test_pairs_of_the_first_channels_are_complex_numbers(dim, interleave):
    C, S = 8, 5
    x = torch.randn(2, S, 3, C, dtype=torch.float64)
    got = rotate(x, *rope_table(RopeConfig(), dim, S, CPU), interleave)
    assert got.dtype == x.dtype and torch.equal(got[..., dim:], x[..., dim:])
    for s in range(S):
        for i in range(dim // 2):
            left, right = (2 * i, 2 * i + 1) if interleave else (i, i + dim // 2)
            turn = cmath.exp(1j * s * 10000 ** (-2 * i / dim))
            want = torch.view_as_complex(torch.stack([x[:, s, :, left], x[:, s, :, right]], -1)) * turn
            torch.testing.assert_close(got[:, s, :, left], want.real, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(got[:, s, :, right], want.imag, rtol=1e-6, atol=1e-6)


def test_a_query_meets_a_key_by_their_distance():
    """q.k depends on the distance alone, also where neighbours are pairs and some channels stay."""
    q, k = torch.randn(2, 1, 1, 1, 8)
    turned = (
        rotate(t.expand(1, 9, 1, 8), *rope_table(RopeConfig(), 6, 9, CPU), True)[0, :, 0] for t in (q, k)
    )
    scores = torch.matmul(next(turned), next(turned).T)
    for distance in range(-3, 4):
        band = scores.diagonal(distance)
        torch.testing.assert_close(band, band[:1].expand_as(band), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            dict(rope=RopeConfig(dim=7)),
            r"--model\.rope\.dim=7: must be even and at most --model\.head-dim=64",
        ),
        (dict(rope=RopeConfig(dim=66)), r"--model\.rope\.dim=66: must be even"),
        (
            dict(rope=RopeConfig(dim=32), attention="mla"),
            r"--model\.rope\.dim=32: not with --model\.attention",
        ),
        (dict(rope=RopeConfig(interleave=True), attention="mla"), r"--model\.rope\.interleave: not with"),
    ],
)
def test_what_cannot_be_is_named(settings, says):
    with pytest.raises(ConfigError, match=says):
        ModelConfig(**settings)


def test_settings_that_are_off_are_no_facts():
    """Facts of models without them, and what is made of these, are as before there were such settings."""
    old = facts(ModelConfig())
    assert not {"rope.dim", "rope.interleave"} & old.keys()
    assert differences(ModelConfig(), ModelConfig(rope=RopeConfig(dim=64))) == []  # all channels
    some = ModelConfig(rope=RopeConfig(dim=32, interleave=True))
    assert differences(ModelConfig(), some) == [
        "model.rope.dim: None here, 32 there",
        "model.rope.interleave: None here, True there",
    ]
    # what a run without these settings wrote down
    plain = dict(attention="mla", mla=dict(vars(MLAConfig())), rope=dict(theta=1e4, max_seq=64))
    assert build_config(plain).rope == RopeConfig(max_seq=64)
