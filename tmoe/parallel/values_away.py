"""Frees the values of a frozen matrix while its codes in fp8 stand for them, and brings them back.

A working copy with memory besides the parameter's is freed alone. If the copy is the parameter's own memory,
on a GPU, the parameter's values move to pinned host memory first. Checkpoints read them there in every bit,
which codes could not give back.

next: parallel/shared_copies.py
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tmoe.base.private_torch import need


def moves(local: Tensor) -> bool:
    """Whether a parameter with this memory moves to the host: on a GPU."""
    return local.is_cuda


def move_to_host(master: nn.Parameter) -> None:
    """Gives a parameter host memory with the same values. Its name, layout and identity stay."""
    local = master.to_local().detach() if isinstance(master, DTensor) else master.detach()
    host = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda).copy_(local)
    if isinstance(master, DTensor):
        # from_local would move it to the mesh's device. FSDP2 stores offloaded parameters so as well.
        need(master, "_local_tensor", "--train.fp8 with frozen experts")
        master._local_tensor = host
    else:
        master.data = host


def free(values: Tensor) -> None:
    """Frees a tensor's memory once the work that reads it is done; its shape stays."""
    if values.is_cuda:
        values.record_stream(torch.cuda.current_stream())
    values.untyped_storage().resize_(0)


def is_free(values: Tensor) -> bool:
    """Whether `free` has freed this tensor's memory."""
    return values.untyped_storage().size() == 0 and values.numel() > 0


def allocate(values: Tensor) -> None:
    """Gives a freed tensor memory again, on the current stream, with undefined values."""
    values.untyped_storage().resize_(values.numel() * values.element_size())
