"""Attention and RoPE against explicit softmax, complex rotation, and Hugging Face's modules.

next: test_model.py
"""

import cmath
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tmoe.config.model import ModelConfig, RopeConfig
from tmoe.model import attention_backend as attend_module
from tmoe.model.attention import Attention
from tmoe.model.attention_backend import attend, block_mask, document_mask, make_mask, tiles
from tmoe.model.rope import rope_frequencies, rope_table, rotate

CPU = torch.device("cpu")


def config(**kw) -> ModelConfig:
    return replace(ModelConfig(dim=12, heads=6, kv_heads=2, head_dim=8), **kw)


def attention(cfg: ModelConfig, window: int = 0) -> Attention:
    a = Attention(cfg, window)
    with torch.no_grad():
        for p in a.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    return a


def tables(cfg: ModelConfig, seq: int):
    return rope_table(cfg.rope, cfg.head_dim, seq, CPU)


# ---- rotary positions ----


def hf_rope(rope: RopeConfig, head_dim: int):
    """transformers' inverse frequencies and attention factor for the same settings."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = {
        "rope_type": {"none": "default"}.get(rope.scaling, rope.scaling),
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_seq,
    }
    if rope.scaling == "llama3":
        settings |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        settings |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        settings |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    cfg = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=rope.max_seq,
        rope_parameters=settings,
    )
    if rope.scaling == "none":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(cfg)
    return ROPE_INIT_FUNCTIONS[rope.scaling](cfg)


ROPES = [
    RopeConfig(),
    RopeConfig(theta=1e6),
    RopeConfig(scaling="linear", factor=4),
    RopeConfig(scaling="linear", theta=5e5, factor=2.5),
    RopeConfig(scaling="llama3", theta=5e5, factor=8, original_max_seq=8192, max_seq=131072),  # Llama 3.1
    RopeConfig(scaling="llama3", theta=5e5, factor=32, original_max_seq=8192, max_seq=131072),  # Llama 3.2
    RopeConfig(scaling="llama3", factor=4, original_max_seq=512, low_freq_factor=2, high_freq_factor=16),
    # Qwen3's long range
    RopeConfig(scaling="yarn", theta=1e6, factor=4, original_max_seq=32768, max_seq=131072),
    RopeConfig(scaling="yarn", factor=40, original_max_seq=4096, max_seq=163840),
    RopeConfig(scaling="yarn", factor=16, original_max_seq=2048, beta_fast=20, beta_slow=3),
    RopeConfig(scaling="yarn", factor=8, original_max_seq=4096, attention_factor=1.3),
    RopeConfig(scaling="yarn", factor=1, original_max_seq=4096),
    # gpt-oss
    RopeConfig(
        scaling="yarn", theta=150000.0, factor=32, original_max_seq=4096, max_seq=131072, truncate=False
    ),
    # a ramp that ends before it begins
    RopeConfig(scaling="yarn", factor=4, original_max_seq=6, truncate=False),
    RopeConfig(scaling="yarn", factor=4, original_max_seq=5),
]


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128])
@pytest.mark.parametrize(
    "rope", ROPES, ids=lambda r: f"{r.scaling}-{r.theta:g}-{r.factor:g}-{r.original_max_seq}"
)
def test_frequencies_equal_hugging_faces(rope, head_dim):
    freq, factor = rope_frequencies(rope, head_dim)
    theirs, their_factor = hf_rope(rope, head_dim)
    assert freq.shape == (head_dim // 2,)
    assert freq.dtype == torch.float32 and torch.equal(freq, theirs)
    assert factor == pytest.approx(their_factor, rel=1e-12)


def test_scalings_do_something():
    """Each of them, and the settings that only one of them reads."""
    base = RopeConfig(scaling="llama3", factor=8, original_max_seq=1024)
    kinds = [
        RopeConfig(),
        RopeConfig(scaling="linear", factor=8),
        base,
        replace(base, low_freq_factor=2),
        replace(base, scaling="yarn"),
        replace(base, scaling="yarn", beta_fast=16),
        replace(base, scaling="yarn", truncate=False),
    ]
    seen = {tuple(rope_frequencies(r, 128)[0].tolist()) for r in kinds}
    assert len(seen) == len(kinds)


@pytest.mark.parametrize(
    "rope", ROPES, ids=lambda r: f"{r.scaling}-{r.theta:g}-{r.factor:g}-{r.original_max_seq}"
)
def test_table_equals_hugging_faces_far_out(rope):
    """To fp32's last place at 100,000 positions, where one rounding of the angle is 4e-3."""
    cos, sin = rope_table(rope, 16, 100_001, CPU)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (100_001, 16)
    freq, factor = hf_rope(rope, 16)
    angle = torch.arange(100_001)[:, None].float() * torch.cat([freq, freq])  # LlamaRotaryEmbedding.forward
    assert torch.equal(cos, angle.cos() * factor) and torch.equal(sin, angle.sin() * factor)


def test_table_made_in_inference_mode_serves_training():
    cfg = config(rope=RopeConfig(theta=12345.0))
    a = attention(cfg)
    x = torch.randn(1, 7, 12)
    with torch.inference_mode():
        want = a(x, *tables(cfg, 7), None)
    got = a(x, *tables(cfg, 7), None)
    got.sum().backward()
    assert torch.equal(got, want)


def test_rotation_is_complex_multiplication():
    C, S = 8, 13
    x = torch.randn(2, S, 3, C)
    got = rotate(x, *rope_table(RopeConfig(), C, S, CPU))
    for s in range(S):
        for i in range(C // 2):
            turn = cmath.exp(1j * s * 10000 ** (-2 * i / C))
            for b, h in ((0, 0), (1, 2)):
                want = complex(x[b, s, h, i], x[b, s, h, i + C // 2]) * turn
                assert got[b, s, h, i].item() == pytest.approx(want.real, abs=1e-6)
                assert got[b, s, h, i + C // 2].item() == pytest.approx(want.imag, abs=1e-6)


def test_rotation_keeps_the_type():
    cos, sin = rope_table(RopeConfig(), 8, 5, CPU)
    x = torch.randn(1, 5, 2, 8, dtype=torch.bfloat16)
    got = rotate(x, cos, sin)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(x.float(), cos, sin).bfloat16())  # one rounding, at the end


# ---- attention ----


def naive(a: Attention, x_BSD, cos, sin, allowed):
    """One query and one head at a time, in fp64; allowed(b, i, j) says whether i may look at j."""
    cfg = a.cfg
    H, G, C, V = cfg.heads, a.key_heads, cfg.head_dim, cfg.value_dim
    x = x_BSD.double()
    qkv = a.qkv.weight.double()
    o = a.o.weight.double()
    bias = torch.zeros(len(qkv)) if a.qkv.bias is None else a.qkv.bias.double()
    scale = 1 / math.sqrt(C) if cfg.attention_multiplier is None else cfg.attention_multiplier
    out = torch.zeros(*x.shape[:2], H * V, dtype=torch.float64)

    def head(b, s, first, width):
        rows = slice(first, first + width)
        return qkv[rows] @ x[b, s] + bias[rows]

    def turned(b, s, row):
        v = head(b, s, row * C, C)
        flipped = torch.cat([-v[C // 2 :], v[: C // 2]])
        return v * cos[s].double() + flipped * sin[s].double()

    for b in range(x.shape[0]):
        for h in range(H):
            g = h // (H // G)
            for i in range(x.shape[1]):
                js = [j for j in range(x.shape[1]) if allowed(b, i, j)]
                q = turned(b, i, h)
                scores = [q @ turned(b, j, H + g) * scale for j in js]
                scores = torch.stack(scores + ([] if a.sinks is None else [a.sinks[h].double()])).softmax(0)
                values = [head(b, j, (H + G) * C + g * V, V) * cfg.value_multiplier for j in js]
                out[b, i, h * V : (h + 1) * V] = sum(p * v for p, v in zip(scores, values, strict=False))
    return out @ o.T + (0 if a.o.bias is None else a.o.bias.double())


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (4, 4), (3, 1)])
def test_grouped_causal_attention_equals_softmax(heads, kv_heads):
    cfg = config(heads=heads, kv_heads=kv_heads)
    a = attention(cfg)
    x = torch.randn(2, 6, 12)
    cos, sin = tables(cfg, 6)
    want = naive(a, x, cos, sin, lambda b, i, j: j <= i)
    torch.testing.assert_close(a(x, cos, sin, None).double(), want, rtol=1e-5, atol=1e-5)


def test_document_mask_equals_softmax_over_allowed_keys():
    cfg = config()
    a = attention(cfg)
    x = torch.randn(2, 7, 12)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 9]])
    cos, sin = tables(cfg, 7)
    want = naive(a, x, cos, sin, lambda b, i, j: j <= i and bool(documents[b, i] == documents[b, j]))
    got = a(x, cos, sin, document_mask(documents))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "window, changes",
    [
        (3, dict(sinks=True, qkv_bias=True, o_bias=True)),  # gpt-oss's blocks in turn
        (0, dict(sinks=True, heads=4, kv_heads=4, head_dim=10)),
        (1, dict(attention_multiplier=0.7)),
        (7, dict(sinks=True, kv_heads=1, attention_multiplier=0.1)),  # as wide as the sequence: none
        (3, dict(window_sinks=True, window_kv_heads=3, v_head_dim=6, value_multiplier=0.7)),  # MiMo's in turn
        (0, dict(window_sinks=True, window_kv_heads=3, v_head_dim=6, value_multiplier=0.7, qkv_bias=True)),
        (0, dict(v_head_dim=10)),
    ],
)
def test_windows_sinks_biases_and_scale_equal_softmax(window, changes, documents):
    """Values and the gradient of every parameter."""
    cfg = config(**changes)
    a = attention(cfg, window)
    x = torch.randn(1, 7, 12)
    ids = torch.tensor([[0, 0, 0, 0, 0, 2, 2]]) if documents else torch.zeros(1, 7)
    near = window or 7
    want = naive(a, x, *tables(cfg, 7), lambda b, i, j: i - near < j <= i and bool(ids[b, i] == ids[b, j]))
    got = a(x, *tables(cfg, 7), document_mask(ids) if documents else None)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(got)
    names = dict(a.named_parameters())
    found = torch.autograd.grad((got * weights).sum(), names.values())
    exact = torch.autograd.grad((want * weights).sum(), names.values())
    for name, g, e in zip(names, found, exact, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_document_mask_by_hand():
    mask = document_mask(torch.tensor([[3, 3, 8, 3]]))
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 0, 1]]
    assert mask.dtype == torch.bool and mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == want


def test_one_document_is_plain_causal_attention():
    cfg = config()
    a = attention(cfg)
    x = torch.randn(2, 9, 12)
    masked = a(x, *tables(cfg, 9), document_mask(torch.full((2, 9), 4)))
    torch.testing.assert_close(masked, a(x, *tables(cfg, 9), None), rtol=1e-5, atol=1e-6)


def test_packed_documents_equal_each_alone():
    """Positions run on through the row, but attention sees only their differences."""
    cfg = config(qk_norm="head", rope=RopeConfig(scaling="yarn", factor=4, original_max_seq=16))
    a = attention(cfg)
    x = torch.randn(1, 20, 12)
    lengths = [5, 1, 11, 3]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    packed = a(x, *tables(cfg, 20), document_mask(documents))
    alone = [a(part, *tables(cfg, part.shape[1]), None) for part in x.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)


def test_nothing_comes_from_later_tokens():
    cfg = config()
    a = attention(cfg)
    x = torch.randn(2, 9, 12)
    other = torch.cat([x[:, :5], torch.randn(2, 4, 12)], 1)
    y, z = (a(v, *tables(cfg, 9), None) for v in (x, other))
    torch.testing.assert_close(y[:, :5], z[:, :5])
    assert not torch.allclose(y[:, 5:], z[:, 5:])


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("S", "C"), [(256, 16), (150, 24)])
def test_attention_in_blocks_is_the_masks(monkeypatch, S, C, window, sinks):
    """A GPU's way, here without its kernels.

    Short documents, ids that come again, padding, windows and sinks.
    """
    monkeypatch.setattr(attend_module, "fused", lambda fn, *sizes: fn)
    ids = torch.randint(4, (2, S // 16 + 1)).repeat_interleave(16, 1)[:, :S]
    ids[1, 40:49] = -1
    q, k, v = (torch.randn(2, S, heads, width) for heads, width in ((4, C), (2, C), (2, 16)))
    sink = torch.randn(4) if sinks else None
    want = attend(q, k, v, document_mask(ids), None, window, sink)
    got = attend(q, k, v, block_mask(ids, window, S, CPU), None, window, sink)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 50, 128, 129, 400])
@pytest.mark.parametrize("S", [5, 128, 129, 700, 1024])
def test_blocks_are_those_that_hold_anything(S, window):
    """torch finds them by looking at every pair.

    Documents one after another: the same blocks in the same order. Ids that come again: no block is missing.
    """
    lengths = [torch.randint(1, 400, (S,)).cumsum(0) for _ in range(3)]
    rows = torch.stack([torch.bucketize(torch.arange(S), ends, right=True) for ends in lengths])
    for ids in (None, torch.zeros_like(rows), rows, rows.remainder(3).masked_fill(torch.rand(S) < 0.02, -1)):
        ours = block_mask(ids, window, S, CPU)
        theirs = create_block_mask(ours.mask_mod, None if ids is None else 3, None, S, S, device="cpu")
        for side in ("kv", "q", "full_kv", "full_q"):
            (n, at), (want_n, want) = (
                [getattr(m, f"{side}_{w}") for w in ("num_blocks", "indices")] for m in (ours, theirs)
            )
            # flex attention's kernels read them so, whatever the strides say
            assert n.is_contiguous() and at.is_contiguous()
            seen, wanted = marked(n, at), marked(want_n, want)
            if ids is rows or ids is None or not ids.any() or side.startswith("full"):
                assert (
                    torch.equal(seen, wanted)
                    and n.dtype == at.dtype == torch.int32
                    and n.shape == want_n.shape
                )
                assert (at.sort(-1).values == torch.arange(at.shape[-1])).all()
            else:
                assert not (wanted & ~seen).any()
        assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE


def marked(numbers, indices):
    """[B, 1, blocks, blocks] bool of the first `numbers` indices of each row."""
    within = torch.arange(indices.shape[-1]) < numbers[..., None]
    return torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), within)


def test_eager_blocks_compile_flex_attention_for_any_number_of_lengths(monkeypatch):
    """And for any mode: Dynamo stops at eight kinds of calls of a function."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(len(inputs))
        return graph

    monkeypatch.setattr(attend_module, "COMPILE", dict(dynamic=False, backend=backend))
    attend_module._compiled.cache_clear()
    for n, S in enumerate(range(40, 52), 1):
        ids = torch.randint(4, (2, S))
        q, k, v = (torch.randn(2, S, heads, 16) for heads in (4, 2, 2))
        got = attend(q, k, v, block_mask(ids, 0, S, CPU))
        torch.testing.assert_close(got, attend(q, k, v, document_mask(ids)), rtol=1e-5, atol=1e-5)
        assert len(compiled) == n
    q, k, v = (torch.randn(2, 60, heads, 16) for heads in (4, 2, 2))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for ids, window in itertools.product(
            (None, torch.randint(4, (2, 60)), torch.zeros(2, 60).int()), (0, 20)
        ):
            n += 1
            with mode():
                attend(q, k, v, block_mask(ids, window, 60, CPU), window=window)
            assert len(compiled) == n, (mode, window)
    attend_module._compiled.cache_clear()


def test_compiled_blocks_ask_for_no_mode(monkeypatch):
    """torch 2.11's Dynamo cannot trace the question for inference mode.

    Every compiled run with documents kept apart ended there.
    """
    real = torch.is_inference_mode_enabled

    def asked():
        torch._dynamo.graph_break()  # nothing, unless Dynamo comes here
        return real()

    q, k, v = (torch.randn(2, 40, heads, 16) for heads in (4, 2, 2))
    ids = torch.randint(4, (2, 40))
    mask = block_mask(ids, 0, 40, CPU)
    want = attend(q, k, v, document_mask(ids))
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend="eager")
    monkeypatch.setattr(torch, "is_inference_mode_enabled", asked)
    torch.testing.assert_close(compiled(q, k, v, mask), want, rtol=1e-5, atol=1e-5)


def test_tiles_fit_into_shared_memory():
    """Queries once, stages of keys and values, and rows rounded up to powers of two.

    What torch takes where we set nothing fits as well.
    """
    room = 232448 - 16 * 1024
    kept = 0
    for dtype, hopper in itertools.product((torch.float32, torch.bfloat16, torch.float16), (True, False)):
        for width in range(16, 513, 16):
            for values in (width, 128, 512):
                chosen = tiles(dtype, width, values, hopper)
                rows, columns = (1 << (n - 1).bit_length() for n in (width, values))
                if "fwd_BLOCK_M" in chosen:
                    M, N, stages = (chosen[f"fwd_{of}"] for of in ("BLOCK_M", "BLOCK_N", "num_stages"))
                    assert dtype.itemsize * (M * rows + stages * N * (rows + columns)) < room
                else:
                    kept += 1
                    assert max(rows, columns) * dtype.itemsize <= 512
    assert kept
    latent = tiles(torch.bfloat16, 192, 128, True)
    blocks = ("M1", "N1", "M2", "N2")
    assert [latent[f"bwd_BLOCK_{of}"] for of in blocks] == [64, 128, 128, 64]  # as measured
    assert all(
        "bwd_BLOCK_M1" not in tiles(torch.bfloat16, *of) for of in ((192, 128, False), (128, 128, True))
    )
    # torch's own for fp32 are of 177 KB where a width lies between two that it lists; an A100 has 163
    assert all(
        "fwd_BLOCK_M" in tiles(torch.float32, width, values, False)
        for width in (65, 72, 96, 127)
        for values in (64, 96, 128)
    )


def test_on_a_gpu_sinks_take_blocks_too():
    """A dense mask takes four times as long, and plain causal attention has no place for sinks."""
    meta = torch.device("meta")  # a GPU's rules
    assert isinstance(make_mask(None, 0, 70, meta, 16, sinks=True), BlockMask)
    assert make_mask(None, 0, 70, meta, 16) is None and make_mask(None, 0, 70, CPU, 16, sinks=True) is None


@pytest.mark.parametrize("window", [0, 50])
def test_heads_too_narrow_for_flex_attention_get_the_dense_mask(window):
    ids = torch.randint(4, (2, 70))
    meta = torch.device("meta")  # a GPU's rules
    assert torch.equal(make_mask(ids, window, 70, meta, width=8), document_mask(ids))
    assert make_mask(None, window, 70, meta, width=15) is None


# ---- whole modules of Hugging Face ----


def hf_attention(kind: str, cfg: ModelConfig):
    import transformers
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
    from transformers.models.olmoe.modeling_olmoe import OlmoeAttention
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

    classes = {
        "none": (transformers.LlamaConfig, LlamaAttention),
        "head": (transformers.Qwen3MoeConfig, Qwen3MoeAttention),
        "full": (transformers.OlmoeConfig, OlmoeAttention),
    }
    config_class, attention_class = classes[kind]
    hf_cfg = config_class(
        hidden_size=cfg.dim,
        num_attention_heads=cfg.heads,
        num_key_value_heads=cfg.kv_heads,
        head_dim=cfg.head_dim,
        rms_norm_eps=cfg.norm_eps,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope.theta},
        attn_implementation="eager",
    )
    return attention_class(hf_cfg, layer_idx=0), LlamaRotaryEmbedding(hf_cfg)


@pytest.mark.parametrize("kind", ["none", "head", "full"])  # Llama, Qwen3, OLMoE
def test_qk_norm_equals_hugging_faces(kind):
    # OLMoE's head width is D / H
    cfg = config(dim=48, qk_norm=kind, norm_eps=1e-5)
    ours = attention(cfg)
    theirs, rotary = hf_attention(kind, cfg)
    q, k, v = ours.qkv.weight.split([48, 16, 16])
    weights = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "o_proj.weight": ours.o.weight}
    if kind != "none":
        weights |= {"q_norm.weight": ours.q_norm.weight, "k_norm.weight": ours.k_norm.weight}
    theirs.load_state_dict(weights)
    x = torch.randn(2, 11, 48)
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = ours(x_ours, *tables(cfg, 11), None)
    causal = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    want = theirs(x_theirs, rotary(x, torch.arange(11)[None]), causal)[0]
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    c = torch.randn_like(y)
    grads = (torch.autograd.grad((a * c).sum(), b)[0] for a, b in ((y, x_ours), (want, x_theirs)))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_a_tracer_leaves_no_table_behind():
    """What torch.export or a fake mode makes of cos and sin is of no use to the next call."""
    with FakeTensorMode():
        rope_table(RopeConfig(), 8, 77, CPU)
    cos, _ = rope_table(RopeConfig(), 8, 77, CPU)
    assert type(cos) is torch.Tensor and rope_table(RopeConfig(), 8, 77, CPU)[0] is cos
