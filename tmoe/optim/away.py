"""Takes tensors off their device for a while: their bytes wait in the host's memory and come back whole.

next: optim/adamw.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tmoe.parallel.mesh import local_part


class HostRoom:
    """Room in the host's memory, pinned for a GPU, and kept from one time to the next: pinning is slow."""

    def __init__(self) -> None:
        self.rooms: list[Tensor] = []

    @contextmanager
    def holding(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside, these tensors hold nothing; afterwards what they held, in every bit, also on an error.

        They stay themselves, so whatever refers to them, a checkpoint's list of tensors for one, need not
        know. Their addresses change. tensors: none of them shares its memory with another that is in use.
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
            torch.cuda.synchronize()  # no stream reads or writes them any more
        for storage in storages:
            storage.resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()  # so that whoever asks how much is free hears of theirs
        try:
            yield
        finally:
            for room, storage, size in zip(self.rooms, storages, sizes, strict=True):
                storage.resize_(size)
                bytes_of(storage).copy_(room, non_blocking=True)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of it, as whole numbers of one byte."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
