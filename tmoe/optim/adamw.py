"""AdamW on parameters of any meshes: its groups, its step, its state by name.

It handles tensors and their names, never the model.

next: checkpoint/checkpoints.py
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tmoe.config.run import OptimConfig
from tmoe.ops.adamw_op import adamw_
from tmoe.ops.narrow_adamw import Row, narrow_adamw_, step_on_cpu_
from tmoe.ops.reference import AdamWRule
from tmoe.ops.stochastic import Place, place_of, salt_of
from tmoe.optim.matrices import Parts, chosen, whole
from tmoe.optim.muon import Muon
from tmoe.optim.offload import HostRoom
from tmoe.optim.states import (
    DTYPES,
    MOMENTS,
    MOMENTUM,
    SCALES,
    STATE,
    States,
    converted,
    form_of,
    new_moments,
)
from tmoe.parallel.copies import WorkingCopy, make_stale, version, working_copy
from tmoe.parallel.mesh import local_part, local_slices

PIECE = 2**26  # elements whose offloaded moments are on the GPU at a time, on each of two streams: 1 GiB


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    weight_decay: float,
    factors: Sequence[tuple[str, float]] = (),
    muon: Collection[str] = (),
) -> list[dict[str, Any]]:
    """An optimizer's groups: with and without decay, per mesh, per factor of the learning rate (`lr_factor`).

    Parameters that need no gradient are left out. muon: names of the parameters in groups of kind "muon".

    weight_decay: of the parameters with decay.
    factors: (pattern, factor); the first pattern that matches in a name gives its factor; without a match the
        factor is 1.

    A parameter with fewer than two axes (norms, biases, sinks) and the experts' stacked biases [E, 2F] get no
    decay: they scale or shift, and have no matrix norm to bound. Experts [E, 2F, D] are matrices and decay.
    The embedding decays as well: if it is tied, it is also the head, and one rule for both cases is simpler.
    (OLMo 2 exempts the embedding, so that rows of rare tokens do not shrink between their occurrences.)

    Groups are per mesh, because fused and foreach AdamW refuse plain tensors among DTensors ("got mixed
    torch.Tensor and DTensor"), and DTensor gives no guarantee for operands on two meshes (fused AdamW
    accepted them on 2.13).
    """
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for name, p in named_parameters:
        if p.requires_grad:
            decays = p.ndim >= 2 and not name.endswith("bias")
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            factor = next((factor for pattern, factor in factors if re.search(pattern, name)), 1.0)
            groups[decays, mesh, factor, "muon" if name in muon else "adamw"].append(p)
    return [
        dict(params=params, weight_decay=weight_decay if decays else 0.0, lr_factor=factor, kind=kind)
        for (decays, _, factor, kind), params in groups.items()
    ]


class AdamW(torch.optim.AdamW):
    """torch's AdamW, which clips and can skip a step on the device, so that the host does not wait.

    On a GPU the step is one pass over the memory of all parameters (ops/adamw_op.py, ops/narrow_adamw.py).
    Gradients of any float type are read once and not written, and working copies (parallel/copies.py) are
    written in the same pass as the weights.

    keeps_fresh: all other code that writes to the weights calls `make_stale`, so a forward need not cast the
        weights again.
    offload: the moments are stored in pinned host memory.
    muon: trains the groups of kind "muon" (optim/muon.py); None: there are none.
    states: how the moments are stored (optim/states.py). Then weights in bf16 are masters, which are rounded
        stochastically. None: moments have the type of their parameter.
    salts: 32 random bits of each parameter, for stochastic rounding.
    factor, finite: of the next step, see `decide`.
    streams: two, made by the first step that needs them and reused, because the allocator caches memory for
        each stream.
    """

    keeps_fresh = False
    offload = False
    muon: Muon | None = None
    states: States | None = None
    factor: Tensor | None = None
    finite: Tensor | None = None
    streams: tuple[torch.cuda.Stream, ...] = ()

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for name in ("amsgrad", "maximize"):
            if any(group[name] for group in self.param_groups):
                raise ValueError(f"AdamW: {name}=True, valid is False: ops/adamw_op.py has one rule")
        self.host = HostRoom()
        self.salts: dict[Tensor, int] = {}
        self._places: dict[Tensor, Place] = {}
        # False, so that a GradScaler unscales the gradients and skips steps itself.
        self._step_supports_amp_scaling = False

    def away(self, wanted: bool) -> AbstractContextManager[None]:
        """Inside this context, if `wanted`, the moments are in host memory and use none on the device."""
        if not wanted:
            return nullcontext()
        states = self.state.values()
        return self.host.holding([t for state in states for key, t in state.items() if key != "step"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned. torch's converts moments to the parameter's type; these stay."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items() if self.states else ():
            for key, t in new_moments(p, self.states, False, self.moments_of(p)).items():
                state[key] = state[key].to(t.dtype)

    def moments_of(self, p: Tensor) -> Sequence[str]:
        """The names of a parameter's moments."""
        return MOMENTS if self.muon is None or p not in self.muon.matrices else (MOMENTUM,)

    def new_state(
        self, p: Tensor, device: torch.device | str, states: States | None = None
    ) -> dict[str, Tensor]:
        """The state of a parameter before its first step.

        device: the device of the step count. states: how the moments are stored, if not as `self.states`.
        """
        step = torch.zeros((), dtype=torch.float32, device=device)
        moments = new_moments(p, states or self.states, self.offload, self.moments_of(p))
        return dict(step=step) | moments

    @torch.no_grad()
    def decide(self, finite: Tensor, norm: Tensor, clip: float, scale: Tensor | None = None) -> None:
        """Decides whether the next `step` clips, and whether it is skipped.

        finite: 0-dim on the device; if it is 0, parameters and state do not change.
        norm: norm of the gradients, 0-dim on the device; after the division by `scale`.
        clip: norm to which the gradients are clipped (0: no clipping).
        scale: the loss scale, 0-dim on the device, by which the step divides the gradients; None: 1.
        All of them must be equal on all ranks.
        """
        self.finite = finite
        self.factor = (clip / (norm + 1e-6)).clamp(max=1.0).float() if clip else None
        if scale is not None:
            self.factor = scale.reciprocal() if self.factor is None else self.factor / scale

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Takes a step as the last `decide` set it, or without clipping if `decide` was not called.

        With Muon it is a collective of the ranks that share matrices. ValueError for a closure.
        """
        if closure is not None:
            raise ValueError("AdamW.step: got a closure, valid is None: compute loss and gradients before")
        groups = self.param_groups
        if self.muon is not None:
            self.muon.step(self, [group for group in groups if group.get("kind") == "muon"])
            self.param_groups = [group for group in groups if group.get("kind") != "muon"]
        try:
            self._step_of_adamw()
        finally:
            self.param_groups = groups
        self.factor = self.finite = None

    def _step_of_adamw(self) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        kinds = [torch.float32] + [torch.bfloat16] * (self.states is not None)
        if all(p.is_cuda and p.dtype in kinds for p in params):
            self._step_in_one_pass()
        elif self.finite is None or self.finite:
            if self.states is None and all(p.dtype == p.grad.dtype for p in params):
                if self.factor is not None:
                    torch._foreach_mul_([_local(p.grad) for p in params], self.factor)
                super().step()
            else:
                self._step_in_plain_torch()
            make_stale(params)

    def _step_in_plain_torch(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            self._begin(params)
            for p in params:
                self.state[p]["step"] += 1
            rows = [self._row(p, None) for p in params]
            step_on_cpu_(rows, self.factor, _rule(group))
            for p in params:
                torch.autograd.graph.increment_version(p)

    def _begin(self, params: Iterable[Tensor]) -> None:
        """Makes the state of parameters that have none yet."""
        for p in params:
            if not self.state[p]:
                self.state[p] = self.new_state(p, p.device)

    def _row(self, p: Tensor, copy: Tensor | None) -> Row:
        """This rank's part of a parameter, of its gradient and of its state."""
        state = {key: local_part(t) for key, t in self.state[p].items()}
        mean, square = (state[moment] for moment in MOMENTS)
        mean_scale, square_scale = (state.get(SCALES[moment]) for moment in MOMENTS)
        assert p.grad is not None
        weight, grad, place = _local(p), _local(p.grad), self._place(p)
        return Row(weight, grad, mean, square, copy, state["step"], place, mean_scale, square_scale)

    def _place(self, p: Tensor) -> Place:
        """Where this rank's part of a parameter lies, for stochastic rounding."""
        if p not in self._places:
            salt = self.salts.get(p, 0)
            self._places[p] = place_of(tuple(p.shape), local_slices(p), salt) if self.states else Place(salt)
        return self._places[p]

    def _step_in_one_pass(self) -> None:
        if self.offload and not self.streams:
            self.streams = torch.cuda.Stream(), torch.cuda.Stream()
        streams = cycle(self.streams) if self.offload else None
        ones: list[Tensor] = []  # kept alive, because other streams read them until the wait below
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            self._begin(params)

            # The step of this group runs entirely on the device.
            ones.append(torch.ones((), device=params[0].device))
            factor = ones[-1] if self.factor is None else self.factor
            finite = ones[-1] if self.finite is None else self.finite
            # A list: torch treats a single 0-dim tensor as a number, which the host would read.
            torch._foreach_add_([self.state[p]["step"] for p in params], [finite] * len(params))
            copies = self._step_of_group(params, (factor, finite, *_rule(group)), streams)

            # A skipped step writes no copy, so a copy that was out of date before the step still is.
            current = [copy.seen == version(copy.master) for copy in copies]
            # The kernels write by address, which autograd does not see.
            torch.autograd.graph.increment_version(params)
            for copy, was in zip(copies, current, strict=True):
                copy.written(self.keeps_fresh and was)
        if streams is not None:
            for _ in range(2):
                torch.cuda.current_stream().wait_stream(next(streams))

    def _step_of_group(
        self, params: list[Any], rule: tuple[Any, ...], streams: Iterator[torch.cuda.Stream] | None
    ) -> list[WorkingCopy]:
        """Steps parameters: all in one call, or one by one on `streams`, with moments copied from the host.

        rule: the arguments of `adamw_` after the tensors. Returns the working copies that the step wrote.
        """
        rows: list[Row] = []
        copies: list[WorkingCopy] = []
        for p in params:
            copy = working_copy(p)
            if copy and copy.tensor.dtype == p.dtype:
                copy.written(False)
                copy = None  # the copy is the weight itself, or is updated before the next forward
            row = self._row(p, copy.mine if copy else None)
            if streams is None:
                rows.append(row)
            else:
                stream_moments(row, streams, lambda pieces: step_rows(pieces, *rule))
            if copy:
                copies.append(copy)
        step_rows(rows, *rule)
        return copies


def _rule(group: Mapping[str, Any]) -> AdamWRule:
    return AdamWRule(group["lr"], group["betas"], group["eps"], group["weight_decay"])


def step_rows(rows: Iterable[Row], *rule: Any) -> None:
    """A step of parameters on a GPU: those in fp32 with fp32 moments by one kernel, all others by another.

    rule: the arguments of `adamw_` after the tensors.
    """
    plain, narrow = [], []
    for row in rows:
        exact = row.weight.dtype == row.mean.dtype == torch.float32
        (plain.append((*row[:5], row.step)) if exact else narrow.append(row))
    if plain:
        adamw_(plain, *rule)
    if narrow:
        narrow_adamw_(narrow, *rule)


def stream_moments(row: Row, streams: Iterator[torch.cuda.Stream], step: Callable[[list[Row]], None]) -> None:
    """Runs `step` on pieces of one parameter, and copies their moments from pinned memory and back.

    Pieces alternate between two streams, so that the copy to the device of one piece overlaps with the copy
    to the host of the other. A stream works on one piece at a time, in bounded memory.

    streams: yields the streams in turn.
    step: called with a piece of the row, whose moments are on the device.
    """
    block = max(row.block, 1)
    size = max(PIECE // block, 1) * block
    for begin in range(0, row.weight.numel(), size):
        weight, grad, copy = (
            None if t is None else t.view(-1)[begin : begin + size] for t in (row.weight, row.grad, row.copy)
        )
        assert weight is not None and grad is not None
        stored = row.mean.view(-1)[begin : begin + size], row.square.view(-1)[begin : begin + size]
        scales = [
            t.view(-1)[begin // block : (begin + size) // block]
            for t in (row.mean_scale, row.square_scale)
            if t is not None
        ]
        stream = next(streams)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            on_device = [m.to(weight.device, non_blocking=True) for m in (*stored, *scales)]
            mean, square, *found = on_device
            parts = weight, grad, mean, square, copy
            step([Row(*parts, row.step, row.place, *(found or (None, None)), first=row.first + begin)])
            for m, new in zip((*stored, *scales), on_device, strict=True):
                m.copy_(new, non_blocking=True)
        grad.record_stream(stream)


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    cfg: OptimConfig,
    device: torch.device,
    keeps_fresh: bool = False,
    seed: int = 0,
    parts: Mapping[str, Parts] | None = None,
    products: torch.dtype = torch.float32,
) -> AdamW:
    """AdamW over `parameter_groups`, fused on CUDA and CPU; with cfg.muon also Muon (optim/muon.py).

    keeps_fresh: as in AdamW. seed: of stochastic rounding.
    parts: rows of the matrices in fused weights, by name (`parts_of` of model/muon.py); to Muon every other
        weight is one matrix, or a stack of matrices.
    products: type of Muon's products.
    ValueError for a matrix that the layout cuts otherwise than by rows.

    For 60 DTensors [200, 300] on a CPU core, fused needs 4.2 ms a step, foreach 21 ms, and a call for each
    parameter 32 ms. The difference is DTensor's dispatch, which fused runs only once a group.
    """
    named = list(named_parameters)
    muon = set(chosen(cfg.muon, named))
    groups = parameter_groups(named, cfg.weight_decay, cfg.factors, muon)
    if device.type == "cuda" or "bf16" in (cfg.masters, cfg.sums):
        for p in (p for group in groups for p in group["params"]):
            p.grad_dtype = None  # any type: a bf16 gradient that is not reduced need not become fp32
    groups = groups or [dict(params=[], weight_decay=0.0)]  # empty in a frozen pipeline stage
    optimizer = AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=device.type in ("cuda", "cpu"))
    if muon:
        known = parts or {}
        matrices = {p: known.get(name, whole(p.shape[-2])) for name, p in named if name in muon}
        rule = cfg.muon_momentum, cfg.muon_iterations, products
        optimizer.muon = Muon(matrices, *rule, device.type == "cuda")
    optimizer.keeps_fresh = keeps_fresh
    optimizer.offload = cfg.offload and device.type == "cuda"
    if (cfg.states, cfg.masters) != ("fp32", "fp32"):
        optimizer.states = cfg.states
        optimizer.salts = {p: salt_of(seed, name) for name, p in named}
    return optimizer


def init_state(optimizer: AdamW, stored: Mapping[Tensor, States] | None = None) -> None:
    """Makes both moments and the step count of every parameter, all zero.

    A checkpoint can then be loaded into them before the first step. (AdamW itself makes them in the first
    step, and only for parameters with a gradient.)

    stored: how a checkpoint stores the moments of these parameters; others are stored as the optimizer does.
        Call `restate` after loading it.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            device = p.device if group["fused"] else "cpu"  # the device that AdamW uses for the step count
            optimizer.state[p] = optimizer.new_state(p, device, (stored or {}).get(p))


def restate(optimizer: AdamW) -> None:
    """Converts moments that are not stored as the optimizer stores them, one parameter at a time."""
    for p, state in optimizer.state.items():
        form = form_of(p, optimizer.states)
        wanted = p.dtype if form is None else DTYPES[form]
        if state and state[optimizer.moments_of(p)[0]].dtype != wanted:
            optimizer.state[p] = converted(p, state, optimizer.states, optimizer.offload)


def optimizer_tensors(
    optimizer: torch.optim.AdamW, named_parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state by name: `exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME` (0-dim) of each parameter.

    Muon's have `momentum.NAME` instead of the two moments. Moments in 8 bits have scales as well:
    `exp_avg_scale.NAME`, for example.

    They are the state itself, not copies, so loading into them in place restores the optimizer. Call
    `init_state` first.
    """
    state = optimizer.state
    return {
        f"{key}.{name}": state[p][key]
        for key in STATE
        for name, p in named_parameters.items()
        if p in state and key in state[p]
    }


def _local(t: Tensor) -> Tensor:
    """The part of a tensor that is stored on this rank, detached from the graph."""
    return t.detach().to_local() if isinstance(t, DTensor) else t.detach()


def _locals(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [_local(t) for t in tensors.values()]
