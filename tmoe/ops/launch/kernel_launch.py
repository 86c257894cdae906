"""Launches kernels, or compiles them in place of launching, for a GPU that may be absent.

triton's own launch spends 100 to 200 us of Python on a kernel with six tensor descriptors (building, checking
and hashing their layouts), which is longer than such a kernel runs at T=4096. `launch` finds the binary in a
table whose key is everything that the binary depends on, and calls it.
"""

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tmoe.base.private_torch import note

# Kernels may fuse a product and a sum, in every version of triton. Without this variable triton 3.9 warns,
# and 3.10 has another default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

_target = None  # inside compile_only: the architecture compiled for
_compiling = None  # inside compile_only: the function that each launch calls
_thread = threading.local()  # .ready: it has a CUDA context
_settled: set[str] = set()  # modules of which triton knows all keys
# checked first, since isinstance(..., torch.Tensor) costs 0.3 us if the result is False
_PLAIN = {bool, str, float, type(None)}
_binaries = {}  # (id of the kernel, device, key of its binary) -> the function that launches it
MAPS = 1024  # tensor maps kept for each descriptor of a binary: enough to reuse those of all layers of a step


class Address(NamedTuple):
    """Stands in for a tensor where only its address is needed."""

    address: int

    def data_ptr(self) -> int:
        """As torch.Tensor's."""
        return self.address


class Descriptor(NamedTuple):
    """A tensor and the box that the copy engine copies at a time.

    It is converted to triton's or Gluon's descriptor when a kernel is compiled.
    """

    base: torch.Tensor | Address
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False  # triton 3.8 reads this attribute


def strides_of(t: Tensor) -> tuple[int, ...]:
    """A tensor's strides; dimensions of one element get the strides of a contiguous tensor.

    In torch the strides of such dimensions are arbitrary, but the copy engine requires multiples of 16 bytes.
    """
    strides = list(t.stride())
    for i in reversed(range(len(strides))):
        if t.shape[i] == 1:
            strides[i] = strides[i + 1] * t.shape[i + 1] if i + 1 < len(strides) else 1
    return tuple(strides)


def describe(t: Tensor, block: list[int]) -> Descriptor:
    """A descriptor of a whole tensor, with boxes of shape `block`."""
    return Descriptor(t, t.shape, strides_of(t), block)


def describe_ragged(t_NW: Tensor, block: list[int]) -> Descriptor:
    """A descriptor of expert-sorted rows that lets a kernel clip boxes at any row.

    triton.tools.ragged_tma explains the two extra dimensions.
    """
    stride = strides_of(t_NW)[0]
    shape = (0x7FFF0000, 0x7FFF0000, 1 << 30, t_NW.shape[1])
    return Descriptor(t_NW, shape, ((1 << 34) - stride, stride, stride, 1), [1, 1, *block])


def _native(arg: Any, kernel: Any) -> Any:
    """`arg`, with a Descriptor converted to the class that triton or Gluon accepts."""
    if not isinstance(arg, Descriptor):
        return arg
    tensor = arg.base, list(arg.shape), list(arg.strides), arg.block
    if not (hasattr(kernel, "is_gluon") and kernel.is_gluon()):
        return TensorDescriptor(*tensor)
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    elements = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv
    }  # fmt: skip
    element = elements[arg.base.dtype]
    return GluonDescriptor(*tensor, cast(Any, gl.NVMMASharedLayout.get_default_for(arg.block, element)))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (triton.cdiv costs 10 us a call outside kernels.)"""
    return -(-a // b)


def device_facts(device: torch.device) -> tuple[str, int, bool]:
    """(architecture "cuda:90" or "hip:gfx942", number of SMs, whether tensor descriptors are in hardware)."""
    return _facts(device.index) if _target is None else (_target, 1, _has_descriptors(_target))


@functools.cache
def _facts(index: int) -> tuple[str, int, bool]:
    p = torch.cuda.get_device_properties(index)
    arch = f"hip:{p.gcnArchName.split(':')[0]}" if torch.version.hip else f"cuda:{p.major}{p.minor}"
    return arch, p.multi_processor_count, _has_descriptors(arch)


def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose programs may start while the previous kernel still runs.

    This is programmatic dependent launch. Such a kernel must call gdc_wait before it accesses memory; after
    gdc_wait all earlier work on the stream has ended. Empty if the GPU does not support it, and on a CPU
    (triton's interpreter).
    """
    return {"launch_pdl": True} if device.type != "cpu" and device_facts(device)[2] else {}


def tf32() -> bool:
    """Whether fp32 products may use TF32, whichever of torch's settings enabled it.

    After `fp32_precision` has been set, torch raises an error on `allow_tf32`.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _has_descriptors(arch: str) -> bool:
    # hopper.py uses Hopper's wgmma; Blackwell runs the portable kernels, since it has no kernels yet
    """Whether the kernels for Hopper run on this architecture with this triton."""
    if arch != "cuda:90":
        return False
    if missing := gluon_lacks():
        note(
            f"triton {triton.__version__} has no {missing}: portable kernels run in place of those for Hopper"
        )
    return not missing


@functools.cache
def gluon_lacks(*files: str) -> str:
    """Names that kernels for Hopper use and this triton's Gluon does not have; "" if there are none.

    files: of kernels in tmoe/ops/experts; none: those of experts in 16 bits, and Muon's. Gluon is
    experimental, so its names change.
    """
    missing = set()
    names = [f"experts.{file}" for file in files] or ["experts.few_rows", "experts.hopper", "muon_hopper"]
    try:
        modules = [importlib.import_module(f"tmoe.ops.{name}") for name in names]
        renamed = importlib.import_module("tmoe.ops.experts.gluon_names")
    except ImportError as error:
        return str(error)
    for module in modules:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = getattr(module, node.value.id, None)
                if inspect.ismodule(owner) and not hasattr(owner, node.attr):
                    missing.add(f"{owner.__name__}.{node.attr}")
    missing |= {
        f"{name} of Gluon" for name, value in vars(renamed).items() if value is None and name[0] != "_"
    }
    return ", ".join(sorted(missing))


def _settle(module: str) -> None:
    """Let triton compute the keys of a module's kernels, callees first.

    The keys of the modules from which it imports functions are computed as well. A kernel's key contains the
    constants of all functions that it calls, but triton leaves out the constants of a function whose key it
    has not computed yet. Keys would then depend on which kernel was launched first, and a process would not
    find the binaries that another process has compiled.
    """
    if module in _settled or module not in sys.modules:
        return
    _settled.add(module)
    for f in [f for f in vars(sys.modules[module]).values() if isinstance(f, JITFunction)]:
        _settle(f.__module__)
        f.cache_key  # noqa: B018


def _fixed(kernel: Any) -> tuple[bool, ...]:
    """For each parameter, whether the binary does not depend on its value.

    The result is kept as an attribute of the kernel, because a dict would hash the kernel in Python.
    """
    for module in (
        "triton.language.standard",
        "triton.experimental.gluon.language._standard",
        kernel.__module__,
    ):
        _settle(module)
    kernel.tmoe_fixed = fixed = tuple(p.do_not_specialize for p in kernel.params)
    return fixed


def _key(args: Sequence, fixed: Sequence[bool]) -> tuple[list, list]:
    """The key of a binary, which holds all that the binary depends on, and the values for its launcher.

    The key distinguishes more cases than triton does; each further case costs only one more lookup.
    """
    hip = torch.version.hip or str(_target).startswith("hip")
    key, values = [], []
    for arg, is_fixed in zip(args, fixed, strict=True):
        kind = type(arg)
        if kind is int:
            key.append(arg.bit_length() > 31 if is_fixed else arg)
        elif kind in _PLAIN:
            key.append(kind if is_fixed else arg)
        elif kind is Descriptor:
            key.append(arg.base.dtype)
            key += arg.block
        elif isinstance(arg, torch.Tensor):
            key.append(arg.dtype)
            if hip:  # for HIP triton also distinguishes whether 32 bits can address all of a tensor
                key.append(arg.untyped_storage().nbytes() < 2**31)
            arg = arg.data_ptr()
            key.append(arg % 16)
        else:
            key.append(arg)
        values.append(arg)
    return key, values


def launcher(compiled: Any, kernel: Any, values: list) -> Callable[[tuple[int, ...], int, list], None]:
    """A function (grid, stream, values) that launches a binary by triton's own C function.

    It skips the Python code before that function, which encodes every tensor map at each launch (8 us each,
    30 of them in a layer's forward and backward) and calls hooks even if none is set. A map depends only on
    an address, sizes and strides, so it is encoded once and reused. If triton's launcher differs from the
    versions that `_own_launcher` knows, triton launches the kernel itself.

    A function that calls the C function directly has the attribute `parts`: the C function, its arguments
    between stream and values, and (index, encoder, known maps) of each descriptor.

    values: the values of the first launch.
    """

    def as_triton_does(grid: tuple[int, ...], stream: int, values: list) -> None:
        compiled[grid](*[_native(value, kernel) for value in values], stream=stream)

    own = _own_launcher(compiled, kernel, values)
    if own is None:
        return as_triton_does
    call, head = own.call, own.head
    maps = [(i, encode, {}) for i, encode in own.maps]
    hooks = knobs.runtime

    def direct(grid: tuple[int, ...], stream: int, values: list) -> None:
        if heard(hooks.launch_enter_hook) or heard(hooks.launch_exit_hook):  # a profiler observes launches
            return as_triton_does(grid, stream, values)
        flat = []
        start = 0
        for i, encode, known in maps:
            flat += values[start:i]
            flat += encoded(values[i], encode, known)
            start = i + 1
        flat += values[start:]
        call(*grid, stream, *head, *flat)

    direct.parts = call, head, maps
    return direct


def encoded(descriptor: Descriptor, encode: Callable[[Descriptor], list], known: dict) -> list:
    """The C function's arguments for a descriptor, from `known` if they were encoded before."""
    key = descriptor.base.data_ptr(), descriptor.shape, descriptor.strides
    result = known.get(key)
    if result is None:
        if len(known) >= MAPS:
            known.clear()
        result = known[key] = encode(descriptor)
    return result


def heard(hook: Any) -> Any:
    """Whether a hook observes launches. In triton a hook is a chain of calls, or None, or a function."""
    return getattr(hook, "calls", hook)


class Short(NamedTuple):
    """The call of triton's C function: call(*grid, stream, *head, *flat)."""

    call: Callable
    head: tuple
    # for each descriptor among the values: (index, function that makes the list for it in `flat`)
    maps: list


def _own_launcher(compiled: Any, kernel: Any, values: list) -> "Short | None":
    """The direct call that replaces triton's launcher of a CUDA binary; None if it is not possible.

    It is not possible for a binary of another kind of GPU, for a binary that needs scratch memory, and if
    triton would call the C function with other arguments than tmoe; a note reports the last case.
    """
    try:
        from triton.backends.nvidia import driver

        if not isinstance(compiled.run, driver.CudaLauncher):
            return None
        if compiled.run.global_scratch_size or compiled.run.profile_scratch_size:
            return None
        short = _short_way(compiled, driver.make_tensordesc_arg)
        if short is None or _hands_over_the_same(short, compiled, kernel, values):
            return short
    except (ImportError, AttributeError, AssertionError, IndexError, KeyError, TypeError, ValueError):
        pass
    note(
        f"triton {triton.__version__}'s launcher is unknown: "
        "triton's Python launches each kernel, which takes longer"
    )
    return None


def _short_way(compiled: Any, encode: Callable) -> Short | None:
    """A Short by the names in triton 3.6 or 3.8; None if a descriptor is not passed as a tensor map."""
    run = compiled.run
    options = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    function, metas, wrapped = run.launch, [], {}
    if inspect.isfunction(run.launch):  # a Python function that encodes descriptors as tensor maps
        wrapped = inspect.getclosurevars(run.launch).nonlocals
        function, metas = wrapped["launcher"], wrapped["tensordesc_meta"]
        if not metas or None in metas:
            return None
    if hasattr(run, "kernel_signature"):  # 3.8
        head = (*options, compiled.packed_metadata, *[None] * 5, run.arg_annotations, run.kernel_signature)
        fixed = 4 + len(head)

        def call(*args: Any) -> None:
            function(*args[:fixed], args[fixed:])

        at = sorted(wrapped["relevant_paths"]) if wrapped else []
        makers = [functools.partial(encode, metadata=meta, _=None) for meta in metas]
    else:
        call, head = function, (*options, None, None, compiled.packed_metadata, None, None, None)
        at = sorted(wrapped["tensordesc_indices"]) if wrapped else []
        makers = [functools.partial(encode, metadata=meta) for meta in metas]
    return Short(call, head, list(zip(at, makers, strict=True)))


def _hands_over_the_same(short: Short, compiled: Any, kernel: Any, values: list) -> bool:
    """Whether triton's launcher would call its C function with the same arguments as `short`, for `values`.

    It records the arguments with a replaced C function, so no kernel is launched.
    """
    grid, stream = (2, 3, 5), 7  # arbitrary numbers
    calls = []

    def hear(*args: Any) -> None:
        calls.append(args)

    run = copy.copy(compiled.run)
    run.launch = _with_function(run.launch, hear)
    natives = [_native(value, kernel) for value in values]
    run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *natives)

    flat, maps = [], []
    encoders = dict(short.maps)
    for i, value in enumerate(values):
        if i in encoders:
            maps.append(4 + len(short.head) + len(flat))
        flat += encoders[i](value) if i in encoders else [value]
    (expected,), passed = calls, [*grid, stream, *short.head, *flat]
    if isinstance(expected[-1], tuple | list):  # 3.8
        expected = [*expected[:-1], *expected[-1]]
    same = len(expected) == len(passed)
    return same and all(
        type(a) is type(b) if i in maps else a == b
        for i, (a, b) in enumerate(zip(expected, passed, strict=True))
    )


def _with_function(launch: Any, function: Callable) -> Callable:
    """A launcher's `launch` with another function in place of the C function."""
    if not inspect.isfunction(launch):
        return function
    cells = list(launch.__closure__ or ())
    cells[launch.__code__.co_freevars.index("launcher")] = CellType(function)
    return FunctionType(
        launch.__code__, launch.__globals__, launch.__name__, launch.__defaults__, tuple(cells)
    )


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Runs kernel[grid](*args, **options), or inside compile_only compiles it."""
    if _compiling is not None:
        compile = functools.partial(kernel.warmup, *[_native(a, kernel) for a in args], grid=grid, **options)
        key = kernel.__name__, _target, *options.values(), *_key(args, _fixed(kernel))[0]
        _compiling(kernel.__name__, str(key), compile)
        return
    tape = getattr(_thread, "tape", None)
    if not isinstance(kernel, JITFunction):  # a kernel of triton's interpreter
        if tape:
            tape.launched(kernel, grid, args, args)
        kernel[grid](*[_native(a, kernel) for a in args], **options)
        return

    device = triton.runtime.driver.active.get_current_device()
    key, values = _key(args, getattr(kernel, "tmoe_fixed", None) or _fixed(kernel))
    key = (id(kernel), device, *options.values(), *key)
    run = _binaries.get(key)
    if run is None:
        compiled = kernel.warmup(*[_native(a, kernel) for a in args], grid=grid, **options)
        run = _binaries[key] = launcher(compiled, kernel, values)
    grid = (*grid, 1, 1)[:3]
    if tape:
        tape.launched(run, grid, args, values)
    run(grid, current_stream(), values)


def current_stream() -> int:
    """The current stream of the current device, for a launch from this thread."""
    if not hasattr(_thread, "ready"):
        # Autograd's thread may call this function before any call of CUDA, and a tensor map needs the context
        # that the first call of CUDA makes. is_current_stream_capturing makes a context too; mem_get_info
        # might end a capture.
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.mem_get_info()
        _thread.ready = True
    driver = triton.runtime.driver.active
    return driver.get_current_stream(driver.get_current_device())


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, recorded by this thread's tape if there is one."""
    t = torch.empty(shape, dtype=dtype, device=device)
    if tape := getattr(_thread, "tape", None):
        tape.allocated(t)
    return t


@contextlib.contextmanager
def recording(tape: Any) -> Iterator[None]:
    """Inside this context the tape (replay.py) records this thread's allocations and launches."""
    _thread.tape = tape
    try:
        yield
    finally:
        _thread.tape = None


def compiling() -> bool:
    """Whether this runs inside compile_only."""
    return _compiling is not None


class _Driver:
    """The methods of a driver that triton's compiler calls, for a target GPU that may be absent."""

    def __init__(self, arch: str) -> None:
        kind, version = arch.split(":")
        self.target = GPUTarget("cuda", int(version), 32) if kind == "cuda" else GPUTarget("hip", version, 64)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # the key of triton's per-device caches, different from any real device's key

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextlib.contextmanager
def compile_only(arch: str, visit: Callable[[str, str, Callable], Any]) -> Iterator[None]:
    """Inside this context every launch calls visit(kernel's name, key, compile) and launches nothing.

    Tensors may be on the meta device. compile() returns the kernel compiled for arch ("cuda:90",
    "hip:gfx942"); the GPU may be absent. compile() must be called inside the context. Equal keys mean equal
    binaries. Not re-entrant.
    """
    global _compiling, _target
    before = getattr(triton.runtime.driver, "_active", None)
    triton.runtime.driver.set_active(cast(Any, _Driver(arch)))
    _compiling, _target = visit, arch
    try:
        yield
    finally:
        _compiling = _target = None
        triton.runtime.driver.set_active(cast(Any, before))
