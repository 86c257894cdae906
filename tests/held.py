"""How many bytes the results of operations hold at once: what a GPU's allocator would have to have.

next: test_loss.py
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MostHeld(TorchDispatchMode):
    """`bytes`: the most that were alive at once, of what operations have returned; `given` is not counted."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.given, self.held, self.bytes = {t.untyped_storage()._cdata for t in given}, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.given:
                storage = t.untyped_storage()
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {key: (ref, n) for key, (ref, n) in self.held.items() if not ref.expired()}
        self.bytes = max(self.bytes, sum(n for _, n in self.held.values()))
        return out
