"""The step of the best validation stays: over saves, resumes, rollbacks and ranks, and who shows it.

next: tmoe/checkpoint/best.py
"""

import json
import shutil

import pytest
from runs import SMALL, lines
from runs import run as train_run
from steps import plain

from tmoe.checkpoint import tools
from tmoe.checkpoint.checkpoints import Checkpoints


def store(folder, keep=2, begin=0, mode="sync", keep_best=True, **config) -> Checkpoints:
    """The checkpoints of a process of the run `folder` that continues after the step `begin`."""
    made = Checkpoints(
        folder / "checkpoints", keep=keep, mode=mode, keep_best=keep_best, info=dict(config=config)
    )
    made.begin(begin)
    return made


def save(made, losses: dict[int, float | None]) -> list[int]:
    """Saves these steps, each before its validation, and says which steps are there."""
    for step, loss in losses.items():
        made.save(step, {"model.w": plain(1)["model.w"]}, dict(step=step, tokens=8 * step), {})
        if loss is not None:
            made.validated(step, loss)
    made.finish()
    return there(made.folder)


def there(folder) -> list[int]:
    """The steps of a checkpoints folder."""
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return sorted(int(name) for name in names if name.isdigit())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_best_step_stays_beside_the_newest(tmp_path, mode):
    made = store(tmp_path, mode=mode)
    assert save(made, {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.0}) == [2, 3, 4]
    assert made.take_best() == tmp_path / "checkpoints/step-2" and made.take_best() is None
    assert save(made, {5: None, 6: float("nan")}) == [2, 5, 6]
    # a better one takes the place of step 2 with the next save, or with `retain`
    assert save(made, {7: 0.5}) == [2, 6, 7]
    made.retain()
    assert there(made.folder) == [6, 7] and made.best == made.folder / "step-7"
    assert made.take_best() is None, "step 2 does not stay"
    assert save(made, {8: 0.5, 9: 0.5, 10: 0.5}) == [7, 9, 10], "of equals the first"


def test_a_validation_of_a_step_that_was_not_saved_counts_for_nothing(tmp_path):
    made = store(tmp_path, keep=1)
    save(made, {1: 3.0})
    made.validated(2, 0.1)
    assert save(made, {3: 5.0, 4: 5.0}) == [1, 4]


def test_without_the_setting_and_where_all_stay(tmp_path):
    assert save(store(tmp_path / "a", keep_best=False), {1: 1.0, 2: 2.0, 3: 3.0}) == [2, 3]
    assert save(store(tmp_path / "b", keep=0), {1: 1.0, 2: 2.0, 3: 3.0}) == [1, 2, 3]


def test_a_resumed_run_knows_its_best_step(tmp_path):
    """And one that went back does not know of later steps, which another run may have made."""
    save(store(tmp_path / "a"), {1: 1.0, 2: 2.0, 3: 3.0, 4: 0.5})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert save(store(tmp_path / "a", begin=4), {5: 9.0, 6: 9.0, 7: 9.0}) == [4, 6, 7]
    back = store(tmp_path / "b", begin=3)
    assert back.losses == {1: 1.0, 2: 2.0, 3: 3.0}
    assert json.loads((tmp_path / "b/validations.json").read_text())["val_loss"] == {"1": 1, "2": 2, "3": 3}
    assert save(back, {4: 9.0, 5: 9.0, 6: 9.0}) == [1, 5, 6]
    # a run from new weights, and a file that no run wrote
    assert store(tmp_path / "b").losses == {}
    for text in ("", "[]", '{"val_loss": 3}', '{"val_loss": {"x": 1}}', '{"val_loss": {"1": "x"}}'):
        (tmp_path / "b/validations.json").write_text(text)
        assert store(tmp_path / "b", begin=9).losses == {}


def test_what_a_user_put_beside_the_steps_stays(tmp_path):
    made = store(tmp_path, keep=1)
    save(made, {1: 1.0})
    steps = made.folder
    shutil.copytree(steps / "step-1", steps / "mine")
    shutil.copytree(steps / "step-1", steps / "step-1-good")
    save(made, {2: 0.5, 3: 2.0, 4: 2.0})
    assert {path.name for path in steps.iterdir()} == {"mine", "step-1-good", "step-2", "step-4"}


def test_inspect_lists_a_runs_steps(tmp_path, capsys):
    save(store(tmp_path, keep=0, task="sft"), {1: 1.0, 2: 0.25, 3: None})
    tools.main(["inspect", str(tmp_path)])
    newest, best, first = capsys.readouterr().out.splitlines()
    assert newest.startswith(f"{tmp_path / 'checkpoints/step-3'}  24 tokens  20") and "valid" not in newest
    assert best.startswith(f"{tmp_path / 'checkpoints/step-2'}  16 tokens  20")
    assert best.endswith("  validation loss 0.2500  best") and first.endswith("  validation loss 1.0000")
    # minus the loss is the mean reward
    save(store(tmp_path / "g", keep=0, task="grpo"), {1: -0.5, 2: -0.75})
    tools.main(["inspect", str(tmp_path / "g/checkpoints")])
    best, first = capsys.readouterr().out.splitlines()
    assert best.endswith("  validation reward 0.7500  best") and first.endswith("  validation reward 0.5000")


def steps_of_ranks(rank, world, folder):
    made = store(folder, keep=1, mode="async")
    save(made, {1: 2.0, 2: 1.0, 3: 3.0, 4: 3.0})
    return made.losses


def test_a_run_of_two_ranks_keeps_its_best_step(tmp_path, gloo):
    """A rate that is far too high: a later validation is worse than the best."""
    assert gloo(2, steps_of_ranks, tmp_path / "steps") == [{1: 2.0, 2: 1.0, 3: 3.0, 4: 3.0}] * 2
    assert there(tmp_path / "steps/checkpoints") == [2, 4]
    out = tmp_path / "run"
    flags = [
        *SMALL,
        "--optim.lr",
        "5",
        "--optim.schedule",
        "constant",
        "--train.eval-every",
        "2",
        "--checkpoint.every",
        "2",
    ]
    gloo(2, train_run, [*flags, "--checkpoint.keep", "1", "--parallel.ep", "2", "--out", str(out)])
    losses = {line["step"]: line["val_loss"] for line in lines(out) if line.get("val_loss") is not None}
    best = min(losses, key=losses.get)
    assert set(losses) == {2, 4, 6, 8} and there(out / "checkpoints") == sorted({best, 8}) and best != 8
