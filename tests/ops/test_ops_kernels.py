"""Every kernel configuration that ships, compiled without a GPU: registers, spills and shared memory.

All binaries of all tests are compiled once, by two processes, where Triton's cache lacks them. What a binary
takes is read from ptxas's report and from the metadata of the AMD code; no driver is asked.

next: test_ops_gpu.py
"""

import itertools
import multiprocessing
import re

import pytest
import torch
from chips import CHIPS, OTHERS, assert_fits, measure
from tiers import slow_but

from tmoe.ops.experts import gpu, table
from tmoe.ops.experts.op import trace
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.router.topk import trace as trace_router

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
CASES = {  # name: (architecture, D, F, dtype): the fast path, float32, and widths that fit no tile
    f"{arch}-{D}x{F}-{str(dtype)[6:]}": (arch, D, F, dtype)
    for arch, D, F, dtype in [
        ("cuda:90", 2048, 768, bf16), ("cuda:90", 2048, 768, fp16), ("cuda:90", 512, 192, fp32),
        ("cuda:90", 200, 72, bf16),
        ("cuda:90", 200, 72, fp32), ("cuda:80", 200, 72, fp32), ("hip:gfx942", 200, 72, fp32),
        ("cuda:80", 2048, 768, bf16), ("cuda:80", 200, 72, fp16), ("cuda:80", 512, 192, fp32),
        ("hip:gfx942", 2048, 768, bf16), ("hip:gfx942", 200, 72, bf16), ("hip:gfx942", 512, 192, fp32),
    ]
}  # fmt: skip
TUNED = {f"{kernel}-{tuple(cfg)}": (kernel, cfg) for kernel, *_, cfg in table.entries("cuda:90")}


# chips whose binaries have the sizes of another's, and less room
SAME_SIZES = {"cuda:80": ("cuda:86", "cuda:89")}


T, E, K = 4096, 32, 4
FEW = (256, 512, 1024)  # tokens with which few.py's kernel runs, in each of its cuts


def test_a_dimension_of_one_element_may_have_any_stride():
    """torch calls such a tensor contiguous; the copy engine takes only strides of whole 16 bytes."""
    row = torch.empty(64, 1, dtype=bf16, device="meta").t()
    one = torch.empty(64, 64, 1, dtype=bf16, device="meta").permute(2, 0, 1)
    assert row.is_contiguous() and one.is_contiguous() and row.stride(0) == one.stride(0) == 1
    with compile_only("cuda:90", lambda name, key, compile: compile()):
        gpu.grouped_mm(
            row,
            torch.empty(2, 64, 64, dtype=bf16, device="meta"),
            torch.empty(2, dtype=torch.int32, device="meta"),
        )
        gpu.grouped_mm(row, one, torch.empty(1, dtype=torch.int32, device="meta"))


def test_a_gathered_gradient_reads_no_column_behind_a_row():
    """A tile of 128 columns of rows of 320 numbers: after the last token's row there may be no memory.

    Copies are of 16 bytes all the same, and whole tiles are not asked for.
    """
    copies, edges = [], []

    def visit(name, key, compile):
        if name == "specialised" and "'dw'" in key:
            edges.append(key.endswith("True)"))
            ptx = compile().asm["ptx"] if edges[-1] else ""
            sizes = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], (\w+), (\S+);", ptx)
            copies.append({(size, width.startswith("%")) for size, width in sizes})

    with compile_only("cuda:90", visit):
        trace(8192, 320, 256, 16, 4, bf16)
        trace(8192, 512, 256, 16, 4, bf16)
    assert edges == [True, True, False, False]
    assert copies[:2] == [{("0x10", True)}] * 2  # whole vectors, of which none or all is read


def main_path(arch, D, F, dtype, visit):
    """Visits all that softmax_topk, moe_mlp and grouped_mm launch, forward and backward."""
    with compile_only(arch, visit):
        trace(T, D, F, E, K, dtype, summed=True)
        for few in FEW:
            trace(few, D, F, E, K, dtype)
        trace_router(T, E, K, False)
        trace_router(T, E, K, True)
        x = torch.empty(T, D, dtype=dtype, device="meta")
        b = torch.empty(E, F, D, dtype=dtype, device="meta")
        ends = torch.empty(E, device="meta", dtype=torch.int32)
        gpu.grouped_mm_backward(gpu.grouped_mm(x, b, ends), x, b, ends)


def variants(arch, D, F, dtype, visit):
    """Visits what moe_mlp launches with bias, with gpt-oss's activation and in rounds."""
    with compile_only(arch, visit):
        for tokens in (T, *FEW, 2 * FEW[-1]):  # half of the pairs in a window
            how = dict(pairs=tokens * K // 2, activation="clamped", biased=True)
            trace(tokens, D, F, E, K, dtype, **how, summed=tokens == T)


def everything(visit):
    """Calls visit(test's name, architecture)(kernel's name, key, compile) for every launch of every test."""
    for name, (arch, *layer) in CASES.items():
        main_path(arch, *layer, visit(name, arch))
        variants(arch, *layer, visit(f"{name} variants", arch))
    pick = gpu.pick
    for name, (kernel, cfg) in TUNED.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                gpu, "pick", lambda k, *a, kernel=kernel, cfg=cfg: cfg if k == kernel else pick(k, *a)
            )
            main_path("cuda:90", 2048, 768, bf16, visit(name, "cuda:90"))
            variants("cuda:90", 2048, 768, bf16, visit(f"{name} variants", "cuda:90"))


def half(part):
    """One process's half of the binaries, as {(architecture, key): Binary}."""
    found, seen = {}, {}

    def visit(test, arch):
        def see(name, key, compile):
            if seen.setdefault((arch, key), len(seen)) % 2 == part and (arch, key) not in found:
                found[arch, key] = measure(arch, name, compile)

        return see

    everything(visit)
    return found


@pytest.fixture(scope="module")
def binaries():
    """{test's name: [Binary]}."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        one, other = pool.map(half, [0, 1], chunksize=1)
    found = {**one, **other}
    of = {}

    def visit(test, arch):
        return lambda name, key, compile: of.setdefault(test, {}).setdefault(key, found[arch, key])

    everything(visit)
    return {name: list(keys.values()) for name, keys in of.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_portable_configurations_fit(name, binaries):
    arch, D, _, dtype = CASES[name]
    chips = [CHIPS[arch], *(OTHERS[other] for other in SAME_SIZES.get(arch, ()))]
    for binary, chip in itertools.product(binaries[name] + binaries[f"{name} variants"], chips):
        assert_fits(binary, chip)
    fast = arch == "cuda:90" and dtype != fp32 and D % 64 == 0
    names, others = ([binary.name for binary in binaries[which]] for which in (name, f"{name} variants"))
    assert ("specialised" in names) == fast
    assert names.count("few_rows") == fast * 2 * len(FEW)  # H kept, and not
    assert others.count("few_rows") == fast * (2 * len(FEW) + 1)  # and, in one of the cuts, without a guess


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TUNED)
def test_tuned_configurations_fit(name, binaries):
    cfg = TUNED[name][1]
    for binary in binaries[name] + binaries[f"{name} variants"]:
        assert_fits(binary, CHIPS["cuda:90"])
    assert cfg.ctas in {binary.programs for binary in binaries[name]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "activation"),
    [
        *[("cuda:90", name) for name in ("clamped_silu:limit=5", "geglu", "relu2", "gelu")],
        ("cuda:80", "relu"),
        *[("hip:gfx942", name) for name in ("clamped_silu", "geglu", "gelu")],
    ],
)
def test_other_activations_fit(arch, activation):
    """The kernels that compute one; on Hopper those for many rows and those for few."""
    found = {}

    def visit(name, key, compile):
        kinds = ("'up'", "'ungated'", "'dh'")
        asked = name == "specialised" and any(kind in key for kind in kinds)
        if (asked or name in ("up_kernel", "dh_kernel", "few_rows")) and key not in found:
            found[key] = measure(arch, name, compile)

    with compile_only(arch, visit):
        for tokens in (T, FEW[0])[: 1 + (arch == "cuda:90")]:
            trace(tokens, 2048, 768, E, K, bf16, activation=activation, biased=True)
    assert len(found) >= 3
    for binary in found.values():
        assert_fits(binary, CHIPS[arch])


def test_sums_in_fp32_compile_for_blackwell():
    """triton 3.6 fails at a branch after a product, which adds to a sum."""
    found = {}

    def visit(name, key, compile):
        if name == "dw_kernel" and key not in found:
            found[key] = measure("cuda:100", name, compile)

    with compile_only("cuda:100", visit):
        trace(T, 200, 72, E, K, bf16, pairs=T * K // 2, summed=True)
    assert len(found) >= 8  # new, write, add, and windows after the first, of both matrices
    for binary in found.values():
        assert binary.shared <= OTHERS["cuda:100"].shared and binary.spilled <= 8, binary


@pytest.mark.parametrize(
    "chip", slow_but(["hip:gfx942"], ["cuda:90", "hip:gfx942", "hip:gfx950", "hip:gfx90a"])
)
def test_fp32_compiles_where_tf32_is_allowed_and_a_chip_has_none(chip, monkeypatch):
    monkeypatch.setattr(gpu, "tf32", lambda: True)
    wanted = {}
    with compile_only(chip, lambda name, key, compile: wanted.setdefault(name, compile)):
        trace(64, 128, 64, 4, 2, torch.float32)
        for name in ("up_kernel", "dw_kernel"):
            wanted[name]()


def test_experts_beyond_32_bits_are_refused_where_kernels_would_miss_them():
    with compile_only("cuda:90", lambda *launch: None):
        trace(4, 16384, 65536, 2, 2, bf16)
        with pytest.raises(ValueError, match="D=16384, F=65536"):
            trace(4, 16384, 65536, 2, 2, fp32)


def test_the_rule_between_entries_prefers_near_shapes():
    entries = table.entries("cuda:90")
    assert {e[0] for e in entries} == set(table.KERNELS)
    for kernel, D, F, rows, cfg in entries:
        assert table.pick(kernel, "cuda:90", torch.bfloat16, D, F, rows, True) == cfg
    assert table.pick("up", "cuda:90", torch.float32, 2048, 768, 2048, False).outs == 0
