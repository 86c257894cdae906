"""The exchange through the peers' memory: its kernels in the interpreter and compiled.

The test starts this file in the interpreter:
    TRITON_INTERPRET=1 python tests/moe/test_symm.py

next: test_symm_gpu.py
"""

import time

import pytest
import torch
from gradient_sum import Sum
from symm_ranks import Ranks, fork, routes, run

from tmoe.base.activations import activation as named


@pytest.mark.slow
def test_in_the_interpreter():
    run(__file__, TRITON_INTERPRET="1")


@pytest.mark.parametrize("arch", ["cuda:90", "cuda:80", "hip:gfx942"])
def test_compiles(arch):
    from tmoe.ops import exchange
    from tmoe.ops.launch.kernel_launch import compile_only

    found = {}
    with compile_only(arch, lambda name, key, compile: found.setdefault(key, (name, compile()))):
        exchange.trace(512, 2048, 8, 4, torch.bfloat16, fp8=arch == "cuda:90")
        wide = len(found)  # kernels whose rows are whole vectors
        if arch == "cuda:90":
            exchange.trace(512, 200, 3, 8, torch.float32)
    names = {"push_kernel", "pull_kernel", "meet_kernel"} | (
        {"pack_kernel", "unpack_kernel"} if arch == "cuda:90" else set()
    )
    assert {name for name, _ in found.values()} == names
    if arch.startswith("cuda"):
        for name, kernel in list(found.values())[:wide]:
            ptx = kernel.asm["ptx"]
            assert name == "meet_kernel" or ("st.global.v4" in ptx and "st.global.b16" not in ptx), (
                "16 bytes at a time"
            )


@pytest.mark.parametrize(
    ("tokens", "programs", "rows"),
    [
        (1, 1, 2),
        (100, 50, 2),
        (600, 132, 4),
        (2112, 132, 16),
        (2113, 133, 16),
        (4224, 264, 16),
        (16384, 264, 16),
    ],
)
def test_programs_for_few_tokens(tokens, programs, rows):
    """One for each of 132 multiprocessors until each has 16 rows, then two."""
    from tmoe.ops import exchange

    grid, sizes = exchange._tiling(tokens, 264, 2048, 8, 2)
    assert (grid, sizes[5]) == ((programs,), rows) and sizes[5] * sizes[6] <= exchange.TILE


# ---- in the interpreter: ranks are lists of sections in one process


def check_exchange(kind, tokens, D, K, L, dtype):
    """Every row is where it should be and nowhere else; sums pulled back are those of a loop over ranks."""
    from tmoe.ops import exchange

    world = len(tokens)
    capacity = max(tokens) + 3
    ranks = Ranks(world, capacity, D, K, dtype)
    draw = torch.Generator().manual_seed(len(kind))
    xs = [torch.randn(n, D, generator=draw).to(dtype) for n in tokens]
    ws = [torch.rand(n, K, generator=draw) for n in tokens]
    ids = [routes(kind, n, world * L, K, draw) for n in tokens]
    at = ranks.at
    for p in range(world):
        exchange.push(
            xs[p],
            ids[p],
            ws[p],
            at["x"],
            at["ids"],
            at["weights"],
            at["state"],
            p,
            capacity,
            L,
            3,
            meet=False,
        )
    for q in range(world):
        for p in range(world):
            here = torch.where(ids[p] // L == q, ids[p] - q * L, -1).masked_fill(ids[p] < 0, -1)
            slot = slice(p * capacity, p * capacity + tokens[p])
            assert torch.equal(ranks.of["ids"][q][slot], here)
            assert (ranks.of["ids"][q][slot.stop : (p + 1) * capacity] == -1).all()
            goes = (here >= 0).any(1)
            assert torch.equal(ranks.of["x"][q][slot][goes], xs[p][goes])
            assert ranks.of["x"][q][slot][~goes].isnan().all(), "a row that nobody asked for"
            assert torch.equal(ranks.of["weights"][q][slot][goes], ws[p][goes])
        there = (ranks.of["ids"][q] >= 0).any(1)
        ranks.of["y"][q][there] = torch.randn(int(there.sum()), D, generator=draw).to(dtype)
        ranks.of["d_weights"][q][ranks.of["ids"][q] >= 0] = torch.rand(
            int((ranks.of["ids"][q] >= 0).sum()), generator=draw
        )
    for p in range(world):
        y, dw = torch.full((tokens[p], D), 7.0).to(dtype), torch.full((tokens[p], K), 7.0)
        exchange.pull(y, dw, ids[p], at["y"], at["d_weights"], at["state"], p, capacity, L, 2, meet=False)
        want, want_dw = torch.zeros(tokens[p], D), torch.zeros(tokens[p], K)
        slot = slice(p * capacity, p * capacity + tokens[p])
        for q in range(world):
            on_q = (ids[p] >= 0) & (ids[p] // L == q)
            want = torch.where(on_q.any(1, keepdim=True), want + ranks.of["y"][q][slot].float(), want)
            want_dw = torch.where(on_q, ranks.of["d_weights"][q][slot], want_dw)
        rtol = 0 if dtype == torch.float32 else 1e-2  # it truncates
        torch.testing.assert_close(y, want.to(dtype), rtol=rtol, atol=0)
        assert torch.equal(dw, want_dw)


def check_packed(tokens, D, K, L, dtype):
    """Rows of float8's own values times a power of two travel packed without loss.

    They come back added up. (Other values the interpreter rounds wrongly: 124 becomes 64, not 128.)
    """
    from tmoe.ops import exchange

    world = len(tokens)
    capacity = max(tokens)
    draw = torch.Generator().manual_seed(D)
    float8 = torch.float8_e4m3fn
    ranks = Ranks(world, capacity, D, K, dtype)
    at = ranks.at
    R = world * capacity
    packed = [torch.zeros(R, D, dtype=float8) for _ in tokens]
    scales = [torch.full((R,), float("nan")) for _ in tokens]
    to, to_scales = (torch.tensor([t.data_ptr() for t in ts]) for ts in (packed, scales))
    xs = []
    ids = [routes("holes", n, world * L, K, draw) for n in tokens]
    for p in range(world):
        x = torch.randn(tokens[p], D, generator=draw).mul(20).to(float8).float()
        x[:, 0] = 448
        xs.append((x * 2.0 ** torch.randint(-20, 20, (tokens[p], 1), generator=draw)).to(dtype))
        mine = torch.zeros(tokens[p], D, dtype=float8)
        s = torch.zeros(tokens[p])
        w = torch.ones(tokens[p], K)
        exchange.pack(xs[p], None, mine, s)
        exchange.push(
            mine, ids[p], w, to, at["ids"], at["weights"], at["state"], p, capacity, L, 3, False, s, to_scales
        )
    for q in range(world):
        exchange.unpack(ranks.of["x"][q], ranks.of["ids"][q], packed[q], scales[q])
        here = (ranks.of["ids"][q] >= 0).any(1)
        want = torch.cat([torch.cat([x, x.new_zeros(capacity - len(x), D)]) for x in xs])
        assert torch.equal(ranks.of["x"][q][here], want[here]) and ranks.of["x"][q][~here].isnan().all()
        packed[q].view(torch.uint8).fill_(0x7F)  # NaN
        scales[q].fill_(float("nan"))
        exchange.pack(ranks.of["x"][q], ranks.of["ids"][q], packed[q], scales[q])
    for p in range(world):
        y = torch.empty(tokens[p], D, dtype=dtype)
        copies = sum((ids[p] // L == q).any(1).int() for q in range(world))
        exchange.pull(y, None, ids[p], to, at["d_weights"], at["state"], p, capacity, L, 2, False, to_scales)
        assert torch.equal(y, (xs[p].float() * copies[:, None]).to(dtype))


def meet_often(rank, world, rounds, D, K, L, T, ranks, at, failed):
    """One rank of a group whose ranks share memory and run at the same time, each at its own pace."""
    from interpreter import repair_interpreter

    from tmoe.ops import exchange

    repair_interpreter()
    draw, pace = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(100 + rank)
    where = rank, max(T), L, 3
    to = [at[name] for name in ("x", "ids", "weights", "state")]
    for i in range(rounds):
        if torch.rand((), generator=pace) < 0.5:
            time.sleep(0.03)
        x = torch.randn(T[rank], D, generator=draw)
        ids = routes("random", T[rank], world * L, K, draw)
        exchange.push(x, ids, torch.rand(T[rank], K, generator=draw), *to, *where)
        here = (ranks["ids"][rank] >= 0).any(1)
        ranks["y"][rank][here] = ranks["x"][rank][here] * (i + 1)  # experts: what arrived, and when
        y = torch.empty(T[rank], D)
        copies = torch.stack([(ids // L == q).any(1) for q in range(world)]).sum(0)
        exchange.pull(y, None, ids, at["y"], at["d_weights"], at["state"], *where)
        failed[rank] |= not torch.allclose(y, x * (i + 1) * copies[:, None])
        if i % 3 == 0:
            # like a backward that still reads x: no other rank may have written yet
            ranks["x"][rank].fill_(float("nan"))
            exchange.meet(at["state"], rank)
    cells = ranks["state"][rank][0, : world + 1].clone()
    cells[world] = ranks["state"][rank][0, exchange.MET.value]
    failed[rank] |= bool((cells != cells[0]).any())


def check_meeting():
    """Ranks are processes that share their sections and really meet, with counts that wrap."""
    from tmoe.ops import exchange

    world = 3
    D = 32
    K = 2
    L = 2
    T = [5, 0, 9]
    ranks = Ranks(world, max(T), D, K, torch.float32)
    for state in ranks.of["state"]:
        state[0, : exchange.MET.value + 1] = 2**31 - 4
    failed = torch.zeros(world, dtype=torch.bool).share_memory_()
    fork(world, meet_often, world, 8, D, K, L, T, ranks.of, ranks.at, failed)
    assert not failed.any(), failed


def check_experts(tokens, kind, pairs, activation="swiglu", K=2, L=2, D=64, F=32):
    """The whole layer, forward and backward, against one process that holds all experts.

    `pairs` may take several rounds. In the backward rows are moved by kernels, and by copies.
    """
    from tmoe.moe.exchange import symm
    from tmoe.ops import exchange, reference

    world = len(tokens)
    capacity = max(tokens)
    draw = torch.Generator().manual_seed(3)
    ranks = Ranks(world, capacity, D, K, torch.float32)
    at = ranks.at
    ex = [ranks.exchange(p) for p in range(world)]
    xs, dys = ([torch.randn(n, D, generator=draw) for n in tokens] for _ in range(2))
    ws = [torch.rand(n, K, generator=draw) for n in tokens]
    ids = [routes(kind, n, world * L, K, draw) for n in tokens]
    gate_up = torch.randn(world * L, named(activation).halves * F, D, generator=draw) / 8
    down = torch.randn(world * L, D, F, generator=draw) / 6

    def experts(p):
        own = slice(p * L, (p + 1) * L)
        return symm.ReceivedExperts(ex[p], gate_up[own], down[own], None, activation, K, torch.float32, pairs)

    def push(name, rows, weights):
        for p in range(world):
            w = weights and weights[p]
            exchange.push(
                rows[p],
                ids[p],
                w,
                at[name],
                at["ids"],
                at["weights"],
                at["state"],
                p,
                capacity,
                L,
                2,
                meet=False,
            )

    def pull(d_weights):
        ys = [torch.full_like(x, float("nan")) for x in xs]
        for p in range(world):
            dw = d_weights and d_weights[p]
            exchange.pull(
                ys[p], dw, ids[p], at["y"], at["d_weights"], at["state"], p, capacity, L, 2, meet=False
            )
        return torch.cat(ys)

    push("x", xs, ws)
    hs = [torch.full((pairs, gate_up.shape[1]), float("nan")) for _ in tokens]
    for p in range(world):
        experts(p).forward(hs[p])
    y = pull(None)
    got = []
    for copies in (False, True):
        for t in ranks.of["x"]:
            t.fill_(float("nan"))
        push("dy", dys, ws)
        if copies:
            for p in range(world):
                ex[p].copy_x({"x": xs[p]})
        else:
            push("x", xs, None)
        grads = [experts(p).backward(hs[p], lambda: None, lambda: None) for p in range(world)]
        d_ws = [torch.full_like(w, float("nan")) for w in ws]
        dxs = [torch.full_like(x, float("nan")) for x in xs]
        wires = [e.wire_y(D, torch.float32, K, False) for e in ex]
        for p in range(world) if copies else ():
            ex[p].copy_y(wires[p])
        for p in range(world) if copies else ():
            ex[p].sum(dxs[p], d_ws[p], ids[p], L, wires[p])
        dx = torch.cat(dxs) if copies else pull(d_ws)
        got.append([y, dx, torch.cat(d_ws), *(torch.cat([g[i] for g in grads]) for i in range(2))])
    assert all(torch.equal(g, t) for g, t in zip(*got, strict=True)), "copied rows, other sums"

    leaves = [torch.cat(t).double().requires_grad_() for t in (xs, ws)] + [
        t.double().requires_grad_() for t in (gate_up, down)
    ]
    want = reference.moe_mlp(
        leaves[0], leaves[2], leaves[3], leaves[1], torch.cat(ids), activation=activation
    )
    want.backward(torch.cat(dys).double())
    for name, g, t in zip(
        ("y", "dx", "dw", "gate_up", "down"), got[1], (want, *(t.grad for t in leaves)), strict=True
    ):
        torch.testing.assert_close(
            g.double(), t, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{kind} {name}: {m}"
        )


def check_fp8(tokens, pairs, packed, activation="swiglu", K=2, L=2, D=128, F=64):
    """Experts in fp8, forward and backward, against the twin with all experts in one process.

    packed: rows arrive as codes, their sections of values stay NaN until the matrices' gradients, and with
    frozen matrices for ever.
    """
    from tmoe.moe.exchange import symm
    from tmoe.ops import exchange, moe_mlp
    from tmoe.ops.experts import fp8_codes

    world, capacity = len(tokens), max(tokens)
    draw = torch.Generator().manual_seed(7)
    ranks = Ranks(world, capacity, D, K, torch.float32)
    at, ex = ranks.at, [ranks.exchange(p) for p in range(world)]
    xs, dys = ([torch.randn(n, D, generator=draw) for n in tokens] for _ in range(2))
    ws = [torch.rand(n, K, generator=draw) for n in tokens]
    ids = [routes("random", n, world * L, K, draw) for n in tokens]
    n = named(activation).halves
    gate_up = torch.randn(world * L, n * F, D, generator=draw) / 11
    down = torch.randn(world * L, D, F, generator=draw) / 8
    codes = [
        [fp8_codes._encode_plain(t[p * L :][:L], h) for t, h in ((gate_up, n), (down, 1))]
        for p in range(world)
    ]
    sections = {
        name: [
            (torch.zeros(world * capacity, D, dtype=torch.float8_e4m3fn), torch.zeros(world * capacity))
            for _ in ex
        ]
        for name in ("x", "dy")
    }
    for p, one in enumerate(ex):
        one.packed = lambda name, D, p=p: sections[name][p]

    def experts(p):
        own = slice(p * L, (p + 1) * L)
        how = activation, K, torch.float32, pairs, tuple(codes[p]), packed
        return symm.ReceivedExperts(ex[p], gate_up[own], down[own], None, *how)

    def push(name, rows, weights):
        for p in range(world):
            where = at["ids"], at["weights"], at["state"], p, capacity, L, 2, False
            w = weights and weights[p]
            if not packed:
                exchange.push(rows[p], ids[p], w, at[name], *where)
                continue
            mine, scales = torch.zeros(len(rows[p]), D, dtype=torch.float8_e4m3fn), torch.zeros(len(rows[p]))
            exchange.pack(rows[p], None, mine, scales)
            to, to_scales = (torch.tensor([t[i].data_ptr() for t in sections[name]]) for i in range(2))
            exchange.push(mine, ids[p], w, to, *where, scales, to_scales)

    def unpack(p, name):
        if packed:
            exchange.unpack(ranks.of[name][p], ranks.of["ids"][p], *sections[name][p])

    def pull(d_weights):
        ys = [torch.full_like(x, float("nan")) for x in xs]
        for p in range(world):
            where = ids[p], at["y"], at["d_weights"], at["state"], p, capacity, L, 2
            exchange.pull(ys[p], d_weights and d_weights[p], *where, meet=False)
        return torch.cat(ys)

    push("x", xs, ws)
    size = fp8_codes.KeptH.size(pairs, (L, D, F), activation)
    hs = [torch.full((size,), 0xFF, dtype=torch.uint8) for _ in tokens]  # codes and scales that are NaN
    for p in range(world):
        experts(p).forward(hs[p])
    got = [pull(None)]
    push("dy", dys, None)
    for p in range(world):
        frozen = experts(p).backward(hs[p], lambda: None, lambda: None, True)
        assert frozen == (None, None, None) and (not packed or ranks.of["x"][p].isnan().all())
    d_ws = [torch.full_like(w, float("nan")) for w in ws]
    got += [pull(d_ws), torch.cat(d_ws)]
    for p in range(world):
        unpack(p, "dy")
    grads = [experts(p).backward(hs[p], lambda p=p: unpack(p, "x"), lambda: None) for p in range(world)]
    got += [torch.cat([grad[i] for grad in grads]) for i in range(2)]
    assert torch.equal(pull(d_ws), got[1]), "frozen, another dx"

    # matrices' gradients are those of the values that were sent
    sent = fp8_codes.rounded_rows if packed else lambda rows: rows
    leaves = [torch.cat(t).requires_grad_() for t in ([sent(x) for x in xs], ws)]
    leaves += [t.clone().requires_grad_() for t in (gate_up, down)]
    every = fp8_codes._encode_plain(gate_up, n), fp8_codes._encode_plain(down, 1)
    want = moe_mlp(leaves[0], *leaves[2:], leaves[1], torch.cat(ids), activation=activation, codes=every)
    want.backward(torch.cat([sent(dy) for dy in dys]))
    wanted = want, *(t.grad for t in leaves)
    for name, ours, theirs in zip(("y", "dx", "dw", "gate_up", "down"), got, wanted, strict=True):
        error = float((ours - theirs).detach().norm() / theirs.detach().norm())
        assert error < (5e-2 if pairs < max(tokens) * K else 1e-3), (name, packed, error)


def check_frozen(tokens, pairs, K=2, L=2, D=64, F=32):
    """Frozen matrices: all other gradients as before, bit for bit, and no product for dW."""
    from tmoe.moe.exchange import symm
    from tmoe.ops import exchange
    from tmoe.ops.experts import gpu

    draw = torch.Generator().manual_seed(5)
    capacity = max(tokens)
    ranks = Ranks(1, capacity, D, K, torch.float32)
    at, ex = ranks.at, ranks.exchange(0)
    x, dy = (torch.randn(tokens[0], D, generator=draw) for _ in range(2))
    w, ids = torch.rand(tokens[0], K, generator=draw), routes("random", tokens[0], L, K, draw)
    gate_up = torch.randn(L, 2 * F, D, generator=draw) / 8
    down, bias = torch.randn(L, D, F, generator=draw) / 6, torch.randn(L, 2 * F, generator=draw)
    for name, rows in (("x", x), ("dy", dy)):
        where = at[name], at["ids"], at["weights"], at["state"]
        exchange.push(rows, ids, w, *where, 0, capacity, L, 2, meet=False)
    experts = symm.ReceivedExperts(ex, gate_up, down, bias, "swiglu", K, torch.float32, pairs)
    h = torch.full((pairs, 2 * F), float("nan"))
    experts.forward(h)
    found, products = [], gpu.LayerLaunches.dw
    for frozen in (False, True):
        if frozen:
            gpu.LayerLaunches.dw = None  # a call would raise
        try:
            *matrices, d_bias = experts.backward(h, lambda: None, lambda: None, frozen)
        finally:
            gpu.LayerLaunches.dw = products
        assert [t is None for t in matrices] == [frozen] * 2
        found.append([d_bias, ranks.of["y"][0].clone(), ranks.of["d_weights"][0].clone()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    check_sums(experts, h, (gate_up, down), found[0][1:], ranks)
    experts = symm.ReceivedExperts(ex, gate_up, down, None, "swiglu", K, torch.float32, pairs)
    assert experts.backward(h, lambda: None, lambda: None, True) == (None, None, None)


def check_sums(experts, h, matrices, others, ranks):
    """Two backwards whose gradients of matrices are written into sums, then added to them."""
    nothing = lambda: None  # noqa: E731
    *want, d_bias = experts.backward(h, nothing, nothing)
    sums = [Sum(t) for t in matrices]
    for times in (1, 2):
        got = experts.backward(h, nothing, nothing, False, sums)
        assert got[:2] == (None, None) and torch.equal(got[2], d_bias)
        for total, once in zip(sums, want, strict=True):
            assert torch.allclose(total.total, times * once, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, (ranks.of["y"][0], ranks.of["d_weights"][0]), others))


def in_the_interpreter():
    from interpreter import poison, repair_interpreter, rounds_to_nearest, small_tiles

    from tmoe.moe.exchange import symm
    from tmoe.ops.experts import gpu

    repair_interpreter()
    small_tiles(gpu, False, True, 1)
    poison()
    symm._all = lambda t: 2  # programs; no GPU to ask
    check_experts([21, 30], "random", 128)
    check_experts([80, 50], "first rank", 128, "relu2")
    check_experts([0, 3, 1], "holes", 128)
    check_frozen([150], 128)
    rounds_to_nearest()
    check_fp8([21, 0, 30], 128, False)
    check_fp8([80, 90], 128, True, "relu2")
    check_exchange("random", [13, 13], 72, 3, 4, torch.bfloat16)
    check_exchange("holes", [9, 0, 21], 40, 4, 3, torch.float32)
    check_exchange("one expert", [5, 8, 1, 2], 32, 2, 2, torch.float16)
    check_exchange("first rank", [7, 7], 1030, 2, 2, torch.bfloat16)
    check_exchange("nowhere", [3, 3], 16, 1, 1, torch.float32)
    check_packed([9, 0, 14], 72, 3, 4, torch.bfloat16)
    check_packed([6, 6], 32, 2, 2, torch.float32)
    check_meeting()


if __name__ == "__main__":
    in_the_interpreter()
    print("all right")
