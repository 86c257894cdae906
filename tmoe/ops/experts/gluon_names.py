"""Names of Gluon that changed between versions of triton: the new name, else the old name, else None.

If a name is None, the portable kernels run (`gluon_lacks` of ops/launch/kernel_launch.py). Triton 3.9 still
has the old names of copies, but raises an error when a kernel that calls them is compiled.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma


def _first(owner: object, *names: str) -> object | None:
    """The first of these attributes that `owner` has."""
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), None)


# bulk copies of the copy engine, between a tensor in global memory and a tile in shared memory
bulk_load = _first(tma, "async_load", "async_copy_global_to_shared")
bulk_store = _first(tma, "async_store", "async_copy_shared_to_global")
# cp.async: each thread copies its own elements into a tile
thread_load = _first(async_copy, "async_load", "async_copy_global_to_shared")
# a view of the same shared memory with another dtype, shape and layout
reinterpret = _first(getattr(gl, "shared_memory_descriptor", None), "reinterpret", "_reinterpret")
thread_barrier = _first(gl, "thread_barrier", "barrier")
