"""benchmarks/nf4.py on a CPU: its checks pass, its commands are valid, and a part that fails is named.

next: tests/benchmarks/test_quantised_benchmarks.py
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import MODEL

from benchmarks import figures, nf4, nf4_checks, nf4_walk
from benchmarks.figures import Figure, at_least, at_most, row, table
from tmoe.base.quantised import dequantise, quantise
from tmoe.cli.parse import parse
from tmoe.config.run import LoraConfig
from tmoe.generate.load import empty
from tmoe.model.nf4 import slots_of
from tmoe.model.transformer import Transformer


def arguments(**more) -> argparse.Namespace:
    return argparse.Namespace(**dict(device="cpu", tiny=True, json=None) | more)


@pytest.mark.parametrize("name", ["values", "codes", "linear", "layer"])
def test_checks_pass_on_a_cpu(name):
    found = list(nf4_checks.CHECKS[name](arguments()))
    assert found and not [figure for figure in found if figure.good is False]


def test_a_wrong_result_and_an_error_are_figures(monkeypatch):
    weight = torch.randn(4, 64)
    wrong = nf4_checks.equal("values", {"y": (weight, weight + (torch.arange(64) == 0))})
    assert wrong.good is False and wrong.value.startswith("y wrong by") and wrong.value.endswith("in 1.56%")

    def broken(args):
        yield at_most("check", "first", 1.0, 2.0)
        raise ValueError("of a kernel")

    monkeypatch.setattr(nf4, "CHECKS", dict(a=broken, b=lambda args: [at_least("check", "second", 1.0, 2.0)]))
    found = list(nf4.check(arguments()))
    assert [figure.good for figure in found] == [True, False, False]
    assert found[1].value == "ValueError: of a kernel" and found[2].bar == "at least 2.0"


def test_the_walks_commands_are_valid(tmp_path):
    """Every command of train.py is parsed; two ranks divide the batch of one."""
    nf4_walk.prepare(tmp_path)
    commands = nf4_walk.first(tmp_path) | nf4_walk.others(tmp_path, gpus=2)
    base = tmp_path / "base/checkpoints/step-2"
    found = {}
    for name, command in commands.items():
        if command.words[0] == "train.py":
            words = [word for word in command.words[1:] if word not in ("--init", str(base))]
            found[name] = parse(words, "", world=command.world)
    bases = {name: cfg.lora.base for name, cfg in found.items() if cfg.lora.rank}
    assert bases.pop("whole") == "whole" and set(bases.values()) == {"nf4"} and len(bases) == 5
    assert found["two ranks"].train.batch == 1 and found["nf4"].train.batch == 2
    assert found["nf4"].parallel.checkpoint == found["resumed"].parallel.checkpoint == "block"
    assert not found["base"].lora.rank and found["grpo"].task == "grpo"
    assert commands["two ranks"].argv()[1:3] == ["-m", "torch.distributed.run"]


def test_commands_run_together_and_a_failure_is_named(tmp_path, capsys):
    fine = nf4_walk.Command(["-c", "print('x')"])
    bad = nf4_walk.Command(["-c", "import sys; print('first'); sys.exit('why it failed')"])
    assert list(nf4_walk.ran(dict(fine=fine, bad=bad), tmp_path)) == [
        ("fine", ""), ("bad", "ended with code 1: why it failed")
    ]  # fmt: skip
    assert "--- bad" in capsys.readouterr().out and (tmp_path / "fine.txt").read_text() == "x\n"
    assert nf4_walk.apart({1: 2.0, 2: 3.0}, {2: 3.5, 3: 9.0}) == 0.5
    assert nf4_walk.apart({}, {1: 1.0}) == float("inf")


def test_both_kinds_of_base_are_drawn_equal():
    cfg = replace(MODEL, layers=2)
    small = empty(cfg, torch.device("cpu"), torch.float32, LoraConfig(rank=2, base="nf4"))
    whole = empty(cfg, torch.device("cpu"), torch.float32, LoraConfig(rank=2))
    nf4.fill(small, adapted=0.1)
    nf4.fill(whole, adapted=0.1)
    slots, ours, theirs = slots_of(small), small.state_dict(), whole.state_dict()
    assert slots and theirs["blocks.0.attention_norm.weight"].eq(1).all()
    for name in Transformer(cfg).state_dict():
        if name in slots:
            slot, want = slots[name], theirs[name]
            parts = [
                getattr(slot.module, f"{slot.buffers}_{part}")
                for part in ("codes", "maxima", "most", "offset")
            ]
            want = dequantise(quantise(want, "nf4"), "nf4", tuple(want.shape))
            assert torch.equal(dequantise(tuple(parts), "nf4", tuple(want.shape)), want), name
        else:
            assert torch.equal(ours[name], theirs[name]), name
    assert theirs["blocks.1.moe.experts.down_b"].any()


def test_words_of_the_runs():
    args = arguments(tiny=False)
    whole = parse(nf4.words_of(args, 0, 8, "nf4"), "", world=1)
    assert whole.model.layers == 48 and whole.lora.rank_of_experts(whole.model.moe.top_k) == 1
    cut = parse(nf4.words_of(args, 12, 64, "whole"), "", world=1)
    assert cut.model.layers == 12 and cut.lora.rank_of_experts(cut.model.moe.top_k) == 8
    assert sum(nf4.LIMITS[name] for name in ("check", "walk")) < 240 and set(nf4.LIMITS) == set(nf4.PARTS)
    run = dict(peaks=dict(allocated=10.0), estimate_gib=10.4)
    (figure,) = nf4.peak_figure("train", "x", run)
    assert figure.good and "peak 10.00 GiB, dry run 10.40" in figure.what and figure.value == "0.040"
    assert not list(nf4.peak_figure("train", "x", dict(peaks={}, estimate_gib=1.0)))


def test_a_part_that_fails_is_named_and_the_table_is_last(monkeypatch, capsys, tmp_path):
    """A part that ends with a code keeps its figures; one without time is named."""
    calls = []

    class Process:
        def __init__(self, command):
            part, out = command[command.index("--one") + 1], command[command.index("--figures") + 1]
            calls.append(part)
            figures.write_line(Path(out), Figure(part, "a|b", "1\n2"))
            self.part = part

        def wait(self, seconds):
            return 3 if self.part == "one" else 0

    class Running:
        def __init__(self, command, env):
            self.process = Process(command)

        def __enter__(self):
            return self.process

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(figures, "running", Running)
    monkeypatch.setattr(sys, "argv", ["x"])
    args = arguments(one=None, parts=["one", "two", "late"], seconds=100.0, figures=None)
    monkeypatch.setattr(figures, "LEAST", 0.0)
    limits = dict(one=10.0, two=10.0, late=10.0)
    clock = iter([0.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 200.0])
    monkeypatch.setattr(figures.time, "monotonic", lambda: next(clock))
    figures.run("benchmarks.nf4", args, {}, limits)
    said = capsys.readouterr().out.strip().splitlines()
    assert calls == ["one", "two"]
    assert said[-4:] == [
        "| one | a/b | 1 2 |  |  |",
        "| one | the part | ended with code 3 | done | NO |",
        "| two | a/b | 1 2 |  |  |",
        "| late | the part | no time was left | done | NO |",
    ]
    assert row(at_least("p", "w", 2.0, 1.0)) == "| p | w | 2.000 | at least 1.0 | yes |"
    assert table([]).count("\n") == 1


@pytest.mark.slow
def test_a_run_on_a_drawn_base_and_decoding():
    found = list(nf4.train(arguments()))
    assert not [figure for figure in found if figure.good is False], found
    assert any("apart by" in figure.what for figure in found)
    found = list(nf4.decode(arguments()))
    assert [figure for figure in found if "log-probs" in figure.what and figure.good]
