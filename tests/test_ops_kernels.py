"""Every kernel configuration that ships, compiled for its GPU without one: registers, spills and shared memory.

next: test_ops_gpu.py
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from tmoe.ops import gpu, table
from tmoe.ops.launch import compile_only
from tmoe.ops.precompile import trace

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
SHARED = {"cuda:90": 232448, "cuda:80": 166912, "hip:gfx942": 65536}  # bytes a block may have
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def spilled(compiled, arch, tmp_path):
    """Bytes (NVIDIA) or registers (AMD) that the compiled kernel spills."""
    if arch.startswith("hip"):
        return int(re.search(r"\.vgpr_spill_count:\s+(\d+)", compiled.asm["amdgcn"]).group(1))
    (tmp_path / "k.ptx").write_text(compiled.asm["ptx"])
    sm = {"cuda:90": "sm_90a", "cuda:80": "sm_80"}[arch]
    cmd = [PTXAS, "-v", f"--gpu-name={sm}", tmp_path / "k.ptx", "-o", tmp_path / "k.cubin"]
    log = subprocess.run(cmd, capture_output=True, text=True, check=True).stderr
    assert "serialized" not in log, log  # wgmma that waits for itself
    return sum(map(int, SPILL.search(log).groups()))


def kernels_of(arch, T, D, F, E, K, dtype):
    """[(kernel's name, compiled)] of one forward and backward of moe_mlp, and of grouped_mm."""
    found = []
    with compile_only(arch, lambda name, key, compile: found.append((name, compile()))):
        trace(T, D, F, E, K, dtype)
        trace(T, D, F, E, K, dtype, pairs=T * K // 2, activation="clamped", biased=True)
        x = torch.empty(T, D, dtype=dtype, device="meta")
        down = torch.empty(E, D, F, dtype=dtype, device="meta")
        ends = torch.empty(E, device="meta", dtype=torch.int32)
        gpu.grouped_mm_backward(gpu.grouped_mm(x, down.mT.contiguous(), ends), x, down.mT.contiguous(), ends)
    return found


CASES = [  # (architecture, D, F, dtype): the fast path, float32, and widths that fit no tile
    ("cuda:90", 2048, 768, torch.bfloat16), ("cuda:90", 2048, 768, torch.float16), ("cuda:90", 512, 192, torch.float32),
    ("cuda:90", 200, 72, torch.bfloat16), ("cuda:80", 2048, 768, torch.bfloat16), ("cuda:80", 200, 72, torch.float16),
    ("cuda:80", 512, 192, torch.float32), ("hip:gfx942", 2048, 768, torch.bfloat16), ("hip:gfx942", 200, 72, torch.bfloat16),
    ("hip:gfx942", 512, 192, torch.float32),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}x{c[2]}-{str(c[3])[6:]}")
def test_compiles_without_spills(case, tmp_path):
    arch, D, F, dtype = case
    found = kernels_of(arch, 4096, D, F, 32, 4, dtype)
    for name, compiled in found:
        assert compiled.metadata.shared <= SHARED[arch], name
        assert spilled(compiled, arch, tmp_path) == 0, name
    fast = any(name == "specialised" for name, _ in found)
    assert fast == (arch == "cuda:90" and dtype != torch.float32 and D % 64 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("config", sorted({(e[0], e[4]) for e in table.entries("cuda:90")}), ids=str)
def test_tuned_configuration_compiles_without_spills(config, tmp_path, monkeypatch):
    kernel, cfg = config
    pick = gpu.pick
    monkeypatch.setattr(gpu, "pick", lambda k, *a: cfg if k == kernel else pick(k, *a))
    for name, compiled in kernels_of("cuda:90", 4096, 2048, 768, 32, 4, torch.bfloat16):
        assert compiled.metadata.shared <= SHARED["cuda:90"], name
        assert spilled(compiled, "cuda:90", tmp_path) == 0, name


def test_the_rule_between_entries_prefers_near_shapes():
    entries = table.entries("cuda:90")
    assert {e[0] for e in entries} == set(table.KERNELS)
    for kernel, D, F, rows, cfg in entries:
        assert table.pick(kernel, "cuda:90", torch.bfloat16, D, F, rows, True) == cfg
    assert table.pick("up", "cuda:90", torch.float32, 2048, 768, 2048, False).outs == 0
