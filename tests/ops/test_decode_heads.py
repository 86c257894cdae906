"""Heads of one token into the cache, and a sum with its norm: the model's own modules, errors, chips.

next: tests/ops/test_decoding_kernels.py
"""

import os

import pytest
import torch
import torch.nn.functional as F
from chips import CHIPS, assert_fits, measure
from interpreter import repair_interpreter
from tiers import slow_but

from tmoe.config.model import ModelConfig, RopeConfig
from tmoe.generate.cache import LayerCache
from tmoe.generate.forward import Rotations, has_kernel, put_heads
from tmoe.model.attention import Attention
from tmoe.model.rope import turns_of
from tmoe.ops.decode import add_norm as sums
from tmoe.ops.decode import heads
from tmoe.ops.decode.add_norm import add_norm
from tmoe.ops.decode.heads import Heads, decode_heads
from tmoe.ops.launch.kernel_launch import compile_only

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_decoding_kernels")
compiled = pytest.mark.skipif(INTERPRETED, reason="compiles")
fp32, bf16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module", autouse=INTERPRETED)
def _interpreter():
    repair_interpreter()


def config(**more) -> ModelConfig:
    return ModelConfig(**dict(vocab=64, dim=48, heads=6, kv_heads=2, head_dim=16) | more)


CONFIGS = {
    "plain": config(qkv_bias=True),
    "head": config(qk_norm="head"),
    "full": config(qk_norm="full", kv_heads=3),
    "rotated": config(qk_norm="rotated", v_head_dim=24),
    "neighbours": config(qk_norm="head", rope=RopeConfig(interleave=True), head_dim=12),
    "partial": config(qk_norm="full", rope=RopeConfig(dim=8), value_multiplier=0.7),
    "partial neighbours": config(rope=RopeConfig(dim=8, interleave=True), attention_gate=True, v_head_dim=8),
    "none turn": config(qk_norm="head", rotary=(0,)),
    "one and weight": config(qk_norm="head", norm_offset=True),
    "one and weight, rotated": config(qk_norm="rotated", norm_offset=True),
}


@interpreted
@pytest.mark.parametrize("dtype", slow_but([fp32], [fp32, bf16]))
@pytest.mark.parametrize("name", list(CONFIGS))
def test_heads_are_those_of_the_model(name, dtype):
    """Against Attention.project: sums of squares are added in another order, nothing else differs."""
    cfg = CONFIGS[name]
    torch.manual_seed(0)
    attention = Attention(cfg)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    attention.to(dtype)
    B, G = 5, attention.key_heads
    x_BD = torch.randn(B, cfg.dim).to(dtype)
    at_B = torch.tensor([0, 7, 3, 300, 1])
    ((cos, sin),) = (tables for tables in turns_of(cfg, 512, x_BD.device).values())
    cos, sin = cos[at_B], sin[at_B]
    pages = [torch.full((3, 16, G, width), 7.0, dtype=dtype) for width in (cfg.head_dim, cfg.value_dim)]
    places_B = torch.tensor([5, 47, 16, 0, 33])

    with torch.no_grad():
        q, k, v, _ = attention.project(x_BD[:, None], cos[:, None], sin[:, None])
        norms = None if cfg.qk_norm == "none" else (attention.q_norm.weight, attention.k_norm.weight)
        how = Heads(cfg.heads, cfg.qk_norm, cfg.norm_eps, cfg.rope.interleave, cfg.value_multiplier)
        how = how._replace(offset=cfg.norm_offset)
        got = decode_heads(attention.qkv(x_BD), cos, sin, places_B, tuple(pages), how, norms)

    close = dict(rtol=2e-6, atol=2e-6) if dtype == fp32 else dict(rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(got, q[:, 0], **close)
    for page, want in zip(pages, (k, v), strict=True):
        rows = page.flatten(0, 1)
        torch.testing.assert_close(rows[places_B], want[:, 0], **close)
        others = torch.ones(len(rows), dtype=torch.bool)
        others[places_B] = False
        assert (rows[others] == 7).all(), "a place of nobody was written"


@interpreted
@pytest.mark.parametrize("name", [name for name in CONFIGS if CONFIGS[name].qk_norm != "rotated"])
def test_behind_the_models_norms_they_have_its_bits(name):
    """In fp32: the interpreter cuts bf16 where a GPU rounds, which test_bits_gpu.py asks."""
    cfg = CONFIGS[name]
    torch.manual_seed(0)
    attention = Attention(cfg)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    at_B, places_B = torch.tensor([0, 7, 3, 300, 1]), torch.tensor([5, 47, 16, 0, 33])
    x_BD = torch.randn(len(at_B), cfg.dim)
    ((cos, sin),) = (tables for tables in turns_of(cfg, 512, x_BD.device).values())
    turns = Rotations(cos[at_B], sin[at_B])
    widths = cfg.head_dim, cfg.value_dim
    layer = LayerCache(*(torch.zeros(3, 16, attention.key_heads, width) for width in widths))

    with torch.no_grad():
        assert has_kernel(attention, fused=False)
        got, gate = put_heads(attention, x_BD, turns, layer, places_B, fused=False)
        q, k, v, want_gate = attention.project(x_BD[:, None], turns.cos[:, None], turns.sin[:, None])

    assert torch.equal(got, q[:, 0])
    for page, want in zip(layer, (k, v), strict=True):
        assert torch.equal(page.flatten(0, 1)[places_B], want[:, 0])
    assert (gate is None) == (want_gate is None)
    assert gate is None or torch.equal(gate, want_gate[:, 0])


@interpreted
@pytest.mark.parametrize("dtype", [fp32, bf16])
@pytest.mark.parametrize(("D", "offset"), [(48, False), (2000, False), (48, True)])
def test_a_sum_and_its_norm(D, offset, dtype):
    x, y, weight = torch.randn(3, D).to(dtype), torch.randn(3, D).to(dtype), torch.randn(D)
    total, normed = add_norm(x, y, weight, 1e-5, offset)
    torch.testing.assert_close(total, x + y, rtol=0 if dtype == fp32 else 2**-7, atol=0)  # which cuts
    want = F.rms_norm((x + y).double(), (D,), offset + weight.double(), 1e-5)
    torch.testing.assert_close(normed.double(), want, rtol=1e-6 if dtype == fp32 else 2**-6, atol=1e-6)


def test_what_does_not_fit_is_named():
    qkv, cos, places = torch.zeros(2, 64), torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    pages = torch.zeros(1, 16, 2, 8), torch.zeros(1, 16, 2, 8)

    def words(**more) -> str:
        given = dict(qkv=qkv, cos=cos, places=places, pages=pages, how=Heads(4), norms=None) | more
        with pytest.raises(ValueError) as error:
            decode_heads(
                given["qkv"], given["cos"], cos, *(given[x] for x in ("places", "pages", "how", "norms"))
            )
        return str(error.value)

    assert "qkv: got 48 columns, valid is at least 64" in words(qkv=qkv[:, :48].contiguous())
    assert "places: got" in words(places=places.int())
    assert "norms: got False" in words(how=Heads(4, "head"))
    assert "norms: got shape (4,)" in words(how=Heads(4, "head"), norms=(cos[0, :4], cos[0, :4]))
    many = dict(qkv=torch.zeros(2, 40000), how=Heads(4096, "full"))
    assert "norm: got full of 4096 heads of 8, valid is at most 16384 numbers" in words(**many)
    with pytest.raises(ValueError, match=r"y: got shape \(2, 8\)"):
        add_norm(qkv, cos, qkv[0], 1e-6)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_the_kernels_fit(arch):
    found = []
    with compile_only(arch, lambda name, key, compile: found.append(measure(arch, name, compile))):
        heads.trace(Heads(32, "head"), 4, 128, 128, 128, bf16)
        heads.trace(Heads(16, "full"), 16, 128, 128, 128, bf16)
        heads.trace(Heads(96, "full", interleave=True), 8, 128, 128, 64, bf16)
        heads.trace(Heads(64, "rotated", value_multiplier=0.7), 8, 192, 128, 64, bf16)
        heads.trace(Heads(24), 8, 64, 64, 64, fp32)
        for D in (128, 2048, 7168, 16384):
            sums.trace(D, bf16)
    assert found
    for binary in found:
        assert_fits(binary, CHIPS[arch])
