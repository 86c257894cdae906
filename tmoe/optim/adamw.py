"""AdamW on parameters of any meshes: its groups, its step, its state by name.

It handles tensors and their names, never the model.

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
from tmoe.ops.adamw_op import adamw_
from tmoe.optim.offload import HostRoom
from tmoe.parallel.copies import WorkingCopy, make_stale, version, working_copy
from tmoe.parallel.mesh import local_part

MOMENTS = "exp_avg", "exp_avg_sq"
STATE = (*MOMENTS, "step")
PIECE = 2**26  # elements whose offloaded moments are on the GPU at a time, on each of two streams: 1 GiB


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    weight_decay: float,
    factors: Sequence[tuple[str, float]] = (),
) -> list[dict[str, Any]]:
    """AdamW's groups: with and without decay, per mesh, per factor of the learning rate (`lr_factor`).

    Parameters that need no gradient are left out.

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
            groups[decays, mesh, factor].append(p)
    return [
        dict(params=params, weight_decay=weight_decay if decays else 0.0, lr_factor=factor)
        for (decays, _, factor), params in groups.items()
    ]


class AdamW(torch.optim.AdamW):
    """torch's AdamW, which clips and can skip a step on the device, so that the host does not wait.

    On a GPU the step is one pass over the memory of all parameters (ops/adamw_op.py). Gradients of any float
    type are read once and not written, and working copies (parallel/copies.py) are written in the same pass
    as the weights.

    keeps_fresh: all other code that writes to the weights calls `make_stale`, so a forward need not cast the
        weights again.
    offload: the moments are stored in pinned host memory.
    factor, finite: of the next step, see `decide`.
    streams: two, made by the first step that needs them and reused, because the allocator caches memory for
        each stream.
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
                raise ValueError(f"AdamW: {name}=True, valid is False: ops/adamw_op.py has one rule")
        self.host = HostRoom()
        # False, so that a GradScaler unscales the gradients and skips steps itself.
        self._step_supports_amp_scaling = False

    def away(self, wanted: bool) -> AbstractContextManager[None]:
        """Inside this context, if `wanted`, the moments are in host memory and use none on the device."""
        if not wanted:
            return nullcontext()
        states = [state for state in self.state.values() if state]
        return self.host.holding([state[key] for state in states for key in MOMENTS])

    @torch.no_grad()
    def decide(self, finite: Tensor, norm: Tensor, clip: float) -> None:
        """Decides whether the next `step` clips, and whether it is skipped.

        finite: 0-dim on the device; if it is 0, parameters and state do not change.
        norm: norm of the gradients, 0-dim on the device.
        clip: norm to which the gradients are clipped (0: no clipping).
        All three must be equal on all ranks.
        """
        self.finite = finite
        self.factor = (clip / (norm + 1e-6)).clamp(max=1.0).float() if clip else None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Takes a step as the last `decide` set it, or without clipping if `decide` was not called.

        ValueError for a closure.
        """
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
        ones: list[Tensor] = []  # kept alive, because other streams read them until the wait below
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = _new_state(p, p.device, self.offload)

            # The step of this group runs entirely on the device.
            ones.append(torch.ones((), device=params[0].device))
            factor = ones[-1] if self.factor is None else self.factor
            finite = ones[-1] if self.finite is None else self.finite
            # A list: torch treats a single 0-dim tensor as a number, which the host would read.
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
        self,
        params: list[Any],
        step: Callable[[list[tuple]], None],
        streams: Iterator[torch.cuda.Stream] | None,
    ) -> list[WorkingCopy]:
        """Steps parameters: all in one call, or one by one on `streams`, with moments copied from the host.

        Returns the working copies that the step wrote.
        """
        rows: list[tuple] = []
        copies: list[WorkingCopy] = []
        for p in params:
            state = self.state[p]
            copy = working_copy(p)
            if copy and copy.tensor.dtype == p.dtype:
                copy.written(False)
                copy = None  # the copy is the weight itself, or is updated before the next forward
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
    """Runs `step` on pieces of one parameter, and copies their moments from pinned memory and back.

    Pieces alternate between two streams, so that the copy to the device of one piece overlaps with the copy
    to the host of the other. A stream works on one piece at a time, in bounded memory.

    tensors: weight, grad, mean, square, working copy (or None).
    number: the step count.
    streams: yields the streams in turn.
    step: called with [(weight, grad, mean, square, copy, number)].
    """
    pieces = [repeat(None) if t is None else t.view(-1).split(PIECE) for t in tensors]
    for weight, grad, *moments, copy in zip(*pieces, strict=False):  # repeat is endless
        stream = next(streams)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            on_device = [m.to(weight.device, non_blocking=True) for m in moments]
            step([(weight, grad, *on_device, copy, number)])
            for m, new in zip(moments, on_device, strict=True):
                m.copy_(new, non_blocking=True)
        grad.record_stream(stream)


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    cfg: OptimConfig,
    device: torch.device,
    keeps_fresh: bool = False,
) -> AdamW:
    """AdamW over `parameter_groups`, fused on CUDA and CPU. keeps_fresh: as in AdamW.

    For 60 DTensors [200, 300] on a CPU core, fused needs 4.2 ms a step, foreach 21 ms, and a call for each
    parameter 32 ms. The difference is DTensor's dispatch, which fused runs only once a group.
    """
    groups = parameter_groups(named_parameters, cfg.weight_decay, cfg.factors)
    if device.type == "cuda":
        for p in (p for group in groups for p in group["params"]):
            p.grad_dtype = None  # any type: a bf16 gradient that is not reduced need not become fp32
    groups = groups or [dict(params=[], weight_decay=0.0)]  # empty in a frozen pipeline stage
    optimizer = AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=device.type in ("cuda", "cpu"))
    optimizer.keeps_fresh = keeps_fresh
    optimizer.offload = cfg.offload and device.type == "cuda"
    return optimizer


def init_state(optimizer: AdamW) -> None:
    """Makes both moments and the step count of every parameter, all zero.

    A checkpoint can then be loaded into them before the first step. (AdamW itself makes them in the first
    step, and only for parameters with a gradient.)
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            device = p.device if group["fused"] else "cpu"  # the device that AdamW uses for the step count
            optimizer.state[p] = _new_state(p, device, optimizer.offload)


def _new_state(p: Tensor, device: torch.device | str, offload: bool) -> dict[str, Tensor]:
    """The state of a parameter before its first step. device: the device of the step count."""
    step = torch.zeros((), dtype=torch.float32, device=device)
    return dict(step=step, exp_avg=_zeros_like(p, offload), exp_avg_sq=_zeros_like(p, offload))


def _zeros_like(p: Tensor, offload: bool) -> Tensor:
    """Zeros with p's layout; with offload they are in pinned host memory, whatever the device of p's mesh."""
    if not offload:
        return torch.zeros_like(p, memory_format=torch.preserve_format)
    zeros = torch.zeros(local_part(p).shape, dtype=p.dtype, pin_memory=True)
    if not isinstance(p, DTensor):
        return zeros
    # from_local would move the zeros to the mesh's device. FSDP2 stores offloaded parameters in the same way.
    return DTensor(zeros, need(p, "_spec", "--optim.offload"), requires_grad=False)


def optimizer_tensors(
    optimizer: torch.optim.AdamW, named_parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state by name: `exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME` (0-dim) of each parameter.

    They are the state itself, not copies, so loading into them in place restores the optimizer. Call
    `init_state` first.
    """
    state = optimizer.state
    return {
        f"{key}.{name}": state[p][key] for key in STATE for name, p in named_parameters.items() if p in state
    }


def _local(t: Tensor) -> Tensor:
    """The part of a tensor that is stored on this rank, detached from the graph."""
    return t.detach().to_local() if isinstance(t, DTensor) else t.detach()


def _locals(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [_local(t) for t in tensors.values()]
