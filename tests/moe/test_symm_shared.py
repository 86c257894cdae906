"""Rows are exchanged during a shared expert: when this is allowed, and equal sums and gradients.

The ranks really exchange: kernels run in the interpreter, in processes that share their sections. As a
test it starts itself for that:
    TRITON_INTERPRET=1 python tests/moe/test_symm_shared.py

On GPUs test_symm_gpu.py compares such layers with the nccl dispatcher, and whole runs are compared by
    python -m benchmarks.layouts --gpus 4

next: test_dispatch.py
"""

import contextlib
import functools
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from chips import CHIPS, assert_fits, measure
from symm_ranks import SHARED, Ranks, fork, operands, routes, rule, run
from torch.utils.checkpoint import checkpoint

from tmoe.commands.warmup import traces
from tmoe.config.axes import ALONE, Axes
from tmoe.config.presets import presets
from tmoe.config.run import Config, ParallelConfig
from tmoe.moe.exchange import symm
from tmoe.moe.exchange.dispatch import SymmDispatcher, dispatcher_for
from tmoe.moe.experts import LocalExperts
from tmoe.moe.layer import SquaredRelu, SwiGLU
from tmoe.moe.moe_bytes import moe_bytes, runs_beside
from tmoe.moe.router import Routing
from tmoe.ops import exchange
from tmoe.ops.experts import swiglu
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.register import lib, taking


@pytest.mark.slow
def test_in_the_interpreter():
    run(__file__, TRITON_INTERPRET="1")


# ---- the rule, and what the warm-up and the dry run make of it


@pytest.mark.parametrize(
    ("preset", "ep", "hides"),
    [
        ("moe-pilot-14b", 4, True),  # 0.54 ms of copies, 0.94 ms of products
        ("moe-pilot-14b", 8, False),  # 1.27 ms of copies
        ("qwen2-57b-a14b", 8, True),
        ("qwen3-30b-a3b", 4, False),  # no shared expert
    ],
)
def test_the_rule(preset, ep, hides):
    moe = presets()[preset].model.moe
    assert symm.hides(ep, 2, moe.shared_dim) == hides
    cfg = Config(model=presets()[preset].model, parallel=ParallelConfig(ep=ep))
    assert runs_beside(cfg, Axes(ep=ep)) == hides and not runs_beside(cfg, ALONE)
    packed = Config(model=cfg.model, parallel=ParallelConfig(ep=ep, dispatch_dtype="fp8"))
    nccl = Config(model=cfg.model, parallel=ParallelConfig(ep=ep, dispatch="nccl"))
    assert not runs_beside(packed, Axes(ep=ep)) and not runs_beside(nccl, Axes(ep=ep))
    T = cfg.train.batch * cfg.train.seq
    assert moe_bytes(packed, Axes(ep=ep)) - moe_bytes(cfg, Axes(ep=ep)) == hides * T * moe.shared_dim * 2, (
        "activations are made again"
    )


def test_who_takes_the_shared_expert(monkeypatch):
    """The op computes it if the rule says so and rows are sent unpacked; otherwise the caller does."""
    taken = []
    monkeypatch.setattr(
        symm, "moe", lambda *args: taken.append(args[5] is not None) or (args[0] * 2, args[0] * 3)
    )
    x = torch.randn(4, 8)
    shared = SwiGLU(8, SHARED)
    routing = Routing(torch.ones(4, 1), torch.zeros(4, 1).int(), x)
    local = LocalExperts(x, x)
    for beside, fp8, op in ((True, False, True), (True, True, False), (False, False, False)):
        monkeypatch.setattr(symm, "hides", rule(beside, True))
        dispatcher = SymmDispatcher(
            SimpleNamespace(group_name="nobody", size=lambda: 2), 1, fp8=fp8, width=SHARED
        )  # type: ignore[bad-argument-type]
        y, y_shared = dispatcher.run_with_shared(x, routing, local, shared)
        assert torch.equal(y, x * 2) and torch.equal(y_shared, x * 3 if op else shared(x))
        assert torch.equal(dispatcher(x, routing, local), x * 2)
    assert taken == [True, False, False, False, False, False]


def with_hook(module, register):
    getattr(module, register)(lambda *_: None)
    return module


class Scaled(SwiGLU):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: with_hook(m, "register_forward_hook"),
        lambda m: with_hook(m, "register_full_backward_hook"),
        lambda m: with_hook(m.down, "register_forward_pre_hook"),
        lambda m: with_hook(m.gate_up, "register_full_backward_pre_hook"),
        lambda m: torch.nn.utils.parametrizations.weight_norm(m.gate_up),
        lambda m: setattr(m, "__class__", Scaled),
        lambda m: setattr(m, "forward", m.forward),
        lambda m: setattr(m.down, "forward", lambda x: x),
        lambda m: setattr(m, "down", torch.nn.Sequential(m.down, torch.nn.Linear(8, 8))),
        lambda m: setattr(m, "gate_up", torch.nn.Linear(8, 2 * SHARED)),
    ],
)
def test_a_shared_expert_that_is_more_than_its_matrices_is_not_passed_by(change, monkeypatch):
    """If it is changed before parallelize, all ranks call it; a later change is an error."""
    monkeypatch.setattr(symm, "hides", rule(True, True))
    monkeypatch.setattr(symm, "moe", lambda *args: (args[0], args[0]))
    shared = SwiGLU(8, SHARED)
    x = torch.randn(3, 8)
    up, down = shared.matrices(x) or ()
    assert up is shared.gate_up.weight and down is shared.down.weight and shared.plain
    change(shared)
    assert not shared.plain
    group = SimpleNamespace(group_name="g", size=lambda: 2)
    routing = Routing(x, x.int(), x)
    local = LocalExperts(x, x)
    for now in (shared, torch.nn.Linear(8, 8)):
        with pytest.raises(ValueError, match=r"moe\.shared: has got hooks"):
            dispatcher = SymmDispatcher(group, 1, width=SHARED)  # type: ignore[bad-argument-type]
            dispatcher.run_with_shared(x, routing, local, now)  # type: ignore[bad-argument-type]
    dispatcher = SymmDispatcher(group, 1)  # type: ignore[bad-argument-type]
    _, y = dispatcher.run_with_shared(x, routing, local, shared)
    assert torch.equal(y, shared(x))


def agreed(rank, world):
    before = symm.obstacle
    symm.obstacle = lambda group: ""
    try:
        widths = [96, 96 if rank else 0]  # of two layers, here
        return [dispatcher_for(dist.group.WORLD, 1, "symm", 4, False, "", width).width for width in widths]
    finally:
        symm.obstacle = before


def test_all_ranks_pass_a_shared_expert_by_or_none(gloo):
    assert gloo(2, agreed) == [[96, 0]] * 2


def test_a_shared_expert_that_is_cast_runs_itself():
    shared = SwiGLU(8, SHARED)
    x = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert shared.matrices(x) is None
    assert shared.matrices(x.bfloat16()) is None and shared.bfloat16().matrices(x) is None
    assert shared.matrices(x.bfloat16()) is not None


def test_what_does_not_fit_is_said_before_anything_is_pushed():
    x, w, ids, up, down, bias, shared_up, shared_down, *codes = operands()
    for fp8, shared, message in (
        (True, (shared_up, shared_down), "fp8"),
        (False, (shared_up[:-1], shared_down), "shared_gate_up"),
        (False, (shared_up.bfloat16(), shared_down), "shared_gate_up"),
        (False, (shared_up, shared_down.bfloat16()), "shared_down"),
        (False, (shared_up, shared_down[:-1]), "shared_down"),
    ):
        with pytest.raises(ValueError, match=message):
            tensors = x, w, ids, up, down, bias, *shared, *codes
            layer = symm.SymmCall(*tensors, "swiglu", 4, 128, fp8, True, "nobody")
            symm._forward(layer)


def launched(what):
    found = {}
    with compile_only("cuda:90", lambda name, key, compile: found.setdefault(key, (name, compile))):
        what()
    return found


def test_the_warm_up_knows_the_kernels():
    pilot = presets()["moe-pilot-14b"]
    cfg = Config(model=pilot.model, train=pilot.train, parallel=ParallelConfig(ep=4))
    D, G, K, T = 2048, 2816, 2, 16384

    def warm_up():
        for trace, *args in traces(cfg):
            trace(*args)

    ex = object.__new__(symm.Exchange)
    ex.rank = 0
    ex.world = 4
    ex.capacity = T
    ex.addresses = dict.fromkeys(
        ("x", "ids", "weights", "main", "side"), torch.empty(4, dtype=torch.int64, device="meta")
    )
    ex.side = SimpleNamespace(wait_stream=lambda other: None)
    ex.copy = lambda *_: None
    x, h = (torch.empty(T, width, dtype=torch.bfloat16, device="meta") for width in (D, 2 * G))
    ids, weights = torch.empty(T, K, dtype=torch.int32, device="meta"), torch.empty(T, K, device="meta")

    def layer():
        with no_streams():
            symm._push_beside(ex, {"x": x}, ids, weights, 8)
            ex.arrived()
        act, _ = swiglu.activate(h, G)
        swiglu.activate(h, G, act)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symm, "_all", lambda t: 264)
        wanted = launched(layer)
    assert {name for name, _ in wanted.values()} == {"push_kernel", "meet_kernel", "dense_act_kernel"}
    assert len(wanted) == 5
    assert not set(wanted) - set(launched(warm_up))


@pytest.mark.parametrize("arch", CHIPS)
def test_the_kernels_fit(arch):
    found, vectors = [], []

    def visit(name, key, compile):
        found.append(measure(arch, name, compile))
        if arch.startswith("cuda") and name == "dense_act_kernel":
            ptx = compile().asm["ptx"]
            vectors.append("ld.global.v4" in ptx and "st.global.v4" in ptx and "st.global.b16" not in ptx)

    with compile_only(arch, visit):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            swiglu.trace(16384, 2816, dtype)
        swiglu.trace(16384, 3712, torch.bfloat16, halves=1)
        assert all(vectors), "16 bytes at a time"
        swiglu.trace(100, 33, torch.bfloat16)
        exchange.trace_routes(16384, 2, 4, torch.bfloat16)
    assert len(found) == 11
    for binary in found:
        assert_fits(binary, CHIPS[arch])


# ---- in the interpreter


def check_elementwise(T, width, dtype, layer=SwiGLU):
    h, d = torch.randn(T, layer.halves * width).mul(3).to(dtype), torch.randn(T, width).to(dtype)
    act, dh = swiglu.activate(h, width, d)
    leaf = h.double().requires_grad_()
    want = layer.act(leaf)
    want.backward(d.double())
    close = functools.partial(
        torch.testing.assert_close,
        **(dict(rtol=1e-2, atol=1e-3) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-5)),
    )
    close(act.double(), want.detach())
    close(dh.double(), leaf.grad)
    again, none = swiglu.activate(h, width)
    assert torch.equal(again, act) and none is None


@contextlib.contextmanager
def no_streams():
    """A copy on the side stream is complete at once."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("device", "stream"):
            patch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        yield


class Late:
    """Copies that begin only when something waits for them."""

    def __init__(self, ex):
        self.ex = ex
        self.pending = []

    def copy_async(self, copy, wire):
        self.pending.append((copy, wire))
        return wire

    def arrived(self):
        (copy, wire) = self.pending.pop()
        copy(wire)
        exchange.meet(self.ex.addresses["side"], self.ex.rank, wait=False)
        exchange.meet(self.ex.addresses["side"], self.ex.rank, arrive=False)


def shared_of(x, gate_up, down):
    return kind_of(gate_up, down).act(x @ gate_up.t()) @ down.t()


def kind_of(gate_up, down):
    """SwiGLU, or without a gate squared ReLU."""
    return SquaredRelu if len(gate_up) == down.shape[1] else SwiGLU


class Net:
    """Two layers; rank p has L experts of each and all the shared matrices, in the second without a gate.

    Each rank has all ranks' tokens and matrices.
    """

    def __init__(self, tokens, kind, L, seed, width=64, hidden=32, top_k=2):
        world = len(tokens)
        draw = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
        self.tokens, self.L, self.seed = tokens, L, seed
        self.x, self.dys = ([normal(n, width) for n in tokens] for _ in range(2))
        self.ids = [routes(kind, n, world * L, top_k, draw) for n in tokens]
        self.w = [torch.rand(n, top_k, generator=draw) for n in tokens]
        self.layers = [
            (normal(world * L, 2 * hidden, width) / 8, normal(world * L, width, hidden) / 6,
             normal(halves * SHARED, width) / 8, normal(width, SHARED) / 10)
            for halves in (2, 1)
        ]  # fmt: skip

    def leaves(self, p, whole=False):
        """x, w and matrices of a rank.

        Or x and w of all ranks, with a copy of the shared matrices for each.
        """
        own = slice(None) if whole else slice(p * self.L, (p + 1) * self.L)
        kind = torch.float64 if whole else torch.float32
        take = lambda t: t.clone().to(kind).requires_grad_()  # noqa: E731
        x, w = ([take(t) for t in ts] if whole else take(ts[p]) for ts in (self.x, self.w))
        copies = len(self.tokens) if whole else 1
        layers = [
            (take(up[own]), take(down[own]), [(take(s_up), take(s_down)) for _ in range(copies)])
            for up, down, s_up, s_down in self.layers
        ]
        return x, w, layers

    def want(self, p, uses):
        """The result of rank p, computed by one process that has all tokens and matrices."""
        from tmoe.ops import reference

        xs, ws, layers = self.leaves(p, whole=True)
        x, w, ids = torch.cat(xs), torch.cat(ws), torch.cat(self.ids)
        for up, down, shared in layers:
            routed = reference.moe_mlp(x, up, down, w, ids)
            parts = zip(x.split(self.tokens), shared, strict=True)
            x = uses(routed, torch.cat([shared_of(x_p, *matrices) for x_p, matrices in parts]), x)
        leaves = [
            xs[p],
            ws[p],
            *(t for up, down, _ in layers for t in (up, down)),
            *(t for *_, s in layers for t in s[p]),
        ]
        grads = torch.autograd.grad(x, leaves, torch.cat(self.dys).double(), materialize_grads=True)
        own = slice(p * self.L, (p + 1) * self.L)
        return [x.detach().split(self.tokens)[p], *grads[:2], *(t[own] for t in grads[2:6]), *grads[6:]]

    def got(self, p, layer_of, uses, around, frozen):
        x0, w, layers = self.leaves(p)
        x = x0.requires_grad_(not frozen)
        for i, (up, down, [(shared_up, shared_down)]) in enumerate(layers):
            shared = kind_of(shared_up, shared_down)(*shared_down.shape)
            shared.gate_up.weight, shared.down.weight = (
                torch.nn.Parameter(t.detach()) for t in (shared_up, shared_down)
            )

            def layer(x, up=up, down=down, shared=shared):
                return uses(*layer_of(x, Routing(w, self.ids[p], x), LocalExperts(up, down), shared), x)

            layers[i] = up, down, shared
            x = around(layer)(x)
        x.backward(self.dys[p])
        grads = [t.grad for up, down, _ in layers for t in (up, down)]
        grads += [t.grad for _, _, shared in layers for t in shared.parameters()]
        return [x.detach(), x0.grad, w.grad, *grads]


def both(routed, shared, x):
    return routed + 0.5 * shared + x


def checkpointed(layer):
    return lambda x: checkpoint(layer, x, use_reentrant=False)


def one_rank(rank, ranks, tokens, L):
    """Layers of all kinds, one after another, each rank at its own pace."""
    from interpreter import poison, repair_interpreter, small_tiles

    from tmoe.ops.experts import gpu

    torch.set_num_threads(1)  # a fork has no others
    repair_interpreter()
    small_tiles(gpu, False, True, 1)
    poison()
    ex = ranks.exchange(rank)
    pace = torch.Generator().manual_seed(rank)
    ex.side = SimpleNamespace(wait_stream=lambda other: None)
    ex.reserve = lambda *_: None
    early = ex.copy_async
    late = Late(ex)
    symm.exchange_of = lambda _: ex
    symm._all = lambda t: 2  # programs; no GPU to ask
    lib.impl("symm_moe", taking(symm.SymmCall, symm._forward), "CPU")
    lib.impl("symm_moe_backward", taking(symm.SymmBackward, symm._backward), "CPU")
    dispatcher = SymmDispatcher(
        SimpleNamespace(group_name="g", size=lambda: len(tokens)), L, max(tokens), False, SHARED
    )  # type: ignore[bad-argument-type]
    compiled = torch.compile(dispatcher.run_with_shared, fullgraph=True, dynamic=False, backend="aot_eager")

    def paced(layer):
        def call(*args):
            time.sleep(float(torch.rand((), generator=pace)) * 0.1)
            return layer(*args)

        return call

    # overlapped, copies of experts hidden, copies start late, call, calls used, around a layer, x frozen
    cases = [
        (True, True, False, dispatcher.run_with_shared, both, paced, False),
        (True, False, rank == 0, dispatcher.run_with_shared, both, checkpointed, False),
        (False, True, False, dispatcher.run_with_shared, both, paced, False),
        (True, True, True, dispatcher.run_with_shared, lambda routed, shared, x: shared + x, paced, False),
        (
            True,
            True,
            rank == 1,
            dispatcher.run_with_shared,
            lambda routed, shared, x: routed + x,
            paced,
            False,
        ),
        (True, True, False, compiled, both, paced, False),
        (True, True, True, dispatcher.run_with_shared, both, paced, True),
        (False, False, False, dispatcher.run_with_shared, both, paced, False),
    ]
    with no_streams():
        for i, (beside, hidden, waits, call, uses, around, frozen) in enumerate(cases):
            symm.hides = rule(beside, hidden)
            ex.copy_async, ex.arrived = (
                (late.copy_async, late.arrived)
                if waits
                else (early, functools.partial(symm.Exchange.arrived, ex))
            )
            net = Net(tokens, ("random", "first rank", "holes")[i % 3], L, i)
            got = net.got(rank, call, uses, around, frozen)
            want = net.want(rank, uses)
            for j, (g, t) in enumerate(zip(got, want, strict=True)):
                if j == 1 and frozen:
                    assert g is None
                    continue
                g = torch.zeros_like(t) if g is None else g  # not used
                torch.testing.assert_close(
                    g.double(), t, rtol=1e-4, atol=2e-5, msg=lambda m, at=(i, j): f"{at}: {m}"
                )
        keeps_nothing(rank, net, dispatcher, tokens)


def keeps_nothing(rank, net, dispatcher, tokens):
    """Without gradients the values are the same, without pre-activations; x of an inference is copied too."""
    x, w, [(up, down, [(shared_up, shared_down)]), _] = net.leaves(rank)
    symm.hides = rule(True, True)
    tensors = x, w, net.ids[rank], up, down, None, shared_up, shared_down, None, None
    op = functools.partial(torch.ops.tmoe.symm_moe, *tensors, "swiglu", max(tokens), 128, False)
    y, h, shared_y, shared_h = op(True, "g", False)
    assert len(h) == 128 and shared_h.shape == (len(x), 2 * SHARED)
    with torch.inference_mode():
        how = "swiglu", max(tokens), 128, False, False, "g", False
        again = torch.ops.tmoe.symm_moe(x * 1, *tensors[1:], *how)
    assert (
        torch.equal(again[0], y)
        and torch.equal(again[2], shared_y)
        and again[1].numel() == again[3].numel() == 0
    )


def in_the_interpreter():
    from interpreter import repair_interpreter

    # forked before autograd has run here, which could not run there again
    for tokens in (
        [21, 0, 9],
        [12, 12],
    ):
        L = 2
        world = len(tokens)
        fork(world, one_rank, Ranks(world, max(tokens) + 3, 64, 2, torch.float32), tokens, L)
    repair_interpreter()
    for T, width, dtype in (
        (13, 72, torch.float32),
        (5, 1030, torch.bfloat16),
        (0, 16, torch.float32),
        (70, 33, torch.float32),
    ):
        check_elementwise(T, width, dtype)
        check_elementwise(T, width, dtype, SquaredRelu)


if __name__ == "__main__":
    in_the_interpreter()
    print("all right")
