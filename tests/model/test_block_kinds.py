"""Kinds of blocks differ in the channels and angles of rotation, in the norms, in attention's gate."""

import cmath
from dataclasses import replace

import pytest
import torch

from tmoe.config.check import ConfigError
from tmoe.config.compare import build_config, differences, facts
from tmoe.config.model import MLAConfig, ModelConfig, RopeConfig
from tmoe.model.attention import Attention
from tmoe.model.rope import rope_table, rotate, turns_of
from tmoe.model.transformer import Block

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
        (
            dict(rope=RopeConfig(query_beta=0.1)),
            r"--model\.rope\.query-beta=0\.1: only with --model\.attention=mla, or 0",
        ),
        (dict(rotary=(1, 2)), r"--model\.rotary=1 2: must be one or more of 1"),
        (dict(rotary=(1, 0), attention="mla"), r"--model\.rotary=1 0: not with --model\.attention=mla"),
        (dict(attention_gate=True, attention="mla"), r"--model\.attention-gate=True: not with"),
        (dict(v_head_dim=32, attention="mla"), r"--model\.v-head-dim=32: not with --model\.attention=mla"),
        (dict(window_sinks=True, attention="mla"), r"--model\.window-sinks=True: not with"),
        (dict(window_kv_heads=3), r"--model\.window-kv-heads=3: must divide --model\.heads=4, or be 0"),
        (dict(v_head_dim=-1), r"--model\.v-head-dim=-1: must be at least 0"),
        (dict(value_multiplier=0.0), r"--model\.value-multiplier=0\.0: must be positive"),
        (dict(norms="none"), r"--model\.norms=none: must be one of pre, post, sandwich, moe"),
    ],
)
def test_what_cannot_be_is_named(settings, says):
    with pytest.raises(ConfigError, match=says):
        ModelConfig(**settings)


def test_settings_that_are_off_are_no_facts():
    """Facts of models without them, and what is made of these, are as before there were such settings."""
    old = facts(ModelConfig())
    off = {"rope.dim", "rope.interleave", "rope.no position", "norms", "attention_gate", "rotary"}
    off |= {"v_head_dim", "value_multiplier", "window_kv_heads", "window_sinks"}
    off |= {"rope.query_beta", "rope.original_max_seq"}
    assert not off & old.keys()
    assert differences(ModelConfig(), ModelConfig(rope=RopeConfig(dim=64))) == []  # all channels
    some = ModelConfig(rope=RopeConfig(dim=32, interleave=True))
    assert differences(ModelConfig(), some) == [
        "model.rope.dim: None here, 32 there",
        "model.rope.interleave: None here, True there",
    ]
    # what a run without these settings wrote down
    plain = dict(attention="mla", mla=dict(vars(MLAConfig())), rope=dict(theta=1e4, max_seq=64))
    assert build_config(plain).rope == RopeConfig(max_seq=64)


def test_each_kind_of_block_has_its_own_positions():
    rope = RopeConfig(theta=5e5, scaling="linear", factor=4.0, window_theta=1e4)
    cfg = ModelConfig(layers=6, window=8, windowed=(1, 1, 0), rotary=(1, 1, 1, 0), rope=rope)
    assert [cfg.window_of(i) for i in range(6)] == [8, 8, 0, 8, 8, 0]
    near, far = RopeConfig(theta=1e4), RopeConfig(theta=5e5, scaling="linear", factor=4.0)
    assert [cfg.rope_of(i) for i in range(6)] == [near, near, far, None, near, far]
    tables = turns_of(cfg, 5, CPU)
    assert torch.equal(tables[near][0], rope_table(near, 64, 5, CPU)[0])
    assert tables[None][0].shape == (5, 0)
    # equal settings in other words: a window that no block has, a base that is the default
    assert differences(cfg, replace(cfg, windowed=(1, 1, 0) * 2, rotary=(1, 1, 1, 0, 1, 1))) == []
    plain = ModelConfig(rope=RopeConfig(theta=1e4, window_theta=1e4), window=8)
    assert differences(plain, replace(plain, rope=RopeConfig())) == []
    (line,) = differences(cfg, replace(cfg, rope=replace(rope, window_theta=2e4)))
    assert "theta in windows" in line and "20000.0" in line
    with pytest.raises(ConfigError, match=r"--model\.rope\.window-theta=1\.0: must be above 1"):
        RopeConfig(window_theta=1.0)


def test_each_kind_of_block_has_its_own_key_heads_and_sinks():
    cfg = ModelConfig(layers=3, window=8, windowed=(1, 0), window_kv_heads=2, window_sinks=True)
    assert [cfg.kv_heads_in(cfg.window_of(i)) for i in range(3)] == [2, 4, 2]
    assert [cfg.sinks_in(cfg.window_of(i)) for i in range(3)] == [True, False, True]
    assert differences(cfg, replace(cfg, window_kv_heads=0)) == [
        "model.kv_heads: [2, 4, 2] here, 4 there",
    ]
    # the same by other words
    assert differences(replace(cfg, windowed=(1,)), replace(cfg, windowed=(1,), kv_heads=2, sinks=True)) == []
    assert differences(replace(cfg, window=0), ModelConfig(layers=3)) == []
    assert differences(ModelConfig(v_head_dim=64), ModelConfig()) == []
    assert ModelConfig(v_head_dim=32).value_dim == 32 and ModelConfig().value_dim == 64
    held = {name: p.shape for name, p in Attention(replace(cfg, v_head_dim=32), 8).named_parameters()}
    assert held == dict(
        [("sinks", (4,)), ("qkv.weight", ((4 + 2) * 64 + 2 * 32, 256)), ("o.weight", (256, 4 * 32))]
    )


def test_without_positions_the_order_of_earlier_tokens_is_unseen():
    """The last token's result stays when those before it change places; with positions it does not."""
    torch.manual_seed(0)
    cfg = ModelConfig(dim=16, heads=2, kv_heads=1, head_dim=8, attention_gate=True, rotary=(0, 1), layers=2)
    attention = Attention(cfg)
    x = torch.randn(1, 6, 16)
    order = torch.tensor([3, 0, 4, 1, 2, 5])
    for layer, same in ((0, True), (1, False)):
        tables = turns_of(cfg, 6, CPU)[cfg.rope_of(layer)]
        y, moved = (attention(t, *tables, None)[0, -1] for t in (x, x[:, order]))
        assert torch.allclose(y, moved, atol=1e-6) == same


def test_a_gate_multiplies_before_the_output_projection():
    torch.manual_seed(0)
    cfg = ModelConfig(dim=16, heads=2, kv_heads=1, head_dim=8, attention_gate=True)
    with_gate, plain = Attention(cfg), Attention(replace(cfg, attention_gate=False))
    rows = 4 * 8  # of queries, keys and values
    with torch.no_grad():
        plain.qkv.weight.copy_(with_gate.qkv.weight[:rows])
        plain.o.weight.copy_(torch.eye(16))
    x = torch.randn(2, 5, 16)
    tables = rope_table(cfg.rope, 8, 5, CPU)
    want = (plain(x, *tables, None) * torch.sigmoid(x @ with_gate.qkv.weight[rows:].T)) @ with_gate.o.weight.T
    torch.testing.assert_close(with_gate(x, *tables, None), want)


@pytest.mark.parametrize("norms", ["pre", "post", "sandwich", "moe"])
def test_norms_stand_where_they_are_said_to(norms):
    torch.manual_seed(0)
    cfg = ModelConfig(dim=16, heads=2, kv_heads=1, head_dim=8, ffn_dim=24, dense_layers=1, norms=norms)
    block = Block(cfg, 0)
    for name, p in block.named_parameters():
        p.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    x = torch.randn(2, 5, 16)
    tables = rope_table(cfg.rope, 8, 5, CPU)

    def norm(name, t):
        weight = dict(block.named_parameters()).get(f"{name}.weight")
        return t if weight is None else torch.nn.functional.rms_norm(t, (16,), weight, cfg.norm_eps)

    h = x + norm("attention_post_norm", block.attention(norm("attention_norm", x), *tables, None))
    want = h + norm("ffn_post_norm", block.ffn(norm("ffn_norm", h)))
    torch.testing.assert_close(block.compute(x, *tables, None, None, None)[0], want)
    held = {name.split(".")[0] for name, _ in block.named_parameters() if "norm" in name}
    before, behind = {"attention_norm", "ffn_norm"}, {"attention_post_norm", "ffn_post_norm"}
    assert held == dict(pre=before, post=behind, sandwich=before | behind, moe=before)[norms]
    moe = {name.split(".")[0] for name, _ in Block(replace(cfg, dense_layers=0), 0).named_parameters()}
    assert {name for name in moe if "norm" in name} == held | ({"ffn_post_norm"} if norms == "moe" else set())


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1])
def test_compiled_blocks_of_each_kind_are_eager_ones(layer):
    """Values and every gradient, in one graph, with positions and a window and without either."""
    torch.manual_seed(0)
    torch.compiler.reset()
    rope = RopeConfig(dim=4, interleave=True, window_theta=300.0)
    cfg = ModelConfig(
        dim=16, heads=2, kv_heads=1, head_dim=8, ffn_dim=24, dense_layers=2, layers=2, rope=rope
    )
    cfg = replace(cfg, window=3, windowed=(1, 0), rotary=(1, 0), norms="sandwich", attention_gate=True)
    cfg = replace(cfg, window_kv_heads=2, window_sinks=True, v_head_dim=6, value_multiplier=0.7)
    block = Block(replace(cfg, qk_norm="head" if layer else "rotated"), layer)
    for name, p in block.named_parameters():
        p.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    x = torch.randn(2, 6, 16, requires_grad=True)
    context = (*turns_of(cfg, 6, CPU)[block.rope], None, None, None)
    found = []
    for run in (block.compute, torch.compile(block.compute, fullgraph=True, dynamic=False)):
        y = run(x, *context)[0]
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])])
    for eager, compiled in zip(*found, strict=True):
        assert (compiled - eager).norm() <= 1e-5 * eager.norm()
