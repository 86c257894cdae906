"""Reads a trace of `train.py --profile` and sums up the step's GPU time by kind of work.

python -m benchmarks.trace runs/x/trace-step20-rank0.json.gz
"""

import argparse
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

RANGES = {
    "loss": "loss",
    "Optimizer.step": "optimizer, norm",
}  # names of record_function's ranges: kernels inside a range count as its kind
# all work of the stream with this name is collectives: gradients use all-to-all, but are no exchange of
# tokens
BESIDE = "experts' gradients"
# Kernels of tmoe/ops/experts, forward and backward.
EXPERTS = (
    r"^(specialised|few_rows|histogram|scan|tabulate|place\w*|"
    r"(up|rows|dh|dw|combine|gather|clear|bias)_kernel)$"
)
KINDS = [  # the first pattern that a kernel's name matches
    ("exchange", r"^(push|pull|meet|pack|unpack)_kernel|^Memcpy PtoP|nccl.*SendRecv"),
    ("collectives", r"nccl"),
    ("attention", r"flash|fmha|attention|cudnn|compute_dot_do_o"),
    ("experts", EXPERTS),
    ("optimizer, norm", r"adamw_kernel|LpNorm|FusedAdam"),
    ("dense products", r"gemm|cutlass|nvjet|cublas|splitK|gemv"),
    ("loss", r"cross_entropy|logprob"),
]
WORK = ("dense products", "experts", "attention", "exchange", "optimizer, norm")  # with the head's products
REST = "glue"  # norms, RoPE, residuals, routers' softmax, embedding, copies and casts around collectives


def main(path: str) -> None:
    shares, names, waits = read(Path(path))
    print(summary(shares, waits))
    print("| kernel | ms | launches |\n|---|---|---|")
    for name, us, launches in names[:40]:
        print(f"| `{name[:100]}` | {us / 1e3:.2f} | {launches} |")


def summary(shares: dict[str, float], waits: dict[str, float]) -> str:
    """A line for each kind, ms and share of the step; then the kernels that end the longest idle times."""
    total = shares["ms"]
    rows = [f"| {kind} | {ms:.2f} | {ms / total:.1%} |" for kind, ms in shares.items()]
    rows += [
        f"| idle before `{name[:80]}` | {ms:.2f} | {ms / total:.1%} |" for name, ms in list(waits.items())[:6]
    ]
    return "\n".join(["| traced step | ms | share |", "|---|---|---|", *rows])


def read(path: Path) -> tuple[dict[str, float], list[tuple[str, float, int]], dict[str, float]]:
    """The GPU time of a traced step. Returns three things:

    - ms of the step; ms of it in which nothing runs, in which only the exchange or only other collectives
    run,
      and in which nothing of WORK runs ("outside"); then busy ms by kind, where kernels that run at the same
      time are all counted;
    - kernels, the longest first, as (name, microseconds, launches);
    - idle ms by the kernel that ends them, the most first.

    If a trace has several steps, the last is read, from the end of the step before: only that step begins as
    a step without a tracer does, with the host ahead. A single step is read from its first kernel to its
    last.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        events = json.load(file)["traceEvents"]

    # The kernels of the last step, and the ranges of GPU time that record_function has named.
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        raise SystemExit(f"{path}: no GPU activity in it")
    begin, end = last_step(events)
    kernels = [cut(e, begin, end) for e in kernels if begin < e["ts"] + e["dur"] and e["ts"] < end]
    ranges = [
        (kind, e["tid"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "gpu_user_annotation"
        for start, kind in RANGES.items()
        if e["name"].startswith(start)
    ]

    def alone(e: dict) -> str:
        return next((label for label, pattern in KINDS if re.search(pattern, e["name"])), REST)

    beside = {e["tid"] for e in events if e.get("cat") == "gpu_user_annotation" and e["name"] == BESIDE}

    def kind(e: dict) -> str:
        if e["tid"] in beside:
            return "collectives"
        for name, stream, first, last in ranges:
            if stream == e["tid"] and first <= e["ts"] < last:
                return name
        return alone(e)

    # Sums by name and by kind.
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    by_kind = [(e, kind(e)) for e in kernels]
    for e, its in by_kind:
        times[e["name"]] += e["dur"]
        launches[e["name"]] += 1
        kinds[its] += e["dur"]

    # The times that no kernel of a kind covers.
    waits: dict[str, float] = defaultdict(float)
    for name, us in idle(kernels, begin):
        waits[name] += us
    shares = {"ms": busy(kernels) + sum(waits.values()), "GPU idle": sum(waits.values())}
    for moving in ("exchange", "collectives"):
        shares[f"{moving} not hidden"] = busy(kernels) - busy([e for e, its in by_kind if its != moving])
    working = [e for e, its in by_kind if its in WORK or (alone(e) in WORK and its != "collectives")]
    shares["outside"] = shares["ms"] - busy(working)
    shares |= dict(kinds.most_common())
    return (
        {name: us / 1e3 for name, us in shares.items()},
        [(name, us, launches[name]) for name, us in times.most_common()],
        {name: us / 1e3 for name, us in sorted(waits.items(), key=lambda wait: -wait[1])},
    )


def last_step(events: list[dict]) -> tuple[float, float]:
    """The time of the last of several steps, from the end of the step before; all time if there is only one.

    Times are those of the stream that a step used longest.
    """
    steps = [
        e for e in events if e.get("cat") == "gpu_user_annotation" and e["name"].startswith("ProfilerStep#")
    ]
    if len({e["name"] for e in steps}) < 2:
        return float("-inf"), float("inf")
    stream = max(steps, key=lambda e: e["dur"])["tid"]
    *_, before, last = sorted(e["ts"] + e["dur"] for e in steps if e["tid"] == stream)
    return before, last


def cut(e: dict, begin: float, end: float) -> dict:
    """The part of a kernel between two times."""
    ts = max(e["ts"], begin)
    stop = min(e["ts"] + e["dur"], end)
    return e | {"ts": ts, "dur": stop - ts}


def idle(kernels: list[dict], begin: float) -> Iterator[tuple[str, float]]:
    """Yields the gaps in which no stream works, from `begin` or the first kernel on.

    Each is the name of the kernel that ends the gap, and its microseconds.
    """
    ordered = sorted(kernels, key=lambda e: e["ts"])
    end = ordered[0]["ts"] if begin == float("-inf") else begin
    for e in ordered:
        if e["ts"] > end:
            yield e["name"], e["ts"] - end
        end = max(end, e["ts"] + e["dur"])


def busy(kernels: list[dict]) -> float:
    """Microseconds in which at least one stream works."""
    end = float("-inf")
    total = 0.0
    for e in sorted(kernels, key=lambda e: e["ts"]):
        stop = e["ts"] + e["dur"]
        total += max(0.0, stop - max(end, e["ts"]))
        end = max(end, stop)
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="a file of that name, compressed or not")
    path = parser.parse_args().trace
    try:
        main(path)
    # the file is missing, is no trace, or has no GPU activity
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise SystemExit(f"{path}: no trace of a GPU: {error!r}") from None
