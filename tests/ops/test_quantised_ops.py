"""Products with quantised weights: the definition on a CPU, kernels in the interpreter, and chips.

next: tests/generate/test_quantised_models.py
"""

import os
import struct
from functools import partial

import pytest
import torch
from chips import CHIPS, assert_fits, measure
from interpreter import repair_interpreter
from tiers import slow_but
from torch import Tensor
from triton import knobs

from tmoe.base.quantised import NF4, dequantise, quantise, stored
from tmoe.ops import reference
from tmoe.ops.experts import gpu as experts_gpu
from tmoe.ops.experts.adapted import Adapters, moe_mlp_adapted
from tmoe.ops.experts.cpu import ExpertWeights
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.quantised import gpu
from tmoe.ops.quantised.adapted import Nf4Call, few_rows
from tmoe.ops.quantised.gpu import KINDS, Matrix
from tmoe.ops.quantised.kernels import NF4_SCALE, instructions, nf4_instructions
from tmoe.ops.quantised.op import quantised_linear, quantised_moe_mlp, quantised_values

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_decoding_kernels")
compiled = pytest.mark.skipif(INTERPRETED, reason="compiles")
fp32, bf16 = torch.float32, torch.bfloat16
GPT_OSS = "clamped:alpha=1.702,limit=7"


@pytest.fixture(scope="module", autouse=INTERPRETED)
def _interpreter():
    repair_interpreter()
    facts = experts_gpu.device_facts
    gpu.device_facts = experts_gpu.device_facts = lambda device: ("cuda:90", 3, False)
    yield
    gpu.device_facts = experts_gpu.device_facts = facts


def matrix_of(weight: Tensor, kind: str) -> Matrix:
    return Matrix(kind, tuple(weight.shape), quantise(weight, kind))


class Layer:
    """Experts of a kind, their values, and rows: some slots without an expert, one expert with most rows."""

    def __init__(self, kind: str, T: int, D: int, F: int, E: int, K: int, activation="swiglu", dtype=fp32):
        torch.manual_seed(0)
        halves = 1 if activation == "relu2" else 2
        shapes = (E, halves * F, D), (E, D, F)
        parts = [quantise(torch.randn(shape) / shape[2] ** 0.5, kind) for shape in shapes]
        self.matrices = [Matrix(kind, shape, part) for part, shape in zip(parts, shapes, strict=True)]
        self.values = [dequantise(part, kind, shape) for part, shape in zip(parts, shapes, strict=True)]
        self.x = torch.randn(T, D).to(dtype)
        self.ids = torch.randint(-1, E, (T, K)).to(torch.int32)
        self.ids[: 2 * T // 3, 0] = E - 1
        self.weights = torch.rand(T, K)
        self.bias = torch.randn(E, halves * F).to(dtype)
        self.activation = activation

    def want(self) -> Tensor:
        bias = self.bias.float()
        return reference.moe_mlp(self.x.float(), *self.values, self.weights, self.ids, bias, self.activation)

    def call(self, run=quantised_moe_mlp) -> Tensor:
        return run(self.x, *self.matrices, self.weights, self.ids, self.bias, self.activation)


def kernels(x, gate_up, down, weights, ids, bias, activation) -> Tensor:
    return gpu.moe_mlp(x, gate_up, down, (weights, ids), bias, activation, ids.numel())


@compiled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["swiglu", GPT_OSS, "relu2"])
def test_a_layer_is_that_of_its_values(kind, activation):
    layer = Layer(kind, 30, 136, 72, 5, 2, activation)
    torch.testing.assert_close(layer.call(), layer.want(), rtol=1e-5, atol=1e-5)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_one_matrix(kind):
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 200), torch.randn(24)
    matrix = matrix_of(weight, kind)
    values = quantised_values(matrix, fp32)
    assert torch.equal(values, dequantise(matrix.parts, kind, (24, 200)))
    for shape in ((200,), (0, 200), (2, 3, 200)):
        x = torch.randn(shape)
        want = torch.nn.functional.linear(x, values, bias)
        torch.testing.assert_close(quantised_linear(x, matrix, bias), want)


@compiled
def test_opcheck_and_a_compiled_graph():
    layer = Layer("int4", 4, 128, 32, 3, 2)
    up, down = (list(matrix.parts) for matrix in layer.matrices)
    routed = layer.weights, layer.ids, layer.bias, "swiglu", 8
    tests = dict(test_utils=("test_schema", "test_faketensor"))
    args = layer.x, up, down, "int4", [3, 64, 32], *routed
    torch.library.opcheck(torch.ops.tmoe.quantised_moe_mlp.default, args, **tests)
    one = [t[0].contiguous() for t in up]
    args = layer.x, one, None, "int4", 64
    torch.library.opcheck(torch.ops.tmoe.quantised_linear.default, args, **tests)
    run = torch.compile(layer.call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(), layer.want(), rtol=1e-5, atol=1e-5)


@compiled
def test_refusals():
    matrix, x = matrix_of(torch.randn(4, 200), "int4"), torch.randn(2, 200)
    with pytest.raises(ValueError, match=r"kind: got 'mxfp4', valid is int8 or int4 or fp8 or nf4"):
        quantised_linear(x, matrix._replace(kind="mxfp4"))
    with pytest.raises(ValueError, match=r"weight\.codes: got .*uint8"):
        quantised_linear(x, matrix._replace(kind="int8"))
    with pytest.raises(ValueError, match=r"weight: got shape \(4, 200\), valid is \(4, 300\)"):
        quantised_linear(torch.randn(2, 300), matrix)
    with pytest.raises(ValueError, match=r"weight\.codes: got .*128.*, valid is .*192"):
        quantised_linear(torch.randn(2, 300), matrix._replace(shape=(4, 300)))
    with pytest.raises(ValueError, match=r"weight\.parts: got 2, valid is .*'offset'"):
        quantised_linear(x, matrix._replace(kind="nf4"))
    with pytest.raises(ValueError, match=r"bias: got"):
        quantised_linear(x, matrix, torch.ones(3))
    layer = Layer("int8", 4, 128, 32, 3, 2)
    with pytest.raises(ValueError, match=r"gate_up: got 64 rows, valid is 32, for relu2"):
        quantised_moe_mlp(layer.x, *layer.matrices, layer.weights, layer.ids, None, "relu2")
    layer.matrices[1] = layer.matrices[1]._replace(kind="fp8")
    with pytest.raises(ValueError, match="down"):
        layer.call()


@compiled
def test_an_expert_of_nf4_whose_blocks_run_across_experts():
    layer = Layer("nf4", 4, 17, 9, 3, 2)
    for matrix, values in zip(layer.matrices, layer.values, strict=True):
        for e in range(3):
            assert torch.equal(gpu.expert_of_nf4(matrix, e, fp32), values[e])


# ---- PTX ----


def bf16_of(bits: int) -> float:
    return struct.unpack("f", struct.pack("I", bits << 16))[0]


def halves(a: int, b: int, c: int) -> int:
    """fma.rn.bf16x2 where a b + c is exact in bf16, as it must be here."""
    out = 0
    for shift in (0, 16):
        x, y, z = (bf16_of(t >> shift & 0xFFFF) for t in (a, b, c))
        (bits,) = struct.unpack("I", struct.pack("f", x * y + z))
        assert bits & 0xFFFF == 0
        out |= bits >> 16 << shift
    return out


def ran(text: str, word: int, given: str = "$2", results: tuple[str, ...] = ("$0", "$1")) -> list[float]:
    """The bf16 numbers that PTX computes from a word of four codes."""
    known = {given: word}
    value = lambda name: known[name] if name in known else int(name, 0)  # noqa: E731
    for line in text.strip(" {}").split(";"):
        op, _, rest = line.strip().partition(" ")
        if not op or op == ".reg":
            continue
        out, *names = (name.strip() for name in rest.split(","))
        args = [value(name) for name in names]
        if op == "prmt.b32":
            every = (args[0] | args[1] << 32).to_bytes(8, "little")
            result = sum(every[args[2] >> 4 * i & 15] << 8 * i for i in range(4))
        elif op == "lop3.b32":
            assert args[3] == 0xEA
            result = args[0] & args[1] | args[2]
        elif op == "fma.rn.bf16x2":
            result = halves(*args[:3])
        else:
            result = {
                "mov.b32": lambda a: a,
                "shr.u32": lambda a, n: a >> n,
                "and.b32": lambda a, b: a & b,
            }[op](*args)
        known[out] = result
    return [bf16_of(known[name] >> shift & 0xFFFF) for name in results for shift in (0, 16)]


@compiled
@pytest.mark.parametrize("kind", ["int8", "fp8", "low", "high"])
def test_instructions_convert_every_code(kind):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    want = {
        "int8": codes.view(torch.int8).float(),
        "fp8": codes.view(torch.float8_e4m3fn).float().nan_to_num(0),
        "low": (codes & 15).float() - 8,
        "high": (codes >> 4).float() - 8,
    }[kind]
    text = instructions.fn(kind) if hasattr(instructions, "fn") else instructions(kind)
    for code in range(256):
        if kind == "fp8" and code & 0x7F == 0x7F:
            continue  # NaN, which is never stored
        four = [code, (code + 101) % 127, 3, (code * 7) % 127]
        assert ran(text, int.from_bytes(bytes(four), "little")) == [float(want[i]) for i in four]


@compiled
def test_instructions_convert_every_code_of_nf4():
    table = (torch.tensor(NF4) * NF4_SCALE.value).to(bf16).float().tolist()
    for code in range(256):
        four = [code, (code * 37 + 101) % 256, 255 - code, code * 7 % 256]
        found = ran(nf4_instructions(), int.from_bytes(bytes(four), "little"), "$4", ("$0", "$1", "$2", "$3"))
        assert found == [table[c >> 4] for c in four] + [table[c & 15] for c in four]


@compiled
def test_rounded_numbers_of_nf4_have_no_mean_error():
    """A sum with positive rows of x adds up the mean error of the codes, as in a layer of gpt-oss."""
    torch.manual_seed(0)
    matrix = matrix_of(torch.randn(4096, 256), "nf4")
    codes = matrix.codes.int()
    often = torch.bincount(torch.cat([codes >> 4, codes & 15]).flatten(), minlength=16).double()
    table, often = torch.tensor(NF4).double(), often / often.sum()
    size = (often @ table**2).sqrt()
    scaled = (table * NF4_SCALE.value).to(bf16).double() / NF4_SCALE.value - table
    assert (often @ scaled).abs() / size < 5e-5 and (often @ scaled**2).sqrt() / size < 1.2e-3
    plain = table.to(bf16).double() - table
    assert (often @ plain).abs() / size > 4e-4


@compiled
def test_no_table_of_nf4_is_read_from_memory_in_a_step():
    """A copy of a number from the table took more time than all else of a product with codes."""
    found = {}
    tile = gpu.tile_of("nf4", 8, 2048, "cuda:90", bf16)
    with compile_only("cuda:90", lambda name, key, compile: found.setdefault(name, compile())):
        gpu.few_rows(torch.empty(8, 2048, dtype=bf16, device="meta"), nf4_of(1, 256, 2048), None, tile)
    ptx = found["few_rows"].asm["ptx"]
    assert ptx.count("prmt.b32") >= 64 and "cp.async.ca" not in ptx and "cp.async.cg" in ptx


# ---- kernels ----

TIMES = [(kind, activation) for kind in KINDS for activation in ("swiglu", GPT_OSS, "relu2")]
WIDTHS = [(136, 72), (128, 64)]


@interpreted
@pytest.mark.parametrize(("kind", "activation"), slow_but(TIMES[1::3], TIMES))
@pytest.mark.parametrize("widths", slow_but([0], [0, 1]))
def test_kernels_are_the_twin(kind, activation, widths):
    """Odd widths need masks and a last group that is not full; an expert has more rows than a row tile.

    NF4's kernels read only widths that its blocks divide.
    """
    layer = Layer(kind, 40, *WIDTHS[widths or kind == "nf4"], 3, 2, activation)
    torch.testing.assert_close(layer.call(kernels), layer.want(), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_an_expert_fill_several_tiles(kind, monkeypatch):
    monkeypatch.setattr(gpu, "FEW_AN_EXPERT", 1000)
    layer = Layer(kind, 100, 64, 32, 2, 2)
    torch.testing.assert_close(layer.call(kernels), layer.want(), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_one_matrix_by_kernels(kind):
    torch.manual_seed(0)
    for W, L in ((24, 192 if kind == "nf4" else 200), (70, 256)):
        matrix = matrix_of(torch.randn(W, L), kind)
        for dtype in (fp32, bf16):
            got = gpu.values(matrix, dtype).float()
            want = dequantise(matrix.parts, kind, (W, L), dtype).float()
            rtol = 0 if dtype == fp32 else 2**-7  # the interpreter cuts bf16
            torch.testing.assert_close(got, want, rtol=rtol, atol=0)
        x, bias = torch.randn(5, L), torch.randn(W)
        want = torch.nn.functional.linear(x, dequantise(matrix.parts, kind, (W, L)), bias)
        torch.testing.assert_close(gpu.linear(x, matrix, bias), want, rtol=1e-5, atol=2e-5)


@interpreted
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (2, 513), (17, 64), (3, 192, 160)], ids=str)
def test_values_of_nf4_have_the_bits_of_torch_whatever_the_shape(shape):
    """Blocks run across rows; the last block and the last byte are not full; several programs."""
    matrix = matrix_of(torch.randn(shape), "nf4")
    assert torch.equal(gpu.values(matrix, fp32), dequantise(matrix.parts, "nf4", shape))


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_a_sum_are_added(kind, parts):
    """Programs sum parts of the length in fp32; the last row tile and the last columns are not full."""
    torch.manual_seed(0)
    W, L, T = 70, 128 * parts, 20
    matrix, x, bias = matrix_of(torch.randn(W, L), kind), torch.randn(T, L), torch.randn(W)
    want = torch.nn.functional.linear(x, dequantise(matrix.parts, kind, (W, L)), bias)
    got = gpu.few_rows(x, matrix, bias, gpu.Tile(64, 16, 64, 4, 2, parts=parts))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def test_a_single_matrix_is_read_once_by_most_multiprocessors():
    """On Hopper 64 rows are one tile, and the length has two parts if the columns have few tiles."""
    for kind in KINDS:
        for W, L, parts in ((5120, 2048, 2), (2048, 4096, 2), (2048, 768, 1), (151936, 2048, 1)):
            tiles = [gpu.in_parts(kind, rows, W, L, 132) for rows in (1, 16, 17, 64, 128)]
            assert {tile.parts for tile in tiles} == {parts}
            assert [tile.BM for tile in tiles] == [16, 16, 64, 64, 64]


@interpreted
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nf4"])
def test_every_code_has_its_number(kind):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)[None]
    if kind == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    width = 512 if kind == "int4" else 256
    (_, _, dtype), (_, shape, scale) = stored(kind, (1, width))
    matrix = Matrix(kind, (1, width), (codes.view(dtype), torch.ones(shape, dtype=scale)))
    assert torch.equal(gpu.values(matrix, fp32), dequantise(matrix.parts, kind, (1, width)))


@interpreted
@pytest.mark.parametrize("adapted", ["both", "gate_up", "down", "none"])
def test_few_rows_with_adapters_on_nf4(adapted):
    """Kernels read the codes, and the adapters' products are added between them."""
    layer = Layer("nf4", 20, 128, 64, 3, 2)
    E, r = 3, 2
    up = torch.randn(E, r, 128) / 11, torch.randn(E, 128, r)
    down = torch.randn(E, r, 64) / 8, torch.randn(E, 128, r)
    none = None, None
    factors = Adapters(
        *(up if adapted in ("both", "gate_up") else none), *(down if adapted in ("both", "down") else none)
    )
    parts = [t for matrix in layer.matrices for t in matrix.parts]
    routed = layer.weights, layer.ids, layer.bias
    scales = 0.5, 3.0
    call = Nf4Call(layer.x, *parts, *routed, *factors, E, 128, 64, "swiglu", 40, False, *scales)
    experts = ExpertWeights(*layer.values, layer.bias, "swiglu")
    want = moe_mlp_adapted(layer.x, experts, factors, layer.weights, layer.ids, scales=scales)
    torch.testing.assert_close(few_rows(call)[0], want, rtol=1e-4, atol=1e-4)


def nf4_of(E: int, W: int, L: int) -> Matrix:
    parts = (torch.empty(s, dtype=t, device="meta") for _, s, t in stored("nf4", (E, W, L)))
    return Matrix("nf4", (E, W, L), tuple(parts))


@compiled
def test_a_maximum_of_nf4_is_rounded_twice_and_values_are_stored_as_vectors():
    """A fused product and sum would give other bits than torch in one of 2^16 values of bf16."""
    found = {}
    with compile_only("cuda:90", lambda name, key, compile: found.setdefault(name, compile())):
        gpu.values(nf4_of(2, 128, 64), bf16)
    ptx = found["nf4_values"].asm["ptx"]
    assert "fma.rn.f32" not in ptx
    assert "mul.rn.f32" in ptx and "add.rn.f32" in ptx
    assert "st.global.v4.b32" in ptx and "st.global.b16" not in ptx


@compiled
def test_a_second_call_copies_nothing_from_the_host(monkeypatch):
    """In a CUDA graph a copy from the host is an error; the first call of a step is not captured."""
    monkeypatch.setattr(gpu, "launch", lambda *args, **how: None)
    matrix = matrix_of(torch.randn(6, 10), "nf4")
    gpu.values(matrix, fp32)
    monkeypatch.setattr(torch, "tensor", None)
    gpu.values(matrix, fp32)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(("r", "q"), [(1, 8), (8, 0), (0, 1), (24, 3)])
def test_a_decode_step_with_adapters_on_nf4_fits_on_hopper(r, q):
    """Narrow products have hopper's tiles, the products with b are those of chips without descriptors."""
    E, D, width, T, K = 128, 2048, 768, 64, 8
    new = partial(torch.empty, dtype=bf16, device="meta")
    pairs = [(width * 2, D), (D, width)]
    factors = [
        t
        for n, (out, inner) in zip((r, q), pairs, strict=True)
        for t in ((new(E, n, inner), new(E, out, n)) if n else (None, None))
    ]
    matrices = nf4_of(E, 2 * width, D), nf4_of(E, D, width)
    routed = torch.empty(T, K, device="meta"), torch.empty(T, K, dtype=torch.int32, device="meta")
    parts = [t for matrix in matrices for t in matrix.parts]
    call = Nf4Call(
        new(T, D), *parts, *routed, None, *factors, E, 2 * width, width, "swiglu", T * K, False, 1, 1
    )
    names = []

    def visit(name, key, compile):
        names.append(name)
        if name not in ("place_few", "combine_kernel"):  # of every layer
            assert_fits(measure("cuda:90", name, compile)._replace(programs=1), CHIPS["cuda:90"])

    with compile_only("cuda:90", visit):
        few_rows(call)
    assert names.count("few_rows") == 2 and names.count("narrow_kernel") == bool(r) + bool(q)
    assert names.count("rows_kernel") == bool(r) + bool(q)


@compiled
@pytest.mark.parametrize("kind", slow_but(["int8"], KINDS))
def test_parts_fit_on_hopper_and_start_early(kind):
    """The tiles of few and of many rows, and the kernel that adds the parts."""
    names = []

    def visit(name, key, compile):
        names.append(name)
        assert_fits(measure("cuda:90", name, compile)._replace(programs=1), CHIPS["cuda:90"])
        assert "griddepcontrol.wait" in compile().asm["ptx"]

    parts = (torch.empty(s, dtype=t, device="meta") for _, s, t in stored(kind, (5120, 2048)))
    matrix = Matrix(kind, (5120, 2048), tuple(parts))
    with compile_only("cuda:90", visit):
        for rows in (16, 64):
            x = torch.empty(rows, 2048, dtype=bf16, device="meta")
            gpu.few_rows(x, matrix, x[0].new_empty(5120), gpu.in_parts(kind, rows, 5120, 2048, 132))
    assert names == ["few_rows", "add_parts"] * 2


SHAPES = [(2048, 768, 128, 64, 8), (200, 72, 4, 8, 2), (2880, 2880, 32, 64, 4), (192, 64, 4, 60, 2)]


@compiled
@pytest.mark.parametrize("arch", slow_but(["cuda:90"], CHIPS))
@pytest.mark.parametrize("dtype", slow_but([bf16], [bf16, fp32]), ids=str)
def test_every_kernel_fits_on_the_chips(arch, dtype, monkeypatch, request):
    """The fast tier compiles int4's kernels of the first shape, the slow tier all kinds, shapes and types."""
    whole = request.config.getoption("markexpr") != "not slow"
    monkeypatch.setattr(knobs.nvidia, "dump_ptxas_log", True)
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    names = []

    def visit(name, key, compile):
        if name in ("few_rows", "values", "nf4_values"):
            names.append(name)
            assert_fits(measure(arch, name, compile)._replace(programs=1), CHIPS[arch])

    def empty(kind, *shape):
        parts = (torch.empty(s, dtype=t, device="meta") for _, s, t in stored(kind, shape))
        return Matrix(kind, shape, tuple(parts))

    for D, F, E, T, K in SHAPES if whole else SHAPES[:1]:
        for kind in KINDS if whole else ["int4"]:
            if kind == "nf4" and (D % 64 or F % 64):
                continue
            with compile_only(arch, visit):
                x = torch.empty(T, D, dtype=dtype, device="meta")
                routed = torch.empty(T, K, device="meta"), torch.empty(T, K, dtype=torch.int32, device="meta")
                matrices = empty(kind, E, 2 * F, D), empty(kind, E, D, F)
                gpu.moe_mlp(x, *matrices, routed, None, "swiglu", T * K)
                gpu.linear(x, empty(kind, 2 * D, D), None)
                gpu.values(matrices[1], dtype)
    assert {*names} == ({"few_rows", "values", "nf4_values"} if whole else {"few_rows", "values"})
