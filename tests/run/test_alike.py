"""What differs between nodes where all should be alike: settings, data, a link to an absent disk.

And a refusal on one node.
"""

from __future__ import annotations

import os

import forked
import pytest
from faulty import EP2, LIMIT, finish, start
from orphans import no_orphans  # noqa: F401
from tiers import slow_but

from benchmarks.launch import launch
from tmoe.cli.parse import flags_of, parse

pytestmark = pytest.mark.usefixtures("no_orphans")


def trains(rank: int, world: int, argv: list[str], own: list[str]) -> None:
    finish(start(rank, world, [*argv, *(own if rank else [])]))


@pytest.mark.parametrize(
    ("own", "says"),
    slow_but(
        lambda case: case[0] == ["--parallel.ep", "1"],
        [
            (["--optim.lr", "0.1"], "--optim.lr: 0.1 on rank [1], "),
            (["--model.moe.top-k", "3"], "--model.moe.top-k: 3 on rank [1], 2 on rank 0"),
            (["--data.seed", "9"], "--data.seed: 9 on rank [1], "),
            (["--resume", "none"], "--resume: 'none' on rank [1], "),
            (["--init", "somewhere"], "--init: True on rank [1], False on rank 0"),
            (["--train.batch", "4"], "--train.batch: 4 on rank [1], 2 on rank 0"),
            (["--parallel.ep", "1"], "--parallel.ep: 1 on rank [1], 2 on rank 0"),
        ],
    ),
)
def test_ranks_with_other_settings_are_refused(tmp_path, own, says):
    flags = [*EP2, "--resume", "auto", "--steps", "2", "--out", str(tmp_path)]
    ends = launch(2, trains, flags, own, timeout=120, limit=LIMIT)
    assert [end.code for end in ends] == [2, 2], ends
    assert says in ends[0].said and ends[0].said.count("error:") == 1 and "error:" not in ends[1].said, ends
    assert not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.slow
def test_ranks_with_other_data_are_refused(tmp_path):
    """A copy of the data on each node is right if the copies are the same."""
    for node, length in enumerate((30_000, 30_000, 29_000)):
        (tmp_path / f"{node}").mkdir()
        (tmp_path / f"{node}" / "text.txt").write_text("abc def\n" * (length // 8))
    flags = [*EP2, "--steps", "2", "--out", str(tmp_path / "run"), "--data.path", str(tmp_path / "0")]
    ends = launch(2, trains, flags, ["--data.path", str(tmp_path / "1")], timeout=120, limit=LIMIT)
    assert [end.code for end in ends] == [0, 0], ends
    ends = launch(2, trains, flags, ["--data.path", str(tmp_path / "2")], timeout=120, limit=LIMIT)
    assert [end.code for end in ends] == [2, 2], ends
    assert (
        "--data.path: tokens of the training data: " in ends[0].said
        and "must be the same on all" in ends[0].said
    )


def test_every_flag_is_compared_but_what_nodes_may_have_otherwise(tmp_path):
    cfg = parse(["tiny", "--out", str(tmp_path)], "")
    flags = flags_of(cfg)
    assert flags["--train.batch"] == repr(cfg.train.batch) and flags["--model.moe.top-k"] == repr(
        cfg.model.moe.top_k
    )
    assert {name for name, value in flags.items() if value == "None"} >= {"--out", "--data.path", "--compile"}
    assert all(name.startswith("--") and "_" not in name for name in flags)


SMALL = (
    "tiny --no-compile --log.no-progress --log.no-report --model.layers 2 --model.dim 32 --model.heads 2 "
    "--model.kv-heads 1 --train.seq 32"
)


@pytest.mark.parametrize("place", ["", "checkpoints"])
@pytest.mark.parametrize("more", [[], ["--eval-only"]])
def test_a_link_to_a_disk_that_is_not_there_starts_nothing_anew(tmp_path, place, more):
    out = tmp_path / "run"
    (out if place else tmp_path).mkdir(exist_ok=True)
    (out / place).symlink_to(tmp_path / "not mounted")
    ran = forked.run(["train.py", *SMALL.split(), "--steps", "2", "--out", out, *more])
    assert ran.returncode == 2 and "Traceback" not in ran.stderr, ran
    assert (place == "" and more) or "link to nothing" in ran.stderr, ran


def test_a_node_says_what_is_wrong_on_it_alone(tmp_path):
    (tmp_path / "file").touch()
    node = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="0", TRITON_CACHE_DIR=str(tmp_path / "file"))
    command = ["train.py", *SMALL.split(), "--out", tmp_path / "run"]
    ran = forked.run(command, env=os.environ | node)
    assert ran.returncode == 2 and "rank 1: error: TRITON_CACHE_DIR=" in ran.stderr, ran
