"""Compiling kernels for chips that are not here, and what they need there."""

import contextlib
import io
import math
import re
from typing import NamedTuple

# their grid is programs an SM
PERSISTENT = ("specialised", "few_rows", "up_kernel", "rows_kernel", "dh_kernel", "dw_kernel")


class Chip(NamedTuple):
    """What one SM or compute unit has."""

    shared: int  # bytes a program may have
    shared_all: int  # bytes all its programs share, each with `reserved` of the system's
    reserved: int
    registers: int  # of 32 bits
    lanes: int


CHIPS = {
    "cuda:90": Chip(232448, 233472, 1024, 65536, 32), "cuda:80": Chip(166912, 167936, 1024, 65536, 32),
    "hip:gfx942": Chip(65536, 65536, 0, 4 * 512 * 64, 64),
}  # fmt: skip


class Binary(NamedTuple):
    """What a compiled kernel takes."""

    name: str
    programs: int  # that are to be resident on an SM, as its launch says
    threads: int
    shared: int  # bytes
    registers: int  # of a thread
    spilled: int  # bytes (NVIDIA), registers (AMD)
    serialised: bool  # wgmma that waits for itself


def measure(arch, name, compile, reports):
    """Compile; reports keeps what ptxas said about each binary, for equal ones under another key."""
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = compile()
    report = reports.setdefault(compiled.metadata.hash, log.getvalue())
    programs = compile.keywords["grid"][0] if name in PERSISTENT else 1
    if arch.startswith("hip"):
        code = compiled.asm["amdgcn"]
        field = lambda key: int(re.search(rf"\.{key}:\s+(\d+)", code).group(1))  # noqa: E731
        registers = math.ceil(field("vgpr_count") / 8) * 8
        spilled = field("vgpr_spill_count")  # scalar registers spill into lanes of vector registers
        return Binary(
            name,
            programs,
            64 * compiled.metadata.num_warps,
            compiled.metadata.shared,
            registers,
            spilled,
            False,
        )
    threads = math.prod(
        map(int, re.search(r"\.reqntid (\d+)(?:, (\d+))?(?:, (\d+))?", compiled.asm["ptx"]).groups("1"))
    )
    spilled = sum(map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report).groups()))
    # dealt out in eights
    registers = math.ceil(int(re.search(r"Used (\d+) registers", report).group(1)) / 8) * 8
    return Binary(
        name, programs, threads, compiled.metadata.shared, registers, spilled, "serialized" in report
    )


def assert_fits(binary, chip):
    assert binary.spilled == 0 and not binary.serialised, binary
    assert binary.shared <= chip.shared, binary
    assert binary.programs * (binary.shared + chip.reserved) <= chip.shared_all, binary
    assert (
        binary.registers <= 256 and binary.programs * binary.threads * binary.registers <= chip.registers
    ), binary
