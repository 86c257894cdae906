"""Runs a pipeline's table on this rank: forwards, backwards, and the messages between stages.

Every directed edge between two stages has a separate process group of two ranks. Messages carry no tag: the
receiver posts buffers in the order in which the sender's row of the table sends, each before the action
that should run while its message is sent (pipeline_posts.py).
torch's own pipelines send and receive on one communicator, so compute waits for messages, and their split
backwards refuse compiled blocks (docs/decisions/051-own-pipeline.md).

next: parallel/pipeline_posts.py, then parallel/pipeline_schedule.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.ops.experts.deferred import DeferredGradients, collecting
from tmoe.parallel import pipeline_posts
from tmoe.parallel.mesh import Mesh, patience, set_timeout
from tmoe.parallel.pipeline_schedule import EVEN, Action, Message, StageCost, Table, messages


class Chunk(Protocol):
    """A part of the model that one rank computes: some blocks, or a piece of the head."""

    def forward_micro(self, micro: int, x: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        """Runs the forward of a micro-batch. x: hidden states of the previous chunk; None: no such chunk.

        A piece of the head gets the states of its tokens, [n, D].

        Returns hidden states for the next chunk (None: no such chunk), and the losses computed in this chunk.
        """
        ...

    def begin_backward(self, micro: int, last: bool) -> None:
        """Prepares for a micro-batch's backward. last: it is the step's last, and sends gradients."""
        ...

    def finish_experts(self, left: list[DeferredGradients], last: bool) -> None:
        """Computes the gradients that a backward has deferred. last: the step's last, which sends them."""
        ...


class Shape(NamedTuple):
    """Shape, type and device of the hidden states that one stage sends to another."""

    shape: tuple[int, ...]  # [B, s, D]: a micro-batch's tokens of this rank
    dtype: torch.dtype
    device: torch.device


def first_by_host() -> bool:
    """Whether the first pass sends its messages through the hosts' memory, not from GPU to GPU.

    NCCL's send and receive are kernels that spin until the peer's kernel runs. CUDA may load a kernel at its
    first launch, and may then have to wait for all running kernels. So a stage that compiles while it
    receives can wait for itself. After one pass all kernels are loaded.
    """
    return "nccl" in dist.get_backend()


class Edges:
    """The messages between this stage and its neighbours, during one pass over a table."""

    def __init__(self, table: Table, mesh: Mesh, posts: Sequence[Sequence[Message]]):
        """posts: the messages whose receives this rank posts before each action of its row."""
        own_place, place = mesh.place, mesh.axes.place
        self.here = own_place.pp
        self.posts = posts
        self.blocks = len(table.home)
        self.order = {edge: sent for edge, sent in messages(table).items() if own_place.pp in edge}
        ranks = range(mesh.axes.world)
        column = {place(r).pp: r for r in ranks if place(r)._replace(pp=0) == own_place._replace(pp=0)}
        self.ranks = column
        # All ranks make the communicators eagerly and in one order. If they were made at first use, two
        # stages could each wait for the other to make another communicator.
        self.groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self.hosts: dict[tuple[int, int], dist.ProcessGroup] = {}  # the same edges, between CPUs
        self.passed: set[str] = set()  # kinds of passes that have run
        on_gpus = "nccl" in dist.get_backend()
        for pairs in rounds(table):
            pair = next((pair for pair in pairs if own_place.pp in pair), None)
            # A rank without a neighbour in this round makes groups with itself as the only member, because
            # torch names a group by the number of groups that its members have.
            for edge in (pair, (pair[1], pair[0])) if pair else (None, None):
                members = [column[stage] for stage in edge or (own_place.pp,)]
                group = _new_group(members, None)
                host = _new_group(members, "gloo") if on_gpus else group
                if edge is not None:
                    self.groups[edge] = group
                    self.hosts[edge] = host
        if on_gpus:
            self._meet()

    def _meet(self) -> None:
        """Sends one number along each edge, in the same order on all ranks, which connects NCCL's peers."""
        for (source, target), group in self.groups.items():
            number = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
            if source == self.here:
                dist.send(number, self.ranks[target], group=group)
            else:
                dist.recv(number, self.ranks[source], group=group)

    def begin(self, shape: Shape, kinds: str, pieces: Sequence[range] = ()) -> None:
        """Begins a pass in which messages of these kinds are sent.

        pieces: tokens of each piece of a divided head.
        """
        self.shape = shape
        self.pieces = pieces
        self.by_host = first_by_host() and kinds not in self.passed
        self.passed.add(kinds)
        self.kinds = kinds
        self.source = {
            message: edge[0] for edge, sent in self.order.items() if edge[1] == self.here for message in sent
        }
        self.posted: dict[Message, tuple[Any, Tensor]] = {}
        self.leaving: deque[tuple[Any, Tensor]] = deque()
        self.inside: dict[Message, Tensor] = {}  # messages between two chunks of this rank

    def post(self, place: int) -> None:
        """Posts the receives that are due before the action at this place of the row."""
        for message in self.posts[place]:
            if message.kind not in self.kinds:
                continue
            device = torch.device("cpu") if self.by_host else self.shape.device
            source = self.source[message]
            group = (self.hosts if self.by_host else self.groups)[source, self.here]
            piece = piece_of(message, self.blocks) if self.pieces else None
            shape = self.shape.shape if piece is None else (len(self.pieces[piece]), self.shape.shape[-1])
            buffer = torch.empty(shape, dtype=self.shape.dtype, device=device)
            self.posted[message] = dist.irecv(buffer, self.ranks[source], group=group), buffer

    def receive(self, message: Message) -> Tensor:
        if message in self.inside:
            return self.inside.pop(message)
        work, buffer = self.posted.pop(message)
        _wait(work, buffer)
        return buffer.to(self.shape.device)

    def send(self, x: Tensor, to: int, message: Message) -> None:
        if to == self.here:
            self.inside[message] = x
            return
        while self.leaving and self.leaving[0][0].is_completed():
            self.leaving.popleft()
        x = x.cpu().contiguous() if self.by_host else x.contiguous()
        group = (self.hosts if self.by_host else self.groups)[self.here, to]
        self.leaving.append((dist.isend(x, self.ranks[to], group=group), x))

    def finish(self) -> None:
        """Waits until every sent message has left this rank."""
        for work, x in self.leaving:
            _wait(work, x)
        self.leaving.clear()
        assert not self.posted and not self.inside, "a table that leaves messages"


def piece_of(message: Message, blocks: int) -> int | None:
    """The piece of a divided head that receives or sends a message; None: both ends are chunks of blocks.

    blocks: the number of chunks of blocks.
    """
    if message.kind == "F":
        return message.chunk - blocks if message.chunk >= blocks else None
    return message.piece if message.chunk == blocks - 1 else None


def _wait(work: Any, x: Tensor) -> None:
    """Waits for a message, at most as long as a collective waits for its peers.

    Without a limit gloo would wait for ever. On a GPU the stream waits, not the host, and NCCL's watchdog
    enforces the limit.
    """
    if x.is_cpu:
        work.wait(patience())
    else:
        work.wait()


def _new_group(ranks: list[int], backend: str | None) -> dist.ProcessGroup:
    """Makes a group by a collective of its members alone. backend None: the default group's backend."""
    group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    set_timeout(patience(), group)
    return group


def rounds(table: Table) -> list[list[tuple[int, int]]]:
    """Pairs of stages that exchange messages, in rounds; in a round each stage has at most one neighbour."""
    filled: list[list[tuple[int, int]]] = []
    for pair in sorted({(min(edge), max(edge)) for edge in messages(table)}):
        for pairs in filled:
            if not any(set(pair) & set(other) for other in pairs):
                pairs.append(pair)
                break
        else:
            filled.append([pair])
    return filled


class Pipeline:
    """Runs this rank's row of a table over its chunks, which are given by number."""

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        table: Table,
        mesh: Mesh,
        costs: Sequence[StageCost] | None = None,
        latency: float = 0.0,
    ):
        """costs: seconds of each chunk and of each piece of the head; None: all equal.

        latency: seconds of a message.
        """
        self.chunks = chunks
        self.table = table
        each = costs or [EVEN] * len(table.places)
        self.edges = Edges(table, mesh, pipeline_posts.posts(table, each, latency)[mesh.place.pp])
        self.row = table.ranks[mesh.place.pp]

    def step(self, shape: Shape, pieces: Sequence[range] = (), scale: Tensor | None = None) -> None:
        """Forward and backward of every micro-batch.

        pieces: tokens of each piece of a divided head. scale: factor of the losses in the backward; None: 1.
        """
        self.scale = scale
        self.edges.begin(shape, "FB", pieces)
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor | None, list[Tensor]]] = {}
        left: dict[tuple[int, int], list[DeferredGradients]] = {}  # work that an I defers to its W
        final = {(a.op == "W", a.chunk): i for i, a in enumerate(self.row) if a.op != "F"}
        for i, action in enumerate(self.row):
            self.edges.post(i)
            op, chunk, micro = action
            last = final.get((op == "W", chunk)) == i
            if op == "F":
                kept[chunk, micro] = self._forward(action)
            elif op == "H":
                x, _, losses = self._forward(action)
                self.chunks[chunk].begin_backward(micro, last)
                self._backward(action, x, None, losses)
            elif op == "W":
                self.chunks[chunk].finish_experts(left.pop((chunk, micro)), last)
            else:
                self.chunks[chunk].begin_backward(micro, last)
                with collecting() if op == "I" else nullcontext([]) as left[chunk, micro]:
                    self._backward(action, *kept.pop((chunk, micro)))
        self.edges.finish()

    def evaluate(self, shape: Shape, pieces: Sequence[range] = ()) -> None:
        """The forward of every micro-batch. pieces: tokens of each piece of a divided head."""
        self.edges.begin(shape, "F", pieces)
        for i, action in enumerate(self.row):
            self.edges.post(i)
            if action.op in "FH":
                self._forward(action)
        self.edges.finish()

    def _forward(self, action: Action) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
        _, chunk, micro = action
        x = None
        if chunk:
            x = self.edges.receive(Message("F", chunk, micro)).detach()
            x.requires_grad_(torch.is_grad_enabled())
        y, losses = self.chunks[chunk].forward_micro(micro, x)
        for message in self.table.results(action) if y is not None else ():
            piece = piece_of(message, self.edges.blocks)
            sent = y.detach()
            if piece is not None:
                sent = sent.flatten(0, 1)[as_slice(self.edges.pieces[piece])]
            self.edges.send(sent, self.table.places[message.chunk], message)
        return x, y, losses

    def _backward(self, action: Action, x: Tensor | None, y: Tensor | None, losses: list[Tensor]) -> None:
        roots: list[tuple[Tensor, Tensor | None]] = [
            (loss, self.scale) for loss in losses if loss.requires_grad
        ]
        if y is not None:
            grads = [self.edges.receive(message) for message in self.table.needs(action)]
            grad = grads[0] if len(grads) == 1 else torch.cat(grads)
            grad = grad.view_as(y)
            roots += [(y, grad)] if y.requires_grad else []  # otherwise all blocks before it are frozen
        if roots:
            torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
        if x is not None:
            assert x.grad is not None
            for message in self.table.results(action):
                self.edges.send(x.grad, self.table.places[message.chunk], message)


def own_chunks(table: Table, stage: int) -> Iterator[int]:
    """Numbers of the chunks, and of the pieces of the head, that a stage computes."""
    return (chunk for chunk, home in enumerate(table.places) if home == stage)


def as_slice(tokens: range) -> slice:
    """The slice of these tokens."""
    return slice(tokens.start, tokens.stop)
