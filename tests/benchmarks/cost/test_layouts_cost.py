"""Every axis of the cost model against hand-worked numbers, and the search among all layouts."""

import json
import sys
from dataclasses import replace

import pytest
from machines import INFINITE, backend, free, line

from benchmarks import model as command
from benchmarks.cost import constants, network, search, step_time
from tmoe.config.axes import Axes
from tmoe.config.presets import presets
from tmoe.config.run import Config
from tmoe.model import block_time
from tmoe.parallel.pipeline_schedule import StageCost, simulate
from tmoe.plan.memory import plan

# Slow: the model is frozen, so its tests need not run with every change of the trainer.
pytestmark = pytest.mark.slow

M = constants.values(json.loads(constants.CONSTANTS.read_text()))
OLMOE, QWEN3, DEEPSEEK, TINY = (
    presets()[name] for name in ("olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v3", "tiny")
)


def laid(cfg: Config, axes: Axes, batch: int = 4, micros: int = 1, **parallel) -> Config:
    degrees = {name: n for name, n in vars(axes).items() if name != "dp"}
    train = replace(cfg.train, batch=batch, accumulate=micros, isolate_documents=False)
    return replace(cfg, train=train, parallel=replace(cfg.parallel, **degrees, **parallel))


@pytest.mark.parametrize("axes", [Axes(ep=8, tp=4), Axes(ep=8, cp=4), Axes(ep=8, cp=2, tp=2)])
@pytest.mark.parametrize("by", ["keys", "heads"])
def test_arithmetic_is_divided_not_changed(axes, by):
    """With as many tokens a rank, a rank does as many FLOPs: olmoe's key heads divide by tp."""
    m = free(product_rate=1e12)
    one = step_time.predict(laid(OLMOE, Axes(ep=8)), Axes(ep=8), m).parts
    parts = step_time.predict(laid(OLMOE, axes, batch=16, cp_exchange=by), axes, m).parts
    for name in ("projections", "experts", "loss"):
        assert parts[name] == pytest.approx(one[name])


def test_tp_exchange_worked_by_hand():
    """qwen3, 16,384 tokens a rank: x there and the sum back; in the backward both, and x again."""
    m = free(collective=line(1e9))
    for tp in (2, 4, 8):
        axes = Axes(ep=8, tp=tp)
        parts = step_time.predict(laid(QWEN3, axes, batch=4 * tp), axes, m).parts
        a_pass = (tp - 1) * 16384 * 2048 * 2 / 1e9
        # the curve holds all of FSDP2's gathers as well, which are another part
        assert parts["tp exchange"] == pytest.approx(48 * 5 * a_pass)
    hidden = free(collective=line(1e9), tp_factor=0.75)
    assert step_time.predict(laid(QWEN3, axes, 32), axes, hidden).parts["tp exchange"] == pytest.approx(
        48 * 5 * a_pass * 0.75
    )


def test_cp_exchange_worked_by_hand():
    """cp by keys sends 4 key heads of two times 128 channels; cp by heads sends queries and results too."""
    m = free(collective=line(1e9))
    axes = Axes(ep=8, cp=4)
    tokens = 16384 * 2 / 1e9
    keys = step_time.predict(laid(QWEN3, axes, 16), axes, m).parts["cp exchange"]
    assert keys == pytest.approx(48 * 2 * 3 * tokens * 2 * 4 * 128)
    heads = step_time.predict(laid(QWEN3, axes, 16, cp_exchange="heads"), axes, m).parts["cp exchange"]
    assert heads == pytest.approx(48 * 2 * 3 / 4 * tokens * (2 * 32 + 2 * 4) * 128)
    latents = step_time.predict(laid(DEEPSEEK, axes, 16), axes, m).parts["cp exchange"]
    assert latents == pytest.approx(61 * 2 * 3 * tokens * 576)


def test_latent_keys_are_made_of_whole_sequences():
    """kv_b runs on cp times the tokens under cp by keys."""
    axes = Axes(ep=8, cp=4)
    one, four = (
        block_time.products(laid(DEEPSEEK, a, 4 * a.cp), a, 5) for a in (Axes(ep=8), Axes(ep=8, cp=4))
    )
    assert [b for a, b in zip(one, four, strict=True) if a != b] == [(4 * 16384, 512, 128 * 256)]
    by_heads = block_time.products(laid(DEEPSEEK, axes, 16, cp_exchange="heads"), axes, 5)
    assert by_heads == one


def test_a_key_head_that_ranks_share_is_made_on_each():
    qwen = laid(QWEN3, Axes(ep=8, tp=8), 32)
    assert block_time.products(qwen, Axes(ep=8, tp=8), 0)[0] == (8 * 16384, 2048, (4 + 2) * 128)


def test_etp_worked_by_hand():
    """Rows of both ranks there and back, forward and backward, half of them over the link."""
    m = free(collective=line(1e9), exchange={"auto": "nccl", "nccl": backend(line(INFINITE))})
    axes = Axes(etp=2)
    parts = step_time.predict(laid(OLMOE, axes), axes, m).parts
    assert parts["etp exchange"] == pytest.approx(16 * 4 * 16384 * 2048 * 2 / 1e9)
    flops = [
        step_time.predict(laid(OLMOE, a), a, free(product_rate=1e12)).parts["experts"]
        for a in (Axes(dp=2), axes)
    ]
    assert flops[0] == pytest.approx(flops[1])


def test_replicas_add_up_their_shards():
    """fp32 of 1/8 of the parameters, there and back over one card each."""
    m = free(nic_rate=1e9)
    axes = Axes(replicate=4, ep=8)
    cfg = laid(OLMOE, axes)
    span = range(16)
    got = network.replica_seconds(cfg, axes, m, span)
    (dense, _), (experts, _) = network.padded_groups(cfg, axes, span)
    assert got == pytest.approx(2 * 3 / 4 * 4 * (dense / 8 + experts) / 1e9)
    assert network.replica_seconds(laid(OLMOE, Axes(dp=4, ep=8)), Axes(dp=4, ep=8), m, span) == 0
    assert step_time.predict(cfg, axes, m).parts["exposed all-gathers"] == pytest.approx(got)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", None), ("interleaved", 2), ("v", None)])
def test_a_pipelines_time_is_its_tables(schedule, chunks):
    """Each chunk's own seconds, run in the table's order; further micro-batches take the busiest stage's."""
    m = free(product_rate=1e12)
    axes = Axes(pp=4)
    cfg = laid(OLMOE, axes, micros=8, schedule=schedule, chunks=chunks)
    got = step_time.predict(cfg, axes, m)
    spans = step_time.chunk_spans(cfg, axes)
    costs = []
    for span in spans:
        forward, backward = step_time.passes(cfg, axes, span, m, 1.0)
        weights = forward["experts"]  # three products either way
        costs.append(StageCost(sum(forward.values()), sum(backward.values()) - weights, weights))
    assert got.seconds == pytest.approx(simulate(plan(cfg, axes), costs).time)
    assert got.tokens == 8 * 4 * 4096 and got.parts["pipeline bubble"] > 0
    longer = replace(cfg, train=replace(cfg.train, accumulate=20))
    more = step_time.predict(longer, axes, m)
    whole = simulate(plan(longer, axes), costs).time
    assert more.seconds == pytest.approx(whole, rel=0.02)


def test_v_puts_off_the_experts_weights_as_its_table_does():
    """In FLOPs worked by hand: a block of qwen3 forward, its gradients of inputs, and of experts' weights."""
    m = free(product_rate=1e12)
    T, D, H, G, C, E, K, F = 2 * 4096, 2048, 32, 4, 128, 128, 8, 768
    dense = 2 * T * D * ((H + 2 * G) * C + H * C + E) / 1e12
    experts = 6 * T * K * D * F / 1e12  # three products; so is each of the two kinds of gradients
    model = replace(QWEN3.model, layers=16, vocab=1024)
    cfg = laid(replace(QWEN3, model=model), Axes(pp=4), batch=2, micros=8, schedule="v")
    costs = [
        StageCost(n * (dense + experts), n * (2 * dense + experts), n * experts)
        for n in map(len, step_time.chunk_spans(cfg, Axes(pp=4)))
    ]
    head = 6 * T * D * 1024 / 1e12
    costs[-1] = costs[-1]._replace(forward=costs[-1].forward + head)
    made = plan(cfg, Axes(pp=4))
    assert {action.op for row in made.ranks for action in row} == set("FIW")
    expected = simulate(made, costs)
    got = step_time.predict(cfg, Axes(pp=4), m)
    assert got.seconds == pytest.approx(expected.time)
    # with all of the backward in front of the message, as for a table that cannot put anything off
    at_once = simulate(made, [StageCost(f, i + w, 0.0) for f, i, w in costs])
    assert got.seconds < 0.97 * at_once.time
    # at replicas FSDP2 holds the experts: nothing is put off, and B takes both
    axes = Axes(pp=4, replicate=2)
    whole = laid(cfg, axes, batch=2, micros=8, schedule="v")
    made = plan(whole, axes)
    assert {action.op for row in made.ranks for action in row} == set("FB")
    assert step_time.predict(whole, axes, m).seconds == pytest.approx(simulate(made, costs).time)


def test_the_search_finds_what_trying_all_finds():
    """Every axis of a tiny model on 8 GPUs of two nodes of four, predicted one by one."""
    m = free(**{**vars(M), "node": 4})
    cfg = replace(TINY, train=replace(TINY.train, batch=2, seq=512, dtype="bf16"))
    made = search.Search(cfg, m, 2**15)
    best = made.best(8, 5)
    every: dict[Axes, float] = {}
    for _, work, flow, micros in made._begin(8):
        if work.checkpoint != "none" or work.offload or work.narrow:  # memory is ample
            continue
        for axes, _ in made._placed(8, 0.0, work, flow, micros):
            if settings := made.settings(work, flow, micros):
                seconds = 1 / step_time.predict(settings, axes, m).tokens_per_s_gpu
                every[axes] = min(seconds, every.get(axes, seconds))
    assert len(every) > 50
    for name in ("pp", "dp", "ep", "etp", "cp", "tp", "replicate"):
        assert any(getattr(axes, name) > 1 for axes in every), name
    assert [c.per_token for c in best] == pytest.approx(sorted(every.values())[:5], rel=0.025)
    assert all(c.axes.world == 8 and c.step.tokens <= 2**15 for c in best)


def test_the_search_keeps_to_tokens_and_memory():
    few = replace(QWEN3, model=replace(QWEN3.model, layers=12))  # fewer stages to divide and to simulate
    found = search.Search(few, M, 2**22)
    for gpus in (8, 256):
        best = found.best(gpus)
        assert len(best) == 10 and len({c.axes for c in best}) == 10
        for cfg, axes, step in best:
            assert axes.world == gpus and step.tokens <= 2**22 and step.peak_bytes <= M.room
            assert step == step_time.predict(cfg, axes, M)
    roomy = search.Search(QWEN3, free(**{**vars(M), "room": 1e9}), 2**22)
    assert roomy.best(8) == []


def test_the_command_names_the_best(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", "model --batch-tokens 4e6 --gpus 16 olmoe-1b-7b".split())
    command.main()
    said = capsys.readouterr().out
    assert "the fastest that fit on 16 GPUs, all axes, recomputation, offload, states and numbers" in said
    assert "experts" in said.split("where the time goes")[1]
    monkeypatch.setattr(sys, "argv", "model --gpus 16 -- olmoe-1b-7b --parallel.pp 2".split())
    with pytest.raises(SystemExit):
        command.main()
    assert "--parallel.pp: leave it out: the page compares every layout" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", "model olmoe-1b-7b --gpus 16".split())
    with pytest.raises(SystemExit):
        command.main()
    assert "--gpus: must come before train.py's words: --gpus ... -- olmoe-1b-7b" in capsys.readouterr().err
