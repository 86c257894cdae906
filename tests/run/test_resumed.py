"""What a run that goes on, or begins beside other files, says, refuses and leaves alone.

next: tests/checkpoint/test_checkpoint.py
"""

import json
import os
from dataclasses import asdict

import numpy as np
import pytest
import torch
from starts import FLAGS, train_two_steps

from tmoe.checkpoint import resume
from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.run import Config
from tmoe.data.dataset import open_data
from tmoe.data.shards import write_shards
from tmoe.data.survey import text_files
from tmoe.data.tokenizer import ByteTokenizer, DataError
from tmoe.hf import importer as hf
from tmoe.log.metrics import write_config


class Other(ByteTokenizer):
    """Bytes, told apart only by name and end."""

    eos = 1
    fingerprint = "other"


def facts(path, seq):
    return open_data(parse(["--data.path", str(path)], "").data, seq, 256, "train").facts()


def test_tokens_of_another_tokenizer_are_refused(gloo, tmp_path):
    """Behind the same path: their ids mean other text."""
    source = tmp_path / "shards"
    text = np.frombuffer(b"some text of a document " * 400, dtype=np.uint8)
    for tokenizer in (ByteTokenizer(), Other()):
        write_shards(source, [np.append(text, np.uint8(tokenizer.eos))], tokenizer, 1 << 20)
        if tokenizer.eos == 0:
            run = ["--out", str(tmp_path / "run"), "--data.path", str(source)]
            flags = [*FLAGS, *run, "--train.batch", "2", "--optim.warmup", "1"]
            gloo(1, train_two_steps, flags)
            cfg = parse([*flags, "--steps", "4"], "")
            step = Checkpoints(tmp_path / "run/checkpoints", keep=0, mode="sync", info={}).find("auto")
            assert (
                resume.require_same_run(step, cfg, facts(source, cfg.train.seq), 1)[0] == "--steps=4 (was 2)"
            )
        source.rename(tmp_path / tokenizer.fingerprint)
    (tmp_path / "other").rename(source)
    with pytest.raises(
        ConfigError, match=r"made with tokenizer other, eos 1; .*step-2 was trained on that of bytes, eos 0"
    ):
        resume.require_same_run(step, cfg, facts(source, cfg.train.seq), 1)


def test_another_task_is_another_run(tmp_path):
    """Steps of another task are refused before config.json changes; a validation may ask any task."""
    words = ["tiny", "--task", "preference", "--out", str(tmp_path)]
    info = dict(config=json.loads(json.dumps(asdict(parse(words, "")))))
    state = dict(step=4, tokens=8, guard={})
    steps = Checkpoints(tmp_path / "checkpoints", keep=0, mode="sync", info=info)
    steps.save(4, {"optim.x": torch.zeros(1)}, state, {})
    data = dict(tokenizer="bytes", eos=0)

    def said(*more: str) -> list[str]:
        return resume.require_same_run(tmp_path / "checkpoints/step-4", parse([*words, *more], ""), data, 1)

    with pytest.raises(ConfigError) as refused:
        said("--task", "sft")
    meant = "was trained with --task preference; valid: --task preference, or a new run from these weights: "
    assert meant in str(refused.value)
    assert str(refused.value).startswith("--task=sft: ")
    assert not [line for line in said("--task", "sft", "--eval-only") if "task" in line]
    # settings of the task itself may change, by name
    assert said("--preference.loss", "ipo")[0] == "--preference.loss=ipo (was sigmoid)"


@pytest.mark.parametrize("content", [{"model_type": "qwen3_moe"}, {"starts": []}])
def test_another_programs_config_is_not_written_over(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    if "starts" in content:
        write_config(tmp_path, Config(), 1, 0, {}, {})
        assert "config" in json.loads(path.read_text())
        return
    with pytest.raises(ConfigError, match=r"no config\.json of a run"):
        write_config(tmp_path, Config(), 1, 0, {}, {})
    assert json.loads(path.read_text()) == content


def test_no_run_lies_in_a_step_that_retention_removes(tmp_path, capsys):
    step = tmp_path / "run/checkpoints/step-4"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text('{\n"sha256": "damaged')
    for out in (step, step / "tuned/again"):
        with pytest.raises(SystemExit):
            parse(["--out", str(out)], "")
        assert f"is in the step folder {step}" in "".join(capsys.readouterr().err.split("\n"))
    assert parse(["--out", str(step.parent / "tuned")], "").out
    (tmp_path / "manifest.json").write_text('{"name": "a web page of somebody"}')
    assert parse(["--out", str(tmp_path / "runs/a")], "").out
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SystemExit):  # and not what Path.resolve raises
        parse(["--out", str(tmp_path / "loop")], "")
    assert "is a link to nothing, loop" in "".join(capsys.readouterr().err.split("\n"))


def test_what_a_run_began_from_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse(["tiny", "--init", "./models/a"], "").init == str(tmp_path / "models/a")
    assert not parse([], "").init
    # of a link's parent, not of the folder that the link is in
    assert parse(["tiny", "--init", "latest/../step-100"], "").init == str(tmp_path / "latest/../step-100")


def test_a_folder_that_may_not_be_read_is_not_left_out(tmp_path, monkeypatch):
    """By a stand-in for the system's refusal, which root never gets."""
    for name in ("a", "b", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("text")
    assert [path.parent.name for path in text_files(str(tmp_path))[1]] == ["a", "b"]
    scandir = os.scandir

    def refuse(path):
        if os.fspath(path).endswith(("/b", "/.hidden")):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="/b: Permission denied"):
        text_files(str(tmp_path))


def test_an_original_that_is_gone_is_told_and_steps_may_begin_from_each_other(gloo, tmp_path, capfd):
    """A step that retention removed; and two runs in one folder that saved over what they began from."""
    first, second = tmp_path / "first", tmp_path / "second"
    flags = [
        *FLAGS,
        "--train.batch",
        "2",
        "--steps",
        "2",
        "--checkpoint.every",
        "1",
        "--optim.warmup",
        "1",
        "--out",
    ]
    gloo(1, train_two_steps, [*flags, str(first)])
    begun, step = (run / "checkpoints/step-2" for run in (first, second))
    gloo(1, train_two_steps, [*flags, str(second), "--init", str(begun)])
    hf.export_hf(step, tmp_path / "there")
    assert "is gone" not in capfd.readouterr().out
    begun.rename(tmp_path / "away")
    hf.export_hf(step, tmp_path / "gone")
    assert (
        f"{begun}, from which it was trained, is gone: config.json is made from settings"
        in capfd.readouterr().out
    )
    assert (tmp_path / "gone/config.json").read_bytes() == (tmp_path / "there/config.json").read_bytes()
    gloo(1, train_two_steps, [*flags, str(first), "--resume", "none", "--init", str(step)])
    assert begun.exists()
    hf.export_hf(step, tmp_path / "each-other")
    assert (tmp_path / "each-other/config.json").read_bytes() == (tmp_path / "there/config.json").read_bytes()
