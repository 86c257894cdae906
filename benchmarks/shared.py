"""Runs a rank of a world larger than the machine: ranks share its GPUs. For checking results, not for timing.

    torchrun --nproc-per-node 4 -m benchmarks.shared tests/moe/test_symm_gpu.py
    torchrun --nproc-per-node 4 -m benchmarks.shared -m benchmarks.layouts --inside ...

The kernels, the exchange through symmetric memory, NCCL and FSDP2 are the same as on a machine with a GPU for
each rank. Two things differ. NCCL treats every rank as a separate host and uses sockets on the loopback
device. And the driver gives the GPU to each rank for a slice of time, in which a kernel that waits for a peer
waits in vain. train.py itself refuses to share a GPU, so that such speeds are not measured by accident.
"""

import os
import runpy
import sys

import torch

from tmoe.moe.exchange import symm


def main() -> None:
    if "RANK" not in os.environ or sys.argv[1:] in ([], ["-m"]):
        sys.exit(
            "error: torchrun starts this, with the rank's program: -m benchmarks.shared FILE ..., "
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
