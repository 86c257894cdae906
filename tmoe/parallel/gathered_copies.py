"""Working copies of experts that several ranks share: gathered once a step, their gradients added up by whoever holds the master.

FSDP2 casts a shard, gathers it and splits what came, forward and backward again; a gradient it casts, cuts, and reduces in fp32. Here

    after a step    a rank's part of the copy, into which the optimizer has written, goes to the others: no cast, no buffer, no split
                    (a part that nobody has written, as on a CPU and in fp32, is cast and goes with every forward)
    backward        a part of a gradient goes to its owner in the compute type, as it was computed; the owner adds the parts up in fp32

which is half of FSDP2's bytes between ranks, a fifth of its copies in memory where two share, and the same sum. It costs the memory of
the copies; docs/decisions/004-experts-kept-whole.md has what it gives. Both ways lead beside the compute, as
FSDP2's do: streams wait for what they need alone.

next: moe/dispatch.py
"""

import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tmoe.ops.experts import gpu
from tmoe.ops.sum_parts import sum_parts
from tmoe.parallel.copies import WorkingCopy
from tmoe.parallel.mesh import local_part
from tmoe.stack import take

all_gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # torch 2.13's name, and 2.11's
# calls a function at the end of the backward that runs: FSDP2's way there, which has no public name
at_the_end = take(
    "torch.autograd.Variable._execution_engine.queue_callback",
    "experts that data-parallel ranks share are gathered by FSDP2 (--parallel.whole-gib has no effect)",
)
AHEAD = 3  # gradients on their way at a time: the backward waits for the oldest, or it would fill memory with them


class Sharers:
    """The ranks that share experts (the dp axis), and the streams beside the compute. `sync`: gradients travel in the next backward."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size, self.sync = group, group.rank(), group.size(), True
        self.begun: Any = None  # CUDA event at which the model's forward began, while it runs
        self.travelling: deque[tuple[Any, Tensor]] = (
            deque()
        )  # gradients, and the event at which they have left
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.copies: weakref.WeakSet[GatheredCopy] = weakref.WeakSet()
        self.numbers = (
            itertools.count()
        )  # of the copies: all ranks make them, and send what is left, in one order
        gpu.waves = 4  # of this process: collectives as large as the experts run beside their products

    def follow(self, model: FSDPModule) -> None:
        """From now on hears when the model's forward begins and ends, and what FSDP2 is told of micro-batches."""

        def begin(*_) -> None:
            self.begun = (
                torch.cuda.current_stream().record_event() if "nccl" in dist.get_backend(self.group) else None
            )

        def end(module: nn.Module, args: Any, output: Any = None) -> None:
            self.begun = None
            left = self.sync and any(copy.unsent is not None for copy in self.copies)
            if (
                left and isinstance(output, Tensor) and output.requires_grad
            ):  # its backward may reach no expert
                output.register_hook(lambda _: at_the_end(self.finish))

        def tell(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
            told(requires_gradient_sync, recurse=recurse)
            self.sync = (
                requires_gradient_sync if recurse else self.sync
            )  # else it speaks of the root's own parameters

        told = model.set_requires_gradient_sync
        vars(model)["set_requires_gradient_sync"] = tell
        assert isinstance(model, nn.Module)
        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end, always_call=True)

    def stream(self, name: str) -> torch.cuda.Stream:
        """What travels comes before the products, as FSDP2 has it: its peers wait for it, and kernels of theirs may wait for them."""
        if name not in self.streams:
            self.streams[name] = torch.cuda.Stream(priority=-1)
        return self.streams[name]

    @contextmanager
    def ahead(self, tensor: Tensor) -> Iterator[None]:
        """On a stream of its own, for which the caller's then waits. Inside a forward of the model it waits for nothing that the forward
        has been given: masters and copies are as they were at its beginning."""
        if not tensor.is_cuda:
            yield
            return
        main, side = torch.cuda.current_stream(), self.stream("gather")
        side.wait_stream(main) if self.begun is None else side.wait_event(self.begun)
        with torch.cuda.stream(side):
            yield
        main.wait_stream(side)

    @contextmanager
    def beside(self, grad: Tensor) -> Iterator[None]:
        """On a stream beside the backward, whose end waits for it."""
        if not grad.is_cuda:
            yield
            return
        main, side = torch.cuda.current_stream(), self.stream("send")
        if len(self.travelling) == AHEAD:
            main.wait_event(self.travelling.popleft()[0])
        side.wait_stream(main)
        with torch.cuda.stream(side), torch.profiler.record_function("experts' gradients"):
            yield
            self.travelling.append((side.record_event(), grad))

    def finish(self) -> None:
        """At the end of a backward: what earlier micro-batches left, of experts that this one did not reach, goes as well."""
        for copy in sorted(self.copies, key=lambda copy: copy.number):
            if copy.unsent is not None:
                copy.send(copy.unsent)
        if self.travelling:
            torch.cuda.current_stream().wait_stream(self.stream("send"))
            self.travelling.clear()

    def owned(self, grad: Tensor) -> Tensor:
        """[L / ranks, ...] fp32: my part of a gradient [L, ...], summed over the ranks."""
        parts = torch.empty_like(grad)
        dist.all_to_all_single(parts, grad, group=self.group)
        parts = parts.unflatten(0, (self.size, -1))
        return sum_parts(parts) if parts.is_cuda else parts.sum(0, dtype=torch.float32)


class GatheredCopy(WorkingCopy):
    """Of a master of which each sharer holds as many experts. `spread`: the others' parts are there as well."""

    def __init__(self, master: nn.Parameter, dtype: torch.dtype, sharers: Sharers):
        self.sharers, self.spread, self.number = sharers, False, next(sharers.numbers)
        self.unsent: Tensor | None = None
        sharers.copies.add(self)
        super().__init__(master, dtype)

    def allocate(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        # memory of the stream that writes there: what the forward has freed, its kernels may still read
        with torch.cuda.stream(self.sharers.stream("gather")) if local.is_cuda else nullcontext():
            return local.new_empty(self.sharers.size * local.shape[0], *local.shape[1:], dtype=dtype)

    @property
    def mine(self) -> Tensor:
        n = len(self.tensor) // self.sharers.size
        return self.tensor.data.narrow(0, self.sharers.rank * n, n)

    def written(self, fresh: bool) -> None:
        self.fresh, self.spread = fresh, False

    def update(self) -> None:
        """A collective of the sharers, unless everything is there."""
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
        """Of micro-batches that do not sync, gradients add up here, in fp32."""
        grad = self.take(tensor)
        if self.unsent is not None:
            grad = self.unsent.float().add_(grad)
        if not self.sharers.sync:
            self.unsent = grad
            return
        at_the_end(self.sharers.finish)
        self.send(grad)

    @torch.no_grad()
    def send(self, grad: Tensor) -> None:
        self.unsent = None
        with self.sharers.beside(grad):
            self.give(self.sharers.owned(grad.contiguous()))
