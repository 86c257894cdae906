"""Working copies: how a rank computes in bf16 with parameters that it holds whole.

They do the work of FSDP2 for a group of one. FSDP2 treats one rank like many: it casts into a send buffer,
gathers into another, splits that, and sends gradients back the same way: 28 bytes an element a step. Here a
parameter stays an fp32 DTensor for all that use it by name (optimizer, checkpoint). While its module runs, a
copy in the compute type stands in its place, and the copy's gradient becomes the parameter's. That moves 6
bytes an element, or 2 where the optimizer writes the copy while it has the weight at hand
(`tmoe.optim.AdamW`).

next: parallel/gathered_copies.py
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tmoe.base.private_torch import take
from tmoe.parallel.mesh import local_part

take(
    "torch.Tensor._post_accumulate_grad_hooks",
    "hooks of register_post_accumulate_grad_hook are not called where a rank holds a parameter whole",
)


class WorkingCopy:
    """A parameter's stand-in.

    master: the parameter. tensor: the copy.
    fresh: the copy holds the parameter's present value, because the optimizer has just written both.
    hooked: the copy has its gradient hook.
    seen: the parameter's version in the last forward. (Autograd counts writes in place so. A DTensor's local
        part and a copy do not share the count.)
    """

    def __init__(self, master: nn.Parameter, dtype: torch.dtype):
        self.master = master
        self.fresh = False
        self.hooked = False
        self.seen = version(master)
        self.tensor = nn.Parameter(self.allocate(local_part(master).detach(), dtype), requires_grad=False)

    def allocate(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        return local.to(dtype)  # of equal type: the parameter's own memory

    @property
    def mine(self) -> Tensor:
        """The part that this rank writes: all of it.

        Autograd does not count such writes: a graph may hold the copy, whose value stays equal.
        """
        return self.tensor.data

    def written(self, fresh: bool) -> None:
        """Notes that the parameter has changed. fresh: `mine` has changed with it."""
        self.fresh = fresh

    @torch.no_grad()
    def refresh(self) -> None:
        """Brings the copy up to date before a forward.

        The parameter may have been written, frozen or unfrozen since the last one.
        """
        self.tensor.requires_grad_(self.master.requires_grad)
        if self.master.requires_grad and not self.hooked:
            # Python's collector does not see what autograd's hooks hold: a hook must not hold the copy.
            copy = weakref.ref(self)
            self.tensor.register_post_accumulate_grad_hook(
                lambda tensor: (alive := copy()) and alive.deliver(tensor)
            )
            self.hooked = True
        if self.seen != version(self.master):
            # The backward of an earlier forward is to be refused.
            torch.autograd.graph.increment_version(self.tensor)
            self.seen = version(self.master)  # which may be the copy's own count
        self.update()

    def update(self) -> None:
        """Casts the parameter into the copy, unless the copy is fresh or is the parameter's own memory."""
        if not self.fresh and self.tensor.dtype != self.master.dtype:
            self.mine.copy_(local_part(self.master))

    @torch.no_grad()
    def deliver(self, tensor: Tensor) -> None:
        """Hands on a gradient of the copy that autograd has finished."""
        self.give(self.take(tensor))

    @torch.no_grad()
    def deliver_later(self, grad: Tensor, last: bool) -> None:
        """Hands on a gradient that was made after its backward; last: the step's last one of this copy.

        RuntimeError if the parameter was written since the forward.
        """
        self.require_unwritten()
        self.give(grad)

    def take(self, tensor: Tensor) -> Tensor:
        """The copy's gradient, which the copy then lacks.

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

        The first micro-batch's becomes the parameter's as it is, if the parameter takes its type
        (Tensor.grad_dtype; None: any). More add up in fp32.
        """
        master = self.master
        if master.grad is not None:
            grad = local_part(master.grad).to(master.dtype).add_(grad)
            master.grad = None
        elif master.grad_dtype is not None:
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
        # as FSDP2 does: autograd does not know of this gradient
        for hook in (getattr(master, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(master)


def stand_in(
    module: nn.Module,
    dtype: torch.dtype | None,
    leave_out: Collection[nn.Parameter] = (),
    new: Callable[[nn.Parameter, torch.dtype], WorkingCopy] = WorkingCopy,
) -> Callable[[], AbstractContextManager]:
    """Puts working copies in the place of a module's parameters, from now on, whenever the module runs.

    dtype: of the copies; None: that of each parameter.
    leave_out: parameters that stay as they are.
    new: makes a copy.
    Returns a context in which the copies are in place as well, for what runs a part of `module` without
    calling it.
    """
    slots = [
        (owner, name)
        for owner in module.modules()
        for name, p in owner.named_parameters(recurse=False)
        if p not in leave_out
    ]
    masters: list[list[Any]] = []  # of the calls under way

    @torch.inference_mode(False)  # copies outlive the caller's mode, and autograd refuses inference tensors
    def enter(*_: Any) -> None:
        masters.append([owner._parameters[name] for owner, name in slots])
        for (owner, name), master in zip(slots, masters[-1], strict=True):
            copy = working_copy(master)
            if copy is None:
                copy = master.working_copy = new(master, dtype or master.dtype)
            copy.refresh()
            owner._parameters[name] = copy.tensor

    def leave(*_: Any) -> None:
        for (owner, name), master in zip(slots, masters.pop(), strict=True):
            owner._parameters[name] = master

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


def version(parameter: Tensor) -> int:
    """How often the parameter was written in place, as autograd counts it; 0 for inference tensors."""
    return 0 if parameter.is_inference() else parameter._version


def working_copy(parameter: Tensor) -> WorkingCopy | None:
    """The parameter's working copy, None where it has none."""
    return getattr(parameter, "working_copy", None)


def make_stale(parameters: Iterable[Tensor]) -> None:
    """Tells working copies that their parameters have changed.

    Call it after every write to parameters beside the optimizer's, if the optimizer keeps copies fresh.
    """
    for p in parameters:
        if copy := working_copy(p):
            copy.written(False)
            # Backwards of earlier forwards are to be refused, and the version does not tell of such writes.
            copy.seen = -1
