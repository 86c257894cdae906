"""A setting that another task, loss or start would read is refused by name, or named in a note.

next: tmoe/cli/unread.py
"""

import json
import re
from dataclasses import asdict, fields, replace
from functools import reduce
from typing import get_args, get_type_hints

import pytest

from tmoe.cli.parse import parse, require_weights
from tmoe.cli.unread import OTHER_ADVANTAGE, PREFERENCE, RULES, WHOLE_ANSWERS, applies, unread
from tmoe.config.run import Config, GrpoConfig, PreferenceConfig, SftConfig
from tmoe.post.losses import LOSSES
from tmoe.post.preference import Preference

GRPO = "tiny --task grpo --grpo.rewards exact --grpo.max-tokens 9"


def said(words, capsys) -> tuple[str, int]:
    """The words that a command line prints on stderr, and its exit code."""
    code = 0
    try:
        parse(words.split(), "")
    except SystemExit as ended:
        code = ended.code
    return capsys.readouterr().err, code


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("tiny --sft.neftune 5", "--sft.neftune=5: unused with --task=pretrain; valid: with --task sft, or"),
        (
            "tiny --grpo.rewards exact",
            "--grpo.rewards=exact: unused with --task=pretrain; valid: with --task g",
        ),
        ("tiny --sft.no-dft", "--sft.no-dft: unused with --task=pretrain"),
        (
            "tiny --model.linear.every 2 --model.linear.key-heads 4",
            "--model.linear.key-heads=4: unused with --model.linear.kind=none; valid: with --model.linear.k",
        ),
        (
            "tiny --model.linear.kind deltanet --model.layer-types linear full --model.linear.every 2",
            "--model.linear.every=2: unused with --model.layer-types; valid: with --model.linear.kind",
        ),
        (
            "tiny --model.layer-types full moe --model.moe-every 2",
            "--model.moe-every=2: unused with --model.layer-types with moe or dense; valid: where blocks",
        ),
        (
            "tiny --model.moe.shared-activation relu2",
            "--model.moe.shared-activation=relu2: unused with --model.moe.shared-dim=0; valid: with "
            "--model.moe.shared-dim above 0, or a dense block",
        ),
        (
            "tiny --model.linear.kind deltanet --model.linear.conv-bias False",
            "--model.linear.no-conv-bias: unused with --model.linear.kind=deltanet; valid: with "
            "--model.linear",
        ),
        ("tiny --grpo.group 4 --grpo.kl 1", "--grpo.group=4, --grpo.kl=1: unused with --task=pretrain"),
        ("tiny --data.chat_template a.jinja", "--data.chat-template=a.jinja: unused with --task=pretrain"),
        (
            "tiny --data.overlong=drop",
            "--data.overlong=drop: unused with --task=pretrain; valid: with --task sft",
        ),
        ("tiny --task sft --preference.beta .1", "--preference.beta=.1: unused with --task=sft"),
        ("tiny --task sft --data.text-field t", "--data.text-field=t: unused with --task=sft"),
        (
            "tiny --task preference --preference.gamma 2",
            "--preference.gamma=2: unused with --preference.loss=sig",
        ),
        (
            "tiny --task preference --preference.loss orpo --preference.beta 1",
            "--preference.beta=1: unused with",
        ),
        (
            "tiny --task preference --preference.loss ipo --preference.smoothing .1",
            "valid: with --preference.loss",
        ),
        (
            "tiny --task preference --sft.dft",
            "--sft.dft: unused with --task=preference; valid: with --task sft",
        ),
        (
            f"{GRPO} --grpo.kl-in reward",
            "--grpo.kl-in=reward: unused with --grpo.kl=0; valid: with --grpo.kl",
        ),
        (
            f"{GRPO} --grpo.loss gspo --grpo.mismatch-cap 3",
            "--grpo.mismatch-cap=3: unused with --grpo.loss=gspo",
        ),
        (f"{GRPO} --grpo.loss dr_grpo --grpo.advantage-eps 1", "--grpo.advantage-eps=1: unused with"),
        (f"{GRPO} --preference.ratio 1", "--preference.ratio=1: unused with --task=grpo"),
        ("tiny --resume none --no-load-optim", "--no-load-optim: unused with --resume=none"),
        ("tiny --data.new-tokenizer", "--data.new-tokenizer: unused with drawn weights"),
    ],
)
def test_what_is_refused(words, names, capsys):
    line, code = said(words, capsys)
    assert code == 2 and line.startswith("error: ") and line.count("\n") == 1 and names in line, line


@pytest.mark.parametrize(
    "words",
    [
        "tiny --task sft --sft.neftune 5 --sft.dft --data.overlong drop",
        "tiny --task preference --preference.beta .1 --preference.smoothing .1",
        "tiny --task preference --preference.loss simpo --preference.gamma 2",
        "tiny --task preference --preference.loss orpo --preference.ratio 2",
        f"{GRPO} --grpo.kl .1 --grpo.kl-in reward --grpo.mismatch-cap 3 --grpo.advantage-eps 1",
        f"{GRPO} --grpo.loss gspo --grpo.advantage normalised --grpo.advantage-eps 1",
        "tiny --train.no-isolate-documents --data.text-field t",
        "tiny --eval-only --optim.masters bf16 --train.dtype bf16 --optim.ema .9",
        "tiny --model.window 8 --model.windowed 1 0 --model.moe.selection tiles --model.moe.tile 64",
        "tiny --model.moe.score cosine --model.moe.cosine-dim 64",
        "tiny --model.moe.groups 2 --model.moe.group-score max",
    ],
)
def test_what_is_read_is_not_named(words, capsys):
    line, code = said(words, capsys)
    assert code == 0 and "unused" not in line, line


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("tiny --eval-only --optim.lr 1 --steps 3", "--optim.lr=1, --steps=3: unused with --eval-only"),
        ("tiny --task sft --eval-only --sft.neftune 5", "--sft.neftune=5: unused with --eval-only"),
        (
            "tiny --optim.schedule constant --optim.min-lr 0",
            "--optim.min-lr=0: unused with --optim.schedule=c",
        ),
        (
            "tiny --checkpoint.mode off --checkpoint.every 5 --checkpoint.no-keep-best",
            "--checkpoint.every=5, --checkpoint.no-keep-best: unused with --checkpoint.mode=off",
        ),
        ("tiny --parallel.cp-exchange heads", "--parallel.cp-exchange=heads: unused with --parallel.cp=1"),
        ("tiny --parallel.schedule v", "--parallel.schedule=v: unused with --parallel.pp=1"),
        (
            "tiny --model.moe.balance none --model.moe.balance-coeff 1",
            "--model.moe.balance-coeff=1: unused with --model.moe.balance=none",
        ),
        (
            "tiny --model.moe.drop choice",
            "--model.moe.drop=choice: unused with --model.moe.capacity-factor=None",
        ),
        ("tiny --model.mla.q-rank 8", "--model.mla.q-rank=8: unused with --model.attention=gqa"),
        (
            "tiny --model.attention mla --model.qk-norm none --model.kv-heads 2",
            "--model.kv-heads=2: unused with --model.attention=mla",
        ),
        (
            "tiny --model.moe.tile 64 --model.moe.selection sinkhorn",
            "--model.moe.tile=64: unused with --model.moe.selection=sinkhorn",
        ),
        (
            "tiny --model.moe.group-score top2",
            "--model.moe.group-score=top2: unused with --model.moe.groups=1",
        ),
        ("tiny --model.windowed 1 0", "--model.windowed=1 0: unused with --model.window=0"),
        (
            "tiny --data.split 8 1 1 --data.val-fraction .1",
            "--data.val-fraction=.1: unused with --data.split",
        ),
    ],
)
def test_what_does_no_harm_is_a_note(words, names, capsys):
    line, code = said(words, capsys)
    assert code == 0 and f"note: {names}" in line, line


def test_files_and_records(tmp_path, capsys):
    """A user's own file is refused by setting and file; the record of a run, which holds all, is not."""
    own = tmp_path / "own.toml"
    own.write_text("[sft]\nneftune = 5\n")
    line, code = said(f"tiny --config {own}", capsys)
    assert code == 2 and line.startswith(f"error: --sft.neftune=5 (from {own}): unused with --task=pretrain")
    assert said(f"tiny --task sft --config {own}", capsys)[1] == 0
    cfg = replace(parse(["tiny", "--out", str(tmp_path)], ""), sft=SftConfig(neftune=5.0))
    record = tmp_path / "config.json"
    record.write_text(json.dumps(dict(config=asdict(cfg))))
    assert said(str(tmp_path), capsys) == (f"note: settings of {record}\n", 0), "a run continues as it was"
    line, code = said(f"--config {record} --out other", capsys)
    assert code == 0 and f"note: --sft.neftune=5.0 (from {record}): unused with --task=pretrain\n" in line
    assert said(f"{tmp_path} --sft.neftune 5", capsys)[1] == 2, "typed, it is a wish"


def test_the_table_of_preference_losses_is_that_of_the_formulas():
    """Each loss takes the options that the table says, and no other."""
    options = dict(smoothing={"smoothing", "noise"}, ratio={"weight"})
    for name, losses in PREFERENCE.items():
        for loss in get_args(get_type_hints(PreferenceConfig)["loss"]):
            takes = bool(options.get(name, {name}) & LOSSES[loss].options.keys())
            assert takes == (loss in losses), (name, loss)


def test_robust_reads_its_smoothing():
    """Its formula calls the setting `noise`; without the setting the noise is 0.1."""
    for smoothing, noise in ((0.3, 0.3), (0.0, 0.1)):
        preference = PreferenceConfig(loss="robust", smoothing=smoothing)
        task = Preference(Config(task="preference", preference=preference), None)
        assert task.loss.keywords == dict(beta=0.1, noise=noise)


def test_every_name_of_the_rules_is_a_setting():
    cfg = asdict(Config())
    for rule in RULES:
        for name in rule.names:
            section, _, last = name.rpartition(".")
            part = reduce(dict.__getitem__, section.split("."), cfg) if section else cfg
            assert not last or last in part, name
    names = [f"grpo.{one.name}" for one in fields(GrpoConfig)]
    assert all(any(applies(rule, name) for rule in RULES) for name in names)


def test_the_usual_advantage_and_correction_of_a_loss():
    """OTHER_ADVANTAGE and WHOLE_ANSWERS say what post/grpo.py takes where no flag says."""
    from tmoe.post.grpo import BASELINE

    assert {*OTHER_ADVANTAGE} == {loss for loss, kind in BASELINE.items() if kind != "normalised"}
    whole = {name for name, loss in LOSSES.items() if loss.task == "grpo" and loss.of != "tokens"}
    assert {*WHOLE_ANSWERS} == whole
    cfg = Config(task="grpo", grpo=GrpoConfig(rewards=("exact",), loss="gspo"))
    assert unread(cfg, "grpo.mismatch_cap") and not unread(cfg, "grpo.group")


@pytest.mark.parametrize("more", ["", "--resume none"])
def test_a_validation_without_weights_is_refused(tmp_path, more, capsys):
    cfg = parse(f"tiny --eval-only --out {tmp_path} {more}".split(), "")
    with pytest.raises(ValueError, match=r"^--eval-only: no .*; name --init, a run folder or --resume STEP$"):
        require_weights(cfg)
    require_weights(replace(cfg, eval_only=False))
    require_weights(replace(cfg, init="a-step"))
    assert re.search("checkpoint in --out=|--resume=none", said_of(cfg))


def said_of(cfg) -> str:
    with pytest.raises(ValueError, match="eval-only") as refused:
        require_weights(cfg)
    return str(refused.value)
