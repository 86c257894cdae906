"""The fault list on whole runs: a run goes on bit for bit, or all ranks end soon and name the right one.

A run is never wrong in silence. Cases 9 and 16 to 24 are here. Checkpoints are in
test_faults_checkpoint.py; ranks that stop or stray are in test_faults_ranks.py. Injections replace
functions in the worker's own process.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from faulty import EP2, before_step, finish, start
from gloo import shared
from orphans import no_orphans  # noqa: F401
from runs import NOISY, SMALL, assert_equal_state, lines, load, numbers, run, whole
from tiers import slow_but

import train
from benchmarks.launch import launch
from tmoe.config.model import IGNORE
from tmoe.moe.router import Router

pytestmark = pytest.mark.usefixtures("no_orphans")


# ---- 9, 16, 17, 18, 19: the same numbers ----


def stop_in(rank: int, world: int, argv: list[str], where: str) -> None:
    """Rank 1 gets SIGTERM in the middle of step 3's forward pass, or while step 4's checkpoint is written."""
    trainer = start(rank, world, argv)
    hit = lambda *_: os.kill(os.getpid(), signal.SIGTERM) if rank == 1 else None  # noqa: E731
    if where == "step":
        before_step(trainer, 3, hit)
    else:
        write = trainer.checkpoints._write
        trainer.checkpoints._write = lambda *a: (hit(), time.sleep(0.2), write(*a))
    finish(trainer)


@pytest.mark.parametrize("where", slow_but(["step"], ["step", "save"]))
def test_9_sigterm(tmp_path, gloo, where):
    """One rank gets the signal; all stop at one step, commit and exit with 0.

    The resumed run equals the straight one bit for bit.
    """
    straight = gloo(2, run, [*EP2, "--out", str(tmp_path / "a")])
    stopped = [*EP2, "--out", str(tmp_path / "b"), "--checkpoint.every", "4"]
    assert [end.code for end in launch(2, stop_in, stopped, where)] == [0, 0]
    done = lines(tmp_path / "b")[-1]["step"]
    assert done < 8 and (tmp_path / f"b/checkpoints/step-{done}/manifest.json").exists()
    assert_equal_state(straight[0], gloo(2, run, stopped)[0])
    assert numbers(tmp_path / "b", 0) == numbers(tmp_path / "a", 0)


@pytest.mark.slow
def test_16_resume_is_the_straight_run(tmp_path, gloo):
    """8 steps against 3 + 5: the losses and every bit of the state are equal.

    With dropout, jitter, EMA, accumulation, global balance and ep=2.
    """
    flags = [
        *EP2,
        *NOISY,
        "--train.accumulate",
        "2",
        "--model.moe.balance",
        "global",
        "--checkpoint.every",
        "3",
    ]
    straight = gloo(2, run, [*flags, "--out", str(tmp_path / "a")])
    step3 = str(tmp_path / "a/checkpoints/step-3")
    resumed = gloo(2, run, [*flags, "--out", str(tmp_path / "b"), "--resume", step3])
    assert [n[0] for n in numbers(tmp_path / "b", 0)] == [4, 5, 6, 7, 8]
    assert numbers(tmp_path / "b", 3) == numbers(tmp_path / "a", 3)
    assert_equal_state(straight[0], resumed[0])


def consume(rank: int, world: int, argv: list[str], kill_at: int | None) -> list[tuple[int, int]]:
    """Trains and notes each (step, global sample) whose windows it consumed.

    The rank is killed while the next batches are being made.
    """
    trainer = start(rank, world, argv)
    log = Path(trainer.cfg.out, f"samples-{rank}.txt")
    sample = trainer.data.sample
    drawn = {}

    def noted(index: int):
        window = sample(index)
        drawn[window[:-1].tobytes()] = index
        return window

    def consumed(batch):
        if trainer.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with log.open("a") as file:
            for row in batch.tokens_ABS.flatten(0, 1):
                file.write(f"{trainer.step} {drawn[row.numpy().tobytes()]}\n")

    trainer.data.sample = noted
    original = trainer.forward_backward
    trainer.forward_backward = lambda batch, totals: (consumed(batch), original(batch, totals))[1]
    finish(trainer)


@pytest.mark.slow
def test_17_data_goes_on_where_it_stopped(tmp_path):
    """Killed in step 5, in the middle of an epoch, with batches prefetched.

    The samples that count are 0, 1, 2, ..., each of them once.
    """
    flags = [
        *EP2,
        "--out",
        str(tmp_path),
        "--checkpoint.every",
        "2",
        "--checkpoint.mode",
        "sync",
        "--log.every",
        "1",
    ]
    killed = launch(2, consume, flags, 5)
    assert [end.code for end in killed] == [-signal.SIGKILL] * 2
    before = samples(tmp_path, range(0, 4))
    for log in tmp_path.glob("samples-*"):
        log.unlink()
    assert [end.code for end in launch(2, consume, flags, None)] == [0, 0]
    after = samples(tmp_path, range(4, 8))
    assert {step for step, _ in before + after} == set(range(8))
    assert [sample for _, sample in before + after] == list(range(8 * 2 * 2))


def samples(out: Path, steps: range) -> list[tuple[int, int]]:
    rows = [
        tuple(map(int, line.split()))
        for log in out.glob("samples-*")
        for line in log.read_text().splitlines()
    ]
    return sorted(row for row in rows if row[0] in steps)


@pytest.mark.slow
def test_18_other_worlds(tmp_path, gloo):
    """2 -> 4 -> 1 ranks: the state is bit for bit the same after each load.

    The losses follow those of the straight run.
    """
    flags = [*SMALL, "--checkpoint.keep", "0"]
    layout = {
        2: ["--parallel.ep", "2", "--train.batch", "2"],
        4: ["--parallel.ep", "2", "--train.batch", "1"],
        1: ["--train.batch", "4"],
    }
    gloo(2, run, [*flags, *layout[2], "--out", str(tmp_path / "straight"), "--checkpoint.every", "3"])
    out = ["--out", str(tmp_path / "moved")]
    step3 = str(tmp_path / "straight/checkpoints/step-3")
    at4 = [*flags, *layout[4], *out, "--checkpoint.every", "2"]
    assert_equal_state(
        gloo(2, load, [*flags, *layout[2], *out, "--resume", step3])[0],
        gloo(4, load, [*at4, "--resume", step3])[0],
    )
    gloo(4, run, [*at4, "--resume", step3])
    step6 = ["--resume", str(tmp_path / "moved/checkpoints/step-6")]
    loaded4 = gloo(4, load, [*at4, *step6])[0]
    loaded1 = gloo(1, load, [*flags, *layout[1], *out, *step6])[0]
    assert_equal_state(loaded4, loaded1)
    moved = lines(tmp_path / "moved")[:3]
    gloo(1, run, [*flags, *layout[1], "--out", str(tmp_path / "alone"), *step6])
    for ours, theirs in zip(moved + lines(tmp_path / "alone"), lines(tmp_path / "straight")[3:], strict=True):
        assert ours["step"] == theirs["step"] and ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


def late(rank: int, world: int, argv: list[str], late_rank: int) -> None:
    time.sleep(0.3 * (rank == late_rank))
    finish(start(rank, world, argv))


@pytest.mark.slow
def test_19_run_to_run(tmp_path):
    """Every number in every line is equal between three runs.

    In two of them one rank starts late. The third is started as a user would, and each rank has a
    hash seed of its own.
    """
    outs = [tmp_path / str(i) for i in range(3)]
    text = tmp_path / "text"
    text.mkdir()
    for name in ("train", "val"):  # little text, so that three runs start soon
        (text / f"{name}.txt").write_text("".join(chr(97 + i * i * (i >> 3) % 26) for i in range(3000)))
    flags = [*EP2, *NOISY, "--data.path", str(text), "--data.val-fraction", "0.5"]
    for out, late_rank in zip(outs, range(2), strict=False):
        ends = launch(2, late, [*flags, "--out", str(out)], late_rank)
        assert [end.code for end in ends] == [0, 0], ends[0].said
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "train.py", *flags, "--out", str(outs[2])]
    ranks = [
        subprocess.Popen(
            command,
            cwd=Path(train.__file__).parent,
            env=os.environ
            | meet
            | quiet
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONHASHSEED": str(rank + 7)},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(800) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert len(numbers(outs[0], 0)) == 8
    assert numbers(outs[0], 0) == numbers(outs[1], 0) == numbers(outs[2], 0)


# ---- 20: golden losses ----

# float.hex of the losses of `test_20_golden_losses`. The keys are what may rightly change them:
# the torch release and the CPU's instructions.
GOLDEN = {
    ("2.13.0+cpu", "AVX512", "x86_64"): (
        "0x1.6982f20000000p+2 0x1.5e045e0000000p+2 0x1.52bab40000000p+2 0x1.46adc40000000p+2 "
        "0x1.3ea6a20000000p+2 0x1.2b2de80000000p+2 0x1.2464e40000000p+2 0x1.215aca0000000p+2"
    ).split(),
}


@pytest.mark.slow
def test_20_golden_losses(tmp_path, gloo):
    """A change of the code that changes one bit of any loss must say so here."""
    here = (torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine())
    if here not in GOLDEN:
        pytest.skip(f"no golden losses for {here}")
    text = tmp_path / "text"
    text.mkdir()
    for name in ("train", "val"):  # not the interpreter's library, which changes with its version
        (text / f"{name}.txt").write_text("".join(chr(97 + i * i * (i >> 3) % 26) for i in range(3000)))
    flags = [*EP2, *NOISY, "--train.dtype", "fp32", "--data.path", str(text), "--data.val-fraction", "0.5"]
    gloo(2, run, [*flags, "--out", str(tmp_path / "run"), "--checkpoint.mode", "off"])
    assert [line["loss"].hex() for line in lines(tmp_path / "run")] == GOLDEN[here]


# ---- 21, 23, 24: numbers that must not spread ----


def poison(rank: int, world: int, argv: list[str], steps: list[int]) -> dict:
    """Rank 1's shard of one expert gradient is NaN in these steps.

    Returns the states around the first of them, and what ended the run.
    """
    trainer = start(rank, world, argv)
    seen = {}
    original = trainer.forward_backward

    def forward_backward(batch, totals):
        seen[trainer.step] = whole(trainer)
        loss = original(batch, totals)
        if rank == 1 and trainer.step in steps:
            next(p for n, p in trainer.model.named_parameters() if "gate_up" in n).grad.to_local()[0, 0] = (
                float("nan")
            )
        return loss

    trainer.forward_backward = forward_backward
    error = None
    try:
        with trainer.metrics:
            trainer.train()
    except RuntimeError as caught:
        error = str(caught)
    return dict(seen=seen, end=whole(trainer), error=error, skipped=trainer.guard.total)


def test_21_nan_gradient_on_one_rank(tmp_path, gloo):
    """All ranks skip the step together and no bit changes; the next clean step is taken."""
    flags = [*EP2, "--out", str(tmp_path), "--checkpoint.mode", "off", "--optim.ema", "0.9"]
    results = gloo(2, poison, [*flags, "--model.moe.choice-bias"], [3])
    for result in results:
        assert result["error"] is None and result["skipped"] == 1
        assert_equal_state(result["seen"][3], result["seen"][4])
        assert "ema.embedding.weight" in result["end"]
        assert not torch.equal(*(result["seen"][s]["model.embedding.weight"] for s in (4, 5)))
        assert all(t.isfinite().all() for t in result["end"].values())
    assert [r["skipped"] for r in lines(tmp_path)] == [0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.slow
def test_21_nan_in_every_step_ends_the_run(tmp_path, gloo):
    """After three in a row every rank raises the same error; nothing was published after the first."""
    flags = [*EP2, "--out", str(tmp_path), "--optim.max-skips", "3", "--checkpoint.every", "2"]
    results = gloo(2, poison, flags, [2, 3, 4, 5, 6])
    for result in results:
        assert "step 5" in result["error"] and "3 times in a row" in result["error"]
        assert_equal_state(result["seen"][2], result["end"])
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step-2"}


def broken(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    """Rank 1's part of one weight becomes NaN after step 4, as a flipped bit would make it.

    The run is told to stop soon after.
    """
    trainer = start(rank, world, argv)
    said = io.StringIO()
    original = trainer.forward_backward

    def forward_backward(batch, totals):
        if rank == 1 and trainer.step == 4:
            dict(trainer.model.named_parameters())["blocks.1.ffn_norm.weight"].data.to_local()[0] = float(
                "nan"
            )
        trainer.run.stop = trainer.step >= 5
        return original(batch, totals)

    trainer.forward_backward = forward_backward
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended, trainer.metrics:
        trainer.train()
    return ended.value.code, said.getvalue()


@pytest.mark.slow
def test_21_weights_that_hold_nan_are_never_published(tmp_path, gloo):
    """Not even by the last save of a run that is told to stop.

    That save would push out the only step from which the run can go on.
    """
    flags = [*EP2, "--out", str(tmp_path), "--checkpoint.every", "2", "--checkpoint.keep", "1"]
    (code, said), (other, quiet) = gloo(2, broken, flags)
    assert code == other == 2 and not quiet
    assert "NaN or infinity in model.blocks.1.ffn_norm.weight: start from another checkpoint" in said
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-4"]


def all_skipped(rank: int, world: int, argv: list[str], folder: Path) -> tuple[int, str]:
    train.all_finite = lambda *values: torch.zeros(())
    with (folder / f"said-{rank}").open("w+") as said:
        with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
            train.main(argv)
        said.seek(0)
        return ended.value.code, said.read()


@pytest.mark.slow
def test_21_the_end_by_skipped_steps_is_one_line(tmp_path, gloo):
    flags = [*EP2, "--out", str(tmp_path / "run"), "--optim.max-skips", "2", "--optim.lr", "1e-3"]
    (code, said), (other, quiet) = gloo(2, all_skipped, flags, tmp_path)
    assert code == other == 2 and "Traceback" not in said + quiet and "error" not in quiet
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        "error: step 2: loss or gradient norm was not finite 2 times in a row (--optim.max-skips=2)"
    )
    assert [line["skipped"] for line in lines(tmp_path / "run")] == [1, 2], (
        "the step that ends the run is told of as well"
    )
    assert "step 2: loss " in said


def spiking(rank: int, world: int, argv: list[str]) -> None:
    """Rank 1's loss is 10,000 times as large in step 10."""
    trainer = start(rank, world, argv)

    def enlarge(model, args, loss):
        if rank == 1 and trainer.step == 10:
            model.task_loss = model.task_loss * 1e4
            return loss * 1e4

    trainer.model.register_forward_hook(enlarge)
    finish(trainer)


@pytest.mark.slow
def test_22_loss_spike(tmp_path):
    """Step, rank and samples are logged once.

    A run that is resumed shortly before the spike says and does the same, bit for bit.
    """
    flags = [*EP2, "--steps", "12", "--checkpoint.every", "9"]
    straight = [*flags, "--out", str(tmp_path / "a")]
    out = tmp_path / "b"
    step9 = str(tmp_path / "a/checkpoints/step-9")
    said = []
    for argv in (straight, [*flags, "--out", str(out), "--resume", step9]):
        ends = launch(2, spiking, argv)
        assert [end.code for end in ends] == [0, 0], ends[0].said
        said.append([line for line in ends[0].said.splitlines() if " highest on " in line])
        assert "highest on rank" not in ends[1].said
    assert len(said[0]) == 1 and said[0] == said[1]
    assert said[0][0].startswith("step 11: loss ") and "highest on rank 1 with " in said[0][0]
    # two ranks of two sequences: step 10 begins at sample 40
    assert said[0][0].endswith(": samples [42, 43]")
    assert numbers(out, 9) == numbers(tmp_path / "a", 9)
    log = lines(tmp_path / "a")
    assert log[10]["loss"] > 1000 * log[9]["loss"] and log[11]["skipped"] == 0  # clipped, and taken


def ignoring(rank: int, world: int, argv: list[str], ranks: list[int]) -> list[dict]:
    """In step 3 these ranks have no target at all."""
    trainer = start(rank, world, argv)
    seen = {}
    original, agree = trainer.forward_backward, trainer.agree
    blank = lambda batch: batch._replace(targets_ABS=torch.full_like(batch.targets_ABS, IGNORE))  # noqa: E731

    def forward_backward(batch, totals):
        seen[trainer.step] = whole(trainer)
        if trainer.step == 3:
            batch = blank(batch) if rank in ranks else batch
            seen["targets"] = totals.targets.item()
        loss = original(batch, totals)
        grads = {n: p.grad.full_tensor() for n, p in trainer.model.named_parameters()}
        seen["grads", trainer.step] = max(g.abs().max().item() for n, g in grads.items() if "router" not in n)
        return loss

    trainer.agree = lambda batch: agree(blank(batch) if trainer.step == 3 and rank in ranks else batch)
    trainer.forward_backward = forward_backward
    with trainer.metrics:
        trainer.train()
    return seen


@pytest.mark.parametrize("ranks", slow_but([[1]], [[1], [0, 1]]), ids=["one rank", "all ranks"])
def test_23_all_labels_ignored(tmp_path, gloo, ranks):
    """Loss and metrics stay finite, and the mean is over the targets that exist.

    In a step without any target the update is weight decay alone.
    """
    coeffs = (
        "--model.moe.balance-coeff 0 --model.moe.z-coeff 0 --optim.weight-decay 0 --optim.betas 0 0".split()
    )
    flags = [*EP2, *coeffs, "--out", str(tmp_path), "--checkpoint.mode", "off"]
    results = gloo(2, ignoring, flags, ranks)
    log = lines(tmp_path)[3]
    assert log["loss"] is not None and log["grad_norm"] is not None and log["skipped"] == 0
    if ranks == [1]:
        assert 0 < results[0]["targets"] <= 2 * 32 and 0 < log["loss"] < 10
    else:
        assert log["loss"] == 0.0 and log["grad_norm"] == 0.0
        assert all(result["grads", 3] == 0.0 for result in results)
        for name, tensor in results[0][3].items():
            if name.startswith("model."):
                assert torch.equal(tensor, results[0][4][name]), name


def crowded(rank: int, world: int, argv: list[str]) -> tuple[float, dict[str, torch.Tensor]]:
    """Every token of every rank goes to experts 0 and 1, which rank 0 of each expert group holds.

    Returns the seconds that it took and the first gradients.
    """
    trainer = start(rank, world, argv)
    grads = {}

    def force(router, args, routing):
        first_two = torch.arange(2, dtype=torch.int32).expand_as(routing.ids_TK)
        return routing._replace(ids_TK=first_two, weights_TK=routing.logits_TE.softmax(-1)[:, :2])

    for module in trainer.model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(force)
    original = trainer.forward_backward

    def forward_backward(batch, totals):
        loss = original(batch, totals)
        if trainer.step == 0:
            grads.update((n, p.grad.full_tensor().clone()) for n, p in trainer.model.named_parameters())
        return loss

    trainer.forward_backward = forward_backward
    began = time.monotonic()
    with trainer.metrics:
        trainer.train()
    return time.monotonic() - began, grads


@pytest.mark.slow
def test_24_all_tokens_to_the_first_rank(tmp_path, gloo):
    """Ranks whose experts get no token still take part in every collective.

    Gradients and numbers are those of one process.
    """
    flags = [*SMALL, "--steps", "2", "--checkpoint.mode", "off", "--train.dtype", "fp32"]
    spread_out, alone_out = tmp_path / "4", tmp_path / "1"
    spread = gloo(4, crowded, [*flags, "--parallel.ep", "2", "--train.batch", "1", "--out", str(spread_out)])
    alone = gloo(1, crowded, [*flags, "--train.batch", "4", "--out", str(alone_out)])
    assert max(seconds for seconds, _ in spread) < shared(5)
    for name, grad in alone[0][1].items():
        assert (spread[0][1][name] - grad).norm() <= 1e-5 * grad.norm(), name
    for ours, theirs in zip(lines(spread_out), lines(alone_out), strict=True):
        assert all(counts[2:] == [0, 0] for counts in ours["expert_counts"]), "the router was not forced"
        assert ours["expert_counts"] == theirs["expert_counts"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
