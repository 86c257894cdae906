"""ZeRO-1 and ZeRO-2 on FSDP2: weights gathered once a step, gradients summed whole or cut.

FSDP2 alone gathers a unit of blocks in front of its forward and again in front of its backward, in every
micro-batch. Here a unit stays gathered from its first forward of a step to its last backward. Masters,
optimizer state, names and checkpoints are FSDP2's as ever: cut over N ranks.

P: dense parameters of a stage, of which the embedding, final norm and head are P0 and the largest unit of
blocks has u. w: bytes of the compute type, 2 or 4. M: micro-batches of a step.

    --parallel.shard                     3 (default)          2                  1 (ZeRO-1)
    masters and AdamW's moments          12 P/N bytes         12 P/N             12 P/N
    gathered weights                     w (P0 + 2u)          w P                w P
    gradients between micro-batches      4 P, M > 1           4 P/N              4 P, M > 1
    gradients after the last             4 P/N                4 P/N              4 P/N
    gathers of a unit in a step          2 M (the root: M)    1                  1
    reduce-scatters of it                1                    M                  1

A unit's own gradient, unreduced, comes on top while its backward runs. With M = 1 nothing waits between
micro-batches, and 1 and 2 are one thing. Replicas (`--parallel.replicate`) add up once a step either way.
Experts are not concerned: they lie on (dp, ep), kept whole or gathered as `--parallel.gathered-gib` says, and
so is a rank that is alone and gathers nothing.

In a pipeline this is the rule "weights stay gathered until a chunk's last backward": there 3 gathers twice a
micro-batch, however many forwards are in flight.

next: parallel/grad_norm.py
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def keep_gathered(root: FSDPModule, dense: Sequence[FSDPModule], shard: int) -> None:
    """Keeps what `dense` gathers until the micro-batch that `root` is told to sync with, or the only one.

    That one is named by `root.set_requires_gradient_sync(True)` before its backward, as ever. Behind its
    backward, and behind every forward without gradients, weights are cut again, so that no write to the
    masters finds an old copy in use: the next forward gathers what they hold then.

    dense: modules under FSDP2, the root among them, without those of experts. shard: 1 or 2.
    """
    for module in dense:
        module.set_reshard_after_forward(False, recurse=False)

    def tell(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        told(requires_gradient_sync, recurse=recurse)
        for module in dense if recurse else (root,):
            module.set_reshard_after_backward(requires_gradient_sync, recurse=False)
            if shard == 2:
                FSDPModule.set_requires_gradient_sync(module, True, recurse=False)
                module.set_requires_all_reduce(requires_gradient_sync, recurse=False)

    def end(*_: Any) -> None:
        if not torch.is_grad_enabled():
            for module in dense:
                module.reshard()

    told = root.set_requires_gradient_sync
    vars(root)["set_requires_gradient_sync"] = tell
    assert isinstance(root, nn.Module)
    root.register_forward_hook(end, always_call=True)
