"""Times the gated delta rule, forward and backward, on one GPU, and compares other implementations.

    python -m benchmarks.delta_rule
    python -m benchmarks.delta_rule --tokens 32768 --json delta.jsonl

The sizes are Qwen3-Next's: 32 heads of values, 16 of keys, 128 channels each, bf16. The rows are one of all
tokens, eight, and one of 64 documents. Contestants: tmoe's kernels, also on a GPU on which training does not
use them yet; their parts, with --parts; transformers' chunk form, compiled, which has no documents; fla's
kernels, where they are installed and accept the GPU; tmoe's plain form. Each is checked against the
definition in fp64 on 300 tokens before it is timed. A contestant that is missing or fails is named with the
reason.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.moe_layer import require_gpu
from benchmarks.train import at_least_one
from tmoe.ops import reference
from tmoe.ops.delta import gpu, kernels
from tmoe.ops.delta.rule import delta_rule
from tmoe.ops.delta.runs import runs_of

H, G, K, V = 32, 16, 128, 128
Rule = Callable[..., Tensor]


def inputs(rows: int, tokens: int, seed: int = 0) -> list[Tensor]:
    """q, k, v, g and beta of a rule, on the GPU, which require gradients."""
    gen = torch.Generator("cuda").manual_seed(seed)

    def r(*shape: int) -> Tensor:
        return torch.randn(rows, tokens // rows, *shape, generator=gen, device="cuda")

    q, k = F.normalize(r(G, K), dim=-1) * K**-0.5, F.normalize(r(G, K), dim=-1)
    made = [q.bfloat16(), k.bfloat16(), r(H, V).bfloat16(), -0.1 * F.softplus(r(H)), r(H).sigmoid()]
    return [t.requires_grad_() for t in made]


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, run: Tensor | None) -> Tensor:
    return delta_rule(q, k, v, g, beta, run)


def plain_rule() -> Rule:
    """tmoe's plain form, which a GPU without measured kernels uses. Later rules are tmoe's plain form too."""
    gpu.MEASURED = frozenset()
    return ours


def transformers_rule() -> Rule:
    """transformers' chunk form, compiled; it repeats key heads first."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    rule = torch.compile(getattr(theirs, "torch_chunk_gated_delta_rule"))  # noqa: B009

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, run: Tensor | None) -> Tensor:
        q, k = (t.repeat_interleave(H // G, 2) for t in (q * K**0.5, k))
        return rule(q, k, v, g=g, beta=beta, output_final_state=False)[0]

    return call


def fla_rule() -> Rule:
    """fla's kernels."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyrefly: ignore[missing-import]

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, run: Tensor | None) -> Tensor:
        ends = None
        if run is not None:
            counts = torch.bincount(run[0])
            ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        return chunk_gated_delta_rule(q * K**0.5, k, v, g, beta.to(v.dtype), cu_seqlens=ends)[0]

    return call


def far(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def errors(rule: Rule) -> list[float]:
    """Relative distances to fp64 of the outputs and of the gradients of q, k, v, g, beta."""
    given = inputs(1, 300, seed=1)
    exact = [t.detach().double().requires_grad_() for t in given]
    want, got = reference.delta_rule(*exact, correct=True), rule(*given, None)
    weight = torch.randn_like(want).bfloat16()
    want_g = torch.autograd.grad(want, exact, weight.double())
    got_g = torch.autograd.grad(got, given, weight.to(got.dtype))
    return [far(a, b) for a, b in zip((got.detach(), *got_g), (want.detach(), *want_g), strict=True)]


def milliseconds(call: Callable[[], Any], seconds: float) -> float:
    """The median time of a call on the GPU."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    times, until = [], time.monotonic() + seconds
    while len(times) < 5 or time.monotonic() < until:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def both(rule: Rule, given: list[Tensor], run: Tensor | None, backward: bool) -> None:
    """One forward, and one backward."""
    if not backward:
        with torch.no_grad():
            rule(*given, run)
        return
    y = rule(*given, run)
    torch.autograd.grad(y, given, y)


def show_parts(tokens: int, seconds: float) -> None:
    """Times each kernel of a forward and a backward of one row."""
    totals: dict[str, float] = {}
    q, k, v, g, beta = (t.detach() for t in inputs(1, tokens))
    given = q, k, v, g, beta
    launch = gpu.launch

    def timed(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        run = partial(launch, kernel, grid, *args, **options)
        name = kernel.__name__
        totals[name] = totals.get(name, 0.0) + milliseconds(run, seconds / 20)

    gpu.launch = timed
    try:
        _, sums, t = gpu.forward(given, None)
        gpu.backward(v, given, None, sums, t)
    finally:
        gpu.launch = launch
    assert kernels.L.value == gpu.LENGTH
    for name, ms in totals.items():
        print(f"| {name} | {ms:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=at_least_one, default=32768)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each timing")
    parser.add_argument("--parts", action="store_true", help="time each kernel")
    parser.add_argument("--json", type=Path, help="append a line for every row to this file")
    args = parser.parse_args()
    require_gpu(parser)
    gpu.MEASURED = frozenset([gpu._arch(torch.device("cuda"))])  # kernels, wherever they run
    T = args.tokens
    documents = torch.arange(T, device="cuda")[None] * 64 // T
    runs = runs_of(documents, None, 0)
    assert runs is not None
    kinds = [("one row", 1, None), ("eight rows", 8, None), ("64 documents", 1, runs.number_BS)]
    print("| rule | rows | forward ms | forward + backward ms | worst error |")
    print("| --- | --- | --- | --- | --- |")
    for name, made in (
        ("tmoe", lambda: ours),
        ("transformers, compiled", transformers_rule),
        ("fla", fla_rule),
        ("tmoe, plain", plain_rule),
    ):
        try:
            rule = made()
            worst = max(errors(rule))
        except Exception as error:
            print(f"| {name} | {type(error).__name__}: {' '.join(str(error).split())[:300]} |", flush=True)
            continue
        for kind, rows, run in kinds:
            if run is not None and name.startswith("transformers"):
                continue
            given = inputs(rows, T)
            try:
                times = [
                    milliseconds(partial(both, rule, given, run, b), args.seconds) for b in (False, True)
                ]
            except Exception as error:
                print(f"| {name} | {kind} | {type(error).__name__}: {' '.join(str(error).split())[:300]} |")
                continue
            print(f"| {name} | {kind} | {times[0]:.2f} | {times[1]:.2f} | {worst:.1e} |", flush=True)
            if args.json:
                row = dict(rule=name, rows=kind, tokens=T, forward=times[0], both=times[1], error=worst)
                with args.json.open("a") as file:
                    file.write(json.dumps(row | dict(gpu=torch.cuda.get_device_name())) + "\n")
            del given
            torch.cuda.empty_cache()
    if args.parts:
        show_parts(T, args.seconds)


if __name__ == "__main__":
    main()
