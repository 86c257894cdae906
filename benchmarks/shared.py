"""Runs a rank of a world that is larger than the machine: ranks share its GPUs. It shows results, not speed.

    torchrun --nproc-per-node 4 -m benchmarks.shared tests/moe/test_symm_gpu.py
    torchrun --nproc-per-node 4 -m benchmarks.shared -m benchmarks.layouts --inside ...

The kernels, the exchange through symmetric memory, NCCL and FSDP2 are those of a machine with a GPU for each
rank. Two things differ. NCCL takes every rank for a host of its own and goes through sockets on the loopback
device. And the driver hands the GPU from rank to rank in slices of time, during which a kernel that waits for
a peer waits in vain. train.py by itself refuses to share a GPU, as such speed is not wanted by accident.
"""

import os
import runpy
import sys

import torch

from tmoe.moe.exchange import symm


def main() -> None:
    if "RANK" not in os.environ or sys.argv[1:] in ([], ["-m"]):
        sys.exit(
            "error: torchrun starts this, with what a rank runs: -m benchmarks.shared FILE ..., "
            "or -m benchmarks.shared -m MODULE ..."
        )
    if gpus := torch.cuda.device_count():
        os.environ |= environment(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), gpus)
        symm._obstacle_here = lambda gpus: ""
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


def environment(rank: int, local_rank: int, gpus: int) -> dict[str, str]:
    """The variables that let ranks share GPUs. NVLink multicast stays off: tmoe does not use it."""
    return dict(
        LOCAL_RANK=str(local_rank % gpus),
        LOCAL_WORLD_SIZE=str(gpus),
        NCCL_HOSTID=f"rank {rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_NVLS_ENABLE="0",
        TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",
        TORCH_SYMM_MEM_DISABLE_MULTICAST="1",
    )


if __name__ == "__main__":
    main()
