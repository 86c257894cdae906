"""How many bytes the results of operations hold at once, which a GPU's allocator would have to provide.

next: tests/model/test_loss.py
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tmoe.config.model import ModelConfig
from tmoe.model.rope import rope_table
from tmoe.model.transformer import Block


class MostHeld(TorchDispatchMode):
    """Records in `bytes` the peak of the bytes that were alive at once among the results of operations.

    The tensors `given` are not counted.
    """

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.given = {t.untyped_storage()._cdata for t in given}
        self.held = {}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.given:
                storage = t.untyped_storage()
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {key: (ref, n) for key, (ref, n) in self.held.items() if not ref.expired()}
        self.bytes = max(self.bytes, sum(n for _, n in self.held.values()))
        return out


def saved_bytes(block: Block, x: torch.Tensor, model: ModelConfig) -> int:
    """Bytes of the storages that autograd keeps for one call of a block.

    The block's parameters and RoPE's tables are not counted.
    """
    tables = rope_table(model.rope, model.rotary_dim, x.shape[1], x.device)
    return sum(t.untyped_storage().nbytes() for t in kept_of(block, x, *tables, None, None, None))


def kept_of(block: Block, x: torch.Tensor, *context: torch.Tensor | None) -> list[torch.Tensor]:
    """One tensor of each storage that autograd keeps for block(x, *context).

    Storages of the block's parameters and of the context are left out.
    """
    given = [t for t in context if t is not None]
    excluded = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *block.buffers(), *given)}
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t  # kept alive, so that no address is used twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(x, *context)
    return [t for at, t in kept.items() if at not in excluded]
