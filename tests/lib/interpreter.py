"""Triton's interpreter, repaired and faster; poisoned buffers; a small stand-in for a GPU.

All of this changes modules in place for the rest of the process, so it is for processes that run one test
file. tmoe and triton are imported inside functions, because kernels are defined at import, and
TRITON_INTERPRET must be set before that.
"""

from dataclasses import replace
from types import ModuleType

import torch


def repair_interpreter() -> None:
    """Repairs two faults of triton 3.6.0's interpreter, and makes waiting ranks release the processor.

    The faults: bounds of `range` fail under numpy >= 2.4, and dots of bf16 multiply the raw bit patterns. A
    volatile load is made by a rank that waits for its peers, so each such load sleeps briefly.
    """
    import time

    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def floats(h):
        return (h.data.astype(np.uint32) << 16).view(np.float32) if h.dtype.scalar == tl.bfloat16 else h.data

    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, precision, imprecise):
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return dot(self, a, b, d, precision, imprecise)
        product = np.matmul(floats(a), floats(b), dtype=np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    load = interpreter.InterpreterBuilder.create_masked_load

    def create_masked_load(self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile):
        if is_volatile:
            time.sleep(0.001)
        return load(self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load
    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot


def rounds_to_nearest() -> None:
    """Repairs a third fault of triton 3.6.0's interpreter: float32 to fp8 truncates, twice the error."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values, was, to, mode):
        if to == tl.float8e4nv and was == tl.float32:
            exact = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
            return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(values, was, to, mode)

    interpreter._convert_float = rounded


def round_to_bf16() -> None:
    """Makes the interpreter round fp32 to the nearest bf16, as a GPU does; triton 3.6.0's cuts off bits."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        near = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(near.view(np.uint16).reshape(src.data.shape), tl.bfloat16)

    interpreter.InterpreterBuilder.cast_impl = cast_impl


def save_repeated_work() -> None:
    """Leaves out what triton 3.6.0's interpreter computes in vain: half of its time. forked.py calls this.

    - A kernel's launch replaces the functions of triton.language. Each call of a function by the kernel
      replaced them again, and nothing restored them.
    - Each sum, difference and product of int32 was computed in int64 as well, for an assertion that is
      evaluated only with the option `debug`.
    - The types of blocks and of numpy arrays were computed for each value.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    patched: set[int] = set()  # namespaces of the functions of the kernel that is running

    def patch_once(function):
        if (space := id(function.__globals__)) in patched:
            return None
        patched.add(space)
        return patch(function)

    def restore_all(scope):
        patched.clear()
        restore(scope)

    interpreter._patch_lang, interpreter._LangPatchScope.restore = patch_once, restore_all

    numpy_type, block_of = interpreter._get_np_dtype, tl.block_type.with_element_ty
    types: dict = {}

    def kept(key, function, *args):
        if key not in types:
            types[key] = function(*args)
        return types[key]

    interpreter._get_np_dtype = lambda dtype: kept(dtype.name, numpy_type, dtype)
    tl.block_type.with_element_ty = lambda block, scalar: kept(
        (block.name, scalar.name), block_of, block, scalar
    )


def poison() -> None:
    """Makes every buffer start as NaN (integers: -7), so that reading unwritten elements is detected."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        t = empty(*args, **kwargs)
        with torch.no_grad():  # torch 2.11's checkpoint makes an empty leaf
            return t.fill_(float("nan") if t.is_floating_point() else -7)

    torch.empty = poisoned


def small_tiles(gpu: ModuleType, tma: bool, gather: bool, sub: int) -> None:
    """Replaces the GPU by three programs, and the configurations by tiles small enough for the interpreter.

    gpu: the module tmoe.ops.experts.gpu.
    tma: whether kernels may use tensor descriptors.
    gather, sub: the configurations' fields of these names; for `up`, sub is at most 2.
    """
    from tmoe.ops.experts.table import KernelConfig

    def pick(kernel, *_):
        columns = 64 if kernel == "up" else 32
        rows = 32 if kernel.startswith("dw") else 64
        return KernelConfig(rows, columns, 32, 2, min(sub, 2) if kernel == "up" else sub, 4, 2, 1, gather)

    gpu.device_facts = lambda device: ("cuda:90", 3, tma)
    gpu.has_tma = lambda *args: tma
    gpu.pick = pick
    gpu.few = lambda *args: None  # these kernels are in Gluon, which has no interpreter
