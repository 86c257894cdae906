"""Lays a Transformer out over a mesh, in one visible order: expert parallelism, compile, FSDP2.

(float8 and tensor parallelism come before these, context parallelism and activation checkpointing between them.)

Where the hooks stand, for one MoE block:

    Block.forward             FSDP2 over all ranks: gathers norms, attention, router, shared expert
      Experts.forward         FSDP2 over dp: gathers this rank's experts
        Block.compute         one compiled graph, fullgraph: no hook inside

next: grad_norm.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tmoe.config import Config, TrainConfig
from tmoe.experts import Experts
from tmoe.model import Block, Transformer
from tmoe.moe import MoE
from tmoe.parallel.dispatch import AllToAllDispatcher
from tmoe.parallel.mesh import Mesh


def parallelize(model: nn.Module, mesh: Mesh, cfg: Config | None = None) -> nn.Module:
    """Shards `model` (a Transformer, or any module that holds tmoe.MoE layers) over `mesh`, in place.

    Parameters become DTensors: experts on (dp, ep), everything else over all ranks. Real tensors keep their values (every
    rank must hold the same ones); meta tensors stay meta, to be filled by `to_empty` and `init_weights`. Of cfg, `train.dtype`,
    `parallel.dispatch` and `compile` are read; None: fp32, auto, eager.
    """
    cfg = cfg or Config(compile=False, train=TrainConfig(dtype="fp32"))
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    for moe in layers:
        apply_ep(moe, mesh, cfg.parallel.dispatch)
    if isinstance(model, Transformer):
        model.balancer.all_reduce = lambda t: all_reduce(t, mesh)
        if cfg.compile:
            apply_compile(model)
    apply_fsdp(model, mesh, cfg.train.dtype)
    return model


def all_reduce(t: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sum over all ranks; no gradient flows through it."""
    t = t.detach().clone()
    dist.all_reduce(t, group=mesh.world.get_group())
    return t


def apply_ep(moe: MoE, mesh: Mesh, dispatch: str) -> None:
    """Experts become DTensors, Shard(0) on ep; rank p of the group holds experts p*L and on."""
    ep, E = mesh.ep.size(), moe.experts.gate_up.shape[0]
    if E % ep:
        raise ValueError(f"--parallel.ep={ep}: must divide --model.moe.experts={E}")
    L, p = E // ep, mesh.ep.get_local_rank()
    for name, full in list(moe.experts.named_parameters(recurse=False)):
        local = full.data[p * L : (p + 1) * L].clone()
        setattr(moe.experts, name, nn.Parameter(DTensor.from_local(local, mesh.ep, [Shard(0)], run_check=False)))
    if ep > 1 or dispatch == "nccl":
        moe.dispatcher = AllToAllDispatcher(mesh.ep.get_group(), L)


def apply_compile(model: Transformer) -> None:
    """Each block's compute as one graph. Identical blocks share it, and so does every routing: sizes that depend on the
    routing are unbacked. A block that runs eager after this raises."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.compute = torch.compile(block.compute, fullgraph=True, dynamic=False)
        block.must_compile = True


def apply_fsdp(model: nn.Module, mesh: Mesh, dtype: str) -> None:
    """fp32 shards; gathered in bf16 or fp32; gradients reduced in fp32 and summed, never averaged: the loss is already
    divided by the counts of the global batch, and experts and dense parameters live on groups of different size."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if dtype == "bf16" else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    scopes = [m for m in model.modules() if isinstance(m, Experts)]
    for experts in scopes:
        dim = shard_dim([p.to_local().shape for p in experts.parameters()], mesh.dp.size())
        fully_shard(experts, mesh=mesh.dp, mp_policy=policy, shard_placement_fn=lambda p, dim=dim: Shard(dim))
    blocks = list(model.blocks) if isinstance(model, Transformer) else []
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh.world, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else a pre-multiplied sum, which gloo lacks


def shard_dim(shapes: list[torch.Size], dp: int) -> int:
    """Dimension along which FSDP2 cuts experts: the experts, or 2F and D where dp divides those only. FSDP2 cuts dim 0
    unevenly, some ranks then hold less or nothing, and no other dimension."""
    even = [all(shape[dim] % dp == 0 for shape in shapes) for dim in (0, 1)]
    return 1 if even == [False, True] else 0
