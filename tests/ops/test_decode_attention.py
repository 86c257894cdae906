"""Attention of one query over paged keys: its definition in fp64, its bits, its kernels without a GPU.

next: tests/ops/test_decoding_kernels.py
"""

import os

import pytest
import torch
from chips import CHIPS, assert_fits, measure
from interpreter import poison, repair_interpreter
from tiers import slow_but

from tmoe.ops.decode import attention as module
from tmoe.ops.launch.kernel_launch import compile_only

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_decoding_kernels")
compiled = pytest.mark.skipif(INTERPRETED, reason="compiles")
fp32, bf16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module", autouse=INTERPRETED)
def _interpreter():
    repair_interpreter()
    poison()
    module.CHUNK = 64  # two pages of 32


def pages(lengths, H=4, G=2, C=16, CV=16, T=32, M=5, dtype=fp32, view=False, seed=0):
    """Queries and pages in a random order; NaN wherever no token of a sequence lies."""
    draw = torch.Generator().manual_seed(seed)
    B = len(lengths)
    k = torch.full((B * M + 3, T, G, C), float("nan"), dtype=dtype)
    v = k[..., :CV] if view else torch.full((B * M + 3, T, G, CV), float("nan"), dtype=dtype)
    q = torch.randn(B, H, C, generator=draw).to(dtype)
    table = torch.randperm(len(k), generator=draw)[: B * M].view(B, M).int()
    for b, n in enumerate(lengths):
        own = torch.Generator().manual_seed(seed + 100 + b)
        for m in range(M):
            rows = max(0, min(T, n - m * T))
            k[table[b, m], :rows] = torch.randn(rows, G, C, generator=own).to(dtype)
            if not view:
                v[table[b, m], :rows] = torch.randn(rows, G, CV, generator=own).to(dtype)
            if not rows:
                table[b, m] = -7  # nobody may look there
    return q, k, v, table, torch.tensor(lengths, dtype=torch.int64)


def definition(q, k, v, table, lengths, scale, window=None, sinks=None, softcap=None):
    """Loops over sequences and heads, in fp64."""
    B, H, _ = q.shape
    T, G, CV = v.shape[1:]
    out = torch.zeros(B, H, CV, dtype=torch.float64)
    for b in range(B):
        n = int(lengths[b])
        seen = range(max(0, n - (window or n)), n)
        for h in range(H):
            if not n:
                continue
            rows = [(int(table[b, i // T]), i % T, h * G // H) for i in seen]
            keys, values = (torch.stack([t[row].double() for row in rows]) for t in (k, v))
            scores = keys @ q[b, h].double() * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[h].double().exp())
            out[b, h] = weights @ values / total
    return out


CASES = {
    "plain": {},
    "one head a key": dict(H=2),
    "window": dict(window=40),
    "window of one": dict(window=1),
    "sinks": dict(sinks=True),
    "softcap": dict(softcap=2.0),
    "all": dict(window=70, sinks=True, softcap=3.0),
    "latents": dict(G=1, C=36, CV=32, view=True),
    "narrow values": dict(C=36, CV=20),
    "many heads": dict(H=40),
    "no power of 2": dict(C=24, CV=24),
    "bf16": dict(dtype=bf16),
    "bf16 latents": dict(G=1, C=36, CV=32, view=True, dtype=bf16, window=50),
}


def call(case, lengths=(150, 0, 1, 64)):
    case = dict(CASES[case])
    how = {name: case.pop(name, None) for name in ("window", "sinks", "softcap")}
    inputs = pages(lengths, **case)
    if how["sinks"]:
        how["sinks"] = torch.linspace(-1, 3, inputs[0].shape[1])
    return inputs, how


def kernels(inputs, how, scale=0.3):
    """The op as a GPU computes it."""
    query = module.Query(*inputs, scale, how["window"] or 0, how["sinks"], how["softcap"] or 0.0)
    return module.forward(query)


def public(inputs, how, scale=0.3):
    words = dict(window=how["window"], sinks_H=how["sinks"], softcap=how["softcap"])
    return module.decode_attention(*inputs, scale=scale, **words)


@pytest.mark.parametrize("case", CASES)
def test_the_twin_is_the_definition(case):
    inputs, how = call(case)
    got, want = public(inputs, how), definition(*inputs, 0.3, *how.values())
    assert got.dtype == inputs[0].dtype and not got[1].any()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6 if got.dtype == fp32 else 2**-8)


def test_a_model_of_fp64_keeps_its_width_on_a_cpu():
    q, k, v, table, lengths = pages((150, 0, 1, 64), dtype=torch.float64)
    how = dict(window=40, sinks=torch.linspace(-1, 3, q.shape[1]).double(), softcap=None)
    got = public((q, k, v, table, lengths), how)
    want = definition(q, k, v, table, lengths, 0.3, *how.values())
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@interpreted
@pytest.mark.parametrize("case", slow_but(["all", "bf16 latents"], CASES))
def test_the_kernels_are_the_definition(case):
    """Nothing that is unused or unwritten leaks: both are NaN."""
    inputs, how = call(case)
    got, want = kernels(inputs, how), definition(*inputs, 0.3, *how.values())
    assert got.dtype == inputs[0].dtype and not got[1].any()
    # the interpreter cuts where a GPU rounds
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6 if got.dtype == fp32 else 2**-6)


@pytest.mark.parametrize("run", [public, pytest.param(kernels, marks=interpreted)])
@pytest.mark.parametrize("how", [{}, dict(window=40)], ids=str)
def test_a_row_depends_on_itself_alone(run, how):
    """Not on the batch, its order, the width of the table, the numbers of pages, or whether it is split."""
    how = {"window": None, "sinks": None, "softcap": None, **how}
    q, k, v, table, lengths = pages((150, 60, 97, 33))
    whole = run((q, k, v, table, lengths), how)
    order = torch.tensor([2, 0, 3, 1])
    turned = run((q[order].contiguous(), k, v, table[order], lengths[order]), how)
    assert torch.equal(turned, whole[order])
    moved = (torch.arange(len(k)) * 5 + 1) % len(k)  # another place for each page
    k2, v2 = torch.empty_like(k), torch.empty_like(v)
    k2[moved], v2[moved] = k, v
    elsewhere = torch.where(table < 0, table, moved[table.clamp(min=0)].int())
    for b in range(4):
        for M in {-(-int(lengths[b]) // 32), 5}:  # 1 and 2 pages of 32 are one chunk, which is not split
            one = slice(b, b + 1)
            alone = run((q[one], k2, v2, elsewhere[one, :M], lengths[one].int()), how)
            assert torch.equal(alone, whole[one])


def test_heads_that_share_a_key_see_that_key():
    """torch's own attention, with enable_gqa, over keys in order."""
    inputs, how = call("plain", (97,))
    q, k, v, table, _ = inputs
    k_GNC, v_GNC = (t[table[0, :4].long()].flatten(0, 1)[:97].transpose(0, 1) for t in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(
        q[0][None, :, None], k_GNC[None], v_GNC[None], enable_gqa=True
    )
    got = public(inputs, how, q.shape[2] ** -0.5)
    torch.testing.assert_close(got[0], want[0, :, 0])


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the same there")
def test_no_sequences_and_compiled():
    inputs, how = call("all", ())
    assert public(inputs, how).shape == (0, 4, 16)
    inputs, how = call("all")
    step = torch.compile(public, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(inputs, how), public(inputs, how))


WRONG = [
    ("q", lambda x: x[..., None], "[B, H, C]"),
    ("q", lambda x: x.long(), "bfloat16"),
    ("k", lambda x: x[..., :8], "C=16"),
    ("k", lambda x: x[:, :24], "power of 2"),
    ("v", lambda x: x[:4], "channels next to each other"),
    ("v", lambda x: x.double(), "q's"),
    ("table", lambda x: x.long(), "int32"),
    ("table", lambda x: x[:2], "[B=4"),
    ("lengths", lambda x: x[:2], "[B=4]"),
    ("lengths", lambda x: x + 20, "at most M T = 160"),
    ("window", lambda x: 0, "above 0"),
    ("softcap", lambda x: -1.0, "above 0"),
    ("sinks_H", lambda x: torch.zeros(3), "[H=4]"),
]


@pytest.mark.parametrize(("name", "change", "words"), WRONG)
def test_what_does_not_fit_is_named(name, change, words):
    inputs = dict(zip(("q", "k", "v", "table", "lengths"), pages((150, 0, 1, 64)), strict=True))
    how = {"scale": 1.0, "window": None, "sinks_H": None, "softcap": None}
    given = {**inputs, **how}
    given[name] = change(given[name])
    with pytest.raises(ValueError) as error:
        module.decode_attention(*(given[n] for n in inputs), **{n: given[n] for n in how})
    assert words in str(error.value) and str(error.value).startswith(name.removesuffix("_H"))


SHAPES = [  # H, G, C, CV, window, type, sinks, latent
    (32, 4, 128, 128, 0, bf16),  # Qwen3-30B
    (16, 16, 128, 128, 0, bf16),
    (16, 1, 576, 512, 0, bf16),  # DeepSeek-V2-Lite's latents
    (128, 1, 576, 512, 0, bf16),
    (64, 8, 64, 64, 128, bf16, True),  # gpt-oss
    (40, 2, 128, 128, 0, bf16),
    (48, 2, 96, 96, 0, torch.float16),
    (32, 4, 128, 128, 0, fp32),
    (64, 8, 192, 128, 129, bf16, True, False),  # MiMo-V2-Flash
    (64, 4, 192, 128, 0, bf16, False, False),
]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_the_kernels_fit(arch):
    found = []

    def visit(name, key, compile):
        found.append(measure(arch, name, compile))
        if name == "decode_kernel" and arch != "hip:gfx942":
            ptx = compile().asm["ptx"]
            assert "cp.async.cg.shared.global" in ptx and "mma" in ptx  # 16 bytes a copy, sent ahead

    with compile_only(arch, visit):
        for shape in SHAPES:
            module.trace(*shape)
    assert [binary.name for binary in found].count("decode_kernel") == 2 * len(SHAPES)
    for binary in found:
        assert_fits(binary, CHIPS[arch])


@compiled
def test_a_program_leaves_room_for_two_more():
    """Three programs of 128 channels on a multiprocessor of an H100."""
    found = []

    def visit(name, key, compile):
        if name == "decode_kernel" and not found:
            found.append(measure("cuda:90", name, compile))

    with compile_only("cuda:90", visit):
        module.trace(*SHAPES[0])
    assert_fits(found[0]._replace(programs=3), CHIPS["cuda:90"])
