"""Traces of routed ids: a run writes what it dispatched, in every layout; replayed, it is chosen again."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from runs import SMALL, run
from tiers import slow_but
from tiny_models import MODEL

import tmoe
from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.model import MoEConfig
from tmoe.config.run import Config, LogConfig, TrainConfig
from tmoe.log.routes import read_routes
from tmoe.moe.trace import keeping, layers_of, replaying

TRACED = "--steps 2 --train.batch 2 --train.accumulate 2 --log.routes 1 --checkpoint.mode off --out".split()


def model_and_tokens(seed: int, **changes) -> tuple[tmoe.Transformer, torch.Tensor]:
    torch.manual_seed(seed)
    model = tmoe.Transformer(replace(MODEL, moe=replace(MODEL.moe, **changes)))
    return model, torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("softmax", ["before", "after"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_replay_gives_the_same_loss_and_gradients(score, softmax):
    if score == "sigmoid" and softmax == "after":
        return
    model, tokens = model_and_tokens(1, score=score, softmax=softmax)
    with keeping(model) as calls:
        want = model(tokens, tokens)
    want.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert calls[0].shape == (2, 64, 3) and model.balancer.trace is None
    with replaying(model, calls[0]):
        got = model(tokens, tokens)
        got.backward()
    torch.testing.assert_close(got, want)
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, atol=1e-6, rtol=1e-4)


def test_another_model_takes_the_recorded_experts_with_weights_of_its_own():
    model, tokens = model_and_tokens(1)
    other, _ = model_and_tokens(2)
    with keeping(model) as calls:
        model(tokens, tokens)
    with keeping(other) as own:
        other(tokens, tokens)
        with replaying(other, [ids.view(4, 16, 3) for ids in calls[0]]):
            other(tokens, tokens).backward()
        other(tokens, tokens)
    assert torch.equal(own[1], calls[0]) and torch.equal(own[2], own[0])
    assert not torch.equal(own[0], calls[0])  # the test can see the difference
    assert all(moe.router.weight.grad.norm() > 0 for moe in layers_of(other))


def test_recomputed_layers_take_the_replay_again():
    """A layer that chose again in the backward would give other gradients."""
    model, tokens = model_and_tokens(2)
    recorded, _ = model_and_tokens(1)
    with keeping(recorded) as calls:
        recorded(tokens, tokens)
    grads = []
    for recompute in (False, True):
        model.zero_grad()
        for block in model.blocks:
            block.forward = type(block).forward.__get__(block)
            if recompute:
                inner = block.forward
                block.forward = lambda *a, inner=inner: torch.utils.checkpoint.checkpoint(
                    inner, *a, use_reentrant=False
                )
        with replaying(model, calls[0]):
            model(tokens, tokens).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-5)


@pytest.mark.slow
def test_compiled_blocks_replay_too():
    """Each replay is taken, by one more graph, and none afterwards."""
    model, tokens = model_and_tokens(2)
    recorded, _ = model_and_tokens(1)
    with keeping(recorded) as calls:
        for _ in range(2):
            recorded(tokens, tokens)
            tokens = tokens.flip(0)
    for block in model.blocks:
        block.compute = torch.compile(block.compute, fullgraph=True, backend="aot_eager")
    with keeping(model) as own:
        model(tokens, tokens)
        for ids in calls:
            with replaying(model, ids):
                model(tokens, tokens)
        model(tokens, tokens)
    assert torch.equal(own[1], calls[0]) and torch.equal(own[2], calls[1])
    assert torch.equal(own[3], own[0]) and not torch.equal(own[0], own[1])


def test_wrong_replays_are_refused():
    model, tokens = model_and_tokens(1)
    with pytest.raises(ValueError, match="ids: got ids of 1 layers, valid is ids of 2 layers"):
        replaying(model, torch.zeros(1, 64, 3)).__enter__()
    with pytest.raises(ValueError, match="ids"), replaying(model, torch.zeros(2, 60, 3)):
        model(tokens, tokens)
    with (
        pytest.raises(ValueError, match="model: got a MoE, valid is a Transformer"),
        keeping(tmoe.MoE(8, MoEConfig())),
    ):
        pass


def test_settings():
    assert parse("tiny --dry-run --log.routes 1 4".split(), "").log.routes == (1, 4)
    with pytest.raises(ConfigError, match=r"--log.routes=0: must be numbers of steps, from 1 to"):
        Config(log=LogConfig(routes=(0,)))
    dense = replace(MODEL, dense_layers=3)
    with pytest.raises(ConfigError, match=r"--log.routes=1: a model without MoE layers"):
        Config(model=dense, train=TrainConfig(seq=16), log=LogConfig(routes=(1,)))


LAYOUTS = [
    (2, 2, "ep 2", ""),
    (2, 1, "pp 2", ""),
    (2, 1, "cp 2", ""),
    (2, 1, "tp 2", ""),
    (4, 2, "ep 2 --parallel.cp 2", ""),
    (4, 2, "ep 2 --parallel.pp 2", ""),
    (2, 1, "pp 2", "--model.dense-layers 1"),  # a stage without routers
]


@pytest.fixture(scope="module")
def alone(gloo, tmp_path_factory):
    """`alone(size, model)`: the folder of a run on one rank, made once."""

    @cache
    def made(size: int, model: str) -> Path:
        out = tmp_path_factory.mktemp("alone")
        gloo(1, run, [*SMALL, *model.split(), *TRACED, str(out), "--train.batch", str(size)])
        return out

    return made


@pytest.mark.parametrize(("world", "readers", "axes", "model"), slow_but(LAYOUTS[:2], LAYOUTS))
def test_a_run_writes_what_it_dispatched_in_every_layout(tmp_path, gloo, alone, world, readers, axes, model):
    """The same global batch on one rank, whose micro-batches are as many times larger."""
    size = 2 * readers
    gloo(world, run, [*SMALL, *model.split(), *TRACED, str(tmp_path / "a"), *f"--parallel.{axes}".split()])
    found, want = (read_routes(out / "routes", 1) for out in (tmp_path / "a", alone(size, model)))
    assert found.keys() == want.keys() == ({1} if model else {0, 1})
    assert all(ids.shape == (2 * size, 32, 2) for ids in want.values())
    for block, ids in want.items():
        same = (found[block].sort(-1).values == ids.sort(-1).values).float().mean()
        assert same > 0.99, block  # all but choices between equals to the last bit
    with pytest.raises(ValueError, match="has no step-2; valid: step-1"):
        read_routes(tmp_path / "a/routes", 2)


def test_a_missing_or_torn_file_is_named(tmp_path, gloo):
    gloo(2, run, [*SMALL, *TRACED, str(tmp_path), "--steps", "1"])
    folder = tmp_path / "routes"
    one = folder / "step-1.rank-1.safetensors"
    data = one.read_bytes()
    one.unlink()
    with pytest.raises(ValueError, match="step-1 lacks a rank's file: block 0, sequence 2"):
        read_routes(folder, 1)
    one.write_bytes(data[:100])
    with pytest.raises(ValueError, match=r"rank-1\.safetensors: no routes of a run"):
        read_routes(folder, 1)
