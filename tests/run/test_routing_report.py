"""python -m tmoe.routing: what it reads is what was logged, and every kind of run is drawn and told."""

import json

import numpy as np
import pytest
from run_logs import config, start, step

from tmoe.commands import routing as command
from tmoe.log import routing_history as history_module
from tmoe.log import routing_report
from tmoe.log.metrics import Metrics
from tmoe.log.routing_history import compare, describe, read_history
from tmoe.log.routing_log import RoutingRecord, pack


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """report.png takes longer to draw than these runs take."""
    monkeypatch.setattr(Metrics, "draw", lambda _: None)


def written(run, counts: list[list[list[int]]], losses=("sequence", "z"), first: int = 1) -> None:
    """A run folder with a record of each entry of counts, [layers][E]."""
    run.mkdir(exist_ok=True)
    with open(run / "routing.bin", "ab") as file:
        for i, of_step in enumerate(counts):
            load = np.array(of_step)
            zeros, ones = np.zeros(load.shape), np.ones((len(load), len(losses)))
            bias = zeros.copy()
            bias[:, 0] = 0.25 * i
            one = RoutingRecord(first + i, losses, load, load // 4, bias, ones[:, 0], ones * (i + 1))
            file.write(pack(one))


def is_picture(path) -> bool:
    return path.read_bytes()[:4] == b"\x89PNG"


def test_numbers_by_hand(tmp_path):
    written(
        tmp_path / "a", [[[8, 0, 0, 0], [4, 4, 4, 4]], [[4, 4, 0, 0], [4, 4, 4, 4]], [[0] * 4, [8, 0, 4, 4]]]
    )
    one = read_history(tmp_path / "a")
    np.testing.assert_allclose(one.violation, [[3, 0], [1, 0], [np.nan, 1]])
    np.testing.assert_allclose(one.dropped, [[0.25, 0.25], [0.25, 0.25], [np.nan, 0.25]])
    np.testing.assert_allclose(one.bias[:, 0], [0, 0.25, 0.5])
    np.testing.assert_allclose(one.of_losses[:, 1, 0], [1, 2, 3])
    np.testing.assert_allclose(one.shares()[1, 0], [2, 2, 0, 0])
    assert one.edges.tolist() == [1, 2, 3, 4] and one.blocks == [0, 1] and one.pairs == 64
    text = describe(one)
    assert "a: 3 records of steps 1 to 3, 2 MoE blocks of 4 experts, 64 routed pairs" in text
    first, second = text.splitlines()[2:4]
    assert first.split()[:4] == ["0", "3.00", ">", "nan"] and second.split()[:4] == ["1", "0.00", ">", "1.00"]
    assert "0 (2.00)" in second and "1 (0.00)" in second and second.split()[-3:] == ["1", "3.0000", "3.0000"]


def test_a_long_run_is_held_in_few_bins_and_loses_no_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(history_module, "MOST_BINS", 8)
    written(tmp_path / "a", [[[i, 1]] for i in range(50)], first=0)
    one = read_history(tmp_path / "a")
    assert len(one.load) <= 8 and one.pairs == sum(range(50)) + 50 and len(one.steps) == 50
    assert one.edges[0] == 0 and one.edges[-1] == 50 and (np.diff(one.edges) > 0).all()
    size = one.edges[1]
    for i, start_ in enumerate(one.edges[:-1]):
        assert one.load[i, 0].tolist() == [
            sum(range(start_, min(start_ + size, 50))),
            one.edges[i + 1] - start_,
        ]


def test_runs_are_compared(tmp_path):
    written(tmp_path / "even", [[[4, 4, 4, 4]]] * 20)
    written(tmp_path / "one$sided", [[[16, 0, 0, 0]]] * 20, losses=("global", "gshard", "z"))
    head, even, sided = compare(
        [read_history(tmp_path / name) for name in ("even", "one$sided")]
    ).splitlines()
    assert head.split()[-4:] == ["sequence", "z", "global", "gshard"]
    assert even.split()[:5] == ["even", "20", "0.00", ">", "0.00"] and even.split()[-2:] == ["-", "-"]
    assert sided.split()[:5] == ["one$sided", "20", "3.00", ">", "3.00"] and "3 of 4" in sided


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_command_draws_and_tells(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(routing_report, "MOST_MAPS", 2)
    written(tmp_path / "a", np.random.default_rng(0).integers(0, 99, (9, 5, 6)).tolist())
    written(tmp_path / "b", [[[0] * 3] * 2])  # nothing was routed yet
    command.main((tmp_path / "a", tmp_path / "b"), tmp_path / "both.png")
    said = capsys.readouterr().out
    assert f"{tmp_path}/a/routing.png" in said and f"{tmp_path}/both.png" in said and "b: 1 records" in said
    assert all(
        map(is_picture, (tmp_path / "a/routing.png", tmp_path / "b/routing.png", tmp_path / "both.png"))
    )
    assert not list(tmp_path.rglob("*.tmp"))
    assert routing_report.shown_layers(read_history(tmp_path / "a")) == [0, 4]


def test_a_resumed_run_may_change_its_losses(tmp_path):
    written(tmp_path, [[[1, 3]]] * 2)
    written(tmp_path, [[[2, 2]]] * 2, losses=("global", "z"), first=3)
    one = read_history(tmp_path)
    assert one.losses == ("sequence", "z", "global")
    np.testing.assert_allclose(one.of_losses[:, 0, 0], [1, 2, np.nan, np.nan])
    np.testing.assert_allclose(one.of_losses[:, 0, 2], [np.nan, np.nan, 1, 2])


def test_a_run_older_than_the_file_and_blocks_by_their_number(tmp_path):
    cfg = config(tmp_path)
    with start(cfg) as log:
        for number in range(3):
            step(log, number)
    new = read_history(tmp_path)
    (tmp_path / "routing.bin").unlink()
    old = read_history(tmp_path)
    np.testing.assert_array_equal(old.load, new.load)
    np.testing.assert_allclose(old.violation, new.violation)
    assert old.losses == () and "nan" not in describe(old)
    told = json.loads((tmp_path / "config.json").read_text())
    told["config"]["model"] |= dict(layers=7, dense_layers=1, moe_every=2)
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert read_history(tmp_path).blocks == [1, 3, 5]


def test_nothing_to_draw_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"has no routing\.bin with a record; name a run"):
        command.main((tmp_path,))
    written(tmp_path, [[[1, 3]], [[1, 2, 3]]])
    with pytest.raises(ValueError, match="step 2 is of another model"):
        command.main((tmp_path,))
    with pytest.raises(ValueError, match="RUN: name one run folder"):
        command.main(())
    with pytest.raises(ValueError, match="--out=x: is for several runs"):
        command.main((tmp_path,), "x")
    (tmp_path / "routing.bin").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step":3,"expert_counts":[[1],[1,2]]}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: step 4: no line of a run"):
        command.main((tmp_path,))
