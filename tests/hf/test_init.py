"""Starting from other weights: another model is refused on every rank, tuned weights can go back.

They go back into the original's layout.

next: test_hf_start.py
"""

import contextlib
import io
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_tiny import SIZES, others_of, saved, tensors_of
from runs import changes, lines, whole
from starts import FLAGS, train_two_steps
from tiers import slow_but
from transformers import AutoModelForCausalLM

import train
from tmoe import hf
from tmoe.checkpoint import tools as offline
from tmoe.checkpoint.errors import CheckpointError
from tmoe.cli.parse import parse
from tmoe.config.compare import build_config
from tmoe.hf.config import read_config
from tmoe.run import process as runtime
from tmoe.run import start


def begin(rank: int, world: int, runs: list[list[str]]) -> list[tuple[int, str, bool]]:
    """For each command line: exit code, what was said, whether a weight changed before the end."""
    results = []
    for argv in runs:
        cfg = parse(argv, "", rank=rank, world=world)
        fresh = {}
        original = train.Trainer.restore
        train.Trainer.restore = lambda self, fresh=fresh, original=original: (
            fresh.update(before=whole(self), trainer=self),
            original(self),
        )
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                code = int(train.Trainer(cfg, runtime.start(cfg.seed)) is None)
            except SystemExit as error:
                code = error.code
        train.Trainer.restore = original
        after = whole(fresh["trainer"])
        changed = any(not torch.equal(tensor, after[name]) for name, tensor in fresh["before"].items())
        results.append((code, said.getvalue(), changed))
    return results


@pytest.fixture
def flags(tmp_path) -> list[str]:
    (tmp_path / "text").mkdir()
    for name in ("train", "val"):
        (tmp_path / f"text/{name}.txt").write_text(
            "".join(chr(97 + i * i * (i >> 3) % 26) for i in range(2000))
        )
    return [*FLAGS, "--data.path", str(tmp_path / "text"), "--data.val-fraction", "0.5"]


OTHER = {  # the shapes are the same
    "model.moe.top-k": ("1", "moe.top_k: 1 here, 2 there"),
    "model.moe.renormalize": ("false", "moe.renormalize: False here, True there"),
    "model.norm-eps": ("1e-3", "model.norm_eps: 0.001 here, 1e-06 there"),
    "model.rope.theta": ("500", "rope.theta: 500.0 here, 10000.0 there"),
}
SAME = [
    "--model.dropout",
    "0.1",
    "--model.moe.balance-coeff",
    "0.5",
    "--model.rope.max-seq",
    "77",
    "--train.seq",
    "16",
]


@pytest.mark.slow
def test_a_step_of_another_model_is_refused(gloo, tmp_path, flags):
    """One message on rank 0, code 2 on all, nothing loaded; what only training reads may differ."""
    gloo(1, train_two_steps, [*flags, "--out", str(tmp_path / "a")])
    step = str(tmp_path / "a/checkpoints/step-2")
    others = [[f"--{name}", value] for name, (value, _) in OTHER.items()]
    out = ["--out", str(tmp_path / "b"), "--parallel.ep", "2"]
    runs = [[*flags, *out, flag, step, *other] for flag in ("--init", "--resume") for other in others]
    runs += [[*flags, *out, flag, step, *SAME] for flag in ("--init", "--resume")]
    for rank, results in enumerate(gloo(2, begin, runs)):
        for (code, said, changed), (_, words) in zip(results, [*OTHER.values()] * 2, strict=False):
            assert code == 2 and not changed
            assert not said if rank else (f"error: {step} is not this model's" in said and words in said), (
                said
            )
            assert rank or "1 difference\n" in said
        assert [(code, changed) for code, _, changed in results[-2:]] == [(0, True)] * 2


def test_folders_that_cannot_be_started_from(gloo, tmp_path, flags):
    """Damaged, absent, of a dense model, of another Hugging Face model: one message each, no traceback."""
    gloo(1, train_two_steps, [*flags, "--out", str(tmp_path / "a")])
    step = tmp_path / "a/checkpoints/step-2"
    broken = tmp_path / "step-9"
    broken.symlink_to(tmp_path / "copy")
    (tmp_path / "copy").mkdir()
    for file in step.iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    shard = next(broken.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    theirs = saved(tmp_path / "hf", "qwen3_moe")
    cases = {
        ("--init", str(broken)): "distcp: damaged: ",
        ("--resume", str(broken)): "distcp: damaged: ",
        ("--init", str(tmp_path / "none")): "none: no such folder; valid: ",
        ("--init", str(theirs)): "config.json is not this model's: ",
        (
            "--init",
            str(step),
            "--model.dense-layers",
            "2",
            "--parallel.ep",
            "1",
        ): "model.MoE layers: [] here, [0, 1] there",
    }
    runs = [[*flags, "--out", str(tmp_path / "b"), "--parallel.ep", "2", *more] for more in cases]
    first, second = gloo(2, begin, runs)
    for (code, said, changed), words in zip(first, cases.values(), strict=True):
        assert (
            code == 2
            and not changed
            and said.startswith("error: ")
            and words in said
            and "Traceback" not in said
        )
    assert [(code, said) for code, said, _ in second] == [(2, "")] * len(cases)


# ---- fine-tuning and the way back ----


def tune(rank: int, world: int, argv: list[str], hf_dir: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of some tokens before and after two steps from the folder's weights."""
    cfg = parse(argv, "", rank=rank, world=world)
    model_cfg = read_config(json.loads((hf_dir / "config.json").read_text()))
    cfg = replace(cfg, init=str(hf_dir), model=model_cfg)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    tokens = torch.arange(24).view(2, 12) % 29

    def logits():
        with torch.no_grad():
            found = trainer.model(tokens)
        trainer.model.reshard()
        return found

    before = logits()
    with trainer.metrics:
        trainer.train()
    return before, logits()


@pytest.mark.parametrize(
    ("name", "world", "ep"),
    slow_but(
        lambda case: case[1] < 3,
        [
            ("qwen3_moe", 1, 1),
            ("qwen3_moe", 4, 2),
            ("mixtral, tied, wide heads", 2, 2),
            ("olmoe", 3, 3),
            ("qwen3", 2, 1),
        ],
    ),
)
def test_tuned_weights_go_back_into_the_original_layout(gloo, tmp_path, flags, monkeypatch, name, world, ep):
    """Steps from --init HF_DIR on any number of ranks.

    The export has the original's files, and transformers computes from it what the run computed.
    """
    monkeypatch.setitem(SIZES, "vocab_size", 257)
    hf_dir = saved(tmp_path / "hf", name, files=2)
    flags += [
        "--train.batch",
        "2",
        "--model.moe.experts",
        "6",
        "--parallel.ep",
        str(ep),
        "--optim.lr",
        "0.01",
    ]
    flags += ["--out", str(tmp_path / "run")]
    before, after = gloo(world, tune, flags, hf_dir)[0]
    step = tmp_path / "run/checkpoints/step-2"
    hf.export_hf(step, tmp_path / "back")
    offline.main(["reshard", str(step), str(tmp_path / "weights"), "--world", "3", "--only", "model"])
    hf.export_hf(tmp_path / "weights", tmp_path / "again", like=hf_dir)
    theirs, back, again = (tensors_of(tmp_path / folder) for folder in ("hf", "back", "again"))
    assert {n: (t.shape, t.dtype) for n, t in back.items()} == {
        n: (t.shape, t.dtype) for n, t in theirs.items()
    }
    assert others_of(tmp_path / "back") == others_of(hf_dir) == others_of(tmp_path / "again")
    assert all(torch.equal(tensor, again[key]) for key, tensor in back.items())
    tokens = torch.arange(24).view(2, 12) % 29
    for folder, ours in (("hf", before), ("back", after)):
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, experts_implementation="eager")
            want = model(tokens).logits
        assert (ours - want).norm() <= 1e-5 * want.norm(), folder
    assert (after - before).norm() > 1e-3 * before.norm(), "the steps changed nothing"
    other = step.with_name("step-99")  # retention removes it too
    shutil.copytree(step, other)
    for inside in (step / "hf", other / "some/hf"):
        with pytest.raises(CheckpointError, match=r"lies inside .*step-\d+, and would be removed with that"):
            hf.export_hf(step, inside)


@pytest.mark.slow
def test_the_original_is_what_a_run_began_from(gloo, tmp_path, flags, monkeypatch):
    """However the run was started since.

    The export of a later step has the original's files; the export of new weights has no other's files.
    """
    monkeypatch.setitem(SIZES, "vocab_size", 257)
    hf_dir = saved(tmp_path / "hf", "qwen3_moe", files=2)
    sizes = json.dumps(asdict(read_config(json.loads((hf_dir / "config.json").read_text()))))
    for name, first, then in (("tuned", [str(hf_dir)], []), ("new", [], [str(hf_dir)])):
        out = tmp_path / name
        for steps, init in ((1, first), (2, then)):
            argv = [*flags, "--out", str(out), "--train.batch", "2", "--steps", str(steps)]
            gloo(1, train_sized, [*argv, *(["--init", *init] if init else [])], sizes)
        hf.export_hf(out / "checkpoints/step-2", tmp_path / f"{name}-back")
        assert (others_of(tmp_path / f"{name}-back") == others_of(hf_dir)) == (name == "tuned")
    step = tmp_path / "new/checkpoints/step-2"
    again = [
        *flags,
        "--out",
        str(tmp_path / "new"),
        "--train.batch",
        "2",
        "--steps",
        "2",
        "--resume",
        "none",
        "--init",
        str(step),
    ]
    gloo(1, train_sized, again, sizes)  # saves over what it began from
    hf.export_hf(step, tmp_path / "itself")


def train_sized(rank: int, world: int, argv: list[str], model: str) -> None:
    cfg = replace(parse(argv, "", rank=rank, world=world), model=build_config(json.loads(model)))
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    with trainer.metrics:
        trainer.train()


# ---- a run that begins while another is still there ----

HOLD = """if True:
    import fcntl, os, sys
    file = open(sys.argv[1] + "/.lock", "ab")
    fcntl.lockf(file, fcntl.LOCK_EX)
    print(flush=True)
    if sys.stdin.readline():
        os.rename(sys.argv[1] + "/saving", sys.argv[1] + "/checkpoints")
"""


def overlapping(rank: int, world: int, argv: list[str], out: Path) -> list:
    """A run whose folder another process holds.

    For too long, or until that process has saved its last step.
    """
    found = []
    if rank == 0:
        (out / "checkpoints").rename(out / "saving")
        child = subprocess.Popen(
            [sys.executable, "-c", HOLD, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        child.stdout.readline()
    dist.barrier()
    before = {path.name: path.read_bytes() for path in out.glob("*.json*")}
    cfg = parse(argv, "", rank=rank, world=world)
    runtime.LINGERS = 0.2
    try:
        train.Trainer(cfg, runtime.start(cfg.seed))
    except SystemExit as error:
        found.append(error.code)
    runtime.LINGERS = 30.0
    found.append(before == {path.name: path.read_bytes() for path in out.glob("*.json*")})
    start.require_weights = lambda *args, **more: None  # drawn weights are as good here
    reading = replace(cfg, eval_only=True, resume="none")  # which writes nothing
    found.append(train.Trainer(reading, runtime.start(cfg.seed)).step)
    if rank == 0:
        threading.Timer(1, lambda: child.communicate(b"save\n")).start()
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    trainer.metrics.close(report=False)
    return [*found, trainer.step, len(lines(out))]


def test_what_a_run_that_is_still_there_saves_last_is_gone_on_from(gloo, tmp_path, flags):
    argv = [*flags, "--out", str(tmp_path / "a")]
    gloo(1, train_two_steps, argv)
    assert gloo(2, overlapping, [*argv, "--parallel.ep", "2"], tmp_path / "a") == [[2, True, 0, 2, 2]] * 2


def test_a_resumed_run_says_what_has_changed_since(gloo, tmp_path):
    """Steps of another size, or other data under the same path.

    Not what is the same under another layout.
    """
    text = tmp_path / "words.txt"
    text.write_text("".join(f"line {i} of some text\n" for i in range(2000)))
    flags = [
        *FLAGS,
        "--out",
        str(tmp_path / "run"),
        "--data.path",
        str(text),
        "--optim.warmup",
        "1",
        "--steps",
    ]
    gloo(1, train_two_steps, [*flags, "2", "--train.batch", "2"])
    assert gloo(2, changes, [*flags, "4", "--train.batch", "1"]) == [["--steps=4 (was 2)"]] * 2
    larger = gloo(1, changes, [*flags, "4", "--train.batch", "3"])[0]
    assert larger == ["--steps=4 (was 2)", "96 tokens a step (were 64)"]
    text.write_text("".join(f"line {i} of some text\n" for i in range(2500)))
    *_, said = gloo(1, changes, [*flags, "4", "--train.batch", "2"])[0]
    assert said.startswith("the data has changed, so it is shuffled again: ") and said.count(str(text)) == 2
    seed = gloo(1, changes, [*flags, "4", "--train.batch", "2", "--data.seed", "7"])[0]
    assert seed == ["--data.seed=7 (was 0)", "--steps=4 (was 2)"]
    read = ["--model.dropout", "0.1", "--model.moe.balance-coeff", "0.5"]
    told = gloo(1, changes, [*flags, "2", "--train.batch", "2", *read])[0]
    assert told[:2] == ["--model.dropout=0.1 (was 0.0)", "--model.moe.balance-coeff=0.5 (was 0.01)"]
