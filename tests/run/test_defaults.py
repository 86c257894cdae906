"""A finetune's rate, weight decay and warm-up, and the steps of --epochs: which source each value is from.

next: tmoe/cli/defaults.py
"""

import json
import math
from dataclasses import asdict, replace

import forked
import pytest
from runs import SMALL, lines, refusal

from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.cli.defaults import plan_of, with_length
from tmoe.cli.parse import parse
from tmoe.cli.settings import read_settings
from tmoe.config.check import ConfigError
from tmoe.config.presets import presets
from tmoe.config.run import Config, OptimConfig
from tmoe.optim.learning_rate import lr_factor

TINY = presets()["tiny"]
GRPO = ("--grpo.rewards", "exact", "--grpo.max-tokens", "5")


def step_of(out, cfg: Config, step: int = 7) -> str:
    """A run folder with a step of these settings; the path of the step."""
    info = dict(config=json.loads(json.dumps(asdict(cfg))))
    Checkpoints(out / "checkpoints", keep=0, mode="sync", info=info).save(step, {}, dict(step=step), {})
    (out / "config.json").write_text(json.dumps(info))
    return str(out / f"checkpoints/step-{step}")


def optim(words, flags: bool = False) -> tuple[float, float, int | None]:
    """Rate, weight decay and warm-up of a command; flags: whether it has flags of these."""
    words = [str(word) for word in words]
    found = (parse(words, "") if flags else read_settings(words).cfg).optim
    return found.lr, found.weight_decay, found.warmup


@pytest.fixture
def weights(tmp_path) -> str:
    return step_of(tmp_path / "weights", TINY)


@pytest.mark.parametrize(
    ("task", "lr", "decay"),
    [("pretrain", 5e-3, 0.1), ("sft", 2e-5, 0.0), ("preference", 1e-6, 0.0), ("grpo", 1e-6, 0.0)],
)
def test_a_finetune_has_the_rate_of_its_task(task, lr, decay, weights, tmp_path):
    """A preset next to --init changes nothing. From scratch, and for more text, the rate is the preset's."""
    words = ["--task", task, *(GRPO if task == "grpo" else ()), "--out", tmp_path / "new"]
    assert optim(["tiny", *words]) == (5e-3, 0.1, 20), "no weights are given"
    assert optim(["tiny", *words, "--init", weights]) == (lr, decay, 20)
    times = 1 if task == "pretrain" else 10
    assert optim(["tiny", *words, "--init", weights, "--lora.rank", "8"]) == (times * lr, decay, 20)
    alone = 3e-4 if task == "pretrain" else lr
    assert optim([f"--init={weights}", *words]) == (alone, decay, 100)
    # what a user gives, by a flag in any spelling or by a file, always counts
    given = ["--optim.lr=0.002", "--optim.weight_decay", "0.3", "--optim.warmup", "400"]
    assert optim(["tiny", *words, "--init", weights, *given], flags=True) == (2e-3, 0.3, 400)
    (tmp_path / "a.toml").write_text(f"init = '{weights}'\n[optim]\nweight-decay = 0.2\nwarmup = 400\n")
    assert optim(["--config", tmp_path / "a.toml", *words]) == (alone, 0.2, 400)


@pytest.mark.parametrize(
    ("words", "warmup", "fraction"),
    [
        ("--steps 60", 6, 0),
        ("--steps 9", 0, 0),
        ("--steps 5000", 20, 0),
        ("--steps 60 --optim.warmup 50", 50, 0),
        ("--steps 60 --optim.warmup-fraction 0.5", 0, 0.5),
        ("--steps 900 --optim.decay-steps 15", 1, 0),
        ("--epochs 2", None, 0),
        ("--epochs 2 --optim.warmup 3", 3, 0),
    ],
)
def test_the_warmup_is_at_most_a_tenth_of_the_steps(words, warmup, fraction, tmp_path):
    words = ["tiny", *words.split(), "--out", str(tmp_path)]
    found = parse(words, "").optim if fraction or warmup in (3, 50) else read_settings(words).cfg.optim
    assert (found.warmup, found.warmup_fraction) == (warmup, fraction)


def test_a_run_that_continues_keeps_its_own_values(weights, tmp_path):
    """Also where its command is given again, and a new run would have other defaults."""
    old = replace(TINY, task="sft", steps=60, optim=OptimConfig(lr=3e-4, warmup=100))
    step = step_of(tmp_path / "run", old)
    again = ["tiny", "--init", weights, "--task", "sft", "--steps", 90]
    assert optim([*again, "--out", tmp_path / "run"]) == (3e-4, 0.1, 100)
    assert optim([*again, "--out", tmp_path / "new", "--resume", step]) == (3e-4, 0.1, 100)
    assert optim([tmp_path / "run", "--steps", 90]) == (3e-4, 0.1, 100)
    assert optim([*again, "--out", tmp_path / "run", "--resume", "none"]) == (2e-5, 0, 9)
    assert optim([*again, "--out", tmp_path / "run", "--optim.lr", 1e-5], flags=True) == (1e-5, 0.1, 100)
    share = parse([str(tmp_path / "run"), "--optim.warmup-fraction", "0.1"], "").optim
    assert (share.warmup, share.warmup_fraction) == (0, 0.1)
    # the settings of a run for a finetune of another task: its rate is not that task's
    other = [tmp_path / "run", "--init", step, "--task", "preference", "--out", tmp_path / "new"]
    assert optim(other) == (1e-6, 0, 6)
    assert optim([tmp_path / "run", "--out", tmp_path / "new"]) == (3e-4, 0.1, 100)
    # a run's record as --config is the same; nobody chose the values that it holds
    record = ["--config", tmp_path / "run/config.json", "--out", tmp_path / "new"]
    assert optim(record) == (3e-4, 0.1, 100)
    assert optim([*record, "--init", step, "--task", "preference"]) == (1e-6, 0, 6)
    assert optim([*record, "--init", step, "--task", "preference", "--optim.lr=3"], flags=True)[0] == 3


def test_steps_and_epochs(weights, tmp_path, capsys):
    """The place above counts; one place that says both is refused."""
    out = ["--out", str(tmp_path / "new")]
    says = "the steps follow from the epochs and the data; leave one of them out"
    assert f"error: --epochs=2: not with --steps=3: {says}" in refusal(
        ["--epochs=2", "--steps=3", *out], capsys
    )
    file = tmp_path / "a.toml"
    file.write_text("steps = 3\nepochs = 2")
    assert f"error: {file}: epochs=2: not with steps=3: {says}" in refusal(["--config", file, *out], capsys)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"epochs={bad}: must be"):
            replace(TINY, epochs=bad)

    def length(*words) -> tuple[int, float | None]:
        words = (*map(str, words), *out)
        cfg = parse(words, "") if {"--steps", "--epochs"} & {*words} else read_settings([*words]).cfg
        return cfg.steps, cfg.epochs

    file.write_text("epochs = 2")
    assert length("--config", file)[1] == 2
    assert length("--config", file, "--steps", 5) == (5, None)
    file.write_text("steps = 6")
    assert length("--config", file) == (6, None)
    assert length("--config", file, "--epochs", "0.5")[1] == 0.5
    # of a run both are known, and the steps followed
    step_of(tmp_path / "run", replace(TINY, epochs=2.0, steps=12))
    assert length(tmp_path / "run")[1] == 2
    assert length(tmp_path / "run", "--steps", 40) == (40, None)
    assert length(tmp_path / "run", "--epochs", 3)[1] == 3
    assert length("--config", tmp_path / "run/config.json")[1] == 2


def test_the_steps_of_epochs_are_counted_in_samples():
    cfg = replace(TINY, epochs=2.0, optim=OptimConfig(warmup=None))
    # 2 x 44 packed rows, 4 in a step; rounded up, and never none
    assert with_length(cfg, 44, 4).steps == 22
    assert with_length(cfg, 45, 4).steps == 23
    assert with_length(replace(cfg, epochs=0.1), 30, 3).steps == 1
    assert with_length(replace(cfg, epochs=0.001), 30, 3).steps == 1
    # 10 steps of 8 rows were done where the run now takes 4: 88 - 80 are left, which are 2 steps of 4
    assert with_length(cfg, 44, 4, ahead=10 * 8 - 10 * 4).steps == 12
    found = with_length(replace(cfg, epochs=100.0), 44, 4)
    assert (found.steps, found.optim.warmup) == (1100, 100)
    assert with_length(cfg, 44, 4).optim.warmup == 2
    assert with_length(replace(cfg, optim=OptimConfig(warmup=7)), 44, 4).optim.warmup == 7
    with pytest.raises(ConfigError, match=r"epochs=2 of 44 samples: (--)?profile=.*from 1 to (--)?steps=22"):
        with_length(replace(cfg, profile=(23,)), 44, 4)


@pytest.mark.parametrize(
    ("optim", "steps", "says"),
    [
        (dict(warmup=100), 60, "--optim.warmup=100: more than --steps=60"),
        (dict(warmup=61), 60, "--optim.warmup=61: more than --steps=60"),
        (
            dict(warmup_fraction=0.5, decay_steps=400),
            60,
            "--optim.warmup-fraction=0.5 is 200 steps: more than",
        ),
        (dict(warmup=60), 60, ""),
        (dict(warmup=60, schedule="wsd"), 61, ""),
        (dict(warmup=None), 60, ""),
        (dict(), 1, ""),
    ],
)
def test_a_full_rate_that_is_never_reached_is_named(optim, steps, says):
    cfg = replace(TINY, steps=steps, optim=OptimConfig(lr=1e-3, **optim))
    line, *warning = plan_of(cfg, 8, 80, 50.0)
    highest = max(lr_factor(step, steps, cfg.optim) for step in range(steps))
    assert bool(warning) == (highest < 1) == bool(says)
    if says:
        assert warning[0].startswith(f"warning: {says}")
        assert warning[0].endswith(
            f"the full rate 0.001 is never reached; the highest is {1e-3 * highest:.3g}"
        )
    assert line.startswith("learning rate 0.001, warm-up ")
    assert line.endswith(" epochs, about 400 trained tokens a step")


@pytest.mark.parametrize(
    ("save", "validate", "says"),
    [
        *[(20, 20, ""), (20, 60, ""), (40, 20, ""), (0, 30, ""), (30, 0, "")],
        *[(20, 30, "every 60 steps"), (70, 30, "at the last step alone")],
    ],
)
def test_steps_that_are_seldom_saved_and_validated_are_named(save, validate, says):
    """The best validation that is kept is one of a saved step."""
    cfg = replace(TINY, steps=200, optim=OptimConfig(warmup=0))
    kept = replace(cfg.checkpoint, every=save, keep=3)
    cfg = replace(cfg, checkpoint=kept, train=replace(cfg.train, eval_every=validate))
    _, *notes = plan_of(cfg, 8)
    assert [says in note for note in notes] == [True] * bool(says)
    assert not plan_of(replace(cfg, checkpoint=replace(kept, keep_best=False)), 8)[1:]


def test_a_run_of_epochs(tmp_path):
    """The data say how many steps there are, in a start, in a dry run, and with more epochs later."""
    rows = [dict(prompt=f"{i}+1=", completion=f"{i + 1}") for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = SMALL[: SMALL.index("--steps")] + SMALL[SMALL.index("--optim.eps") :]
    flags += ["--task", "sft", "--data.path", str(tmp_path / "rows.jsonl"), "--train.batch", "2"]
    flags += ["--out", str(tmp_path / "run")]

    def start(*words) -> str:
        done = forked.run(["train.py", *words])
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = start(*flags, "--epochs", "2")
    config = json.loads((tmp_path / "run/config.json").read_text())["config"]
    steps, samples = config["steps"], int(said.split(" samples of 32 an epoch")[0].rsplit(" ", 1)[1])
    assert config["epochs"] == 2 and steps == samples == lines(tmp_path / "run")[-1]["step"]
    assert f"\nlearning rate 0.005, warm-up {steps // 10} of {steps} steps, 2 epochs, about " in said
    dry = start(*flags, "--epochs", "2", "--dry-run")
    assert f"learning rate 0.005, warm-up {steps // 10} of {steps} steps, 2 epochs, about " in dry
    # two epochs are done; two more in steps that are twice as large are half as many
    said = start(str(tmp_path / "run"), "--epochs", "4", "--train.batch", "4")
    assert "128 tokens a step (were 64)" in said and "nothing to do" not in said
    config = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert (config["steps"], config["optim"]["warmup"]) == (-(-3 * samples // 2), steps // 10)
    assert lines(tmp_path / "run")[-1]["step"] == config["steps"]
    read = 4 * config["steps"] - 2 * samples  # rows of 4 a step, but the first steps had 2
    assert f" of {config['steps']} steps, {read / samples:.3g} epochs, about " in said
