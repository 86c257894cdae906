"""Whether an op may go straight to its kernels.

In eager mode torch's dispatcher costs as much as the launches of a small layer.

A registered op passes the dispatcher and a Python autograd rule of torch.library, forward and backward. On a
slow host that was 0.3 to 0.4 of 1.3 ms for a layer of 512 tokens (docs/decisions/015-launch-fast-path.md); a
plain autograd.Function around the same code needs none of it.

next: mlp.py
"""

import torch
from torch import Tensor

from tmoe.stack import take

_SLOWER = "ops go through torch's dispatcher, which takes longer"
_modes = take("torch._C._len_torch_dispatch_stack", _SLOWER)
_transform = take("torch._C._functorch.peek_interpreter_stack", _SLOWER)
_trace = take("torch._C._get_tracing_state", _SLOWER)
_is_legacy_batch = take("torch._C._functorch.is_legacy_batchedtensor", _SLOWER)
_is_batch = take(
    "torch._C._functorch.is_batchedtensor", "layers keep what a backward needs, whether one comes or not"
)
_SEES = None not in (_modes, _transform, _trace, _is_legacy_batch)  # whether torch says who watches


def unwatched(*tensors: Tensor | None) -> bool:
    """Whether nobody would see or change the op between here and its kernels.

    No compiler or tracer, no dispatch mode (fakes, checkpoint policies, counters), no functional transform,
    no tensor of a class of its own. None counts as a tensor.
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
    """The autograd rule of an op that is a gradient itself.

    Not once_differentiable: that says nothing where the first gradient needs none (behind a sum), nor where
    torch.autograd.grad names its inputs.
    """
    raise RuntimeError("tmoe's ops have no second derivative")


def mapped(t: Tensor) -> bool:
    """Whether torch.vmap runs the op once for each of many tensors behind this one.

    It says that it needs no gradient though they may.
    """
    return not torch.compiler.is_compiling() and (_is_batch is None or _is_batch(t))


def _plain(t: Tensor) -> bool:
    """Neither of a class of its own nor a batch behind one tensor (`is_grads_batched`), which has no address."""
    return type(t) in (torch.Tensor, torch.nn.Parameter) and not _is_legacy_batch(t)
