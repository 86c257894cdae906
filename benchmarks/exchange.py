"""Times the exchange of an expert group against plain puts and NCCL, and MoE layers with ep=GPUs and ep=1.

    torchrun --nproc-per-node 4 -m benchmarks.exchange --json exchange.jsonl
    torchrun --nproc-per-node 4 -m benchmarks.exchange --sizes 8 --layers qwen3
    torchrun --nproc-per-node 4 -m benchmarks.exchange --programs 8 16 24 32 64 --sizes 64 --layers

Exchange, for each size: the MiB that a rank sends to its peers, in rows of 2048 bf16, with K=8 of 128 experts
drawn at random.
    put     a plain Triton kernel stores as many bytes into the peers' memory, in one piece each; no rank
            waits for another
    symm    tmoe's exchange: rows, ids and weights are sent, and all ranks synchronise; back: they
    synchronise,
            and a token's rows are read and summed
    expert  the usual way: one row for each (token, expert), sorted; counts are exchanged, the host waits,
        NCCL
            all-to-all; and back, where the K rows of a token are weighted and summed. Not quite comparable:
            tmoe sorts and weights inside the experts' kernels, outside of this time
    same    the rows that tmoe sends, with counts already known: gathered, NCCL all-to-all; and back, summed
            (tmoe's nccl dispatcher)
    nccl    of `same`, only the two all-to-all
    fp8     symm with rows packed for sending (--fp8), and the error of tokens that were sent and returned
Layer: forward and backward of tmoe.MoE, router to combine, compiled, T=16384 per GPU, with every expert on
each rank (ep=1) or 1/GPUs of the experts.

Microseconds and milliseconds are medians over rounds in which all contestants alternate, on the slowest
rank.
"""

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

import tmoe
from benchmarks.moe_layer import require_gpu, time_all
from benchmarks.train import write_line
from tmoe.commands.warmup import local_arch
from tmoe.model.parallelize import apply_ep
from tmoe.moe.exchange import symm
from tmoe.moe.exchange.dispatch import pairs_bound
from tmoe.ops import exchange
from tmoe.ops.exchange import section
from tmoe.ops.experts import swiglu
from tmoe.ops.experts.op import trace
from tmoe.ops.launch.kernel_launch import launch
from tmoe.ops.launch.precompile import precompile
from tmoe.ops.router import product as router_product
from tmoe.ops.router.topk import trace as trace_router
from tmoe.parallel import collectives
from tmoe.parallel.mesh import Mesh

# Number of experts, experts per token, width, and tokens of a rank.
E = 128
K = 8
D = 2048
T = 16384
LAYERS = {  # name: (D, the layer)
    "qwen3": (2048, tmoe.MoEConfig(experts=128, top_k=8, ffn_dim=768)),
    "olmoe": (2048, tmoe.MoEConfig(experts=64, top_k=8, ffn_dim=1024, renormalize=False)),
    "mixtral": (4096, tmoe.MoEConfig(experts=8, top_k=2, ffn_dim=14336, softmax="after")),
    "deepseek": (2048, tmoe.MoEConfig(experts=64, top_k=6, ffn_dim=1408, shared_dim=2816, renormalize=False)),
}


@triton.jit(do_not_specialize=["n", "rank"])
def put_kernel(x, to, n, rank, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Stores n words of x in each peer's memory, at the place that belongs to this rank."""
    pid = tl.program_id(0)
    for i in tl.static_range(1, WORLD):
        q = (rank + i) % WORLD
        there = section(to, q, tl.int32) + rank * n.to(tl.int64)
        for block in range(pid, tl.cdiv(n, BLOCK), tl.num_programs(0)):
            at = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(there + at, tl.load(x + at, mask=at < n), mask=at < n)


@functools.cache
def room() -> symm.Exchange:
    """An exchange for this benchmark alone.

    If an exchange has been made with room for 512 MiB per rank, a layer processes the slots of three times
    its tokens, and keeps 60% of its speed instead of 78%.
    """
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    return symm.Exchange(world)


class Sizes:
    """One size of the exchange, and the timed functions: each contestant has one to send and one to return.

    mib: MiB that a rank sends to its peers.
    programs: most programs of each kernel; 0: as in training.
    fp8: whether room for packed rows is needed.
    """

    def __init__(self, mib: int, programs: int, fp8: bool) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.L = E // self.world
        hit = 1 - (1 - 1 / self.world) ** K  # probability that a token is sent to a given rank
        tokens = max(8, round(mib * 2**20 / (2 * D * hit * (self.world - 1))))
        draw = torch.Generator("cuda").manual_seed(self.rank)
        scores = torch.rand(tokens, E, device="cuda", generator=draw)
        self.weights, ids = scores.topk(K)
        self.ids = ids.int()
        self.x = torch.randn(tokens, D, device="cuda", dtype=torch.bfloat16, generator=draw)
        self.y = torch.empty_like(self.x)
        self.ex = room()
        self.ex.reserve(tokens, 2 * D, K, fp8)
        self.programs = programs

        # Inputs of the NCCL contestants: the plan of tmoe's nccl dispatcher, with its counts known to the
        # host.
        self.group = dist.group.WORLD.group_name
        ranks = torch.arange(self.world, device="cuda")[:, None, None]
        goes = (self.ids // self.L == ranks).any(-1)  # [rank, token]
        self.copies = goes.sum(0)
        self.bytes = int(2 * D * (goes.sum() - goes[self.rank].sum()))
        self.plan = collectives.plan(self.ids, self.L, self.group)
        self.send, self.receive = self.plan[2].tolist()
        self.packed = self.x[self.plan[1]]
        self.arrived = self.x.new_empty(sum(self.receive), D)

    def put(self) -> None:
        n = self.bytes // (self.world - 1) // 16 * 4
        words = self.x.view(torch.int32)
        to = self.ex.addresses["x"]
        launch(put_kernel, (self.programs or 264,), words, to, n, self.rank, self.world, 4096, num_warps=8)

    def dispatch(self, fp8: bool = False) -> None:
        self.ex.push("x", self.x, self.ids, self.weights, self.L, fp8, programs=self.programs)
        if fp8:
            self.ex.unpack("x", D, self.x.dtype, K)

    def combine(self, fp8: bool = False) -> None:
        self.ex.pull(self.y, None, self.ids, self.L, fp8, programs=self.programs)

    def fp8_there(self) -> None:
        self.dispatch(True)

    def fp8_back(self) -> None:
        self.combine(True)

    def same_there(self) -> None:
        collectives.push(self.x, *self.plan, self.group)

    def same_back(self) -> None:
        collectives.pull(self.arrived, *self.plan, self.x.shape[0], self.group)

    def nccl_there(self) -> None:
        dist.all_to_all_single(self.arrived, self.packed, self.receive, self.send)

    def nccl_back(self) -> None:
        dist.all_to_all_single(self.packed, self.arrived, self.send, self.receive)

    def expert_there(self) -> None:
        """Like the standard dispatchers of torchtitan and OLMo-core, without padding and the second sort."""
        flat = self.ids.flatten()
        self.slots = flat.argsort(stable=True)
        # histc as in torchtitan: with bincount the host would wait once more
        counts = torch.histc(flat.float(), E, 0, E - 1).long()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        both = torch.stack(
            [counts.view(self.world, -1).sum(1), arriving.view(self.world, -1).sum(1)]
        ).tolist()
        rows = self.x[self.slots // K]
        self.far = rows.new_empty(sum(both[1]), D)
        dist.all_to_all_single(self.far, rows, both[1], both[0])
        self.both = both

    def expert_back(self) -> Tensor:
        rows = self.far.new_empty(self.slots.shape[0], D)
        dist.all_to_all_single(rows, self.far, *self.both)
        returned = torch.empty_like(rows).index_copy_(0, self.slots, rows).view(-1, K, D)
        return torch.bmm(self.weights[:, None].bfloat16(), returned)

    def error(self, fp8: bool) -> float:
        """Relative error of the sum when every token is sent to its ranks and returned by all of them."""
        self.dispatch(fp8)
        self.ex.rows("y", D, torch.bfloat16).copy_(self.ex.rows("x", D, torch.bfloat16))
        self.combine(fp8)
        want = self.x.float() * self.copies[:, None]
        return float((self.y - want).norm() / want.norm())


def slowest(fns: Sequence[Callable[[], Any]], rounds: int, ex: symm.Exchange) -> list[float]:
    """Median milliseconds of each function on the slowest rank.

    Ranks start together, by a barrier in `ex`, with the host five milliseconds ahead.
    """

    def begin() -> None:
        torch.cuda._sleep(10_000_000)
        ex.meet()

    ms = torch.tensor(time_all(fns, rounds, begin=begin), device="cuda", dtype=torch.float64)
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    return ms.tolist()


def time_size(mib: int, rounds: int, programs: int, fp8: bool) -> dict[str, Any]:
    """The figures of one size, in the form of the JSON file."""
    torch.cuda.empty_cache()
    s = Sizes(mib, programs, fp8)
    errors = [s.error(packed) for packed in (False, True)[: 1 + fp8]]
    assert errors[0] < 2**-8, "more than bfloat16's rounding"
    pairs = [(name + "_there", name + "_back") for name in ("expert", "same", "nccl", "fp8")[: 3 + fp8]]
    names = "put", "dispatch", "combine", *(name for pair in pairs for name in pair)
    ms = slowest([getattr(s, name) for name in names], rounds, s.ex)
    us = {name: 1e3 * t for name, t in zip(names, ms, strict=True)}
    ours = us["dispatch"] + us["combine"]
    return dict(
        kind="exchange",
        mib=mib,
        world=s.world,
        tokens=s.x.shape[0],
        bytes=s.bytes,
        programs=programs,
        us=us,
        errors=errors,
        gb_s={name: s.bytes / us[name] / 1e3 for name in ("put", "dispatch", "combine")},
        of_put=[us["put"] / us["dispatch"], us["put"] / us["combine"]],
        of={there.removesuffix("_there"): ours / (us[there] + us[back]) for there, back in pairs},
    )


def layer(name: str, mesh: Mesh, ep: int, wire: str = "same") -> Callable[[], None]:
    """A function that runs forward and backward of one of LAYERS."""
    dim, cfg = LAYERS[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        moe = tmoe.MoE(dim, cfg).bfloat16()
    if ep > 1:
        apply_ep(moe, mesh, "symm", T, wire)
    torch.manual_seed(dist.get_rank())
    x, dy = (torch.randn(T, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    route = torch.compile(moe.route, fullgraph=True, dynamic=False)

    def run() -> None:
        moe.experts(route, x, None)[0].backward(dy)
        x.grad = None
        moe.zero_grad(set_to_none=True)

    return run


def time_layer(name: str, mesh: Mesh, rounds: int, fp8: bool) -> dict[str, Any]:
    """The figures of one of LAYERS, in the form of the JSON file."""
    torch.compiler.reset()  # else the layers of all shapes count as recompilations of one function
    torch.cuda.empty_cache()
    world = dist.get_world_size()
    wires = ["same", "fp8"][: 1 + fp8]
    fns = [layer(name, mesh, 1), *(layer(name, mesh, world, wire) for wire in wires)]
    single, *many = slowest(fns, rounds, symm.exchange_of(dist.group.WORLD.group_name))
    kept = [single / m for m in many]
    return dict(kind="layer", name=name, world=world, ms_ep1=single, ms=many, wires=wires, kept=kept)


def show(line: dict[str, Any]) -> str:
    """The figures of a size or of a layer in one line of text."""
    if line["kind"] == "layer":
        each = zip(line["wires"], line["ms"], line["kept"], strict=True)
        many = "   ".join(f"{wire} {ms:.2f} ms {kept:.0%}" for wire, ms, kept in each)
        return f"{line['name']:9} ep=1 {line['ms_ep1']:7.2f} ms   ep={line['world']} {many}"
    us = line["us"]
    put = f"put {us['put']:6.0f} us {line['gb_s']['put']:4.0f} GB/s"
    there, back = line["of_put"]
    ours = f"symm {us['dispatch']:6.0f} {us['combine']:6.0f} us {there:4.0%} {back:4.0%}"
    others = " | ".join(
        f"{name} {us[name + '_there']:6.0f} {us[name + '_back']:6.0f} x{ratio:.2f}"
        for name, ratio in line["of"].items()
    )
    off = "".join(f" off {e:.1e}" for e in line["errors"][1:])
    return f"{line['mib']:4} MiB  {put} | {ours} | {others}{off}"


def warm(names: list[str], world: int, fp8: bool) -> None:
    """Compiles all kernels that the layers need, before a process group exists."""
    traces: list[tuple] = [(exchange.trace, T, D, K, world, torch.bfloat16, fp8)]
    for name in names:
        dim, cfg = LAYERS[name]
        traces += [
            (trace_router, T, cfg.experts, cfg.top_k, cfg.renormalize or cfg.softmax == "after"),
            (router_product.trace, T, dim, cfg.experts, torch.bfloat16),
            (exchange.trace, T, dim, cfg.top_k, world, torch.bfloat16, fp8),
        ]
        if cfg.shared_dim:
            traces.append((swiglu.trace, T, cfg.shared_dim, torch.bfloat16))
            traces.append((exchange.trace_routes, T, cfg.top_k, world, torch.bfloat16))
        for ep in (1, world):
            L = cfg.experts // ep
            pairs = pairs_bound(T, cfg.top_k, ep, L)
            traces.append((trace, T * ep, dim, cfg.ffn_dim, L, cfg.top_k, torch.bfloat16, pairs))
    precompile(local_arch(), traces, 8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512], help="MiB"
    )
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument(
        "--programs",
        type=int,
        nargs="*",
        default=[0],
        help="most programs of each kernel, half as many if rows are few; 0: as in training",
    )
    parser.add_argument("--fp8", action="store_true", help="also rows packed to float8")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require_gpu(parser)
    if "WORLD_SIZE" not in os.environ:
        parser.error("WORLD_SIZE is not set: start it with torchrun, one process a GPU")
    warm(args.layers, int(os.environ["WORLD_SIZE"]), args.fp8)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    mesh = tmoe.parallel.build_mesh(ep=dist.get_world_size())
    lines: list[dict[str, Any]] = []

    def add(line: dict[str, Any]) -> None:
        line |= dict(date=str(date.today()), gpu=torch.cuda.get_device_name(), torch=torch.__version__)
        lines.append(line)
        if dist.get_rank() == 0:
            print(show(line), flush=True)
            if args.json:
                write_line(args.json, line)

    for mib in sorted(args.sizes):  # growing, because buffers only grow: unused slots cost a little
        for programs in args.programs:
            add(time_size(mib, args.rounds, programs, args.fp8))
    for name in args.layers:
        add(time_layer(name, mesh, args.rounds, args.fp8))
    if dist.get_rank() == 0:
        print("\n" + "\n".join(map(show, lines)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
