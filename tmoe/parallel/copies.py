"""Working copies: how a rank computes in bf16 with parameters that it holds whole.

They replace FSDP2 for a group of one rank. FSDP2 treats one rank like many: it casts into a send buffer,
gathers into another buffer, splits that buffer, and returns gradients by the same steps, which moves 28 bytes
an element a step. With working copies a parameter stays an fp32 DTensor for all code that uses it by name
(optimizer, checkpoint). While its module runs, a copy in the compute type replaces the parameter, and the
gradient of the copy becomes the gradient of the parameter. That moves 6 bytes an element, or 2 where the
optimizer writes the copy in the same pass as the weight (`tmoe.optim.AdamW`).

next: parallel/shared_copies.py
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tmoe.base.private_torch import find_or_note
from tmoe.ops.gradient_sums import Target, offer
from tmoe.parallel import values_away
from tmoe.parallel.mesh import local_part
from tmoe.parallel.precise import type_in

find_or_note(
    "torch.Tensor._post_accumulate_grad_hooks",
    "hooks of register_post_accumulate_grad_hook are not called where a rank holds a parameter whole",
)


class MicroBatches:
    """Where a step is in its micro-batches, for the working copies of one model.

    last: the gradients of the next backward are the step's last (`set_requires_gradient_sync(True)`). It is
        the default, since a step of one micro-batch needs no mark.
    """

    def __init__(self) -> None:
        self.last = True

    def follow(self, model: FSDPModule) -> None:
        """Sets `last` whenever the model's `set_requires_gradient_sync` is called."""

        def tell(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
            original(requires_gradient_sync, recurse=recurse)
            if recurse:  # otherwise the call concerns only the root's own parameters
                self.last = requires_gradient_sync

        original = model.set_requires_gradient_sync
        vars(model)["set_requires_gradient_sync"] = tell


class WorkingCopy:
    """The copy of a parameter that its module computes with.

    It owns the sum of the copy's gradients (tmoe/ops/gradient_sums.py), which is the parameter's gradient.

    master: the parameter.
    micros: the step's micro-batches.
    tensor: the copy.
    fresh: the copy holds the parameter's present value, because the optimizer has just written both.
    hooked: the copy has its gradient hook.
    sums: type in which the gradients of several micro-batches are added up; None: the parameter's.
    codes: the codes in fp8, or empty; the copy has them as `fp8_codes` (ops/experts/fp8_codes.py).
    own: the copy has memory besides the parameter's.
    seen: the parameter's version in the last forward: autograd's count of in-place writes. (A DTensor's local
        part and a copy do not share the count; a frozen parameter's includes its local part's.)
    """

    def __init__(
        self,
        master: nn.Parameter,
        dtype: torch.dtype,
        *,
        micros: MicroBatches | None = None,
        sums: torch.dtype | None = None,
    ):
        self.master = master
        self.micros = micros or MicroBatches()
        self.sums = sums or master.dtype
        self.fresh = False
        self.hooked = False
        self.seen = version(master)
        self.tensor = nn.Parameter(self.allocate(local_part(master).detach(), dtype), requires_grad=False)
        self.own = self.tensor.untyped_storage()._cdata != local_part(master).untyped_storage()._cdata
        self.codes: list[Tensor] = []
        setattr(self.tensor, "fp8_codes", self.codes)  # noqa: B010 (torch declares no such attribute)

    def allocate(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        return local.to(dtype)  # if the types are equal, this is the parameter's own memory

    @property
    def mine(self) -> Tensor:
        """The part of the copy that this rank writes: the whole copy.

        Autograd does not count these writes. A graph may hold the copy, whose value does not change.
        """
        return self.tensor.data

    def written(self, fresh: bool) -> None:
        """Notes that the parameter has changed. fresh: `mine` holds the new value as well."""
        self.fresh = fresh
        self.drop_codes()

    def drop_codes(self) -> None:
        """Ends the copy's codes in fp8, since its value may change."""
        if self.codes:  # a compiled loop then traces no change of the list
            self.codes.clear()

    @torch.no_grad()
    def refresh(self, coded: bool = False) -> None:
        """Brings the copy up to date before a forward.

        The parameter may have been written, frozen or unfrozen since the last forward. A frozen one keeps
        its codes until it is written.
        coded: codes may stand for the values of a frozen parameter, which are then not brought back.
        """
        self.tensor.requires_grad_(self.master.requires_grad)
        if self.master.requires_grad and not self.hooked:
            # Python's garbage collector does not see references held by autograd's hooks, so a hook must
            # not hold the copy.
            copy = weakref.ref(self)
            self.tensor.register_post_accumulate_grad_hook(
                lambda tensor: (alive := copy()) and alive.deliver(tensor)
            )
            self.hooked = True
        if self.seen != version(self.master):
            # The new version makes autograd refuse the backward of an earlier forward.
            torch.autograd.graph.increment_version(self.tensor)
            self.seen = version(self.master)  # read afterwards: master and copy may share one count
            self.drop_codes()
        if not self.fresh and not self.frozen:
            self.drop_codes()
        if coded and self.codes and self.frozen:
            return
        if values_away.is_free(self.tensor.data):
            self.reallocate()
        self.update()
        offer(self)

    @torch.no_grad()
    def rest(self, coded: bool) -> None:
        """Frees the values of a frozen copy after a forward, if codes stand for them (`coded`)."""
        if not (coded and self.codes and self.frozen) or values_away.is_free(self.tensor.data):
            return
        if not self.own:
            if not values_away.moves(self.tensor.data):
                return
            values_away.move_to_host(self.master)
            self.own, self.seen = True, version(self.master)
        values_away.free(self.tensor.data)

    @property
    def frozen(self) -> bool:
        return not self.master.requires_grad

    def reallocate(self) -> None:
        """Gives a copy whose values were freed memory for them."""
        values_away.allocate(self.tensor.data)

    def update(self) -> None:
        """Casts the parameter into the copy, unless the copy is fresh or is the parameter's own memory."""
        if not self.fresh and self.own:
            self.mine.copy_(local_part(self.master))

    @torch.no_grad()
    def deliver(self, tensor: Tensor) -> None:
        """Adds the copy's gradient, which autograd has finished, to the parameter's gradient.

        A compiled graph calls it without a gradient as well, if an op has added that to the sum.
        """
        if tensor.grad is not None:
            self.give(self.take(tensor))

    @torch.no_grad()
    def open(self, last: bool | None = None) -> Target:
        """The target of a gradient that an op computes itself; `close` must follow. See GradientSum.

        The first of several gradients is written in the type of the sums, so that none is rounded to the
        copy's. A step's only gradient is computed in the copy's type, which takes half of the memory. So is
        each gradient of sums in bf16, which `close` adds.
        last: the copy's last gradient of the step; None: this is the case in the last micro-batch.
        RuntimeError if the parameter was written since the forward.
        """
        self.require_unwritten()
        if self.summed != torch.float32:
            return Target()
        total = self.sum
        if total is not None:
            return Target(total, True)
        if self.micros.last if last is None else last:
            return Target()
        return Target(dtype=self.summed)

    @torch.no_grad()
    def close(self, target: Target, grad: Tensor, last: bool | None = None) -> None:
        """Ends a gradient that an op has computed: it is the parameter's gradient, or has been added to it.

        grad: the tensor of the target, or the tensor that the op has allocated.
        """
        if target.add:
            self.finish(None)
        else:
            self.give(grad)

    @property
    def summed(self) -> torch.dtype:
        """The type of sums that the parameter's gradient may have (Tensor.grad_dtype; None: any)."""
        return self.sums if self.master.grad_dtype is None else self.master.grad_dtype

    @property
    def sum(self) -> Tensor | None:
        """The sum of the step's earlier gradients, in its type; None: there are none yet.

        A first gradient in the copy's type, of a loop that announced no further one, is converted.
        """
        grad = self.master.grad
        if grad is None:
            return None
        local = local_part(grad)
        if local.dtype != self.summed or not local.is_contiguous():
            local = local.to(self.summed).contiguous()
            self.master.grad = None
            self.store(local)
        return local

    def take(self, tensor: Tensor) -> Tensor:
        """Returns the copy's gradient and removes it from the copy.

        RuntimeError if the parameter was written since the forward.
        """
        grad = tensor.grad
        tensor.grad = None
        assert grad is not None
        self.require_unwritten()
        return grad

    def require_unwritten(self) -> None:
        """RuntimeError if the parameter was written since the forward."""
        if version(self.master) != self.seen:
            raise RuntimeError(
                f"a weight of shape {tuple(self.master.shape)} was written between a forward and its "
                "backward (an optimizer's step?): call backward before"
            )

    def give(self, grad: Tensor) -> None:
        """Adds `grad` to the parameter's gradient.

        The gradient of the first micro-batch becomes the parameter's gradient without a copy, if the
        parameter accepts its type (Tensor.grad_dtype; None: any). Further gradients are added in the type
        `sums`, fp32 by default.
        """
        master = self.master
        if master.grad is not None:
            grad = local_part(master.grad).to(self.sums).add_(grad)
            master.grad = None
        self.finish(grad)

    def finish(self, grad: Tensor | None) -> None:
        """Makes `grad`, if it is given, the parameter's gradient, and calls the parameter's hooks.

        As in FSDP2, the hooks are called explicitly, because autograd does not know of this gradient.
        """
        if grad is not None:
            self.store(grad)
        for hook in self.hooks.values():
            hook(self.master)

    @property
    def hooks(self) -> dict[int, Callable[[Tensor], None]]:
        """The parameter's hooks (`register_post_accumulate_grad_hook`)."""
        return getattr(self.master, "_post_accumulate_grad_hooks", None) or {}

    @property
    def watched(self) -> bool:
        """See GradientSum."""
        return bool(self.hooks)

    def store(self, grad: Tensor) -> None:
        """Makes `grad` the parameter's gradient, in a type that the parameter accepts."""
        master = self.master
        if master.grad_dtype is not None:
            grad = grad.to(master.grad_dtype)
        if isinstance(master, DTensor):
            grad = DTensor.from_local(
                grad,
                master.device_mesh,
                master.placements,
                run_check=False,
                shape=master.shape,
                stride=master.stride(),
            )
        master.grad = grad


def stand_in(
    module: nn.Module,
    dtype: torch.dtype | None,
    leave_out: Collection[nn.Parameter] = (),
    new: Callable[[nn.Parameter, torch.dtype], WorkingCopy] = WorkingCopy,
) -> Callable[[], AbstractContextManager]:
    """Replaces a module's parameters by working copies whenever the module runs from now on.

    dtype: type of the copies; None: the type of each parameter.
    leave_out: parameters that are not replaced.
    new: makes a copy.
    Returns a context in which the copies are in place as well, for code that runs a part of `module` without
    calling it.
    """
    slots = [
        (owner, name)
        for owner in module.modules()
        for name, p in owner.named_parameters(recurse=False)
        if p not in leave_out
    ]
    masters: list[list[Any]] = []  # the replaced parameters, a list for each call in progress

    @torch.inference_mode(False)  # copies outlive the caller's mode, and autograd refuses inference tensors
    def enter(*_: Any) -> None:
        masters.append([owner._parameters[name] for owner, name in slots])
        for (owner, name), master in zip(slots, masters[-1], strict=True):
            copy = working_copy(master)
            if copy is None:
                copy = master.working_copy = new(master, type_in(owner, dtype or master.dtype))
            copy.refresh(coded(owner, copy))
            owner._parameters[name] = copy.tensor

    def leave(*_: Any) -> None:
        for (owner, name), master in zip(slots, masters.pop(), strict=True):
            owner._parameters[name] = master
            if copy := working_copy(master):
                copy.rest(coded(owner, copy))

    @contextmanager
    def standing_in() -> Iterator[None]:
        enter()
        try:
            yield
        finally:
            leave()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
    return standing_in


def coded(owner: nn.Module, copy: WorkingCopy) -> bool:
    """Whether codes may stand for a copy's values in this module: a matrix of experts in fp8."""
    return getattr(owner, "codes_alone", False) and copy.tensor.dim() == 3 and getattr(owner, "fp8", False)


def version(parameter: Tensor) -> int:
    """Autograd's count of in-place writes to the parameter; 0 for inference tensors.

    Writes to the local part of a frozen parameter count too.
    """
    if parameter.is_inference():
        return 0
    if parameter.requires_grad:
        return parameter._version  # alone: a compiled forward reads a sum of counts wrongly
    return parameter._version + local_part(parameter)._version


def working_copy(parameter: Tensor) -> WorkingCopy | None:
    """The parameter's working copy, None where it has none."""
    return getattr(parameter, "working_copy", None)


def make_stale(parameters: Iterable[Tensor]) -> None:
    """Marks working copies as out of date, because their parameters have changed.

    If the optimizer keeps copies fresh, call this after every write to parameters other than the optimizer's.
    """
    for p in parameters:
        if copy := working_copy(p):
            copy.written(False)
            # The backward of an earlier forward must be refused; the version does not count such writes.
            copy.seen = -1
