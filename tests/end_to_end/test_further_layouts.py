"""Multi-token prediction in every layout: losses, shares of equal tokens and parameters of one process."""

import functools
import shutil

import layouts
import pytest
import runs
from tiers import slow_but

from tmoe.log import report

LAYOUTS = [  # (processes, axes, model, what else differs)
    (1, {}, "further", dict(micros=4, parallel=dict(checkpoint="block"))),
    (2, dict(ep=2), "further", dict(micros=2)),
    (4, dict(dp=4), "further", dict(micros=2, parallel=dict(gathered_gib=0, shard=2))),
    (2, dict(tp=2), "further", {}),
    (2, dict(cp=2), "further", dict(micros=2)),
    (4, dict(cp=2, tp=2, ep=2), "latent_1", {}),
    (2, dict(pp=2), "further", dict(micros=2)),
    (4, dict(pp=2, ep=2), "further", dict(micros=4, parallel=dict(schedule="v"))),
    (2, dict(pp=2), "tied_1", dict(micros=4, parallel=dict(schedule="v"))),
    (4, dict(pp=2, tp=2), "latent_1", dict(micros=2, parallel=dict(checkpoint="attention"))),
    (4, dict(replicate=2, ep=2), "tied_1", dict(micros=2)),
]


@pytest.fixture(scope="module")
def one_process(gloo):
    return functools.cache(lambda model: gloo(1, functools.partial(layouts.train, axes={}, model=model))[0])


FAST = [LAYOUTS[i] for i in (0, 1, 6)]


@pytest.mark.parametrize(("world", "axes", "model", "more"), slow_but(FAST, LAYOUTS), ids=str)
def test_layout(gloo, one_process, world, axes, model, more):
    (found, *_) = gloo(world, functools.partial(layouts.train, axes=axes, model=model, **more), timeout=240)
    layouts.assert_same(found, one_process(model))


def test_a_run_logs_depths_and_resumes_in_every_bit(gloo, tmp_path):
    """The log of two ranks is that of one; a resumed run ends with the same bits."""
    more = "--model.mtp.depth 2 --optim.ema 0.9 --steps 4 --checkpoint.every 2 --train.dtype fp32".split()
    words = [*runs.SMALL, *more, "--train.eval-every", "2", "--train.batch", "4"]
    straight = gloo(1, runs.run, [*words, "--out", str(tmp_path / "a")])[0]
    shutil.copytree(tmp_path / "a/checkpoints/step-2", tmp_path / "b/checkpoints/step-2")
    runs.assert_equal_state(gloo(1, runs.run, [*words, "--out", str(tmp_path / "b")])[0], straight)
    two = [*words, "--train.batch", "2", "--parallel.ep", "2", "--out", str(tmp_path / "c")]
    gloo(2, runs.run, two)
    one, other = runs.lines(tmp_path / "a"), runs.lines(tmp_path / "c")
    for name in ("mtp/loss_1", "mtp/loss_2", "mtp/equal_1", "mtp/equal_2"):
        seen = [line[name] for line in one if name in line]
        assert seen == pytest.approx([line[name] for line in other if name in line], rel=1e-5), name
        assert len(seen) == 4 and all(value > 0 for value in seen if "loss" in name)
    drawn = report.load(tmp_path / "a").series["mtp/loss_2"]
    assert drawn.tolist() == [line["mtp/loss_2"] for line in one if "mtp/loss_2" in line]
    assert len(report.paint(report.load(tmp_path / "a")).axes) > 7
