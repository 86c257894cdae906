"""Working copies of experts that several ranks share: gathered once a step, gradients summed by their owner.

FSDP2 casts a shard, gathers it and splits the result, in the forward and again in the backward. It casts and
splits a gradient and reduces it in fp32. Gathered copies work differently:

    after a step    The optimizer has written this rank's part of the copy. The part is sent to the other
                    ranks without a cast, a buffer or a split. (If the optimizer did not write the part, as
                    on a CPU and in fp32, the part is cast and sent in every forward.)
    backward        A part of a gradient is sent to its owner in the compute type, as it was computed. The
                    owner adds the parts up in fp32.

That needs half of FSDP2's bytes between ranks and, where two ranks share experts, a fifth of its copies in
memory, for the same sum. It costs the memory of the copies; docs/decisions/004-experts-kept-whole.md measures
the gain. As in FSDP2, both transfers overlap with the compute: a stream waits only for the tensors it needs.

next: moe/exchange/dispatch.py
"""

import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tmoe.base.private_torch import find_or_note
from tmoe.ops.experts import gpu
from tmoe.ops.gradient_sums import Target
from tmoe.ops.sum_parts import sum_parts
from tmoe.parallel.copies import WorkingCopy
from tmoe.parallel.mesh import local_part

# torch 2.13's name, and 2.11's
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Calls a function at the end of the current backward. FSDP2 uses it too; it has no public name.
at_the_end = find_or_note(
    "torch.autograd.Variable._execution_engine.queue_callback",
    "experts that data-parallel ranks share are gathered by FSDP2 (--parallel.gathered-gib has no effect)",
)
# Most gradients in transfer at a time. The backward waits for the oldest; otherwise they would fill memory.
AHEAD = 3
# Waves of the experts' products, because collectives as large as the experts run at the same time
# (ops/experts/gpu.py).
WAVES = 4


class SharingRanks:
    """The ranks that share experts (the dp axis), and the CUDA streams on which they exchange copies.

    sync: the next backward sends gradients.
    begun: CUDA event at which the model's forward began, while it runs.
    travelling: gradients in transfer, each with the event at which its transfer ends.
    numbers: numbers of the copies. All ranks make copies, and send unsent gradients, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.sync = True
        self.begun: torch.Event | None = None
        self.travelling: deque[tuple[torch.Event, Tensor]] = deque()
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.copies: weakref.WeakSet[GatheredCopy] = weakref.WeakSet()
        self.numbers = itertools.count()

    def follow(self, model: FSDPModule) -> None:
        """Attaches the sharers to the model. No other method changes an object outside the sharers.

        Hooks report when the model's forward begins and ends. The model's `set_requires_gradient_sync` sets
        `sync` of the sharers together with FSDP2's flag. On GPUs, the experts' kernels of this process run
        in four waves.
        """
        on_gpu = "nccl" in dist.get_backend(self.group)
        if on_gpu:
            gpu.waves = WAVES

        def begin(*_: Any) -> None:
            self.begun = torch.cuda.current_stream().record_event() if on_gpu else None

        def end(module: nn.Module, args: Any, output: Any = None) -> None:
            self.begun = None
            left = self.sync and any(copy.unsent is not None and not copy.held for copy in self.copies)
            # The backward of this output may reach no expert.
            if left and isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: at_the_end(self.finish))

        def tell(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
            original(requires_gradient_sync, recurse=recurse)
            if recurse:  # otherwise the call concerns only the root's own parameters
                self.sync = requires_gradient_sync

        original = model.set_requires_gradient_sync
        vars(model)["set_requires_gradient_sync"] = tell
        assert isinstance(model, nn.Module)
        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end, always_call=True)

    def stream(self, name: str) -> torch.cuda.Stream:
        """The stream of this name, made on first use, with high priority like FSDP2's streams.

        The priority is high because peers wait for the data, and other kernels may wait for the peers.
        """
        if name not in self.streams:
            self.streams[name] = torch.cuda.Stream(priority=-1)
        return self.streams[name]

    def writing(self, tensor: Tensor) -> AbstractContextManager[None]:
        """The stream on which copies are written, for a tensor on a GPU."""
        return torch.cuda.stream(self.stream("gather")) if tensor.is_cuda else nullcontext()

    @contextmanager
    def ahead(self, tensor: Tensor) -> Iterator[None]:
        """Runs the body on the stream "gather"; the caller's stream then waits for that stream.

        Inside a forward of the model the body does not wait for that forward's work, because masters and
        copies have not changed since the forward began.

        tensor: if it is not on a GPU, there are no streams and the body runs as it is.
        """
        if not tensor.is_cuda:
            yield
            return
        main = torch.cuda.current_stream()
        side = self.stream("gather")
        side.wait_stream(main) if self.begun is None else side.wait_event(self.begun)
        with torch.cuda.stream(side):
            yield
        main.wait_stream(side)

    @contextmanager
    def on_side_stream(self, grad: Tensor) -> Iterator[None]:
        """Runs the body, which sends `grad`, on the stream "send"; the end of the backward waits for it."""
        if not grad.is_cuda:
            yield
            return
        main = torch.cuda.current_stream()
        side = self.stream("send")
        if len(self.travelling) == AHEAD:
            main.wait_event(self.travelling.popleft()[0])
        side.wait_stream(main)
        with torch.cuda.stream(side), torch.profiler.record_function("experts' gradients"):
            yield
            self.travelling.append((side.record_event(), grad))

    def finish(self) -> None:
        """Ends a backward: sends gradients left unsent by earlier micro-batches, and waits for all transfers.

        Such gradients belong to experts that this backward did not reach.
        """
        for copy in sorted(self.copies, key=lambda copy: copy.number):
            if copy.unsent is not None and not copy.held:
                copy.send(copy.unsent)
        if self.travelling:
            torch.cuda.current_stream().wait_stream(self.stream("send"))
            self.travelling.clear()

    def owned(self, grad: Tensor) -> Tensor:
        """This rank's part of a gradient [L, ...], summed over the ranks: fp32 [L / ranks, ...].

        A collective of the sharers.
        """
        parts = torch.empty_like(grad)
        dist.all_to_all_single(parts, grad, group=self.group)
        parts = parts.unflatten(0, (self.size, -1))
        return sum_parts(parts) if parts.is_cuda else parts.sum(0, dtype=torch.float32)


class GatheredCopy(WorkingCopy):
    """A copy of all experts of a parameter of which each sharer holds an equal part.

    spread: the copy contains the present parts of all ranks.
    number: the copy's number, the same on all sharers.
    unsent: the gradient of micro-batches that did not sync.
    held: more will be added to `unsent` after its backward, so the end of a backward does not send it.
    """

    def __init__(
        self,
        master: nn.Parameter,
        dtype: torch.dtype,
        sharers: SharingRanks,
        sums: torch.dtype = torch.float32,
    ):
        self.sharers = sharers
        self.spread = False
        self.number = next(sharers.numbers)
        self.unsent: Tensor | None = None
        self.held = False
        sharers.copies.add(self)
        super().__init__(master, dtype, sums=sums)

    def allocate(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocates room for the parts of all sharers, on the stream that writes the copy.

        Memory that the forward has freed on its own stream may still be read by its kernels.
        """
        with self.sharers.writing(local):
            return local.new_empty(self.sharers.size * local.shape[0], *local.shape[1:], dtype=dtype)

    def reallocate(self) -> None:
        """Memory again, on the stream that writes the copy (`allocate`)."""
        with self.sharers.writing(self.tensor):
            super().reallocate()

    @property
    def mine(self) -> Tensor:
        """This rank's part of the copy."""
        n = len(self.tensor) // self.sharers.size
        return self.tensor.data.narrow(0, self.sharers.rank * n, n)

    def written(self, fresh: bool) -> None:
        super().written(fresh)
        self.spread = False

    def update(self) -> None:
        """Casts this rank's part and gathers all parts, unless the copy is already up to date.

        A collective of the sharers.
        """
        if self.fresh and self.spread:
            return
        with self.sharers.ahead(self.tensor):
            if not self.fresh:
                self.mine.copy_(local_part(self.master))
            part = self.mine if self.tensor.is_cuda else self.mine.clone()  # gloo may not gather in place
            all_gather(self.tensor.data, part, group=self.sharers.group)
        self.spread = True

    @torch.no_grad()
    def deliver(self, tensor: Tensor) -> None:
        """Sends a gradient of the copy. Gradients of micro-batches that do not sync are summed (`sums`)."""
        if tensor.grad is None:  # an op has added it to the sum
            return
        self.unsent = self.with_unsent(self.take(tensor))
        self.end_of_micro_batch()

    @torch.no_grad()
    def open(self, last: bool | None = None) -> Target:
        """See WorkingCopy. The sum is that of all experts of the copy, until it is sent."""
        self.require_unwritten()
        if self.sums != torch.float32:
            return Target()
        if self.unsent is not None:
            self.unsent = self.unsent.float()
            return Target(self.unsent, True)
        if self.sharers.sync if last is None else last:
            return Target()
        return Target(dtype=torch.float32)

    @torch.no_grad()
    def close(self, target: Target, grad: Tensor, last: bool | None = None) -> None:
        """See WorkingCopy. The sum is sent after the last gradient.

        last: given for a gradient that was computed after its backward. All sharers then call it in the same
            order, and call `SharingRanks.finish` afterwards.
        """
        self.unsent = grad if target.add else self.with_unsent(grad)
        if last is None:
            self.end_of_micro_batch()
            return
        self.held = not last
        if last:
            self.send(self.unsent)

    def with_unsent(self, grad: Tensor) -> Tensor:
        """The sum of `grad` and of what earlier micro-batches left."""
        return grad if self.unsent is None else self.unsent.to(self.sums).add_(grad)

    def end_of_micro_batch(self) -> None:
        """Sends the sum at the end of the backward, if this micro-batch syncs."""
        if self.sharers.sync:
            assert self.unsent is not None
            at_the_end(self.sharers.finish)
            self.send(self.unsent)

    @torch.no_grad()
    def send(self, grad: Tensor) -> None:
        """Sends each owner its part of a gradient; the owner sums the parts. A collective of the sharers."""
        self.unsent = None
        with self.sharers.on_side_stream(grad):
            self.give(self.sharers.owned(grad.contiguous()))
