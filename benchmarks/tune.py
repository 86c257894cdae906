"""Fills tmoe/ops/experts/table.json for this GPU: times each kernel's likely configurations at given shapes.

    python -m benchmarks.tune --shapes qwen3 olmoe --out tuned.json   # measure (minutes), keep all figures
    python -m benchmarks.tune --merge tuned.json                      # write winners into the table; no GPU

Configurations are first compiled in parallel, into triton's cache. Then they are timed in rounds, in the same
way as in benchmarks/moe_layer.py. A kernel that can gather its rows itself is timed both ways. The table gets
the set of kernels that is fastest together with the copies that it needs.
"""

import argparse
import functools
import itertools
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe_layer import SHAPES, Bench, Shape, require_gpu, time_all
from tmoe.commands.warmup_command import ARCH, ARCH_VALID
from tmoe.ops.experts import table
from tmoe.ops.experts.table import KernelConfig
from tmoe.ops.launch.kernel_launch import compile_only, device_facts

# The benchmark's shapes, and further shapes, between which the rule interpolates.
TUNED: dict[str, Shape] = {  # name: (T, D, F, E, K)
    **SHAPES,
    "qwen3-128": (128, 2048, 768, 128, 8),
    "qwen3-16384": (16384, 2048, 768, 128, 8),
    "235b-2048": (2048, 4096, 1536, 128, 8),
    "235b-16384": (16384, 4096, 1536, 128, 8),
    "gpt-oss-4096": (4096, 2880, 2880, 128, 4),
    "gpt-oss": (32768, 2880, 2880, 128, 4),
    "v3-512": (512, 7168, 2048, 64, 8),
    "v3": (8192, 7168, 2048, 64, 8),
    "mixtral-64": (64, 4096, 14336, 8, 2),
    "mixtral-512": (512, 4096, 14336, 8, 2),
    "mixtral-4096": (4096, 4096, 14336, 8, 2),
    "small": (32768, 1024, 512, 32, 4),
    "small-2048": (2048, 1024, 512, 32, 4),
    "few-experts": (65536, 2048, 1408, 8, 2),
}
GATHERS = ("up", "dh", "dw_down", "dw_up")
Job = tuple[str, Shape, str, KernelConfig]  # architecture, shape, kernel, configuration
Record = dict[str, Any]  # shape, kernel, gather_ms, dense (ms), tried [(ms, configuration)]


def candidates(kernel: str, rows: float) -> list[KernelConfig]:
    """Configurations worth trying for a kernel whose experts have this many rows.

    They fit into shared memory without spills; tests/ops/test_ops_kernels.py checks this for the
    configurations in the table.
    """
    if kernel in ("up", "dh"):
        cuts = [(128, 256, 64, 4, 3, 4)]
        few = [(64, 256, 64, 4, 4, 4)]
    elif kernel in ("down", "dx"):
        cuts = [(128, 256, 64, 2, 3, 2), (128, 256, 64, 4, 4, 2), (128, 256, 64, 2, 4, 1)]
        few = [(64, 256, 64, 4, 5, 2), (64, 128, 128, 2, 4, 2)]
    else:
        cuts = [(128, 256, 64, 2, 4, 1), (128, 256, 64, 4, 4, 2), (256, 128, 64, 2, 4, 1)]
        few = []
    if rows <= 192:
        cuts = few + cuts
    gathers = (True, False) if kernel in GATHERS else (False,)
    return [
        KernelConfig(bm, bn, bl, 16, sub, 4 if bm == 64 else 8, stages, 1, gather, outs)
        for gather in gathers
        for bm, bn, bl, sub, stages, outs in cuts
    ]


def compile_one(job: Job) -> str | None:
    """In a worker: compiles one configuration into triton's cache. Returns None, or why that failed."""
    arch, shape, kernel, cfg = job

    try:
        with compile_only(arch, lambda name, key, compile: compile()):
            Bench(shape, "meta").run(kernel, cfg)
    except Exception as e:  # reported, and the configuration is left out
        return f"{kernel} {tuple(cfg)}: {type(e).__name__} {(str(e).splitlines() or [''])[-1][:100]}"
    return None


def compile_all(arch: str, names: list[str], kernels: list[str], jobs: int) -> set[tuple[str, KernelConfig]]:
    """Compiles every candidate in parallel; returns the candidates that failed.

    jobs: number of processes.
    """
    work: list[Job] = []
    for name in names:
        T, D, F, E, K = TUNED[name]
        for kernel in kernels:
            work += [(arch, (256, D, F, E, K), kernel, c) for c in candidates(kernel, T * K / E)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        failures = list(pool.map(compile_one, work, chunksize=4))
    for failure in filter(None, failures):
        print("left out:", failure)
    return {job[2:] for job, failure in zip(work, failures, strict=True) if failure}


def sweep(name: str, kernels: list[str], failed: set[tuple[str, KernelConfig]]) -> list[Record]:
    """The measurements at one shape, one record a kernel: its configurations with their ms, best first."""
    T, _, _, E, K = TUNED[name]
    bench = Bench(TUNED[name], "cuda")
    (gather_ms,) = time_all([lambda: bench.gather(bench.x)])
    records = []
    for kernel in kernels:
        timed = []
        tried = [c for c in candidates(kernel, T * K / E) if (kernel, c) not in failed]
        for stage in range(2):
            fns = [functools.partial(bench.run, kernel, cfg) for cfg in tried]
            # The dense product is only shown; it is no bound: if experts have few rows, it reads the weights
            # of one expert, while the kernels read those of all experts.
            (dense,) = time_all([functools.partial(bench.dense, kernel)], rounds=7)
            times = time_all(fns, rounds=7, give_up=1.5)
            timed += zip(times, tried, strict=True)
            timed.sort()
            if stage == 0:  # try orders of tiles only for the best configuration of either kind
                tops = [next((c for _, c in timed if c.gather == g), None) for g in (True, False)]
                tried = [c._replace(GROUP=g) for c in tops if c for g in (4, 8, 32)]
        print(
            f"{name} {kernel}: dense {dense:.3f} ms",
            *(f"{ms:.3f} {tuple(c)}" for ms, c in timed[:3]),
            sep="\n   ",
            flush=True,
        )
        tried = [(round(ms, 4), list(c)) for ms, c in timed]
        records.append(
            {"shape": name, "kernel": kernel, "gather_ms": gather_ms, "dense": dense, "tried": tried}
        )
    return records


def winners(records: list[Record]) -> dict[str, tuple[float, KernelConfig]]:
    """{kernel: (ms, Config)} of one shape: the fastest set, with the gathered copies that it needs.

    dh and dw_down share one copy.
    """
    gather_ms = records[0]["gather_ms"]
    best: dict[tuple[str, bool], tuple[float, KernelConfig]] = {}
    for r in records:
        for gather in (True, False):
            tried = [(ms, KernelConfig(*c)) for ms, c in r["tried"] if KernelConfig(*c).gather == gather]
            if tried:
                best[r["kernel"], gather] = min(tried)
    kernels = [r["kernel"] for r in records]

    def cost(choice: dict[str, bool]) -> float:
        copies = {"dy" if k in ("dh", "dw_down") else k for k, g in choice.items() if k in GATHERS and not g}
        return sum(best[k, g][0] for k, g in choice.items()) + gather_ms * len(copies)

    options = [[(k, g) for g in (True, False) if (k, g) in best] for k in kernels]
    return {k: best[k, g] for k, g in min((dict(o) for o in itertools.product(*options)), key=cost).items()}


def merge(path: Path, arch: str) -> None:
    """Writes the winners of a file of records into the table, replacing entries of the same kernel and shape.

    A ValueError or OSError leaves the table unchanged.
    """

    def known(record: Any) -> bool:
        return isinstance(record, dict) and record.get("shape") in TUNED

    records = json.loads(path.read_text())
    if not (isinstance(records, list) and records and all(map(known, records))):
        raise ValueError(f"{path}: holds no records of this benchmark (--out)")
    shipped = json.loads(table.PATH.read_text())
    entries = {(e["kernel"], e["D"], e["F"], e["rows"]): e for e in shipped.get(arch, [])}
    for name in dict.fromkeys(r["shape"] for r in records):
        T, D, F, E, K = TUNED[name]
        for kernel, (ms, cfg) in winners([r for r in records if r["shape"] == name]).items():
            rows = T * K // E
            entry = {"kernel": kernel, "D": D, "F": F, "rows": rows, "config": list(cfg), "ms": ms}
            entries[kernel, D, F, rows] = entry

    shipped[arch] = [entries[key] for key in sorted(entries)]
    lines = [f'"{a}": [\n' + ",\n".join(json.dumps(e) for e in es) + "\n]" for a, es in shipped.items()]
    new = table.PATH.with_suffix(".new")
    new.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    new.replace(table.PATH)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", nargs="+", default=list(TUNED), choices=list(TUNED))
    p.add_argument("--kernels", nargs="+", default=list(table.KERNELS), choices=list(table.KERNELS))
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at once")
    p.add_argument("--out", type=Path, default=Path("tuned.json"), help="file for all measurements")
    p.add_argument("--merge", type=Path, help="only write the winners of this file into the table")
    p.add_argument("--arch", default="cuda:90", help="architecture whose entries --merge writes")
    args = p.parse_args()
    if args.merge:
        if not ARCH.fullmatch(args.arch):
            p.error(f"--arch={args.arch}: {ARCH_VALID}")
        try:
            return merge(args.merge, args.arch)
        except (OSError, ValueError, KeyError, TypeError) as error:
            p.error(f"--merge={args.merge}: {error}")
    require_gpu(p)

    args.out.parent.mkdir(parents=True, exist_ok=True)
    start = time.time()
    arch = device_facts(torch.device("cuda", 0))[0]
    failed = compile_all(arch, args.shapes, args.kernels, args.jobs)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    records = []
    for name in args.shapes:
        records += sweep(name, args.kernels, failed)
        args.out.write_text(json.dumps(records))
        torch.cuda.empty_cache()
    print(f"measured in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
