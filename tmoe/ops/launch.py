"""How a kernel is launched, and how the same launches are turned into compilations for a GPU that need not be there."""

import contextlib
import functools

import torch
import triton
from triton.backends.compiler import GPUTarget

_target = None  # inside compile_only: the architecture compiled for
_compiling = None  # inside compile_only: called with (kernel, compiled) instead of launching


def device_facts(device):
    """(architecture "cuda:90" or "hip:gfx942", number of SMs, whether tensor descriptors are in hardware)."""
    return _facts(device.index) if _target is None else (_target, 1, _has_descriptors(_target))


@functools.cache
def _facts(index):
    p = torch.cuda.get_device_properties(index)
    arch = f"hip:{p.gcnArchName.split(':')[0]}" if torch.version.hip else f"cuda:{p.major}{p.minor}"
    return arch, p.multi_processor_count, _has_descriptors(arch)


def _has_descriptors(arch):
    return arch.startswith("cuda") and int(arch.split(":")[1]) >= 90


def launch(kernel, grid, *args, **options):
    """kernel[grid](*args, **options), or inside compile_only its compilation."""
    if _compiling is None:
        kernel[grid](*args, **options)
    else:
        _compiling(kernel, kernel.warmup(*args, grid=grid, **options))


class _Driver:
    """What triton's compiler asks a driver, for a target that is only named."""

    def __init__(self, arch):
        kind, version = arch.split(":")
        self.target = GPUTarget("cuda", int(version), 32) if kind == "cuda" else GPUTarget("hip", version, 64)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return str(self.target)  # the key of triton's per-device caches: no mixing with a real device's

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("meta")


@contextlib.contextmanager
def compile_only(arch, on_kernel):
    """Compile for arch ("cuda:90", "hip:gfx942") what would be launched; tensors may be on the meta device.

    on_kernel(kernel, compiled) is called at every launch. Needs no GPU. Not re-entrant.
    """
    global _compiling, _target
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(arch))
    _compiling, _target = on_kernel, arch
    try:
        yield
    finally:
        _compiling = _target = None
        triton.runtime.driver._active = before
