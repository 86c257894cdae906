"""The planner beyond axes: ranks that a token reaches, ZeRO, settings that save memory, published steps."""

import itertools
import json
import math
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from machines import free, line

from benchmarks import model as command
from benchmarks.cost import constants, network, published, search, step_time
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.config.model import MoEConfig
from tmoe.model import block_time, reach
from tmoe.plan.memory import held_at_most, memory_per_rank

# Slow: the model is frozen, so its tests need not run with every change of the trainer.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CONSTANTS = json.loads(constants.CONSTANTS.read_text())
M = constants.values(CONSTANTS)
H100 = constants.values(constants.of_gpu(CONSTANTS, "h100"))


def by_counting(experts: int, K: int, parts: int, units: int, chosen: int) -> float:
    """Mean number of parts hit, over all sets of units and all K draws from their experts."""
    size, unit = experts // parts, experts // units
    means = []
    for some in itertools.combinations(range(units), chosen):
        open_to = [e for e in range(experts) if e // unit in some]
        draws = itertools.product(open_to, repeat=K)
        means.append(statistics.mean(len({e // size for e in draw}) for draw in draws))
    return statistics.mean(means)


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize(("groups", "top"), [(1, 1), (4, 1), (4, 2), (2, 1), (8, 3)])
def test_ranks_that_a_token_reaches_from_its_groups(parts, groups, top):
    moe = MoEConfig(experts=8, top_k=min(2, 8 // groups * top), groups=groups, top_groups=top, ffn_dim=8)
    units, chosen = (groups, top) if top < groups else (parts, parts)
    assert reach.reached(moe, parts, 8) == pytest.approx(by_counting(8, moe.top_k, parts, units, chosen))


@pytest.mark.parametrize(("parts", "ranks"), [(4, 4), (2, 4), (8, 8), (2, 8)])
def test_ranks_and_nodes_that_a_token_reaches_from_its_devices(parts, ranks):
    moe = MoEConfig(experts=8, top_k=2, top_devices=2, ffn_dim=8)
    assert reach.reached(moe, parts, ranks) == pytest.approx(by_counting(8, 2, parts, ranks, 2))


def test_a_gate_of_neighbours_reaches_one_rank():
    """Qwen3's 8 of 128 experts on 8 ranks: 1 row a token, and 5.25 with a learned gate."""
    moe = MoEConfig(experts=128, top_k=8, ffn_dim=8)
    assert reach.reached(moe, 8, 8, "neighbours") == 1
    assert reach.reached(moe, 8, 8) == pytest.approx(5.25, abs=0.01)
    assert reach.reached(moe, 32, 32, "neighbours") == 2
    # 4 of 6 experts from 0, then from 4: ranks of 3 experts are {0, 1} and {1, 0}
    assert reach.reached(MoEConfig(experts=6, top_k=4, ffn_dim=8), 2, 2, "neighbours") == 2


def test_two_hops_overlap_by_their_share():
    """64 ranks on 8 nodes: with an overlap of 1 the longer hop alone is left."""
    cfg = parse("deepseek-v3 --parallel.ep 64 --train.batch 1".split(), "", world=64)
    axes, curve = Axes(ep=64), line(100e9)
    backends = {"auto": "nccl", "nccl": dict(curve=curve, moves=4, experts=1.0, copies=0.0, fixed=0.0)}
    T, D = 4096, 7168
    # 4 of 8 groups, one group a node: hop 1 reaches their nodes, hop 2 up to 8 ranks
    nodes = T * 8 * (4 / 8) * (1 - (3 / 4) ** 8)
    ranks = T * 64 * (4 / 8) * (1 - (31 / 32) ** 8)
    network_s, links_s = nodes * 7 / 8 * D * 2 / 42.5e9, ranks * 7 / 8 * D * 2 / 100e9
    for overlap, hops in ((0.0, network_s + links_s), (1.0, max(network_s, links_s))):
        m = free(exchange=backends, nic_rate=42.5e9, hops_overlap=overlap)
        assert block_time.two_level_seconds(cfg, axes, m) == pytest.approx(4 * hops, rel=1e-4)


@pytest.mark.parametrize(("shard", "gathers", "reduces"), [(3, 8, 1), (2, 1, 4), (1, 1, 1)])
def test_gathers_and_reductions_of_shard(shard, gathers, reduces):
    """With 4 micro-batches a block is gathered 8 times, or once; gradients are reduced in fp32."""
    words = f"olmoe-1b-7b --model.layers 4 --parallel.ep 8 --parallel.shard {shard} --train.accumulate 4"
    cfg, axes = parse(words.split(), "", world=8), Axes(ep=8)
    first, later, backward, last = network.moving_seconds(cfg, axes, range(4), free(collective=line(1e9)))
    (root, _), *blocks = network.padded_units(cfg, axes, range(4))
    dense = sum(n for n, _ in blocks)
    roots = {3: 4, 2: 1, 1: 1}[shard]  # the root is still gathered in the backward
    moved = 7 / 8 * (2 * (gathers * dense + roots * root) + 4 * reduces * (dense + root))
    assert first + 3 * later + 3 * backward + last == pytest.approx(moved / 1e9)


def test_sums_of_gradients_of_shard():
    """ZeRO-2 sums its shard in fp32, after the reduction; 1 and 3 sum whole gradients before it."""
    m = free(memory_rate=1e12)
    axes = Axes(dp=8)
    seconds = {}
    for shard in (1, 2, 3):
        words = f"olmoe-1b-7b --model.layers 1 --parallel.shard {shard} --train.accumulate 4"
        seconds[shard] = step_time.copy_seconds(parse(words.split(), "", world=8), axes, range(1), m)
    (dense, _), _ = step_time.parameter_groups(
        parse(["olmoe-1b-7b", "--model.layers", "1"], "", world=8), axes
    )
    whole, shards = (2 + 4) + 3 * (2 + 8), 3 * 12 / 8
    assert seconds[1] - seconds[2] == pytest.approx((whole - shards) * dense / 1e12)
    assert seconds[1] == seconds[3]  # without a copy_factor, gathers cost nothing here


def test_other_kernels_lose_while_a_receive_waits():
    """Attention alone takes time: a forward of 2 of 7 parts loses 0.4 of it, a backward of 5."""
    cfg = parse("olmoe-1b-7b --parallel.pp 2 --train.accumulate 2".split(), "", world=2)
    m = free(isolated_attention_rate=[[0, 1e12], [1e3, 1e12]], others_held=0.4)
    chunk = step_time.chunk_seconds(cfg, Axes(pp=2), range(8), m, 1.0)
    attention = 8 * block_time.attention_seconds(cfg, Axes(pp=2), 0, m)
    assert chunk.lost == pytest.approx((0.4 * attention * 2 / 7, 0.4 * attention * 5 / 7, 0.0))


def test_the_search_saves_memory_where_that_is_faster():
    """Qwen3-30B-A3B on 8 H100s: ep 8 fits only with savings, and the best is faster than any plain layout."""
    cfg = parse(["qwen3-30b-a3b"], "")
    made = search.Search(cfg, H100, 2**22)
    best = made.best(8, 3)
    assert best[0].axes == Axes(ep=8)
    chosen = best[0].cfg
    assert chosen.optim.offload or chosen.parallel.checkpoint != "none" or chosen.train.accumulate == 1
    every = []
    for _, work, flow, micros in made._begin(8):
        if (work.ep, work.tp, work.cp, flow.pp, work.etp) != (8, 1, 1, 1, 1):
            continue
        one = made.settings(work, flow, micros)
        if one and held_at_most(one, Axes(ep=8)) <= H100.room:
            every.append((step_time.predict(one, Axes(ep=8), H100).tokens_per_s_gpu, one))
    kinds = {(one.parallel.checkpoint, one.optim.offload, one.train.accumulate > 1) for _, one in every}
    assert len(kinds) > 4 and {offload for _, offload, _ in kinds} == {False, True}
    assert 1 / best[0].per_token == pytest.approx(max(rate for rate, _ in every), rel=search.CLOSE)
    assert all(c.step.peak_bytes <= H100.room for c in best)


def test_what_saves_more_is_slower():
    nothing = search.Savings(frozenset(), False, 8)
    block = search.Savings(frozenset({"attention"}), False, 8)
    assert block.beyond(nothing) and not nothing.beyond(block)
    assert search.Savings(frozenset(), True, 4).beyond(nothing)
    assert not search.Savings(frozenset(), True, 8).beyond(block)
    assert not search.Savings(frozenset(), False, 1).beyond(nothing), "one micro-batch sums no gradients"
    narrow = search.Savings(frozenset(), False, 8, narrow=True)
    assert narrow.beyond(nothing) and not nothing.beyond(narrow)


def test_narrow_states_are_searched_where_fp32_does_not_fit():
    cfg = parse("qwen3-30b-a3b --model.layers 4 --train.batch 1".split(), "")
    axes, work = Axes(ep=8), search.Work(1, 1, "keys", 8, 1, 1, narrow=True)
    made = search.Search(cfg, H100, 2**20)
    narrow = made.settings(work, search.WHOLE, 4)
    assert (narrow.optim.states, narrow.optim.sums) == ("bf16", "bf16")
    assert made.settings(work._replace(narrow=False), search.WHOLE, 4).optim == cfg.optim
    small, large = (held_at_most(replace(c, train=narrow.train), axes) for c in (narrow, cfg))
    assert small < large
    for room, offered in (((small + large) / 2, True), (large, False)):
        made = search.Search(cfg, free(**{**vars(H100), "room": room}), 2**20)
        assert made.fits_whole(work, search.WHOLE, 4, axes) != offered
    kinds = {w.narrow for w in made._works(2)}
    assert kinds == {False, True}
    kept = search.Search(replace(cfg, optim=replace(cfg.optim, states="int8")), H100, 2**20)
    assert {w.narrow for w in kept._works(2)} == {False}, "the settings' own are kept"


def page(monkeypatch, capsys, words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["model", *words.split()])
    try:
        command.main()
    except SystemExit as ended:
        assert ended.code in (0, 1, False, True)
    return capsys.readouterr().out


def test_parts_show_the_dry_runs_memory(monkeypatch, capsys):
    words = "qwen3-30b-a3b --parallel.ep 8 --parallel.shard 2 --train.accumulate 4"
    said = page(monkeypatch, capsys, f"--gpu h100 --gpus 8 --parts -- {words}")
    parts = memory_per_rank(parse(words.split(), "", world=8), Axes(ep=8))
    for name, size in parts.items():
        assert not size or re.search(rf"{name} +│ +{size / 2**30:.1f} ", said), name
    assert "does not fit" in said and "73.0" in said


def test_check_takes_the_constants_of_its_gpu(monkeypatch, capsys, tmp_path):
    record = dict(command="train.py olmoe-1b-7b --model.layers 4", gpus=1, tokens_per_s_gpu=1e5)
    (tmp_path / "one.jsonl").write_text(json.dumps(record))
    cfg = parse("olmoe-1b-7b --model.layers 4".split(), "", world=1)
    for gpu, m in (("h200", M), ("h100", H100)):
        said = page(monkeypatch, capsys, f"--gpu {gpu} --check {tmp_path / 'one.jsonl'}")
        assert f" {step_time.predict(cfg, Axes(), m).seconds * 1e3:.1f} " in said
    assert step_time.predict(cfg, Axes(), M).seconds < step_time.predict(cfg, Axes(), H100).seconds


def test_published_steps():
    """Each row names its source, parses, and has the tokens of the published layout."""
    found = published.compared(CONSTANTS)
    assert len(found) == 14 and len({one.row["by"] for one in found}) == 3
    for one in found:
        assert one.row["source"] and all("." in source for source in one.row["source"])
        assert one.row["cannot"] and one.axes.world == one.row["gpus"]
    batches = [
        c.axes.readers * c.cfg.train.batch * c.cfg.train.accumulate for c in found
    ]  # sequences of a step, as published
    assert batches[:10] == [512, 256, 512, 512, 8192, 512, 2048, 2048, 2048, 2048]
    ratios = [one.ratio for one in found]
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    said = published.published_summary(found)
    assert f"geometric mean {mean:.2f}, worst {worst:.2f} (row {ratios.index(worst) + 1})" in said
    text = (ROOT / "docs/parallel.md").read_text()
    assert f"geometric mean is {mean:.2f}, the worst {worst:.2f}" in " ".join(text.split())
    for one in found:
        row = one.row
        cells = f"| {row['gpus']} {row['gpu'].upper()} "
        assert any(
            cells in at
            and row["model"] in at
            and f"{row['tokens_per_s_gpu']:,.0f}" in at
            and f"{one.ratio:.2f}" in at
            for at in text.splitlines()
        ), row["model"]


def test_the_command_shows_published_steps(monkeypatch, capsys):
    said = page(monkeypatch, capsys, "--check --published")
    assert "14 rows: geometric mean" in said and "not expressed: no gradient clipping (row 1, 2" in said


def test_a_row_is_predicted_on_its_gpu_with_its_gate(monkeypatch):
    row = published.rows()[0] | dict(gpu="b200", gate="neighbours", hops_overlap=1.0)
    monkeypatch.setattr(published, "rows", lambda: [row])
    (one,) = published.compared(CONSTANTS)
    m = SimpleNamespace(**vars(constants.values(constants.of_gpu(CONSTANTS, "b200"))))
    m.gate, m.hops_overlap = "neighbours", 1.0
    assert one.predicted == step_time.predict(one.cfg, one.axes, m, 1.0).tokens_per_s_gpu
    m.gate = "learned"
    assert one.predicted > step_time.predict(one.cfg, one.axes, m, 1.0).tokens_per_s_gpu


def test_muon_adds_its_products_and_saves_a_moment():
    """Mixtral on 8 H200s, ep 8: 5 (4 m^2 n + 2 m^3) FLOPs a matrix, an eighth on each GPU, at their rate."""
    axes, words = Axes(ep=8), "mixtral-8x7b --parallel.ep 8".split()
    plain, muon = (parse([*words, *more], "", world=8) for more in ([], ["--optim.muon", "."]))
    span = [range(plain.model.layers)]
    more = step_time.optimizer_seconds(muon, axes, span, M) - step_time.optimizer_seconds(
        plain, axes, span, M
    )
    shapes = [(24, 4096, 14336), (2, 4096, 4096), (2, 1024, 4096)]  # of a layer, experts before q, o and k, v
    least = 32 * sum(count * 5 * (4 * m * m * n + 2 * m**3) for count, m, n in shapes) / 8 / M.product_rate
    assert 0.99 * least < more < 1.3 * least  # fused matrices are counted as one
    saved = memory_per_rank(plain, axes)["moments"] - memory_per_rank(muon, axes)["moments"]
    assert saved == pytest.approx(4 * 46_439_333_888 / 8, rel=1e-6)
