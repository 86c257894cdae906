"""--train.global-batch gives accumulate on any layout, or is refused by name; runs without old moments."""

import json
from dataclasses import replace

import pytest
import runs
import torch

from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.presets import presets
from tmoe.config.run import ParallelConfig, TrainConfig, with_global_batch

FLAGS = [
    *runs.SMALL,
    "--steps",
    "4",
    "--train.batch",
    "2",
    "--train.global-batch",
    "8",
    "--train.dtype",
    "fp32",
]


def settled(readers: int, **train):
    cfg = replace(presets()["tiny"], train=TrainConfig(seq=32, global_batch=24, **train))
    return with_global_batch(cfg, readers).train.accumulate


def test_accumulate_follows():
    assert settled(1, batch=2) == 12
    assert settled(4, batch=3) == 2
    assert settled(12, batch=2) == 1
    assert settled(4, batch=3, accumulate=2) == 2


def test_refused_by_name():
    with pytest.raises(ConfigError, match=r"--train.global-batch=24: .*--train.batch=5 x 2 .*20 or 30"):
        settled(2, batch=5)
    with pytest.raises(ConfigError, match=r"--train.accumulate=3: --train.global-batch=24 gives 6"):
        settled(2, batch=2, accumulate=3)
    cfg = replace(
        presets()["tiny"],
        train=TrainConfig(seq=32, batch=4, global_batch=8),
        parallel=ParallelConfig(pp=4),
    )
    with pytest.raises(ConfigError, match=r"--train.accumulate=2 \(of --train.global-batch=8\): .*pp=4"):
        with_global_batch(cfg, 1)


def test_refused_before_a_process_group(capsys):
    with pytest.raises(SystemExit):
        parse([*FLAGS, "--train.batch", "3"], "", rank=0, world=2)
    assert "--train.global-batch=8: must be a multiple of" in capsys.readouterr().err


def test_dry_run_keeps_it():
    """The planned world, not this process's, decides."""
    cfg = parse([*FLAGS, "--dry-run", "--world", "4"], "")
    assert cfg.train.accumulate == 1
    assert parse([*FLAGS, "--dry-run", "--world", "2", "--parallel.tp", "2"], "").train.accumulate == 4


@pytest.mark.slow
def test_resumed_on_another_layout(gloo, tmp_path):
    """Two ranks, then one: the same samples in every step, so the same weights as one rank throughout."""
    flags = [*FLAGS, "--checkpoint.every", "2"]
    first = [*flags, "--out", str(tmp_path / "a")]
    gloo(2, runs.run, [*first, "--steps", "2", "--optim.decay-steps", "4"])
    resumed = gloo(1, runs.run, [*first, "--optim.decay-steps", "4"])[0]
    whole = gloo(1, runs.run, [*flags, "--out", str(tmp_path / "b")])[0]
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-4, atol=1e-5)


def test_without_the_optimizer_or_generators(gloo, tmp_path):
    """--no-load-optim goes on at the step's place with moments of zero; --init begins at step 0."""
    flags = [*FLAGS, "--out", str(tmp_path), "--steps", "2"]
    ended = gloo(1, runs.run, flags)[0]
    kept = gloo(1, runs.load, [*flags, "--steps", "4"])[0]
    anew = gloo(1, runs.load, [*flags, "--steps", "4", "--no-load-optim", "--no-load-rng"])[0]
    assert ended.keys() == anew.keys()
    for name, tensor in ended.items():
        torch.testing.assert_close(kept[name], tensor, rtol=0, atol=0)
        if name.startswith("optim."):
            assert not anew[name].any(), name
        else:
            torch.testing.assert_close(anew[name], tensor, rtol=0, atol=0)
    after = gloo(1, runs.run, [*flags, "--steps", "3", "--no-load-optim"])[0]
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [1, 2, 3]
    assert any(not torch.equal(after[name], ended[name]) for name in ended)
