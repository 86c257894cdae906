"""rollouts.jsonl: what is written comes back, a resumed run drops what it makes again; what pages show."""

import json
import math
import os
import sys

import pytest

from tmoe.commands import rollouts as pages
from tmoe.post.rollouts import Rollout, RolloutLog, read_rollouts, spread


def rollout(step, number=7, sample=0, reward: float | None = 1.0, **changes):
    answer = f"answer {step}/{number}/{sample}"
    told = Rollout(step, number, sample, "ask", answer, reward, {"exact": reward}, "stop", 5, 0.5)
    return told._replace(**changes)


def never(text):
    raise AssertionError(text)


@pytest.fixture
def run(tmp_path):
    """Three steps of two prompts with two answers each."""
    log = RolloutLog(tmp_path, 0, 100, never)
    for step in range(1, 4):
        log.write([rollout(step, n, i, float(10 * step + n + i)) for n in (7, 9) for i in (0, 1)])
    log.close()
    return tmp_path


def test_comes_back_as_it_was(tmp_path):
    """Text of any kind; what is not finite is none."""
    text = 'é "\n\u2028\x1b[31m\ud800 }{'
    some = [rollout(1, prompt=text, answer=text), rollout(1, sample=1, reward=None, finish="length")]
    log = RolloutLog(tmp_path / "new", 0, 10, never)
    log.write([*some, rollout(1, sample=2, reward=math.nan, advantage=math.inf)])
    log.close()
    found = list(read_rollouts(tmp_path / "new"))
    assert found[:2] == some
    assert found[2] == rollout(1, sample=2, reward=None, advantage=None)
    line = json.loads((tmp_path / "new/rollouts.jsonl").read_text().splitlines()[0])
    keys = "step number sample prompt answer reward parts finish tokens advantage from"
    assert list(line) == keys.split()


def test_a_resumed_run_drops_what_it_makes_again(run):
    whole = (run / "rollouts.jsonl").read_bytes()
    with open(run / "rollouts.jsonl", "ab") as file:
        file.write(b'{"step":4,"number":7,"sam')  # torn: killed while it was written
    assert [one.step for one in read_rollouts(run)] == [1] * 4 + [2] * 4 + [3] * 4
    log = RolloutLog(run, 2, 100, never)
    assert {one.step for one in read_rollouts(run)} == {1, 2}
    log.write([rollout(3, n, i, float(30 + n + i)) for n in (7, 9) for i in (0, 1)])
    log.close()
    assert (run / "rollouts.jsonl").read_bytes() == whole


def test_a_run_that_begins_anew_keeps_the_old_lines(run):
    whole = (run / "rollouts.jsonl").read_bytes()
    for n in (1, 2):
        log = RolloutLog(run, 0, 100, never)
        log.write([rollout(1)])
        log.close()
        assert (run / f"rollouts.before-{n}.jsonl").exists()
    assert (run / "rollouts.before-1.jsonl").read_bytes() == whole and len(list(read_rollouts(run))) == 1


def test_kept_samples_divide_the_rewards_evenly(tmp_path):
    rewards = [3.0, None, 1.0, 2.0, 9.0, 5.0, 4.0]
    many = [rollout(1, sample=i, reward=reward) for i, reward in enumerate(rewards)]
    assert [one.reward for one in spread(many, 3)] == [3.0, None, 9.0]
    assert [one.reward for one in spread(many, 1)] == [9.0]
    assert spread(many, 7) == many and len(spread(many, 6)) == 6
    log = RolloutLog(tmp_path, 0, 2, never)
    log.write(many)
    log.close()
    assert [one.reward for one in read_rollouts(tmp_path)] == [None, 9.0]
    with pytest.raises(ValueError, match="keep=0: samples of a step that are kept must be at least 1"):
        RolloutLog(tmp_path, 0, 0, never)


def test_a_disk_that_takes_nothing_is_told_once(tmp_path):
    (tmp_path / "rollouts.jsonl").mkdir()
    told: list[str] = []
    log = RolloutLog(tmp_path, 1, 10, told.append)
    log.write([rollout(1)])
    log.close()
    assert len(told) == 1 and "rollouts.jsonl: could not be written, training continues without it" in told[0]


# ---- the pages ----


def page(capsys, *words):
    """What the command prints, in this process."""
    pages.tyro.cli(pages.main, args=[str(word) for word in words])
    return capsys.readouterr().out


def test_all_samples_by_step(run, capsys):
    said = page(capsys, run)
    assert said.count("====") == 6 and said.count("----") == 12
    assert "==== step 2: 4 samples, mean reward 28.5, 5 tokens, 0 cut off ====" in said
    head = "---- step 3, prompt 9, sample 1: reward 40 (exact 40), advantage 0.5, 5 tokens, stop\n"
    assert f"{head}ask\n>>>>\nanswer 3/9/1\n" in said
    assert "step 3" not in page(capsys, run, "--step", 2)


def test_best_and_worst(run, capsys):
    def heads(*words):
        lines = page(capsys, run, *words).splitlines()
        return [line.split("reward ")[1].split()[0] for line in lines if line.startswith("----")]

    assert heads("--best", 2) == ["40", "39"] and heads("--worst", 3) == ["17", "18", "19"]
    assert heads("--step", 2, "--best", 1) == ["30"] and heads("--best", 99)[0] == "40"


def test_text_does_not_command_the_terminal(tmp_path, capsys):
    log = RolloutLog(tmp_path, 0, 10, never)
    log.write([rollout(1, answer="\x1b[2J\x9b\r\u202e\ud800 ünï\t🙂\n", reward=None, finish="length")])
    log.close()
    said = page(capsys, tmp_path)
    assert "\\x1b[2J\\x9b\\r\\u202e\\ud800 ünï\t🙂\n" in said and "\x1b" not in said
    assert "reward - (exact -), advantage 0.5, 5 tokens, cut off" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--step", 5], "--step=5: RUN has samples of steps 1 to 3"),
        (["--best", 0], "--best=0: must be at least 1"),
        (["--best", 1, "--worst", 1], "--best=1, --worst=1: give one of them"),
    ],
)
def test_words_that_cannot_be(run, words, told):
    with pytest.raises(ValueError) as error:
        pages.tyro.cli(pages.main, args=[str(run), *map(str, words)])
    assert told in str(error.value).replace(str(run), "RUN")


def test_folders_without_samples(tmp_path):
    with pytest.raises(ValueError, match=r"has no rollouts.jsonl; name the folder of a run with --task grpo"):
        pages.main(tmp_path)
    (tmp_path / "rollouts.jsonl").write_text('no line\n{"step": 1}\n{"step": 1, "number": "x"}\n')
    with pytest.raises(ValueError, match="has no samples yet"):
        pages.main(tmp_path)


PAGER = """
import os, sys
out = os.environ["TOLD"]
with open(out, "w") as file:
    for _ in range(2):
        file.write(sys.stdin.readline())
"""


def test_a_terminal_gets_a_pager_that_may_stop_early(run, tmp_path, monkeypatch):
    """One that reads two lines and goes: no complaint."""
    (tmp_path / "pager.py").write_text(PAGER)
    monkeypatch.setenv("PAGER", f"{sys.executable} {tmp_path / 'pager.py'}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    log = RolloutLog(run, 3, 10**6, never)
    log.write([rollout(4, sample=i, answer="x" * 1000) for i in range(500)])
    log.close()
    pages.main(run)
    assert (tmp_path / "told").read_text().startswith("==== step 1: 4 samples")


def test_who_reads_a_pipe_may_stop_early(run, monkeypatch):
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        pages.main(run)
