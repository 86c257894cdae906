"""Latent attention against DeepSeek's equations written out in fp64, its counts and its memory.

And a compiled block that holds it.

next: tmoe/model/latent.py
"""

import math
from dataclasses import replace

import pytest
import torch
from held import saved_bytes
from tiers import slow_but

from tmoe.config.axes import ALONE
from tmoe.config.check import ConfigError
from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from tmoe.config.run import Config, TrainConfig
from tmoe.model.attention_backend import document_mask
from tmoe.model.count import count_parameters, flops_per_token
from tmoe.model.latent import LatentAttention
from tmoe.model.rope import rope_table
from tmoe.model.transformer import Block, Transformer
from tmoe.plan.block_memory import layer_bytes

CPU = torch.device("cpu")
SHAPES = {
    "query latent": dict(mla=MLAConfig(q_rank=7, kv_rank=9, nope_dim=4, rope_dim=6, v_dim=5)),
    "plain queries, halves": dict(
        mla=MLAConfig(kv_rank=3, nope_dim=2, rope_dim=4, v_dim=6, interleave=False)
    ),
    "wide values": dict(mla=MLAConfig(q_rank=5, kv_rank=4, nope_dim=1, rope_dim=2, v_dim=11)),
    "one head": dict(heads=1, mla=MLAConfig(kv_rank=16, nope_dim=8, rope_dim=8, v_dim=16)),
    "yarn": dict(
        mla=MLAConfig(q_rank=7, kv_rank=9, nope_dim=4, rope_dim=8, v_dim=4),
        rope=RopeConfig(
            scaling="yarn", factor=40, original_max_seq=16, max_seq=640, mscale=0.707, mscale_all_dim=1.1
        ),
    ),
    "queries by position": dict(
        mla=MLAConfig(q_rank=7, kv_rank=9, nope_dim=4, rope_dim=6, v_dim=5),
        rope=RopeConfig(query_beta=0.6, original_max_seq=5),
    ),
}


def config(**kw) -> ModelConfig:
    return ModelConfig(
        **dict(vocab=31, dim=20, layers=2, heads=3, attention="mla", ffn_dim=24, dense_layers=9) | kw
    )


def yarn_angles(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Radians per position, from DeepSeek's description.

    Pairs that turn more than 32 times over the trained range stay. Those that turn less than once are
    divided by the factor. In between the change is linear in the pair's number.
    """
    pair = torch.arange(dim // 2, dtype=torch.float64)
    angle = rope.theta ** (-2 * pair / dim)
    if rope.scaling == "none":
        return angle

    def number(turns):
        return dim * math.log(rope.original_max_seq / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(number(32)), 0)
    high = min(math.ceil(number(1)), dim - 1)
    stretched = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return angle * (1 - stretched) + angle / rope.factor * stretched


def written_out(
    attention: LatentAttention, cfg: ModelConfig, x: torch.Tensor, documents: torch.Tensor
) -> torch.Tensor:
    """DeepSeek-V2 (2024), eq. 9 to 13 and 14 to 19, head by head and token by token in complex numbers."""
    m = cfg.mla
    H = cfg.heads
    eps = 1e-6
    w = {n: p.double() for n, p in attention.named_parameters()}
    rows = w["qkv_a.weight"]
    q_a, kv_a, k_r = rows.split([len(rows) - m.kv_rank - m.rope_dim, m.kv_rank, m.rope_dim])

    def normed(c, scale):
        return c / (c.square().mean(-1, keepdim=True) + eps).sqrt() * scale

    def turned(c):  # [B, S, ..., rope_dim]
        pairs = c.unflatten(-1, (-1, 2)) if m.interleave else c.unflatten(-1, (2, -1)).mT
        angle = torch.arange(c.shape[1], dtype=torch.float64)[:, None] * yarn_angles(cfg.rope, m.rope_dim)
        angle = angle.view(c.shape[1], *(1,) * (c.dim() - 3), -1)
        return torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)

    x = x.double()
    q = x @ q_a.T
    if m.q_rank:
        q = normed(q, w["q_norm.weight"]) @ w["q_b.weight"].T
    q = q.unflatten(-1, (H, -1))
    kv = (normed(x @ kv_a.T, w["kv_norm.weight"]) @ w["kv_b.weight"].T).unflatten(-1, (H, -1))
    k_c, v = kv[..., : m.nope_dim], kv[..., m.nope_dim :]
    q_r, k_r = turned(q[..., m.nope_dim :]), turned(x @ k_r.T)
    logits = torch.einsum("bshc,bthc->bhst", q[..., : m.nope_dim], k_c)
    rotary = torch.einsum("bshc,btc->bhst", q_r, k_r.conj()).real
    scale = (m.nope_dim + m.rope_dim) ** -0.5
    if cfg.rope.scaling == "yarn":
        mscale, mscale_all = (0.1 * s * math.log(cfg.rope.factor) + 1 for s in (0.707, 1.1))
        rotary = rotary * (mscale / mscale_all) ** 2
        scale *= mscale_all**2
    S = x.shape[1]
    seen = (documents[:, :, None] == documents[:, None, :]) & torch.ones(S, S).bool().tril()
    eras = torch.arange(S) // cfg.rope.original_max_seq
    scale = scale * (1 + cfg.rope.query_beta * (1 + eras.double()).log()[:, None])  # of each query
    p = ((logits + rotary) * scale).masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhst,bthc->bshc", p, v).flatten(-2) @ w["o.weight"].T


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_equations(shape, documents):
    cfg = config(**SHAPES[shape])
    torch.manual_seed(0)
    attention = LatentAttention(cfg)
    S = 23
    for p in attention.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.4)
    x = torch.randn(2, S, cfg.dim, requires_grad=True)
    ids = torch.arange(S).div(9, rounding_mode="floor").expand(2, S) if documents else torch.zeros(2, S)
    tables = rope_table(cfg.rope, cfg.rotary_dim, S, CPU)
    y = attention(x, *tables, document_mask(ids) if documents else None)
    grads = torch.autograd.grad(y.square().sum(), [x, *attention.parameters()])
    want = written_out(attention, cfg, x, ids)
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-5)
    for got, exact in zip(
        grads, torch.autograd.grad(want.square().sum(), [x, *attention.parameters()]), strict=True
    ):
        assert (got - exact).norm() < 1e-5 * exact.norm()


def test_queries_are_scaled_by_the_positions_of_their_documents():
    """Packed documents with positions of their own are as they are alone; by their place in the row, not."""
    torch.manual_seed(0)
    model = Transformer(config(**SHAPES["queries by position"]))
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.4)
    lengths = 13, 10
    tokens = torch.randint(31, (1, sum(lengths)))
    ids = torch.arange(2).repeat_interleave(torch.tensor(lengths))[None]
    at = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = torch.cat([model(part) for part in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(model(tokens, documents_BS=ids, positions_BS=at), alone, rtol=1e-4, atol=1e-4)
    in_the_row = model(tokens, documents_BS=ids)
    torch.testing.assert_close(in_the_row[:, :13], alone[:, :13], rtol=1e-4, atol=1e-4)
    assert (in_the_row - alone)[:, 14:].abs().max() > 0.1


def test_the_norms_of_latents_keep_their_epsilon():
    """DeepSeek's code leaves them at 1e-6 whatever rms_norm_eps says."""
    attention = LatentAttention(config(norm_eps=0.5, **SHAPES["query latent"]))
    assert attention.q_norm.eps == attention.kv_norm.eps == 1e-6


@pytest.mark.parametrize(
    ("kw", "word"),
    [
        (dict(mla=MLAConfig(), qk_norm="head"), r"--model\.qk-norm=head: not with --model\.attention=mla"),
        (dict(window=4), r"--model\.window=4: not with"),
        (dict(attention="latent"), r"--model\.attention=latent: must be one of gqa, mla"),
    ],
)
def test_what_it_does_not_compute_is_refused(kw, word):
    with pytest.raises(ConfigError, match=word):
        config(**kw)


@pytest.mark.parametrize(
    ("kw", "word"),
    [
        (dict(rope_dim=5), r"--model\.mla\.rope-dim=5: must be even"),
        (dict(q_rank=-1), r"--model\.mla\.q-rank=-1"),
        (dict(kv_rank=0), r"--model\.mla\.kv-rank=0: must be at least 1"),
    ],
)
def test_widths_are_checked(kw, word):
    with pytest.raises(ConfigError, match=word):
        MLAConfig(**kw)
    assert config(heads=5, kv_heads=3).heads == 5, "kv_heads is none of latent attention's settings"


@pytest.mark.parametrize("shape", SHAPES)
def test_counts_equal_the_built_model(shape):
    cfg = config(**SHAPES[shape], moe=MoEConfig(choice_bias=True, shared_dim=6))
    cfg = replace(cfg, dense_layers=1)
    with torch.device("meta"):
        built = Transformer(cfg)
    assert count_parameters(cfg).total == sum(p.numel() for p in built.parameters())


def test_flops_worked_by_hand():
    cfg = config(**SHAPES["query latent"])
    matrices = 20 * (7 + 9 + 6) + 7 * 3 * 10 + 9 * 3 * (4 + 5) + 3 * 5 * 20 + 3 * 20 * 24
    active = 2 * (matrices + 7 + 9 + 2 * 20) + 31 * 20 + 20
    # a causal token of 64 sees 32 on average: products over 10 channels and sums over 5, forward and
    # twice backward
    assert flops_per_token(cfg, 64) == 6 * active + 2 * 3 * (2 * 10 * 32 + 2 * 5 * 32) * 3


@pytest.mark.parametrize("kind", ["moe", "dense"])
@pytest.mark.parametrize(("q_rank", "v_dim"), slow_but([(96, 40)], [(0, 48), (96, 40)]))
def test_activations_match_what_a_compiled_block_keeps(monkeypatch, kind, q_rank, v_dim):
    torch.compiler.reset()  # every case compiles the same code, which may be compiled eight times
    # as on the GPU
    monkeypatch.setattr("tmoe.moe.router.on_matrix_units", lambda x: x.dtype == torch.bfloat16)
    moe = MoEConfig(experts=8, ffn_dim=128, score="sigmoid", choice_bias=True, groups=4, top_groups=2)
    mla = MLAConfig(q_rank=q_rank, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=v_dim)
    model = config(dim=256, heads=4, mla=mla, dense_layers=int(kind == "dense"), ffn_dim=512, moe=moe)
    cfg = Config(model=model, train=TrainConfig(batch=2, seq=256, dtype="bf16", isolate_documents=False))
    torch.manual_seed(0)
    block = Block(model, 0).bfloat16()
    block.compute = torch.compile(
        block.compute, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition"
    )
    x = torch.randn(2, 256, 256, dtype=torch.bfloat16, requires_grad=True)
    assert layer_bytes(cfg, ALONE, 0) == pytest.approx(saved_bytes(block, x, model), rel=0.02)
