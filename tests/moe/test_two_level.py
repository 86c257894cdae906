"""The exchange in two hops gives the flat one's bits, and a token crosses the network once for each node."""

import logging
import os

import pytest
import runs
import torch
import torch.distributed as dist
from tiers import slow_but
from torch._dynamo.utils import counters

from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.config.run import Config, ParallelConfig, TrainConfig
from tmoe.model.parallelize import apply_ep
from tmoe.model.transformer import Transformer
from tmoe.moe.exchange.dispatch import AllToAllDispatcher
from tmoe.moe.exchange.two_level import (
    TwoLevelDispatcher,
    bytes_across,
    expected_rows_across,
    over_nodes,
    rows_across,
)
from tmoe.moe.layer import MoE
from tmoe.moe.router import Routing
from tmoe.parallel import build_mesh, parallelize

D, E = 16, 16
TWO_TWOS = [0, 0, 1, 1]  # the node of each rank
TWO_FOURS = [0, 0, 0, 0, 1, 1, 1, 1]
FOUR_TWOS = [0, 0, 1, 1, 2, 2, 3, 3]
MIXED = [0, 1, 1, 0, 2, 0, 2, 1, 2]  # by a launcher that does not fill node after node


def stand_on(nodes: list[int], rank: int) -> None:
    """The environment of torchrun on these nodes."""
    os.environ.update(
        GROUP_RANK=str(nodes[rank]),
        GROUP_WORLD_SIZE=str(len(set(nodes))),
        LOCAL_RANK=str(nodes[:rank].count(nodes[rank])),
        LOCAL_WORLD_SIZE=str(nodes.count(nodes[rank])),
    )


def draw_ids(kind: str, tokens: int, experts: int, K: int, draw: torch.Generator) -> torch.Tensor:
    """ids [T, K]: distinct experts of a token, or -1."""
    ids = torch.rand(tokens, experts, generator=draw).argsort(1)[:, :K]
    if kind == "one expert":
        ids = torch.full((tokens, K), -1)
        ids[:, -1] = experts // 3
    elif kind == "last node":
        ids = experts - 1 - ids % 2
        ids[:, 1:] = -1
    elif kind == "nowhere":
        ids = torch.full((tokens, K), -1)
    elif kind == "holes":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.5, -1)
    return ids.int()


# ---- bits ----


def exchange(
    rank: int, world: int, nodes: list[int], kind: str, tokens: list[int], K: int, dtype: torch.dtype
) -> dict[str, dict[str, torch.Tensor]]:
    """What an exchange gives this rank: flat, in two hops, and as the flat one adds node by node."""
    stand_on(nodes, rank)
    mesh = build_mesh(ep=world, ep_across_nodes=True)
    experts = 2 * world
    flat = AllToAllDispatcher(mesh.ep.get_group(), 2)
    two = over_nodes(flat, mesh.nodes)
    assert isinstance(two, TwoLevelDispatcher)
    draw = torch.Generator().manual_seed(rank)
    T = tokens[rank]
    ids_TK = draw_ids(kind, T, experts, K, draw)
    x_TD, dy_TD = (torch.randn(T, D, generator=draw).to(dtype) for _ in range(2))
    weights_TK = torch.rand(T, K, generator=draw)
    found = {}
    for name, dispatcher in (("flat", flat), ("two", two)):
        x, weights = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        rows, plan = dispatcher.dispatch(x, Routing(weights, ids_TK, torch.empty(0)))
        arrived = rows.x_RD.detach().requires_grad_()
        scale_R = (rows.weights_RK * (rows.ids_RK >= 0) * (rows.ids_RK + rank + 1)).sum(1, keepdim=True) / 3
        y_RD = (arrived * scale_R).to(dtype)
        y_TD = dispatcher.combine(y_RD, plan)
        y_TD.backward(dy_TD, inputs=[arrived, weights])
        rows.x_RD.backward(arrived.grad)
        found[name] = dict(
            rows=rows.x_RD.detach(),
            row_weights=rows.weights_RK.detach(),
            ids=rows.ids_RK,
            dy_rows=arrived.grad,
            dw=weights.grad,
            y=y_TD.detach(),
            dx=x.grad,
        )
        assert rows.pairs is not None and plan.tokens == T
        if name == "flat":
            back = [("y", y_RD.detach()), ("dx", arrived.grad)]
            found["by node"] = {n: node_by_node(flat, plan, rows_RD, nodes, rank) for n, rows_RD in back}
    return found


def node_by_node(flat, plan, rows_RD: torch.Tensor, nodes: list[int], rank: int) -> torch.Tensor:
    """A token's rows added up on each node, then the nodes' sums, in the order of the ranks of its place.

    By flat combines in which one node speaks at a time.
    """
    silent = torch.zeros_like(rows_RD)
    sums = [flat.combine(rows_RD if nodes[rank] == n else silent, plan) for n in range(max(nodes) + 1)]
    place = nodes[:rank].count(nodes[rank])
    order = [n for p, n in enumerate(nodes) if nodes[:p].count(n) == place]
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    return sum((sums[n].to(wide) for n in order[1:]), sums[order[0]].to(wide)).to(rows_RD.dtype)


@pytest.mark.parametrize(
    ("nodes", "kind", "tokens", "K", "dtype"),
    [
        (TWO_TWOS, "random", [33, 33, 33, 33], 3, torch.float32),
        (TWO_TWOS, "random", [17, 0, 5, 40], 8, torch.float32),
        (TWO_TWOS, "random", [0, 0, 0, 0], 2, torch.float32),
        (TWO_TWOS, "one expert", [9, 31, 0, 3], 1, torch.float32),
        (TWO_TWOS, "last node", [20, 20, 20, 20], 3, torch.float64),
        (TWO_TWOS, "nowhere", [6, 6, 6, 6], 3, torch.float32),
        (TWO_TWOS, "random", [40, 1, 7, 7], 4, torch.bfloat16),
        (TWO_TWOS, "random", [40, 1, 7, 7], 4, torch.float64),
        (TWO_FOURS, "holes", [12, 0, 64, 1, 5, 5, 5, 5], 5, torch.float32),
        (TWO_FOURS, "random", [12, 9, 64, 1, 5, 0, 5, 5], 8, torch.bfloat16),
        (FOUR_TWOS, "random", [12, 9, 64, 1, 5, 0, 5, 5], 6, torch.float32),
        (MIXED, "random", [12, 9, 30, 1, 5, 0, 5, 5, 20], 6, torch.float32),
    ],
    ids=str,
)
def test_gives_the_bits_of_the_flat_one(gloo, nodes, kind, tokens, K, dtype):
    close = dict(rtol=2e-2, atol=2e-1) if dtype == torch.bfloat16 else dict(rtol=1e-6, atol=1e-5)
    for rank, found in enumerate(gloo(len(nodes), exchange, nodes, kind, tokens, K, dtype)):
        for name in ("rows", "row_weights", "ids", "dy_rows", "dw"):
            assert torch.equal(found["two"][name], found["flat"][name]), (rank, name)
        for name in ("y", "dx"):
            assert torch.equal(found["two"][name], found["by node"][name]), (rank, name)
            torch.testing.assert_close(found["two"][name], found["flat"][name], **close)
            assert found["two"][name].dtype == dtype


# ---- bytes ----


def crossing(
    rank: int, world: int, nodes: list[int], kind: str, tokens: list[int], K: int, backward: bool
) -> dict[str, tuple]:
    """Bytes to other nodes that this rank hands to collectives, by dispatcher, and its ids."""
    stand_on(nodes, rank)
    mesh = build_mesh(ep=world, ep_across_nodes=True)
    flat = AllToAllDispatcher(mesh.ep.get_group(), E // world)
    draw = torch.Generator().manual_seed(rank)
    ids_TK = draw_ids(kind, tokens[rank], E, K, draw)
    real, sent = dist.all_to_all_single, []

    def counted(out, rows, receive=None, send=None, group=None):
        send = send or [len(rows) // world] * world
        size = rows[:1].numel() * rows.element_size() if len(rows) else 0
        sent.append(size * sum(n for p, n in enumerate(send) if nodes[p] != nodes[rank]))
        return real(out, rows, receive, send, group=group)

    # whatever else could carry bytes
    others = [
        n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "send", "isend", "batch_"))
    ]
    for name in [n for n in others if callable(getattr(dist, n)) and n != "all_to_all_single"]:
        setattr(dist, name, lambda *_, name=name, **__: pytest.fail(f"{name} moves bytes, too"))
    dist.all_to_all_single = counted
    found = dict(ids=ids_TK)
    for name, dispatcher in (("flat", flat), ("two", over_nodes(flat, mesh.nodes))):
        sent.clear()
        x = torch.randn(tokens[rank], D, generator=draw).bfloat16().requires_grad_()
        weights = torch.rand(tokens[rank], K, generator=draw).requires_grad_()
        with torch.set_grad_enabled(backward):
            rows, plan = dispatcher.dispatch(x, Routing(weights, ids_TK, torch.empty(0)))
            y = dispatcher.combine((rows.x_RD * rows.weights_RK.sum(1, keepdim=True)).bfloat16(), plan)
        if backward:
            y.float().sum().backward()
        found[name] = sum(sent)
    return found


@pytest.mark.parametrize("backward", [True, False], ids=["trains", "forward"])
@pytest.mark.parametrize(
    ("nodes", "kind", "tokens", "K"),
    [
        (TWO_TWOS, "random", [33, 0, 12, 40], 6),
        (TWO_FOURS, "holes", [12, 0, 64, 1, 5, 5, 5, 5], 5),
        (FOUR_TWOS, "random", [12, 9, 64, 1, 5, 0, 5, 5], 8),
        (TWO_TWOS, "one expert", [9, 31, 0, 3], 1),
    ],
    ids=str,
)
def test_bytes_over_the_network(gloo, nodes, kind, tokens, K, backward):
    world, row = len(nodes), 2 * D
    found = gloo(world, crossing, nodes, kind, tokens, K, backward)
    rows = dict(flat=0, two=0)  # of a movement, counted token by token
    for rank, ids in enumerate(part["ids"].tolist() for part in found):
        for chosen in ids:
            to = {e // (E // world) for e in chosen if e >= 0}
            rows["flat"] += sum(nodes[p] != nodes[rank] for p in to)
            rows["two"] += len({nodes[p] for p in to} - {nodes[rank]})
    for i, (name, told) in enumerate((("flat", 1), ("two", 1 + world // len(set(nodes))))):
        counts = 8 * told * sum(a != b for a in nodes for b in nodes)
        each = 4 * row + 12 * K if backward else 2 * row + 8 * K
        sent = sum(part[name] for part in found)
        assert sent == rows[name] * each + counts
        asked = [
            (
                rows_across(part["ids"], E // world, nodes, rank)[i],
                bytes_across(part["ids"], E // world, nodes, rank, row, backward)[i],
            )
            for rank, part in enumerate(found)
        ]
        assert [sum(column) for column in zip(*asked, strict=True)] == [rows[name], sent]
    assert rows["two"] <= rows["flat"] and (K == 1 or rows["two"] < 0.75 * rows["flat"])


@pytest.mark.parametrize("nodes", [TWO_FOURS, FOUR_TWOS], ids=str)
def test_expected_rows(nodes):
    ids_TK = draw_ids("random", 4000, 256, 8, torch.Generator().manual_seed(0))
    want = expected_rows_across(4000, 8, 8, len(set(nodes)))
    for rank in range(8):
        got = rows_across(ids_TK, 32, nodes, rank)
        assert got.flat == pytest.approx(want.flat, rel=0.03)
        assert got.two_level == pytest.approx(want.two_level, rel=0.03)


# ---- the choice ----


def chosen(rank: int, world: int, nodes: list[int], ep: int, dispatch: str) -> tuple[str, list[str]]:
    stand_on(nodes, rank)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("tmoe.moe.exchange.two_level").addHandler(handler)
    mesh = build_mesh(ep=ep, ep_across_nodes=True)
    layers = [MoE(8, MoEConfig(experts=12, top_k=2, ffn_dim=8)) for _ in range(2)]
    for moe in layers:
        apply_ep(moe, mesh, dispatch)
    return type(layers[1].dispatcher).__name__, said


@pytest.mark.parametrize(
    ("nodes", "ep", "dispatch", "kind", "note"),
    [
        (TWO_TWOS, 4, "auto", "TwoLevelDispatcher", False),
        (TWO_TWOS, 4, "nccl", "AllToAllDispatcher", False),
        (TWO_TWOS, 2, "auto", "AllToAllDispatcher", False),  # each group is on one node
        ([0, 1, 0, 1], 2, "auto", "AllToAllDispatcher", False),  # one rank on each node
        ([0, 0, 0, 1], 4, "auto", "AllToAllDispatcher", True),
        ([0, 0, 0, 0], 4, "auto", "AllToAllDispatcher", False),
    ],
    ids=str,
)
def test_chosen_by_itself(gloo, nodes, ep, dispatch, kind, note):
    for rank, (name, said) in enumerate(gloo(4, chosen, nodes, ep, dispatch)):
        assert name == kind
        assert len(said) == (note and rank == 0) and all("1, 3 ranks on its nodes" in line for line in said)


# ---- whole models ----

SEQ = 32
MODEL = ModelConfig(
    vocab=64,
    dim=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    rope=RopeConfig(max_seq=SEQ),
    moe=MoEConfig(experts=8, top_k=3, ffn_dim=16, shared_dim=16),
)


def gradients(compile: bool, dispatch: str, tokens: torch.Tensor) -> tuple[Transformer, dict]:
    parallel = ParallelConfig(ep=4, ep_across_nodes=True, dispatch=dispatch)
    cfg = Config(compile=compile, model=MODEL, train=TrainConfig(seq=SEQ, dtype="fp32"), parallel=parallel)
    with torch.device("meta"):
        net = Transformer(cfg.model)
    parallelize(net, build_mesh(ep=4, ep_across_nodes=True), cfg)
    net.to_empty(device="cpu")
    net.init_weights(0)
    two_level = isinstance(net.blocks[0].moe.dispatcher, TwoLevelDispatcher)
    assert two_level == (dispatch == "auto")
    return net, step(net, tokens)


def step(net: Transformer, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = net(tokens, tokens.roll(-1, 1))
    loss.backward()
    grads = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
    net.zero_grad()
    return dict(grads, loss=loss.detach())


def compiled_and_eager(rank: int, world: int) -> dict:
    stand_on(TWO_TWOS, rank)
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(64, (2, SEQ), generator=draw)
    flat, eager = (gradients(False, dispatch, tokens)[1] for dispatch in ("nccl", "auto"))
    net, compiled = gradients(True, "auto", tokens)
    graphs = counters["stats"]["unique_graphs"]
    for i in range(6):  # a strong router sends everything to few experts; i changes which
        with torch.no_grad():
            for block in net.blocks:
                block.moe.router.weight.to_local().normal_(0, 10.0 ** (i % 3 - 1), generator=draw)
        step(net, torch.randint(64, (2, SEQ), generator=draw))
    later = counters["stats"]["unique_graphs"]
    return dict(
        flat=flat, eager=eager, compiled=compiled, graphs=(graphs, later, dict(counters["graph_break"]))
    )


@pytest.mark.slow
def test_compiled_is_eager_is_flat(gloo):
    for found in gloo(4, compiled_and_eager, timeout=340):
        for name, want in found["flat"].items():
            torch.testing.assert_close(found["eager"][name], want, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(found["compiled"][name], want, rtol=1e-4, atol=1e-6)
        before, after, breaks = found["graphs"]
        assert before > 0 and after == before and not breaks


def train(rank: int, world: int, nodes: list[int], argv: list[str]) -> tuple[dict[str, torch.Tensor], int]:
    """The final state, whole, and how often tokens went out in two hops."""
    stand_on(nodes, rank)
    dispatch, calls = TwoLevelDispatcher.dispatch, []
    TwoLevelDispatcher.dispatch = lambda self, *args: calls.append(self) or dispatch(self, *args)
    return runs.run(rank, world, argv), len(calls)


@pytest.mark.parametrize("nodes", slow_but([TWO_TWOS], [TWO_TWOS, FOUR_TWOS]), ids=str)
def test_a_run_is_the_flat_one(gloo, tmp_path, nodes):
    """Six steps; with four nodes two expert groups, each over two of them."""
    words = [*runs.SMALL, "--steps", "6", "--parallel.ep", "4", "--parallel.ep-across-nodes"]
    found = {}
    for dispatch in ("nccl", "auto"):
        out = tmp_path / dispatch
        argv = [*words, "--parallel.dispatch", dispatch, "--out", str(out)]
        state, calls = gloo(len(nodes), train, nodes, argv, timeout=240)[0]
        assert (calls >= 6 * 2) == (dispatch == "auto")  # two layers
        found[dispatch] = state, [(r["loss"], r["grad_norm"]) for r in runs.lines(out)]
    (want, losses), (got, others) = found["nccl"], found["auto"]
    assert len(losses) == 6 and losses[5][0] < losses[0][0]
    for pair, other in zip(losses, others, strict=True):
        assert other == pytest.approx(pair, rel=1e-6)
    assert want.keys() == got.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)
