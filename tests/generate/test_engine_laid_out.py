"""An engine on a model that lies over ranks: one process's answers, and training that knows nothing of it.

next: tests/generate/test_pages.py
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts import GPT_OSS, GQA, LATENT, ROUTED
from tiers import slow_but
from torch.distributed.tensor import DTensor

from tmoe.config.check import ConfigError
from tmoe.config.run import Config, OptimConfig, ParallelConfig, TrainConfig
from tmoe.generate import Engine, Sampling
from tmoe.generate.gathered_model import gathered
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Totals
from tmoe.optim.adamw import build_optimizer
from tmoe.parallel import build_mesh, parallelize

MODELS = dict(
    gqa=replace(GQA, dropout=0.1, moe=replace(ROUTED, jitter=0.1)),
    gpt_oss=GPT_OSS,
    latent=LATENT,
    pad=replace(GQA, moe=replace(ROUTED, pad=True, capacity_factor=1.0)),
)
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 9], [1, 2, 3], [63, 0, 17, 40]]
GREEDY = Sampling(temperature=0, max_tokens=5, stop_ids=(11,))
WARM = Sampling(temperature=0.9, top_k=30, top_p=0.95, max_tokens=7, seed=4, stop_ids=(11, 30))
WARM = replace(WARM, repetition_penalty=1.2, suppress=(7, 8))


def settings(axes: dict[str, int], model: str, **changes: Any) -> Config:
    parallel = {
        name: changes.pop(name)
        for name in ("checkpoint", "gathered_gib", "shard", "adaptive_r")
        if name in changes
    }
    return Config(
        model=MODELS[model],
        train=TrainConfig(seq=8, dtype="fp32", accumulate=2),
        parallel=ParallelConfig(**axes, **parallel),
        optim=OptimConfig(lr=3e-3),
        **({"compile": False} | changes),
    )


def laid_out(axes: dict[str, int], model: str, whole_forwards: bool = True, **changes: Any) -> Transformer:
    cfg = settings(axes, model, **changes)
    with torch.device("meta"):
        net = Transformer(cfg.model)
    net = parallelize(net, build_mesh(**axes), cfg, whole_forwards)
    net.to_empty(device="cpu")
    lively(net)
    return net


def lively(net: Transformer) -> None:
    """Weights so large that tokens differ."""
    net.init_weights(0)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() > 1:
                (p.to_local() if isinstance(p, DTensor) else p).mul_(8)


def free(rank: int, world: int, model: str) -> bool:
    with gathered(laid_out(dict(ep=world), model), 3) as ranks:
        return ranks.free


@pytest.mark.parametrize("model", ["gqa", "pad"])
def test_steps_whose_host_waits_are_no_graphs(gloo, model):
    """As with collectives it does, for the counts or the most rows of any rank."""
    assert gloo(2, free, model) == [False, False]
    with gathered(Transformer(MODELS["gqa"]), 3) as ranks:
        assert ranks.free


def answers(net: Transformer, prompts, sampling: Sampling, numbers=None, slots: int = 3) -> list[Any]:
    found = Engine(net, slots=slots).generate(prompts, 2, sampling, numbers=numbers, routes=True)
    return [(s.ids.tolist(), s.finish, s.logprobs, s.routes) for answers in found for s in answers]


def alone(model: str) -> list[list[Any]]:
    net = Transformer(MODELS[model])
    lively(net)
    return [answers(net, PROMPTS, how) for how in (GREEDY, WARM)]


def spread(rank, world, shares, axes, model, changes):
    """Every rank answers its share of the prompts."""
    net = laid_out(axes, model, **changes)
    mine = list(shares[rank])
    return [answers(net, [PROMPTS[i] for i in mine], how, mine) for how in (GREEDY, WARM)]


EVEN, UNEVEN = (range(0, 3), range(3, 5)), (range(0), range(5))
LAYOUTS = [
    (dict(ep=2), "gqa", UNEVEN, {}),
    (dict(dp=2), "gqa", EVEN, {}),
    (dict(dp=2), "gqa", UNEVEN, dict(whole_forwards=False)),
    (dict(dp=2), "gqa", EVEN, dict(shard=1, checkpoint="block")),
    (dict(ep=2), "gqa", EVEN, dict(checkpoint="moe", compile=True)),
    (dict(ep=2), "gpt_oss", EVEN, {}),
    (dict(ep=2), "latent", UNEVEN, {}),
    (dict(ep=2), "pad", EVEN, {}),
    (dict(tp=2, dp=2), "gqa", EVEN, {}),
    (dict(tp=2, dp=2), "latent", EVEN, {}),
    (dict(cp=2, dp=2), "gqa", EVEN, {}),
    (dict(dp=1, etp=2), "gqa", EVEN, {}),
    (dict(ep=2), "gqa", UNEVEN, dict(adaptive_r=0)),
    (dict(dp=2, ep=2), "gqa", (range(1), range(1, 2), range(0), range(2, 5)), {}),
    (dict(dp=1, replicate=2), "gqa", EVEN, {}),
]


@pytest.mark.parametrize("axes, model, shares, changes", slow_but([LAYOUTS[0], LAYOUTS[1]], LAYOUTS))
def test_answers_are_those_of_one_process(gloo, axes, model, shares, changes):
    found = gloo(len(shares), spread, shares, axes, model, changes)
    for want, *parts in zip(alone(model), *found, strict=True):
        got = [answer for part in parts for answer in part]
        assert [answer[:2] for answer in got] == [answer[:2] for answer in want]
        for (_, _, logprobs, routes), (_, _, expected, chosen) in zip(got, want, strict=True):
            assert torch.allclose(logprobs, expected, atol=1e-5)
            assert torch.equal(routes.sort(-1).values, chosen.sort(-1).values)
    assert len({tuple(answer[0]) for answer in want}) > 5


def trained(axes, rank, model, rollouts: bool, changes) -> list[torch.Tensor]:
    """Two steps of two micro-batches; rollouts before, between and after them."""
    net = laid_out(axes, model, **changes)
    optimizer = build_optimizer(net.named_parameters(), OptimConfig(lr=3e-3), torch.device("cpu"))
    if rollouts:
        roll(net, rank)
    losses = []
    torch.manual_seed(rank)  # of jitter and dropout
    draw = torch.Generator().manual_seed(rank)
    totals = Totals(*(torch.tensor(float(count)) for count in (64, 64, 8)))
    for _ in range(2):
        net.balancer.start_step()
        for micro in range(2):
            tokens = torch.randint(64, (2, 8), generator=draw)
            net.set_requires_gradient_sync(micro == 1)
            loss = net(tokens, tokens.roll(-1, 1), totals=totals)
            loss.backward()
            losses.append(loss.detach())
        if rollouts:
            roll(net, rank)
        optimizer.step()
        optimizer.zero_grad()
        net.update_bias()
    assert net.training and all(module.training for module in net.modules())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return [*losses, *(p.detach() for p in whole)]


def roll(net: Transformer, rank: int) -> None:
    before = torch.get_rng_state()
    with torch.inference_mode():
        answers(net, PROMPTS[: 2 * rank], WARM)
    with torch.no_grad():
        answers(net, PROMPTS[3:], WARM)
    assert torch.equal(before, torch.get_rng_state())


def with_and_without(rank, world, axes, model, changes):
    return [trained(axes, rank, model, rollouts, changes) for rollouts in (False, True)]


TRAININGS = [
    (dict(ep=2), "gqa", {}),
    (dict(dp=2), "gqa", {}),
    (dict(dp=2), "gqa", dict(shard=1)),
    (dict(dp=2), "gqa", dict(shard=2, checkpoint="block")),
    (dict(dp=2), "latent", dict(whole_forwards=False)),
    (dict(dp=2), "gqa", dict(gathered_gib=0.0)),
    (dict(ep=2), "gqa", dict(checkpoint="moe")),
    (dict(ep=2), "gpt_oss", dict(whole_forwards=False)),
    (dict(tp=2, dp=2), "gqa", {}),
]


@pytest.mark.parametrize("axes, model, changes", slow_but(TRAININGS[:1], TRAININGS))
def test_training_knows_nothing_of_rollouts(gloo, axes, model, changes):
    for want, got in gloo(2, with_and_without, axes, model, changes):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def one_process(rank, world):
    return [
        with_and_without(rank, world, dict(dp=1), "gqa", {}),
        spread(rank, world, [range(5)], dict(dp=1), "gqa", {}),
    ]


def test_one_process_that_holds_all(gloo):
    ((both, found),) = gloo(1, one_process)
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    for got, want in zip(found, alone("gqa"), strict=True):
        assert [answer[:2] for answer in got] == [answer[:2] for answer in want]


def held(rank, world):
    """Bytes that FSDP2 keeps gathered, inside a call and after it."""
    net = laid_out(dict(dp=2), "gqa")
    shapes = []
    stream = Engine(net, slots=2).stream(PROMPTS, 1, GREEDY)
    next(stream)
    shapes.append([isinstance(p, DTensor) for p in net.parameters()])
    list(stream)
    shapes.append([isinstance(p, DTensor) for p in net.parameters()])
    return shapes


def test_weights_are_gathered_for_a_call_and_cut_after_it(gloo):
    for inside, after in gloo(2, held):
        assert not any(inside) and all(after)


def refused(rank, world, prompts, more):
    """What each rank is told, of prompts of its own."""
    net = laid_out(dict(ep=2), "gqa")
    engine = Engine(net, slots=2, **more)
    said = []
    for _ in range(2):  # nothing is left of a call that was refused
        with pytest.raises(ConfigError) as caught:
            engine.generate(prompts[rank], 1, GREEDY)
        said.append(str(caught.value))
    return said, [len(found) for found in engine.generate([[1, 2]], 1, GREEDY)] if not more else None


BAD = [
    ([[[1, 2]], [[3] * 5000]], {}, r"^rank \[1\]: prompts\[0\]: 5000 tokens, but .*max_seq"),
    (
        [[[1, 2], []], [[-1]]],
        {},
        r"^rank \[0\]: prompts\[1\]: is empty.*; rank \[1\]: prompts\[0\]: has the id",
    ),
    ([[[1, 2]], []], dict(pool_gib=1e-6), r"^rank \[0\]: --pool-gib: 1e-06 GiB for keys and values"),
]


@pytest.mark.parametrize(("prompts", "more", "words"), BAD, ids=["long", "several", "pool"])
def test_a_bad_prompt_of_one_rank_is_one_error_of_all(gloo, prompts, more, words):
    """Ranks would wait in the first collective for the one that has raised."""
    for said, left in gloo(2, refused, prompts, more):
        assert said[0] == said[1] and re.search(words, said[0])
        assert left in (None, [1])


def pipelined(rank, world):
    from tmoe.parallel import pipeline

    axes = dict(pp=2, dp=1)
    net = pipeline(settings(axes, "gqa"), build_mesh(**axes))
    with pytest.raises(ValueError, match=r"of a pipeline, but --parallel\.pp must be 1 for an engine"):
        Engine(net)


def test_a_pipeline_is_refused(gloo):
    gloo(2, pipelined)
