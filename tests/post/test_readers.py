"""Every task and loss with several readers, each of two ranks or more, gives the numbers of one process."""

from __future__ import annotations

import functools
import json
import math
import random
from pathlib import Path

import pytest

import train
from tmoe.cli.parse import parse
from tmoe.config.run import Config
from tmoe.parallel import clip_grad_norm_
from tmoe.post import task_of
from tmoe.post.grpo import Grpo
from tmoe.run import process as runtime

# One step: four rows, whatever the layout.
SMALL = """tiny --no-compile --log.no-progress --log.no-report --train.dtype fp32 --model.layers 1
    --model.dim 16 --model.heads 2 --model.kv-heads 2 --model.head-dim 8 --model.moe.experts 4
    --model.moe.ffn-dim 16 --train.seq 64 --steps 1 --optim.warmup 0 --optim.lr 1e-3 --optim.eps 1e-4
    --train.eval-every 0 --train.eval-batches 1 --checkpoint.mode off --log.every 1 --resume none
    --model.moe.balance sequence:0.02 global:0.02""".split()
PREFERENCE = [["--preference.loss", name] for name in "sigmoid robust hinge ipo simpo orpo".split()]
GRPO = [f"--grpo.loss {name}".split() for name in "dapo grpo dr_grpo gspo cispo dppo rloo".split()]
GRPO += [f"--grpo.advantage {name} --grpo.loss gspo".split() for name in ("mean", "leave-one-out")]
GRPO += [f"--grpo.kl 0.1 --grpo.kl-in {where} --grpo.loss rloo".split() for where in ("loss", "reward")]
GRPO += ["--grpo.overlong drop --grpo.resample 1 --grpo.replay rollout --grpo.normaliser constant".split()]
GRPO += ["--grpo.kl 0.1 --grpo.entropy 0.01 --grpo.updates 2 --grpo.replay old".split()]
TASKS = dict(pretrain=[[]], sft=[[], ["--sft.dft"]], preference=PREFERENCE, kto=[[]], grpo=GRPO)
# The layouts of four ranks in which two of them read the same rows.
DIVIDED = [
    "--parallel.tp 2 --parallel.ep 2",
    "--parallel.cp 2 --parallel.cp-exchange keys",
    "--parallel.cp 2 --parallel.cp-exchange heads --parallel.ep 4",
]
REWARD = 'def some(sample):\n    return sum(sample.answer.encode("utf-8", "surrogateescape")) % 7 / 7\n'


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sums, whose lengths differ, as text and as rows of each task."""
    folder, draw = tmp_path_factory.mktemp("sums"), random.Random(0)
    rows: dict[str, list[dict]] = dict(sft=[], preference=[], kto=[], grpo=[])
    for _ in range(60):
        a, b = draw.randrange(10 ** draw.randrange(1, 6)), draw.randrange(10)
        asked, right = f"{a}+{b}?", str(a + b)
        turns = [dict(role="user", content=asked), dict(role="assistant", content=right)]
        rows["sft"].append(dict(messages=turns))
        rows["preference"].append(
            dict(prompt=asked, chosen=right, rejected=str(a + b + draw.randrange(1, 9)))
        )
        answer = draw.choice([right, str(a + b + 1)])
        rows["kto"].append(dict(prompt=asked, completion=answer, label=answer == right))
        rows["grpo"].append(dict(prompt=asked, answer=right))
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))
    (folder / "pretrain.txt").write_text("\n".join(row["prompt"] + row["answer"] for row in rows["grpo"]) * 9)
    (folder / "reward.py").write_text(REWARD)
    return folder


def words(data: Path, task: str, more: list[str], *layout: str) -> list[str]:
    path = data / ("pretrain.txt" if task == "pretrain" else f"{task}.jsonl")
    if task == "kto":  # a preference loss, whose rows are not in pairs
        task, more = "preference", [*more, "--preference.loss", "kto"]
    made = [*SMALL, "--task", task, "--data.path", str(path), "--data.val-fraction", "0.2"]
    if task == "grpo":
        made += f"--grpo.rewards {data / 'reward.py'}:some --grpo.prompts 4 --grpo.group 3".split()
        made += "--grpo.max-tokens 5 --grpo.reward-workers 1".split()
    return [*made, *more, *layout]


class Asked(Grpo):
    """GRPO whose answers are kept for the next loss, while the weights are the same."""

    kept: dict

    def ask(self, model, data, numbers, base, run):
        key = self.g.replay, *numbers
        if key not in self.kept:
            self.kept[key] = super().ask(model, data, numbers, base, run)
        return self.kept[key]


def several(rank: int, world: int, runs: list[list[Config]]) -> list[list[float]]:
    """Loss and gradient norm of each loss of several runs, one after another in one process group.

    runs: the settings of each loss that shares folder, model and, in GRPO, the answers. Only the last of a
    run may move the weights.
    """
    found = []
    for cfgs in runs:
        trainer = train.Trainer(cfgs[0], runtime.start(cfgs[0].seed))
        first = trainer.task
        kept: dict = {}
        with trainer.metrics, trainer.run.watch:
            for cfg in cfgs:
                trainer.cfg, trainer.task = cfg, first if cfg is cfgs[0] else task_of(cfg, trainer.mesh)
                if isinstance(first, Grpo):
                    trainer.task = Asked(cfg, trainer.mesh)
                    trainer.task.kept, trainer.task.rewards = kept, first.rewards
                found.append(one_step(trainer))
    return found


def one_step(trainer: train.Trainer) -> list[float]:
    """Loss and gradient norm of each update of a step, as Trainer.train has them."""
    task, model, run, numbers = trainer.task, trainer.model, trainer.run, []
    task.prepare(model, (trainer.data, trainer.val_data), run, 0)
    batch = task.rollout(model, trainer.data.batch(0, **trainer.shape()), run, 0)
    totals, _ = trainer.agree(batch)
    for _ in range(task.updates):
        loss = trainer.forward_backward(batch, totals)
        numbers += [loss.item(), clip_grad_norm_(model.counted(), math.inf).item()]
        run.watch.compare_calls()
        if task.updates > 1:
            trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return numbers


def runs_of(data: Path, tasks: tuple[str, ...], out: str, flags: str, world: int) -> list[list[Config]]:
    """Every loss of the tasks, as `several` takes them. out: the beginning of their folders' names.

    The words are parsed here and not on each rank, which would be most of the test's time.
    """
    return [
        [
            parse([*words(data, task, loss, *flags.split()), "--out", f"{out}-{task}"], "", world=world)
            for loss in TASKS[task]
        ]
        for task in tasks
    ]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory, gloo):
    """alone(tasks, flags): the numbers of one process, computed once for all layouts."""

    @functools.cache
    def numbers(tasks: tuple[str, ...], flags: str) -> list[list[float]]:
        out = str(tmp_path_factory.mktemp("alone") / "run")
        (found,) = gloo(1, several, runs_of(data, tasks, out, flags, 1))
        return found

    return numbers


@pytest.fixture
def assert_as_alone(gloo, data, tmp_path, alone):
    def compare(
        world: int,
        layouts: list[str],
        tasks: tuple[str, ...] = tuple(TASKS),
        both: str = "",
        one: str = "--train.batch 4",
    ) -> None:
        """layouts: flags, with --train.batch and --train.accumulate for four rows a step.

        both: further flags. one: those of one process, as many micro-batches: the loss `global` counts them.
        """
        cases = [(task, more) for task in tasks for more in TASKS[task]]
        want = alone(tasks, f"{one} {both}")
        made = [
            run
            for n, flags in enumerate(layouts)
            for run in runs_of(data, tasks, f"{tmp_path}/{n}", f"{flags} {both}", world)
        ]
        for found in gloo(world, several, made):
            for i, got in enumerate(found):
                at = i % len(cases)
                case = layouts[i // len(cases)], cases[at]
                assert got == pytest.approx(want[at], rel=1e-5, abs=1e-6), case

    return compare


def test_two_readers_of_two_ranks_each(assert_as_alone):
    assert_as_alone(4, [f"{flags} --train.batch 2" for flags in DIVIDED])


def test_neither_packing_nor_micro_batches_change_what_grpo_learns(data, tmp_path, gloo):
    """With rows of one to four answers, and one to twelve rows in a micro-batch."""
    sizes = [(64, 4), (64, 1), (32, 4), (16, 12), (16, 1)]
    more = ["--model.moe.balance", "sequence:0.5", "--model.moe.z-coeff", "0.1"]
    runs = []
    for seq, batch in sizes:
        size = f"--train.seq {seq} --train.batch {batch} --out {tmp_path}/{seq}-{batch}"
        runs.append([parse(words(data, "grpo", more, *size.split()), "")])
    (found,) = gloo(1, several, runs)
    for size, got in zip(sizes, found, strict=True):
        assert got == pytest.approx(found[0], rel=1e-5, abs=1e-6), size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (4, "--train.batch 1"),  # dp
        (4, "--parallel.ep 4 --train.batch 1"),
        (4, "--parallel.replicate 2 --parallel.tp 2 --train.batch 2"),
        (4, "--parallel.replicate 2 --train.batch 1"),
        (4, "--parallel.etp 2 --parallel.ep 2 --train.batch 1"),
        (4, "--parallel.etp 2 --parallel.cp 2 --train.batch 2"),
        (8, "--parallel.tp 2 --parallel.cp 2 --parallel.ep 2 --train.batch 2"),
        (8, "--parallel.replicate 2 --parallel.ep 2 --parallel.tp 2 --train.batch 1"),
    ],
)
def test_every_axis(assert_as_alone, world, flags):
    assert_as_alone(world, [flags])


@pytest.mark.slow
def test_stages_of_two_readers_of_two_ranks_each(assert_as_alone):
    layouts = [f"--parallel.pp 2 {flags} --train.batch 1 --train.accumulate 2" for flags in DIVIDED[:2]]
    tasks, two = ("pretrain", "sft", "preference", "kto"), "--train.batch 2 --train.accumulate 2"
    assert_as_alone(8, layouts, tasks, "--model.layers 2", two)
