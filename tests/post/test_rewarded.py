"""Steps and validations in which no answer has a reward: counted, allowed N times in a row, then the end."""

import json
import math
import random

import pytest
import runs

import train
from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.run import GrpoConfig
from tmoe.log.metrics_file import read_steps
from tmoe.log.progress import summary
from tmoe.post.rewarded import Rewarded
from tmoe.post.task import NothingToLearn
from tmoe.run import process as runtime

NONE = math.nan
FLAGS = """--task grpo --train.dtype fp32 --grpo.prompts 2 --grpo.group 2 --grpo.max-tokens 4 --steps 9
    --data.val-fraction 0.2 --log.no-progress --log.no-report --grpo.reward-workers 1""".split()
REWARD = """
def late(sample):
    if sample.step in (2, 4, 5):
        return None
    if sample.step == 6:
        raise KeyError("answer")
    return float(sample.sample)

def held_out(sample):
    return None if sample.step == 0 else float(sample.sample)
"""


def test_steps_without_a_reward_are_counted_in_a_row():
    counts = Rewarded(("f.py:f", "exact"), 1)
    steps = [[NONE, 0.0], [NONE] * 2, [NONE, 1.0], [NONE] * 2, [], [NONE] * 2]  # in step 5 nothing was drawn
    for step, rewards in enumerate(steps, 1):
        counts.begin()
        counts.add(rewards, [{"f: returned None": 1}])
        counts.judge(f"step {step}")
        assert (counts.answers, counts.known) == (len(rewards), sum(r == r for r in rewards))
    counts.begin()
    counts.add([NONE] * 2, [{"f: returned None": 1}, {"exact: raised ValueError": 2, "f: returned None": 2}])
    with pytest.raises(NothingToLearn) as error:
        counts.judge("step 7")
    assert str(error.value) == (
        "--grpo.rewards=f.py:f exact: step 7: none of 2 answers has a reward (f: returned None, 3 times; "
        "exact: raised ValueError, 2 times); valid: rewards that give some answer of a step a number; "
        "--grpo.allow-empty=1 such steps in a row are allowed"
    )
    assert counts.in_a_row == 1  # the step is made again by a resumed run
    with pytest.raises(ConfigError, match=r"--grpo.allow-empty=-1: must be at least 0"):
        GrpoConfig(allow_empty=-1)


def test_the_screen_says_how_many_had_one():
    line = {"loss": 0.5, "tokens_per_s": None, "mfu": None, "reward/mean": None}
    line |= {"reward/known": 1e-7, "answers/count": 16.0, "reward/faults": 16.0}
    assert summary(line) == "no reward  rewarded 0/16  16 faults  loss 0.5000"
    line |= {"reward/mean": 0.3, "reward/known": 14.0000001, "reward/faults": 0.0}
    line |= {"val_loss": -0.25, "val_reward/mean": 0.25, "val_reward/known": 3, "val_answers/count": 4}
    assert summary(line) == "reward 0.3000  rewarded 14/16  loss 0.5000  val reward 0.2500, rewarded 3/4"
    line |= {"val_loss": None, "val_reward/mean": None, "val_reward/known": 0.0}
    assert summary(line) == "reward 0.3000  rewarded 14/16  loss 0.5000  val no reward, rewarded 0/4"


def until_the_end(rank, world, argv):
    """What ends the run on this rank, the step it stands at, and the checkpoints."""
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    told = ""
    try:
        with trainer.metrics, trainer.saving():
            trainer.train()
    except NothingToLearn as error:
        told = str(error)
    return told, trainer.step


@pytest.fixture
def words(tmp_path):
    draw = random.Random(0)
    rows = [dict(prompt=f"{draw.randrange(10**6)}=", answer="1") for _ in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(REWARD)

    def made(reward, *more):
        data = ["--data.path", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "run")]
        return [*runs.SMALL, *data, "--grpo.rewards", f"{tmp_path / 'reward.py'}:{reward}", *FLAGS, *more]

    return made


def test_a_run_without_rewards_ends_on_all_ranks_and_its_state_is_saved(words, tmp_path, gloo):
    """One such step in a row is allowed: 2 passes, 4 passes, 5 is the second. Resumed, 5 is so again."""
    flags = words("late", "--grpo.allow-empty", "1", "--parallel.ep", "2")
    ended = gloo(2, until_the_end, flags)
    state = tmp_path / "run/checkpoints/step-4"
    for told, step in ended:
        assert "reward.py:late: step 5: none of 4 answers has a reward (late: returned None, 4 times)" in told
        assert told.endswith(f"such steps in a row are allowed; the state after step 4 is in {state}")
        assert step == 4 and state.is_dir()
    found = [
        (line["reward/known"], line["answers/count"])
        for _, line in read_steps(tmp_path / "run/metrics.jsonl")
    ]
    assert found == [pytest.approx((n, 4)) for n in (4, 0, 4, 0)]
    again = gloo(2, until_the_end, flags)
    assert [step for _, step in again] == [4, 4] and all("step 5: none of 4" in told for told, _ in again)
    more = gloo(2, until_the_end, [*flags, "--grpo.allow-empty", "2"])
    assert all("late: raised KeyError, 4 times" in told and step == 5 for told, step in more)


def test_a_validation_without_rewards_ends_the_run(words, gloo, tmp_path):
    flags = words("held_out", "--train.eval-every", "2")
    ((told, step),) = gloo(1, until_the_end, flags)
    assert "held_out: validation: none of 4 answers has a reward" in told and step == 2
    assert told.endswith(f"the state after step 2 is in {tmp_path / 'run/checkpoints/step-2'}")
    ((told, step),) = gloo(1, until_the_end, [*flags, "--steps", "3", "--grpo.allow-empty", "1"])
    assert told == "" and step == 3
