"""A request outside the cost model is refused by name, and never with code 0."""

import json
import sys

import pytest

from benchmarks import model
from benchmarks.cost import page
from benchmarks.cost.constants import CONSTANTS
from tmoe.config.axes import Axes
from tmoe.config.presets import presets

# Slow: the model is frozen, so its tests need not run with every change of the trainer.
pytestmark = pytest.mark.slow


def page_ends(monkeypatch, capsys, *words: str) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["model", *words])
    with pytest.raises(SystemExit) as ended:
        model.main()
    return ended.value.code, f"{ended.value.code} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    "words, says",
    [
        ("--gpus 0 -- olmoe-1b-7b", "--gpus 0: must be 1 or more"),
        ("--gpus -8 -- olmoe-1b-7b", "--gpus -8: must be 1 or more"),
        ("--gpus 0 --parts -- olmoe-1b-7b", "--gpus 0: must be 1 or more"),
        ("--tokens nan -- olmoe-1b-7b", "--tokens nan: must be above 0"),
        ("-- olmoe-1b-7b --parallel.dispatch local", "the page takes auto or nccl"),
        ("-- olmoe-1b-7b --train.dtype fp32", "measured in bf16"),
        ("-- olmoe-1b-7b --lora.rank 8", "--lora.rank=8: the times are of a step that trains all weights"),
        (
            "--gpus 8 --parts -- olmoe-1b-7b --optim.freeze moe.experts",
            "--optim.freeze=moe.experts: the times",
        ),
        ("-- olmoe-1b-7b --task preference", "--task=preference: the times have no reference model"),
        ("--published -- olmoe-1b-7b", "--published: needs --check, without files, --fit and --gpu"),
        ("--check x.jsonl --published", "--published: needs --check, without files, --fit and --gpu"),
        (
            "--gpus 16 --parts -- olmoe-1b-7b --parallel.ep 16 --parallel.dispatch symm",
            "one node of 8 at most",
        ),
        ("--gpus 40 --parts -- granite-3b-a800m --parallel.ep 5", "would straddle nodes of 8"),
        ("--check /nowhere", "/nowhere"),
        ("--check /dev/null", "no line"),
        ("--fit collective --check", "must be among"),
        ("--fit skew -- olmoe-1b-7b", "--fit: needs --check"),
    ],
)
def test_what_the_model_does_not_know_is_refused(capsys, monkeypatch, words, says):
    code, said = page_ends(monkeypatch, capsys, *words.split())
    assert code not in (0, False, None)
    assert says in said


def test_the_page_has_no_layout_that_train_would_refuse():
    """Groups of 5 on nodes of 8 straddle two."""
    cfg = presets()["granite-3b-a800m"]
    assert [axes.ep for axes in page.layouts(cfg, 40, 8)] == [1, 2, 4, 8]
    assert page.layouts(cfg, 5, 8) == [Axes(dp=5), Axes(ep=5)]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("nic_rate", 0, "must be finite and above 0"),
        ("node", 0, "must be finite and 1 or more"),
        ("skew", -1, "must be finite and 1 or more"),
        ("glue_passes", float("nan"), "must be finite and 0 or more"),
        ("collective", [], "must be two points or more"),
        ("collective", [[0, 1], [2]], "must be two points or more"),
        ("exchange", 3, "must be of the kind of"),
    ],
)
def test_constants_that_no_machine_has_are_refused(capsys, monkeypatch, tmp_path, name, value, says):
    changed = json.loads(CONSTANTS.read_text())
    changed[name]["value"] = value
    (tmp_path / "c.json").write_text(json.dumps(changed))
    code, said = page_ends(monkeypatch, capsys, "--constants", str(tmp_path / "c.json"), "--", "olmoe-1b-7b")
    assert code == 2 and f"c.json: {name}: {value}" in said and says in said


def test_what_says_nothing_of_a_layout_passes(capsys, monkeypatch):
    monkeypatch.setattr(
        sys,
        "argv",
        ["model", "--gpus", "8", "--", "tiny", "--train.dtype", "bf16", "--parallel.ep-across-nodes"],
    )
    model.main()
    assert "tokens a GPU" in capsys.readouterr().out
