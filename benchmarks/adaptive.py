"""Times every adaptive_r of an MoE layer over numbers of tokens: when is sending weights faster than tokens?

    torchrun --nproc-per-node 2 -m benchmarks.adaptive --json adaptive.jsonl
    torchrun --nproc-per-node 2 -m benchmarks.adaptive --layers olmoe --tokens 256 4096 65536 --forward
    torchrun --nproc-per-node 2 -m benchmarks.adaptive --etp 2 --dispatch nccl
    torchrun --nproc-per-node 2 -m benchmarks.adaptive --layers tiny --tokens 16 256 --rounds 3

For each layer and number of tokens per rank, it prints for each r the milliseconds of forward and backward of
tmoe.MoE, from router to combine, compiled, and the prediction of `LayerCost` of
tmoe/moe/exchange/adaptive.py; which r "auto" selects, and how much slower that is than the fastest.
`crossover` is the first number of tokens from which r = 0 is fastest. The last line has the constants for
MACHINES that fit the times best; with them in the table, "auto" should be within 5% of the best everywhere.

Milliseconds are medians over rounds in which all r alternate, on the slowest rank. Without a GPU it runs on
gloo, eagerly, which shows only that it works.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tmoe
from benchmarks.moe_layer import prepare, time_all
from benchmarks.train import write_line
from tmoe.model.parallelize import apply_ep
from tmoe.moe.exchange.adaptive import LayerCost, Machine

LAYERS = {  # name: (D, the layer)
    "qwen3": (2048, tmoe.MoEConfig(experts=128, top_k=8, ffn_dim=768)),
    "olmoe": (2048, tmoe.MoEConfig(experts=64, top_k=8, ffn_dim=1024, renormalize=False)),
    "mixtral": (4096, tmoe.MoEConfig(experts=8, top_k=2, ffn_dim=14336, softmax="after")),
    "tiny": (64, tmoe.MoEConfig(experts=8, top_k=2, ffn_dim=64)),
}
SLACK = 1.05  # allowed time of "auto", relative to the best


def layer(name: str, axes: dict[str, int], dispatch: str, device: str) -> tmoe.MoE:
    """One of LAYERS over the mesh of these axes; compiled and in bf16 on a GPU, else eager and in fp32."""
    dim, cfg = LAYERS[name]
    torch.manual_seed(0)
    with torch.device(device):
        moe = tmoe.MoE(dim, cfg)
    if device == "cuda":
        moe = moe.bfloat16()
    apply_ep(moe, tmoe.parallel.build_mesh(ep=axes["ep"], etp=axes["etp"]), dispatch)
    if device == "cuda":
        moe.route = torch.compile(moe.route, fullgraph=True, dynamic=False)
    return moe


def call(moe: tmoe.MoE, r: int, x: torch.Tensor, dy: torch.Tensor | None) -> Callable[[], torch.Tensor]:
    """A function that runs the layer's forward once; with dy also its backward."""

    def run() -> torch.Tensor:
        if dy is None:
            with torch.no_grad():
                return moe(x, adaptive_r=r)
        y = moe(x, adaptive_r=r)
        y.backward(dy)
        x.grad = None
        moe.zero_grad(set_to_none=True)
        return y.detach()

    return run


def require_equal(moe: tmoe.MoE, ways: list[int], x: torch.Tensor) -> None:
    """Raises RuntimeError unless every r gives the same as r = 1, to the type's rounding."""
    with torch.no_grad():
        want = moe(x, adaptive_r=1).float()
        for r in ways:
            far = (moe(x, adaptive_r=r).float() - want).norm() / want.norm()
            if not far < (1e-2 if x.dtype == torch.bfloat16 else 1e-5):
                raise RuntimeError(f"adaptive_r={r}: off by {far:.1e} from r=1")


def slowest_ms(fns: list[Callable], rounds: int, device: str) -> list[float]:
    """Milliseconds of each function on the slowest rank; all ranks begin together."""
    if device == "cuda":
        mark = torch.zeros(1, device=device)

        def begin() -> None:
            prepare()
            dist.all_reduce(mark)

        ms = time_all(fns, rounds, begin=begin)
    else:
        times: list[list[float]] = [[] for _ in fns]
        for i in range(-1, rounds):
            for fn, samples in zip(fns, times, strict=True):
                dist.barrier()
                start = time.perf_counter()
                fn()
                if i >= 0:
                    samples.append(1e3 * (time.perf_counter() - start))
        ms = [statistics.median(samples) for samples in times]
    slowest = torch.tensor(ms, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def measure(moe: tmoe.MoE, tokens: int, backward: bool, rounds: int) -> dict[str, Any]:
    """The figures for one number of tokens."""
    weight = moe.router.weight
    x = torch.randn(tokens, moe.dim, device=weight.device, dtype=weight.dtype)
    dy = torch.randn_like(x) if backward else None
    ways = sorted(map(int, moe.ways))
    if x.is_cuda:
        torch.compiler.reset()  # else graphs of other numbers of tokens count as recompilations
    require_equal(moe, ways, x)
    x.requires_grad_(backward)
    ms = slowest_ms([call(moe, r, x, dy) for r in ways], rounds, weight.device.type)
    with torch.set_grad_enabled(backward):
        auto = int(moe.way("auto", tokens, moe.router.cfg.top_k, x.element_size()) or 1)
    cost = cost_of(moe, x.element_size(), backward)
    return dict(
        tokens=tokens,
        ms=dict(zip(ways, ms, strict=True)),
        predicted_ms={r: 1e3 * cost.seconds(r, tokens) for r in ways},
        auto=auto,
        auto_of_best=ms[ways.index(auto)] / min(ms),
    )


def cost_of(moe: tmoe.MoE, element: int, backward: bool) -> LayerCost:
    assert moe.cost is not None
    return replace(moe.cost, element=element, backward=backward)


def crossover(lines: list[dict[str, Any]]) -> int | None:
    """The first number of tokens from which r = 0 is fastest; None if it is not at the largest number."""
    first = None
    for line in lines:
        ms = line["ms"]
        if min(ms, key=ms.get) != 0:
            first = None
        elif first is None:
            first = line["tokens"]
    return first


def fitted(cost: LayerCost, lines: list[dict[str, Any]]) -> Machine:
    """The constants, none below 0, with which `LayerCost` is closest to the measured times.

    This is a least squares over the terms, with relative errors. Terms whose constant is below 0 are removed
    one after the other.
    """
    pairs = [(cost.terms(r, line["tokens"]), ms / 1e3) for line in lines for r, ms in line["ms"].items()]
    seconds = torch.tensor([s for _, s in pairs], dtype=torch.float64)
    table = torch.tensor([terms for terms, _ in pairs], dtype=torch.float64) / seconds[:, None]
    left = [i for i in range(table.shape[1]) if table[:, i].any()]
    while left:
        scale = table[:, left].norm(dim=0)
        fit = torch.linalg.lstsq(table[:, left] / scale, torch.ones_like(seconds)[:, None], driver="gelsd")
        values = fit.solution[:, 0] / scale
        if (values >= 0).all():
            break
        left.pop(int(values.mul(scale).argmin()))
    constants = [0.0] * table.shape[1]
    for i, value in zip(left, values.tolist() if left else [], strict=True):
        constants[i] = value
    return Machine(*constants)


def show(line: dict[str, Any]) -> str:
    each = "   ".join(f"r={r} {ms:9.3f} ms ({line['predicted_ms'][r]:9.3f})" for r, ms in line["ms"].items())
    return f"{line['tokens']:8} tokens   {each}   auto r={line['auto']} x{line['auto_of_best']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="*", default=["qwen3", "olmoe", "mixtral"], choices=list(LAYERS))
    parser.add_argument("--tokens", type=int, nargs="*", default=[2**i for i in range(6, 18)])
    parser.add_argument("--etp", type=int, default=1, help="ranks that share each expert; ep is world / etp")
    parser.add_argument("--dispatch", default="auto", choices=["auto", "nccl", "symm"])
    parser.add_argument("--forward", action="store_true", help="without the backward")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("WORLD_SIZE is not set: start it with torchrun, two processes or more")
    world = int(os.environ["WORLD_SIZE"])
    if world < 2 or world % args.etp:
        parser.error(f"--etp {args.etp}: needs two processes or more, a multiple of it; there are {world}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device())
        )
    else:
        dist.init_process_group("gloo")
    axes = dict(ep=world // args.etp, etp=args.etp)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
    facts = dict(date=str(date.today()), gpu=gpu, torch=torch.__version__, world=world, **axes)
    for name in args.layers:
        moe = layer(name, axes, args.dispatch, device)
        lines = [measure(moe, tokens, not args.forward, args.rounds) for tokens in sorted(args.tokens)]
        cost = cost_of(moe, moe.router.weight.element_size(), not args.forward)
        worst = max(line["auto_of_best"] for line in lines)
        machine = fitted(cost, lines)
        again = replace(cost, machine=machine)
        ways = sorted(map(int, moe.ways))
        chosen = [
            line["ms"][again.cheapest(ways, line["tokens"])] / min(line["ms"].values()) for line in lines
        ]
        if dist.get_rank() == 0:
            print(f"{name}: D {moe.dim}, {moe.router.cfg.experts} experts, " + str(axes))
            for line in lines:
                print(show(line))
            print(f"crossover: {crossover(lines)} tokens; auto at most x{worst:.2f} of the best", end="")
            print("" if worst <= SLACK else f", more than x{SLACK}: MACHINES does not fit")
            print(f"fits best: {machine}; auto would be at most x{max(chosen):.2f}", flush=True)
            if args.json:
                more = dict(layer=name, backward=not args.forward, dispatch=args.dispatch, fit=list(machine))
                for line in lines:
                    write_line(args.json, facts | more | line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
