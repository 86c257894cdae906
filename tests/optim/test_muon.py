"""Muon: one step, its layouts against a plain loop, skipped steps, narrow momentum, memory, errors.

next: tests/lib/plain_muon.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import layouts
import plain_muon
import pytest
import torch
import torch.distributed as dist
from tiers import slow_but
from torch import nn

from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.config.presets import presets
from tmoe.config.run import OptimConfig
from tmoe.model.freeze import require_matches
from tmoe.model.muon import describe, parts_of
from tmoe.model.transformer import Transformer
from tmoe.ops import newton_schulz as op
from tmoe.ops.dynamic_map import dequantise
from tmoe.ops.newton_schulz import by_launches, flops, orthogonal
from tmoe.ops.reference import MuonRule, muon, newton_schulz, newton_schulz_in_pairs
from tmoe.ops.symmetric import Terms
from tmoe.optim.adamw import build_optimizer, init_state, optimizer_tensors
from tmoe.optim.matrices import Rows, chosen, fits_muon, merged, work
from tmoe.optim.owners import at_owners, height, owners_of, waves
from tmoe.parallel.layout import lay_out
from tmoe.parallel.mesh import local_part, shard_dim
from tmoe.plan.memory import chunk_spans, memory_per_rank
from tmoe.plan.muon_memory import muon_elements

CPU = torch.device("cpu")
LAYOUTS = [  # processes, axes, model, by head, forwards whole
    (1, {}, "gqa", False, True),
    (4, dict(dp=2, ep=2), "gqa", False, True),
    (2, dict(dp=2), "latent_0", True, False),
    (2, dict(ep=2), "kinds", True, True),
    (2, dict(dp=2, cp=2), "gpt_oss", False, False),
    (2, dict(etp=2), "gqa", False, True),
    (2, dict(dp=2, tp=2), "linear", True, True),
    (1, {}, "branches", False, True),
    (4, dict(pp=2, dp=2), "tied_1", False, True),
    (4, dict(dp=2, replicate=2), "latent", False, True),
]


# ---- Newton-Schulz ----


def spectrum(stack: int, rows: int, columns: int, decay: float = 1.2) -> torch.Tensor:
    """Matrices [stack, rows, columns] with singular values 1, 2^-decay, 3^-decay and so on, times 1e-4."""
    draw = torch.Generator().manual_seed(rows)
    m = min(rows, columns)
    U, V = (torch.linalg.qr(torch.randn(stack, n, m, generator=draw))[0] for n in (rows, columns))
    return (U * torch.arange(1, m + 1).float().pow(-decay)) @ V.mT * 1e-4


@pytest.mark.parametrize(("rows", "columns"), [(48, 128), (128, 48), (64, 64)])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_stack_is_the_definition_of_each_matrix(rows, columns, dtype, near):
    stack = spectrum(3, rows, columns).to(dtype)
    found = orthogonal(stack.view(3, 1, rows, columns)).view(3, rows, columns)
    for got, matrix in zip(found, stack, strict=True):
        want = newton_schulz(matrix)
        assert (got - want).norm() < near * want.norm()


def test_bf16_is_near_and_singular_values_are_near_one():
    """Measured elsewhere: after five iterations .86 to 1.14; a sixth brings them to 0.99 to 1.01."""
    stack = spectrum(4, 48, 128)
    for iterations, low, high in ((5, 0.8, 1.17), (6, 0.97, 1.03)):
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.linalg.svdvals(orthogonal(stack.to(dtype), iterations).float())
            assert values.min() > low and values.max() < high, (iterations, dtype, values.aminmax())


@pytest.mark.parametrize(("rows", "columns"), [(24, 64), (64, 24)])
def test_pairs_of_iterations_are_the_same_polynomials(rows, columns):
    for iterations in range(1, 8):
        for matrix in spectrum(2, rows, columns).double():
            want = newton_schulz(matrix, iterations)
            assert (newton_schulz_in_pairs(matrix, iterations) - want).norm() < 1e-9 * want.norm()


@pytest.fixture
def plain_products(monkeypatch):
    """`by_launches` on a CPU: its products round as the kernels do."""

    def lower(scales, product, dtype):
        product = product * scales.view(-1, 1, 1)
        return (product.tril() + product.tril(-1).mT).to(dtype)

    def symmetric_product(x, scales, terms: Terms, tall=False, dtype=None):
        wide, one = x.float().mT if tall else x.float(), torch.eye(x.shape[2 if tall else 1])
        product = terms.square * wide @ wide.mT
        product = product + terms.linear * wide + terms.one * one if terms.linear or terms.one else product
        return lower(scales, product, dtype or x.dtype)

    def commuting_product(a, b, scales, dtype=None):
        return lower(scales, a.float() @ b.float(), dtype or a.dtype)

    monkeypatch.setattr(op, "symmetric_product", symmetric_product)
    monkeypatch.setattr(op, "commuting_product", commuting_product)
    monkeypatch.setattr(op, "stacked_product", lambda a, b, out: out.copy_(a.float() @ b.float()))


def of_kinds(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Matrices [rows, columns] such as gradients are: normal numbers, few directions and noise, decay."""
    draw, m = torch.Generator().manual_seed(0), min(rows, columns)
    normal = torch.randn(rows, columns, generator=draw)
    few = torch.randn(rows, 4, generator=draw) @ torch.randn(4, columns, generator=draw)
    low = {f"few + {part}": few / few.norm() + part * normal / normal.norm() for part in (0.1, 1e-2, 1e-3)}
    decays = {f"decay {decay}": spectrum(1, rows, columns, decay)[0] for decay in (0.6, 1.2, 2.0, 4.0)}
    U, V = (torch.linalg.qr(torch.randn(n, m, generator=draw))[0] for n in (rows, columns))
    sizes = {
        f"condition 1e{e}": U * 10 ** torch.linspace(0, -e, m) @ V.mT for e in range(1, 6)
    }  # singular values at equal distances of their logarithms
    return dict(normal=normal, one=few[:, :1] * normal[:1]) | low | decays | sizes


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(96, 256), (200, 120), (96, 96)])
def test_fp16_between_is_not_farther_than_bf16(plain_products, rows, columns, pairs):
    """From the iteration in fp64 of the same bf16 numbers, with five to seven iterations."""
    for name, matrix in of_kinds(rows, columns).items():
        stack = matrix.to(torch.bfloat16)[None]
        for iterations in (5, 6, 7):
            want = newton_schulz(stack[0].double(), iterations)
            scales = 1 / (torch.linalg.vector_norm(stack, dim=(-2, -1), dtype=torch.float32) * 1.01 + 1e-7)
            far = []
            for options in (dict(pairs=False, between=torch.bfloat16), dict(pairs=pairs)):
                found = torch.empty_like(stack)
                by_launches(stack, scales, iterations, found, **options)
                far.append(((found[0].double() - want).norm() / want.norm()).item())
            assert far[1] <= 1.05 * far[0], (name, iterations, far)


def test_zeros_stay_zero_and_nothing_is_empty_handed(monkeypatch):
    stack = torch.zeros(3, 8, 16)
    stack[1] = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    found = orthogonal(stack)
    assert found[0].eq(0).all() and found[2].eq(0).all() and found.isfinite().all()
    assert orthogonal(torch.zeros(0, 8, 16)).shape == (0, 8, 16)
    whole = orthogonal(spectrum(5, 8, 16))
    monkeypatch.setattr("tmoe.ops.newton_schulz.CHUNK", 2 * 8 * 16)
    torch.testing.assert_close(orthogonal(spectrum(5, 8, 16)), whole)
    with pytest.raises(ValueError, match=r"matrices of shape \[8\], valid: \[..., out, in\]"):
        orthogonal(torch.zeros(8))


# ---- layouts ----


def plain(rank: int, world: int, model: str, optim: dict):
    cfg = layouts.MODELS[model]
    layouts.build_optimizer = lambda named, optim, device, parts: plain_muon.PlainMuon(named, optim, cfg)
    return layouts.train(rank, world, {}, model, optim=optim)


@pytest.fixture(scope="module")
def loop(gloo):
    made: dict[tuple, layouts.Curve] = {}

    def train(model: str, by_head: bool) -> layouts.Curve:
        if (model, by_head) not in made:
            optim = dict(muon=".", muon_heads=by_head)
            made[model, by_head] = gloo(1, plain, model, optim)[0]
        return made[model, by_head]

    return train


@pytest.mark.parametrize(("world", "axes", "model", "by_head", "whole"), slow_but(LAYOUTS[:2], LAYOUTS))
def test_layouts_equal_a_plain_loop(gloo, loop, world, axes, model, by_head, whole):
    optim = dict(muon=".", muon_heads=by_head)
    train = partial(layouts.train, whole_forwards=whole, optim=optim)
    found = gloo(world, train, axes, model, 4 if "pp" in axes else 1)[0]
    layouts.assert_same(found, loop(model, by_head), 1e-5)


def counted(function, calls: list[int], *args, **kwargs):
    calls.append(1)
    return function(*args, **kwargs)


def sent(rank: int, world: int) -> list[int]:
    """Collectives of a step in which Muon trains the experts, and of one in which it trains attention."""
    counts = []
    for pattern in ("experts", "attention"):
        cfg = layouts.config(layouts.ParallelConfig(dp=2, ep=2), "gqa", 1, optim=dict(muon=pattern))
        net = layouts.transformer(cfg, layouts.build_mesh(dp=2, ep=2), True)
        net.to_empty(device="cpu")
        net.init_weights(0)
        optimizer = build_optimizer(net.named_parameters(), cfg.optim, CPU, parts=parts_of(net))
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "all_gather"):
                patch.setattr(dist, name, partial(counted, getattr(dist, name), calls))
            optimizer.step()
        counts.append(len(calls))
    return counts


def test_experts_are_sent_nowhere_and_dense_matrices_twice(gloo):
    assert gloo(4, sent) == [[0, 2]] * 4


def doubled(rank: int, world: int) -> list[bool]:
    """Rows of three matrices, one of them of fewer rows than ranks; owners multiply matrix i by 2 i."""
    shapes = [(2, 3), (9, 4), (5, 1)]
    whole = [
        torch.arange(rows * columns, dtype=torch.bfloat16).view(rows, columns) for rows, columns in shapes
    ]
    local = [t.chunk(world)[rank] if rank < len(t.chunk(world)) else t[:0] for t in whole]

    def compute(numbers: list[int], full: list[torch.Tensor]) -> list[torch.Tensor]:
        assert all(torch.equal(t, whole[i]) for i, t in zip(numbers, full, strict=True))
        return [2 * i * t for i, t in zip(numbers, full, strict=True)]

    found = at_owners(local, shapes, compute, dist.group.WORLD)
    return [torch.equal(t, 2 * i * rows) for i, (t, rows) in enumerate(zip(found, local, strict=True))]


def test_ranks_without_rows_take_part(gloo):
    assert gloo(4, doubled) == [[True] * 3] * 4


def test_owners_have_about_the_same_work():
    shapes = [(8, 8)] * 5 + [(16, 16)] * 2 + [(4, 32)] * 3
    owner = owners_of(shapes, 3)
    load = [0.0] * 3
    for (rows, columns), at in zip(shapes, owner, strict=True):
        load[at] += rows * columns * min(rows, columns)
    assert sorted(set(owner)) == [0, 1, 2] and max(load) <= 16**3 + 8**3
    assert [height(10, 4, r) for r in range(4)] == [len(p) for p in torch.arange(10).chunk(4)] + [1][4:]
    assert [height(9, 4, r) for r in range(4)] == [3, 3, 3, 0]
    assert list(waves([], 2)) == [] and list(waves([2**27, 2**28, 1], 2)) == [[0], [1], [2]]


# ---- one step ----


def matrices(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = dict(embedding=(12, 8), qkv=(16, 8), experts=(3, 24, 80), norm=(8,))
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def stepped(steps: int, states: str = "fp32", skipped: bool = False, missing: bool = False, **changes):
    """Weights and state after some steps on drawn gradients. The third is clipped to half.

    skipped: one more step, with NaN. missing: qkv has no gradient.
    """
    params = {name: nn.Parameter(t) for name, t in matrices(0).items()}
    cfg = OptimConfig(lr=1e-2, muon=".", states=states, **changes)
    parts = dict(qkv=[Rows(0, 10), Rows(10, 6)])
    optimizer = build_optimizer(params.items(), cfg, CPU, seed=3, parts=parts)
    init_state(optimizer)
    for step in range(steps + skipped):
        for name, grad in matrices(100 + step).items():
            params[name].grad = None if missing and name == "qkv" else grad
        if step == steps:
            params["experts"].grad[0] = torch.nan
        optimizer.decide(torch.tensor(float(step < steps)), torch.tensor(2.0 if step == 2 else 0.1), 1.0)
        optimizer.step()
    return {n: t.detach().clone() for n, t in (params | optimizer_tensors(optimizer, params)).items()}


def test_a_step_is_the_rule_on_each_matrix():
    before, after = stepped(2), stepped(3)
    rule = MuonRule(1e-2, 0.1)
    for name, rows in (("qkv", [slice(0, 10), slice(10, 16)]), ("experts", [slice(None)])):
        for e in range(3) if name == "experts" else (...,):
            for r in rows:
                w, m = (before[key][e][r] for key in (name, f"momentum.{name}"))
                want = muon(w, matrices(102)[name][e][r] * 0.5, m, rule)
                for key, value in zip((name, f"momentum.{name}"), want, strict=True):
                    torch.testing.assert_close(after[key][e][r], value, rtol=1e-5, atol=1e-6)
        assert f"exp_avg.{name}" not in after and after[f"step.{name}"] == 3
    assert "exp_avg.embedding" in after and "momentum.embedding" not in after


def test_a_large_stack_is_computed_where_it_lies(monkeypatch):
    """The same bits as from a copy of all stacks of a shape; parts of equal height are one stack."""
    parts = [Rows(0, 10), Rows(10, 10), Rows(20, 4), Rows(24, 12, 2, 0, 8), Rows(24, 12, 2, 8, 4, True)]
    together = [Rows(0, 10, 2, apart=True), Rows(20, 4, apart=True), *parts[3:]]
    assert merged(parts) == together and merged(together) == together
    found = []
    for large in (2**24, 0):
        monkeypatch.setattr("tmoe.optim.muon.LARGE", large)
        weight = nn.Parameter(torch.zeros(3, 48, 16))
        optimizer = build_optimizer([("w", weight)], OptimConfig(muon="."), CPU, parts=dict(w=parts))
        weight.grad = torch.randn(3, 48, 16, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)
    for rows, (first, last) in zip(parts[:2], ((0, 10), (10, 20)), strict=True):
        want = orthogonal(weight.grad[:, first:last])
        scale = -0.2 * max(rows.shape(16)[1:]) ** 0.5 * OptimConfig().lr
        torch.testing.assert_close(found[1][:, first:last], want * scale, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_a_skipped_step_leaves_every_byte(states):
    before, after = stepped(2, states), stepped(2, states, skipped=True)
    for name, t in before.items():
        assert torch.equal(t, after[name]), name


def test_a_matrix_without_a_gradient_is_left_alone():
    after = stepped(2, missing=True)
    assert torch.equal(after["qkv"], matrices(0)["qkv"]) and after["step.qkv"] == 0
    assert not torch.equal(after["experts"], matrices(0)["experts"])


@pytest.mark.parametrize(("states", "dtype"), [("bf16", torch.bfloat16), ("int8", torch.uint8)])
def test_narrow_momentum_stays_near(states, dtype):
    """A rounding of bf16 is at most 2^-8 of a number; of a code, .007 of its block's largest."""
    wide, narrow = stepped(4, "fp32"), stepped(4, states)
    got, want = narrow["momentum.experts"], wide["momentum.experts"]
    assert got.dtype == dtype
    if states == "int8":
        got = dequantise(got, narrow["momentum_scale.experts"], True)
    assert (got.float() - want).norm() < 0.03 * want.norm()
    far, moved = (narrow["experts"] - wide["experts"], wide["experts"] - matrices(0)["experts"])
    assert far.norm() < 0.05 * moved.norm()


def test_names_that_muon_never_trains():
    never = """embedding.weight head.weight blocks.0.moe.router.weight blocks.0.moe.shared_gate.weight
        blocks.0.attention.qkv.bias model.embed_tokens.weight lm_head.weight model.layers.0.mlp.gate.weight
        blocks.1.moe.experts.gate_up_bias blocks.0.moe.router.projection.weight
        blocks.0.attention.qkv.a blocks.0.moe.experts.gate_up_b blocks.0.linear.rates.conv
        base_model.model.layers.0.self_attn.q_proj.lora_A.default.weight"""
    assert not [name for name in never.split() if fits_muon(name, (8, 8))]
    always = "blocks.0.attention.qkv.weight blocks.0.moe.experts.gate_up model.layers.0.mlp.gate_proj.weight"
    assert [name for name in always.split() if fits_muon(name, (8, 8))] == always.split()
    assert not fits_muon("blocks.0.attention.qkv.weight", (1, 8)) and not fits_muon("norm.weight", (8,))


# ---- layouts of files, memory, start line, errors ----


def test_experts_of_muon_are_cut_between_experts():
    """Six experts of [8, 4] over four ranks: AdamW's are cut along axis 1, Muon's along axis 0, unevenly."""
    shapes = {f"{part}.blocks.0.moe.experts.down": (6, 8, 4) for part in ("model", "ema")}
    assert shard_dim([(6, 8, 4)], 4) == 1 and shard_dim([(6, 8, 4)], 4, whole=True) == 0
    plain = lay_out(shapes | {"optim.exp_avg.blocks.0.moe.experts.down": (6, 8, 4)}, Axes(dp=4))
    assert {box.shape for layout in plain.values() for box in layout.boxes} == {(6, 2, 4)}
    found = lay_out(shapes | {"optim.momentum.blocks.0.moe.experts.down": (6, 8, 4)}, Axes(dp=4))
    for layout in found.values():
        assert [box.shape for box in layout.boxes] == [(2, 8, 4)] * 3


def uneven(rank: int, world: int, axes: dict) -> tuple[layouts.Curve, tuple]:
    """A training with six experts, and the shape of this rank's part of a block's."""
    layouts.MODELS["six"] = replace(layouts.GQA, moe=replace(layouts.ROUTED, experts=6))
    made, build = [], layouts.transformer
    layouts.transformer = lambda *args: made.append(build(*args)) or made[0]
    curve = layouts.train(rank, world, axes, "six", optim=dict(muon="."))
    return curve, tuple(local_part(made[0].blocks[1].moe.experts.down).shape)


def test_uneven_experts_lie_whole_and_train_alike(gloo):
    (want, _), found = gloo(1, uneven, {})[0], gloo(4, uneven, dict(dp=4))
    layouts.assert_same(found[0][0], want)
    assert [shape for _, shape in found] == [(2, 32, 16)] * 3 + [(0, 32, 16)]


@pytest.mark.parametrize(("states", "each"), [("fp32", 4), ("bf16", 2)])
def test_the_dry_run_counts_one_moment(states, each):
    cfg = presets()["qwen3-30b-a3b"]
    axes = Axes(dp=1, ep=8)

    def moments(**optim) -> int:
        return memory_per_rank(replace(cfg, optim=replace(cfg.optim, states=states, **optim)), axes)[
            "moments"
        ]

    of_experts = 48 * 128 * 3 * 768 * 2048 // 8
    assert moments() - moments(muon="experts") == each * of_experts
    dense = 48 * (5120 * 2048 + 2048 * 4096) // 8
    assert moments() - moments(muon=".") == each * (of_experts + dense)
    assert moments(muon="experts", freeze="moe.experts.down") < moments(muon="experts")
    assert moments(muon=".", offload=True) == 0


@pytest.mark.parametrize("name", ["further", "linear"])
def test_the_dry_run_counts_every_matrix(name):
    """Also those of blocks that predict further tokens, which are a part of the last chunk."""
    cfg = layouts.config(layouts.ParallelConfig(), name, 1, optim=dict(muon="."))
    named = dict(Transformer(cfg.model).named_parameters())
    spans = chunk_spans(cfg, Axes())
    wanted = sum(named[n].numel() for n in chosen(".", named.items()))
    assert muon_elements(cfg, Axes(), spans) == wanted


def test_the_start_line_counts_matrices_and_products():
    """Qwen3-30B-A3B: 48 layers of 128 experts with three matrices; q, k, v, o of each layer."""
    cfg = presets()["qwen3-30b-a3b"]
    cfg = replace(cfg, optim=replace(cfg.optim, muon="."))
    (line,) = describe(cfg, Axes(dp=1, ep=8))
    products = 48 * (384 * flops(768, 2048) + 2 * flops(512, 2048) + 2 * flops(4096, 2048))
    assert f"{48 * 384 + 48 * 4:,} matrices" in line and f"{products / 1e12:.2f} TFLOP a step" in line
    tokens = 8 * cfg.train.batch * cfg.train.seq
    share = float(line.split("a step, ")[1].split("%")[0]) / 100
    assert f"for {tokens:,} tokens" in line and share * tokens / 65536 == pytest.approx(0.37, abs=0.02)
    assert describe(replace(cfg, optim=replace(cfg.optim, muon=None)), Axes()) == []


def test_parts_cover_every_row_once():
    for name in ("gqa", "latent", "latent_0", "mimo", "kinds", "narrow", "linear"):
        model = Transformer(layouts.MODELS[name])
        shapes = dict(model.named_parameters())
        for by_head in (False, True):
            parts = parts_of(model, by_head)
            assert {n.rpartition("blocks.1.")[2] for n in parts} >= {"moe.experts.gate_up"}
            for weight, rows in parts.items():
                count = torch.zeros_like(shapes[weight])
                for part in rows:
                    part.of(count).add_(1)
                assert count.eq(1).all(), weight
                assert work({weight: tuple(count.shape)}, parts, 5)[0] >= len(rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optim.muon (", "--optim.muon=(: must be a regular expression"),
        (
            "--optim.muon . --lora.rank 4",
            "--optim.muon=.: not with --lora.rank=4: adapters alone are trained",
        ),
        ("--optim.muon . --optim.muon-iterations 0", "--optim.muon-iterations=0: must be at least 1"),
        (
            "--optim.muon . --optim.muon-momentum 1",
            "--optim.muon-momentum=1.0: must be at least 0 and below 1",
        ),
        ("--optim.muon-heads", "unused with --optim.muon=None; valid: with --optim.muon PATTERN"),
    ],
)
def test_contradictions_are_refused(capsys, words, said):
    with pytest.raises(SystemExit):
        parse(["tiny", *words.split()], "")
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["router|embedding", "nothing"])
def test_a_pattern_that_finds_no_matrix_is_refused(pattern):
    cfg = presets()["tiny"]
    with pytest.raises(ValueError, match="found in no trained matrix"):
        require_matches(replace(cfg, optim=replace(cfg.optim, muon=pattern)))
    require_matches(replace(cfg, optim=replace(cfg.optim, muon="experts", freeze="down")))
