"""ZeRO-1 and ZeRO-2 on FSDP2: weights gathered once a step, gradients summed whole or sharded.

FSDP2 alone gathers a unit of blocks before its forward and again before its backward, in every micro-batch.
Under ZeRO-1 and ZeRO-2 a unit stays gathered from its first forward of a step to its last backward. Master
weights, optimizer state, names and checkpoints are unchanged: FSDP2 shards them over N ranks.

P: number of dense parameters of a stage. P0: those of the embedding, final norm and head. u: those of the
largest unit of blocks. w: bytes of the compute type, 2 or 4. M: micro-batches of a step.

    --parallel.shard                     3 (default)          2                  1 (ZeRO-1)
    masters and AdamW's moments          12 P/N bytes         12 P/N             12 P/N
    gathered weights                     w (P0 + 2u)          w P                w P
    gradients between micro-batches      4 P, M > 1           4 P/N              4 P, M > 1
    gradients after the last             4 P/N                4 P/N              4 P/N
    gathers of a unit in a step          2 M (the root: M)    1                  1
    reduce-scatters of it                1                    M                  1

With `--optim.sums bf16` the unreduced gradients between micro-batches take 2 P instead of 4 P.

While a unit's backward runs, its unreduced gradient needs memory in addition. With M = 1 no gradients are
kept between micro-batches, and 1 and 2 are equivalent. Replicas (`--parallel.replicate`) sum their gradients
once a step in both cases. Experts are unaffected: they are sharded over (dp, ep), and are kept whole or
gathered according to `--parallel.gathered-gib`. A single rank, which gathers nothing, is unaffected as well.

In a pipeline the rule is "weights stay gathered until a chunk's last backward". There `--parallel.shard 3`
gathers twice a micro-batch, however many forwards are in flight.

next: parallel/grad_norm.py
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tmoe.base.private_torch import need


def keep_gathered(root: FSDPModule, dense: Sequence[FSDPModule], shard: int) -> None:
    """Keeps the gathered weights of `dense` until the backward of the micro-batch that syncs gradients.

    The caller marks that micro-batch by `root.set_requires_gradient_sync(True)` before its backward, as usual
    with FSDP2; a single micro-batch needs no mark. After its backward, and after every forward without
    gradients, the weights are sharded again. So a write to the master weights never leaves an old copy in
    use: the next forward gathers their new values.

    dense: modules under FSDP2, including the root, without modules of experts.
    shard: 1 or 2.
    """
    for module in dense:
        module.set_reshard_after_forward(False, recurse=False)

    def tell(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        original(requires_gradient_sync, recurse=recurse)
        for module in dense if recurse else (root,):
            module.set_reshard_after_backward(requires_gradient_sync, recurse=False)
            if shard == 2:
                FSDPModule.set_requires_gradient_sync(module, True, recurse=False)
                module.set_requires_all_reduce(requires_gradient_sync, recurse=False)

    def end(*_: Any) -> None:
        if not torch.is_grad_enabled():
            for module in dense:
                module.reshard()

    original = root.set_requires_gradient_sync
    vars(root)["set_requires_gradient_sync"] = tell
    assert isinstance(root, nn.Module)
    root.register_forward_hook(end, always_call=True)


def sum_as_computed(root: FSDPModule) -> None:
    """Lets FSDP2 sum unreduced gradients of micro-batches in the type in which autograd computes them.

    FSDP2 has one type for these sums and for the reduction over ranks. Without it for a parameter, autograd
    adds to the parameter's gradient itself; the group's type, in which ranks add up theirs, stays.
    RuntimeError if torch lacks FSDP2's private names.
    """
    user = "--optim.sums bf16"

    def tell(*_: Any) -> None:
        for module in modules:
            state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13's name, and 2.11's
            groups = [need(state, "_fsdp_param_group", user)] if groups is None else groups
            for group in groups:
                for parameter in need(group, "fsdp_params", user) if group else ():
                    need(parameter, "reduce_dtype", user)
                    parameter.reduce_dtype = None
        hook.remove()

    assert isinstance(root, nn.Module)
    modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
    # FSDP2 sets the types in its own hook, which it puts before others, in the first forward
    hook = root.register_forward_pre_hook(tell)
