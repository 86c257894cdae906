"""Compiles the kernels of a configuration before training, in parallel, so that no rank waits for a compiler.

    python -m tmoe.warmup qwen3-30b-a3b                  # for the GPU of this machine
    python -m tmoe.warmup qwen3-30b-a3b --arch cuda:90   # for a GPU that need not be here
    python -m tmoe.warmup                                # every preset

Any number of processes may run it at once, on an empty or a half-written cache: each kernel is compiled once
(ops/launch/precompile.py).

This file has the flags. It imports what compiles when it runs, so that --help loads no compiler.

next: commands/warmup.py
"""

import re
import time

from tmoe.config.check import ConfigError
from tmoe.config.presets import presets
from tmoe.front import Parser

ARCH = re.compile(r"cuda:(7[025]|8[0679]|90|10[013]|12[01])|hip:gfx(9[0-9a-f]{2}|1[0-2][0-9a-f]{2})")
ARCH_VALID = (
    "must be cuda:NN (a GPU's compute capability from 70 to 121, as cuda:90) or hip:gfxNNN (as hip:gfx942)"
)


def main() -> None:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("preset", nargs="*", help=f"any of {', '.join(presets())}; default: all")
    parser.add_argument("--arch", help="cuda:90, cuda:80, hip:gfx942, ...; default: the GPU of this machine")
    parser.add_argument("--processes", type=int, default=0, help="default: one a core, at most 8")
    args = parser.parse_args()
    if unknown := [name for name in args.preset if name not in presets()]:
        parser.error(f"preset {unknown[0]!r}: valid are {', '.join(presets())}")
    if args.arch is not None and not ARCH.fullmatch(args.arch):
        parser.error(f"--arch={args.arch}: {ARCH_VALID}")
    if args.processes < 0:
        parser.error(f"--processes={args.processes}: must be 0 (one a core, at most 8) or more")
    from tmoe.cli.parse import require_cache_folder
    from tmoe.commands.warmup import local_arch, warm

    if args.arch is None and local_arch() is None:
        print("no GPU here: nothing to compile (--arch compiles for one that is elsewhere)")
        return
    try:
        require_cache_folder()
    except ConfigError as error:
        parser.error(error.spelt("flag"))
    start = time.perf_counter()
    cfgs = [presets()[name] for name in args.preset or presets()]
    compiled, needed = warm(cfgs, args.arch, args.processes)
    print(f"compiled {compiled} of {needed} kernels in {time.perf_counter() - start:.1f} s")
