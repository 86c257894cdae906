"""Lays a Transformer out over a mesh, in one visible order: expert parallelism, activation checkpointing, compile, FSDP2.

(float8 and tensor parallelism come before these, context parallelism after the first.)

Where the hooks stand, for one MoE block:

    Block.forward             FSDP2 over all ranks: gathers norms, attention, router, shared expert
      Experts.forward         over dp: gathers this rank's experts, by gathered.py or, where they are many, by FSDP2
        Block.compute         one compiled graph, fullgraph: no hook inside

next: grad_norm.py
"""

import logging
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from tmoe.config.run import Config, TrainConfig
from tmoe.model.attention_backend import COMPILE
from tmoe.model.transformer import Block, Transformer
from tmoe.moe.dispatch import dispatcher_for
from tmoe.moe.experts import Experts
from tmoe.moe.layer import MoE
from tmoe.moe.two_level import over_nodes
from tmoe.ops.check import require
from tmoe.parallel.copies import WorkingCopy, stand_in
from tmoe.parallel.gathered_copies import GatheredCopy, Sharers, at_the_end
from tmoe.parallel.mesh import Mesh, keeps_whole, local_part, shard_dim, units
from tmoe.stack import find

_StridedShard: Any = find("torch.distributed.tensor.placement_types._StridedShard")  # build_mesh asks for it

# torch tells every rank that an expert's full_tensor() takes two all-gathers, one over ep and one over dp: it does
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
    lambda record: "sequential" not in str(record.msg)
)


def parallelize(
    model: nn.Module, mesh: Mesh, cfg: Config | None = None, whole_forwards: bool = False
) -> nn.Module:
    """Shards `model` (a Transformer, or any module that holds tmoe.MoE layers) over `mesh`, in place.

    Parameters become DTensors: experts on (dp, ep), everything else over all ranks. Real tensors keep their values (every
    rank must hold the same ones); meta tensors stay meta, to be filled by `to_empty` and `init_weights`. Of cfg, `train.dtype`,
    `train.batch` and `.seq`, `parallel.dispatch`, `.checkpoint` and `.whole_gib` and `compile` are read; None: fp32, auto, none, 16, eager.
    whole_forwards: every forward of a Transformer runs all blocks, a backward begins at its end, and micro-batches that do not sync are
    told to the model itself. FSDP2 then gathers small neighbours together, with one hook in front of the first and one behind the last,
    and experts that dp ranks share stay whole, up to `parallel.whole_gib`, past FSDP2's bookkeeping (gathered.py). Without the promise
    others than asked for would be found gathered, or not, and gradients unreduced. Of somebody's own model FSDP2 finds what the forward
    returns in tuples, lists, dicts and dataclasses: a backward that begins at anything else leaves gradients unreduced.
    Raises ValueError, on every rank and before anything changes, for a model that is laid out already or cannot be.
    """
    for name, value, kind in (
        ("model", model, nn.Module),
        ("mesh", mesh, Mesh),
        ("cfg", cfg or Config(), Config),
    ):
        require(isinstance(value, kind), f"parallelize: {name}", repr(value)[:80], f"a {kind.__name__}")
    cfg = cfg or Config(compile=False, train=TrainConfig(dtype="fp32"))
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    if isinstance(model, FSDPModule) or any(isinstance(moe.experts.gate_up, DTensor) for moe in layers):
        kind = type(model).__name__.removeprefix("FSDP")  # which FSDP2 puts before the class's own name
        raise ValueError(
            f"parallelize: this {kind} is laid out over a mesh already; call it once, on a new model"
        )
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"parallelize: a {type(model).__name__} has no forward; give the module that calls its parts"
        )
    for i, block in enumerate(model.blocks if isinstance(model, Transformer) else ()):
        valid = "a Block; parallelize comes before torch.compile, and compiles each by itself where cfg.compile is true"
        require(isinstance(block, Block), f"parallelize: blocks.{i}", f"a {type(block).__name__}", valid)
    require_untied(model)
    require_whole(model, mesh)
    for moe in layers:
        require_divisible(moe, mesh)
    for moe in layers:
        apply_ep(moe, mesh, cfg.parallel.dispatch, cfg.train.batch * cfg.train.seq, cfg.parallel.wire)
    if isinstance(model, Transformer):
        model.balancer.all_reduce = lambda t: all_reduce(t, mesh)
        apply_checkpoint(model, cfg.parallel.checkpoint)
        if cfg.compile:
            apply_compile(model)
    apply_fsdp(model, mesh, cfg, whole_forwards)
    return model


def all_reduce(t: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sum over all ranks; no gradient flows through it."""
    t = t.detach().clone()
    dist.all_reduce(t, group=mesh.world.get_group())
    return t


def apply_ep(moe: MoE, mesh: Mesh, dispatch: str, tokens: int = 0, wire: str = "same") -> None:
    """Experts become DTensors, Shard(0) on ep; rank p of the group holds experts p*L and on. tokens: most a rank has, if known."""
    if isinstance(moe.experts.gate_up, DTensor):
        raise ValueError("apply_ep: the experts of this MoE are spread over a mesh already; call it once")
    require_divisible(moe, mesh)
    ep = mesh.ep.size()
    L, p = moe.experts.gate_up.shape[0] // ep, mesh.ep.get_local_rank()
    if ep > 1 or dispatch == "nccl":
        biased = moe.experts.down_bias is not None
        width = (
            moe.shared.down.in_features if getattr(moe.shared, "plain", False) else 0
        )  # or somebody's own module
        moe.dispatcher = dispatcher_for(
            mesh.ep.get_group(), L, dispatch, tokens, wire == "fp8", biased, width
        )
        if dispatch == "auto":
            moe.dispatcher = over_nodes(moe.dispatcher, mesh.nodes, moe.router.cfg.top_k)
    for name, full in list(moe.experts.named_parameters(recurse=False)):
        local = full.data[p * L : (p + 1) * L].clone()
        spread = DTensor.from_local(local, mesh.ep, [Shard(0)], run_check=False)
        setattr(moe.experts, name, nn.Parameter(spread, full.requires_grad))


def require_divisible(moe: MoE, mesh: Mesh) -> None:
    ep, E = mesh.ep.size(), moe.experts.gate_up.shape[0]
    if E % ep:
        raise ValueError(f"--parallel.ep={ep}: must divide --model.moe.experts={E}")


def require_whole(model: nn.Module, mesh: Mesh) -> None:
    """A MoE's experts are parameters of their own; experts outside of one, as swap_experts leaves them, lie on this mesh already."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    for layer, moe in layers.items():
        mine = {name for name, _ in moe.experts.named_parameters(recurse=False)}
        what = f"parameters {', '.join(sorted(mine)) or 'none'}"
        require(
            {"gate_up", "down"} <= mine,
            f"parallelize: {layer}.experts",
            what,
            "gate_up and down (parametrize later)",
        )
    ours = {moe.experts for moe in layers.values()}
    for name, experts in model.named_modules():
        if isinstance(experts, Experts) and experts not in ours:
            sizes = {p.device_mesh.size() if isinstance(p, DTensor) else None for p in experts.parameters()}
            got = "whole" if None in sizes else f"spread over ep={', '.join(map(str, sizes))}"
            valid = f"spread by swap_experts(model, mesh) with the same mesh, ep={mesh.ep.size()}"
            require(sizes == {mesh.ep.size()}, f"parallelize: {name}", got, valid)


def require_untied(model: nn.Module) -> None:
    """Experts of one layer alone: spread over a mesh, what two layers share would become two, each trained by itself."""
    owner: dict[nn.Parameter, str] = {}
    for layer, moe in model.named_modules():
        for name, p in moe.experts.named_parameters() if isinstance(moe, MoE) else ():
            here = f"{layer}.experts.{name}"
            require(
                p not in owner,
                f"parallelize: {here}",
                f"the parameter of {owner.get(p)}",
                "one of this layer alone",
            )
            owner[p] = here


def apply_checkpoint(model: Transformer, policy: str) -> None:
    """Activations of a part of each block are not kept but computed again in the backward (Chen et al. 2016), to the same bits: the
    generators are wound back. The load of the routers is taken from the forward alone."""
    parts = dict(none=[], attention=["attend"], moe=["feed_forward"], block=["compute"])[policy]
    for block in model.blocks:
        assert isinstance(block, Block)
        for part in parts:
            setattr(block, part, recomputed(getattr(block, part), block))


def recomputed(part: Callable, block: Block) -> Callable:
    def call(*args):
        if torch.compiler.is_compiling():  # the graph's own parameters are inputs of it
            return checkpoint(part, *args, use_reentrant=False)
        return checkpoint(
            part, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), block.standing_in())
        )

    return call


def apply_compile(model: Transformer) -> None:
    """Each block's compute as one graph. Identical blocks share it, and so does every routing: sizes that depend on the
    routing are unbacked. A block that runs eager after this raises."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.compute = torch.compile(block.compute, fullgraph=True, **COMPILE)
        block.must_compile = True


def apply_fsdp(model: nn.Module, mesh: Mesh, cfg: Config, whole_forwards: bool) -> None:
    """fp32 shards; gathered in bf16 or fp32; gradients reduced in fp32 and summed, never averaged: the loss is already
    divided by the counts of the global batch, and experts and dense parameters live on groups of different size.

    What a rank holds whole (experts where dp is 1, all of a Transformer in a world of 1) is left out, see working.py, and so are
    experts that it shares but keeps whole (whole_forwards), see gathered.py. Somebody's own model stays with FSDP2 in a world of 1,
    too: its own checkpointing runs parts of it in the backward, where working copies stand in only for modules that are called by
    themselves."""
    param_dtype = torch.bfloat16 if cfg.train.dtype == "bf16" else None
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    scopes = [m for m in model.modules() if isinstance(m, Experts)]
    blocks = list(model.blocks) if isinstance(model, Transformer) else []
    width = (param_dtype or torch.float32).itemsize
    sizes = [
        width * sum(p.numel() for p in block.parameters() if not isinstance(p, DTensor)) for block in blocks
    ]
    whole: set[nn.Parameter] = set()
    # the placement that FSDP2 gives to experts: the shards of ep, cut once more by dp
    cut = _StridedShard(0, split_factor=mesh.ep.size()) if mesh.ep.size() > 1 else Shard(0)
    dp, held = mesh.dp.size(), [p.to_local() for experts in scopes for p in experts.parameters()]
    size = width * sum(p.numel() for p in held)
    keep = (
        whole_forwards
        and at_the_end is not None
        and keeps_whole(dp, [len(p) for p in held], size, cfg.parallel.whole_gib)
    )
    sharers = Sharers(mesh.dp.get_group()) if keep else None
    new = partial(GatheredCopy, sharers=sharers) if sharers else WorkingCopy

    def mine(p: Tensor) -> tuple:
        return local_part(p).chunk(dp)[mesh.dp.get_local_rank()].clone(), mesh.grid, [cut, Shard(0)]

    for experts in scopes:
        if sharers or dp == 1:
            whole |= hold_whole(experts, param_dtype, mine, new=new)
            continue
        dim = shard_dim([p.to_local().shape for p in experts.parameters()], dp)
        fully_shard(experts, mesh=mesh.dp, mp_policy=policy, shard_placement_fn=lambda p, dim=dim: Shard(dim))
    alone = mesh.world.size() == 1 and isinstance(model, Transformer)
    if alone:
        for module in (*blocks, model):
            whole |= hold_whole(module, param_dtype, lambda p: (p.data, mesh.world, [Shard(0)]), whole)
    else:
        for unit in units(sizes) if whole_forwards else [[i] for i in range(len(blocks))]:
            fully_shard([blocks[i] for i in unit], mesh=mesh.world, mp_policy=policy, ignored_params=whole)
    root = fully_shard(
        model, mesh=mesh.world, mp_policy=policy, ignored_params=whole
    )  # alone: for its methods
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else a pre-multiplied sum, which gloo lacks
    if sharers:
        sharers.follow(root)


def hold_whole(
    module: nn.Module,
    dtype: torch.dtype | None,
    place: Callable[[Tensor], tuple],
    done: Collection[nn.Parameter] = (),
    new: Callable[[nn.Parameter, torch.dtype], WorkingCopy] = WorkingCopy,
) -> set[nn.Parameter]:
    """Parameters of `module` that are not done yet become DTensors, `place` giving (local tensor, mesh, placements), and are
    replaced by working copies, made by `new`, while it runs. Returns them."""
    spread: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False)):
            if p not in done:
                if p not in spread:
                    local, on, placements = place(p)
                    spread[p] = nn.Parameter(
                        DTensor.from_local(local, on, placements, run_check=False), p.requires_grad
                    )
                setattr(owner, name, spread[p])
    standing_in = stand_in(module, dtype, leave_out=done, new=new)
    if isinstance(module, Block):
        module.standing_in = standing_in
    return set(spread.values())
