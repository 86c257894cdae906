"""ops/quantised/fragments.py: its statements on plain tensors against the definition, and chips.

Gluon has no interpreter. So names of Gluon are given meanings on torch tensors, where layouts mean nothing;
that a permutation moves no number between threads is asserted by the compiler.

next: tests/ops/test_quantised_ops.py
"""

import ast
import functools
import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch
from chips import CHIPS, assert_fits, measure
from tiers import slow_but

from tmoe.base.activations import activation
from tmoe.base.quantised import dequantise, quantise, stored
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.quantised import gpu
from tmoe.ops.quantised.gpu import Matrix, Tile
from tmoe.ops.quantised.kernels import instructions

fragments = pytest.importorskip("tmoe.ops.quantised.fragments")
bf16 = torch.bfloat16
KINDS = ["int8", "int4", "fp8"]
text_of = getattr(instructions, "fn", instructions)


class Pointer:
    """Addresses into a tensor."""

    def __init__(self, base, at=0):
        self.base, self.at, self.dtype = base, at, SimpleNamespace(element_ty=base.dtype)

    def __add__(self, more):
        return Pointer(self.base, self.at + more)


def load(pointer, cache_modifier=""):
    found = pointer.base.flatten()[torch.as_tensor(pointer.at)]
    return found if found.ndim else found.clone()


def store(pointer, values, mask):
    pointer.base.view(-1)[pointer.at[mask]] = values[mask]


def assembly(text, constraints, given, dtype, is_pure, pack):
    """The results of PTX on words: halves of 16 bits, or the numbers of four codes."""
    (words,) = given
    if text.startswith("mov"):
        return words.contiguous().view(bf16).view(*words.shape, 2).unbind(-1)
    kind = kinds_of_text()[text]
    codes = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    numbers = {
        "int8": lambda: codes.view(torch.int8),
        "fp8": lambda: codes.view(torch.float8_e4m3fn),
        "low": lambda: (codes & 15).int() - 8,
        "high": lambda: (codes >> 4).int() - 8,
    }[kind]()
    return numbers.to(bf16).unbind(-1)


@functools.cache
def kinds_of_text():
    """The codes that each text of PTX turns into numbers."""
    apart = fragments_of()["apart"]
    return {apart(text_of(kind)): kind for kind in ("int8", "fp8", "low", "high")}


def of(act, gate, up):
    return act.of(torch.cat([gate, up], -1) if act.halves == 2 else up)


def fragments_of(place=(0, 0)):
    """The functions of fragments.py with these meanings. place: of the program."""
    gl = SimpleNamespace(
        constexpr=None, float32=torch.float32, bfloat16=bf16, int64=torch.int64,
        arange=lambda a, b, layout=None: torch.arange(a, b), zeros=lambda s, t, layout=None: torch.zeros(s),
        expand_dims=torch.unsqueeze, convert_layout=lambda t, layout, assert_trivial=False: t,
        join=lambda a, b: torch.stack([a, b], -1), split=lambda t: t.unbind(-1),
        program_id=lambda i: torch.tensor(place[i]),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)), load=load, store=store,
        inline_asm_elementwise=assembly,
        **{name: lambda *a, **k: None for name in (
            "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout",
            "DistributedLinearLayout",
        )},
    )  # fmt: skip
    given = dict(
        gl=gl,
        mma_v2=lambda a, b, acc: acc + a.float() @ b.float(),
        activate=lambda gate, up, fast, act: of(activation(act), gate, up),
        halves_of=lambda act: activation(act).halves,
        instructions=text_of,
        gdc_wait=lambda: None,
        gdc_launch_dependents=lambda: None,
    )
    exec(statements(), given)
    return given


@functools.cache
def statements():
    """The code of fragments.py without imports and decorators."""
    tree = ast.parse(inspect.getsource(fragments))
    tree.body = [node for node in tree.body if not isinstance(node, ast.ImportFrom)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    return compile(tree, "fragments", "exec")


COUNTS = [3, 0, 21]  # rows of three experts; the last has more than a tile


def run(kind, W, L, act, tile, counts=COUNTS, gather=True):
    """The kernel's result and the definition, for each expert's rows; gather: through an order of tokens.

    Parts of the length are added, and then the bias.
    """
    torch.manual_seed(0)
    halves = 1 if act is None else activation(act).halves
    E, N, K = len(counts), sum(counts), 2
    weight = torch.randn(E, halves * W, L) / L**0.5
    matrix = Matrix(kind, tuple(weight.shape), quantise(weight, kind))
    bias = torch.randn(E, halves * W).to(bf16)
    x = torch.randn(N, L).to(bf16)
    order = torch.randperm(N) * K + 1 if gather else None
    ends = torch.tensor([0, *counts]).cumsum(0)
    full = [e for e in range(E) if counts[e]]
    tiles = torch.tensor([len(full), 0, 0, 0, *full, *ends[full].tolist()])
    C, G = matrix.a_row
    num_n = -(-W // (tile.BN // halves))
    P = tile.parts
    steps = C // tile.BL // P
    y = torch.full((P, N, W), float("nan"), dtype=bf16 if P == 1 else torch.float32)
    for pid, part in itertools.product(range(len(full) * num_n), range(P)):
        fragments_of((pid, part))["few_rows_direct"](
            Pointer(x.view(torch.int32)), Pointer(matrix.codes.view(torch.int32)), Pointer(matrix.scales),
            None if P > 1 else Pointer(bias), None if order is None else Pointer(order), Pointer(tiles),
            len(full), Pointer(ends), Pointer(y), N, W, L // 2, C // 4, G, num_n, steps,
            kind, act, K, 64, True, tile.BN, tile.BM, tile.BL, steps % 2 == 1, tile.warps, P, True, False,
            gpu.last_of(steps) if tile.stages == gpu.DEEP else 0,
        )  # fmt: skip
    rows_of = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    y = y[0] if P == 1 else y.sum(0) + bias[rows_of]
    values = dequantise(matrix.parts, kind, matrix.shape)
    rows = x if order is None else x[order // K]
    parts = [
        torch.nn.functional.linear(t.float(), value, b.float())
        for t, value, b in zip(rows.split(counts), values, bias, strict=True)
    ]
    want = torch.cat(parts)
    return y, want if act is None else activation(act).of(want.to(bf16).float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ["swiglu", None, "relu2"])
def test_statements_are_the_definition(kind, act):
    """Widths that tiles do not divide, an odd and an even number of steps, and one step."""
    step = 64 if kind == "int4" else 128
    for L in (128, 256, 384):
        got, want = run(kind, 40, L, act, Tile(64, 8, step, 4, 1, True), gather=act is not None)
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-9)


def test_statements_with_three_steps_ahead_are_the_definition():
    """One to eleven groups of int4: no loop, one iteration and two, and every number of last steps."""
    for groups in range(1, 12):
        got, want = run("int4", 40, 128 * groups, "swiglu", Tile(64, 8, 64, 4, gpu.DEEP, True), [3, 9])
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_the_length_add_up(kind):
    """Parts of two steps and of three; scales of int4's groups are those of the part."""
    step, width = (64, 128) if kind == "int4" else (128, 128)
    for steps in (4, 6):
        tile = Tile(64, 8, step, 4, 1, True, 2)
        got, want = run(kind, 40, steps * width, None, tile, [9], gather=False)
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9)


def test_layouts_have_the_order_of_a_fragment():
    """A thread's word in the layout of codes holds the columns that the permutation gives to its products."""
    words = torch.arange(16)  # of a row: 64 columns
    assert fragments.codes_layout.fn(64, 64, 4).lane_bases[:2] == [[0, 4], [0, 8]]
    found = torch.stack([4 * words + i for i in range(4)], -1)  # columns in memory
    found = found.reshape(1, 1, 4, 4, 2, 2).permute((0, 1, 3, 4, 2, 5)).reshape(4, 2, 4, 2)
    for product in range(4):
        for thread in range(4):  # of a fragment row: columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9
            assert found[product, :, thread].flatten().tolist() == [
                16 * thread + 4 * product + i for i in range(4)
            ]


FIT = [("int8", Tile(64, 8, 128, 4, 1, True)), ("fp8", Tile(64, 8, 128, 4, 1, True))]
FIT += [("int4", Tile(64, 8, 64, 4, 1, True)), ("int4", Tile(64, 8, 64, 4, gpu.DEEP, True))]


@pytest.mark.parametrize(("kind", "tile"), slow_but(FIT[3:], FIT))
@pytest.mark.parametrize("arch", slow_but(["cuda:90"], ["cuda:90", "cuda:80"]))
def test_the_kernel_fits_on_the_chips(kind, tile, arch):
    names = []

    def visit(name, key, compile):
        names.append(name)
        assert_fits(measure(arch, name, compile)._replace(programs=1), CHIPS[arch])

    (_, shape, dtype), (_, scales, of) = stored(kind, (256, 256))
    parts = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(scales, dtype=of, device="meta")
    with compile_only(arch, visit):
        x = torch.empty(5, 256, dtype=bf16, device="meta")
        matrix = Matrix(kind, (256, 256), parts)
        assert gpu.fits_direct(x, matrix, tile)
        gpu.few_rows(x, matrix, None, tile, "swiglu")
    assert names == ["few_rows_direct"]
