"""Times one MoE layer, from the router's softmax to combined output, against its rivals and dense products.

    python -m benchmarks.moe_layer                                # all shapes and contestants, the table last
    python -m benchmarks.moe_layer --shapes qwen3 olmoe --json benchmarks/results/moe_layer/h200.jsonl
    python -m benchmarks.moe_layer --only tmoe sonicmoe           # some contestants (of benchmarks/rivals.py)
    python -m benchmarks.moe_layer --shapes 8192,4096,1408,128,8  # any shape: T,D,F,E,K
    python -m benchmarks.moe_layer --shapes qwen3 --breakdown     # each kernel and its lower bound

Every contestant gets the same logits, weights and dy, random normal, bf16; gradients are computed for x, the
logits and all weights. Before a contestant is timed, its output and gradients are compared with float32
(benchmarks/rivals.py). A contestant that is not installed, fails or is wrong is named with the reason. The
dense products have the same number of FLOPs.

GPU time is measured with CUDA events, with a cold L2 and a head start for the host of 1.5 times the slowest
contestant's host time (with one millisecond, SonicMoE waited for its host, which takes four). Contestants
alternate
in rounds, in a new order in each round: when they were timed one after another, the first won by 12%, because
the clock slows down under load. The median is printed, and next to it the host's time until the calls return.

"kept" is the memory that lives between forward and backward, without inputs and output. "weights once" is a
copy, timed in the same rounds, whose reads plus writes equal the bytes of the weights of the experts that
have tokens: a lower bound for a forward of few rows.

next: rivals.py
"""

import argparse
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks import rivals
from tmoe.ops.experts import gpu, table
from tmoe.ops.experts.pair_order import route
from tmoe.ops.experts.table import KernelConfig

Shape = tuple[int, int, int, int, int]  # T, D, F, E, K
SHAPES: dict[str, Shape] = {  # name: (T, D, F, E, K)
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
# Widths of the tuned table with other lengths or numbers of experts. benchmarks/shapes.py has widths that the
# table lacks.
MORE: dict[str, Shape] = {
    "gpt-oss-20b": (8192, 2880, 2880, 32, 4),
    "v3-slice": (4096, 7168, 2048, 64, 8),
    "small-64": (2048, 1024, 512, 64, 8),
    "qwen3-65536": (65536, 2048, 768, 128, 8),
    "mixtral-1024": (1024, 4096, 14336, 8, 2),
}
ALL = {**SHAPES, **MORE}

# Measured on an H200.
PEAK_FLOPS = 790e12  # a second: 8192^3 bf16 product in a short burst
PEAK_BYTES = 4.3e12  # a second: copy, read plus write
CYCLES_PER_MS = 2_000_000  # of an H200's clock


def make(shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> rivals.Inputs:
    """Random normal inputs (zeros run 13% faster on this hardware)."""
    T, D, F, E, _ = shape
    x, dy = (torch.randn(T, D, device=device, dtype=dtype) for _ in range(2))
    logits = torch.randn(T, E, device=device)
    gate_up = torch.randn(E, 2 * F, D, device=device, dtype=dtype) * D**-0.5
    down = torch.randn(E, D, F, device=device, dtype=dtype) * F**-0.5
    return rivals.Inputs(x, logits, gate_up, down, dy)


class Bench:
    """One shape: the tensors of a layer, and a way to run one of its kernels with one configuration."""

    def __init__(self, shape: Shape, device: str) -> None:
        T, D, F, E, K = shape
        self.x, logits, self.gate_up, self.down, self.dy = make(shape, device)
        self.weights, self.ids = logits.softmax(-1).topk(K, dim=-1)
        operands = self.gate_up, self.down
        self.layer = gpu.LayerLaunches(self.x, (E, D, F), K, route(self.ids, E), self.weights, operands)
        N = T * K
        widths = (2 * F, F, D)
        self.h, self.act, self.rows = (torch.randn(N, w, device=device, dtype=self.x.dtype) for w in widths)
        # A gathered operand is timed without its copy, which "gather" times separately.
        self.gather = self.layer.gathered
        self.layer.gathered = lambda t_TD: self.rows

    def run(self, kernel: str, cfg: KernelConfig) -> None:
        """One call of one kernel of table.KERNELS."""
        layer = self.layer
        layer.config = lambda kernel: cfg
        dy, x = (self.dy, self.x) if cfg.gather else (self.rows, self.rows)
        if kernel == "up":
            layer.up(self.gate_up, None, self.h)
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

    def products(self) -> None:
        """up and down in one launch, with counters cleared, as in the forward for experts with few rows."""
        for spent in (self.layer.meta.ready, self.layer.meta.counter):
            spent.zero_()
        self.layer.products(self.gate_up, None, self.h, self.down)

    def dense(self, kernel: str) -> Tensor:
        """One cuBLAS product of the same sizes on plain matrices, for comparison with the kernel."""
        w1 = self.gate_up[0]
        w2 = self.down[0]
        pairs = {
            "up": (self.rows, w1.T),
            "down": (self.act, w2.T),
            "dh": (self.rows, w2),
            "dx": (self.h, w1),
            "dw_down": (self.rows.T, self.act),
            "dw_up": (self.h.T, self.rows),
        }
        return torch.mm(*pairs[kernel])

    def flops(self, kernel: str) -> int:
        n = self.layer
        return 2 * n.N * n.D * n.F * (2 if kernel in ("up", "dx", "dw_up") else 1)

    def bytes(self, kernel: str) -> int:
        """Fewest bytes through device memory: every operand once, gathered rows once per slot."""
        n = self.layer
        x = n.N * n.D
        f = n.N * n.F
        h = 2 * f
        w2 = n.E * n.D * n.F
        w1 = 2 * w2
        elements = {
            "up": x + w1 + h + f,
            "down": f + w2 + x,
            "dh": x + w2 + 2 * h + f,
            "dx": h + w1 + x,
            "dw_down": x + f + w2,
            "dw_up": h + x + w1,
            "combine": x + n.T * n.D,
        }
        return 2 * elements[kernel]


_scratch: dict[str, Tensor] = {}


def prepare(head_start: int = CYCLES_PER_MS) -> None:
    """Gives the host a head start of this many GPU cycles, then makes the L2 cold."""
    if not _scratch:
        _scratch["l2"] = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    torch.cuda._sleep(head_start)
    _scratch["l2"].zero_()


def in_turn(i: int, *lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The lists' entries zipped, in the order of round i.

    The order varies, so that no entry always follows the same one; all ranks draw the same order.
    """
    return random.Random(i).sample(list(zip(*lists, strict=True)), len(lists[0]))


def time_all(
    fns: Sequence[Callable[[], Any]],
    rounds: int = 9,
    give_up: float | None = None,
    begin: Callable[[], Any] = prepare,
) -> list[float]:
    """Median GPU ms of each function, in rounds over all functions, with `begin` before each.

    Before the first round each function is called once, in the given order, because some read the results of
    an earlier one.

    give_up: a function that takes this many times as long as the best is dropped early.
    """
    times: list[list[float]] = [[] for _ in fns]
    for fn in fns:
        fn()
    for i in range(rounds):
        for fn, samples in in_turn(i, fns, times):
            if give_up and i > 1 and min(samples) > give_up * min(min(t) for t in times):
                continue
            begin()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            fn()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end))
    return [statistics.median(t) for t in times]


def host_ms(fn: Callable[[], Any], rounds: int = 20) -> float:
    """Median time until a call returns, with the GPU idle before: the host's cost of the launches."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        times.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def weights_once(logits: Tensor, K: int, gate_up: Tensor, down: Tensor) -> Callable[[], Tensor]:
    """A copy that moves as many bytes as the weights of the selected experts hold."""
    touched = rivals.top_k(logits, K)[1].unique().numel()
    half = touched * (gate_up[0].nbytes + down[0].nbytes) // 2
    source, target = (torch.empty(half, dtype=torch.int8, device=gate_up.device) for _ in range(2))
    return lambda: target.copy_(source)


def measure(name: str, contestants: list[str]) -> dict[str, Any]:
    """The figures of one shape of ALL, in the form of the JSON file:

    "shape": its name; "results": {contestant: its figures}; "missing": {contestant: reason};
    "dense": ms of all six products of forward and backward by cuBLAS on plain matrices, in the same rounds;
    "weights_once": ms of the copy of the weights.
    """
    shape = ALL[name]
    K = shape[-1]
    torch.manual_seed(0)
    inputs = make(shape, "cuda")
    x, logits, gate_up, down, dy = inputs
    x.requires_grad_()
    logits.requires_grad_()
    want = rivals.exact(inputs, K)

    # Forward, and forward with backward, of each contestant whose results are right.
    results: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    calls: list[Callable[[], Any]] = []
    for rival in contestants:
        try:
            (layer, weights, _), errors = rivals.enter(rival, inputs, K, want)
            kept_mib = kept(functools.partial(layer, x, logits)) / 2**20
        except Exception as reason:  # a rival's code may raise any error
            words = str(reason).strip().partition("\n")[0][:200]
            missing[rival] = f"{type(reason).__name__}: {words}"
            continue
        calls.append(functools.partial(layer, x, logits))
        calls.append(functools.partial(both, layer, (x, logits), weights, dy))
        installed = rivals.version(rival)
        results[rival] = {"version": installed, "errors": errors, "kept_mib": kept_mib}
    del want

    # All of them are timed in the same rounds.
    bench = Bench(shape, "cuda")
    once = weights_once(logits, K, gate_up, down)
    host = [host_ms(call) for call in calls]
    ahead = int(CYCLES_PER_MS * max(1, 1.5 * max(host, default=0)))

    def all_dense() -> list[Tensor]:
        return [bench.dense(k) for k in table.KERNELS]

    dense, read, *times = time_all([all_dense, once, *calls], begin=functools.partial(prepare, ahead))
    for i, result in enumerate(results.values()):
        result["fwd"], result["both"] = times[2 * i : 2 * i + 2]
        result["host_fwd"], result["host_both"] = host[2 * i : 2 * i + 2]
    torch.compiler.reset()
    return {"shape": name, "dense": dense, "weights_once": read, "results": results, "missing": missing}


def both(
    layer: Callable[..., Tensor], inputs: Sequence[Tensor], weights: list[Tensor], dy: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of all inputs and weights, by forward and backward."""
    return torch.autograd.grad(layer(*inputs), [*inputs, *weights], dy)


def kept(forward: Callable[[], Tensor]) -> int:
    """Bytes that are alive after forward, without those that it returns."""
    before = torch.cuda.memory_allocated()
    y = forward()
    return torch.cuda.memory_allocated() - before - y.nbytes


def breakdown(name: str) -> str:
    """Each kernel's time, rate, and share of the larger of its lower bounds, from arithmetic and bytes."""
    bench = Bench(ALL[name], "cuda")
    n = bench.layer
    configs = {k: type(n).config(n, k) for k in table.KERNELS}
    fns = [functools.partial(bench.run, k, cfg) for k, cfg in configs.items()]
    fns += [
        lambda: n.combine(bench.rows, bench.weights),
        lambda: route(bench.ids, n.E),
        lambda: bench.gather(bench.x),
    ]
    fns += [bench.products] if table.few(n.arch, n.N / n.E, n.tma) else []
    dense = time_all([functools.partial(bench.dense, k) for k in table.KERNELS])
    times = time_all(fns)
    combine, routing, gather, *products = times[len(configs) :]

    # One line for each kernel, then for the steps without products, then for both products at once.
    lines = [f"{name}: kernel     ms  TFLOP/s   TB/s  of floor  of dense  configuration"]
    for kernel, ms, dense_ms in zip(configs, times[: len(configs)], dense, strict=True):
        flops, moved = bench.flops(kernel), bench.bytes(kernel)
        floor = 1e3 * max(flops / PEAK_FLOPS, moved / PEAK_BYTES)
        lines.append(
            f"{kernel:>14} {ms:8.3f} {flops / ms / 1e9:8.0f} {moved / ms / 1e9:6.2f} "
            f"{floor / ms:8.0%} {dense_ms / ms:9.0%}  {tuple(configs[kernel])}"
        )
    moved = bench.bytes("combine")
    floor = 1e3 * moved / PEAK_BYTES
    rate = moved / combine / 1e9
    lines.append(f"{'combine':>14} {combine:8.3f} {'':8} {rate:6.2f} {floor / combine:8.0%}")
    lines.append(f"{'routing':>14} {routing:8.3f}\n{'gather (alone)':>14} {gather:8.3f}")
    moved = bench.bytes("up") + bench.bytes("down")
    for ms in products:  # one launch that the forward runs instead of up and down
        floor = 1e3 * moved / PEAK_BYTES
        lines.append(f"{'both, at once':>14} {ms:8.3f} {'':8} {moved / ms / 1e9:6.2f} {floor / ms:8.0%}")
    return "\n".join(lines)


def rows(r: dict[str, Any]) -> Iterator[str]:
    """One shape's rows of the table, from the result of `measure`."""
    T, D, F, _, K = ALL[r["shape"]]
    ours = r["results"].get("tmoe")
    flops = 18 * T * K * D * F
    shape = f"{r['shape']:>10}"
    yield f"{shape} {'dense products':>20} {'':>9} {r['dense']:8.2f} {flops / r['dense'] / 1e9:5.0f}"
    yield f"{shape} {'weights once':>20} {r['weights_once']:9.3f}"
    for rival, m in r["results"].items():
        ahead = f"{m['both'] / ours['both']:6.2f}x" if ours else ""
        yield (
            f"{shape} {rival:>20} {m['fwd']:9.3f} {m['both']:8.3f} {flops / m['both'] / 1e9:5.0f} "
            f"{r['dense'] / m['both']:6.0%} {ahead:>7} {m['host_fwd']:6.2f} {m['host_both']:6.2f} "
            f"{m['kept_mib']:7.0f} {max(m['errors']):8.1e} {m['version']:>13}"
        )
    yield from (f"{shape} {rival:>20} not timed: {why}" for rival, why in r["missing"].items())


HEADER = (
    f"{'shape':>10} {'':>20} {'fwd ms':>9} {'f+b ms':>8} {'TF/s':>5} "
    f"{'dense':>6} {'tmoe is':>7} {'host f':>6} {'f+b':>6} "
    f"{'keptMiB':>7} {'error':>8} {'version':>13}"
)


def shape(text: str) -> str:
    """A shape's name; five numbers are given a name first."""
    if text not in ALL:
        try:
            T, D, F, E, K = (int(n) for n in text.split(","))
            if min(T, D, F, K) < 1 or K > E:
                raise ValueError
        except ValueError:
            what = f"{text!r} is neither of {', '.join(ALL)} nor T,D,F,E,K with 1 <= K <= E"
            raise argparse.ArgumentTypeError(what) from None
        ALL[text] = T, D, F, E, K
    return text


def require_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends the program with one line if there is no GPU."""
    if not torch.cuda.is_available():
        parser.error("no GPU here, and this times one")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", nargs="+", default=list(ALL), type=shape, metavar="SHAPE")
    p.add_argument("--only", nargs="+", default=list(rivals.CONTESTANTS), choices=list(rivals.CONTESTANTS))
    p.add_argument("--breakdown", action="store_true", help="each kernel separately instead of whole layers")
    p.add_argument(
        "--json", type=Path, help="append each shape's result to this file, one JSON object a line"
    )
    args = p.parse_args()
    require_gpu(p)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": str(date.today()),
        "command": " ".join(["python -m benchmarks.moe_layer", *sys.argv[1:]]),
    }
    print(about)
    if args.breakdown:
        for name in args.shapes:
            print(breakdown(name), flush=True)
            torch.cuda.empty_cache()
        return
    lines = [HEADER]
    for name in args.shapes:
        result = measure(name, args.only)
        torch.cuda.empty_cache()
        lines += rows(result)
        print(*lines[-len(args.only) - 2 :], sep="\n", flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            with args.json.open("a") as file:
                file.write(json.dumps({**result, **about}) + "\n")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
