"""Moves tensors to host memory for the duration of a context, and restores them afterwards.

next: optim/adamw.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tmoe.parallel.mesh import local_part


class HostRoom:
    """Buffers in host memory, pinned for a GPU, and kept for reuse because pinning is slow."""

    def __init__(self) -> None:
        self.rooms: list[Tensor] = []

    @contextmanager
    def holding(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside this context the tensors have no memory; afterwards their values are restored bit for bit.

        They are restored after an error as well. The tensor objects stay the same, so references to them stay
        valid, for example in a checkpoint's list of tensors. Their addresses change.

        tensors: no tensor shares its memory with another tensor that is in use.
        """
        local = {t.untyped_storage()._cdata: t for t in map(local_part, tensors)}
        storages = [t.untyped_storage() for t in local.values()]
        sizes = [storage.nbytes() for storage in storages]
        on_gpu = any(storage.device.type == "cuda" for storage in storages)
        if [room.nbytes for room in self.rooms] != sizes:
            self.rooms = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for size in sizes]
        for room, storage in zip(self.rooms, storages, strict=True):
            room.copy_(bytes_of(storage), non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()  # afterwards no stream reads or writes the tensors
        for storage in storages:
            storage.resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()  # so that their memory is reported as free
        try:
            yield
        finally:
            for room, storage, size in zip(self.rooms, storages, sizes, strict=True):
                storage.resize_(size)
                bytes_of(storage).copy_(room, non_blocking=True)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage, as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
