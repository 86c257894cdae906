"""train.py along the axes: a step goes on in any other layout, from the same bits to the same losses."""

from pathlib import Path

import pytest
import torch
from runs import SMALL, load, run

from tmoe.log.metrics_file import read_steps

# Eight sequences a step everywhere: batch x accumulate x readers.
WHOLE = ["--train.batch", "4", "--train.accumulate", "2"]
HALF = ["--train.batch", "2", "--train.accumulate", "2"]
LAYOUTS = [
    (1, WHOLE, {}),
    (2, WHOLE, dict(tp=2)),
    (2, WHOLE, dict(cp=2, ep=2)),
    (2, WHOLE, dict(pp=2)),
    (2, HALF, dict(replicate=2)),
    (2, HALF, dict(etp=2)),
    (4, HALF, dict(pp=2, ep=2)),
    (4, WHOLE, dict(pp=2, tp=2, ep=2)),
]
SETTINGS = [*SMALL, "--optim.ema", "0.9", "--checkpoint.every", "4", "--checkpoint.mode", "sync"]


def words(layout: tuple, out: Path, *more: str) -> list[str]:
    _, sizes, axes = layout
    flags = [word for name, n in axes.items() for word in (f"--parallel.{name}", str(n))]
    return [*SETTINGS, *sizes, *flags, "--out", str(out), *more]


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for _, line in read_steps(out / "metrics.jsonl")}


ORIGINS = [6, 7, 0]  # of LAYOUTS


@pytest.mark.slow
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_step_goes_on_in_any_layout(gloo, tmp_path, origin):
    origin = LAYOUTS[origin]
    first = tmp_path / "first"
    gloo(origin[0], run, words(origin, first, "--resume", "none"), timeout=240)
    step = first / "checkpoints" / "step-4"
    saved = gloo(1, load, words(LAYOUTS[0], tmp_path / "look", "--resume", str(step)))[0]
    for i, layout in enumerate(LAYOUTS):
        out = tmp_path / str(i)
        begun = words(layout, out, "--resume", str(step))
        for found in gloo(layout[0], load, begun, timeout=240):
            assert found, "a rank that holds nothing"
            for name, tensor in found.items():
                assert torch.equal(tensor, saved[name]), (layout, name)
        gloo(layout[0], run, begun, timeout=240)
        expected = {n: loss for n, loss in losses(first).items() if n > 4}
        assert losses(out) == pytest.approx(expected, rel=1e-5), layout


MIXTRAL = """mixtral-8x7b --no-compile --log.no-progress --log.no-report --model.layers 2 --model.dim 32
    --model.heads 8 --model.kv-heads 4 --model.head-dim 8 --model.moe.ffn-dim 32 --train.seq 32
    --train.batch 4 --train.eval-every 0 --train.eval-batches 1 --optim.warmup 2 --parallel.tp 4
    --parallel.ep 4 --checkpoint.mode sync""".split()


@pytest.mark.slow
def test_the_mixtral_script_cut_to_a_tiny_width(gloo, tmp_path):
    """Megatron's published script: tensor parallel 4, expert parallel 4, folded over the same ranks."""
    out = ["--out", str(tmp_path / "run")]
    gloo(8, run, [*MIXTRAL, *out, "--steps", "2", "--resume", "none"], timeout=240)
    gloo(8, run, [*MIXTRAL, *out, "--steps", "4"], timeout=240)
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_tied_table_goes_on_from_and_to_the_v_schedule(gloo, tmp_path):
    """There one rank has both ends of the model: the table is saved once, trained once, averaged once."""
    sizes = ["--train.batch", "2", "--train.accumulate", "4", "--model.layers", "4", "--model.tied"]
    layouts = [
        (2, [*sizes, "--parallel.schedule", "v"], dict(pp=2)),
        (2, sizes, dict(pp=2)),
        (1, sizes, {}),
    ]
    first = tmp_path / "first"
    gloo(2, run, words(layouts[0], first, "--resume", "none"), timeout=240)
    step = first / "checkpoints" / "step-4"
    saved = gloo(1, load, words(layouts[2], tmp_path / "look", "--resume", str(step)))[0]
    assert not any(name.startswith("model.head") for name in saved)
    for i, layout in enumerate(layouts):
        begun = words(layout, tmp_path / str(i), "--resume", str(step))
        held = gloo(layout[0], load, begun, timeout=240)
        assert set().union(*held) == set(saved), "each once"
        assert all(torch.equal(tensor, saved[name]) for found in held for name, tensor in found.items())
        gloo(layout[0], run, begun, timeout=240)
        expected = {n: loss for n, loss in losses(first).items() if n > 4}
        assert losses(tmp_path / str(i)) == pytest.approx(expected, rel=1e-5), layout
