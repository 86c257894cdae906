"""Closed-form counts against published numbers, hand-worked ones and built models.

And against the tensors that autograd keeps.
"""

import dataclasses
import functools
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from held import MostHeld, saved_bytes
from tiers import slow_but
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from tmoe.cli.parse import parse
from tmoe.config.axes import ALONE, Axes
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig, MoEConfig, MTPConfig
from tmoe.config.run import Config, OptimConfig, ParallelConfig, TrainConfig
from tmoe.model.block_bytes import loss_bytes
from tmoe.model.count import count_parameters, flops_per_token, mfu, peak_flops
from tmoe.model.parallelize import parallelize
from tmoe.model.stages import pipeline
from tmoe.model.transformer import Block, Transformer
from tmoe.moe.exchange.dispatch import SymmDispatcher, pairs_bound
from tmoe.moe.experts import Experts, LocalExperts
from tmoe.moe.moe_bytes import exchange_bytes, left_bytes, moe_bytes, rows_received, window_bytes
from tmoe.moe.router import Routing
from tmoe.ops.experts import gpu
from tmoe.ops.experts.deferred import collecting
from tmoe.ops.experts.op import moe_mlp_deferred
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.parallel.mesh import build_mesh
from tmoe.parallel.pipeline_schedule import simulate
from tmoe.plan.block_memory import backward_bytes, layer_bytes
from tmoe.plan.fitting import knobs, require_room, smallest_change, verdict
from tmoe.plan.memory import (
    defers,
    held_at_most,
    kept_whole,
    memory_of_stages,
    memory_per_rank,
    padding,
    peak_bytes,
    plan,
)

PILOT = ModelConfig(
    vocab=151936,
    dim=2048,
    layers=45,
    heads=16,
    kv_heads=4,
    head_dim=128,
    moe=MoEConfig(experts=32, top_k=2, ffn_dim=1408, shared_dim=2816),
)
QWEN3 = ModelConfig(
    vocab=151936,
    dim=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    qk_norm="head",
    moe=MoEConfig(experts=128, top_k=8, ffn_dim=768),
)
OLMOE = ModelConfig(
    vocab=50304,
    dim=2048,
    layers=16,
    heads=16,
    kv_heads=16,
    head_dim=128,
    qk_norm="full",
    moe=MoEConfig(experts=64, top_k=8, ffn_dim=1024),
)
MIXTRAL = ModelConfig(
    vocab=32000,
    dim=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    moe=MoEConfig(experts=8, top_k=2, ffn_dim=14336, softmax="after"),
)
ODD = ModelConfig(
    vocab=100,
    dim=24,
    layers=5,
    heads=6,
    kv_heads=2,
    head_dim=10,
    qk_norm="full",
    dense_layers=1,
    moe_every=2,
    ffn_dim=40,
    tied=True,
    moe=MoEConfig(experts=6, top_k=3, ffn_dim=14, shared_dim=12, shared_gate=True),
)


# MiMo-V2-Flash's: values of another width, and more key heads and sinks in some blocks
NARROW_VALUES = dict(v_head_dim=6, window_kv_heads=3, window_sinks=True, windowed=(1, 0))


@pytest.mark.parametrize(
    ("model", "total", "active", "digits"),
    [
        pytest.param(PILOT, 14.33, 2.65, 2, id="moe-pilot-14b"),
        pytest.param(QWEN3, 30.53, 3.35, 2, id="qwen3-30b-a3b"),
        pytest.param(OLMOE, 6.92, 1.28, 2, id="olmoe-1b-7b"),
        pytest.param(MIXTRAL, 46.7, 12.9, 1, id="mixtral-8x7b"),
    ],
)
def test_published_parameter_counts(model, total, active, digits):
    counts = count_parameters(model)
    assert round(counts.total / 1e9, digits) == total
    assert round(counts.active / 1e9, digits) == active


def test_counts_worked_by_hand():
    attention = 10 * 6 * 24 * 2 + 10 * 2 * 24 * 2 + (60 + 20)  # q and o, k and v, the two QK-norms
    norms = 2 * 24
    dense = 3 * 24 * 40
    shared = 3 * 24 * 12 + 24
    router = 6 * 24
    expert = 3 * 24 * 14
    root = 100 * 24 + 24
    # blocks: dense, MoE, dense, MoE, dense
    total = root + 5 * (attention + norms) + 3 * dense + 2 * (shared + router + 6 * expert)
    assert count_parameters(ODD) == (total, total - 2 * 3 * expert, total - 2 * 3 * expert)
    untied = count_parameters(dataclasses.replace(ODD, tied=False))
    assert untied == (total + 2400, total + 2400 - 6 * expert, total - 6 * expert)


@pytest.mark.parametrize(
    "model",
    [
        ODD,
        dataclasses.replace(ODD, tied=False, qk_norm="head"),
        dataclasses.replace(ODD, qk_norm="none", dense_layers=9),
        dataclasses.replace(ODD, qkv_bias=True, moe=dataclasses.replace(ODD.moe, bias=True)),
        dataclasses.replace(ODD, o_bias=True, sinks=True, moe=dataclasses.replace(ODD.moe, router_bias=True)),
        dataclasses.replace(ODD, moe=dataclasses.replace(ODD.moe, latent_dim=7, bias=True)),
        dataclasses.replace(ODD, attention_gate=True, qkv_bias=True, norms="sandwich", rotary=(1, 0)),
        dataclasses.replace(ODD, norms="post"),
        dataclasses.replace(ODD, norms="moe"),
        dataclasses.replace(ODD, **NARROW_VALUES, qkv_bias=True, attention_gate=True, window=9),
        dataclasses.replace(QWEN3, layers=2),
        dataclasses.replace(PILOT, layers=2),
        dataclasses.replace(ODD, mtp=MTPConfig(depth=2)),
    ],
)
def test_counts_equal_the_built_model(model):
    with torch.device("meta"):
        built = Transformer(model)
    assert count_parameters(model).total == sum(p.numel() for p in built.parameters())


def test_flops_worked_by_hand():
    embedding = 151936 * 2048
    attention = 2 * 2048 * 2048 + 2 * 2048 * 512
    layer = attention + 2 * 2048 + 32 * 2048 + 2 * 3 * 2048 * 1408 + 3 * 2048 * 2816
    active = 45 * layer + embedding + 2048  # the head, the final norm; no input embedding
    assert count_parameters(PILOT).active_flops == active
    # a causal token of 4096 sees 2048 others on average: q.k and the sum over v, 2 FLOPs each, forward
    # + twice backward
    causal = 45 * 16 * (2 * 128 * 2048) * 2 * 3
    assert flops_per_token(PILOT, 4096) == 6 * active + causal


def test_flops_of_windows():
    """The keys that tokens see, counted one by one.

    A token that sees only itself counts half, as in the formula without windows.
    """
    model = dataclasses.replace(ODD, window=10, windowed=(1, 0, 0))
    seen = [sum(min(i + 1, window) - 0.5 * (i < window) for i in range(64)) / 64 for window in (10, 64)]
    plain = 6 * count_parameters(model).active_flops
    assert flops_per_token(model, 64) == pytest.approx(plain + 12 * 6 * 10 * (2 * seen[0] + 3 * seen[1]))
    wide = dataclasses.replace(model, window=64)
    assert flops_per_token(wide, 64) == flops_per_token(ODD, 64)
    narrow = dataclasses.replace(ODD, v_head_dim=6)  # 10 and 6 channels where there were twice 10
    causal = 6 * 6 * (10 + 6) * 5 * 32
    assert flops_per_token(narrow, 64) == 6 * count_parameters(narrow).active_flops + causal


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"])
def test_peak_of_hopper_modules(name):
    assert peak_flops(name) == 989.4e12


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H20", "cpu"]
)
def test_no_peak_where_unknown(name):
    assert peak_flops(name) is None
    assert mfu(1e9, 1e5, peak_flops(name)) is None


def test_mfu():
    assert mfu(16.3e9, 30_000, 989.4e12) == pytest.approx(0.49424, rel=1e-4)


@pytest.mark.parametrize("dtype", slow_but(["bf16"], ["bf16", "fp32"]))
@pytest.mark.parametrize(
    "kind", slow_but(["moe", "dense"], ["moe", "jitter", "dense", "latent", "before", "after"])
)
def test_activations_match_what_a_compiled_block_keeps(monkeypatch, kind, dtype):
    torch.compiler.reset()  # every case compiles the same code, which may be compiled eight times
    # as on the GPU
    monkeypatch.setattr("tmoe.moe.router.on_matrix_units", lambda x: x.dtype == torch.bfloat16)
    changes = dict(jitter=dict(jitter=0.1), latent=dict(latent_dim=96))
    changes |= {where: dict(weigh=where) for where in ("before", "after")}
    moe = MoEConfig(experts=8, top_k=2, ffn_dim=128, shared_dim=192, **changes.get(kind, {}))
    model = ModelConfig(
        dim=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        qk_norm="head",
        dense_layers=int(kind == "dense"),
        ffn_dim=512,
        moe=moe,
    )
    cfg = Config(model=model, train=TrainConfig(batch=2, seq=256, dtype=dtype))
    torch.manual_seed(0)
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    block = Block(model, 0).to(torch_dtype)
    # inductor's choice of what to keep, without the minutes of its code generation
    block.compute = torch.compile(
        block.compute, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition"
    )
    x = torch.randn(2, 256, 256, dtype=torch_dtype, requires_grad=True)
    assert layer_bytes(cfg, ALONE, 0) == pytest.approx(saved_bytes(block, x, model), rel=0.02)


class Group:
    """The part of a process group that a dispatcher reads before its op runs."""

    group_name = "nobody"

    def __init__(self, ranks: int):
        self.size = lambda: ranks


@pytest.mark.parametrize(
    ("ep", "experts", "top_k", "shared"), [(2, 8, 3, 0), (4, 8, 2, 0), (8, 8, 5, 0), (2, 8, 3, 640)]
)
def test_activations_match_what_the_symm_dispatcher_keeps(ep, experts, top_k, shared):
    """(8, 8, 5): a rank has one expert, which bounds the pairs that can arrive."""
    T, D, F = 512, 64, 96
    moe = MoEConfig(experts=experts, top_k=top_k, ffn_dim=F, shared_dim=shared)
    cfg = Config(model=ModelConfig(dim=D, moe=moe), train=TrainConfig(batch=2, seq=T // 2))
    kept: dict[int, int] = {}
    with (
        FakeTensorMode(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.update({t.untyped_storage()._cdata: t.untyped_storage().nbytes()}) or t,
            lambda t: t,
        ),
    ):
        x, gate_up, down, *dense = (
            torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in (
                (T, D),
                (experts // ep, 2 * F, D),
                (experts // ep, D, F),
                (2 * shared, D),
                (D, shared),
            )
        )
        weights, ids = torch.empty(T, top_k), torch.empty(T, top_k, dtype=torch.int32)
        local = LocalExperts(gate_up, down)
        always = SimpleNamespace(plain=True, matrices=lambda x: dense) if shared else None
        dispatcher = SymmDispatcher(Group(ep), experts // ep, width=shared)  # type: ignore[bad-argument-type]
        routing = Routing(weights, ids, weights)
        y = (
            dispatcher.run_with_shared(x, routing, local, always)[0]
            if shared
            else dispatcher(x, routing, local)
        )
        operands = sum(t.untyped_storage().nbytes() for t in (x, gate_up, down, *dense))
    logits = T * experts * 4  # the router's, in fp32
    assert y.shape == (T, D) and moe_bytes(cfg, Axes(ep=ep)) == sum(kept.values()) - operands + logits


def test_rows_that_nccl_brings_are_kept():
    T, D, K = 16384, 2048, 8
    portable = Config(model=OLMOE, parallel=ParallelConfig(ep=4, dispatch="nccl"))
    direct = Config(model=OLMOE, parallel=ParallelConfig(ep=4))
    R = rows_received(T, K, 4)
    more = R * D * 2 + R * K * 16 - T * K * 8
    assert moe_bytes(portable, Axes(ep=4)) - moe_bytes(direct, Axes(ep=4)) == more
    assert moe_bytes(direct, Axes(ep=16)) == moe_bytes(portable, Axes(ep=16)), "an expert group of two nodes"
    biased = dataclasses.replace(
        direct, model=dataclasses.replace(OLMOE, moe=dataclasses.replace(OLMOE.moe, bias=True))
    )
    assert (
        moe_bytes(biased, Axes(ep=4)) == moe_bytes(portable, Axes(ep=4))
        and exchange_bytes(biased, Axes(ep=4)) == 0
    )


def test_latent_experts_worked_by_hand():
    """A quarter of the width: as much travels, is held and is multiplied; two projections come on top."""
    narrow = dataclasses.replace(QWEN3, moe=dataclasses.replace(QWEN3.moe, latent_dim=512))
    whole, less = (Config(model=model, parallel=ParallelConfig(ep=4)) for model in (QWEN3, narrow))
    of_ids = 65536 * 3 * 32
    assert 4 * (exchange_bytes(less, Axes(ep=4)) - of_ids) == exchange_bytes(whole, Axes(ep=4)) - of_ids
    projections, experts = 2 * 2048 * 512, 3 * 768 * 2048
    counts, before = count_parameters(narrow), count_parameters(QWEN3)
    assert before.total - counts.total == 48 * (128 * experts * 3 // 4 - projections)
    assert before.active_flops - counts.active_flops == 48 * (8 * experts * 3 // 4 - projections)
    saved = flops_per_token(QWEN3, 4096) - flops_per_token(narrow, 4096)
    assert saved == 6 * (before.active_flops - counts.active_flops)


def test_exchange_worked_by_hand():
    """x, dy, y, sums: a row of 4 KiB for each of 4 * 16384 tokens.

    ids, weights and their gradient: 8 numbers of 4 bytes.
    """
    symm = Config(model=QWEN3, parallel=ParallelConfig(ep=4))
    assert (
        exchange_bytes(symm, Axes(ep=4))
        == memory_per_rank(symm, Axes(ep=4))["exchange"]
        == 65536 * (4 * 4096 + 3 * 32)
    )
    packed = Config(model=QWEN3, parallel=ParallelConfig(ep=4, dispatch_dtype="fp8"))
    assert exchange_bytes(packed, Axes(ep=4)) == 65536 * (4 * (4096 + 2048 + 4) + 3 * 32)
    nccl = Config(model=QWEN3, parallel=ParallelConfig(ep=4, dispatch="nccl"))
    assert exchange_bytes(nccl, Axes(ep=4)) == exchange_bytes(symm, ALONE) == 0


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize("policy", ["attention", "moe", "block"])
def test_recomputed_activations_are_freed_in_all_layers_but_one(policy, ep):
    keeps = Config(model=OLMOE, parallel=ParallelConfig(ep=ep))
    frees = Config(model=OLMOE, parallel=ParallelConfig(ep=ep, checkpoint=policy))
    layer = layer_bytes(keeps, Axes(ep=ep), 0)
    sparse = moe_bytes(keeps, Axes(ep=ep))
    row = 16384 * 2048 * 2
    norm = 16384 * 4  # the feed-forward's root mean square
    freed = {"attention": layer - sparse - 3 * row - norm, "moe": sparse + row + norm, "block": layer - row}[
        policy
    ]
    whole, part = (memory_per_rank(cfg, Axes(dp=8 // ep, ep=ep)) for cfg in (keeps, frees))
    assert whole["activations"] - part["activations"] == 16 * freed
    assert part["working"] - whole["working"] == freed, "the block at work has them again"
    assert {k: v for k, v in part.items() if k not in ("activations", "working")} == {
        k: v for k, v in whole.items() if k not in ("activations", "working")
    }


def test_a_further_window_of_pairs_worked_by_hand():
    """Five values of F for each pair: H (2), dH (2), activations (1), in bf16.

    None where the first window takes all pairs.
    """
    cfg = Config(model=OLMOE, parallel=ParallelConfig(ep=4))
    pairs = pairs_bound(16384, 8, 4, 16)
    assert 16384 * 8 <= pairs < 16384 * 4 * 8
    assert window_bytes(cfg, Axes(ep=4), 0) == 5 * pairs * 1024 * 2
    assert backward_bytes(cfg, Axes(ep=4), 0) == layer_bytes(cfg, Axes(ep=4), 0) + 5 * pairs * 1024 * 2
    portable = dataclasses.replace(cfg, parallel=ParallelConfig(ep=4, dispatch="nccl"))
    assert window_bytes(portable, Axes(ep=4), 0) == 2 * pairs * 1024 * 2, (
        "H again; dH and activations take the place of the first's"
    )
    few = dataclasses.replace(portable.model, moe=dataclasses.replace(OLMOE.moe, top_k=1))
    assert window_bytes(dataclasses.replace(portable, model=few), Axes(ep=4), 0) == 0, (
        "no more than T slots arrive, where there is room for 1.5 T"
    )
    assert window_bytes(cfg, ALONE, 0) == 0


@pytest.mark.parametrize(("tokens", "windows"), [(3072, 2), (8192, 6)])
def test_windows_of_pairs_do_not_pile_up(tokens, windows):
    """Live storages of gpu.py's own calls on meta tensors.

    One window at a time is alive after the first.
    """
    D, F, E, K, pairs = 512, 640, 4, 4, 6144
    assert -(-tokens * K // pairs) == windows
    make = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    x, gate_up, down = make(tokens, D), make(E, 2 * F, D), make(E, D, F)
    weights, ids = make(tokens, K, dtype=torch.float32), make(tokens, K, dtype=torch.int32)
    how = None, "swiglu", pairs
    with compile_only("cuda:90", lambda *launched: None):
        with MostHeld(x, gate_up, down, weights, ids) as forward:
            y, h, packed = gpu.forward(x, gate_up, down, weights, ids, *how, True)
        with MostHeld(x, gate_up, down, weights, ids, h, packed) as backward:
            grads = [g for g in gpu.backward(x, x, gate_up, down, weights, h, packed, *how) if g is not None]
    act = pairs * F * 2
    row = pairs * D * 2
    small = 8 * tokens * K * 4 + 8 * pairs * 4
    assert 0 <= forward.bytes - y.nbytes - h.nbytes - (act + row) < small
    # H once more, dH, activations, and gathered rows where no kernel gathers
    assert 5 * act <= backward.bytes - sum(g.nbytes for g in grads) < 5 * act + row + small


def test_the_losss_worst_moment_worked_by_hand():
    """The head's gradient in fp32; with it a chunk's logits, or the gradient again in bf16.

    And hidden states twice, and their gradient.
    """
    D = 2048
    hidden = 3 * 16384 * 2048 * 2
    for model, V, rows in ((OLMOE, 50304, 16384), (QWEN3, 151936, 4096)):
        assert loss_bytes(Config(model=model), ALONE) == hidden + 4 * V * D + 2 * rows * V
    odd = dataclasses.replace(OLMOE, vocab=50299)  # and the head once more, with five rows of zeros
    one = dict(batch=1, seq=128)
    assert loss_bytes(Config(model=odd), ALONE) == hidden + 4 * 50304 * D + 2 * (16384 * 50304 + 50304 * D)
    assert loss_bytes(
        Config(model=odd, train=TrainConfig(**one)), ALONE
    ) == 3 * 128 * D * 2 + 4 * 50304 * D + 2 * 50304 * (D + 128)
    few = Config(model=OLMOE, train=TrainConfig(**one))
    assert loss_bytes(few, ALONE) == 3 * 128 * D * 2 + 4 * 50304 * D + 2 * 50304 * D


def test_a_loss_of_log_probs_holds_less():
    """1024 rows of Qwen3's vocabulary, 2048 of OLMoE's, whatever the tokens; twelve numbers a token."""
    D = 2048
    for model, V, rows in ((OLMOE, 50304, 2048), (QWEN3, 151936, 1024)):
        for batch in (4, 256):
            cfg = Config(task="preference", model=model, train=TrainConfig(batch=batch, seq=512))
            a_token = 3 * D * 2 + 12 * 4
            chunk = max(2 * rows * V, 2 * V * D)  # or the head's gradient again in bf16
            assert loss_bytes(cfg, ALONE) == 512 * batch * a_token + 4 * V * D + chunk


def test_offloaded_moments_and_document_masks_take_nothing():
    cfg = Config(model=QWEN3)
    memory = memory_per_rank(cfg, Axes(dp=8))
    assert memory_per_rank(dataclasses.replace(cfg, optim=OptimConfig(offload=True)), Axes(dp=8)) == {
        **memory,
        "moments": 0,
    }
    plain = dataclasses.replace(cfg, train=TrainConfig(isolate_documents=False))
    assert memory_per_rank(plain, Axes(dp=8)) == memory


def test_what_no_rank_can_hold_is_refused():
    cfg = Config(model=QWEN3, train=TrainConfig(batch=4, seq=4096))
    parts = memory_per_rank(cfg, Axes(ep=4))
    GiB = 2**30
    state = sum(parts[name] for name in ("parameters", "gradients", "moments"))
    with pytest.raises(
        ConfigError, match=r"--parallel.dp=1 --parallel.ep=4: a rank has 80.0 GiB of memory and needs 1\d\d"
    ):
        require_room(cfg, Axes(ep=4), 80 * GiB)
    require_room(cfg, Axes(ep=8), state)
    require_room(cfg, Axes(ep=4), max(state, peak_bytes(parts) // 2))
    large = dataclasses.replace(cfg, train=TrainConfig(batch=4096, seq=4096))
    with pytest.raises(
        ConfigError, match=r"for half of a step; this would fit: --train.batch \d+ --train.accumulate \d+ \("
    ):
        require_room(large, Axes(ep=8), 141 * GiB)
    reading = dataclasses.replace(large, eval_only=True)
    require_room(reading, Axes(ep=8), parts["parameters"])
    with pytest.raises(
        ConfigError, match=r"for parameters; this would fit: \d+ ranks \(--parallel.dp \d+\) \("
    ):
        require_room(reading, Axes(ep=8), parts["parameters"] // 4)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "qwen3-30b-a3b --parallel.ep 8 --world 64 --gpu h200",
            ["verdict: fits. ", "H200 SXM 141 GB has 130.9 GiB for tensors (data sheet, "],
        ),
        (
            "qwen3-30b-a3b --parallel.ep 8 --world 64 --gpu h100",
            ["verdict: does not fit. ", "the smallest change that fits: --"],
        ),
        (
            "deepseek-v3 --parallel.ep 8 --world 64 --gpu h100",
            ["verdict: does not fit. ", "the smallest change that fits: ", " ranks (--parallel.dp "],
        ),
        ("tiny --world 2", ["fits: h100, h200, a100, a100-40gb, b200, mi300x, rtx4090; does not fit: none"]),
    ],
)
def test_the_verdict_of_a_dry_run(words, says):
    """The proposed change does fit."""
    cfg = parse([*words.split(), "--dry-run"], "")
    axes = Axes.of(cfg.parallel, cfg.world)
    said = "\n".join(verdict(cfg, axes, cfg.gpu))
    assert all(what in said for what in says), said
    for line in said.splitlines():
        _, found, flags = line.partition("the smallest change that fits: ")
        if found:
            ranks = re.match(r"(\d+) ranks \((--parallel.dp \d+)\)(?: with )?", flags)
            world = ["--world", ranks[1], *ranks[2].split()] if ranks else []
            more = [*world, *(flags[ranks.end() :] if ranks else flags).split()]
            again = parse([*words.split(), "--dry-run", *more], "")
            assert verdict(again, Axes.of(again.parallel, again.world), again.gpu)[0].startswith(
                "verdict: fits"
            )


def test_what_does_not_help_is_not_proposed():
    """Where parameters, gradients and moments are too large, no batch and no recomputing is named."""
    cfg = Config(model=QWEN3, train=TrainConfig(batch=4, seq=4096))
    parts = memory_per_rank(cfg, Axes(ep=8))
    state = sum(parts[name] for name in ("parameters", "gradients"))
    room = state + parts["moments"] // 2

    def fits(c, axes):
        found = memory_per_rank(c, axes)
        return sum(found[name] for name in ("parameters", "gradients", "moments")) <= room

    assert smallest_change(cfg, [Axes(ep=8)], fits) == "--optim.offload"
    offloaded = dataclasses.replace(cfg, optim=OptimConfig(offload=True))
    room = state // 3
    assert smallest_change(offloaded, [Axes(ep=8)], fits).startswith(
        ("16 ranks (--parallel.dp 2)", "32 ranks (--parallel.dp 4)")
    )
    assert smallest_change(offloaded, [Axes(ep=8)], lambda c, axes: False) == ""


def test_bf16_moments_and_sums_are_proposed_after_offload():
    def last(words):
        return knobs(parse(f"olmoe-1b-7b --train.batch 1 {words}".split(), ""))[-1][0]

    assert last("") == ["--optim.states bf16"]
    assert last("--train.accumulate 2 --optim.offload") == ["--optim.states bf16", "--optim.sums bf16"]
    assert last("--train.accumulate 2 --optim.states int8") == ["--optim.sums bf16"]
    assert last("--train.accumulate 2 --train.dtype fp32") == ["--optim.states bf16"]
    cfg = parse("olmoe-1b-7b --train.batch 1 --train.accumulate 2 --parallel.checkpoint block".split(), "")
    narrow = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, states="bf16", sums="bf16"))
    least = held_at_most(narrow, Axes())
    found = smallest_change(cfg, [Axes()], lambda c, a: held_at_most(c, a) <= least and not c.optim.offload)
    assert found == "--optim.states bf16 --optim.sums bf16"


@pytest.mark.parametrize(
    ("words", "world", "gib"),
    [
        ("qwen3-30b-a3b --model.layers 4 --train.no-isolate-documents", 1, 49.10),
        ("olmoe-1b-7b --model.layers 8", 1, 59.20),
        ("qwen3-30b-a3b --model.layers 24 --parallel.ep 4 --train.no-isolate-documents", 4, 85.16),
        ("olmoe-1b-7b --parallel.ep 4 --train.no-isolate-documents", 4, 48.65),
        ("moe-pilot-14b --parallel.ep 4 --train.no-isolate-documents", 4, 92.24),
        ("qwen3-30b-a3b --parallel.checkpoint block --parallel.ep 4 --train.no-isolate-documents", 4, 118.69),
        ("mixtral-8x7b --model.layers 8 --parallel.ep 4 --train.no-isolate-documents", 4, 80.61),
    ],
)
def test_measured_peaks(words, world, gib):
    """torch.cuda.max_memory_allocated on H200s (benchmarks/results/steps-*).

    The exchange's buffers are not part of it. The one-GPU figures were measured when every router still kept
    an fp32 copy of its input.
    """
    cfg = parse(words.split(), "", world=world)
    memory = memory_per_rank(cfg, Axes.of(cfg.parallel, world))
    copies = cfg.model.layers * cfg.train.batch * cfg.train.seq * cfg.model.dim * 4 if world == 1 else 0
    assert (peak_bytes(memory) - memory["exchange"] + copies) / 2**30 == pytest.approx(gib, rel=0.04)


def test_rows_received_match_a_simulation():
    T, K, E, ep = 20_000, 4, 64, 8
    ids = torch.rand(T, E, generator=torch.Generator().manual_seed(3)).topk(K).indices
    hit = torch.zeros(T, ep, dtype=torch.bool).scatter_(1, ids // (E // ep), True)
    # the T tokens of each of ep ranks, over ep
    assert rows_received(T, K, ep) == pytest.approx(hit.sum().item(), rel=0.03)
    assert rows_received(T, K, 1) == T


def test_memory_states_worked_by_hand():
    counts = count_parameters(QWEN3)
    experts = 48 * 128 * 3 * 2048 * 768
    cfg = Config(model=QWEN3, optim=OptimConfig(ema=0.999))
    memory = memory_per_rank(cfg, Axes(dp=2, ep=4))
    sharded = memory_per_rank(
        dataclasses.replace(cfg, parallel=ParallelConfig(gathered_gib=0.0)), Axes(dp=2, ep=4)
    )
    own = (counts.total - experts) // 8 + experts // 4 // 2
    # the router's 128 rows, norms of 128: all divide
    assert memory["parameters"] == pytest.approx(4 * own, rel=1e-4)
    assert memory["gradients"] == memory["ema"] == memory["parameters"]
    assert memory["moments"] == 2 * memory["parameters"]
    root = 2 * 151936 * 2048 + 2048
    dense = (counts.total - root - experts) // 48  # 36.5 MiB in bf16: two blocks make a unit
    assert sharded["gathered"] == 2 * (root + 2 * 2 * dense + 2 * experts // 48 // 4)
    assert memory["gathered"] == 2 * (root + 2 * 2 * dense + experts // 4)  # 13.5 GiB: kept whole
    assert memory["parameters"] == sharded["parameters"]
    assert memory["accumulated"] == 0


@pytest.mark.parametrize(
    ("dp", "ep"), [(1, 1), (3, 1), (4, 1), (5, 1), (7, 1), (2, 2), (5, 2), (4, 3), (2, 6)]
)
def test_memory_of_parameters_is_what_the_layout_gives_rank_0(dp, ep):
    """6 experts: cut evenly over dp, else by rows of their matrices where dp divides those, else unevenly."""
    cfg = Config(model=ODD, compile=False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dp * ep)
    try:
        with torch.device("meta"):
            model = parallelize(Transformer(ODD), build_mesh(dp, ep), cfg)
        held = sum(p.to_local().numel() for p in model.parameters())
    finally:
        dist.destroy_process_group()
    assert memory_per_rank(cfg, Axes(dp=dp, ep=ep))["parameters"] == 4 * held


@pytest.mark.parametrize(
    ("axes", "how"),
    [
        (Axes(replicate=2, dp=2, ep=2), {}),
        (Axes(replicate=2, ep=2), {}),
        (Axes(dp=2, etp=2, ep=2, tp=2), {}),
        (Axes(pp=2), {}),
        (Axes(pp=2, dp=2, ep=2, cp=2), {}),
        (Axes(pp=2, replicate=2, dp=3, cp=3), {}),
        (Axes(pp=2, dp=2), dict(schedule="interleaved", chunks=2)),
        (
            Axes(pp=2, dp=2),
            dict(schedule="v"),
        ),  # both ends of the model, and a tied table twice, on one stage
        (Axes(pp=5, ep=2, etp=2), {}),
        (Axes(pp=3, ep=2), dict(head="divided")),
        (Axes(pp=2, dp=2), dict(head="divided", schedule="v")),
        (Axes(pp=2, dp=2, ep=2), dict(depth=1)),
        (Axes(pp=2, dp=2), dict(depth=2, schedule="v")),
        (Axes(dp=3), dict(depth=2)),
    ],
)
def test_parameters_are_what_the_layout_gives_the_first_rank_of_each_stage(axes, how):
    """And who holds experts: FSDP2 where there are replicas, or where ranks that share them keep none."""
    depth, how = how.get("depth", 0), {name: value for name, value in how.items() if name != "depth"}
    odd = dataclasses.replace(ODD, tied=not depth, mtp=MTPConfig(depth))
    for gathered_gib in (16.0, 0.0):
        parallel = ParallelConfig(pp=axes.pp, ep=axes.ep, gathered_gib=gathered_gib, **how)
        cfg = Config(model=odd, compile=False, train=TrainConfig(accumulate=axes.pp), parallel=parallel)
        said = memory_of_stages(cfg, axes)
        assert len(said) == axes.pp and memory_per_rank(cfg, axes) == max(said, key=peak_bytes)
        for stage, memory in enumerate(said):
            dist.init_process_group("fake", store=FakeStore(), rank=stage * axes.stage, world_size=axes.world)
            try:
                mesh = build_mesh(**vars(axes))
                if axes.pp > 1:
                    parts = list(pipeline(cfg, mesh))
                else:
                    with torch.device("meta"):
                        parts = [parallelize(Transformer(odd), mesh, cfg, whole_forwards=True)]
                held = sum(p.to_local().numel() for part in parts for p in part.parameters())
                table = ODD.vocab * ODD.dim // axes.shard
                twice = any(p.first for p in parts) and any(p.last and not p.first for p in parts)
                assert memory["moments"] == 8 * (held - table * twice)
                for part in parts:
                    numbers = [int(name) for name, _ in part.blocks.named_children()]
                    if not numbers:  # a piece of the head
                        continue
                    span = range(numbers[0], numbers[-1] + 1 + len(part.mtp))
                    experts = [m for m in part.modules() if isinstance(m, Experts)]
                    by_fsdp = {isinstance(m, FSDPModule) for m in experts}
                    unshared = axes.sharers * axes.replicate == 1
                    assert by_fsdp <= {not (unshared or kept_whole(cfg, axes, span))}
            finally:
                dist.destroy_process_group()
            assert memory["parameters"] == 4 * held
    assert gpu.waves == 1  # a layout without a GPU leaves this process's kernels as they are


def test_activations_of_a_pipeline_worked_by_hand():
    """Four stages of equal blocks: the first holds four micro-batches, the last one."""
    model = dataclasses.replace(OLMOE, vocab=64)
    for micros, schedule, chunks, most in (
        (8, "1f1b", None, [4, 3, 2, 1]),
        (2 * 4, "interleaved", 2, [11 / 2, 9 / 2, 7 / 2, 5 / 2]),
    ):
        cfg = Config(
            model=model,
            train=TrainConfig(accumulate=micros),
            parallel=ParallelConfig(pp=4, schedule=schedule, chunks=chunks),
        )
        axes = Axes(pp=4)
        stages = memory_of_stages(cfg, axes)
        layer, result = layer_bytes(cfg, axes, 0), 16384 * 2048 * 2
        per_stage = 4 * layer + (chunks or 1) * result
        for stage, (memory, held) in enumerate(zip(stages, most, strict=True)):
            want = held * per_stage - (result if stage == 3 else 0) * held * (schedule == "1f1b")
            assert memory["activations"] == pytest.approx(want, rel=0.01)
    order = plan(cfg, axes)
    assert simulate(order).held == (11, 9, 7, 5)


def test_what_v_puts_off_is_counted():
    """A layer's backward leaves what `DeferredGradients` holds; a stage has as many at once as the table
    says."""
    model = dataclasses.replace(OLMOE, vocab=64, layers=4, dim=64, moe=MoEConfig(experts=4, ffn_dim=96))
    train = TrainConfig(batch=2, seq=64, accumulate=4, dtype="fp32")
    cfg = Config(model=model, train=train, parallel=ParallelConfig(pp=2, schedule="v", dispatch="nccl"))
    axes, T, K = Axes(pp=2), 128, 2
    x = torch.randn(T, 64, requires_grad=True)
    experts = torch.randn(4, 192, 64), torch.randn(4, 64, 96)
    with collecting() as left:
        moe_mlp_deferred(x, *experts, torch.rand(T, K), torch.randint(0, 4, (T, K))).sum().backward()
    assert left_bytes(cfg, axes) == pytest.approx(left[0].bytes, rel=0.02)

    order = plan(cfg, axes)
    most = simulate(order).kept
    assert max(most) > 0
    layer, result = layer_bytes(cfg, axes, 0), T * 64 * 4
    for stage, memory in enumerate(memory_of_stages(cfg, axes)):
        held = memory["activations"] / (layer + result)
        assert held <= simulate(order).held[stage] + most[stage] * left_bytes(cfg, axes) / layer
    off = dataclasses.replace(cfg, parallel=ParallelConfig(pp=2, schedule="v", adaptive_r=0))
    assert defers(cfg, axes) and not defers(off, axes)


def test_parts_of_a_sequence_divide_what_a_rank_keeps():
    """Twice the ranks a sequence, half the tokens; parameters, and what is gathered of them, stay."""
    cfg = Config(model=MIXTRAL, train=TrainConfig(batch=4, seq=4096))
    whole, parts = (memory_per_rank(cfg, Axes(dp=4, ep=4, tp=tp)) for tp in (1, 4))
    for name in ("parameters", "gradients", "moments", "gathered"):
        assert parts[name] == whole[name]
    copies = 32 * (8 + 2 * 2) * 128 * 4096 * 2  # the rows of qkv of a rank's heads
    assert parts["activations"] == pytest.approx(whole["activations"] / 4 + copies, rel=0.001)
    assert parts["exchange"] == whole["exchange"] / 4


def test_replicas_hold_the_same_and_gather_no_copies():
    one = memory_per_rank(Config(model=OLMOE), Axes(dp=2, ep=4))
    two = memory_per_rank(Config(model=OLMOE), Axes(replicate=2, dp=2, ep=4))
    cut = Config(model=OLMOE, parallel=ParallelConfig(gathered_gib=0.0))
    assert two == memory_per_rank(cut, Axes(dp=2, ep=4))
    assert one["parameters"] == two["parameters"] and one["gathered"] > two["gathered"]


def test_accumulation_keeps_whole_gradients_and_ema_is_off_by_default():
    cfg = Config(model=OLMOE, train=TrainConfig(accumulate=2))
    memory = memory_per_rank(cfg, Axes(ep=8))
    experts = 16 * 64 * 3 * 2048 * 1024
    assert memory["accumulated"] == 4 * (count_parameters(OLMOE).total - experts + experts // 8)
    assert memory["ema"] == 0


def test_gradients_that_are_added_in_place_have_no_copy():
    """With several micro-batches, those of experts and head; not where autograd gets them."""
    experts, head = 64 * 3 * 2048 * 1024, OLMOE.vocab * OLMOE.dim
    several, one = TrainConfig(batch=8, accumulate=2), TrainConfig(batch=8)
    for axes, moe, less in (
        (ALONE, OLMOE.moe, 2 * (experts + head)),
        (Axes(ep=8), OLMOE.moe, 2 * (experts // 8)),
        (Axes(dp=2, ep=4), OLMOE.moe, 2 * (experts // 4)),
        (Axes(replicate=2, ep=4), OLMOE.moe, 0),
        (Axes(ep=2, etp=2), OLMOE.moe, 0),
        (ALONE, dataclasses.replace(OLMOE.moe, weigh="before"), 0),
    ):
        cfg = Config(model=dataclasses.replace(OLMOE, moe=moe), train=one)
        first, then = (memory_per_rank(c, axes) for c in (cfg, dataclasses.replace(cfg, train=several)))
        assert first["working"] - then["working"] == less, axes
    narrow = Config(model=OLMOE, train=several, optim=OptimConfig(sums="bf16"))
    whole = dataclasses.replace(narrow, train=one)
    assert memory_per_rank(narrow, ALONE)["working"] == memory_per_rank(whole, ALONE)["working"]


def test_peak_takes_the_larger_of_activations_and_gradients():
    small = memory_per_rank(Config(model=OLMOE, train=TrainConfig(batch=1, seq=128)), ALONE)
    large = memory_per_rank(Config(model=OLMOE, train=TrainConfig(batch=8)), ALONE)
    assert small["activations"] < small["gradients"] and large["activations"] > large["gradients"]
    assert peak_bytes(small) == sum(small.values()) - small["activations"]
    assert peak_bytes(large) == sum(large.values()) - large["gradients"]


def test_ep_that_does_not_divide_is_named():
    with pytest.raises(ConfigError, match=r"--parallel\.ep=3.*--model\.moe\.experts=8"):
        memory_per_rank(Config(model=ModelConfig(moe=MoEConfig(experts=8))), Axes(ep=3))


@pytest.mark.parametrize(
    ("words", "times", "without"),
    [
        ("gpt-oss-20b --world 1024 --parallel.ep 8", 32.0, "16, 32"),
        ("deepseek-v2-lite --world 4096 --parallel.ep 8", 64.0, "16, 32, 64"),
        ("qwen3-30b-a3b --world 64 --parallel.ep 8", 1.0, None),
        ("qwen3-30b-a3b --world 3072", 24.0, None),  # 3072 ranks cut 128 experts, and 2 x 768 rows
        ("tiny --world 3", 9 / 8, None),
    ],
)
def test_experts_that_fsdp2_pads_are_told(capsys, words, times, without):
    cfg = parse([*words.split(), "--dry-run"], "")
    dp = cfg.world // cfg.parallel.ep
    said = capsys.readouterr().err
    assert padding(cfg, Axes(dp=dp, ep=cfg.parallel.ep)) == pytest.approx(times)
    if times < 1.5:
        assert "note" not in said
    else:
        assert (
            said.startswith(f"note: --parallel.ep={cfg.parallel.ep}: FSDP2")
            and f"moves {times} times" in said
        )
        assert without is None or said.endswith(f"--parallel.ep without that: {without}\n")
