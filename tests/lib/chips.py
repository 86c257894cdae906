"""Compiles kernels for chips that this machine lacks, and checks that the binaries fit on them.

`measure` reads ptxas's report and the metadata of AMD code; no GPU driver is needed.
"""

import contextlib
import functools
import io
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs

# Kernels launched with several resident programs for each SM; for every other kernel one program must fit.
PERSISTENT = ("specialised", "few_rows", "up_kernel", "rows_kernel", "dh_kernel", "dw_kernel")


class Chip(NamedTuple):
    """The resources of one SM or compute unit."""

    shared: int  # most bytes of shared memory of one program
    shared_all: int  # bytes that all programs share, each with `reserved` bytes for the system
    reserved: int
    registers: int  # of 32 bits
    lanes: int


CHIPS = {
    "cuda:90": Chip(232448, 233472, 1024, 65536, 32),
    "cuda:80": Chip(166912, 167936, 1024, 65536, 32),
    "hip:gfx942": Chip(65536, 65536, 0, 4 * 512 * 64, 64),
}
# chips to which the portable kernels of the experts are held as well
OTHERS = {
    "cuda:86": Chip(101376, 102400, 1024, 65536, 32),
    "cuda:89": Chip(101376, 102400, 1024, 65536, 32),
    "cuda:100": Chip(232448, 233472, 1024, 65536, 32),
}


class Binary(NamedTuple):
    """The resources that a compiled kernel uses."""

    name: str
    programs: int  # number of programs that its launch expects on an SM at once
    threads: int
    shared: int  # bytes
    registers: int  # per thread
    spilled: int  # bytes (NVIDIA), registers (AMD)
    serialised: bool  # whether ptxas serialised wgmma, so that each waits for the previous one


def measure(arch: str, name: str, compile: functools.partial) -> Binary:
    """Compiles a launch of the kernel `name` and returns the resources that the binary uses.

    compile: the call that compiles it, in the form that precompile's visitors receive, with the launch's
        grid.

    A binary that is in Triton's cache is not compiled again: the cache's key has the source of the kernel and
    of all that it calls, the options, and the versions of Triton and of the assembler. ptxas's report of a
    binary is kept beside it.
    """
    compiled, said = _compiled(compile)
    kept = Path(knobs.cache.dir, f"{compiled.metadata.hash}.ptxas")
    if not said and arch.startswith("cuda") and not kept.exists():  # another test compiled it, and kept none
        compile.func.__self__.device_caches.clear()  # the binaries that this process holds
        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            compiled, said = _compiled(compile)
    if said:
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(said)
        partial.replace(kept)
    report = said or (kept.read_text() if arch.startswith("cuda") else "")
    programs = compile.keywords["grid"][0] if name in PERSISTENT else 1
    shared = compiled.metadata.shared

    if arch.startswith("hip"):
        code = compiled.asm["amdgcn"]
        field = lambda key: int(re.search(rf"\.{key}:\s+(\d+)", code).group(1))  # noqa: E731
        threads = 64 * compiled.metadata.num_warps
        registers = math.ceil(field("vgpr_count") / 8) * 8
        spilled = field("vgpr_spill_count")  # scalar registers spill into lanes of vector registers
        return Binary(name, programs, threads, shared, registers, spilled, False)

    block = re.search(r"\.reqntid (\d+)(?:, (\d+))?(?:, (\d+))?", compiled.asm["ptx"]).groups("1")
    threads = math.prod(map(int, block))
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report).groups()
    spilled = sum(map(int, spills))
    used = int(re.search(r"Used (\d+) registers", report).group(1))
    registers = math.ceil(used / 8) * 8  # registers are allocated in eights
    return Binary(name, programs, threads, shared, registers, spilled, "serialized" in report)


def _compiled(compile: functools.partial) -> tuple[Any, str]:
    """The binary, and ptxas's report; "" if the binary was in a cache or is of an AMD GPU."""
    with contextlib.redirect_stdout(io.StringIO()) as log, knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True
        return compile(), log.getvalue()


def assert_fits(binary: Binary, chip: Chip) -> None:
    """Asserts that nothing spills or is serialised, and that memory and registers suffice for all."""
    assert binary.spilled == 0 and not binary.serialised, binary
    assert binary.shared <= chip.shared, binary
    assert binary.programs * (binary.shared + chip.reserved) <= chip.shared_all, binary
    registers = binary.programs * binary.threads * binary.registers
    assert binary.registers <= 256 and registers <= chip.registers, binary
