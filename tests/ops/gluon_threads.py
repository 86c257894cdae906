"""Runs kernels of Gluon and Triton on the CPU as plain Python, each partition of a kernel in a thread.

Gluon has no interpreter. This module executes the files of kernels with stand-ins for Gluon's and Triton's
functions: blocks are torch tensors, shared memory is a tensor of bytes, barriers count arrivals and bytes as
the hardware does. An arrival or a byte too many, an address outside of a tensor and a partition that waits
for ever raise errors. Products and stores of the copy engine read shared memory as late as the kernel's waits
allow.

Layouts, swizzles, registers and proxies are not modelled.
"""

import ast
import builtins
import inspect
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import torch

from tmoe.base import activations
from tmoe.ops.launch.kernel_launch import Descriptor

PATIENCE = 60  # seconds, after which a barrier is never reached
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_here = (
    threading.local()
)  # .program, .programs; .warps of a partition; .products, .stores: those that are not executed yet


def raw(value):
    """A tensor for any operand."""
    return value.t if isinstance(value, Block) else torch.as_tensor(value)


class Block:
    """A block or a scalar."""

    def __init__(self, t):
        self.t = t if isinstance(t, torch.Tensor) else torch.tensor(t)
        self.shape, self.dtype = list(self.t.shape), self.t.dtype
        self.type = SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        return Block(self.t.view(dtype) if bitcast else self.t.to(dtype))

    def __getitem__(self, key):
        return Block(self.t[key])

    def __index__(self):
        return int(self.t)

    def __int__(self):
        return int(self.t)

    def __bool__(self):
        return bool(self.t)


def _operator(name):
    def method(self, other):
        left = self.t.float() if self.dtype == torch.bfloat16 and not isinstance(other, Block) else self.t
        return Block(getattr(left, name)(other.t if isinstance(other, Block) else other))

    return method


for _name in "add sub mul truediv floordiv mod rshift lshift and xor or lt le gt ge eq ne".split():
    setattr(Block, f"__{_name}__", _operator(f"__{_name}__"))
for _name in "add mul sub truediv floordiv mod rshift lshift and xor or".split():

    def _right(self, other, _name=_name):
        left = torch.as_tensor(other, dtype=torch.result_type(self.t, other))
        return getattr(Block(left), f"__{_name}__")(self)

    setattr(Block, f"__r{_name}__", _right)
Block.__neg__ = lambda self: Block(-self.t)


class Pointer:
    """An address in a tensor, or a block of addresses."""

    def __init__(self, tensor, offset=0):
        self.tensor, self.offset = tensor, Block(raw(offset))
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other):
        return Pointer(self.tensor, self.offset + other)

    def numbers(self, mask):
        """Positions of elements; those that the mask leaves out are 0."""
        at = self.offset.t.long()
        at, live = (at, torch.ones_like(at, dtype=torch.bool)) if mask is None else torch.broadcast_tensors(
            at, raw(mask)
        )  # fmt: skip
        at = torch.where(live, at, 0)
        assert bool(((at >= 0) & (at < self.tensor.numel())).all()), "an address outside of the tensor"
        return at, live

    @property
    def flat(self):
        return self.tensor.view(-1).view(RAW[self.tensor.element_size()])


def load(pointer, mask=None, other=None):
    at, live = pointer.numbers(mask)
    values = pointer.flat[at].view(pointer.tensor.dtype)
    return Block(values if mask is None else torch.where(live, values, other or 0))


def store(pointer, value, mask=None):
    at, live = pointer.numbers(mask)
    values = raw(value).to(pointer.tensor.dtype).broadcast_to(at.shape).contiguous()
    pointer.flat[at[live]] = values.view(pointer.flat.dtype)[live]


class Shared:
    """A view of shared memory."""

    def __init__(self, t):
        self.t, self.dtype, self.shape, self.layout = t, t.dtype, list(t.shape), None

    def index(self, i):
        assert 0 <= int(i) < len(self.t)
        return Shared(self.t[int(i)])

    def reshape(self, shape):
        return Shared(self.t.view(shape))

    def permute(self, order):
        return Shared(self.t.permute(order))

    def slice(self, start, length, dim=0):
        return Shared(self.t.narrow(dim, start, length))

    def load(self, layout):
        return Block(self.t.clone())

    def store(self, value):
        assert value.dtype == self.dtype, (value.dtype, self.dtype)
        self.t.copy_(value.t)


def allocate(dtype, shape, layout):
    if isinstance(layout, str):  # barriers
        return SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
    size = torch.Size(shape).numel() * dtype.itemsize
    return Shared(torch.full((size,), 0xFF, dtype=torch.uint8).view(dtype).view(shape))


def reinterpret(buffer, dtype, shape, layout):
    return Shared(buffer.t.view(-1).view(torch.uint8).view(dtype).view(shape))


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes of it have come."""

    def __init__(self):
        self.changed = threading.Condition()
        self.count = self.pending = self.phase = self.bytes = 0

    def init(self, count):
        self.count = self.pending = count

    def come(self, arrivals, size):
        with self.changed:
            self.pending -= arrivals
            self.bytes += size
            assert self.pending >= 0, "an arrival too many"
            if self.pending == 0 and self.bytes == 0:
                self.pending, self.phase = self.count, self.phase ^ 1
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase != int(parity), PATIENCE)
        assert done, "a barrier that is never reached"


def elements(descriptor, coordinates):
    """Where the elements of a box are in the memory of its tensor, and which are inside the tensor."""
    at, inside = 0, True
    rank = len(descriptor.shape)
    for dim, first in enumerate(coordinates):
        size = descriptor.block[dim]
        where = (int(first) + torch.arange(size)).view([-1 if i == dim else 1 for i in range(rank)])
        inside = inside & (where >= 0) & (where < descriptor.shape[dim])
        # products and sums of int64 wrap around as the hardware's do; elements of two bytes have the same sum
        at = at + where * torch.tensor(descriptor.strides[dim], dtype=torch.int64)
    memory = torch.empty(0, dtype=RAW[descriptor.base.element_size()])
    memory.set_(descriptor.base.untyped_storage())
    at = torch.where(inside, at + descriptor.base.storage_offset(), 0)
    assert bool(((at >= 0) & (at < len(memory))).all()), "a box outside of the tensor's memory"
    return memory, at, inside


def bulk_load(descriptor, coordinates, barrier, shared):
    memory, at, inside = elements(descriptor, coordinates)
    assert shared.shape == list(descriptor.block) and shared.dtype == descriptor.base.dtype
    shared.t.view(memory.dtype).copy_(torch.where(inside, memory[at], 0))
    barrier.come(0, -shared.t.nbytes)


def bulk_store(descriptor, coordinates, shared):
    memory, at, inside = elements(descriptor, coordinates)
    assert shared.shape == list(descriptor.block) and shared.dtype == descriptor.base.dtype

    def execute():
        memory[at[inside]] = shared.t.view(memory.dtype)[inside]

    _here.stores.append(execute)


def store_wait(pendings):
    while len(_here.stores) > pendings:
        _here.stores.pop(0)()


def thread_load(shared, pointer, mask=None):
    at, live = pointer.numbers(mask)
    shared.t.view(RAW[shared.t.element_size()]).copy_(torch.where(live, pointer.flat[at], 0))


def multiply(a, b, acc, use_acc=True, is_async=False):
    result = Block(torch.full_like(acc.t, torch.nan))

    def execute():
        product = a.t.float() @ b.t.float()
        result.t.copy_(product + acc.t if use_acc else product)

    _here.products.append(execute)
    if not is_async:
        wait_for_products(0, ())
    return result


def wait_for_products(num_outstanding, deps):
    while len(_here.products) > num_outstanding:
        _here.products.pop(0)()
    return deps[0] if len(deps) == 1 else deps


def assembly(text, constraints, args, dtype, is_pure, pack):
    if text.startswith("rcp.approx"):
        return Block(1 / args[0].t)
    assert text.startswith("cvt.rn.bf16x2"), text
    return args[0].to(dtype)


def specialise(partitions, warps, registers):
    """Runs the partitions in threads; raises the first error of any."""
    errors = []
    place = _here.program, _here.programs

    def run(function, args, count):
        _here.program, _here.programs = place
        _here.warps = count
        _here.stores, _here.products = [], []
        try:
            function(*args)
            assert not _here.stores and not _here.products, "a store or product that no wait has ended"
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(*part, count), daemon=True)
        for part, count in zip(partitions, [4, *warps], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def join(a, b):
    return Block(torch.stack([a.t, b.t], -1))


def split(a):
    return Block(a.t[..., 0]), Block(a.t[..., 1])


def steps(*bounds):
    return [Block(i) for i in builtins.range(*map(int, bounds))]


def largest(a, axis=None):
    return Block(torch.where(a.t.isnan(), -torch.inf, a.t).amax(axis))  # max.f32 leaves NaN out


def select(condition, a, b):
    return Block(torch.where(raw(condition), raw(a), raw(b)))


def compare(function, ieee):
    def compared(a, b, propagate_nan=None):
        both = torch.broadcast_tensors(raw(a), torch.as_tensor(raw(b), dtype=raw(a).dtype))
        if both[0].is_floating_point() and not propagate_nan:
            return Block(ieee(*both))
        return Block(function(*both))

    return compared


def _same(function=None, **_):
    return function if function else _same


LANGUAGE = SimpleNamespace(
    constexpr=lambda value: value, float32=torch.float32, int32=torch.int32, int64=torch.int64,
    bfloat16=torch.bfloat16, float8e4nv=torch.float8_e4m3fn,
    NVMMADistributedLayout=lambda **_: None, SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None,
    NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None),
    PropagateNan=SimpleNamespace(ALL=True), static_range=builtins.range,
    static_assert=lambda condition: None,
    program_id=lambda axis: Block(_here.program[axis]),
    num_programs=lambda axis: Block(_here.programs[axis]), trans=lambda a: Block(a.t.mT),
    arange=lambda a, b, layout=None: Block(torch.arange(a, b)),
    zeros=lambda shape, dtype, layout=None: Block(torch.zeros(shape, dtype=dtype)),
    expand_dims=lambda a, axis: Block(a.t.unsqueeze(axis)),
    convert_layout=lambda a, layout: a, where=select, abs=lambda a: Block(a.t.abs()),
    maximum=compare(torch.maximum, torch.fmax), minimum=compare(torch.minimum, torch.fmin), max=largest,
    zeros_like=lambda a: Block(torch.zeros_like(a.t)),
    sum=lambda a, axis: Block(a.t.sum(axis)), exp2=lambda a: Block(a.t.exp2()),
    exp=lambda a: Block(a.t.exp()), cdiv=lambda a, b: (a + (b - 1)) // b, load=load, store=store, join=join,
    split=split, permute=lambda a, order: Block(a.t.permute(order)),
    reshape=lambda a, shape: Block(a.t.reshape(shape)), inline_asm_elementwise=assembly,
    allocate_shared_memory=allocate, warp_specialize=specialise,
)  # fmt: skip
NAMES = dict(
    range=steps, triton=SimpleNamespace(jit=_same, constexpr_function=_same), tl=LANGUAGE, gl=LANGUAGE,
    gluon=SimpleNamespace(jit=_same, constexpr_function=_same), activations=activations,
    mbarrier=SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=lambda bar, count: bar.init(count),
        wait=lambda bar, phase: bar.wait(phase),
        arrive=lambda bar, count, pred=True: bar.come(count, 0) if pred else None,
        expect=lambda bar, size: bar.come(1, size),
    ),
    tma=SimpleNamespace(store_wait=store_wait), fence_async_shared=lambda: None,
    async_copy=SimpleNamespace(mbarrier_arrive=lambda bar, increment_count: bar.come(32 * _here.warps, 0)),
    bulk_load=bulk_load, bulk_store=bulk_store, thread_load=thread_load, reinterpret=reinterpret,
    warpgroup_mma=multiply, warpgroup_mma_init=lambda acc: acc,
    warpgroup_mma_wait=wait_for_products,
)  # fmt: skip


def kernels_of(*files, change=("", "")):
    """The functions of these files by name; each may call functions of the files before its own.

    change: text, and what replaces it.
    """
    space = dict(NAMES)
    for file in files:
        source = Path(file).read_text()
        tree = ast.parse(source.replace(*change) if change[0] else source)
        tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
        exec(builtins.compile(tree, str(file), "exec"), space)
    return space


def run(kernel, grid, *args):
    """The kernel's programs, one after the other. Parameters with an annotation are constants."""
    args = [Pointer(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    args = [
        SimpleNamespace(**arg._asdict(), dtype=arg.base.dtype) if isinstance(arg, Descriptor) else arg
        for arg in args
    ]
    constants = [p.annotation is not p.empty for p in inspect.signature(kernel).parameters.values()]
    args = [
        Block(arg) if type(arg) in (int, float) and not constant else arg
        for arg, constant in zip(args, constants, strict=True)
    ]
    _here.programs = (*grid, 1, 1)[:3]
    for program in itertools.product(*map(builtins.range, _here.programs)):
        _here.program = program
        kernel(*args)
