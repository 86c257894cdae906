"""Experts without a token for 50 steps are named once; the screen shows what the task is about.

next: tmoe/log/idle.py, tmoe/log/progress.py
"""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from run_logs import config, start, stats, step

from tmoe.log import progress
from tmoe.log.idle import IdleExperts
from tmoe.log.progress import summary, validation


def notes_of(log) -> list[str]:
    said: list[str] = []
    log.note = said.append
    return said


def routed(counts: list[list[int]]):
    counts_LE = torch.tensor(counts, dtype=torch.float32)
    return stats(counts_LE, torch.zeros(len(counts)), torch.zeros(len(counts)))


FULL, LAST = [5] * 6, [5] * 5 + [0]


def run(path, steps: range, of_step, every: int = 1, total: int = 400) -> list[str]:
    """The notes of a process that does these steps of a run, counted from 0."""
    said: list[str] = []
    with start(config(path, steps=total, every=every), start_step=steps.start) as log:
        log.draw = lambda: None
        said = notes_of(log)
        pending = torch.zeros(3, 6)
        for number in steps:
            pending += torch.tensor(of_step(number))
            if log.due(number):
                step(log, number, router=routed(pending.tolist()))
                pending = torch.zeros(3, 6)
            else:
                step(log, number, router=None)
    return said


@pytest.mark.parametrize("every", [1, 10])
def test_an_expert_is_named_once(tmp_path, every):
    """Expert 5 of block 1 has tokens in steps 1 to 20, again in step 100, and none after."""

    def counts(number: int) -> list[list[int]]:
        return [FULL, FULL if number < 20 or number == 99 else LAST, FULL]

    said = run(tmp_path / "a", range(69), counts, every, total=69)
    assert said == []  # 49 steps
    said = run(tmp_path / "b", range(300), counts, every)
    assert said == ["1 expert has had no token for 50 steps: block 1: expert 5 (docs/balance.md)"]
    # resumed after it was named; and after 30 of the 50 steps
    assert run(tmp_path / "b", range(300, 360), counts, every) == []
    assert run(tmp_path / "c", range(50), counts, every) == []
    assert run(tmp_path / "c", range(50, 69), counts, every) == []
    said = [note for steps in (range(50), range(50, 71)) for note in run(tmp_path / "d", steps, counts)]
    assert len(said) == 1


def test_many_experts_are_one_note():
    """Blocks by their numbers. A layer without any token counts for nothing; identity experts are none."""
    idle = IdleExperts([1, 2, 4], 20)
    counts = [[1] + [0] * 19 + [9], [0] * 21, [0, 1, 0] + [1] * 17 + [0]]
    assert idle.see(49, counts) is None
    assert idle.see(50, counts) == (
        "21 experts have had no token for 50 steps: block 1: experts 1, 2, 3, 4, 5, 6, 7, 8 and 11 more; "
        "block 4: experts 0, 2 (docs/balance.md)"
    )
    assert idle.see(120, counts) is None
    many = IdleExperts(range(12), 2)
    assert "block 7: expert 1; and 4 more blocks (docs/" in str(many.see(64, [[1, 0]] * 12))


# ---- the screen ----

PAIRS = {"rewards/margin": 0.012, "rewards/accuracy": 0.5625, "rewards/chosen": 1.0}
REWARDS = {"reward/mean": 0.412, "reward/known": 126.0, "answers/count": 128.0, "reward/faults": 2.0}
REWARDS |= {"answers/tokens": 118.4, "answers/truncated": 0.03}
OF_REWARDS = "reward 0.4120  rewarded 126/128  2 faults  answers of 118 tokens  3% truncated  loss -0.0361"
VAL = {"reward/mean": 0.7176, "answers/truncated": 0.0, "pass@1": 0.72, "pass@2": 0.8}


def line(loss, **more):
    return {"step": 10, "loss": loss, "tokens_per_s": 258.0, "mfu": None} | more


def test_a_line_shows_what_the_task_is_about():
    assert summary(line(2.5, val_loss=2.25)) == "loss 2.5000  val 2.2500  258 tokens/s"
    assert summary(line(2.5, val_loss=None)) == "loss 2.5000  val not finite  258 tokens/s"
    assert summary(line(0.6931) | PAIRS) == "loss 0.6931  margin 0.012  accuracy 56%  258 tokens/s"
    val = {f"val_{name}": value for name, value in PAIRS.items()}
    shown = "loss 0.6931  val 0.6900, margin 0.012, accuracy 56%  258 tokens/s"
    assert summary(line(0.6931, val_loss=0.69) | val) == shown
    assert summary(line(-0.0361) | REWARDS) == f"{OF_REWARDS}  258 tokens/s"
    val = {f"val_{name}": value for name, value in VAL.items()}
    shown = f"{OF_REWARDS}  val reward 0.7176, 0% truncated, pass@1 72%  258 tokens/s"
    assert summary(line(-0.0361, val_loss=-0.7176) | REWARDS | val) == shown


def test_a_validation_alone_says_the_same():
    assert validation("validation", 2.25, {}, 7) == "validation loss 2.2500 after step 7"
    assert validation("test", 0.69, PAIRS, 7) == "test loss 0.6900 after step 7; margin 0.012, accuracy 56%"
    said = validation("validation", -0.7176, VAL, 7)
    assert said == "validation reward 0.7176 after step 7; 0% truncated, pass@1 72%"


@pytest.mark.parametrize("width", [80, 200])
def test_the_bar_has_the_step_and_the_rewards_on_every_terminal(tmp_path, width, monkeypatch):
    cfg = replace(config(tmp_path, steps=400), compile=False)
    bar = progress.Bar(cfg, 0)
    said: list[str] = []
    monkeypatch.setattr(bar, "note", said.append)

    def drawn() -> str:
        to = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        to.print(bar.bar.get_renderable())
        return to.file.getvalue()  # pyrefly: ignore

    assert "compiling" not in drawn() and "first step" in drawn()
    compiled = progress.Bar(replace(cfg, compile=True), 0)
    assert compiled.bar.tasks[0].fields["numbers"] == "first step: compiling"
    with_val = line(-0.0361, val_loss=-0.7176) | REWARDS
    with_val |= {f"val_{name}": value for name, value in VAL.items()}
    bar.show(with_val)
    assert "step 10/400" in drawn() and "reward 0.4120  rewarded 126/128" in drawn()
    # a validation stays above the bar; the test's numbers, of the same step, do not say it twice
    bar.show(with_val | {"test_loss": -0.7})
    assert said == [f"step 10/400  {summary(with_val)}"]
