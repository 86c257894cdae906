"""AdamW on parameters of any meshes: its groups, its step, its state by name.

Sees tensors and their names, never the model.

next: checkpoint/checkpoints.py
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import cycle, repeat
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tmoe.base.private_torch import need
from tmoe.config.run import OptimConfig
from tmoe.ops.adamw import adamw_
from tmoe.optim.away import HostRoom
from tmoe.parallel.copies import WorkingCopy, make_stale, version, working_copy
from tmoe.parallel.mesh import local_part

MOMENTS = "exp_avg", "exp_avg_sq"
STATE = (*MOMENTS, "step")
PIECE = 2**26  # elements whose moments are on the GPU at a time, for each of two streams: 1 GiB


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    weight_decay: float,
    factors: Sequence[tuple[str, float]] = (),
) -> list[dict[str, Any]]:
    """AdamW's groups: with and without decay, per mesh, per factor of the learning rate (`lr_factor`).

    Parameters that need no gradient are left out. factors: (pattern, factor); the first pattern that is found
    in a name gives the factor, 1 where none is.

    A parameter with fewer than two axes (norms, biases, sinks) and the experts' stacked biases [E, 2F] get no
    decay: they scale or shift, and have no matrix norm to bound. Experts [E, 2F, D] are matrices and do. So
    does the embedding: tied, it is the head, and one rule for both cases is plainer. (OLMo 2 leaves it out,
    so that rows of rare tokens do not shrink between visits.)

    Per mesh, because fused and foreach AdamW refuse plain tensors among DTensors ("got mixed torch.Tensor and
    DTensor"), and DTensor promises nothing about operands of two meshes (fused AdamW took them on 2.13).
    """
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for name, p in named_parameters:
        if p.requires_grad:
            decays = p.ndim >= 2 and not name.endswith("bias")
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            factor = next((factor for pattern, factor in factors if re.search(pattern, name)), 1.0)
            groups[decays, mesh, factor].append(p)
    return [
        dict(params=params, weight_decay=weight_decay if decays else 0.0, lr_factor=factor)
        for (decays, _, factor), params in groups.items()
    ]


class AdamW(torch.optim.AdamW):
    """torch's AdamW with clipping and the choice to skip a step, both on the device: the host does not wait.

    On a GPU one pass over the memory of all parameters does the step (ops/adamw.py): gradients of any float
    type are read once and not written, and working copies (parallel/copies.py) are written beside the
    weights.

    keeps_fresh: everything else that writes to the weights calls `make_stale`, so no forward need cast them
        again.
    offload: the moments lie in pinned host memory.
    factor, finite: of the step to come, see `decide`.
    streams: two, made by the first step that needs them: the allocator keeps for each what it has used.
    """

    keeps_fresh = False
    offload = False
    factor: Tensor | None = None
    finite: Tensor | None = None
    streams: tuple[torch.cuda.Stream, ...] = ()

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for name in ("amsgrad", "maximize"):
            if any(group[name] for group in self.param_groups):
                raise ValueError(f"AdamW: {name}=True, valid is False: ops/adamw.py has one rule")
        self.host = HostRoom()
        # So that a GradScaler unscales the gradients and skips steps itself.
        self._step_supports_amp_scaling = False

    def away(self, wanted: bool) -> AbstractContextManager[None]:
        """Inside, where wanted, the moments lie in the host's memory and take no room on the device."""
        if not wanted:
            return nullcontext()
        states = [state for state in self.state.values() if state]
        return self.host.holding([state[key] for state in states for key in MOMENTS])

    @torch.no_grad()
    def decide(self, finite: Tensor, norm: Tensor, clip: float) -> None:
        """Decides how the next `step` goes: whether it clips, and whether it is skipped.

        finite: 0-dim on the device; where it is 0, parameters and state stay as they are.
        norm: of the gradients, 0-dim on the device. clip: the norm that they are clipped to (0: not).
        All are equal on all ranks.
        """
        self.finite = finite
        self.factor = (clip / (norm + 1e-6)).clamp(max=1.0).float() if clip else None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Takes a step as `decide` said last, or else without clipping. ValueError for a closure."""
        if closure is not None:
            raise ValueError("AdamW.step: got a closure, valid is None: compute loss and gradients before")
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if all(p.is_cuda and p.dtype == torch.float32 for p in params):
            self._step_in_one_pass()
        elif self.finite is None or self.finite:
            if self.factor is not None:
                torch._foreach_mul_([_local(p.grad) for p in params], self.factor)
            super().step()
            make_stale(params)
        self.factor = self.finite = None

    def _step_in_one_pass(self) -> None:
        if self.offload and not self.streams:
            self.streams = torch.cuda.Stream(), torch.cuda.Stream()
        streams = cycle(self.streams) if self.offload else None
        ones: list[Tensor] = []  # other streams read them until they are waited for
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = _new_state(p, p.device, self.offload)

            # The step of this group, on the device from end to end.
            ones.append(torch.ones((), device=params[0].device))
            factor = ones[-1] if self.factor is None else self.factor
            finite = ones[-1] if self.finite is None else self.finite
            # A list, for a lone 0-dim tensor is taken for a number and read by the host.
            torch._foreach_add_([self.state[p]["step"] for p in params], [finite] * len(params))
            step = partial(
                adamw_,
                factor=factor,
                finite=finite,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                decay=group["weight_decay"],
            )

            copies = self._step_of_group(params, step, streams)

            # A skipped step writes no copy: one that did not hold the parameter before does not hold it now.
            current = [copy.seen == version(copy.master) for copy in copies]
            # Our kernels write by address, which autograd does not see.
            torch.autograd.graph.increment_version(params)
            for copy, was in zip(copies, current, strict=True):
                copy.written(self.keeps_fresh and was)
        if streams is not None:
            for _ in range(2):
                torch.cuda.current_stream().wait_stream(next(streams))

    def _step_of_group(
        self,
        params: list[Any],
        step: Callable[[list[tuple]], None],
        streams: Iterator[torch.cuda.Stream] | None,
    ) -> list[WorkingCopy]:
        """Steps parameters: all in one call, or one by one on `streams`, where moments come from the host.

        Returns the working copies that the step wrote.
        """
        rows: list[tuple] = []
        copies: list[WorkingCopy] = []
        for p in params:
            state = self.state[p]
            copy = working_copy(p)
            if copy and copy.tensor.dtype == p.dtype:
                copy.written(False)
                copy = None  # it is the weight itself, or takes it before the next forward
            tensors: list = [p, p.grad, state["exp_avg"], state["exp_avg_sq"], copy and copy.mine]
            tensors = [None if t is None else local_part(t) for t in tensors]
            if streams is None:
                rows.append((*tensors, state["step"]))
            else:
                stream_moments(tensors, state["step"], streams, step)
            if copy:
                copies.append(copy)
        step(rows)
        return copies


def stream_moments(
    tensors: list[Any],
    number: Tensor,
    streams: Iterator[torch.cuda.Stream],
    step: Callable[[list[tuple]], None],
) -> None:
    """Runs `step` on pieces of one parameter whose moments come from pinned memory and go back there.

    Pieces take turns on two streams, so that one's way in overlaps with the other's way out. A stream works
    on one piece at a time, in bounded memory.

    tensors: weight, grad, mean, square, working copy (or None). number: the step count.
    step: takes [(weight, grad, mean, square, copy, number)].
    """
    pieces = [repeat(None) if t is None else t.view(-1).split(PIECE) for t in tensors]
    for weight, grad, *moments, copy in zip(*pieces, strict=False):  # repeat is endless
        stream = next(streams)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            here = [m.to(weight.device, non_blocking=True) for m in moments]
            step([(weight, grad, *here, copy, number)])
            for m, new in zip(moments, here, strict=True):
                m.copy_(new, non_blocking=True)
        grad.record_stream(stream)


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    cfg: OptimConfig,
    device: torch.device,
    keeps_fresh: bool = False,
) -> AdamW:
    """AdamW over `parameter_groups`, fused on CUDA and CPU. keeps_fresh: as AdamW's.

    60 DTensors [200, 300] on a CPU core: fused 4.2 ms a step, foreach 21 ms, one by one 32 ms. The difference
    is DTensor's dispatch, which fused passes once a group.
    """
    groups = parameter_groups(named_parameters, cfg.weight_decay, cfg.factors)
    if device.type == "cuda":
        for p in (p for group in groups for p in group["params"]):
            p.grad_dtype = None  # any: a bf16 gradient that is not reduced need not become fp32
    groups = groups or [dict(params=[], weight_decay=0.0)]  # a pipeline stage that is frozen
    optimizer = AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=device.type in ("cuda", "cpu"))
    optimizer.keeps_fresh = keeps_fresh
    optimizer.offload = cfg.offload and device.type == "cuda"
    return optimizer


def init_state(optimizer: AdamW) -> None:
    """Makes both moments and the step count of every parameter, all zero.

    So a checkpoint can be loaded into them before the first step. (AdamW makes them in that step, and leaves
    out parameters without a gradient.)
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            device = p.device if group["fused"] else "cpu"  # where AdamW would put it
            optimizer.state[p] = _new_state(p, device, optimizer.offload)


def _new_state(p: Tensor, device: torch.device | str, offload: bool) -> dict[str, Tensor]:
    """The state of a parameter before its first step. device: of the step count."""
    step = torch.zeros((), dtype=torch.float32, device=device)
    return dict(step=step, exp_avg=_zeros_like(p, offload), exp_avg_sq=_zeros_like(p, offload))


def _zeros_like(p: Tensor, offload: bool) -> Tensor:
    """Zeros laid out as p; with offload in pinned host memory, whatever the device of p's mesh is."""
    if not offload:
        return torch.zeros_like(p, memory_format=torch.preserve_format)
    zeros = torch.zeros(local_part(p).shape, dtype=p.dtype, pin_memory=True)
    if not isinstance(p, DTensor):
        return zeros
    # from_local would move it to the mesh's device. FSDP2 keeps its offloaded parameters the same way.
    return DTensor(zeros, need(p, "_spec", "--optim.offload"), requires_grad=False)


def optimizer_tensors(
    optimizer: torch.optim.AdamW, named_parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state by name: `exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME` (0-dim) of each parameter.

    These are the state itself, not copies, so to load into them in place restores the optimizer. Call
    `init_state` first.
    """
    state = optimizer.state
    return {
        f"{key}.{name}": state[p][key] for key in STATE for name, p in named_parameters.items() if p in state
    }


def _local(t: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, without its history."""
    return t.detach().to_local() if isinstance(t, DTensor) else t.detach()


def _locals(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [_local(t) for t in tensors.values()]
