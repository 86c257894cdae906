"""inspect and verify help whoever names half of it: nearest tensors, the steps of a run, a damaged byte."""

from pathlib import Path

import pytest
import torch

from tmoe.checkpoint import tools
from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.checkpoint.inspect import nearest
from tmoe.checkpoint.manifest import CheckpointError

NAMES = [f"model.blocks.{i}.moe.experts.{name}" for i in range(2) for name in ("down", "gate_up")]
NAMES += ["model.embedding.weight", "optim.down.exp_avg", "model.blocks.0.norm.weight"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (
            "down",
            ["model.blocks.0.moe.experts.down", "model.blocks.1.moe.experts.down", "optim.down.exp_avg"],
        ),
        ("blocks.1.gate", ["model.blocks.1.moe.experts.gate_up"]),
        ("model.embeding.weight", ["model.embedding.weight"]),
        ("zzz", []),
    ],
)
def test_nearest_names(name, found):
    assert nearest(name, NAMES)[: len(found) or None] == found


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder with one step."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=0, mode="sync", info={})
    checkpoints.save(3, {"model.down.weight": torch.arange(64.0)}, {"step": 3}, {})
    assert checkpoints.newest == tmp_path / "checkpoints/step-3"
    assert checkpoints.take_published() == [checkpoints.newest] and checkpoints.take_published() == []
    return tmp_path


def test_verify_takes_a_run_folder(run, capsys):
    tools.verify(run)
    assert capsys.readouterr().out == f"whole    {run}/checkpoints/step-3\n"


def test_inspect_says_that_a_step_is_damaged(run, capsys):
    step = run / "checkpoints/step-3"
    tools.inspect(step)
    assert "warning" not in capsys.readouterr().err
    (file,) = step.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    tools.inspect(step)
    said = capsys.readouterr().err
    assert (
        said.startswith("warning: this step is not whole, and a run would not use it:") and file.name in said
    )
    with pytest.raises(CheckpointError, match=r"no tensor 'down'; nearest: model\.down\.weight"):
        tools.inspect(step, "down")


def test_inspect_refuses_what_is_no_step_without_a_warning(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"is no step folder.*tmoe.hf import makes one"):
        tools.inspect(tmp_path)
    assert capsys.readouterr().err == ""
