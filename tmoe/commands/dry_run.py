"""The dry run: the parameters and bytes of each rank, for any world, before a GPU is rented.

The model is built on the meta device, stage by stage, and laid out over a fake process group by the same code
as in training. So placements and local shapes are the real ones; only the memory of activations is computed
from formulas (plan/memory.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table
from torch.distributed.tensor import DTensor

from tmoe.base.listing import counted
from tmoe.base.private_torch import TESTED, find
from tmoe.checkpoint.base import refuse_adapters
from tmoe.checkpoint.manifest import is_step, read_manifest
from tmoe.cli.parse import planned_world, resumes
from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError, Setting
from tmoe.config.gpus import NODE
from tmoe.config.run import Config
from tmoe.model.count import count_parameters, flops_per_token
from tmoe.model.float8 import describe, require_gpu, require_layers
from tmoe.model.freeze import require_matches, settle
from tmoe.model.lora import describe as describe_adapters
from tmoe.model.lora import require_ranks
from tmoe.model.muon import describe as describe_muon
from tmoe.model.parallelize import parallelize
from tmoe.model.qk_clip import describe as describe_clip
from tmoe.model.stage_times import division
from tmoe.model.stages import Stages
from tmoe.model.transformer import Transformer
from tmoe.moe.fp8_choice import describe as describe_fp8
from tmoe.moe.fp8_choice import planned_arch
from tmoe.parallel.mesh import Mesh, build_mesh, local_part, planned_nodes, require_inside_nodes
from tmoe.parallel.pipeline_cut import PARTS
from tmoe.plan.fitting import verdict
from tmoe.plan.frozen_codes import describe_freed
from tmoe.plan.memory import memory_of_stages, peak_bytes, plan
from tmoe.post.rewards.reward_terms import parse as parse_rewards
from tmoe.run.process import one_error

# The rows of the table of memory: their contents, and the settings that change their size.
LEGEND = {
    "parameters": "weights that AdamW writes (--optim.masters), this rank's share: smaller with more ranks",
    "gradients": "of this rank's share: smaller with more ranks",
    "moments": "AdamW's two or Muon's one (--optim.states), fewer with more ranks, none with --optim.offload",
    "ema": "the average of the weights (--optim.ema)",
    "gathered": "weights of other ranks while a block computes with them, and copies in the compute type",
    "accumulated": "sums of gradients between micro-batches (--train.accumulate, --optim.sums)",
    "activations": "kept by the forward for the backward: --train.batch, --parallel.checkpoint",
    "working": "temporaries of the largest block, or of the loss: --train.batch",
    "reference": "the model that --grpo.kl keeps, this rank's share (--optim.masters)",
    "rollout": "weights gathered for a rollout, and its passes: --grpo.rollout-slots; freed before an update",
    "pool": "keys and values in a rollout: --grpo.rollout-slots, --grpo.pool-gib; freed before an update",
    "away": "moments moved to the host in a rollout, not counted there (--grpo.offload)",
    "exchange": "buffers into which other ranks write rows for this rank's experts (--parallel.dispatch)",
}


class Kind(NamedTuple):
    """The properties that parameters in one row of the table of placements share."""

    name: str
    """the name without the block's number"""
    shape: tuple[int, ...]
    placement: str
    mesh: str
    local: tuple[int, ...]


def dry_run(cfg: Config, schedule: Sequence[str] = ()) -> None:
    """Prints counts of parameters, their placements, and the bytes on the fullest of `cfg.world` ranks.

    schedule: lines on the steps, printed above the tables.
    """
    axes = Axes.of(cfg.parallel, planned_world(cfg, 1))
    with one_error():
        require_matches(cfg)
        if not resumes(cfg):
            if cfg.init and is_step(Path(cfg.init)):
                refuse_adapters(Path(cfg.init), read_manifest(Path(cfg.init)), "init")
            if cfg.init:
                from tmoe.hf.load_weights import require_model  # slow to import

                require_model(Path(cfg.init), cfg.model)
            require_ranks(cfg)
            if cfg.lora.init:
                from tmoe.hf.adapters.load import require_start  # slow to import

                require_start(Path(cfg.lora.init), cfg)
        require_layers(cfg)
        require_gpu(cfg)
        if cfg.task == "grpo":
            parse_rewards(cfg.grpo.rewards, code=cfg.grpo.code)
    found: dict[Kind, list[int]] = {}  # the stage of each parameter
    # float8 and fp8 change no placement, so a plan works without torchao
    placed = replace(cfg, train=replace(cfg.train, float8="none", fp8="none", fp8_everywhere=False))
    for stage in range(axes.pp):
        with one_error(), fake_world(cfg, axes, stage * axes.stage) as mesh:
            model = Stages(placed, mesh) if axes.pp > 1 else whole(placed, mesh)
            for kind in kinds(model.state_dict()):
                found.setdefault(kind, []).append(stage)
    counts = count_parameters(cfg.model)
    per_stage = memory_of_stages(cfg, axes)
    peaks = list(map(peak_bytes, per_stage))
    fullest = peaks.index(max(peaks))
    console = Console(width=150)
    console.print(f"{counted(axes.world, 'rank')}: {axes}")
    console.print("\n".join([*meaning(cfg, axes), *schedule]))
    flops = flops_per_token(cfg.model, cfg.train.seq, cfg.lora.rank > 0)
    console.print(
        f"parameters: {counts.total:,} total, {counts.active:,} active a token; "
        f"{flops / 1e9:.3f} GFLOP a token, forward and backward"
    )
    for line in [
        *filter(None, [describe(cfg)]),
        *describe_fp8(cfg, axes, planned_arch(cfg)),
        *describe_freed(cfg, axes, planned_arch(cfg)),
        *describe_adapters(cfg, axes.ep),
        *describe_muon(cfg, axes),
        *describe_clip(cfg),
    ]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if axes.pp > 1:
        console.print(stages(cfg, axes, peaks))
    console.print(placements(found, axes))
    console.print(memory(per_stage[fullest], fullest * axes.stage))
    console.print("\n".join(verdict(cfg, axes, cfg.gpu)), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def fake_world(cfg: Config, axes: Axes, rank: int) -> Iterator[Mesh]:
    """A context with the mesh of these axes as one rank sees it, without other processes.

    Raises ConfigError where `build_mesh` of a run would: ranks 0 to 7 share the first node, and so forth
    (`cfg.node`).
    """
    size = cfg.node or NODE
    nodes = planned_nodes(axes.world, size) if axes.ep * axes.etp * axes.tp > 1 else []
    try:
        require_inside_nodes(axes, nodes, cfg.parallel.ep_across_nodes)
    except ConfigError as error:
        raise ConfigError(f"{error.text}; planned with {Setting('node', size)}") from None
    # The "fake" backend is available only by this private name.
    FakeStore = find("torch.testing._internal.distributed.fake_pg.FakeStore")
    if FakeStore is None:
        message = (
            f"--dry-run: torch {torch.__version__} has no fake process group; tmoe was tested with {TESTED}"
        )
        raise SystemExit(f"error: {message}")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=axes.world)
    try:
        degrees = {field.name: getattr(axes, field.name) for field in fields(axes)}
        yield replace(build_mesh(**degrees, ep_across_nodes=True), nodes=tuple(nodes))
    finally:
        dist.destroy_process_group()


def whole(cfg: Config, mesh: Mesh) -> torch.nn.Module:
    """A model without pipeline stages, laid out."""
    with torch.device("meta"):
        model = Transformer(cfg.model)
        settle(model, cfg)
    return parallelize(model, mesh, cfg, whole_forwards=True)


def meaning(cfg: Config, axes: Axes) -> Iterator[str]:
    """A line for each axis, on what it divides, and one for the tokens of a step."""
    p, model, train = cfg.parallel, cfg.model, cfg.train
    chunks = f"{axes.pp * p.chunks_a_stage} chunks of {model.layers} blocks"
    says = dict(
        pp=f"pipeline stages of {axes.stage} ranks, {p.schedule}: {chunks}",
        replicate=f"copies of the parameters, each over {axes.shard} ranks of a stage",
        dp="ranks that share the same experts",
        ep=f"ranks that divide {model.moe.experts} experts: {model.moe.experts // axes.ep} each",
        etp=f"ranks that divide each expert: {model.moe.ffn_dim // axes.etp} of {model.moe.ffn_dim} channels",
        cp=f"ranks that divide a sequence, by {p.cp_exchange}",
        tp=f"ranks that divide attention's heads: {model.heads // axes.tp} of {model.heads}",
    )
    for name, what in says.items():
        if getattr(axes, name) > 1:
            yield f"  {name:<9} {getattr(axes, name):>4} {what}"
    sequences = axes.readers * train.batch * train.accumulate
    yield (
        f"a step: {axes.readers} readers x {train.accumulate} micro-batches x {train.batch} sequences x "
        f"{train.seq} = {sequences * train.seq:,} tokens; "
        f"a rank works on {train.batch * train.seq // axes.parts:,} at a time"
    )


def stages(cfg: Config, axes: Axes, peaks: list[int]) -> Table:
    """A row for each pipeline stage: its ranks, its parts of the model, and its peak memory."""
    order = plan(cfg, axes)
    found = division(cfg, axes)
    made = Table("stage", "ranks", "computes", "GiB at most", title="stages", title_justify="left")
    for stage, most in enumerate(peaks):
        parts = []
        for span, home in zip(found.spans, order.home, strict=True):
            if home == stage:
                last = span.stop == cfg.model.layers and not found.pieces
                many = f"blocks {span.start} to {span.stop - 1}"
                parts += [] if span.start else ["embedding"]
                parts += [many if len(span) > 1 else f"block {span.start}", *["norm and head"] * last]
                parts += ["further tokens"] * (last and cfg.model.mtp.depth > 0)
        parts += [
            f"norm and head for {n / PARTS:.0%} of the tokens" for home, n in found.pieces if home == stage
        ]
        first = stage * axes.stage
        ranks = f"{first} to {first + axes.stage - 1}" if axes.stage > 1 else f"{first}"
        made.add_row(f"{stage}", ranks, ", ".join(parts), f"{most / 2**30:.3f}")
    return made


def kinds(tensors: dict[str, torch.Tensor]) -> Iterator[Kind]:
    """The kind of each tensor."""
    for name, p in tensors.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        spread = isinstance(p, DTensor)  # the routers' choice biases are plain tensors
        placed = (str(p.placements), str(p.device_mesh.mesh_dim_names)) if spread else ("replicated", "")
        yield Kind(kind, tuple(p.shape), *placed, tuple(local_part(p).shape))


def placements(found: dict[Kind, list[int]], axes: Axes) -> Table:
    """A row for all parameters of the same name (without the block's number), shape and placement."""
    columns = [Column("parameter", no_wrap=True), "copies", "shape", "mesh", "placement"]
    columns += ["on rank 0"] if axes.pp == 1 else ["stages", "on a stage's first rank"]
    made = Table(*columns, title="placement", title_justify="left")
    for kind, where in found.items():
        row = [kind.name, str(len(where)), str(list(kind.shape)), kind.mesh, kind.placement]
        made.add_row(*row, *([] if axes.pp == 1 else [runs(sorted(set(where)))]), str(list(kind.local)))
    return made


def runs(numbers: list[int]) -> str:
    """Rising numbers as text: `0, 2 to 5`."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][-1] + 1:
            found[-1].append(n)
        else:
            found.append([n])
    return ", ".join(f"{one[0]} to {one[-1]}" if len(one) > 1 else f"{one[0]}" for one in found)


def memory(parts: dict[str, int], rank: int) -> Table:
    """A row for each of `memory_per_rank`'s parts, in GiB, and the peak of the memory at one time."""
    held = f"held by rank {rank}, the fullest" if rank else "held by a rank"
    table = Table(held, "GiB", "what it is", title="memory", title_justify="left")
    for name, size in parts.items():
        table.add_row(name, f"{size / 2**30:.3f}", LEGEND[name])
    table.add_section()
    most = peak_bytes(parts)
    table.add_row("most at one time", f"{most / 2**30:.3f}")
    if parts["exchange"]:
        table.add_row("torch's part (peak_gib)", f"{(most - parts['exchange']) / 2**30:.3f}")
    return table
