"""A run from its first step to its checkpoint, stopped and resumed: the same numbers.

They are the same bit for bit where nothing moved.
"""

import contextlib
import gc
import io
import json
import os
import re
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
from runs import NOISY, SMALL, assert_equal_state, begin, changes, lines, load, numbers, run
from tiers import slow_but

import train
from tmoe.checkpoint.plans import plan_reshard
from tmoe.checkpoint.rewrite import rewrite
from tmoe.cli.parse import parse
from tmoe.config.axes import ALONE
from tmoe.run import process as runtime
from tmoe.run import profile


@pytest.fixture(scope="module")
def eight_steps(gloo, tmp_path_factory):
    """The folder and the final state of a run of one process. Tests that write into the folder copy it."""
    folder = tmp_path_factory.mktemp("eight-steps")
    return folder, gloo(1, run, [*SMALL, "--train.batch", "2", "--out", str(folder)])[0]


@pytest.fixture(scope="module")
def two_steps(gloo, tmp_path_factory):
    """The folder of a run of two steps, which is over. Tests copy it."""
    folder = tmp_path_factory.mktemp("two-steps")
    gloo(1, run, [*SMALL, "--optim.warmup", "1", "--out", str(folder), "--steps", "2"])
    return folder


ON_TWO = ["--parallel.ep", "2", "--train.batch", "2"]


@pytest.fixture(scope="module")
def straight(gloo, tmp_path_factory):
    """The folder and the final state of a run of two processes, saved every third step. Tests only read."""
    folder = tmp_path_factory.mktemp("straight")
    flags = [*SMALL, "--checkpoint.every", "3", "--checkpoint.keep", "0", "--out", str(folder), *ON_TWO]
    return folder, gloo(2, run, flags)[0]


def test_run_folder(gloo, tmp_path):
    """The run folder has the promised files, and they describe the training."""
    flags = [
        "--out",
        str(tmp_path),
        "--parallel.ep",
        "2",
        "--train.batch",
        "2",
        "--checkpoint.every",
        "4",
        "--log.tensorboard",
        "--log.report",
    ]
    gloo(2, run, [*SMALL, *flags])
    log = lines(tmp_path)
    assert [r["step"] for r in log] == list(range(1, 9))
    keys = (
        "step loss grad_norm lr tokens_per_s tflops mfu peak_gib expert_counts max_violation entropy dropped"
    )
    assert set(keys.split()) <= log[0].keys()
    routed = 2 * 2 * 32 * 2  # ranks * batch * seq * K
    assert all(sum(counts) == routed for r in log for counts in r["expert_counts"])
    assert [r["step"] for r in log if r.get("val_loss")] == [8] and log[-1]["loss"] < log[0]["loss"]
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step-4", "step-8"}
    assert json.loads((tmp_path / "config.json").read_text())["config"]["parallel"]["ep"] == 2
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert list(tmp_path.rglob("events.out.tfevents*"))


@pytest.mark.parametrize("mode", slow_but(["async"], ["sync", "async"]))
def test_resume_same_layout_is_bitwise(gloo, tmp_path, mode):
    """N+N steps equal 2N in every loss and every bit of the state.

    With dropout, jitter, EMA, accumulation and ep=2.
    """
    flags = [
        *SMALL,
        *NOISY,
        "--parallel.ep",
        "2",
        "--train.batch",
        "2",
        "--train.accumulate",
        "2",
        "--checkpoint.every",
        "4",
    ]
    flags += ["--checkpoint.mode", mode]
    straight = gloo(2, run, [*flags, "--out", str(tmp_path / "a")])
    resumed = gloo(
        2,
        run,
        [*flags, "--out", str(tmp_path / "b"), "--resume", str(tmp_path / "a/checkpoints/step-4")],
    )
    assert len(numbers(tmp_path / "b", 0)) == 4, "the second run did not start at step 4"
    assert numbers(tmp_path / "b", 4) == numbers(tmp_path / "a", 4)
    assert_equal_state(straight[0], resumed[0])


@pytest.mark.slow
def test_resume_on_other_layouts(gloo, tmp_path, straight):
    """Saved by 2 processes at ep=2; loaded by 4 (dp2 x ep2), by 1, and by 2 at dp=2.

    The bits are equal, and the next losses agree.
    """
    flags = [*SMALL, "--checkpoint.every", "3", "--checkpoint.keep", "0"]
    step3 = str(straight[0] / "checkpoints/step-3")
    saved = gloo(2, load, [*flags, *ON_TWO, "--out", str(tmp_path / "x"), "--resume", step3])[0]
    for world, ep, batch, accumulate in [(4, 2, 1, 1), (1, 1, 2, 2), (2, 1, 2, 1)]:
        out = tmp_path / f"w{world}ep{ep}"
        argv = [*flags, "--out", str(out), "--resume", step3, "--parallel.ep", str(ep)]
        argv += ["--train.batch", str(batch), "--train.accumulate", str(accumulate)]
        assert_equal_state(gloo(world, load, argv)[0], saved)
        gloo(world, run, argv)
        for ours, theirs in zip(lines(out), lines(straight[0])[3:], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_experts_without_a_gate_resume_on_another_layout(gloo, tmp_path):
    """Saved by 2 processes at ep=2, loaded by one: experts of one matrix fewer, bit for bit."""
    flags = [*SMALL, "--model.moe.activation", "relu2", "--model.moe.bias", "--checkpoint.every", "2"]
    flags += ["--steps", "4"]
    two = [*flags, "--parallel.ep", "2", "--train.batch", "2"]
    gloo(2, run, [*two, "--out", str(tmp_path / "a")])
    step = ["--resume", str(tmp_path / "a/checkpoints/step-2"), "--out", str(tmp_path / "b")]
    saved, one = gloo(2, load, [*two, *step]), gloo(1, load, [*flags, *step, "--train.batch", "4"])
    assert_equal_state(one[0], saved[0])
    shapes = {tuple(t.shape) for name, t in one[0].items() if name.endswith("experts.gate_up")}
    assert (4, 32, 32) in shapes


def next_samples(rank: int, world: int, argv: list[str]) -> list[list[int]]:
    """Global samples that this rank reads in the two steps after the resume."""
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    size = dict(batch=cfg.train.batch, accumulate=cfg.train.accumulate, rank=rank, world=world)
    return [trainer.data.indices(trainer.step + i, **size) for i in range(2)]


def test_another_global_batch_goes_on_with_the_next_sample(gloo, tmp_path):
    """Two ranks read 4 samples a step; after step 3 the run is resumed with 2 or 6 a step.

    The 13th sample comes next: none is read twice, none is left out.
    """
    flags = [*SMALL, "--checkpoint.every", "3", "--train.batch", "2", "--out", str(tmp_path / "a")]
    gloo(2, run, flags, 2)
    step3 = ["--resume", str(tmp_path / "a/checkpoints/step-3")]
    other = [*flags, "--out", str(tmp_path / "b"), *step3]
    assert gloo(1, next_samples, other)[0] == [[12, 13], [14, 15]]
    ranks = gloo(2, next_samples, [*other, "--train.batch", "3"])
    assert [sorted(ranks[0][i] + ranks[1][i]) for i in range(2)] == [list(range(12, 18)), list(range(18, 24))]
    assert [r[0] for r in gloo(2, next_samples, other)] == [[12, 13], [14, 15]]


@pytest.mark.slow
def test_sigterm_on_one_rank_saves_and_resumes(gloo, tmp_path, straight):
    """All ranks stop at the same boundary and the step is saved.

    `--resume auto` continues with the same numbers.
    """
    flags = [*SMALL, *ON_TWO]
    gloo(2, run, [*flags, "--out", str(tmp_path / "b")], 3)
    stopped = max(r["step"] for r in lines(tmp_path / "b"))
    assert stopped in (4, 5)
    assert (tmp_path / f"b/checkpoints/step-{stopped}").is_dir()
    resumed = gloo(2, run, [*flags, "--out", str(tmp_path / "b")])
    assert_equal_state(straight[1], resumed[0])
    assert numbers(tmp_path / "b", 0) == numbers(straight[0], 0)


def stopped_in_validation(rank: int, world: int, argv: list[str], last_step: int) -> tuple[int, bool, bool]:
    """How many validation batches were read, and the state of the step before when they began.

    That is whether it was saved and had its line.
    """
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    read = []
    there = []
    told = []
    batch = trainer.val_data.batch

    def batch_then_stop(i, **shape):
        there.append((Path(cfg.out) / f"checkpoints/step-{last_step}/manifest.json").exists())
        told.append(lines(Path(cfg.out))[-1]["step"] == trainer.step)
        read.append(i)
        if i == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(i, **shape)

    trainer.val_data.batch = batch_then_stop
    with trainer.metrics:
        trainer.train()
    return len(read), all(there), all(told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, last, saved", [("--train.eval-every 2", 2, "step-3"), ("--steps 3", 3, "step-3")]
)
def test_a_long_validation_holds_up_neither_a_stop_nor_the_last_checkpoint(
    gloo, tmp_path, flags, last, saved
):
    """torchrun kills what still runs after 30 s.

    So a validation is left at its next batch, and the last step is saved before it.
    """
    flags = [*SMALL, "--out", str(tmp_path), "--train.eval-batches", "5000", *flags.split()]
    for read, there, told in gloo(2, stopped_in_validation, flags, last):
        assert read <= 3 and there == (saved == f"step-{last}") and told
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [saved]
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3]
    assert not any("val_loss" in r for r in lines(tmp_path))


@pytest.mark.parametrize("times", slow_but([1], [1, 2]))
def test_ctrl_c_saves_and_a_second_one_ends_at_once(tmp_path, times):
    """The second one arrives in the step in which the first did, and that step never ends."""
    program = f"""if True:
        import os, signal, sys, train
        # a shell's background job is started without it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        step = train.Trainer.forward_backward
        def interrupted(trainer, *args):
            if trainer.step == 2:
                for _ in range({times}):
                    os.kill(os.getpid(), signal.SIGINT)
            return step(trainer, *args)
        train.Trainer.forward_backward = interrupted
        train.main(sys.argv[1:])"""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    done = forked.run(["-c", program, *SMALL, "--out", tmp_path], env=environment)
    assert "Ctrl-C: this step is finished and saved; a second one ends without saving" in done.stderr
    if times == 2:
        assert done.returncode == -signal.SIGINT and not list(tmp_path.glob("checkpoints/step-*"))
        return
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    (step,) = (tmp_path / "checkpoints").iterdir()
    assert step.name in ("step-3", "step-4")


def test_init_takes_weights_only(gloo, tmp_path, eight_steps):
    flags = [*SMALL, "--train.batch", "2"]
    folder, first = eight_steps
    step8 = str(folder / "checkpoints/step-8")
    fresh = gloo(1, load, [*flags, "--out", str(tmp_path / "b"), "--init", step8])[0]
    for name, tensor in fresh.items():
        if name.startswith("model."):
            assert torch.equal(tensor, first[name]), name
        else:
            assert not tensor.any(), name
    averaged = gloo(1, load, [*flags, "--out", str(tmp_path / "c"), "--init", step8, "--optim.ema", "0.9"])[0]
    starts = {name: tensor for name, tensor in averaged.items() if name.startswith("ema.")}
    assert starts and all(torch.equal(t, first[name.replace("ema.", "model.")]) for name, t in starts.items())


def test_resuming_with_other_settings_says_which(gloo, tmp_path):
    flags = [*SMALL, "--train.batch", "2", "--out", str(tmp_path)]
    gloo(1, run, flags, 2)
    (step,) = (tmp_path / "checkpoints").iterdir()
    other = [*flags, "--eval-only", "--data.seed", "9", "--optim.weight-decay", "0.2", "--init", str(step)]
    done = forked.run(["train.py", *other])
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0 and "; --data.seed=9 (was 0); --optim.weight-decay=0.2 (was " in said, said
    assert f"; --init={step}: not read, because {step} is resumed" in said


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_has_all_its_steps_says_so(gloo, tmp_path, two_steps, steps):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    flags = [*SMALL, "--optim.warmup", "1", "--out", str(tmp_path)]
    said = (
        f"nothing to do: --steps={steps}, and {tmp_path / 'checkpoints/step-2'} has 2 of them; "
        "name more to continue"
    )
    assert gloo(1, changes, [*flags, "--steps", str(steps)])[0] == [said]
    assert gloo(1, changes, [*flags, "--steps", str(steps), "--eval-only"])[0] == []
    assert gloo(1, changes, [*flags, "--steps", "3"])[0] == ["--steps=3 (was 2)"]


def test_eval_only_agrees_with_the_run(gloo, tmp_path, eight_steps):
    shutil.copytree(eight_steps[0], tmp_path, dirs_exist_ok=True)
    flags = [*SMALL, "--train.batch", "2", "--out", str(tmp_path)]
    done = forked.run(["train.py", *flags, "--eval-only"])
    assert done.returncode == 0, done.stderr
    assert f"validation loss {lines(tmp_path)[-1]['val_loss']:.4f}" in done.stdout + done.stderr
    assert all(name.startswith("model.") for name in gloo(1, load, [*flags, "--eval-only"])[0]), "no moments"
    code, said = gloo(1, begin, [*flags, "--out", str(tmp_path / "none"), "--eval-only"])[0]
    assert code == 2 and re.search(
        r"--eval-only: no checkpoint in --out=.*none; name --init, a run folder or --resume STEP", said
    )


def test_validation_does_not_depend_on_the_layout(gloo, tmp_path):
    """Equal global batches have the same number of sequences, and the same sequences."""
    losses = []
    for world, batch, accumulate in ((1, 4, 1), (2, 1, 2), (2, 2, 1)):
        out = tmp_path / f"{world}-{batch}"
        sizes = ["--train.batch", str(batch), "--train.accumulate", str(accumulate), "--train.dtype", "fp32"]
        gloo(world, run, [*SMALL, *sizes, "--steps", "2", "--out", str(out)])
        losses.append(lines(out)[-1]["val_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("tiny --model.moe.top-k 9", r"--model\.moe\.top-k=9.*--model\.moe\.experts=8"),
        ("tiny --parallel.ep 3", r"--parallel\.ep=3.*--model\.moe\.experts=8.*1, 2, 4, 8"),
        ("tiny --parallel.ep 2", r"--parallel\.ep=2.*world of 1"),
        ("tiny --parallel.dp 3", r"--parallel\.dp=3.*world of 1"),
        ("tiny --train.seq 4096", r"--train\.seq=4096.*--model\.rope\.max-seq=1024"),
        ("tiny --model.kv-heads 4", r"--model\.kv-heads=4.*--model\.heads=6"),
        ("huge", r"preset 'huge'.*tiny, moe-pilot-14b"),
        ("tiny --parallel.dispatch local --parallel.ep 2", r"--parallel\.dispatch=local.*auto or nccl"),
        ("tiny --model.layers 0", r"--model\.layers=0: must be at least 1"),
        ("tiny --model.dense-layers 4 --parallel.ep 2", r"--parallel\.ep=2.*without MoE layers"),
        ("tiny --world 4", r"--world=4: only for --dry-run"),
        ("tiny --dry-run --world -4", r"--world=-4: must be at least 1"),
        ("tiny --optim.lr inf", r"--optim\.lr=inf: must be positive and finite"),
        ("tiny --optim.eps 0", r"--optim\.eps=0\.0: must be positive and finite"),
        ("tiny --optim.eps 1e-50", r"--optim\.eps=1e-50: must be positive and finite in float32"),
        ("tiny --optim.lr 1e308", r"--optim\.lr=1e\+308: must be positive and finite in float32"),
        ("tiny --compile no", r"--compile=no: must be true or false"),
        ("tiny --no-compile=false", r"--no-compile=false: takes no value; --compile does, true or false"),
        (
            "tiny --optim.betas 0.9 0.99999999999",
            r"--optim\.betas=.*: each at least 0 and below 1 in float32",
        ),
        ("tiny --optim.ema 0.99999999999", r"--optim\.ema=.*: must be at least 0 and below 1"),
        ("tiny --log.progress=1", r"--log\.progress=1: must be true or false"),
        ("tiny --optim.weight-decay nan", r"--optim\.weight-decay=nan: must be a number"),
        ("tiny --optim.weight-decay inf", r"--optim\.weight-decay=inf: must be at least 0 and finite"),
        ("tiny --model.moe.scaling 0", r"--model\.moe\.scaling=0\.0: must be positive"),
        ("tiny --model.norm-eps -1", r"--model\.norm-eps=-1\.0: must be at least 0"),
        (
            "tiny --model.rope.beta-slow 40",
            r"--model\.rope\.beta-slow=40\.0: .*below --model\.rope\.beta-fast=32\.0",
        ),
        ("tiny --model.rope.original-max-seq 0", r"--model\.rope\.original-max-seq=0: must be at least 1"),
        ("tiny --seed -1", r"--seed=-1: must be at least 0 and at most 2147483647"),
        ("tiny --out /dev/null/run", r"--out=/dev/null/run: /dev/null must be a folder that can be written"),
        ("tiny --profile -1", r"--profile=-1: must be numbers of steps"),
        (
            "tiny --steps 5 --profile 3 6",
            r"--profile=3 6: must be numbers of steps, from 1 to --steps=5",
        ),
        ("tiny --eval-only --profile 3", r"--profile=3: a run without steps has none"),
        ("tiny --model.rope.factor 8", r"--model\.rope\.factor=8\.0: needs --model\.rope\.scaling"),
        (["tiny", "--out", ""], r"--out='': must not be empty"),
        (["tiny", "--init", ""], r"--init='': must not be empty"),
        (["tiny", "--data.path", ""], r"--data\.path='': needs at least one source, and no empty one"),
        (
            "tiny --parallel.dispatch symm",
            r"--parallel\.dispatch=symm: needs --parallel\.ep above 1.*auto or local",
        ),
        ("tiny --log.wandb p", r"--log\.wandb=p: needs the package wandb, which is not installed"),
        (
            "tiny --model.layers 1000000000",
            r"--model\.layers=1000000000: must be at least 1 and at most 4096",
        ),
        (f"tiny --model.dim {10**30}", r"--model\.dim=10{30}: must be at least 1 and at most 1048576"),
        (f"tiny --steps {10**400}", r"--steps=1[0 ]+: must be at least 0 and at most 2147483647"),
        (
            "tiny --dry-run --world 1000000000000",
            r"--world=1000000000000: must be at least 1 and at most 65536",
        ),
        (
            "tiny --train.batch 2147483647",
            r"--train\.batch=2147483647 x .* tokens a rank in a step; must be below",
        ),
    ],
)
def test_invalid_settings_are_one_error(argv, says, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(SystemExit) as error:
        parse(argv.split() if isinstance(argv, str) else argv, "")
    printed = capsys.readouterr()
    text = f"{error.value} {printed.out} {printed.err}"
    text = " ".join(re.sub(r"[│╭╮╰╯─\n]", " ", text).split())
    assert re.search(says, text), text
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", "{", "config.json: no config.json of a run"),
        ("config.json", "[]", "config.json: no config.json of a run"),
        ("config.json", '{"starts": [3]}', "config.json: no config.json of a run"),
        ("config.json", None, "Is a directory: "),
        ("metrics.jsonl", None, "Is a directory: "),
        ("checkpoints", "", "checkpoints must be a folder that can be written"),
    ],
)
def test_a_run_folder_that_cannot_go_on_is_one_line(gloo, tmp_path, file, content, says):
    """Before step 0 and on every rank, though only rank 0 writes there."""
    (tmp_path / file).mkdir() if content is None else (tmp_path / file).write_text(content)
    (code, said), (other, quiet) = gloo(2, begin, [*SMALL, "--out", str(tmp_path)])
    assert code == other == 2 and says in said and not quiet
    assert sum(line.startswith(("error: ", "rank")) for line in said.splitlines()) == 1


def bad_data(rank: int, world: int, path: str) -> tuple[int, str]:
    cfg = parse([*SMALL, "--data.path", path if rank == 1 else "stdlib"], "", rank=rank, world=world)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            train.Trainer(cfg, runtime.start(cfg.seed))
        except SystemExit as error:
            return error.code, said.getvalue()
    return 0, ""


@pytest.mark.parametrize("kept", [True, False])
def test_resume_with_another_kind_of_state_is_one_line(gloo, tmp_path, kept):
    """An average that is switched off or on, or weights alone: one hint, not a line for each tensor."""
    flags = [*SMALL, "--steps", "1", "--out", str(tmp_path / "run")]
    ema = ["--optim.ema", "0.9"]
    gloo(1, run, flags + ema * kept)
    (code, said), (other, quiet) = gloo(2, begin, flags + ema * (not kept))
    assert code == other == 2 and said.count("\n") == 1 and not quiet
    step = tmp_path / "run/checkpoints/step-1"
    if kept:
        assert said.startswith(
            f"error: --optim.ema=0.0: {step} holds an average of the weights; keep the setting"
        )
        rewrite(plan_reshard(step, ALONE, only=["model"]), tmp_path / "weights")
        (code, said), _ = gloo(2, begin, [*flags, "--resume", str(tmp_path / "weights")])
        assert (
            code == 2 and said.count("\n") == 1 and f"{tmp_path / 'weights'} holds no optimizer state" in said
        )
    else:
        assert said.startswith(
            f"error: --optim.ema=0.9: {step} holds no average of the weights; resume with --optim.ema 0"
        )
    assert f"--init {step}" in said or kept


def test_bad_input_on_one_rank_ends_all(gloo, tmp_path):
    """Before step 0, on every rank, one message that names the rank and the file."""
    first, second = gloo(2, bad_data, str(tmp_path / "absent"))
    assert first[0] == second[0] == 2
    assert re.search(r"rank \[1\]: .*absent", first[1]) and not second[1]


def test_what_start_up_made_is_collected_again_behind_training():
    with pytest.raises(KeyError), profile.collecting():
        graphs = profile.GraphCounter()
        for phase in ("train", "train", "validate"):
            graphs.passed(phase)
        assert gc.get_freeze_count() > 1000
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_no_compiler_runs_eager_and_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(runtime, "has_compiler", lambda: False)
    seen = {}

    class Stop(Exception):
        pass

    def trainer(cfg, run):
        seen["compile"] = cfg.compile
        raise Stop

    monkeypatch.setattr(train, "Trainer", trainer)
    monkeypatch.setattr(
        runtime, "start", lambda *_: SimpleNamespace(watch=nullcontext(), refusing=lambda *_: nullcontext())
    )
    with pytest.raises(Stop):
        train.main([w for w in SMALL if w != "--no-compile"])
    assert seen["compile"] is False
    assert capsys.readouterr().err.strip() == "no C++ compiler found: running eager (--no-compile)"


def test_has_compiler_looks_for_one():
    import torch._inductor.config as inductor

    assert runtime.has_compiler(), "this machine's tests need a C++ compiler"
    with inductor.patch({"cpp.cxx": ("/nowhere/g++",)}):
        runtime_compiler_cache_clear()
        assert not runtime.has_compiler()
    runtime_compiler_cache_clear()


def runtime_compiler_cache_clear() -> None:
    from torch._inductor.cpp_builder import cpp_compiler_search

    cpp_compiler_search.cache_clear()


def test_help_documents_every_field(capsys):
    with pytest.raises(SystemExit):
        parse(["--help-all"], train.__doc__)
    text = capsys.readouterr().out
    flags = re.findall(r"--[a-z][a-z.-]+", text)
    always = "--out --steps --train.batch --train.seq --train.accumulate --parallel.dp --parallel.ep"
    for flag in always.split():
        assert flag in flags
    seldom = (
        "--parallel.dispatch --compile --checkpoint.every --resume --init --eval-only --profile --dry-run"
    )
    for flag in seldom.split():
        assert flag in flags


@pytest.mark.parametrize(
    "preset",
    slow_but(
        lambda name: name not in ("kimi-k2", "glm-4.7-flash"),
        "moe-pilot-14b mixtral-8x7b qwen3-30b-a3b olmoe-1b-7b gpt-oss-20b deepseek-v3 tiny kimi-k2 "
        "glm-4.7-flash".split(),
    ),
)
def test_dry_run_needs_no_processes(preset):
    done = forked.run(["train.py", preset, "--dry-run", "--world", "8", "--parallel.ep", "4"])
    assert done.returncode == 0, done.stderr
    for word in (
        "total",
        "active",
        "placement",
        "_StridedShard(dim=0, sf=4), Shard(dim=0)",
        "moments",
        "activations",
    ):
        assert word in done.stdout, done.stdout
