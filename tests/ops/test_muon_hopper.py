"""ops/muon_hopper.py: its statements on plain tensors, in threads, against the products in fp64.

Gluon has no interpreter. So names of Gluon are given meanings on torch tensors, where layouts mean nothing.
Loader and consumers are two threads that meet at barriers. A product is computed, and a tile is stored, as
late as its wait allows, so a buffer that is filled again too early changes the result.

next: tests/ops/test_muon_kernels.py
"""

import ast
import inspect
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch

from tmoe.ops import symmetric
from tmoe.ops.launch.kernel_launch import Descriptor
from tmoe.ops.symmetric import Terms, Tile, stacked_product, symmetric_product

muon_hopper = pytest.importorskip("tmoe.ops.muon_hopper")
BF16, FP64 = torch.bfloat16, torch.float64
PATIENCE = 10  # seconds that a thread waits at a barrier


class Block(torch.Tensor):
    """A tensor with the attribute that kernels read of a type."""

    type = SimpleNamespace(layout=None)


def block(t: torch.Tensor) -> Block:
    return t.as_subclass(Block)


class Buffer:
    """A view of shared memory."""

    def __init__(self, t: torch.Tensor) -> None:
        self.t, self.dtype, self.shape = t, t.dtype, list(t.shape)

    def index(self, i: int) -> "Buffer":
        return Buffer(self.t[i])

    def reshape(self, shape: list[int]) -> "Buffer":
        return Buffer(self.t.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Buffer":
        return Buffer(self.t.permute(order))

    def store(self, value: torch.Tensor) -> None:
        self.t.copy_(value)


class Barrier:
    """An mbarrier: a phase ends when `count` arrived and the bytes that they expected have arrived."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.left = self.bytes = self.phase = 0

    def advance(self, arrivals: int, more: int) -> None:
        with self.changed:
            self.left -= arrivals
            self.bytes += more
            if not self.left and not self.bytes:
                self.left = self.count
                self.phase += 1
                self.changed.notify_all()

    def start(self, count: int) -> None:
        self.count = self.left = count

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE), "nobody arrives"


class Described:
    """The tensor of a descriptor, and its boxes."""

    def __init__(self, descriptor) -> None:
        base, shape, strides, self.box = descriptor[:4]
        self.t, self.dtype = base.as_strided(shape, strides, base.storage_offset()), base.dtype

    def part(self, at: list[int]) -> torch.Tensor:
        return self.t[tuple(slice(begin, begin + size) for begin, size in zip(at, self.box, strict=True))]


class Address:
    """A pointer into a contiguous tensor, or a tensor of such pointers."""

    def __init__(self, t: torch.Tensor, at=0) -> None:
        self.t, self.at = t, at

    def __add__(self, more):
        return Address(self.t, self.at + more)


class Sums:
    """An accumulator, with the products that still run."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.running = value, []

    def wait(self, outstanding: int) -> None:
        while len(self.running) > outstanding:
            a, b, adds = self.running.pop(0)
            self.value = a.t.double() @ b.t.double() + (self.value if adds else 0)


def load(address: Address, mask=None, other=None):
    flat = address.t.view(-1)
    if mask is None:
        return flat[address.at].item()
    return block(torch.where(mask, flat[torch.where(mask, address.at, 0)], 0))


def bulk_load(source: Described, at: list[int], barrier: Barrier, into: Buffer) -> None:
    found, box = source.part(at), source.box
    assert into.shape == box
    into.t.zero_()
    into.t[tuple(map(slice, found.shape))].copy_(found)
    barrier.advance(0, -into.t.numel() * into.t.element_size())


def multiply_later(a: Buffer, b: Buffer, acc: Sums, is_async: bool, use_acc: bool) -> Sums:
    acc.running.append((a, b, use_acc))
    return acc


def wait_for_products(num_outstanding: int, deps: tuple[Sums]) -> Sums:
    deps[0].wait(num_outstanding)
    return deps[0]


class Stores:
    """Stores by the copy engine that have not read their buffer yet."""

    def __init__(self) -> None:
        self.running: list[tuple[Described, list[int], Buffer]] = []

    def begin(self, into: Described, at: list[int], buffer: Buffer) -> None:
        assert buffer.shape == into.box
        self.running.append((into, at, buffer))

    def wait(self, pendings: int) -> None:
        while len(self.running) > pendings:
            into, at, buffer = self.running.pop(0)
            part = into.part(at)
            part.copy_(buffer.t[tuple(map(slice, part.shape))])


def specialise(functions, warps: list[int], registers: list[int]) -> None:
    failed: list[BaseException] = []

    def run(function, args) -> None:
        try:
            function(*args)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=one) for one in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def kernel_of(program: int, programs: int):
    """`stacked_kernel` as one program of a launch runs it."""
    stores = Stores()
    gl = SimpleNamespace(
        constexpr=None,
        static_range=range,
        float32=FP64,
        int64=torch.int64,
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        arange=lambda begin, end, layout: block(torch.arange(begin, end)),
        expand_dims=torch.unsqueeze,
        where=torch.where,
        load=load,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        SliceLayout=lambda *_: None,
        NVMMADistributedLayout=lambda **_: None,
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None),
        allocate_shared_memory=allocated,
        warp_specialize=specialise,
    )
    names = dict(
        gl=gl,
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.start(count),
            expect=lambda barrier, count: barrier.advance(1, count),
            arrive=lambda barrier, count, pred=True: barrier.advance(count, 0) if pred else None,
            wait=lambda barrier, parity: barrier.wait(parity),
        ),
        tma=SimpleNamespace(store_wait=stores.wait),
        bulk_load=bulk_load,
        bulk_store=stores.begin,
        fence_async_shared=lambda: None,
        warpgroup_mma=multiply_later,
        warpgroup_mma_init=lambda acc: acc if isinstance(acc, Sums) else Sums(acc),
        warpgroup_mma_wait=wait_for_products,
        slices=lambda acc, count: [block(part) for part in acc.value.chunk(count, 1)],
    )
    for name in ("place", "load_tiles", "multiply", "product", "load_part", "with_one", "compute_tile"):
        exec(statements(getattr(muon_hopper, name)), names)
    for name in ("consume_tiles", "stacked_kernel"):
        exec(statements(getattr(muon_hopper, name)), names)
    return names["stacked_kernel"]


def allocated(dtype, shape: list[int], layout):
    if dtype == torch.int64:
        return SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
    return Buffer(torch.full(shape, torch.nan, dtype=dtype))


def statements(kernel) -> str:
    """The source of a kernel without its decorator. A Python number needs no conversion to 64 bits."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    function.decorator_list = []
    return ast.unparse(function).replace("e.to(gl.int64)", "e")


@pytest.fixture
def hopper(monkeypatch):
    """Launches of a GPU with three multiprocessors run on plain tensors."""

    def launch(kernel, grid, *args, **options) -> None:
        def given(arg):
            if isinstance(arg, torch.Tensor):
                return Address(arg)
            return Described(arg) if isinstance(arg, Descriptor) else arg

        assert kernel is muon_hopper.stacked_kernel
        for program in range(*grid):
            kernel_of(program, *grid)(*map(given, args))

    monkeypatch.setattr(symmetric, "launch", launch)
    monkeypatch.setattr(symmetric, "device_facts", lambda device: ("cuda:90", 3, True))
    monkeypatch.setattr(symmetric, "on_hopper", symmetric.describable)


def drawn(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) / shape[-1] ** 0.5).to(BF16)


TILES = [Tile(256, 3, 64, 2), Tile(256, 2, 32, 2), Tile(128, 2, 64, 2)]
NEAR = dict(rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("m", "k", "tall"), [(64, 72, False), (384, 200, False), (456, 136, True)])
def test_symmetric_products(hopper, monkeypatch, tile, m, k, tall):
    """Rows of larger matrices; sides of even and odd numbers of tiles, filled and partly filled."""
    for kind in ("gram", "mix"):
        monkeypatch.setitem(symmetric.TILES, kind, tile)
    x, scales = drawn(3, 2 * m, k)[:, m:], torch.tensor([1.0, 0.5, 2.0])
    stored = torch.cat([x.mT] * 2, 1)[:, :k] if tall else x
    gram = symmetric_product(stored, scales, Terms(2.0), tall)
    wide, s = x.to(FP64), scales.to(FP64)[:, None, None]
    torch.testing.assert_close(gram.to(FP64), 2 * s * wide @ wide.mT, **NEAR)
    found, wide = symmetric_product(gram, scales, Terms(0.5, -2.0, 3.0)), gram.to(FP64)
    want = s * (0.5 * wide @ wide - 2.0 * wide + 3.0 * torch.eye(m, dtype=FP64))
    torch.testing.assert_close(found.to(FP64), want, **NEAR)
    for t in (gram, found):
        assert torch.equal(t, t.mT)


@pytest.mark.parametrize("tile", [Tile(256, 3, 128, 2), Tile(128, 2, 64, 1)], ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(64, 72, 64), (200, 200, 520), (392, 136, 136)])
def test_updates(hopper, monkeypatch, tile, m, k, n):
    monkeypatch.setitem(symmetric.TILES, "update", tile)
    a, b, results = drawn(3, m, k), drawn(3, 2 * k, n)[:, k:], torch.full((3, 2 * m, n), 7.0, dtype=BF16)
    found = stacked_product(a, b, results[:, :m])
    torch.testing.assert_close(found.to(FP64), a.to(FP64) @ b.to(FP64), **NEAR)
    assert results[:, m:].eq(7).all()
