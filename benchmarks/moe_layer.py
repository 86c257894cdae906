"""Times one MoE layer, router's top-k softmax to combined output, beside torch's grouped_mm and dense products of equal FLOPs.

    python -m benchmarks.moe_layer                                  # all shapes, the table last
    python -m benchmarks.moe_layer --shapes qwen3 olmoe --json benchmarks/results/moe_layer/h200.jsonl
    python -m benchmarks.moe_layer --shapes qwen3 --breakdown       # each kernel beside its floor

Every contestant sees the same logits, weights and dy, random normal, bf16; gradients go to x, the logits and both weights.
GPU time is taken with CUDA events, with a cold L2 and the host far ahead, in rounds over all contestants (one after another,
whoever came first won by 12%: the clock sinks under load), and the median is printed; the host's own time stands beside it.
The first line of a shape says how far the result lies from float32. `sonic` is what SonicMoE 0.1.2 took on an H200 on
2026-11-21, and its share of the dense products of that day.
"""

import argparse
import functools
import json
import statistics
import time
from datetime import date
from pathlib import Path

import torch
import triton

from tmoe import ops
from tmoe.ops import gpu, reference, table
from tmoe.ops.routing import route

SHAPES = {  # name: (T, D, F, E, K)
    "qwen3": (32768, 2048, 768, 128, 8),
    "olmoe": (32768, 2048, 1024, 64, 8),
    "mixtral": (16384, 4096, 14336, 8, 2),
    "deepseek": (32768, 2048, 1408, 64, 6),
    "fine": (32768, 4096, 512, 256, 16),
    "narrow": (24576, 1536, 256, 128, 8),
    "pilot": (16384, 2048, 1408, 32, 2),
    "qwen3-4096": (4096, 2048, 768, 128, 8),
    "olmoe-4096": (4096, 2048, 1024, 64, 8),
    "qwen3-512": (512, 2048, 768, 128, 8),
    "olmoe-512": (512, 2048, 1024, 64, 8),
}
SONIC = {  # forward + backward ms, share of dense
    "qwen3": (13.79, 0.81), "olmoe": (17.46, 0.83), "mixtral": (55.23, 0.93), "deepseek": (18.24, 0.84),
    "fine": (37.06, 0.80), "narrow": (3.13, 0.72), "pilot": (3.31, 0.77),
}  # fmt: skip
PEAK_FLOPS, PEAK_BYTES = (
    790e12,
    4.3e12,
)  # measured on an H200: 8192^3 bf16 product in a short burst; copy, read plus write


def make(shape, device, dtype=torch.bfloat16):
    """x, logits, gate_up, down, dy: random normal (zeros run 13% faster on this hardware)."""
    T, D, F, E, _ = shape
    x, dy = (torch.randn(T, D, device=device, dtype=dtype) for _ in range(2))
    logits = torch.randn(T, E, device=device)
    gate_up = torch.randn(E, 2 * F, D, device=device, dtype=dtype) * D**-0.5
    down = torch.randn(E, D, F, device=device, dtype=dtype) * F**-0.5
    return x, logits, gate_up, down, dy


def ours(x, logits, gate_up, down, K):
    weights, ids = logits.softmax(-1).topk(K, dim=-1)
    return ops.moe_mlp(x, gate_up, down, weights, ids)


def grouped_mm(x, logits, gate_up, down, K):
    """What PyTorch itself offers: sort, gather, two torch._grouped_mm, gather back, weighted sum."""
    weights, ids = logits.softmax(-1).topk(K, dim=-1)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = torch.histc(flat.float(), down.shape[0], 0, down.shape[0] - 1).cumsum(0).to(torch.int32)
    gate, up = torch._grouped_mm(x[order // K], gate_up.mT, ends).chunk(2, dim=-1)
    out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.mT, ends)
    rows = torch.empty_like(out).index_copy(0, order, out).view(*ids.shape, -1)
    return (rows * weights.to(rows.dtype)[..., None]).sum(1)


class Bench:
    """One shape: the tensors of a layer, and a way to run one kernel of it under one configuration."""

    def __init__(self, shape, device):
        T, D, F, E, K = shape
        self.x, logits, self.gate_up, self.down, self.dy = make(shape, device)
        self.weights, self.ids = logits.softmax(-1).topk(K, dim=-1)
        operands = self.gate_up, self.down
        self.layer = gpu.Layer(self.x, (E, D, F), K, route(self.ids, E), self.weights, operands)
        N = T * K
        self.h, self.act, self.rows = (torch.randn(N, w, device=device, dtype=self.x.dtype) for w in (2 * F, F, D))
        # a gathered operand is timed without its copy: "gather" times that by itself
        self.layer.gathered, self.gather = (lambda t_TD: self.rows), self.layer.gathered

    def run(self, kernel, cfg):
        layer = self.layer
        layer.config = lambda kernel: cfg
        dy, x = (self.dy, self.x) if cfg.gather else (self.rows, self.rows)
        if kernel == "up":
            layer.up(self.gate_up, self.h)
        elif kernel == "down":
            layer.rows("down", self.act, self.down, True)
        elif kernel == "dx":
            layer.rows("dx", self.h, self.gate_up, False)
        elif kernel == "dh":
            layer.dh(dy, self.down, self.h)
        elif kernel == "dw_down":
            layer.dw(kernel, dy, self.act, "a" if cfg.gather else "")
        else:
            layer.dw(kernel, self.h, x, "b" if cfg.gather else "")

    def dense(self, kernel):
        """One cuBLAS product of the same sizes on plain matrices: what the kernel is held to."""
        w1, w2 = self.gate_up[0], self.down[0]
        pairs = {
            "up": (self.rows, w1.T), "down": (self.act, w2.T), "dh": (self.rows, w2), "dx": (self.h, w1),
            "dw_down": (self.rows.T, self.act), "dw_up": (self.h.T, self.rows),
        }  # fmt: skip
        return torch.mm(*pairs[kernel])

    def flops(self, kernel):
        n = self.layer
        return 2 * n.N * n.D * n.F * (2 if kernel in ("up", "dx", "dw_up") else 1)

    def bytes(self, kernel):
        """Fewest bytes through device memory: every operand once, gathered rows once a slot."""
        n = self.layer
        x, h, f, w1, w2 = n.N * n.D, 2 * n.N * n.F, n.N * n.F, 2 * n.E * n.D * n.F, n.E * n.D * n.F
        return 2 * {
            "up": x + w1 + h + f, "down": f + w2 + x, "dh": x + w2 + 2 * h + f, "dx": h + w1 + x,
            "dw_down": x + f + w2, "dw_up": h + x + w1, "combine": x + n.T * n.D,
        }[kernel]  # fmt: skip


_scratch = {}


def prepare(device="cuda"):
    """A millisecond of head start for the host, then a cold L2."""
    if not _scratch:
        _scratch["l2"] = torch.empty(1 << 28, dtype=torch.int8, device=device)
    torch.cuda._sleep(2_000_000)
    _scratch["l2"].zero_()


def time_all(fns, rounds=9, give_up=None):
    """Median GPU ms of each function, in rounds over all; with give_up, who takes that many times the best drops out early."""
    times = [[] for _ in fns]
    for fn in fns:
        fn()
    for i in range(rounds):
        for fn, mine in zip(fns, times, strict=True):
            if give_up and i > 1 and min(mine) > give_up * min(min(t) for t in times):
                continue
            prepare()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            fn()
            end.record()
            end.synchronize()
            mine.append(start.elapsed_time(end))
    return [statistics.median(t) for t in times]


def host_ms(fn, rounds=20):
    """Median time until a call returns, the GPU idle before: what the launches cost the host."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        times.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def errors(fn, K):
    """Relative errors of y and the gradients on a smaller layer, against float32 of the same rounded inputs."""
    *leaves, dy = make((2048, 1024, 512, 16, K), "cuda")

    def run(fn, dtype):
        inputs = [t.detach().to(dtype if t.dtype == torch.bfloat16 else t.dtype).requires_grad_() for t in leaves]
        y = fn(*inputs, K)
        return y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))

    def exact(x, logits, gate_up, down, K):
        weights, ids = logits.softmax(-1).topk(K, dim=-1)
        return reference.moe_mlp(x, gate_up, down, weights, ids)

    want = run(exact, torch.float32)  # tf32 is off unless a program asks for it
    return [float((a.float() - b).norm() / b.norm()) for a, b in zip(run(fn, torch.bfloat16), want, strict=True)]


def measure(name):
    """Every contestant on one shape: {"shape": name, contestant: {fwd, both, host_fwd, host_both, kept_mib}}.

    "dense" is all six products of forward and backward as cuBLAS does them on plain matrices, in the same rounds.
    """
    shape = SHAPES[name]
    K = shape[-1]
    bench = Bench(shape, "cuda")
    x, logits, gate_up, down, dy = make(shape, "cuda")
    leaves = x, logits, gate_up, down
    for t in leaves:
        t.requires_grad_()
    contestants = {
        "tmoe": ours,
        "grouped_mm": grouped_mm,
        "grouped_mm compiled": torch.compile(grouped_mm, fullgraph=True, dynamic=False),
    }

    def forward(fn):
        return fn(*leaves, K)

    def both(fn):
        return torch.autograd.grad(fn(*leaves, K), leaves, dy)

    calls = [functools.partial(f, fn) for fn in contestants.values() for f in (forward, both)]
    dense, *times = time_all([lambda: [bench.dense(k) for k in table.KERNELS], *calls])
    result = {"shape": name, "dense": dense}
    for i, (who, fn) in enumerate(contestants.items()):
        before = torch.cuda.memory_allocated()
        y = fn(x, logits, gate_up, down, K)
        kept = torch.cuda.memory_allocated() - before - y.nbytes
        del y
        result[who] = {"fwd": times[2 * i], "both": times[2 * i + 1], "kept_mib": kept / 2**20}
    result["tmoe"] |= {"host_fwd": host_ms(calls[0]), "host_both": host_ms(calls[1])}
    torch.compiler.reset()
    return result


def breakdown(name):
    """Each kernel's time, rate, and share of the longer of its two floors, arithmetic and bytes."""
    bench = Bench(SHAPES[name], "cuda")
    n = bench.layer
    configs = {k: type(n).config(n, k) for k in table.KERNELS}
    fns = [functools.partial(bench.run, k, cfg) for k, cfg in configs.items()]
    fns += [lambda: n.combine(bench.rows, bench.weights), lambda: route(bench.ids, n.E), lambda: bench.gather(bench.x)]
    dense = time_all([functools.partial(bench.dense, k) for k in table.KERNELS])
    *times, combine, routing, gather = time_all(fns)
    lines = [f"{name}: kernel     ms  TFLOP/s   TB/s  of floor  of dense  configuration"]
    for kernel, ms, dense_ms in zip(configs, times, dense, strict=True):
        floor = 1e3 * max(bench.flops(kernel) / PEAK_FLOPS, bench.bytes(kernel) / PEAK_BYTES)
        lines.append(
            f"{kernel:>14} {ms:8.3f} {bench.flops(kernel) / ms / 1e9:8.0f} {bench.bytes(kernel) / ms / 1e9:6.2f} "
            f"{floor / ms:8.0%} {dense_ms / ms:9.0%}  {tuple(configs[kernel])}"
        )
    floor = 1e3 * bench.bytes("combine") / PEAK_BYTES
    lines.append(
        f"{'combine':>14} {combine:8.3f} {'':8} {bench.bytes('combine') / combine / 1e9:6.2f} {floor / combine:8.0%}"
    )
    lines.append(f"{'routing':>14} {routing:8.3f}\n{'gather (alone)':>14} {gather:8.3f}")
    return "\n".join(lines)


def line(r):
    """One shape's row of the table."""
    us, rival = r["tmoe"], r["grouped_mm compiled"]
    sonic = SONIC.get(r["shape"])
    bar = f"{sonic[0]:6.2f} {sonic[1]:4.0%}" if sonic else " " * 11
    return (
        f"{r['shape']:>11} {r['dense']:8.2f} {us['fwd']:8.3f} {us['both']:8.3f} {r['dense'] / us['both']:6.0%}  {bar} "
        f"{r['grouped_mm']['both']:8.2f} {rival['fwd']:8.2f} {rival['both']:8.2f} {rival['both'] / us['both']:6.2f}x "
        f"{us['host_fwd']:6.2f} {us['host_both']:6.2f} {us['kept_mib']:7.0f} {rival['kept_mib']:7.0f}"
    )


HEADER = (
    f"{'shape':>11} {'dense':>8} {'fwd':>8} {'f+b ms':>8} {'of it':>6}  {'sonic':>11} {'gmm':>8} {'gmm.c f':>8} {'f+b':>8} "
    f"{'ahead':>7} {'host f':>6} {'f+b':>6} {'keptMiB':>7} {'gmm':>7}"
)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    p.add_argument("--breakdown", action="store_true", help="each kernel by itself instead of whole layers")
    p.add_argument("--json", type=Path, help="append each shape's result to this file, one JSON object a line")
    args = p.parse_args()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(about, date.today())
    if args.breakdown:
        for name in args.shapes:
            print(breakdown(name), flush=True)
            torch.cuda.empty_cache()
        return
    print("relative error of y, dx, dlogits, dgate_up, ddown:", " ".join(f"{e:.1e}" for e in errors(ours, 4)))
    rows = []
    for name in args.shapes:
        result = measure(name)
        rows.append(line(result))
        print(rows[-1], flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            with args.json.open("a") as file:
                file.write(json.dumps({**result, **about, "date": str(date.today())}) + "\n")
    print(HEADER, *rows, sep="\n")


if __name__ == "__main__":
    main()
