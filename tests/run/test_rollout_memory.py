"""What the dry run says of rollouts, against what is allocated: pages, the reference, gathered weights."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import runs
from held import MostHeld

import train
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.config.run import Config, GrpoConfig, TrainConfig
from tmoe.generate import slots as loop
from tmoe.generate.gathered_model import gathered
from tmoe.parallel.mesh import local_part
from tmoe.plan.memory import memory_per_rank, peak_bytes
from tmoe.plan.rollout_memory import passing_bytes
from tmoe.run import process as runtime

FLAGS = """--task grpo --train.dtype fp32 --resume none --steps 1 --grpo.prompts 2 --grpo.kl 0.1
    --grpo.max-tokens 6 --data.val-fraction 0.1 --train.eval-batches 1 --grpo.rewards length(6,6)""".split()


def measured(rank, world, argv):
    """Bytes of a run's pages, reference and gathered weights, the most of its update, and the prediction."""
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    found = SimpleNamespace(pool=0, update=0)
    cache, forward_backward = loop.Cache, trainer.forward_backward

    def counted(*args):
        made = cache(*args)
        found.pool = max(found.pool, sum(k.nbytes + v.nbytes for k, v in made.layers))
        return made

    def update(*args):
        own = [local_part(t) for t in trainer.tensors().values()]
        with MostHeld(*own) as most:
            loss = forward_backward(*args)
        found.update = most.bytes
        return loss

    loop.Cache, trainer.forward_backward = counted, update
    with trainer.metrics:
        trainer.train()
    kept = trainer.task.frozen.weights.tensors().values()
    found.reference = sum(local_part(t).nbytes for t in kept)
    stored = {local_part(p).data_ptr() for p in trainer.model.parameters()}
    with gathered(trainer.model, 1):
        used = [local_part(p) for p in trainer.model.parameters()]
        found.gathered = sum(t.nbytes for t in used if t.data_ptr() not in stored)
    return found, memory_per_rank(cfg, trainer.mesh.axes), passing_bytes(cfg, trainer.mesh.axes)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The command, whose prompts are all as long as they may be: 32 - 6 tokens and one."""
    folder = tmp_path_factory.mktemp("prompts")
    rows = [dict(prompt=f"{i:027d}") for i in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [*runs.SMALL, *FLAGS, "--data.path", str(folder / "rows.jsonl"), "--out", str(folder / "run")]


@pytest.mark.slow
def test_parts_are_those_that_a_run_allocates(words, gloo):
    """One process computes with its fp32 weights in place; of two each gathers those of both."""
    ((alone, said, passing),) = gloo(1, measured, [*words, "--grpo.group", "4"])
    assert (alone.pool, alone.reference) == (said["pool"], said["reference"])
    assert alone.gathered == said["rollout"] - passing == 0
    flags = ["--grpo.group", "4", "--parallel.dp", "2", "--parallel.gathered-gib", "0"]
    for found, said, passing in gloo(2, measured, [*words, *flags]):
        assert (found.pool, found.reference) == (said["pool"], said["reference"])
        assert found.gathered == said["rollout"] - passing


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2])
def test_frozen_experts_that_nobody_shares_are_not_held_twice(words, gloo, ep):
    """They are stored in bf16, and computed with in place."""
    flags = ["--grpo.group", "4", "--train.dtype", "bf16", "--optim.freeze", "experts"]
    for found, said, passing in gloo(ep, measured, [*words, *flags, "--parallel.ep", str(ep)]):
        assert found.gathered == said["rollout"] - passing > 0
        assert found.reference == said["reference"] > 0


@pytest.mark.slow
def test_an_update_holds_as_much_for_any_group(words, gloo):
    """Micro-batches of equal size: beside the pool, only numbers of each token differ."""
    most = []
    for group in (4, 16):
        ((found, said, _),) = gloo(1, measured, [*words, "--train.batch", "2", "--grpo.group", str(group)])
        most.append(found.update)
        tokens = 2 * group * 32
        assert found.pool == said["pool"]
    assert abs(most[1] - most[0]) < tokens * 64, most  # what is kept of a token: targets, log-probs, weights


@pytest.mark.parametrize("axes", [Axes(), Axes(dp=2), Axes(ep=2)], ids=str)
def test_the_prediction_of_a_fixed_pool_does_not_depend_on_the_group(axes):
    def of(group, **more):
        grpo = GrpoConfig(rewards=("exact",), group=group, pool_gib=0.008, rollout_slots=8, **more)
        return memory_per_rank(Config(task="grpo", grpo=grpo, train=TrainConfig(seq=512)), axes)

    one, *others = (of(group) for group in (8, 64, 256))
    assert all(other == one for other in others) and 0 < one["pool"] <= 0.008 * 2**30
    assert of(8, kl=0.1) == one | dict(reference=one["parameters"])
    assert peak_bytes(of(8, offload=True)) == peak_bytes(one)  # the update's
    without = {
        name: size for name, size in one.items() if name not in ("reference", "rollout", "pool", "away")
    }
    assert peak_bytes(one) >= peak_bytes(without)
    huge = replace(Config(), task="grpo", grpo=GrpoConfig(rewards=("exact",), rollout_slots=4096, group=4096))
    parts = memory_per_rank(huge, axes)
    held = sum(parts[name] for name in ("parameters", "moments", "exchange", "rollout", "pool"))
    assert peak_bytes(parts) == held  # more than an update: the two take turns
    away = replace(huge, grpo=replace(huge.grpo, offload=True))
    assert peak_bytes(memory_per_rank(away, axes)) == held - parts["moments"]
