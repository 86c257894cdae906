"""Compiles the kernels of a configuration before training, in parallel, so that no rank compiles while others wait for it.

    python -m tmoe.warmup qwen3-30b-a3b                  # for the GPU of this machine
    python -m tmoe.warmup qwen3-30b-a3b --arch cuda:90   # for a GPU that need not be here
    python -m tmoe.warmup                                # every preset

Any number of processes may run it at once, on an empty or a half-written cache: each kernel is compiled once (ops/precompile.py).
Call it before the process group exists, and let no collective wait for it.

next: ops/precompile.py
"""

import argparse
import os
import time

import torch

from tmoe.config import Config
from tmoe.ops.launch import device_facts
from tmoe.ops.precompile import precompile
from tmoe.zoo import presets


def layers(cfg: Config) -> list[tuple]:
    """(T, D, F, E, K, dtype) of every MoE layer that a rank runs under this configuration.

    With expert parallelism a rank holds E / ep experts, and the rows that arrive carry their K slots too.
    """
    m, experts = cfg.model, cfg.model.moe
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.train.dtype]
    rows = cfg.train.batch * cfg.train.seq
    return [(rows, m.dim, experts.ffn_dim, experts.experts // cfg.parallel.ep, experts.top_k, dtype)]


def local_arch() -> str | None:
    """The architecture of this machine's GPU, None without one."""
    return device_facts(torch.device("cuda", 0))[0] if torch.cuda.is_available() else None


def warm(cfgs: list[Config], arch: str | None = None, processes: int = 0) -> tuple[int, int]:
    """Compiles what the configurations need for arch (default: this machine's GPU); returns (compiled here, needed)."""
    arch = arch or local_arch()
    if arch is None:
        return 0, 0
    return precompile(arch, [layer for cfg in cfgs for layer in layers(cfg)], processes or min(8, os.cpu_count() or 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="*", help=f"any of {', '.join(presets())}; default: all")
    parser.add_argument("--arch", help="cuda:90, cuda:80, hip:gfx942, ...; default: the GPU of this machine")
    parser.add_argument("--processes", type=int, default=0, help="default: one a core, at most 8")
    args = parser.parse_args()
    if unknown := [name for name in args.preset if name not in presets()]:
        parser.error(f"preset {unknown[0]!r}: valid are {', '.join(presets())}")
    if args.arch is None and local_arch() is None:
        print("no GPU here: nothing to compile (--arch compiles for one that is elsewhere)")
        return
    start = time.perf_counter()
    compiled, needed = warm([presets()[name] for name in args.preset or presets()], args.arch, args.processes)
    print(f"compiled {compiled} of {needed} kernels in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
