"""Exchanges a layer's tokens inside one NVLink node by kernels that store into the peers' memory, as one op.

    forward     push x ─ meet ─ experts ─ meet, pull y
    backward    push dy ─ meet ─ dH, dX ─ meet ─ weight gradients ─ meet ─ sum dx
                         └ copy x ───────┘    └ copy dX ───────────┘
    with a shared expert:
    forward     its products ── meet ─ experts ─ meet, pull y
                └ copy x ───────┘
    backward    its gradients ─ meet ─ dH, dX, then as above
                └ copy dy, x ───┘

One opaque op does dispatch, experts and combine. Therefore no other code ever holds a view of the buffers,
which all layers share. No size in the op depends on the routing, and the op never waits for the host: it
compiles into one graph, and a CUDA graph can capture it.

**Copies during the products.** Products that fill the GPU leave no multiprocessor for a kernel that moves
rows. The copy engines need no multiprocessor: while the products run, they copy x (a second time) and the
partial dX. This makes the products 3 to 8% slower (docs/decisions, 022 and 023). The copy engines copy every
row to every rank, because only the device knows which rank needs which row. Most layers need most of these
copies anyway (90% at K=8 on 4 ranks), and the other copies cost no time if the products take longer than the
copies (`hides`). If the products are shorter, kernels send those rows too, and no copy overlaps with the
products. x and dy must arrive before the experts can begin. Their copies overlap with products only if there
is a shared expert, which needs no rows of other ranks.

**Tensors that are kept for backward.** The received rows are not kept: backward sends x again. Keeping them
would take T * ranks rows per layer (the static bound), or a copy of the received rows outside the buffer. At
24 layers of Qwen3-30B-A3B, 16384 tokens per GPU and ep=4 that is 5.5 GiB. Therefore a layer keeps its inputs,
and the pre-activations H of `pairs` routed pairs. The buffers hold four times T * ranks rows for all layers
together: they do not grow with the number of layers.

**Which rank may write when.** A meeting is a barrier between the streams of all ranks (`meet`). A rank writes
into a peer's x, dy, ids or weights only in a push, or in a copy that follows a push. It reads a peer's y only
in a pull. Before a rank pushes, it has finished the previous pull. In that pull it met all ranks, after their
experts had read x, ids and weights. Therefore the rank may overwrite the peers' rows, and a push needs no
meeting before it. Before the experts of a rank write y, the rank has met all ranks again: in the push, or
while it waited for the copies during a shared expert. The other ranks reached that meeting after their pull
of the previous y. Only backward needs more: its weight gradients read x and dy, and its sums are read, after
the last of these meetings. Therefore backward ends with a further meeting of all ranks. All calls of one
group must be made on one stream, and in the same order on every rank. A rank without tokens makes the calls
as well.

**fp8** on the wire: rows are packed to float8 e4m3, with one scale per row, before they are sent. The
receiver unpacks them, so experts and sums read the dtype of x. This halves the bytes. Each movement adds
rounding of about 2.6% of a row's norm, in forward and in backward. Experts in fp8 (`codes`) multiply by the
packed x and dy as they came, without a second cast; only the gradients of their matrices read values.

next: moe/exchange/dispatch.py
"""

import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.base.private_torch import find
from tmoe.moe.exchange.received_rows import ReceivedExperts
from tmoe.ops import exchange
from tmoe.ops.argument_checks import check_shared
from tmoe.ops.experts import swiglu
from tmoe.ops.experts.op import NO_CODES, check_arguments, packed_codes, room_for_h
from tmoe.ops.gradient_sums import sum_of
from tmoe.ops.launch.kernel_launch import cdiv, device_facts
from tmoe.ops.register import register
from tmoe.parallel.agree import gathered, gathered_by_store
from tmoe.parallel.collectives import group_of

log = logging.getLogger(__name__)
symmetric = find("torch.distributed._symmetric_memory")
_detect_dma_connectivity = find("torch._C._distributed_c10d._detect_dma_connectivity")

LINK = 370e9  # bytes per second that one GPU's copy engines send to its peers, on an H200
PRODUCT = 600e12  # operations per second of a matrix product, on an H200

Tensors = tuple[Tensor, ...]

_exchanges: dict[str, "Exchange"] = {}


class Exchange:
    """The buffers of one expert group, mapped on all its ranks, and the four movements between them."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = group.rank()
        self.world = group.size()
        # the buffers have room for these numbers
        self.capacity = 0  # tokens per rank
        self.width = 0  # bytes per row
        self.K = 0  # experts per token
        # The stream of the copies. With its high priority, the kernel that announces them precedes the next
        # product
        self.side = torch.cuda.Stream(priority=-1)
        self.captured = False  # whether a CUDA graph holds the addresses
        self.packs = False  # whether the buffers have room for packed rows

    @torch.inference_mode(False)  # buffers outlive the caller's mode; backward copies into them
    def reserve(self, tokens: int, width: int, K: int, fp8: bool = False) -> None:
        """Allocates room for `tokens` rows of `width` bytes per rank; fp8: for packed rows too.

        A collective if the room is not sufficient yet. ValueError on a rank that needs more room while
        another rank does not: the other rank has already started the exchange, and waits there for this rank.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        if tokens <= self.capacity and width <= self.width and K <= self.K and fp8 <= self.packs:
            self.captured |= capturing
            return
        if capturing or self.captured:
            raise RuntimeError(
                f"symm: no room for {tokens} tokens of {width} bytes; "
                "run the largest batch once before capturing a CUDA graph"
            )
        asks = gathered_by_store(self.group, "room", (tokens, width, K, fp8), self.ahead)
        if asks is None:
            first = dist.get_global_rank(self.group, self.ahead()[0])
            raise ValueError(
                f"symm: {tokens} tokens here, room for {self.capacity}, and in the same call no more than "
                f"that on rank {first} of this expert group: room grows only if all ranks of the group need "
                f"more in the same call. Set the largest number of tokens of any rank before, {tokens} or "
                "more: train.batch * train.seq of parallelize's cfg, or tokens of apply_ep"
            )
        if len({tuple(ask[1:]) for ask in asks}) > 1:
            raise ValueError(
                "symm: ranks of one expert group call different layers: "
                f"(tokens, bytes a row, K, fp8) is {asks}"
            )
        self.capacity = max(self.capacity, *(ask[0] for ask in asks))
        self.width = max(self.width, width)
        self.K = max(self.K, K)
        self.packs = self.packs or fp8

        # the size of each section in bytes
        rows = self.world * self.capacity
        pair = _up(rows * self.K * 4)
        row = _up(rows * self.width)
        sizes = dict(
            main=256, side=256, ids=pair, weights=pair, d_weights=pair, x=row, dy=row, y=row, sums=row
        )
        if self.packs:
            sizes |= {f"{name} packed": _up(row // 2) for name in ("x", "dy", "y", "sums")}
            sizes |= {f"{name} scales": _up(rows * 4) for name in ("x", "dy", "y", "sums")}

        # the old buffers are freed, so no peer may still be using them
        torch.cuda.synchronize()
        dist.barrier(self.group)
        # tmoe never uses multicast, and on some hosts mapping multicast memory fails
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        device = torch.device("cuda", torch.cuda.current_device())
        self.memory = symmetric.empty(sum(sizes.values()), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(self.memory, self.group)
        self.peers = [handle.get_buffer(q, self.memory.shape, torch.uint8) for q in range(self.world)]

        self.sections: dict[str, Tensor] = {}  # views of this rank's memory
        self.starts: dict[str, int] = {}  # bytes from the beginning of the memory
        self.addresses: dict[str, Tensor] = {}  # of the section on each rank, [world] int64
        self.tables: dict[tuple[str, int], Tensor] = {}  # see `table`
        start = 0
        for name, size in sizes.items():
            self.sections[name] = self.memory[start : start + size]
            self.starts[name] = start
            addresses = [p + start for p in handle.buffer_ptrs]
            self.addresses[name] = torch.tensor(addresses, device=self.memory.device)
            start += size

        self.memory[:512].zero_()  # the states of `main` and `side`
        torch.cuda.synchronize()
        dist.barrier(self.group)

    def ahead(self) -> list[int]:
        """Ranks of the group that wait at a meeting that this rank has not reached.

        Synchronizes with this rank's work on the device.
        """
        if not self.capacity:
            return []
        states = torch.stack([self.sections[name].view(torch.int32) for name in ("main", "side")]).cpu()
        met = states[:, exchange.MET.value, None]
        waiting = (states[:, : self.world] - met > 0).any(0).nonzero().flatten().tolist()
        return [q for q in waiting if q != self.rank]

    def rows(self, name: str, D: int, dtype: torch.dtype) -> Tensor:
        """This rank's section of rows, [world * capacity, D]."""
        size = self.world * self.capacity * D * dtype.itemsize
        return self.sections[name][:size].view(dtype).view(-1, D)

    def routes(self, name: str, K: int, dtype: torch.dtype) -> Tensor:
        """This rank's section of ids or weights, [world * capacity, K]."""
        return self.sections[name][: self.world * self.capacity * K * 4].view(dtype).view(-1, K)

    def packed(self, name: str, D: int) -> tuple[Tensor, Tensor]:
        """This rank's packed rows [world * capacity, D] and their scales [world * capacity]."""
        scales = self.sections[f"{name} scales"][: self.world * self.capacity * 4].view(torch.float32)
        return self.rows(f"{name} packed", D, torch.float8_e4m3fn), scales

    def wire_x(self, name: str, x_TD: Tensor, fp8: bool) -> dict[str, Tensor]:
        """The tensors to send for this rank's tokens, by section: x_TD, or packed rows and scales."""
        if not fp8:
            return {name: x_TD}
        packed = torch.empty_like(x_TD, dtype=torch.float8_e4m3fn)
        scales = x_TD.new_empty(len(x_TD), dtype=torch.float32)
        exchange.pack(x_TD, None, packed, scales)
        return {f"{name} packed": packed, f"{name} scales": scales}

    def wire_y(self, D: int, dtype: torch.dtype, K: int, fp8: bool) -> dict[str, Tensor]:
        """The same for all slots of this rank's y; packed rows and scales are in separate sections."""
        y = self.rows("y", D, dtype)
        if not fp8:
            return {"y": y}
        packed, scales = self.packed("y", D)
        exchange.pack(y, self.routes("ids", K, torch.int32), packed, scales)
        return {"y packed": packed, "y scales": scales}

    def push(
        self,
        name: str,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor | None,
        L: int,
        fp8: bool,
        meet: bool = True,
        programs: int | None = None,
    ) -> None:
        """Sends x_TD into section `name` of the ranks that hold its experts.

        With weights_TK, ids and weights are sent too. meet: waits until all ranks have sent their rows.
        programs: None fills the GPU.
        """
        to = self.addresses
        (section, rows), *packed = self.wire_x(name, x_TD, fp8).items()
        scales = ()
        if fp8:
            scales_section, scales_T = packed[0]
            scales = (scales_T, to[scales_section])
        exchange.push(
            rows, ids_TK, weights_TK,
            to[section], to["ids"], to["weights"], to["main"],
            self.rank, self.capacity, L, programs or _all(x_TD), meet, *scales,
        )  # fmt: skip

    def unpack(self, name: str, D: int, dtype: torch.dtype, K: int) -> None:
        """Fills section `name` from the packed rows that were received for it."""
        exchange.unpack(self.rows(name, D, dtype), self.routes("ids", K, torch.int32), *self.packed(name, D))

    def pull(
        self,
        y_TD: Tensor,
        d_weights_TK: Tensor | None,
        ids_TK: Tensor,
        L: int,
        fp8: bool,
        programs: int | None = None,
    ) -> None:
        """Writes y of this rank's tokens into y_TD: for each token, the sum of all ranks' rows.

        It also writes d_weights_TK, unless that is None. programs: None fills the GPU.
        """
        of = self.addresses
        wire = self.wire_y(y_TD.shape[1], y_TD.dtype, ids_TK.shape[1], fp8)
        rows, *scales = (of[name] for name in wire)
        exchange.pull(
            y_TD, d_weights_TK, ids_TK,
            rows, of["d_weights"], of["main"],
            self.rank, self.capacity, L, programs or _all(y_TD), True, *scales,
        )  # fmt: skip

    def copy(self, q: int, name: str, slot: int, rows: Tensor) -> None:
        """Copies contiguous rows into section `name` of rank q, starting at `slot`.

        A copy to another rank needs no kernel.
        """
        if n := len(rows):
            whole = rows.view(-1).view(torch.uint8)
            start = self.starts[name] + slot * (whole.numel() // n)
            self.peers[q][start : start + whole.numel()].copy_(whole, non_blocking=True)

    def copy_x(self, wire: dict[str, Tensor]) -> None:
        """Copies the rows of all this rank's tokens to their slots on every rank."""
        for q in _others_first(self.rank, self.world):
            for name, rows in wire.items():
                self.copy(q, name, self.rank * self.capacity, rows)

    def copy_y(self, wire: dict[str, Tensor]) -> None:
        """Copies the slots of each other rank's tokens in this rank's y to this rank's part of its sums."""
        for q in _others_first(self.rank, self.world)[:-1]:
            for name, rows in wire.items():
                slots = rows[q * self.capacity : (q + 1) * self.capacity]
                self.copy(q, name.replace("y", "sums", 1), self.rank * self.capacity, slots)

    def sum(
        self, y_TD: Tensor, d_weights_TK: Tensor, ids_TK: Tensor, L: int, wire: dict[str, Tensor]
    ) -> None:
        """Writes y_TD: the sums for this rank's tokens over all ranks' y, which were copied to this rank.

        d_weights_TK is read from the peers' d_weights.
        """
        of = self.addresses
        rows, *scales = (self.table(name, y) for name, y in wire.items())
        exchange.pull(
            y_TD, d_weights_TK, ids_TK,
            rows, of["d_weights"], of["side"],
            self.rank, self.capacity, L, _all(y_TD), False, *scales,
        )  # fmt: skip

    def table(self, name: str, y: Tensor) -> Tensor:
        """Addresses [world] at which a pull reads the slots of this rank's tokens in this rank's memory.

        The slots of this rank are in y, those of another rank in its part of the sums. Each address is
        given as if the section began with rank 0's tokens.
        """
        width = y[0].numel() * y.itemsize
        if (name, width) in self.tables:
            return self.tables[name, width]
        q = torch.arange(self.world, device=y.device)
        sums = self.sections[name.replace("y", "sums", 1)].data_ptr()
        parts = sums + (q - self.rank) * (self.capacity * width)
        table = torch.where(q == self.rank, self.sections[name].data_ptr(), parts)
        # a table that is made while a CUDA graph is captured is empty until the graph is replayed
        if not (y.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.tables[name, width] = table
        return table

    def meet(self) -> None:
        """The stream waits until the streams of all ranks have reached this meeting."""
        exchange.meet(self.addresses["main"], self.rank)

    def copy_async(self, copy: Callable[[Any], None], wire: Any) -> Any:
        """Runs copy(wire) on the side stream, in parallel with the caller's stream, then signals all ranks.

        The copies start after all work that was enqueued on the caller's stream before. Returns wire, whose
        memory must live until `arrived`.
        """
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            copy(wire)
            exchange.meet(self.addresses["side"], self.rank, wait=False)
        return wire

    def arrived(self) -> None:
        """The caller's stream waits until the side streams' copies on all ranks are complete."""
        # First wait for this rank's own copies. Otherwise a CUDA graph might wait for peers before it runs
        # the branch that the peers wait for.
        torch.cuda.current_stream().wait_stream(self.side)
        exchange.meet(self.addresses["side"], self.rank, arrive=False)


def _others_first(rank: int, world: int) -> list[int]:
    """All ranks, this rank last; each rank begins with a different rank."""
    return [(rank + i) % world for i in range(1, world + 1)]


def _up(n: int) -> int:
    """n bytes, rounded up to a multiple of 256."""
    return cdiv(n, 256) * 256


def _all(t: Tensor) -> int:
    """The number of programs that fill the GPU."""
    return 2 * device_facts(t.device)[1]


def exchange_of(group: str) -> Exchange:
    """The Exchange of a group, created at first use; the first `reserve` allocates its memory."""
    ranks = group_of(group)
    ex = _exchanges.get(group)
    if ex is None or ex.group is not ranks:  # a new world may reuse a name
        ex = _exchanges[group] = Exchange(ranks)
    return ex


@contextmanager
def graphs_end_here(group: str) -> Iterator[None]:
    """CUDA graphs captured in this context are discarded at its end; then the room may grow again."""
    ex = exchange_of(group)
    captured = ex.captured
    try:
        yield
    finally:
        ex.captured = captured


class Local(NamedTuple):
    """This rank's L experts, in the form that moe_mlp takes."""

    gate_up_L2FD: Tensor
    down_LDF: Tensor
    bias_L2F: Tensor | None
    activation: str
    summed: bool = False
    """the op adds the gradients of both matrices to their sums (tmoe/ops/gradient_sums.py)"""
    codes: tuple[Tensor, Tensor] | None = None
    """of gate_up and down, for products in fp8 (tmoe/ops/experts/fp8_codes.py)"""


class SymmOptions(NamedTuple):
    """How tokens are exchanged in a call."""

    tokens: int
    """the most tokens of any rank in this call, at least T;
    if it is more than in all calls before, the call is a collective that allocates"""
    pairs: int | None
    """a multiple of 128, see moe_mlp"""
    fp8: bool
    """rows are packed for the transfer, forward and backward"""
    group: str
    """name of the expert group"""


def moe(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    local: Local,
    way: SymmOptions,
    shared: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes a whole layer over an expert group: `tmoe.ops.moe_mlp` with the experts of all its ranks.

    Args:
        x_TD: [T, D], float32, bfloat16 or float16, on this rank's GPU. T may be 0, and may differ between
            ranks.
        weights_TK: float [T, K].
        ids_TK: int32 [T, K], experts 0 .. ranks * L - 1, or -1.
        local, way: this rank's experts, and how tokens are exchanged.
        shared: None, or the matrices gate_up [2G, D] and down [D, G] of a SwiGLU for every token, on all
            ranks; only without fp8. With [G, D] it is relu squared without a gate. Copy engines then send the
            rows while this shared expert runs, which is faster where `hides(ranks, bytes of a number, G)`,
            without a gate 2 G / 3.

    Returns y_TD in x's dtype, and the y of the shared expert (None without one). Products and sums are those
    of moe_mlp. Then a token's results from several ranks are added in rank order, in float32. The function is
    differentiable in all tensors except ids; every rank of the group must then call backward.
    """
    shared_gate_up, shared_down = (None, None) if shared is None else shared
    gate_up, down, bias, activation, summed, codes = local
    if summed:
        gate_up, down = gate_up.detach(), down.detach()
    up_codes, down_codes = codes or NO_CODES
    matrices = gate_up, down, bias, shared_gate_up, shared_down, up_codes, down_codes
    tensors = (x_TD, weights_TK, ids_TK, *matrices)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    tokens, pairs, fp8, group = way
    assert pairs is not None  # None means all pairs of one rank
    how = activation, tokens, pairs, fp8, keep, group, summed
    layer = SymmCall(x_TD, weights_TK, ids_TK, *matrices, *how)
    y_TD, _, shared_TD, _ = torch.ops.tmoe.symm_moe(*layer)
    return y_TD, None if shared is None else shared_TD


class SymmCall(NamedTuple):
    """The arguments of the op symm_moe; `Local` and `SymmOptions` describe them."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    gate_up: Tensor
    down: Tensor
    bias: Tensor | None
    shared_gate_up: Tensor | None
    shared_down: Tensor | None
    up_codes: Tensor | None
    down_codes: Tensor | None
    activation: str
    tokens: int
    pairs: int
    fp8: bool
    keep: bool  # whether to keep H and the shared expert's pre-activations for backward
    group: str
    summed: bool = False  # gradients of gate_up and down are added to their sums


class SymmBackward(NamedTuple):
    """The arguments of the op symm_moe_backward: two gradients, fields of SymmCall, and kept tensors."""

    dy: Tensor
    d_shared: Tensor | None
    x: Tensor
    weights: Tensor
    ids: Tensor
    gate_up: Tensor
    down: Tensor
    bias: Tensor | None
    shared_gate_up: Tensor | None
    shared_down: Tensor | None
    up_codes: Tensor | None
    down_codes: Tensor | None
    h: Tensor
    shared_h: Tensor
    activation: str
    tokens: int
    pairs: int
    fp8: bool
    frozen: bool  # neither gate_up nor down needs a gradient
    group: str
    summed: bool = False  # gradients of gate_up and down are added to their sums


def _forward(layer: SymmCall) -> Tensors:
    """The op symm_moe.

    Returns y; H of the first `pairs` routed pairs (empty unless keep); y and the pre-activations of the
    shared expert (empty without it).
    """
    x, weights, ids, gate_up, down, bias, shared_gate_up, shared_down, *_ = layer
    activation, fp8, keep, codes = layer.activation, layer.fp8, layer.keep, packed_codes(layer)
    check_arguments(layer)
    if shared_gate_up is not None and shared_down is not None:
        check_shared(x, shared_gate_up, shared_down, fp8)
    with torch.cuda.device(x.device):
        x, weights, ids = (t.contiguous() for t in (x, weights, ids))
        ex = exchange_of(layer.group)
        L = down.shape[0]
        D, K = x.shape[1], ids.shape[1]
        ex.reserve(layer.tokens, D * x.itemsize, K, fp8)
        if shared_gate_up is None or shared_down is None:
            shared_y = x.new_empty(0)
            shared_h = x.new_empty(0)
            ex.push("x", x, ids, weights, L, fp8)
            if fp8 and codes is None:
                ex.unpack("x", D, x.dtype, K)
        else:
            _push_beside(ex, {"x": x}, ids, weights, L)
            shared_y, shared_h = swiglu.forward(x, shared_gate_up, shared_down)
            shared_h = shared_h if keep else x.new_empty(0)
            ex.arrived()
        h = room_for_h(layer, layer.pairs, keep)
        how = K, x.dtype, layer.pairs, codes, fp8
        experts = ReceivedExperts(ex, gate_up, down, bias, activation, *how)
        experts.forward(h if keep else None)
        y = torch.empty_like(x)
        ex.pull(y, None, ids, L, fp8)
    return y, h, shared_y, shared_h


def _forward_fake(layer: SymmCall) -> Tensors:
    x = layer.x
    h = room_for_h(layer, layer.pairs, layer.keep)
    if layer.shared_gate_up is None:
        return x.new_empty(x.shape), h, x.new_empty(0), x.new_empty(0)
    shared_h = x.new_empty(x.shape[0], layer.shared_gate_up.shape[0]) if layer.keep else x.new_empty(0)
    return x.new_empty(x.shape), h, x.new_empty(x.shape), shared_h


def _push_beside(ex: Exchange, wire: dict[str, Tensor], ids: Tensor, weights: Tensor, L: int) -> None:
    """Sends ids and weights by a kernel, then all rows of `wire` on the side stream.

    `arrived` waits for all of them.
    """
    ex.push("x", wire["x"][:, :0], ids, weights, L, False, meet=False)
    ex.copy_async(ex.copy_x, wire)


def _backward(layer: SymmBackward) -> Tensors:
    """The op symm_moe_backward.

    Returns the gradients that the experts give: of x, weights, gate_up, down (empty if frozen or summed) and
    the bias (empty without one). Then the gradients that the shared expert gives: of x and of its two
    matrices (empty without it).
    """
    gate_up, down, bias, shared_gate_up, shared_down = layer[5:10]
    h, shared_h, fp8, codes = layer.h, layer.shared_h, layer.fp8, packed_codes(layer)
    values = codes is None or not layer.frozen  # of packed rows: are read
    with torch.cuda.device(layer.x.device):
        dy, x, weights, ids = (t.contiguous() for t in (layer.dy, layer.x, layer.weights, layer.ids))
        ex = exchange_of(layer.group)
        L, D, F = down.shape
        K = ids.shape[1]
        dx = torch.empty_like(x)
        d_weights = torch.empty_like(weights)
        hidden = hides(ex.world, x.itemsize, K * F)
        shared = shared_gate_up is not None
        copied = []  # sources of the running copies, kept alive until `arrived`

        # Rows that are sent while the shared expert's gradients are computed, or first if there is no shared
        # expert.
        if shared:
            assert layer.d_shared is not None and shared_down is not None
            _push_beside(ex, {"dy": dy, "x": x}, ids, weights, L)
            of_shared = swiglu.backward(layer.d_shared.contiguous(), x, shared_gate_up, shared_down, shared_h)
            ex.arrived()
        else:
            of_shared = tuple(x.new_empty(0) for _ in range(3))
            ex.push("dy", dy, ids, weights, L, fp8, meet=hidden)
            if hidden:
                copied.append(ex.copy_async(ex.copy_x, ex.wire_x("x", x, fp8)))
            else:
                ex.push("x", x, ids, None, L, fp8)
            if fp8 and values:
                ex.unpack("dy", D, x.dtype, K)

        # The experts' gradients, and the rows that are sent during them.
        how = K, x.dtype, layer.pairs, codes, fp8
        experts = ReceivedExperts(ex, gate_up, down, bias, layer.activation, *how)

        def x_is_here() -> None:
            if hidden and not shared:
                ex.arrived()
            if fp8 and values:
                ex.unpack("x", D, x.dtype, K)

        def dx_is_there() -> None:
            if hidden:
                copied.append(ex.copy_async(ex.copy_y, ex.wire_y(D, x.dtype, K, fp8)))
            else:
                ex.pull(dx, d_weights, ids, L, fp8)

        sums = (sum_of(gate_up), sum_of(down)) if layer.summed else ()
        grads = experts.backward(h, x_is_here, dx_is_there, layer.frozen, sums)
        if hidden:
            ex.arrived()
            ex.sum(dx, d_weights, ids, L, copied[-1])
        ex.meet()  # weight gradients have read x and dy, and the sums are read
    of_experts = (x.new_empty(0) if grad is None else grad for grad in grads)
    return dx, d_weights, *of_experts, *of_shared


def _backward_fake(layer: SymmBackward) -> Tensors:
    x, weights, _, gate_up, down, bias = layer[2:8]
    shared = (x, *layer[8:10]) if layer.shared_gate_up is not None else (None,) * 3
    matrices = (None, None) if layer.frozen or layer.summed else (gate_up, down)
    present = (t.new_empty(t.shape) for t in (x, weights))
    perhaps = (x.new_empty(0 if t is None else t.shape) for t in (*matrices, bias, *shared))
    return *present, *perhaps


def _save(ctx: Any, inputs: tuple, output: Tensors) -> None:
    *tensors, activation, tokens, pairs, fp8, _, group, summed = inputs
    frozen = not (summed or any(ctx.needs_input_grad[3:5]))
    ctx.how = activation, tokens, pairs, fp8, frozen, group, summed
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1], output[3])


def _differentiate(
    ctx: Any, dy: Tensor | None, _: Tensor | None, d_shared: Tensor | None, __: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: under torch.utils.checkpoint each access recomputes
    x, bias, shared_down = saved[0], saved[5], saved[7]
    # zeros where a result was not used: every rank must take part
    dy = torch.zeros_like(x) if dy is None else dy
    if shared_down is not None and d_shared is None:
        d_shared = torch.zeros_like(x)
    dx, d_weights, d_gate_up, d_down, d_bias, *of_shared = torch.ops.tmoe.symm_moe_backward(
        dy, d_shared, *saved, *ctx.how
    )
    if shared_down is None:
        d_shared_gate_up = d_shared_down = None
    else:
        dx_shared, d_shared_gate_up, d_shared_down = of_shared
        # added here, where a compiled graph adds the gradients of router and residual in the same pass
        dx = dx + dx_shared
    if not any(ctx.needs_input_grad[3:5]):
        d_gate_up = d_down = None
    d_bias = None if bias is None else d_bias
    return dx, d_weights, None, d_gate_up, d_down, d_bias, d_shared_gate_up, d_shared_down, *(None,) * 9


register(
    "symm_moe",
    SymmCall,
    results=4,
    cpu=None,
    cuda=_forward,
    fake=_forward_fake,
    save=_save,
    differentiate=_differentiate,
)
register("symm_moe_backward", SymmBackward, results=8, cpu=None, cuda=_backward, fake=_backward_fake)


def hides(ranks: int, itemsize: int, width: int) -> bool:
    """Whether the copy engines send the rows to all peers in less time than the products take.

    itemsize: bytes of one number of a row.
    width: the products do 6 D width operations per row. It is K F for dH and dX, and for the weight gradients
        of K experts; for a shared expert it is its own width.

    All ranks must decide the same, so the result depends neither on this rank's tokens nor on their routing.
    """
    return itemsize * (ranks - 1) / LINK < 6 * width / PRODUCT


@functools.cache
def obstacle(ranks: dist.ProcessGroup) -> str:
    """Why this group cannot exchange tokens through its peers' memory; "" if it can.

    A collective, with the same result on all ranks.
    """
    if "nccl" not in dist.get_backend(ranks) or torch.version.hip:
        return "its ranks do not run on NVIDIA's GPUs"
    gpu_here = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    gpus = gathered((socket.gethostname(), gpu_here), ranks)
    verdicts = gathered(_obstacle_here(gpus), ranks)
    verdict = next(filter(None, verdicts), "")
    if dist.get_rank() == 0:
        how = f"nccl, since {verdict}" if verdict else "symm: kernels that store into the peers' memory"
        log.info("exchange between the %d GPUs of an expert group: %s", ranks.size(), how)
    return verdict


def too_far(hosts: Sequence[str]) -> str:
    """Why a group with ranks on these hosts cannot share memory; "" if it can. hosts: of each rank."""
    if len(set(hosts)) > 1:
        return "its ranks are on several hosts"
    return f"it has more than {exchange.RANKS} ranks" if len(hosts) > exchange.RANKS else ""


def _obstacle_here(gpus: list[tuple[str, str]]) -> str:
    """The obstacle that this rank detects, given (host, GPU) of all ranks."""
    known = hasattr(symmetric, "empty") and hasattr(symmetric, "rendezvous") and _detect_dma_connectivity
    if not known:
        return f"torch {torch.__version__} has no symmetric memory that tmoe knows"
    if far := too_far([host for host, _ in gpus]):
        return far
    if len(set(gpus)) < len(gpus):
        return "ranks share a GPU"
    index = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if any(uuid not in index for _, uuid in gpus):
        return "its ranks do not see each other's GPUs"
    links = _detect_dma_connectivity(torch.autograd.DeviceType.CUDA, "nvlink").matrix
    mine = torch.cuda.current_device()
    for peer in {index[uuid] for _, uuid in gpus} - {mine}:
        if not (links[mine][peer] and torch.cuda.can_device_access_peer(mine, peer)):
            return f"no NVLink leads from GPU {mine} to GPU {peer}"
    return ""
