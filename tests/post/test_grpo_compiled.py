"""--task grpo in compiled blocks, from cold caches: answers compile nothing, and steps all in their first."""

import json
import os

import pytest
import runs
from torch._dynamo.utils import counters

import train
from tmoe.run import process as runtime
from tmoe.run.cli import parse

FLAGS = """--compile --task grpo --train.dtype fp32 --resume none --steps 3 --grpo.prompts 4 --grpo.group 4
    --grpo.max-tokens 6 --grpo.kl 0.1 --grpo.updates 2 --data.val-fraction 0.2 --checkpoint.mode off
    --parallel.ep 2""".split()


def graphs() -> int:
    """How many this process has compiled."""
    return counters["stats"]["unique_graphs"]


def counted(rank, world, argv, cache):
    """A run: graphs before and behind each making of answers, behind each step and at the end; recompiles."""
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=cache)
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    trainer.metrics.draw = lambda: None
    ask, after = trainer.task.ask, trainer.after
    answers, steps = [], []

    def counting(*args):
        before = graphs()
        made = ask(*args)
        answers.append((before, graphs()))
        return made

    def counting_steps(*args):
        steps.append(graphs())
        after(*args)

    trainer.task.ask, trainer.after = counting, counting_steps
    with trainer.metrics:
        trainer.train()
    return answers, steps, graphs(), trainer.graphs.recompiles


@pytest.mark.slow
def test_answers_compile_nothing_and_steps_all_in_the_first(tmp_path, gloo):
    """The reference's log-probs, of blocks without gradients, are a graph of their own.

    On a GPU kernels are compiled before the process group exists: test_grpo.py has which.
    """
    rows = [dict(prompt=f"{a}+{b}=", answer=str(a + b)) for a in range(8) for b in range(5)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text("def some(sample): return sum(map(ord, sample.answer)) % 7 / 7\n")
    data = ["--data.path", str(tmp_path / "sums.jsonl"), "--grpo.rewards", f"{tmp_path / 'reward.py'}:some"]
    flags = [*runs.SMALL, *data, *FLAGS, "--out", str(tmp_path / "run")]
    cache = tmp_path / "cache"
    for answers, steps, last, recompiles in gloo(2, counted, flags, str(cache)):
        assert len(answers) == 4 and all(before == behind for before, behind in answers)
        assert steps == [steps[0]] * 3 and steps[0] == last == 2 and recompiles == 0
    assert list(cache.glob("**/*.so")), "the caches were not cold: the test lost its point"
