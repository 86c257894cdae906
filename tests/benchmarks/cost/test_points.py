"""The cost model against every measured step that results/ ships, and what README and pages say of it."""

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import model
from benchmarks.cost import compare, constants, points, step_time
from tmoe.cli.parse import parse
from tmoe.config.axes import ALONE, Axes
from tmoe.config.gpus import FRAGMENTS
from tmoe.parallel import mesh
from tmoe.plan.memory import memory_per_rank, peak_bytes

# Slow: the model is frozen, so its tests need not run with every change of the trainer.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
RESULTS = points.RESULTS
CONSTANTS = json.loads(constants.CONSTANTS.read_text())
ONE_GPU = RESULTS / "steps-1xH200/steps.jsonl"
FOUR_GPUS = RESULTS / "steps-4xH200/bench.jsonl"

pytestmark = pytest.mark.slow


@cache
def held() -> list[points.Point]:
    return points.read_points(points.held())


@cache
def errors_of_held() -> list[float]:
    return [compare.ratio(p, constants.values(CONSTANTS)) - 1 for p in held()]


@cache
def fitted() -> list:
    return points.fitted_layouts(CONSTANTS)


def records(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def of(which: Callable[[points.Point], bool]) -> tuple[int, int, float, float]:
    """Number of steps, number of layouts, worst and mean error of some points."""
    found = [(p, error) for p, error in zip(held(), errors_of_held(), strict=True) if which(p)]
    errors = [error for _, error in found]
    return len(found), len({p.layout for p, _ in found}), max(errors, key=abs), sum(errors) / len(errors)


def test_every_shipped_step_is_predicted_within_ten_percent():
    table, good = compare.check(held(), CONSTANTS)
    roles = list(table.columns[-1].cells)
    assert good and all(abs(error) <= 0.1 for error in errors_of_held())
    assert roles == ["fitted" if p.layout in fitted() else "predicted" for p in held()]
    assert len({p.layout for p in held()} & set(fitted())) == len(set(fitted())) == 7, (
        "every constant's layout was measured"
    )


def test_no_file_with_a_step_is_left_out_but_those_with_a_reason():
    """Found here by reading every JSON line below results/, not by the code that is tested."""
    found = set()
    for path in RESULTS.rglob("*.json*"):
        for text in path.read_text().splitlines():
            try:
                record = json.loads(text)
                if "tokens_per_s_gpu" in record and record["command"].split()[0] == "train.py":
                    found.add(path)
            except (ValueError, TypeError):
                continue  # a file that is no JSON lines
    left_out = {RESULTS / name for name in points.UNHELD}
    assert left_out < found and set(points.held()) == found - left_out
    assert len(left_out) == 4 and all(len(reason) > 40 for reason in points.UNHELD.values())


def test_a_new_file_is_checked_wherever_it_lies(tmp_path, monkeypatch):
    (tmp_path / "new/deep").mkdir(parents=True)
    new = tmp_path / "new/deep/steps.jsonl"
    other = tmp_path / "metrics.jsonl"
    new.write_text(ONE_GPU.read_text())
    other.write_text('{"step": 1, "tokens_per_s": 3}\n')
    loop = tmp_path / "new/loop.jsonl"
    loop.write_text('{"tokens_per_s_gpu": 3, "command": "python -m benchmarks.linear_step --parts short"}\n')
    monkeypatch.setattr(points, "RESULTS", tmp_path)
    assert points.held() == [new]


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("", True),
        (
            "--steps 99 --profile 15 16 --train.eval-batches 3 --optim.warmup 7 --seed 4 "
            "--parallel.checkpoint none",
            True,
        ),
        ("--model.layers 12", False),
        ("--train.batch 2", False),
        ("--train.isolate-documents", False),
        ("--train.accumulate 2", False),
        ("--parallel.ep 2", False),
        ("--parallel.ep 1", False),
        ("--parallel.checkpoint moe", False),
        ("--parallel.gathered-gib 0", False),
        ("--parallel.dispatch nccl", False),
        ("--optim.offload", False),
        ("--optim.ema 0.9", False),
        ("--parallel.tp 2", False),
    ],
)
def test_a_layout_is_what_a_step_takes_not_how_it_was_measured(words, same):
    one, other = (
        parse(f"olmoe-1b-7b --parallel.ep 4 --train.no-isolate-documents {text}".split(), "", world=4)
        for text in ("", words)
    )
    first, second = (points.layout(cfg, Axes.of(cfg.parallel, 4)) for cfg in (one, other))
    assert (first == second) is same
    assert (first in fitted(), second in fitted()) == (True, same)


def test_the_readme_says_how_far_off_the_model_is():
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    steps, layouts, worst, _ = of(lambda p: True)
    free, free_layouts, free_worst, free_mean = of(lambda p: p.layout not in fitted())
    others = len(points.read_points([RESULTS / name for name in points.UNHELD]))
    assert (
        f"The cost model is compared with {steps} measured steps of {layouts} layouts on one to four GPUs. "
        f"{others} recorded steps in four files are left out by name and reason "
        f"(another code, hosts that could not keep up). Each prediction is within {abs(worst):.1%} of its "
        f"step. The {free} steps of the {free_layouts} layouts that set none of the model's constants are "
        f"predicted within {abs(free_worst):.1%}, {free_mean:+.1%} in the mean."
    ) in text
    one, _, worst_one, mean_one = of(lambda p: p.axes.world == 1)
    dp, _, worst_dp, mean_dp = of(lambda p: p.axes == Axes(dp=p.axes.world) != ALONE)
    ep, _, worst_ep, mean_ep = of(lambda p: p.axes.ep > 1)
    more, _, worst_more, mean_more = of(lambda p: p.axes.parts > 1)
    low = sum(error < 0 for p, error in zip(held(), errors_of_held(), strict=True) if p.axes.ep > 1)
    assert (
        f"Predictions differ by {mean_one:+.1%} in the mean on one GPU "
        f"({one} steps, {worst_one:+.1%} at worst), with dp alone {mean_dp:+.1%} ({dp}, {worst_dp:+.1%}), "
        f"with ep > 1 {mean_ep:+.1%} ({ep}, {worst_ep:+.1%}; {low} of them too fast), "
        f"with tp or cp {mean_more:+.1%} ({more}, {worst_more:+.1%})."
    ) in text
    (piped,) = (p for p in held() if p.axes.pp > 1)
    step = step_time.predict(piped.cfg, piped.axes, constants.values(CONSTANTS), piped.skew, ahead=True)
    lost = step.parts["beside receives"]
    assert (
        f"A pipeline of two stages is predicted at {1e3 * step.seconds:.1f} ms, and "
        f"{1e3 * piped.seconds:.1f} were measured ({step.seconds / piped.seconds - 1:+.1%}; "
        f"`axes/2xH200-pp.jsonl`). "
    ) in text
    assert f"{1e3 * lost:.1f} ms of the prediction are the time that kernels lose" in text


def test_a_step_of_shared_sequences_is_timed_by_a_ranks_own_tokens(tmp_path):
    """Two ranks that share 8 sequences of 4,096 tokens have 16,384 each."""
    command = "train.py olmoe-1b-7b --train.batch 8 --parallel.tp 2"
    (tmp_path / "one.jsonl").write_text(json.dumps(dict(command=command, gpus=2, tokens_per_s_gpu=16384)))
    (point,) = points.read_points([tmp_path / "one.jsonl"])
    assert point.seconds == 1.0 and point.axes == Axes(dp=2, tp=2)


def test_the_summary_counts_by_hand():
    first = held()[0]
    again = held()[0]._replace(seconds=2.0)
    other = held()[-1]
    assert first.layout != other.layout
    said = points.summary([first, again, other], [0.02, -0.04, 0.01], [first.layout]).splitlines()
    assert said[0] == "all: 3 steps of 2 layouts, worst -4.0%, mean -0.3%"
    assert said[1] == "layouts that set no constant: 1 steps of 1 layouts, worst +1.0%, mean +1.0%"


@pytest.mark.parametrize(
    ("name", "count", "which"),
    [
        (
            "slowed",
            4,
            lambda p: (p.axes, p.cfg.parallel.gathered_gib, p.cfg.model.layers) == (Axes(dp=2), 16.0, 8),
        ),
        ("host_rate", 1, lambda p: p.cfg.optim.offload and p.cfg.steps == 14),
    ],
)
def test_constants_are_what_fits_their_steps(name, count, which):
    """The other constants were read off traces, layers or kernels."""
    own = [p for p in held() if which(p)]
    assert len(own) == count and {p.layout for p in own} == {
        points.layout(parse(run["command"].split()[1:], "", world=run["gpus"]), Axes(dp=run["gpus"]))
        for run in CONSTANTS[name]["points"]
    }
    m = constants.values(CONSTANTS)
    assert compare.fit(own, [name], m)[name] == pytest.approx(getattr(m, name), rel=0.005)


def test_the_dry_run_is_as_near_to_torchs_peaks_as_the_constants_say():
    ratios = []
    for path in points.held():
        for p, record in zip(points.read_points([path]), records(path), strict=True):
            memory = memory_per_rank(p.cfg, p.axes)
            recomputes = p.axes.world == 1 and p.cfg.parallel.checkpoint != "none"
            ratios.append(
                (
                    p.axes.dp,
                    recomputes,
                    record["peak_gib"] * 2**30 / (peak_bytes(memory) - memory["exchange"]),
                )
            )

    def span(dp: int, recomputes: bool) -> list[str]:
        found = [ratio for *kind, ratio in ratios if kind == [dp, recomputes]]
        return [f"{edge * 100:.0f}" for edge in (min(found), max(found))]

    said = "{}% to {}% of the dry run's on the layouts that --check reads, the exchange's buffers left out: "
    said += "{} to {}% with dp 2, {} and {}% where one GPU recomputes, {} to {}% elsewhere"
    everywhere = [f"{edge(ratio for *_, ratio in ratios) * 100:.0f}" for edge in (min, max)]
    spans = everywhere + span(2, False) + span(1, True) + span(1, False)
    assert said.format(*spans) in CONSTANTS["memory"]["source"]
    assert max(ratio for *_, ratio in ratios) <= FRAGMENTS


@pytest.mark.parametrize("page", ["steps-2xH200", "steps-4xH200"])
def test_pages_of_steps_quote_todays_predictions(page):
    """Each row's steps are found by their tokens/s; the page must hold what --check prints."""
    m = constants.values(CONSTANTS)
    column = None
    rows = 0
    speeds = {round(p.cfg.train.batch * p.cfg.train.seq / p.seconds): p for p in held()}
    for text in (RESULTS / page / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in text.split("|")]
        heads = [i for i, cell in enumerate(cells) if cell == "ms that benchmarks/model.py predicts"]
        if heads or not text.startswith("|"):
            column = (heads or [None])[0]
        elif column and "---" not in text:
            own = [speeds[int(speed.replace(",", ""))] for speed in re.findall(r"\d\d,\d{3}", cells[2])]
            ratios = [compare.ratio(p, m) for p in own]
            want = list(
                dict.fromkeys(f"{ratio * p.seconds * 1e3:.1f}" for ratio, p in zip(ratios, own, strict=True))
            )
            off = ", ".join(f"{(ratio - 1) * 100:+.1f}" for ratio in ratios)
            said = re.sub(r" for [\d., ]+ \(", " (", cells[column])
            assert own and said == f"{', '.join(want)} ({off}%)", text
            rows += 1
    assert rows == {"steps-2xH200": 8, "steps-4xH200": 23}[page]


def test_what_the_traces_say_of_the_collectives(monkeypatch):
    """fsdp_overlap and copy_factor are read off two traced steps.

    Predictions of those steps then are the traces' milliseconds.
    """
    monkeypatch.setattr(mesh, "UNIT", 0)  # each block was gathered alone then
    m = constants.values(CONSTANTS)
    for point, record in zip(points.read_points([FOUR_GPUS])[1:3], records(FOUR_GPUS)[1:3], strict=True):
        parts = step_time.predict(point.cfg, point.axes, m).parts
        assert parts["exposed all-gathers"] * 1e3 == pytest.approx(
            record["trace_ms"]["collectives not hidden"], rel=0.05
        )
        kinds = "chunk_cat_cuda", "split_with_sizes_copy"
        copies = [us for name, us, _ in record["kernels"] if any(kind in name for kind in kinds)]
        assert len(copies) == 2
        # two gathers write and read whole parameters in bf16, gradients go from bf16 to fp32: 14 bytes of
        # the 17 that are counted
        assert sum(copies) / 1e3 == pytest.approx(parts["copies"] * 1e3 * 14 / 17, rel=0.03)


def test_points_that_say_how_uneven_they_were_are_predicted_so(tmp_path):
    """With the median over steps of the busiest rank's pairs; lines without it get the assumed skew."""
    plain = records(FOUR_GPUS)[1]
    uneven = tmp_path / "uneven.jsonl"
    uneven.write_text(json.dumps(plain | {"busiest_rank": [1.9, 1.5, 1.6]}) + "\n")
    (known,) = points.read_points([uneven])
    m = constants.values(CONSTANTS)
    (unknown,) = (p for p in points.read_points([FOUR_GPUS]) if p.command == plain["command"])
    assert (known.skew, unknown.skew) == (1.6, None)
    for point, skew in ((known, 1.6), (unknown, m.skew)):
        want = step_time.predict(point.cfg, Axes(ep=4), m, skew).seconds / point.seconds
        assert compare.ratio(point, m) == want
    assert compare.ratio(known, m) > 1.1 * compare.ratio(unknown, m)


def test_fit_finds_the_constants_that_made_the_points():
    true = SimpleNamespace(**{**vars(constants.values(CONSTANTS)), "glue_passes": 61.0, "slowed": 0.6})
    made = [
        p._replace(seconds=step_time.predict(p.cfg, p.axes, true, ahead=p.ahead).seconds, skew=None)
        for p in {p.layout: p for p in held()}.values()  # the runs of a layout would have equal seconds
    ]
    found = compare.fit(made, ["glue_passes", "slowed"], constants.values(CONSTANTS))
    assert found == pytest.approx(dict(glue_passes=61.0, slowed=0.6), rel=0.005)


def test_check_fails_beyond_ten_percent(tmp_path, monkeypatch, capsys):
    record = json.loads(FOUR_GPUS.read_text().splitlines()[0])
    record["tokens_per_s_gpu"] *= 1.25
    off, other = tmp_path / "off.jsonl", tmp_path / "other.jsonl"
    off.write_text(json.dumps(record) + "\n")
    other.write_text('{"step": 0}\n')
    one, four = len(records(ONE_GPU)), len(records(FOUR_GPUS))
    for files, code, lines in (
        ([], 0, len(held())),
        ([ONE_GPU], 0, one),
        ([FOUR_GPUS, off], 1, four + 1),
        ([other], None, 0),
    ):
        monkeypatch.setattr(sys, "argv", ["model", "--check", *map(str, files)])
        with pytest.raises(SystemExit) as ended:
            model.main()
        if code is None:
            assert "other.jsonl: not a line of `python -m benchmarks.train --json`" in str(ended.value.code)
        else:
            assert ended.value.code == code
            out = capsys.readouterr().out
            assert out.count("train.py ") == lines and f"all: {lines} steps" in out
            assert out.count("left out: ") == (0 if files else len(points.UNHELD))


def test_records_are_read_as_train_reads_its_words():
    point = points.read_points([FOUR_GPUS])[1]
    assert point.cfg == parse(point.command.split()[1:], "", world=4)
    assert point.axes == Axes(ep=4) and point.seconds == pytest.approx(0.3114, rel=1e-3)
