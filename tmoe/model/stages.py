"""A Transformer over pipeline stages: this rank's chunks, with the interface of a whole model.

A chunk is a Transformer without the blocks, embedding, norm or head that other chunks have. Names and seeds
are those of the whole model, so step folders do not depend on how the model was cut. Only hidden states are
sent between stages. The backward of a chunk's balancing loss begins in that chunk.

If the head or further tokens need the embedding's table, it is stored on the first stage and on the last. The
gradients of the two copies are added up, so the copies stay equal. The first copy is counted in the norm and
saved. If one stage has both ends (schedule v), the copy of the last chunk is not a parameter: it is
overwritten with the first chunk's table before each pass, and its gradient is added to that table's gradient
afterwards.

A divided head (--parallel.head divided) is stored in the same way, with the norm before it, on each stage
that has a piece of it. Its pieces compute the loss of different tokens of a micro-batch.

next: parallel/pipelining.py
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tmoe.base.types import FLOATS
from tmoe.config.run import Config
from tmoe.data.dataset import Micro
from tmoe.model.freeze import settle
from tmoe.model.loss import Objective
from tmoe.model.parallelize import parallelize
from tmoe.model.stage_times import chunk_costs, division, h200, message_seconds, stage_table
from tmoe.model.transformer import ALL, Context, Transformer
from tmoe.moe.balance import RouterStats, Totals, log_width, stats_of
from tmoe.moe.exchange.adaptive import WeightsDispatcher
from tmoe.moe.exchange.dispatch import SymmDispatcher
from tmoe.moe.exchange.expert_tensor import ExpertTensorDispatcher
from tmoe.moe.experts import Experts
from tmoe.moe.layer import MoE
from tmoe.moe.trace import give, layers_of
from tmoe.ops.argument_checks import require
from tmoe.ops.experts.deferred import DeferredGradients
from tmoe.ops.gradient_sums import NEW
from tmoe.parallel.agree import gathered
from tmoe.parallel.copies import WorkingCopy, working_copy
from tmoe.parallel.grad_norm import clip_grad_norm_
from tmoe.parallel.mesh import Mesh, local_part, patience, set_timeout
from tmoe.parallel.pipelining import Pipeline, Shape, as_slice, own_chunks
from tmoe.parallel.shared_copies import GatheredCopy

log = logging.getLogger(__name__)


class ModelPart(Transformer):
    """Some blocks of a Transformer: the first part has the embedding, the last has norm and head.

    A part without blocks is a piece of the head.
    """

    def forward(  # pyrefly: ignore
        self,
        x: Tensor,
        context: Context,
        micro: Micro,
        totals: Totals,
        objective: Objective | None,
        piece: slice = ALL,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states (the last part: its share of the loss), and the balancing loss of its blocks or None.

        x: whole rows of tokens on the first part, else hidden states of this rank's tokens.
        piece: the tokens of x among this rank's tokens; not all of them in a piece of the head.
        """
        given = micro.given or {}
        x = self.embed(x, given.get("noise")) if self.first else x
        x, load = self.run_blocks(x, context)
        extra = None if load is None else self.balancer.loss(load, totals)
        if not self.last:
            return x, extra
        assert self.norm is not None
        rows = micro.tokens_BS, micro.targets_BS, micro.documents_BS, micro.padding_BS
        return self.losses(self.norm(x), rows, context, totals, objective, given, piece), extra


class _Chunk:
    """A part in the form that the pipeline calls: with the micro-batches of the current step."""

    def __init__(self, stages: Stages, part: ModelPart, piece: int | None):
        """piece: the number of the piece of the head that the part is; None: it has blocks."""
        self.stages = stages
        self.part = part
        self.piece = piece
        self.experts = scopes(part)

    def forward_micro(self, micro: int, x: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        stages = self.stages
        stages.replay(self.part, micro)
        here = stages.micros[micro]
        x = here.tokens_BS if x is None else x
        piece = ALL
        if self.piece is not None:
            x, piece = x[None], as_slice(stages.pieces[self.piece])
        y, extra = self.part(x, stages.contexts[micro], here, stages.totals, stages.objective, piece)
        if not self.part.last:
            return y, [] if extra is None else [extra]
        stages.loss += self.part.task_loss
        return None, [y if extra is None else y + extra]

    def begin_backward(self, micro: int, last: bool) -> None:
        self.stages.replay(self.part, micro)  # for layers that are recomputed
        # With --parallel.shard 1 or 2 this also determines how long weights stay gathered: until the chunk's
        # last backward of the step (parallel/zero.py).
        self.part.set_requires_gradient_sync(last)
        self.part.set_is_last_backward(last)

    def finish_experts(self, left: list[DeferredGradients], last: bool) -> None:
        """Computes the gradients that a backward deferred, and gives them to each layer's working copies.

        The copies are found by their address. (A layer number as argument of the op would be a constant of
        its graph, which all layers share.)
        """
        found = {copies[0].tensor.data_ptr(): copies for copies in self.copies()}
        for layer in left:
            copies = found[layer.gate_up.data_ptr()]
            trained = [copy.master.requires_grad for copy in copies]
            if any(trained):
                up, down = (
                    copy.open(last) if one else NEW for copy, one in zip(copies, trained, strict=True)
                )
                grads = layer.gradients((up, down))
                for copy, one, target, grad in zip(copies, trained, (up, down), grads, strict=True):
                    if one:
                        copy.close(target, grad, last)

    def copies(self) -> list[tuple[WorkingCopy, WorkingCopy]]:
        """The copies of gate_up and down of each layer's experts, for layers that have copies already."""
        pairs = [[working_copy(p) for p in (e.gate_up, e.down)] for e in self.experts]
        return [(a, b) for a, b in pairs if a is not None and b is not None]

    def end_step(self) -> None:
        """Waits for the gradients that were sent after backwards."""
        copies = [copy for pair in self.copies() for copy in pair]
        for sharers in {copy.sharers for copy in copies if isinstance(copy, GatheredCopy)}:
            sharers.finish()


class _Copies(NamedTuple):
    """Tensors that several stages hold."""

    names: tuple[str, ...]
    owned: bool  # whether this rank's copy is the one that is counted and saved
    group: dist.ProcessGroup  # the ranks that hold the same shards

    def has(self, name: str) -> bool:
        """Whether a name is of one of these tensors, or of its state in the optimizer."""
        return ".blocks." not in f".{name}" and f".{name}".endswith(tuple(f".{own}" for own in self.names))


class Stages(nn.Module):
    """This rank's parts of a Transformer. Parameters have their names in the whole model.

    `forward_backward` and `evaluate` are collectives of all stages.
    """

    def __init__(self, cfg: Config, mesh: Mesh):
        """Lays the parts out over the mesh. They are on the meta device, see `Transformer`.

        Raises ValueError, naming the flags, if the model cannot be cut into this number of chunks.
        """
        super().__init__()
        self.cfg = cfg.model
        self.mesh = mesh
        self.division = division(cfg, mesh.axes)
        self.table = stage_table(cfg, mesh.axes)
        self.parts = nn.ModuleDict()
        for chunk in own_chunks(self.table, mesh.place.pp):
            with torch.device("meta"):
                part = ModelPart(cfg.model, *self.division.part(chunk))
                settle(part, cfg)
            self.parts[str(chunk)] = parallelize(part, mesh, cfg, whole_forwards=True)
        if cfg.parallel.schedule == "v" and can_defer(self):
            self.table = stage_table(cfg, mesh.axes, deferred=True)
            for part in self:
                for experts in scopes(part):
                    experts.deferred = True
        self.dtype = FLOATS[cfg.train.dtype]
        blocks = len(self.table.home)
        self.chunks = {
            int(number): _Chunk(self, part, int(number) - blocks if int(number) >= blocks else None)
            for number, part in zip(self.parts, self, strict=True)
        }
        costs = chunk_costs(cfg, mesh.axes, self.division)
        latency = message_seconds(cfg, mesh.axes, h200())
        self.pipeline = Pipeline(self.chunks, self.table, mesh, costs, latency)
        self.copies = list(self._groups_of_copies())
        self.replayed: list[dict[MoE, Tensor]] | None = None  # ids by micro-batch (moe/trace.py)

    def __iter__(self) -> Iterator[ModelPart]:
        return iter(self.parts.values())  # pyrefly: ignore

    @property
    def part(self) -> ModelPart:
        """One of this rank's parts, for facts that are the same in all parts."""
        return next(iter(self))

    def init_weights(self, seed: int | None = None) -> None:
        """Draws all weights again; see parallel/init_weights.py."""
        for part in self:
            part.init_weights(seed)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all parts, by their names in the whole model."""
        for part in self:
            yield from ((name, p) for name, p in part.named_parameters() if not self._follows(part, name))

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        """The tensors of all parts, by their names in the whole model."""
        tensors = ((part, *named) for part in self for named in part.state_dict().items())
        return {name: t for part, name, t in tensors if not self._follows(part, name)}

    def counted(self) -> Iterator[nn.Parameter]:
        """The parameters that the gradient norm counts: all except copies of other stages' parameters."""
        return (p for name, p in self.named_parameters() if not self.is_copy(name))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """tmoe.parallel.clip_grad_norm_ over all stages.

        A tied table and a divided head are counted once, and all copies are scaled. Returns the norm before
        clipping, 0-dim, equal on all ranks. A collective of all ranks.
        """
        norm = clip_grad_norm_(self.counted(), math.inf)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in self.parameters():
            if p.grad is not None:
                local_part(p.grad).mul_(factor)
        return norm

    def is_copy(self, name: str) -> bool:
        """Whether the tensor of this name on this rank is a copy of a tensor of another stage."""
        return any(copies.has(name) and not copies.owned for copies in self.copies)

    def _groups_of_copies(self) -> Iterator[_Copies]:
        """The tensors that several stages hold, with the ranks that hold this rank's shards of them."""
        heads = set(self.table.heads)
        ends = {self.table.home[0]} | (heads or {self.table.home[-1]})
        held = [(("embedding.weight",), ends)] if self.cfg.two_tables else []
        held += [(("norm.weight",) if self.cfg.tied else ("norm.weight", "head.weight"), heads)]
        here, axes = self.mesh.place, self.mesh.axes
        for names, stages in held:
            if len(stages) < 2 or here.pp not in stages:
                continue
            others = [here._replace(pp=stage) for stage in stages]
            ranks = [rank for rank in range(axes.world) if axes.place(rank) in others]
            group = dist.new_group(ranks, use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            set_timeout(patience(), group)
            yield _Copies(names, here.pp == min(stages), group)

    @property
    def ends(self) -> tuple[ModelPart, ModelPart] | None:
        """The first chunk and the last, if this rank has both and they share a tied table."""
        first, last = ([part for part in self if getattr(part, end)] for end in ("first", "last"))
        return (first[0], last[0]) if self.cfg.two_tables and first and last else None

    def _follows(self, part: ModelPart, name: str) -> bool:
        """Whether `part` has the second copy of a tied table whose first copy is on this rank too."""
        return name == "embedding.weight" and not part.first and self.ends is not None

    def forward_backward(
        self,
        micros: Sequence[tuple[Any, ...]],
        totals: Totals,
        objective: Objective | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """This rank's share of the step's loss, 0-dim; the gradients are stored in the parameters.

        micros: --train.accumulate micro-batches, whole rows, the same on all ranks that share them.
        objective: the training objective; None: cross-entropy.
        scale: factor of the gradients, 0-dim fp32 on the device; None: 1.
        """
        for part in self:
            part.start_step()
        self._begin(micros, totals, objective)
        self.pipeline.step(self._shape(), self.pieces, scale)
        for chunk in self.chunks.values():
            chunk.end_step()
        self._add_copies()
        return self.loss

    @torch.no_grad()
    def evaluate(
        self, micros: Sequence[tuple[Any, ...]], totals: Totals, objective: Objective | None = None
    ) -> Tensor:
        """This rank's share of the loss, without gradients; the arguments are those of `forward_backward`."""
        self._begin(micros, totals, objective)
        self.pipeline.evaluate(self._shape(), self.pieces)
        return self.loss

    def _begin(self, micros: Sequence[tuple[Any, ...]], totals: Totals, objective: Objective | None) -> None:
        self._copy_table()
        wanted = 1 + max(action.micro for action in self.pipeline.row)
        if len(micros) != wanted:
            raise ValueError(f"micros: got {len(micros)}, valid are --train.accumulate={wanted}")
        self.micros = [Micro(*micro) for micro in micros]
        shapes = {tuple(m.tokens_BS.shape) for m in self.micros}
        require(len(shapes) == 1, "micros", f"tokens of shapes {sorted(shapes)}", "one shape for all")
        self._check_replay()
        self.totals = totals
        self.objective = objective
        self.contexts = [
            self.part.context(m.tokens_BS, m.documents_BS, m.padding_BS, m.positions_BS, m.given)
            for m in self.micros
        ]
        self.loss = torch.zeros((), device=self.micros[0].tokens_BS.device)
        self.pieces = self.division.tokens(self.micros[0].tokens_BS.numel() // self.mesh.axes.parts)

    def _check_replay(self) -> None:
        """ValueError, before anything is sent, if the recorded ids do not fit these micro-batches."""
        if self.replayed is None or not layers_of(self):
            return
        got, valid = len(self.replayed), f"ids of --train.accumulate={len(self.micros)} micro-batches"
        require(got == len(self.micros), "ids", f"ids of {got} micro-batches", valid)
        for micro, ids in zip(self.micros, self.replayed, strict=True):
            tokens = micro.tokens_BS.numel() // self.mesh.axes.parts
            for ids_TK in ids.values():
                require(len(ids_TK) == tokens, "ids", f"ids of {len(ids_TK)} tokens", f"ids of {tokens}")

    def replay(self, part: ModelPart, micro: int) -> None:
        """Gives a part's layers the recorded ids of a micro-batch, inside `replaying`."""
        layers = layers_of(part)
        if self.replayed is not None and layers:
            give(layers, [self.replayed[micro][moe] for moe in layers])

    def _shape(self) -> Shape:
        tokens_BS = self.micros[0].tokens_BS
        B, S = tokens_BS.shape
        return Shape((B, S // self.mesh.axes.parts, self.cfg.dim), self.dtype, tokens_BS.device)

    @torch.no_grad()
    def _copy_table(self) -> None:
        """Overwrites a tied table's second copy on this rank with the first copy, shard by shard."""
        if self.ends:
            self.reshard()  # a pass without gradients may have left the tables gathered
            first, copy = (local_part(part.embedding.weight) for part in self.ends)
            copy.copy_(first)

    def _add_copies(self) -> None:
        """Adds up the gradients of copies, on the shards; a frozen tensor has none."""
        if self.ends:
            first, copy = (part.embedding.weight for part in self.ends)
            if copy.grad is not None:
                first.grad = copy.grad.to(first.dtype) + first.grad
                copy.grad = None
        parameters = dict(self.named_parameters()) if self.copies else {}
        for names, _, group in self.copies:
            for p in (parameters[name] for name in names if parameters[name].requires_grad):
                if p.grad is None:  # the embedding, if further tokens are trained alone
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(local_part(p.grad), group=group)

    def update_bias(self, taken: Tensor | None = None) -> None:
        """Updates the routers' choice bias by the step's loads; see Transformer.update_bias."""
        for part in self:
            part.update_bias(taken)

    def read_log(self) -> RouterStats | None:
        """The statistics of all stages since the last call, layer by layer; a collective of all ranks."""
        cfg = self.cfg
        layers = [layer for layer in range(cfg.layers) if cfg.is_moe(layer)]
        if not layers:
            return None
        size = len(layers), log_width(cfg.moe)
        sums = torch.zeros(size, dtype=torch.float64, device=self.part_device)
        for part in self:
            own = [layers.index(int(i)) for i, block in part.blocks.named_children() if block.moe is not None]
            log = part.balancer.take_log(part.routers())
            if log is not None:
                sums[own] += log
        dist.all_reduce(sums)
        return stats_of(sums, cfg.moe)

    @property
    def part_device(self) -> torch.device:
        return next(self.part.parameters()).device

    def own(self, t_BS: Tensor) -> Tensor:
        """This rank's tokens of whole rows whose loss it computes: none if it does not have the last part."""
        own = self.part.own(t_BS)
        if self.division.pieces:
            own_T, tokens = own.flatten(0, 1), self.division.tokens(own.numel())
            mine = [own_T[as_slice(tokens[c.piece])] for c in self.chunks.values() if c.piece is not None]
            return torch.cat([own_T[:0], *mine])[None]
        return own if any(part.last for part in self) else own[:0]

    def reshard(self) -> None:
        for part in self:
            if isinstance(part, FSDPModule):
                part.reshard()


def scopes(part: ModelPart) -> list[Experts]:
    """The experts of each MoE layer of a part."""
    return [module for module in part.modules() if isinstance(module, Experts)]


def can_defer(parts: Iterable[ModelPart]) -> bool:
    """Whether the experts of all ranks can defer their weights' gradients; if not, rank 0 logs why.

    A collective of all ranks. All ranks need the same result, because their tables must be equal.
    """
    layers = [module for part in parts for module in part.modules() if isinstance(module, MoE)]
    here = next(filter(None, map(obstacle, layers)), "")
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    fake = dist.get_backend() == "fake"  # a dry run has no other ranks to ask
    told = [(bool(layers), here)] if fake else gathered((bool(layers), here), world)
    why = next((why for _, why in told if why), "")
    if why and dist.get_rank() == 0:
        log.warning(
            "note: --parallel.schedule=v cannot fill idle moments with the experts' weight gradients (then "
            "interleaved idles less): %s",
            why,
        )
    return not why and any(has_experts for has_experts, _ in told)


def obstacle(moe: MoE) -> str:
    """Why a layer's experts cannot defer their weights' gradients, "" if they can."""
    if isinstance(moe.dispatcher, ExpertTensorDispatcher):
        return "--parallel.etp above 1 cuts a rank's matrices again in each forward"
    if isinstance(moe.dispatcher, WeightsDispatcher):
        return "--parallel.adaptive-r=0 gathers other ranks' matrices in each forward"
    if moe.experts.weigh != "activation":
        return f"--model.moe.weigh={moe.experts.weigh} runs the experts on sorted copies of their rows"
    if moe.experts.scales:
        return "experts with adapters are frozen, and have no weight gradients"
    if isinstance(moe.experts, FSDPModule):
        return (
            "FSDP2 holds the experts, and sums gradients at the end of the backward "
            "(--parallel.replicate above 1, or experts above --parallel.gathered-gib)"
        )
    if isinstance(moe.dispatcher, SymmDispatcher):
        return "symm overwrites each layer's tokens with the next layer's (--parallel.dispatch nccl does not)"
    return ""


def pipeline(cfg: Config, mesh: Mesh) -> Stages:
    """This rank's parts of the Transformer of cfg.model, laid out over the mesh, on the meta device.

    Fill them with `to_empty` and `init_weights`, or load a step folder into `named_parameters()`. A step is
    `forward_backward`, then `clip_grad_norm_`, then the optimizer over `parameters()`. The function reads the
    fields of cfg that `parallelize` reads, and also `parallel.schedule`, `.chunks`, `.cut` and `.head`, and
    `train.accumulate`, `.batch` and `.seq`, on which the cut depends. With `parallel.head` divided an
    objective gets some tokens of a micro-batch. With `parallel.shard` 1 or 2 a chunk's weights stay gathered
    until its last backward: one gather per step, where 3 gathers twice per micro-batch.

    Raises ValueError, naming the flags, if the model cannot be cut into this number of chunks.
    """
    return Stages(cfg, mesh)
