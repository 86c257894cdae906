"""benchmarks/sft.py and grpo_step.py without a GPU: figures worked by hand, rows, words, absent rivals."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import grpo_step, sft, trl_rivals
from tmoe.cli.parse import parse
from tmoe.data.tokenizer import load_tokenizer

ARGS = argparse.Namespace(
    prompts=2, prompt=8, group=[4], max_tokens=8, slots=8, micro=16, in_row=8, layers=1, tiny=True, gpus=1
)


def test_fill_is_tokens_over_slots():
    """Rows of 8: 5 and 3 share one, 2 has one of its own."""
    assert sft.fill(np.array([3, 5, 2]), 8) == 10 / 16


def test_packing_is_printed_and_kept(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(sft, "CHATS", 3000)
    words = "sft --parts packing --sizes 4096 --seeds 0 1 --json"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(out)])
    sft.main()
    line = json.loads(out.read_text())
    assert line["part"] == "packing" and line["date"] and line["versions"]
    assert all(share >= line["expected"] == 0.97 for share in line["fill"])
    assert 0 < line["left_out"] < 0.03 and "| 4096 |" in capsys.readouterr().out


def test_seconds_of_a_step(tmp_path):
    """640 tokens a step at 320 and 160 a second; the first has no rate, one more warms up."""
    rates = [None, 640.0, 320.0, 160.0]
    lines = [dict(step=i + 1, tokens=640 * (i + 1), tokens_per_s=rate) for i, rate in enumerate(rates)]
    text = "".join(json.dumps(line | {"from": 1}) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert [line["step_s"] for line in sft.steps_of(tmp_path, 2)] == [2.0, 4.0]
    with pytest.raises(SystemExit, match="too few"):
        sft.steps_of(tmp_path, 4)


def test_figures_of_a_grpo_step_worked_by_hand():
    """8 answers of 10 tokens behind prompts of 6, in 4 s: 1 s of rollout, 2.4 s of update."""
    line = {"step_s": 4.0, "answers/tokens": 10.0, "answers/tokens_per_s": 80.0, "peak_gib": 1.0}
    line |= {"time/rewards": 0.15, "time/update": 0.6, "answers/truncated": 1.0}
    r = grpo_step.with_rates(grpo_step.tmoe_step([line], 8), 8, 6)
    assert (r["rollout_s"], r["rewards_s"], r["update_s"]) == pytest.approx((1.0, 0.6, 2.4))
    assert (r["generated"], r["trained"], r["whole"]) == pytest.approx((80.0, 80 / 2.4, 20.0))
    assert r["trained_with_prompts"] == pytest.approx(128 / 2.4)
    rival = r | dict(step_s=24.0)
    found = {"tmoe": r, "TRL, generate": rival, "TRL, continuous batching": {"missing": "no trl"}}
    rows = grpo_step.speed_table(ARGS, ["tiny"], found, 4.0)
    assert rows[-3].endswith("| 1.00 |") and rows[-2].endswith("| 6.00 |") and "no trl" in rows[-1]


def test_memory_is_compared_beside_the_pool():
    """Without their pools rollouts take 29, below an update of 30, and 30.5, above one of 30.1."""
    one = dict(
        measured=dict(update=30.0, rollout=40.0, pool=11.0), predicted=dict(update=1, rollout=2, pool=0)
    )
    two = one | dict(measured=dict(update=30.1, rollout=41.0, pool=10.5))
    found = {8: one, 256: two, 512: dict(missing="no update: ended with code 1")}
    rows = grpo_step.memory_table(ARGS, found)
    assert rows[5] == "| 8 | 30.00, 1.00 | 40.00, 2.00 | 11.00, 0.00 | 30.00, 2.00 |"
    assert "no update" in rows[7]
    assert rows[8].startswith("update: 0.10 GiB") and rows[9].startswith("step without the pool: 0.50 GiB")


def test_words_of_the_grpo_run_fill_rows(tmp_path):
    grpo_step.write_prompts(ARGS, tmp_path, 300)
    cfg = parse(["tiny", *grpo_step.grpo_words(ARGS, tmp_path, 4)], "", world=1)
    assert (cfg.train.seq, cfg.train.batch) == (8 * 16, 2)
    assert (cfg.grpo.prompts, cfg.grpo.group, cfg.grpo.max_tokens) == (2, 4, 8)
    assert set(grpo_step.predicted(["tiny", *grpo_step.grpo_words(ARGS, tmp_path, 4)])) == {
        "update",
        "rollout",
        "pool",
    }


def test_a_text_has_as_many_tokens_as_words(tmp_path):
    trl_rivals.write_tokenizer(tmp_path, 50)
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode(trl_rivals.words(np.random.default_rng(0), 20, 50)[1:])
    assert len(ids) == 20 and ids.min() >= trl_rivals.FIRST and tokenizer.eos == 0


def test_an_absent_rival_is_named(monkeypatch):
    monkeypatch.setattr(trl_rivals, "NEEDED", ("json", "no_such_rival"))
    assert trl_rivals.run_rival("dpo", {}, 1.0) == {"missing": "not installed: no_such_rival"}


def test_watched_tells_how_it_ended(tmp_path):
    found = grpo_step.watched(["no-such-preset"], Path(tmp_path, "peaks.json"), 0.0)
    assert found["missing"].startswith("no update: ")
