"""--grpo.replay: updates take the experts of the rollout, or of the step's first update, in every layout."""

import json

import pytest
import runs
import torch
from tiers import slow_but

import train
from tmoe.cli.parse import parse
from tmoe.moe.trace import keeping
from tmoe.parallel.copies import make_stale
from tmoe.run import process as runtime

FLAGS = """--task grpo --train.dtype fp32 --resume none --steps 1 --grpo.prompts 4 --grpo.group 4
    --grpo.max-tokens 6 --data.val-fraction 0.2 --train.eval-batches 1 --grpo.rewards length(6,6)
    --parallel.checkpoint block""".split()


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The command without its layout."""
    folder = tmp_path_factory.mktemp("prompts")
    rows = [dict(prompt="+" * (1 + i % 5) + str(i)) for i in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [*runs.SMALL, *FLAGS, "--data.path", str(folder / "rows.jsonl"), "--out", str(folder / "run")]


def turn_routers(model):
    """Each router now prefers the experts that it liked least."""
    with torch.no_grad():
        for router in model.routers():
            router.weight.neg_()
    make_stale(model.parameters())


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def replayed(rank, world, argv, turns):
    """One step, whose routers are turned round before the update of this number.

    Of each update: the experts of its micro-batches; the most that a log-prob is off the old one, and off
    the sampler's; the router's largest gradient. And the experts of the rollout.
    """
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    task, model = trainer.task, trainer.model
    forward_backward, policy, corrected = trainer.forward_backward, task.loss.policy, task.loss.corrected
    formula = policy.formula
    found, moved, apart, steps = [], [], [], []

    def compared(logp, old, advantage, **options):
        moved.append((logp - old).abs().max().item())
        return formula(logp, old, advantage, **options)

    def of_sampler(before, drawn):
        apart.append((before - drawn).where(drawn != 0, 0).abs().max().item())
        return corrected(before, drawn)

    def update(step, totals):
        if len(steps) == turns:
            turn_routers(model)
        steps.append(step)
        kept = len(step.routes)
        with keeping(model) as calls:
            loss = forward_backward(step, totals)
        calls = calls or step.routes[kept:]  # the task kept them itself
        router = next(model.routers()).weight.grad
        numbers = max(moved), max(apart), whole(router).abs().max().item()
        found.append(([ids.clone() for ids in calls], *numbers))
        return loss

    trainer.forward_backward, policy.formula, task.loss.corrected = update, compared, of_sampler
    with trainer.metrics:
        trainer.train()
    rolled = steps[-1].packed.routes_AYBSK
    if rolled is not None:  # this rank's own tokens of them
        rolled = [torch.stack([model.own(ids) for ids in one]).flatten(1, 2).int() for one in rolled]
    return found, rolled


LAYOUTS = [
    (1, ["--train.batch", "2"]),
    (2, ["--parallel.ep", "2", "--train.batch", "1"]),
    (2, ["--parallel.tp", "2", "--train.batch", "4"]),
    (2, ["--parallel.cp", "2", "--train.batch", "2"]),
]


@pytest.mark.parametrize(("world", "layout"), slow_but(LAYOUTS[1:2], LAYOUTS), ids=str)
def test_updates_take_the_rollout_s_experts(words, gloo, world, layout):
    """R3: ids are equal although the router has turned round, and it learns; log-probs have not moved."""
    turned = gloo(world, replayed, [*words, *layout, "--grpo.replay", "rollout"], 0)
    for updates, rolled in turned:
        ((calls, moved, _, learns),) = updates
        assert len(calls) == len(rolled) > 1
        for ids, want in zip(calls, rolled, strict=True):
            assert torch.equal(ids.int(), want) and (want >= 0).any()
        assert moved == 0.0 and learns > 1e-8
    ((calls, *_),) = gloo(world, replayed, [*words, *layout, "--grpo.replay", "none"], 0)[0][0]
    assert not any(torch.equal(a.int(), b) for a, b in zip(calls, turned[0][1], strict=True))
    for updates, _ in gloo(world, replayed, [*words, *layout, "--grpo.replay", "rollout"], -1):
        assert updates[0][2] < 1e-5  # the sampler's log-probs are the trainer's


@pytest.mark.parametrize(("world", "layout"), slow_but(LAYOUTS[:1], LAYOUTS[:2]), ids=str)
def test_later_updates_take_the_first_one_s_experts(words, gloo, world, layout):
    """R2."""
    flags = [*words, *layout, "--grpo.updates", "2"]
    for updates, _ in gloo(world, replayed, [*flags, "--grpo.replay", "old"], 1):
        (first, moved, *_), (second, *_, learns) = updates
        assert len(first) == len(second) > 1 and moved == 0.0 and learns > 1e-8
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for updates, _ in gloo(world, replayed, flags, 1):
        (first, *_), (second, *_) = updates
        assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
