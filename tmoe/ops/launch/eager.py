"""Decides whether an op may call its kernels directly, without torch's dispatcher.

In eager mode the dispatcher costs as much as the launches of a small layer. A registered op runs through the
dispatcher and through a Python autograd rule of torch.library, in forward and backward. On a slow host that
was 0.3 to 0.4 of 1.3 ms for a layer of 512 tokens (docs/decisions/015-launch-fast-path.md). A plain
autograd.Function around the same code needs neither.

next: register.py
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from tmoe.base.private_torch import find_or_note

_SLOWER = "ops go through torch's dispatcher, which takes longer"
_modes = find_or_note("torch._C._len_torch_dispatch_stack", _SLOWER)
_transform = find_or_note("torch._C._functorch.peek_interpreter_stack", _SLOWER)
_trace = find_or_note("torch._C._get_tracing_state", _SLOWER)
_is_legacy_batch = find_or_note("torch._C._functorch.is_legacy_batchedtensor", _SLOWER)
_is_batch = find_or_note(
    "torch._C._functorch.is_batchedtensor", "layers keep tensors for a backward even if none follows"
)
_SEES = None not in (_modes, _transform, _trace, _is_legacy_batch)  # whether torch has all these queries


def unwatched(*tensors: Tensor | None) -> bool:
    """Whether nothing observes or changes the op between this call and its kernels.

    True if there is no compiler or tracer, no dispatch mode (fakes, checkpoint policies, counters), no
    functional transform, and no tensor subclass among `tensors`. None counts as a plain tensor.
    """
    return (
        not torch.compiler.is_compiling()
        and _SEES
        and not _modes()
        and _transform() is None
        and _trace() is None
        and all(t is None or _plain(t) for t in tensors)
    )


def no_second_derivative(ctx: Any, *_: Any) -> NoReturn:
    """The autograd rule of an op that computes a gradient: it raises RuntimeError.

    once_differentiable would not raise if the first gradient needs no gradient itself (after a sum), or if
    torch.autograd.grad names the inputs.
    """
    raise RuntimeError("tmoe's ops have no second derivative")


def mapped(t: Tensor) -> bool:
    """Whether t is a batch of torch.vmap, for which the op runs once for each tensor of the batch.

    The batch has requires_grad=False even if its tensors need gradients.
    """
    return not torch.compiler.is_compiling() and (_is_batch is None or _is_batch(t))


def _plain(t: Tensor) -> bool:
    """Whether t is neither a tensor subclass nor a legacy batch, which wraps many tensors in one.

    Such a batch (`is_grads_batched`) has no address.
    """
    return type(t) in (torch.Tensor, torch.nn.Parameter) and not _is_legacy_batch(t)
