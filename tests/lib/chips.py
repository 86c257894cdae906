"""Compiles kernels for chips that are not here, and checks that the binaries fit on them.

`measure` reads ptxas's report and the metadata of AMD code; no driver is asked.
"""

import contextlib
import functools
import io
import math
import re
from typing import NamedTuple

# Kernels whose grid is programs an SM, all resident at once; of others one program must fit.
PERSISTENT = ("specialised", "few_rows", "up_kernel", "rows_kernel", "dh_kernel", "dw_kernel")


class Chip(NamedTuple):
    """What one SM or compute unit has."""

    shared: int  # bytes a program may have
    shared_all: int  # bytes all its programs share, each with `reserved` of the system's
    reserved: int
    registers: int  # of 32 bits
    lanes: int


CHIPS = {
    "cuda:90": Chip(232448, 233472, 1024, 65536, 32),
    "cuda:80": Chip(166912, 167936, 1024, 65536, 32),
    "hip:gfx942": Chip(65536, 65536, 0, 4 * 512 * 64, 64),
}


class Binary(NamedTuple):
    """What a compiled kernel takes."""

    name: str
    programs: int  # that are to be resident on an SM, as its launch says
    threads: int
    shared: int  # bytes
    registers: int  # of a thread
    spilled: int  # bytes (NVIDIA), registers (AMD)
    serialised: bool  # wgmma that waits for itself


def measure(arch: str, name: str, compile: functools.partial, reports: dict[str, str]) -> Binary:
    """Compiles a launch of the kernel `name` and returns what the binary takes.

    compile: the call that compiles it, as precompile's visitors get it, with the launch's grid.
    reports: what ptxas said, by the binary's hash. It keeps the text for equal binaries under another key,
    which are not compiled again.
    """
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = compile()
    report = reports.setdefault(compiled.metadata.hash, log.getvalue())
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
    registers = math.ceil(used / 8) * 8  # dealt out in eights
    return Binary(name, programs, threads, shared, registers, spilled, "serialized" in report)


def assert_fits(binary: Binary, chip: Chip) -> None:
    """Nothing spills or waits for itself, and the resident programs have room for memory and registers."""
    assert binary.spilled == 0 and not binary.serialised, binary
    assert binary.shared <= chip.shared, binary
    assert binary.programs * (binary.shared + chip.reserved) <= chip.shared_all, binary
    registers = binary.programs * binary.threads * binary.registers
    assert binary.registers <= 256 and registers <= chip.registers, binary
