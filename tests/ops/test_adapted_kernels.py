"""The kernels of adapted experts: in triton's interpreter against fp64, and compiled for other chips.

The test starts this file in the interpreter:
    TRITON_INTERPRET=1 python tests/ops/test_adapted_kernels.py

next: test_adapted.py
"""

import os

import forked
import pytest
import torch
from interpreter import poison, repair_interpreter, small_tiles

from tmoe.base.activations import activation as named

LARGE = {"up_adapted", "rows_adapted", "dh_adapted"}
DENSE = "add_low_rank_kernel"
KERNELS = {"narrow_kernel", "narrow_and_factor_kernel", "sum_chunks_kernel", "factor_kernel"}


@pytest.mark.slow
def test_in_the_interpreter():
    ran = forked.run([__file__], env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "all right"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["cuda:90", "cuda:80", "hip:gfx942"])
def test_compiles(arch):
    """Registers, spills and memory, as those of the kernels without adapters; ranks 1 and 16."""
    from chips import CHIPS, assert_fits, measure

    from tmoe.ops.decode import low_rank
    from tmoe.ops.experts import adapted_gpu
    from tmoe.ops.launch.kernel_launch import compile_only

    found = {}

    def visit(name, key, compile):
        if name in KERNELS | LARGE | {"specialised", DENSE} and key not in found:
            found[key] = measure(arch, name, compile)

    with compile_only(arch, visit):
        for T, rank, biased in ((4096, 16, False), (4096, 1, True), (256, 64, False)):
            sizes = T, 2048, 768, 32, 4
            adapted_gpu.trace(sizes, (rank, rank), torch.bfloat16, biased=biased)
        for L, W, rank in ((2048, 5120, 16), (200, 72, 1), (4096, 2048, 128)):
            low_rank.trace(L, W, rank, torch.bfloat16, 64)
    names = {binary.name for binary in found.values()} - {"specialised", DENSE}
    # on Hopper the large products are hopper.py's
    assert names == KERNELS | (set() if arch == "cuda:90" else LARGE)
    for binary in found.values():
        assert_fits(binary, CHIPS[arch])


@pytest.mark.parametrize("targets", [(), ("experts.down",), ("attention",)])
def test_the_warm_up_knows_them(targets):
    """They are compiled before the process group exists; without adapters on experts there are none.

    The kernel of dense layers is a rollout's.
    """
    from tmoe.commands.warmup import decode_shapes, traces
    from tmoe.config.run import Config, LoraConfig
    from tmoe.ops.launch.kernel_launch import compile_only
    from tmoe.ops.register import traces_of

    names = set()
    with compile_only("cuda:90", lambda name, key, compile: names.add(name)):
        for run, *args in traces(Config(lora=LoraConfig(rank=8, targets=targets))):
            run(*args)
    assert names & KERNELS == (set() if targets == ("attention",) else KERNELS)
    assert DENSE not in names
    shapes = decode_shapes(Config(lora=LoraConfig(rank=8, targets=targets)), torch.bfloat16)
    with compile_only("cuda:90", lambda name, key, compile: names.add(name)):
        for run, *args in traces_of(shapes):
            run(*args)
    assert (DENSE in names) == (targets != ("experts.down",))


# ---- in the interpreter ----


def far(got, want):
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def check(op, T, ranks, dtype=torch.float32, pairs=None, biased=False, activation="swiglu", D=40, F=24):
    """y and every gradient against merged weights; a rank of 0 is no adapter."""
    from tmoe.ops import reference

    E, K = 5, 2
    draw = torch.Generator().manual_seed(T)

    def new(*shape):
        return (torch.randn(*shape, generator=draw) * 0.3).to(dtype)

    rows = named(activation).halves * F
    x, dy, gate_up, down = new(T, D), new(T, D), new(E, rows, D), new(E, D, F)
    bias = new(E, rows) if biased else None
    r, q = ranks
    factors = [new(E, r, D), new(E, rows, r)] if r else [None, None]
    factors += [new(E, q, F), new(E, D, q)] if q else [None, None]
    ids = torch.rand(T, E, generator=draw).topk(K).indices.int()
    ids[ids == 3] = -1
    ids[0] = -1
    weights = torch.rand(T, K, generator=draw)
    weights[ids < 0] = float("nan")  # may not be looked at
    x[(ids < 0).all(1)] = float("nan")  # nor may these rows
    how, scales = (bias, *factors, activation, T * K if pairs is None else pairs), (0.5, 2.0)
    y, *kept = op.forward(x, gate_up, down, weights, ids, *how, True, *scales)
    got = y, *op.backward(dy, x, gate_up, down, weights, *kept, *how, *scales)
    assert torch.equal(op.forward(x, gate_up, down, weights, ids, *how, False, *scales)[0], y)
    x0, w0 = x.nan_to_num(), weights.nan_to_num()
    leaves = [t if t is None else t.double().requires_grad_() for t in (x0, w0, bias, *factors)]
    up_a, up_b, down_a, down_b = leaves[3:]
    up = gate_up.double() + (0 if up_a is None else 0.5 * up_b @ up_a)
    merged = down.double() + (0 if down_a is None else 2 * down_b @ down_a)
    want = reference.moe_mlp(leaves[0], up, merged, leaves[1], ids, leaves[2], activation)
    want.backward(dy.double())
    wanted = want.detach(), *(t if t is None else t.grad for t in leaves)
    limit = 1e-5 if dtype == torch.float32 else 4e-2
    names = "y x weights bias up_a up_b down_a down_b".split()
    for name, ours, theirs in zip(names, got, wanted, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert far(ours, theirs) < limit, (name, dtype, ranks, far(ours, theirs))
    plain = [t.detach() for t in (leaves[0], gate_up.double(), down.double(), leaves[1])]
    base = reference.moe_mlp(*plain, ids, None if bias is None else bias.double(), activation)
    assert far(base, want.detach()) > 0.05, "adapters that change nothing"


def check_dense():
    """add_low_rank against fp64: ranks, rows and columns that no tile divides."""
    from tmoe.ops.decode import low_rank

    draw = torch.Generator().manual_seed(0)
    for B, L, W, r in ((5, 70, 100, 3), (40, 256, 72, 16), (17, 300, 520, 40)):
        y, x, a, b = (
            torch.randn(*shape, generator=draw).bfloat16() for shape in ((B, W), (B, L), (r, L), (W, r))
        )
        got = low_rank.add_low_rank(y, x, a, b, 0.25).double()
        u = (x.double() @ a.double().T * 0.25).bfloat16().double()
        want = y.double() + u @ b.double().T
        assert far(got, want) < 0.01, (B, L, W, r, far(got, want))  # two roundings to bf16


def check_wide():
    """A factor whose rows are shorter than 16 bytes is copied by the launch that computes u."""
    from tmoe.ops.experts import adapted_gpu
    from tmoe.ops.experts.pair_order import route

    T, D, F, E, K, r = 40, 40, 24, 5, 2, 3
    draw = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(*shape, generator=draw) for shape in ((T, D), (E, r, D), (E, 2 * F, r)))
    ids = torch.rand(T, E, generator=draw).topk(K).indices.int()
    layer = adapted_gpu.AdaptedLaunches(x, (E, D, F), K, route(ids, E))
    _, wider = layer.narrow(x, a, 1.0, True, b)
    assert torch.equal(wider, torch.nn.functional.pad(b, (0, 5)))


def in_the_interpreter():
    from tmoe.ops.experts import adapted_gpu, gpu

    repair_interpreter()
    poison()
    adapted_gpu.AdaptedLaunches.chunk = lambda self, R: adapted_gpu.Chunk(32, 16, 4, 2)
    adapted_gpu.AdaptedLaunches.tile = lambda self, R: adapted_gpu.Tile(16, 16, 4, 2, 2, 2)
    check_dense()
    for tma in (False, True):
        small_tiles(gpu, tma, True, 2)
        adapted_gpu.FEW = 48 * tma  # without it narrow products read blocks in the order of tokens
        check_wide()
        check(adapted_gpu, 90, (3, 3))
        check(adapted_gpu, 90, (1, 20), biased=True, activation="clamped")
        check(adapted_gpu, 150, (16, 70), pairs=128)
        check(adapted_gpu, 40, (0, 2), activation="relu2")
        check(adapted_gpu, 40, (2, 0))
        check(adapted_gpu, 90, (8, 8), dtype=torch.bfloat16)
    small_tiles(gpu, True, False, 1)
    check(adapted_gpu, 60, (4, 4))


if __name__ == "__main__":
    in_the_interpreter()
    print("all right")
