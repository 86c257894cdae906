"""GPUs by name: memory and speed from their data sheets, for plans made before a GPU is rented.

Speeds are the vendors' own: NVIDIA's data sheets "H100 Tensor Core GPU", "H200 Tensor Core GPU", "A100 Tensor
Core GPU" and "Blackwell" (its HGX B200) and paper "Ada GPU architecture", AMD's "Instinct MI300X". Except for
the A100 and RTX 4090, NVIDIA prints the speed of tensor cores with sparsity, twice the value in this file.
Memory is the value that nvidia-smi and rocm-smi show, which data sheets round. None of these figures was
measured for tmoe.

next: plan/fitting.py
"""

from typing import Literal, NamedTuple, get_args

GpuName = Literal["h100", "h200", "a100", "a100-40gb", "b200", "mi300x", "rtx4090"]
NODE = 8  # GPUs of a node, which access each other's memory; a plan assumes this number
DRIVER = 3 * 2**30  # bytes that CUDA, its context and NCCL need in addition to torch
FRAGMENTS = 1.05  # memory that the allocator reserves / memory of tensors (tmoe/model/h200.json)


def room(memory: float) -> float:
    """Bytes of a GPU's memory (`memory`, bytes) that are left for tensors, without CUDA's part and fragments.

    The dry run and `python -m benchmarks.model` both use this bound.
    """
    return (memory - DRIVER) / FRAGMENTS


class Gpu(NamedTuple):
    """One GPU of an eight-GPU node, from the vendor's data sheet of the SXM or OAM module, or a card."""

    title: str
    memory: float
    """bytes, as the driver shows them"""
    flops: float
    """dense bf16 FLOP a second"""
    bandwidth: float
    """of its memory, bytes a second"""
    links: float
    """NVLink, Infinity Fabric or PCIe, bytes a second, both directions together"""
    float8: bool = True
    """whether it has float8 products (--train.float8)"""

    @property
    def room(self) -> float:
        """Bytes of the memory that are left for tensors."""
        return room(self.memory)


GPUS: dict[str, Gpu] = {
    "h100": Gpu("H100 SXM 80 GB", 81_559 * 2**20, 989.4e12, 3.35e12, 900e9),
    "h200": Gpu("H200 SXM 141 GB", 143_771 * 2**20, 989.4e12, 4.8e12, 900e9),
    "a100": Gpu("A100 SXM 80 GB", 81_920 * 2**20, 312e12, 2.039e12, 600e9, float8=False),
    "a100-40gb": Gpu("A100 SXM 40 GB", 40_960 * 2**20, 312e12, 1.555e12, 600e9, float8=False),
    # 7.7 TB/s on HGX B200; 8 TB/s is the family's "up to"
    "b200": Gpu("B200 SXM 180 GB", 183_359 * 2**20, 2250e12, 7.7e12, 1800e9),
    # 7 links of 128 GB/s to the node's other GPUs
    "mi300x": Gpu("MI300X OAM 192 GB", 196_592 * 2**20, 1307.4e12, 5.3e12, 896e9),
    # products in bf16 that add in fp32; PCIe 4.0 x16
    "rtx4090": Gpu("GeForce RTX 4090 24 GB", 24_564 * 2**20, 165.2e12, 1.008e12, 64e9),
}
assert set(GPUS) == set(get_args(GpuName))
