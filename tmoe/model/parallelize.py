"""Lays a model out over a mesh, in this order: tp and cp, float8, ep, recomputation, compile, FSDP2.

Where the hooks are, for one MoE block:

    Block.forward             FSDP2 over all ranks: gathers norms, attention, router, shared expert
      Experts.forward         over dp: gathers this rank's experts, by shared_copies.py or, if they are
                              large, by FSDP2
        Block.compute         one compiled graph, fullgraph: no hook inside

next: parallel/zero.py
"""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils.checkpoint import checkpoint

from tmoe.base.private_torch import find
from tmoe.base.types import FLOATS
from tmoe.config.check import ConfigError, Setting
from tmoe.config.float8_settings import Asked, require_float8
from tmoe.config.model import require_reach
from tmoe.config.run import Config, TrainConfig, require_heads
from tmoe.config.sizes import compute_bytes
from tmoe.model.attention_parallel import Spread
from tmoe.model.compiler import compiled
from tmoe.model.dense_sums import sum_linears
from tmoe.model.float8 import apply_float8
from tmoe.model.lora import is_adapter
from tmoe.model.nf4 import has_nf4, require_alone
from tmoe.model.quantised import quantised_to
from tmoe.model.transformer import Block, Transformer
from tmoe.moe.exchange.adaptive import cost_of, ways
from tmoe.moe.exchange.dispatch import dispatcher_for
from tmoe.moe.exchange.padded import PaddedDispatcher
from tmoe.moe.exchange.two_level import over_nodes
from tmoe.moe.experts import Experts
from tmoe.moe.fp8_choice import arch_of, choose, frees_values
from tmoe.moe.layer import MoE
from tmoe.moe.nf4_experts import Nf4Experts
from tmoe.moe.own_experts import OwnExperts
from tmoe.ops.argument_checks import require
from tmoe.optim.matrices import chosen
from tmoe.parallel.collectives import name_of
from tmoe.parallel.copies import MicroBatches, WorkingCopy, stand_in
from tmoe.parallel.mesh import Mesh, keeps_whole, local_part, shard_dim, units
from tmoe.parallel.precise import Precise
from tmoe.parallel.shared_copies import GatheredCopy, SharingRanks, at_the_end
from tmoe.parallel.zero import keep_gathered, sum_as_computed

# build_mesh refuses a torch without _StridedShard
_StridedShard: Any = find("torch.distributed.tensor.placement_types._StridedShard")

Place = tuple[Tensor, DeviceMesh, Sequence[Placement]]  # a parameter's part on this rank, and its layout

# torch warns on every rank that an expert's full_tensor() takes two all-gathers, one over ep and one over dp.
# That is intended.
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
    lambda record: "sequential" not in str(record.msg)
)


def parallelize(
    model: nn.Module, mesh: Mesh, cfg: Config | None = None, whole_forwards: bool = False
) -> nn.Module:
    """Shards `model` (a Transformer, or any module that holds tmoe.MoE layers) over `mesh`, in place.

    Parameters become DTensors: experts on (dp, ep), all others over all ranks. Real tensors keep their values
    (every rank must hold the same values). Meta tensors stay meta, and are filled later by `to_empty` and
    `init_weights`.

    cfg: its fields `train.dtype`, `.float8`, `.batch` and `.seq`, `parallel.dispatch`, `.dispatch_dtype`,
        `.checkpoint`, `.gathered_gib`, `.shard`, `.cp_exchange`, `.tp_pieces` and `.adaptive_r` and `compile`
        are read. None: the defaults, but fp32 and not compiled.
    whole_forwards: a promise that every forward of a Transformer runs all blocks, that a backward begins at
        its end, and that set_requires_gradient_sync is called on the model itself for micro-batches that do
        not sync. FSDP2 then gathers small neighbouring blocks together, with one hook before the first block
        and one after the last. Experts that dp ranks share stay whole, up to `parallel.gathered_gib`, outside
        FSDP2's bookkeeping (shared_copies.py). If the promise is broken, blocks may be gathered or
        resharded at the wrong time, and gradients may not be reduced.

    In a model of your own, FSDP2 finds the outputs of the forward in tuples, lists, dicts and dataclasses. A
    backward that begins at any other output leaves gradients unreduced.

    Raises ValueError, on every rank and before anything changes, for a model that is already laid out or
    cannot be laid out.
    """
    for name, value, kind in (
        ("model", model, nn.Module),
        ("mesh", mesh, Mesh),
        ("cfg", cfg or Config(), Config),
    ):
        require(isinstance(value, kind), f"parallelize: {name}", repr(value)[:80], f"a {kind.__name__}")
    cfg = cfg or Config(compile=False, train=TrainConfig(dtype="fp32"))
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    require_new(model, layers)
    kind = quantised_to(model)
    valid = "a model that is not quantised: codes are for inference on one device"
    require(not kind or has_nf4(model), "parallelize: model", f"matrices in {kind}", valid)
    require_divided(model, mesh, cfg.train.float8)
    require_untied(model)
    require_whole(model, mesh)
    for moe in layers:
        require_divisible(moe, mesh)
    t = cfg.train
    require_float8(Asked.by(t.float8, t.fp8), t.batch, t.seq, mesh.axes.tp, mesh.axes.cp)
    tokens = cfg.train.batch * cfg.train.seq // mesh.axes.parts
    if isinstance(model, Transformer):
        apply_spread(model, mesh, cfg)
        apply_float8(model, cfg.train.float8)
    apply_fp8(layers, mesh, cfg)
    for moe in layers:
        apply_ep(moe, mesh, cfg.parallel.dispatch, tokens, cfg.parallel.dispatch_dtype)
        apply_way(moe, cfg.parallel.adaptive_r, tokens, compute_bytes(cfg))
    if isinstance(model, Transformer):
        for balancer in model.balancer, model.mtp.balancer:
            balancer.all_reduce = partial(all_reduce, group=mesh.world.get_group())
        model.expert_group = name_of(mesh.ep.get_group()) if mesh.axes.ep > 1 else ""
        apply_checkpoint(model, cfg.parallel.checkpoint)
        if cfg.compile:
            apply_compile(model)
    apply_fsdp(model, mesh, cfg, whole_forwards)
    return model


def require_new(model: nn.Module, layers: Sequence[MoE]) -> None:
    """ValueError for a model that is already laid out, has no forward, or has compiled blocks."""
    if isinstance(model, FSDPModule) or any(is_spread(moe.experts) for moe in layers):
        kind = type(model).__name__.removeprefix("FSDP")  # FSDP2 prepends it to the class name
        raise ValueError(
            f"parallelize: this {kind} is laid out over a mesh already; call it once, on a new model"
        )
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"parallelize: a {type(model).__name__} has no forward; give the module that calls its parts"
        )
    for i, block in enumerate(model.blocks if isinstance(model, Transformer) else ()):
        valid = (
            "a Block; parallelize comes before torch.compile, "
            "and compiles each block separately if cfg.compile is true"
        )
        require(isinstance(block, Block), f"parallelize: blocks.{i}", f"a {type(block).__name__}", valid)


def require_divided(model: nn.Module, mesh: Mesh, float8: str) -> None:
    """ValueError if the mesh has axes, or float8 has a value, that this model does not support."""
    if not isinstance(model, Transformer):
        for name in ("tp", "cp", "pp"):
            valid = f"1 for a {type(model).__name__}: only a tmoe.Transformer can be divided by this axis"
            size = getattr(mesh.axes, name)
            require(size == 1, f"parallelize: mesh.axes.{name}", f"{size}", valid)
        valid = f"none for a {type(model).__name__}: torchao's convert_to_float8_training, called before"
        require(float8 == "none", "parallelize: train.float8", float8, valid)
    elif mesh.axes.pp > 1 and model.first and model.last:
        valid = "1 for a whole Transformer; tmoe.parallel.pipeline(cfg, mesh) makes the parts of one"
        require(False, "parallelize: mesh.axes.pp", f"{mesh.axes.pp}", valid)


def all_reduce(t: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over a group's ranks; no gradient flows through it."""
    t = t.detach().clone()
    dist.all_reduce(t, group=group)
    return t


def apply_spread(model: Transformer, mesh: Mesh, cfg: Config) -> None:
    """Sets how tp and cp divide heads and tokens in every attention, and over which ranks the balancer adds.

    Raises ValueError if they cannot divide this model's heads.
    """
    axes = mesh.axes
    if axes.parts == 1:
        return
    require_heads(replace(cfg.parallel, tp=axes.tp, cp=axes.cp), model.cfg)
    spread = Spread.over(mesh, cfg.parallel.cp_exchange, cfg.parallel.tp_pieces)
    model.spread = spread
    for block in model.all_blocks():
        if block.attention is not None:
            block.attention.spread = spread
    for balancer in model.balancer, model.mtp.balancer:
        balancer.over_parts = partial(all_reduce, group=mesh.groups["parts"])


def apply_fp8(layers: Sequence[MoE], mesh: Mesh, cfg: Config) -> None:
    """Lets the experts of these layers multiply in fp8, if --train.fp8 asks for it and the table agrees."""
    if not choose(cfg, mesh.axes, arch_of(mesh.world.device_type)).on:
        return
    for moe in layers:
        valid = "tmoe's own experts with --train.fp8"
        ours = type(moe.experts) is Experts
        require(ours, "parallelize: experts", f"a {type(moe.experts).__name__}", valid)
        moe.experts.fp8 = True
        moe.experts.codes_alone = frees_values(cfg)


def apply_ep(moe: MoE, mesh: Mesh, dispatch: str, tokens: int = 0, wire: str = "same") -> None:
    """Makes the experts of a layer DTensors, Shard(0) on ep, and gives it the dispatcher of the expert group.

    Rank p of the group holds experts p*L to (p+1)*L - 1.
    dispatch, wire: as in ParallelConfig. tokens: the most tokens of any rank in a call, 0 if not known.
    Raises ValueError if ep does not divide the experts, or if the experts are sharded already.
    """
    if is_spread(moe.experts):
        raise ValueError("apply_ep: the experts of this MoE are sharded over a mesh already; call it once")
    require_divisible(moe, mesh)
    ep = mesh.ep.size()
    L = moe.router.cfg.experts // ep
    p = mesh.ep.get_local_rank()
    moe.router.devices = ep
    mean_K = moe.dispatcher.mean_K
    if moe.router.cfg.pad:
        moe.dispatcher = PaddedDispatcher(ep * L, mesh.ep.get_group() if ep > 1 else None)
    elif ep > 1 or dispatch == "nccl":
        # the shared expert may be a module of the user; with latent experts it never runs inside the exchange
        beside = getattr(moe.shared, "plain", False) and moe.to_latent is None
        width = moe.shared.work if beside else 0
        # symm's op uses whole experts, so it does not support ranks that divide experts
        way = "nccl" if mesh.axes.etp > 1 else dispatch
        lacks = moe.experts.symm_lacks
        group, fp8 = mesh.ep.get_group(), wire == "fp8"
        moe.dispatcher = dispatcher_for(group, L, way, tokens, fp8, lacks, width, mesh.nodes)
        if dispatch == "auto":
            moe.dispatcher = over_nodes(moe.dispatcher, mesh.nodes, moe.router.cfg.top_k)
    moe.dispatcher.mean_K = mean_K
    gathers = isinstance(moe.experts, Experts) and moe.experts.weigh == "activation"
    moe.ways = ways(moe.dispatcher, moe.router.cfg, mesh, gathers)
    moe.cost = cost_of(moe.dispatcher, moe.router.cfg, moe.router.cfg.latent_dim or moe.dim, mesh)
    moe.dispatcher = moe.ways[str(mesh.axes.etp)]
    owners = [moe.experts]
    if isinstance(moe.experts, OwnExperts):
        moe.experts.held = L
        owners = list(moe.experts.modules())
    spread: dict[Tensor, nn.Parameter] = {}  # two modules of own experts may share a parameter
    for owner in owners:
        for name, full in list(owner.named_parameters(recurse=False)):
            if full not in spread:
                local = full.data[p * L : (p + 1) * L].clone()
                placed = DTensor.from_local(local, mesh.ep, [Shard(0)], run_check=False)
                spread[full] = nn.Parameter(placed, full.requires_grad)
            setattr(owner, name, spread[full])


def is_spread(experts: Experts) -> bool:
    """Whether the parameters of these experts are sharded over a mesh already."""
    return any(isinstance(p, DTensor) for p in experts.parameters())


def apply_way(moe: MoE, adaptive_r: int | str | None, tokens: int, element: int) -> None:
    """Sets what the ranks exchange in a call without adaptive_r, by ParallelConfig.adaptive_r.

    tokens: number of tokens of each rank in a call; element: bytes per element. "auto" chooses once, for a
    training step.
    """
    if adaptive_r is None:
        return
    key = moe.way(adaptive_r, tokens, moe.router.cfg.top_k, element)
    if key is not None:
        moe.dispatcher = moe.ways[key]


def require_divisible(moe: MoE, mesh: Mesh) -> None:
    """Raises ValueError unless ep divides the layer's experts, and etp their width."""
    ep, etp = mesh.axes.ep, mesh.axes.etp
    E = moe.router.cfg.experts
    if E % ep:
        raise ConfigError.of("parallel.ep", ep, f"must divide {Setting('model.moe.experts', E)}")
    cfg = moe.router.cfg
    require_reach(cfg, ep)
    if isinstance(moe.experts, OwnExperts):
        require(
            etp == 1,
            "--parallel.etp",
            etp,
            "1 with experts of your own: etp divides the width of tmoe's experts",
        )
        return
    if isinstance(moe.experts, Nf4Experts):
        return
    width = moe.experts.gate_up.shape[1] // cfg.halves
    if width % etp:
        raise ConfigError.of("parallel.etp", etp, f"must divide {Setting('model.moe.ffn_dim', width)}")


def require_whole(model: nn.Module, mesh: Mesh) -> None:
    """Raises ValueError unless all experts can be laid out.

    An MoE's experts must have the parameters gate_up and down, and parameters of your own experts must be
    stacked, [E, ...]. Experts outside of an MoE, as swap_experts creates them, must be sharded over this mesh
    already.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    for layer, moe in layers.items():
        if isinstance(moe.experts, OwnExperts):
            moe.experts.require_stacked()
            continue
        if isinstance(moe.experts, Nf4Experts):
            require_alone(mesh.axes)
            continue
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
    """Raises ValueError if two layers share a parameter of their experts.

    Sharded over a mesh, it would become two parameters that are trained separately.
    """
    owner: dict[nn.Parameter, str] = {}
    for layer, moe in model.named_modules():
        for name, p in moe.experts.named_parameters() if isinstance(moe, MoE) else ():
            here = f"{layer}.experts.{name}"
            require(
                p not in owner,
                f"parallelize: {here}",
                f"the parameter of {owner.get(p)}",
                "a parameter of this layer alone",
            )
            owner[p] = here


def apply_checkpoint(model: Transformer, policy: str) -> None:
    """Recomputes the activations of a part of each block in the backward (Chen et al. 2016).

    The recomputed activations are equal to the bit, because the random generators are reset. The routers'
    load is taken from the forward alone. policy: as in ParallelConfig.checkpoint.
    """
    parts = dict(none=[], attention=["attend"], moe=["feed_forward"], block=["compute"])[policy]
    for block in model.all_blocks():
        for part in parts:
            setattr(block, part, recomputed(getattr(block, part), block))


def recomputed(part: Callable, block: Block) -> Callable:
    """A method of `block` whose activations are computed again in the backward."""

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():  # the graph's parameters are inputs of the graph
            return checkpoint(part, *args, use_reentrant=False)
        return checkpoint(
            part, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), block.standing_in())
        )

    return call


def apply_compile(model: Transformer) -> None:
    """Compiles each block's compute as one graph. A block that runs eager after this raises RuntimeError.

    Identical blocks share the graph, and so do all routings: sizes that depend on the routing are unbacked.
    """
    for block in model.all_blocks():
        block.compute = compiled(block.compute)
        block.must_compile = True


def apply_fsdp(model: nn.Module, mesh: Mesh, cfg: Config, whole_forwards: bool) -> None:
    """Shards parameters in fp32, to be gathered in the compute type; gradients are reduced in fp32.

    With --optim.masters bf16 the parameters are bf16 already.

    Gradients are summed, never averaged: the loss is already divided by the counts of the global batch, and
    experts and dense parameters are sharded over groups of different size. `parallel.shard` sets how long
    dense weights stay gathered and when their gradients are reduced (parallel/zero.py).

    Parameters that a rank holds whole (experts if dp is 1, all of a Transformer in a world of 1) are not
    given to FSDP2, see parallel/copies.py. Nor are experts that a rank shares but keeps whole
    (whole_forwards), see parallel/shared_copies.py, unless there are replicas. A model of your own is given
    to FSDP2 in a world of 1 too: its checkpointing may run parts of it in the backward, and working copies
    replace parameters only in modules that are called directly.
    """
    dtype = None if cfg.train.dtype == "fp32" else FLOATS[cfg.train.dtype]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    sums = torch.bfloat16 if cfg.optim.sums == "bf16" else torch.float32
    sharers = _sharers(model, mesh, cfg) if whole_forwards else None
    micros = MicroBatches()
    whole = _shard_experts(model, mesh, policy, sharers, micros, sums, cfg.optim.muon)
    _shard_blocks(model, mesh, policy, whole, whole_forwards, micros, sums)
    # also if the rank is alone, for the methods that FSDP2 adds to the model
    root = fully_shard(model, mesh=mesh.shard, mp_policy=policy, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else FSDP2 asks for a sum that gloo lacks
    if cfg.parallel.shard < 3:
        dense = [m for m in model.modules() if isinstance(m, FSDPModule) and not isinstance(m, Experts)]
        keep_gathered(root, dense, cfg.parallel.shard)
    micros.follow(root)
    if sharers:
        sharers.follow(root)
    if cfg.optim.sums == "bf16":
        sum_as_computed(root)


def _scopes(model: nn.Module) -> list[Experts]:
    """The expert modules that have parameters."""
    return [m for m in model.modules() if isinstance(m, Experts) and next(m.parameters(), None) is not None]


def _sharers(model: nn.Module, mesh: Mesh, cfg: Config) -> SharingRanks | None:
    """The ranks that share this rank's experts, if they keep them whole; else None."""
    held = [p.to_local() for experts in _scopes(model) for p in experts.parameters()]
    size = compute_bytes(cfg) * sum(p.numel() for p in held)
    keep = (
        at_the_end is not None
        and mesh.axes.replicate == 1
        and keeps_whole(mesh.dp.size(), [len(p) for p in held], size, cfg.parallel.gathered_gib)
    )
    return SharingRanks(mesh.dp.get_group()) if keep else None


def _shard_experts(
    model: nn.Module,
    mesh: Mesh,
    policy: MixedPrecisionPolicy,
    sharers: SharingRanks | None,
    micros: MicroBatches,
    sums: torch.dtype,
    muon: str | None,
) -> set[nn.Parameter]:
    """Shards experts over the ranks that share them; returns the parameters that a rank holds whole.

    muon: pattern of the weights that Muon trains.
    """
    names = {module: name for name, module in model.named_modules()}
    # the placement that FSDP2 gives to experts: the shards of ep, sharded again by dp
    cut = _StridedShard(0, split_factor=mesh.ep.size()) if mesh.ep.size() > 1 else Shard(0)
    dp = mesh.dp.size()
    new = partial(GatheredCopy, sharers=sharers) if sharers else partial(WorkingCopy, micros=micros)
    new = partial(new, sums=sums)
    whole: set[nn.Parameter] = set()

    def mine(p: Tensor) -> Place:
        local = local_part(p).chunk(dp)[mesh.dp.get_local_rank()].clone()
        return local, mesh.grid, [cut, Shard(0)]

    for experts in _scopes(model):
        if sharers or mesh.sharers.size() == 1:
            whole |= hold_whole(experts, policy.param_dtype, mine, new=new)
            experts.summed = True
            continue
        own = {name: p for name, p in experts.named_parameters() if not is_adapter(f".{name}")}
        by_muon = chosen(muon, ((f"{names[experts]}.{name}", p) for name, p in own.items()))
        dim = shard_dim([p.to_local().shape for p in own.values()], dp, whole=bool(by_muon))
        fully_shard(
            experts, mesh=mesh.sharers, mp_policy=policy, shard_placement_fn=partial(_cut, dim=dim, dp=dp)
        )
    return whole


def _cut(p: nn.Parameter, dim: int, dp: int) -> Shard:
    """The dimension in which FSDP2 cuts an expert parameter: dim, or another if dp does not divide it.

    Only dimension 0 can be cut unevenly.
    """
    even = [d for d in (dim, *range(p.dim() - 1, 0, -1)) if p.shape[d] % dp == 0]
    return Shard(0 if dim == 0 else next(iter(even), 0))


def _shard_blocks(
    model: nn.Module,
    mesh: Mesh,
    policy: MixedPrecisionPolicy,
    whole: set[nn.Parameter],
    whole_forwards: bool,
    micros: MicroBatches,
    sums: torch.dtype,
) -> None:
    """Shards a Transformer's blocks. In a world of 1 all parameters are held whole and added to `whole`."""
    if not isinstance(model, Transformer):
        return
    blocks = list(model.blocks)
    rates = [module for module in model.modules() if isinstance(module, Precise)]
    if mesh.world.size() == 1:
        for module in (*model.all_blocks(), model):
            if module is not model:
                sum_linears(module)
            place = lambda p: (p.data, mesh.world, [Shard(0)])  # noqa: E731
            place = lambda p: (p.data, mesh.world, [Shard(0)])  # noqa: E731
            new = partial(WorkingCopy, micros=micros, sums=sums)
            whole |= hold_whole(module, policy.param_dtype, place, whole, new=new)
        return
    # in fp32; all in one gather if every forward runs all blocks
    for unit in [rates] if whole_forwards and rates else [[module] for module in rates]:
        fully_shard(unit, mesh=mesh.shard, mp_policy=replace(policy, param_dtype=None))
    width = (policy.param_dtype or torch.float32).itemsize
    sizes = [
        width * sum(p.numel() for p in block.parameters() if not isinstance(p, DTensor)) for block in blocks
    ]
    for unit in units(sizes) if whole_forwards else [[i] for i in range(len(blocks))]:
        fully_shard([blocks[i] for i in unit], mesh=mesh.shard, mp_policy=policy, ignored_params=whole)
    for block in model.mtp:  # separate units: an evaluation does not run them
        fully_shard(block, mesh=mesh.shard, mp_policy=policy, ignored_params=whole)


def hold_whole(
    module: nn.Module,
    dtype: torch.dtype | None,
    place: Callable[[Tensor], Place],
    done: Collection[nn.Parameter] = (),
    new: Callable[[nn.Parameter, torch.dtype], WorkingCopy] = WorkingCopy,
) -> set[nn.Parameter]:
    """Converts the parameters of `module` that are not in `done` to DTensors, and returns them.

    While the module runs, working copies in `dtype` (None: the parameters' dtype), made by `new`, replace
    them. place: (local tensor, mesh, placements) of a parameter.
    """
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
    vars(module)["standing_in"] = standing_in
    return set(spread.values())
