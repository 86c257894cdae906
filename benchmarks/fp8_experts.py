"""Checks experts with fp8 products on a GPU, and times them against bf16 and rivals, in one call.

    python -m benchmarks.fp8_experts --json FOLDER              # one H100 or H200, about 8 minutes
    python -m benchmarks.fp8_experts --json FOLDER --table tmoe/ops/experts/fp8_table.json \
        --configs tmoe/ops/experts/fp8_configs.json
    python -m benchmarks.fp8_experts --device cpu --tiny        # does it run?

casts: codes and scales of rows and matrices equal plain torch's in every bit, also of rows of zeros, of 1e-30
and of 1e30; NaN stays NaN in its row alone.

compile: the binaries of the part `kernels`, on all cores.

kernels: for each product, plain Triton's kernel and configurations of the one for Hopper; and gradients of
matrices in bf16 and in fp8, with the casts that fp8 needs. Each is first compared with the twin on two small
layers (an expert without rows; sums shorter than the ring), then all good ones are timed on every shape in
the same rounds. A kernel that hangs ends its process: it is named, and a new process runs the rest. --configs
writes the fastest into the table that the ops read, for the parts after this one too.

accuracy: y and all gradients of each shape, cut to 4 experts, with normal data and with outliers. Errors
against fp32 are at most 8e-2 and 1e-1, and at most 1.1 times those of the twin on the CPU. The gradients of x
and gate_up miss 1e-1 for activations with a limit and outliers, in the twin too (docs/fp8.md).

layer: forward, and forward with backward, of whole layers in bf16, in fp8 and with gradients of matrices in
fp8 too, in the same rounds; the cast of all matrices, memory kept for backward (at most 0.62 of bf16's), and
each kernel's microseconds. Bars are forward and backward of bf16 divided by fp8's, without the casts of
matrices. "a step" includes one cast. --table writes these times into the table that decides where --train.fp8
is used, and --configs gets whether gradients of matrices are in fp8 as well. Rivals where they can be
imported: torchao's rowwise MoE training (casts of matrices included), and torch's grouped products in bf16.

products: each fp8 product's TFLOP/s next to torch._scaled_grouped_mm (rowwise, fast accumulation) of the same
sizes, whose operands are given as codes.

Each part is a process with its own time limit; a part that fails is named, and all others still run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import figures
from benchmarks.adapters import kernel_times, passes, timed
from benchmarks.figures import Figure, at_least, at_most
from benchmarks.moe_layer import ALL, Shape, kept, require_gpu
from tmoe.base.activations import activation as named
from tmoe.moe.fp8_choice import arch_of
from tmoe.ops import moe_mlp, reference
from tmoe.ops.experts import fp8_gpu, fp8_table
from tmoe.ops.experts.fp8_codes import E4M3, coded, encode
from tmoe.ops.experts.fp8_table import Measured
from tmoe.ops.experts.pair_order import route
from tmoe.ops.experts.table import Entry, KernelConfig
from tmoe.ops.launch import replay
from tmoe.ops.launch.precompile import precompile

# seconds
LIMITS = {"casts": 60, "compile": 150, "kernels": 200, "accuracy": 150, "layer": 240, "products": 120}
SHAPES = ["qwen3", "deepseek", "mixtral", "olmoe", "gpt-oss-20b", "qwen3-4096", "olmoe-4096", "mixtral-1024"]
ALL_SIX = "fp8, all products"
KEPT = 0.62  # bar of the memory that a forward keeps, as a share of bf16's
BARS = {"qwen3": (1.24, 1.30), "deepseek": (1.28, 1.38), "mixtral": (1.27, 1.48)}  # four products, all six
ACTIVATIONS = {"gpt-oss-20b": "clamped:alpha=1.702,limit=7"}
TINY: Shape = (96, 64, 128, 4, 2)
SMALL: list[Shape] = [(700, 384, 192, 5, 2), (300, 128, 64, 4, 2)]  # layers that check a kernel
SILENT = 40  # seconds after which a process that sends nothing hangs, in the part `kernels`
IN_BF16 = fp8_gpu.WEIGHTS["dw_up"]._replace(outs=0)  # says of a gradient of matrices that it is in bf16
PRODUCTS = (*fp8_gpu.HOPPER, *fp8_gpu.WEIGHTS)


def variants(kernel: str) -> dict[str, KernelConfig]:
    """The configurations of a product that are timed, by name; the first is plain Triton's, or bf16's."""
    if kernel in fp8_gpu.WEIGHTS:
        return {"bf16": IN_BF16, "Hopper": fp8_gpu.WEIGHTS[kernel]}
    own = fp8_gpu.HOPPER[kernel]
    found = {"plain": fp8_gpu.CONFIGS[kernel], "Hopper": own}
    if kernel == "dh":
        found["Hopper, sorted rows"] = own._replace(gather=False)
    else:
        found["Hopper, groups of 16"] = own._replace(GROUP=16)
    return found


class Layer(NamedTuple):
    """The operands of one layer, and its activation."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    ids: Tensor
    bias: Tensor | None
    dy: Tensor
    activation: str

    @property
    def codes(self) -> tuple[Tensor, Tensor]:
        return encode(self.gate_up, named(self.activation).halves), encode(self.down)


def layer_of(name: str, shape: Shape, device: str, outliers: bool = False) -> Layer:
    """Random operands. outliers: 8 features 20 times as large, tokens of log-normal size."""
    T, D, ffn, E, K = shape
    activation, dtype = ACTIVATIONS.get(name, "swiglu"), torch.bfloat16
    randn = partial(torch.randn, device=device)
    x, dy, rows = randn(T, D), randn(T, D) * 1e-3, named(activation).halves * ffn
    if outliers:
        x[:, :8] *= 20
        x *= (0.7 * randn(T, 1)).exp()
        dy *= (1.5 * randn(T, 1)).exp()
    gate_up, down = randn(E, rows, D, dtype=dtype) * D**-0.5, randn(E, D, ffn, dtype=dtype) * ffn**-0.5
    bias = randn(E, rows, dtype=dtype) if activation != "swiglu" else None
    weights, ids = randn(T, E).softmax(-1).topk(K, dim=-1)
    return Layer(x.to(dtype), gate_up, down, weights, ids, bias, dy.to(dtype), activation)


def results(op: Callable[..., Tensor], layer: Layer, **more: Any) -> list[Tensor]:
    """y and the gradients of x, gate_up, down and weights."""
    leaves = [t.detach().requires_grad_() for t in layer[:4]]
    y = op(*leaves, layer.ids, layer.bias, layer.activation, **more)
    return [y.detach(), *torch.autograd.grad(y, leaves, layer.dy.to(y.dtype))]


def on(layer: Layer, device: str, dtype: torch.dtype | None = None) -> Layer:
    """The layer on another device; dtype: of all but the ids."""

    def move(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.to(device, dtype if t.is_floating_point() else None)

    return Layer(*map(move, layer))


def error(got: Tensor, want: Tensor) -> float:
    want = want.to(got.device).float()
    return float((got.float() - want).norm() / want.norm())


# ---- parts ----


def casts(args: argparse.Namespace) -> Iterator[Figure]:
    same = lambda a, b: torch.equal(a.view(torch.uint8), b.view(torch.uint8))  # noqa: E731
    for D in (64, 2048, 2880, 7168)[: 1 if args.tiny else 4]:
        x = torch.randn(300, D, device=args.device).bfloat16()
        x[1], x[2], x[3] = 0, x[2] * 1e-30, x[3] * 1e30
        x[4, 7] = float("nan")
        w = torch.randn(2, 2 * 208, D, device=args.device).bfloat16()
        bits = same(encode(w, 2).cpu(), encode(w.cpu(), 2))
        if args.device == "cuda":
            codes, scales = torch.empty_like(x, dtype=E4M3), torch.empty(300, device="cuda")
            fp8_gpu.cast_rows(x, codes, scales)
            want, of_rows = (t.cuda() for t in coded(x.cpu(), 1, D))
            alone = int(codes.float().isnan().sum()) == 1 and bool(codes[4, 7].isnan())
            bits = bits and same(codes, want) and torch.equal(scales, of_rows[:, 0]) and alone
        yield Figure("casts", f"width {D}", "equal bits" if bits else "other bits", "equal bits", bits)


def compile(args: argparse.Namespace) -> Iterator[Figure]:
    """Makes each binary of the part `kernels`."""
    if args.device != "cuda":
        yield Figure("compile", "kernels", "not on a CPU")
        return
    layers = {(*shape, "swiglu") for shape in SMALL}
    layers |= {(8192, *ALL[name][1:], ACTIVATIONS.get(name, "swiglu")) for name in args.shapes}
    traces = [
        (trace, kernel, config, layer)
        for layer in sorted(layers)
        for kernel in PRODUCTS
        for config in variants(kernel).values()
    ]
    made, wanted = precompile("cuda:90", traces, min(len(os.sched_getaffinity(0)), 16))
    yield Figure("compile", "binaries made, of all", f"{made} of {wanted}")


def trace(kernel: str, config: KernelConfig, layer: tuple[Any, ...]) -> None:
    """The launches of a layer (T, D, F, E, K, activation) with this configuration of one product."""
    *sizes, activation = layer
    fp8_table.forced[kernel] = config
    fp8_gpu.trace(tuple(sizes), torch.bfloat16, None, (activation, activation != "swiglu", True))
    del fp8_table.forced[kernel]


def kernels(args: argparse.Namespace) -> Iterator[Figure]:
    """Runs `time_kernels` in a process, and again without a kernel that hangs or fails there."""
    if args.device != "cuda":
        yield Figure("kernels", "kernels", "not on a CPU")
        return
    context, bad = multiprocessing.get_context("spawn"), set()
    while True:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=send_kernels, args=(args, bad, sender), daemon=True)
        process.start()
        sender.close()
        now, why = None, f"silent for {SILENT} s"
        try:
            while receiver.poll(SILENT):
                word = receiver.recv()
                if isinstance(word, Figure):
                    yield word
                elif isinstance(word, str):
                    why = word
                else:
                    now = word
        except EOFError:  # it has ended
            process.join()
            if process.exitcode == 0:
                return
            why = why if process.exitcode == 1 else f"ended with code {process.exitcode}"
        process.kill()
        process.join()
        if now is None or now in bad:
            raise RuntimeError(f"the process of kernels ended at {now}: {why}")
        bad.add(now)
        yield Figure("kernels", " ".join(now), why, "runs", False)


def send_kernels(args: argparse.Namespace, bad: set[tuple[str, str]], sender: Any) -> None:
    """`time_kernels` in a process, which also sends the error that ends it."""
    try:
        time_kernels(args, bad, sender.send)
    except Exception as error:
        sender.send(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}")
        raise


def time_kernels(args: argparse.Namespace, bad: set[tuple[str, str]], send: Callable[[Any], None]) -> None:
    """Sends each kernel's name when it begins, and figures. bad: pairs of product and variant left out."""
    tried = {kernel: variants(kernel) for kernel in PRODUCTS}
    for kernel, name in bad:
        del tried[kernel][name]
    fp8_table.forced |= fp8_gpu.CONFIGS
    layers = []
    for shape in SMALL:
        torch.manual_seed(0)
        layer = layer_of("", shape, "cuda", True)
        layer = layer._replace(ids=layer.ids.where(layer.ids != 1, 0))  # expert 1 has no rows
        cpu = on(layer, "cpu")
        layers.append((layer, layer.codes, results(moe_mlp, cpu, codes=cpu.codes)))
    for kernel, configs in tried.items():
        for name, config in list(configs.items()):
            send((kernel, name))
            fp8_table.forced[kernel] = config
            worst = 0.0
            for layer, codes, twin in layers:
                replay._programs.clear()
                got = results(moe_mlp, layer, codes=codes)
                worst = max(worst, *(error(ours, theirs) for ours, theirs in zip(got, twin, strict=True)))
            bar = 8e-2 if kernel in fp8_gpu.WEIGHTS else 3e-2  # the twin has both gradients in bf16
            send(at_most("kernels", f"{kernel}: {name}, error to the twin", worst, bar))
            if not worst <= bar:
                del configs[name]
        fp8_table.forced[kernel] = next(iter(variants(kernel).values()))
    tried = {kernel: configs for kernel, configs in tried.items() if configs}
    for shape_name in args.shapes:
        T, D, ffn, E, K = shape = TINY if args.tiny else ALL[shape_name]
        torch.manual_seed(0)
        run = launches_of(layer_of(shape_name, shape, "cuda"))
        for kernel, configs in tried.items():
            send((kernel, next(iter(configs))))
            calls = [partial(with_config, kernel, config, run[kernel]) for config in configs.values()]
            ms = dict(zip(configs, timed(calls, args), strict=True))
            best = min(ms, key=ms.__getitem__)
            n = named(ACTIVATIONS.get(shape_name, "swiglu")).halves
            flops = 2 * T * K * D * ffn * (n if kernel in ("up", "dx", "dw_up") else 1)
            words = ", ".join(f"{name} {t:.3f} ({flops / t / 1e9:.0f})" for name, t in ms.items())
            figures.keep(args, "fp8_experts", "kernels", dict(shape=shape_name, kernel=kernel, ms=ms))
            send(Figure("kernels", f"{shape_name}: {kernel}, ms (TFLOP/s)", f"{words}; {best}"))
            if kernel in fp8_gpu.HOPPER:
                add_config(args.configs, Entry(kernel, D, ffn, T * K // E, configs[best]))


def with_config(kernel: str, config: KernelConfig, call: Callable[[], Any]) -> Any:
    fp8_table.forced[kernel] = config
    return call()


def add_config(path: Path | None, entry: Entry) -> None:
    """Writes a shape's fastest configuration; an older entry of the shape is replaced."""
    if path is None:
        return
    table = json.loads(path.read_text()) if path.exists() else {}
    where = dict(kernel=entry.kernel, D=entry.D, F=entry.F, rows=entry.rows)
    old = [one for one in table.get("cuda:90", []) if any(one[name] != of for name, of in where.items())]
    table["cuda:90"] = [*old, where | dict(config=list(entry.config))]
    path.write_text(json.dumps(table, indent=1) + "\n")


def launches_of(own: Layer) -> dict[str, Callable[[], Any]]:
    """Functions that launch each of PRODUCTS of a layer."""
    K, (E, D, ffn) = own.ids.shape[1], own.down.shape
    meta, casts = route(own.ids, E), {}
    matrices = own.gate_up, own.down

    def fresh() -> fp8_gpu.Fp8Launches:
        return fp8_gpu.Fp8Launches(
            own.x, (E, D, ffn), K, meta, own.weights, matrices, own.activation, codes=codes, casts=casts
        )

    codes = own.codes
    layer = fresh()
    h = layer.room_for_h()
    act = layer.up_cast(own.bias, h)
    layer.cast(own.dy)
    dh, weighted, _ = layer.dh(own.dy, own.down, h)
    return {
        "up": lambda: layer.up_cast(own.bias, h),
        "down": lambda: layer.summed_rows("down", act, layer.down_codes, False),
        "dh": lambda: fresh().dh(own.dy, own.down, h),
        "dx": lambda: layer.rows("dx", dh, own.gate_up, False),
        "dw_down": lambda: layer.dw("dw_down", own.dy, weighted, "a"),
        "dw_up": lambda: layer.dw("dw_up", dh, own.x, "b"),
    }


def accuracy(args: argparse.Namespace) -> Iterator[Figure]:
    names = ["y", "dx", "d_gate_up", "d_down", "d_weights"]
    widths = {ALL[name][1:3]: name for name in reversed(args.shapes)}  # one shape of these widths is enough
    for name in reversed(widths.values()):
        T, D, ffn, E, K = TINY if args.tiny else ALL[name]
        shape = min(T, 512), D, min(ffn, 2880), min(E, 4), min(K, 2)
        for outliers, products in itertools.product((False, True), (4, 6)):
            torch.manual_seed(0)
            layer = layer_of(name, shape, args.device, outliers)
            got = with_products(products, partial(results, moe_mlp, layer, codes=layer.codes))()
            exact = results(reference.moe_mlp, on(layer, args.device, torch.float32))
            cpu = on(layer, "cpu")
            twin = with_products(products, partial(results, moe_mlp, cpu, codes=cpu.codes))()
            bar = 1e-1 if outliers else 8e-2
            found = {}
            for what, ours, theirs, plain in zip(names, got, twin, exact, strict=True):
                own, other = error(ours, plain), error(theirs, plain.cpu())
                found[what] = own, other
                title = f"{name}, {'outliers' if outliers else 'normal'}, {products} products: {what}"
                limited = "limit" in layer.activation and outliers and what in ("dx", "d_gate_up")
                yield at_most("accuracy", title, own, None if limited else bar)
                yield at_most("accuracy", f"{title}, of the twin's", own / other, 1.1)
            how = dict(shape=name, outliers=outliers, products=products)
            figures.keep(args, "fp8_experts", "accuracy", how | dict(errors=found))


def with_products(products: int, run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` with 4 products in fp8, or with all 6: gradients of matrices too."""

    def call() -> Any:
        chosen = fp8_gpu.WEIGHTS if products == 6 else dict.fromkeys(fp8_gpu.WEIGHTS, IN_BF16)
        fp8_table.forced |= chosen
        replay._programs = _programs[products]
        return run()

    return call


_programs: dict[int, dict] = {4: {}, 6: {}}  # records of launches depend on the choice


def contestants(layer: Layer) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Forwards of the layer, each with the tensors whose gradients are computed."""
    x, gate_up, down, weights = wanted = [t.detach().requires_grad_() for t in layer[:4]]
    how = layer.ids, layer.bias, layer.activation
    codes = layer.codes
    found = {
        "bf16": partial(moe_mlp, x, gate_up, down, weights, *how),
        "fp8": partial(moe_mlp, x, gate_up, down, weights, *how, codes=codes),
        ALL_SIX: partial(moe_mlp, x, gate_up, down, weights, *how, codes=codes),
    }
    if layer.x.is_cuda and layer.activation == "swiglu":
        found["torch._grouped_mm"] = partial(by_groups, torch._grouped_mm, layer, wanted)
        try:
            from torchao.prototype.moe_training import fp8_grouped_mm  # pyrefly: ignore[missing-import]

            rowwise = fp8_grouped_mm._to_fp8_rowwise_then_scaled_grouped_mm
            found["torchao rowwise"] = partial(by_groups, rowwise, layer, wanted)
        except Exception as lack:
            print(f"torchao's MoE training: {type(lack).__name__}: {lack}", flush=True)
    return {name: (call, wanted) for name, call in found.items()}


def by_groups(product: Callable[..., Tensor], layer: Layer, leaves: list[Tensor]) -> Tensor:
    """SwiGLU experts by grouped products (x, matrices transposed, ends of the groups)."""
    x, gate_up, down, weights = leaves
    order = layer.ids.flatten().argsort(stable=True)
    counts = torch.bincount(layer.ids.flatten(), minlength=len(down))
    ends, K = counts.cumsum(0).to(torch.int32), layer.ids.shape[1]
    gate, up = product(x[order // K], gate_up.mT, ends).chunk(2, -1)
    out = product(F.silu(gate) * up, down.mT, ends)
    rows = torch.empty_like(out).index_copy(0, order, out).view(*layer.ids.shape, -1)
    return (rows * weights[..., None].to(rows.dtype)).sum(1)


def layer(args: argparse.Namespace) -> Iterator[Figure]:
    for name in args.shapes:
        torch.manual_seed(0)
        shape = TINY if args.tiny else ALL[name]
        own = layer_of(name, shape, args.device)
        runs: dict[str, Callable[[], Any]] = {"cast": lambda own=own: own.codes}
        missing, memory = {}, {}
        for kind, (call, wanted) in contestants(own).items():
            call = with_products(6 if kind == ALL_SIX else 4, call)
            both = with_products(6 if kind == ALL_SIX else 4, passes(call, wanted, own.dy))
            try:
                both()  # a rival may fail, and another may run out of memory
                memory[kind] = kept(call) if own.x.is_cuda else 0
            except Exception as why:
                missing[kind] = f"{type(why).__name__}: {str(why).strip().partition(chr(10))[0][:200]}"
                continue
            runs |= {f"{kind} forward": call, kind: both}
        ms = dict(zip(runs, timed(list(runs.values()), args), strict=True))
        kernels = (
            {kind: kernel_times(runs[kind]) for kind in ("bf16", "fp8", ALL_SIX)} if own.x.is_cuda else {}
        )
        found = dict(shape=name, ms=ms, kept=memory, kernels=kernels, missing=missing)
        figures.keep(args, "fp8_experts", "layer", found)
        bars = BARS.get(name, (None, None)) if own.x.is_cuda else (None, None)
        for kind, bar in zip(("fp8", ALL_SIX), bars, strict=True):
            what = f"{name}: bf16 ({ms['bf16']:.2f} ms) / {kind} ({ms[kind]:.2f} ms)"
            yield at_least("layer", what, ms["bf16"] / ms[kind], bar, "x")
        ms["fp8"] = write_choice(args, shape, ms)
        step = ms["bf16"] / (ms["fp8"] + ms["cast"])
        yield at_least("layer", f"{name}: a step, with one cast ({ms['cast']:.2f} ms)", step, None, "x")
        forward = ms["bf16 forward"] / ms["fp8 forward"]
        bar = 1.35 if bars[0] else None
        yield at_least("layer", f"{name}: forward ({ms['fp8 forward']:.2f} ms)", forward, bar, "x")
        for kind in runs:
            if kind in ("torchao rowwise", "torch._grouped_mm"):
                yield at_least("layer", f"{name}: {kind} / fp8", ms[kind] / ms["fp8"], 1, "x")
        if memory.get("bf16") and memory.get("fp8"):
            what = f"{name}: memory kept for backward ({memory['fp8'] / 2**20:.0f} MiB) / bf16's"
            yield at_most("layer", what, memory["fp8"] / memory["bf16"], KEPT)
        for kind, why in missing.items():
            yield Figure("layer", f"{name}: {kind}", why, "runs", False)


def write_choice(args: argparse.Namespace, shape: Shape, ms: dict[str, float]) -> float:
    """Writes a shape's times, and how many products are in fp8, into the tables; returns fp8's time."""
    T, D, ffn, E, K = shape
    for kernel, config in fp8_gpu.WEIGHTS.items():
        chosen = config if ms[ALL_SIX] < ms["fp8"] else IN_BF16
        add_config(args.configs, Entry(kernel, D, ffn, T * K // E, chosen))
    fp8 = min(ms["fp8"], ms[ALL_SIX])
    add_to_table(args.table, args.device, shape, ms | dict(fp8=fp8))
    return fp8


def add_to_table(path: Path | None, device: str, shape: Shape, ms: dict[str, float]) -> None:
    """Writes a shape's times into the table; an older entry of the shape is replaced."""
    if path is None:
        return
    T, D, ffn, E, K = shape
    entry = Measured(D, ffn, T * K // E, *(round(ms[kind], 4) for kind in ("bf16", "fp8", "cast")))
    table = json.loads(path.read_text()) if path.exists() else {}
    old = [one for one in table.get(arch_of(device), []) if Measured(**one)[:3] != entry[:3]]
    table[arch_of(device)] = [*old, entry._asdict()]
    path.write_text(json.dumps(table, indent=1) + "\n")


def products(args: argparse.Namespace) -> Iterator[Figure]:
    if args.device != "cuda":
        yield Figure("products", "kernels", "not on a CPU")
        return
    for name in args.shapes:
        torch.manual_seed(0)
        T, D, ffn, E, K = shape = TINY if args.tiny else ALL[name]
        own = layer_of(name, shape, "cuda")
        n, ends = named(own.activation).halves, route(own.ids, E).ends.clone()
        calls = {kernel: call for kernel, call in launches_of(own).items() if kernel in fp8_gpu.HOPPER}
        sizes = dict(up=(D, n * ffn), down=(ffn, D), dh=(D, ffn), dx=(n * ffn, D))
        for kernel, (length, width) in sizes.items():
            calls[f"{kernel}, torch"] = scaled(T * K, length, width, E, ends)
        try:
            ms = dict(zip(calls, timed(list(calls.values()), args), strict=True))
        except RuntimeError as why:  # torch's product: without it our own are timed
            print(f"{name}: torch._scaled_grouped_mm: {why}", flush=True)
            ms = dict(zip(sizes, timed([calls[kernel] for kernel in sizes], args), strict=True))
        figures.keep(args, "fp8_experts", "products", dict(shape=name, ms=ms))
        for kernel, (length, width) in sizes.items():
            flops = 2 * T * K * length * width
            rates = [flops / ms[one] / 1e9 for one in (kernel, f"{kernel}, torch") if one in ms]
            words = " / ".join(f"{rate:.0f}" for rate in rates)
            yield Figure(
                "products", f"{name}: {kernel}, TFLOP/s, tmoe / torch", f"{words} ({ms[kernel]:.3f} ms)"
            )


def scaled(N: int, length: int, width: int, E: int, ends: Tensor) -> Callable[[], Tensor]:
    """torch's grouped product of codes, a scale a row of each operand."""
    a = torch.randn(N, length, device="cuda").to(E4M3)
    b = torch.randn(E, width, length, device="cuda").to(E4M3)
    of_a, of_b = torch.ones(N, device="cuda"), torch.ones(E, width, device="cuda")
    how = dict(offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)
    return lambda: torch._scaled_grouped_mm(a, b.mT, of_a, of_b, **how)


PARTS: figures.Parts = dict(
    casts=casts, compile=compile, kernels=kernels, accuracy=accuracy, layer=layer, products=products
)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.flags(p, PARTS, list(PARTS), 540)
    p.add_argument("--shapes", nargs="+", choices=list(ALL), default=SHAPES)
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--table", type=Path, help="a table like fp8_table.json, to which times are added")
    p.add_argument("--configs", type=Path, help="a table like fp8_configs.json, for the fastest kernels")
    args = p.parse_args()
    if args.device == "cuda":
        require_gpu(p)
    figures.run("benchmarks.fp8_experts", args, PARTS, LIMITS)


if __name__ == "__main__":
    main()
