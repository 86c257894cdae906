"""Times the gated delta rule, forward and backward, on one GPU, and compares other implementations.

    python -m benchmarks.delta_rule
    python -m benchmarks.delta_rule --parts --tokens 32768 --json delta.jsonl
    python -m benchmarks.delta_rule --choices --seconds 1

The sizes are Qwen3-Next's: 32 heads of values, 16 of keys, 128 channels each, bf16. The rows are one of all
tokens, eight, and one of 64 documents. Contestants: tmoe's kernels, also on a GPU on which training does not
use them yet; fla's kernels, where they are installed and accept the GPU; transformers' chunk form, which has
no documents; tmoe's plain form. transformers' loop over chunks is unrolled by the compiler, so the compiled
form runs on eight rows only, within a time limit, and one row runs it eagerly. Each contestant is checked
against the definition in fp64 on 300 tokens before it is timed. A contestant that is missing or fails is
named with the reason; if only its backward fails, its forward is timed.

The kernel of one token is timed for 256 sequences, with the rate at which it reads and writes states.

--choices times each kernel with other tiles, warps and stages, and --parts each kernel, before the rest.
"""

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.moe_layer import require_gpu
from benchmarks.sft import about
from benchmarks.train import at_least_one, write_line
from tmoe.ops import reference
from tmoe.ops.delta import gpu
from tmoe.ops.delta.rule import delta_rule, delta_rule_step
from tmoe.ops.delta.runs import runs_of
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.launch.shapes import LinearShapes

H, G, K, V = 32, 16, 128, 128
Rule = Callable[..., Tensor]
LIMIT = 90  # seconds that a contestant may take to compile and run once
SLOTS = 256  # sequences of the kernel of one token
CHOICES = {  # channels, warps, stages (gpu.Way); the first are those in use
    "prepare": [(256, 4, 1), (256, 8, 1)],
    "scan": [(32, 4, 3), (32, 4, 2), (64, 4, 3), (64, 4, 2), (64, 8, 2), (32, 4, 4)],
    "outputs": [(128, 8, 1), (64, 4, 1), (64, 8, 1), (128, 4, 1)],
    "local_back": [(256, 4, 1), (256, 8, 1)],
    "scan_back": [(32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 8, 2), (32, 4, 1), (16, 4, 2)],
    "solve_back": [(32, 8, 2), (32, 8, 1), (32, 4, 2), (64, 8, 2)],
    "states_back": [(32, 8, 1), (64, 8, 1), (16, 8, 1), (64, 8, 2)],
    "inner_back": [(64, 4, 1), (128, 4, 1), (128, 4, 2), (128, 8, 1), (64, 4, 2), (64, 8, 1)],
}


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


def transformers_rule(compiled: bool) -> Rule:
    """transformers' chunk form; it repeats key heads first."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    rule = getattr(theirs, "torch_chunk_gated_delta_rule")  # noqa: B009
    rule = torch.compile(rule) if compiled else rule

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


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError inside the context after this time."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).replace('|', '/').split())[:300]}"


def errors(rule: Rule, backward: bool) -> list[float]:
    """Relative distances to fp64 of the outputs, or of the gradients of q, k, v, g, beta."""
    given = inputs(1, 300, seed=1)
    exact = [t.detach().double().requires_grad_() for t in given]
    want, got = reference.delta_rule(*exact, correct=True), rule(*given, None)
    if not backward:
        return [far(got.detach(), want.detach())]
    weight = torch.randn_like(want).bfloat16()
    want_g = torch.autograd.grad(want, exact, weight.double())
    got_g = torch.autograd.grad(got, given, weight.to(got.dtype))
    return [far(a, b) for a, b in zip(got_g, want_g, strict=True)]


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


def parts(tokens: int, seconds: float) -> dict[str, tuple[float, int]]:
    """Milliseconds of each kernel of a forward and a backward of one row, and bytes of its tensors."""
    totals: dict[str, tuple[float, int]] = {}
    q, k, v, g, beta = (t.detach() for t in inputs(1, tokens))
    given = q, k, v, g, beta
    launch = gpu.launch

    def timed(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        run = partial(launch, kernel, grid, *args, **options)
        tensors = {t.data_ptr(): t.nbytes for t in args if isinstance(t, Tensor)}
        name = kernel.__name__ + (", T known" if kernel.__name__ == "prepare" and args[-2] is False else "")
        totals[name] = milliseconds(run, seconds / 20), sum(tensors.values())

    gpu.launch = timed
    try:
        _, t, lost = gpu.forward(given, None)
        gpu.backward(v, given, None, t, lost)
    finally:
        gpu.launch = launch
    return totals


def show_parts(tokens: int, seconds: float) -> None:
    """A table of all kernels; bytes are those of a kernel's tensors, each once."""
    print("| kernel | ms | GB | TB/s |")
    print("| --- | --- | --- | --- |")
    for name, (ms, size) in parts(tokens, seconds).items():
        print(f"| {name} | {ms:.3f} | {size / 1e9:.2f} | {size / ms / 1e9:.2f} |", flush=True)


def choose(place: int) -> None:
    """Each kernel's way is its choice at this place, if there are as many."""
    for name, ways in CHOICES.items():
        gpu.WAYS[name] = gpu.Way(*ways[place if place < len(ways) else 0])


def compiled(arch: str, runs: bool, kernel: str, place: int) -> None:
    """Fills triton's cache with a kernel of a place of CHOICES."""
    choose(place)

    def visit(name: str, key: str, compile: Callable) -> None:
        if name == kernel:
            with contextlib.suppress(Exception):  # its launch names it
                compile()

    with compile_only(arch, visit):
        gpu.trace(LinearShapes(G, H, K, V, 4, torch.bfloat16, True), runs)


def compile_all(places: int) -> None:
    """Compiles the first places of CHOICES, each kernel in another process."""
    arch = gpu._arch(torch.device("cuda", 0))
    jobs = [(arch, runs, name, at) for runs in (False, True) for name in CHOICES for at in range(places)]
    jobs = [job for job in jobs if job[3] < len(CHOICES[job[2]]) and (job[3] == 0 or not job[1])]
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), get_context("spawn")) as pool:
        list(pool.map(compiled, *zip(*jobs, strict=True)))


def show_choices(tokens: int, seconds: float) -> None:
    """Times all choices, and checks them on 300 tokens."""
    print("| kernel | channels, warps, stages | ms |")
    print("| --- | --- | --- |")
    for place in range(max(map(len, CHOICES.values()))):
        choose(place)
        try:
            worst = max(errors(ours, False) + errors(ours, True))
            found = parts(tokens, seconds)
        except Exception as error:
            print(f"| choice {place} | | {why(error)} |", flush=True)
            continue
        for name, ways in CHOICES.items():
            if place < len(ways):
                print(f"| {name} | {ways[place]} | {found[name][0]:.3f} |")
        print(f"| all | choice {place} | worst error {worst:.1e} |", flush=True)
    choose(0)


def show_step(seconds: float) -> dict[str, float]:
    """Times the kernel of one token; returns the figures."""
    q, k, v, g, beta = (t.detach().transpose(0, 1).contiguous() for t in inputs(1, SLOTS))
    state = torch.randn(SLOTS, H, K, V, device="cuda")
    ms = milliseconds(partial(delta_rule_step, (q, k, v, g, beta), state), seconds)
    rate = 2 * state.nbytes / ms / 1e9
    print(f"one token of {SLOTS} sequences: {ms:.3f} ms, states read and written at {rate:.2f} TB/s")
    return dict(sequences=SLOTS, step=ms, tb_s=rate)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=at_least_one, default=32768)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each timing")
    parser.add_argument("--parts", action="store_true", help="time each kernel first")
    parser.add_argument("--choices", action="store_true", help="time each kernel launched in other ways")
    parser.add_argument("--only", nargs="*", help="contestants whose names begin so, in place of all")
    parser.add_argument("--json", type=Path, help="append a line for every row to this file")
    args = parser.parse_args()
    require_gpu(parser)
    gpu.MEASURED = frozenset([gpu._arch(torch.device("cuda"))])  # kernels, wherever they run
    T = args.tokens
    compile_all(max(map(len, CHOICES.values())) if args.choices else 1)
    if args.choices:
        show_choices(T, args.seconds)
    if args.parts:
        show_parts(T, args.seconds)
    step = show_step(args.seconds)
    if args.json:
        write_line(args.json, step | about("delta_rule"))
    documents = torch.arange(T, device="cuda")[None] * 64 // T
    runs = runs_of(documents, None, 0)
    assert runs is not None
    kinds = {"one row": (1, None), "eight rows": (8, None), "64 documents": (1, runs.number_BS)}
    print("| rule | rows | forward ms | forward + backward ms | worst error |")
    print("| --- | --- | --- | --- | --- |")
    for name, made, named in (
        ("tmoe", lambda: ours, list(kinds)),
        ("fla", fla_rule, list(kinds)),
        ("transformers, compiled", partial(transformers_rule, True), ["eight rows"]),
        ("transformers, eager", partial(transformers_rule, False), ["one row"]),
        ("tmoe, plain", plain_rule, list(kinds)),
    ):
        if args.only is not None and not name.startswith(tuple(args.only)):
            continue
        lacks = ""
        try:
            rule = made()
            with limited(LIMIT):
                worst = max(errors(rule, False))
        except Exception as error:
            print(f"| {name} | {why(error)} |", flush=True)
            continue
        try:
            with limited(LIMIT):
                worst = max(worst, *errors(rule, True))
        except Exception as error:
            lacks = why(error)
        for kind in named:
            rows, run = kinds[kind]
            given = inputs(rows, T)
            times: list[float | None] = [None, None]
            for backward in (False,) if lacks else (False, True):
                call = partial(both, rule, given, run, backward)
                try:
                    with limited(LIMIT):
                        call()
                    times[backward] = milliseconds(call, args.seconds)
                except Exception as error:
                    lacks = why(error)
                    break
            ms = ["-" if t is None else f"{t:.2f}" for t in times]
            print(f"| {name} | {kind} | {ms[0]} | {ms[1]} {lacks} | {worst:.1e} |", flush=True)
            if args.json:
                row = dict(rule=name, rows=kind, tokens=T, forward=times[0], both=times[1], error=worst)
                write_line(args.json, row | dict(lacks=lacks) | about("delta_rule"))
            del given
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
