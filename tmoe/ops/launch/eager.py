"""Whether an op may call its kernels directly, past torch's dispatcher.

In eager mode the dispatcher costs as much as the launches of a small layer: a registered op passes it and a
Python autograd rule of torch.library, forward and backward. On a slow host that was 0.3 to 0.4 of 1.3 ms for
a layer of 512 tokens (docs/decisions/015-launch-fast-path.md); a plain autograd.Function around the same code
needs neither.

next: register.py
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from tmoe.base.private_torch import take

_SLOWER = "ops go through torch's dispatcher, which takes longer"
_modes = take("torch._C._len_torch_dispatch_stack", _SLOWER)
_transform = take("torch._C._functorch.peek_interpreter_stack", _SLOWER)
_trace = take("torch._C._get_tracing_state", _SLOWER)
_is_legacy_batch = take("torch._C._functorch.is_legacy_batchedtensor", _SLOWER)
_is_batch = take(
    "torch._C._functorch.is_batchedtensor", "layers keep what a backward needs, whether one comes or not"
)
_SEES = None not in (_modes, _transform, _trace, _is_legacy_batch)  # whether torch tells what watches


def unwatched(*tensors: Tensor | None) -> bool:
    """Whether nothing would see or change the op between here and its kernels.

    That is: no compiler or tracer, no dispatch mode (fakes, checkpoint policies, counters), no functional
    transform, no tensor of a class of its own. None counts as a tensor.
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
    """The autograd rule of an op that is a gradient itself: it raises.

    Not once_differentiable, which says nothing where the first gradient needs none (behind a sum), nor where
    torch.autograd.grad names its inputs.
    """
    raise RuntimeError("tmoe's ops have no second derivative")


def mapped(t: Tensor) -> bool:
    """Whether torch.vmap runs the op once for each of many tensors behind this one.

    Such a tensor says that it needs no gradient though those behind it may.
    """
    return not torch.compiler.is_compiling() and (_is_batch is None or _is_batch(t))


def _plain(t: Tensor) -> bool:
    """Whether t has no class of its own and is not a batch behind one tensor.

    Such a batch (`is_grads_batched`) has no address.
    """
    return type(t) in (torch.Tensor, torch.nn.Parameter) and not _is_legacy_batch(t)
