"""What a launch says before it begins: one message when it is refused, however late rank 0 comes.

And a note where a router is not trained.
"""

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist
from tiers import slow_but

import train
from tmoe import Transformer
from tmoe.cli.parse import parse
from tmoe.run.process import launched

ROOT = Path(__file__).parents[2]
LATE = "import os, time\nif os.environ.get('RANK') == '0':\n    time.sleep(2)\n"


@pytest.mark.parametrize(
    "words, says",
    slow_but(
        [("--parallel.dp 3", "error: --parallel.dp=3")],
        [("--parallel.dp 3", "error: --parallel.dp=3"), ("--parallel.ep 0", "--parallel.ep=0: must be")],
    ),
)
def test_one_message_though_rank_0_is_the_last_to_start(tmp_path, words, says):
    if words.startswith("--parallel.ep"):  # one launcher is enough: its own report is the other's
        late = f"{LATE}import runpy; runpy.run_path('train.py', run_name='__main__')"
        ended = forked.torchrun(2, ["-c", late, "tiny", *words.split()])
        assert ended.returncode and (ended.stdout + ended.stderr).count(says) == 1
        return
    (tmp_path / "sitecustomize.py").write_text(LATE)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        f"{torchrun} train.py tiny {words}".split(),
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode
    ours, _, report = ended.stderr.partition("train.py FAILED")
    assert (ended.stdout + ours).count(says) == 1
    assert says in report  # torchrun's own, which is the last that one sees


@pytest.mark.parametrize(
    ("set_", "says"),
    [
        (
            dict(WORLD_SIZE="2"),
            "RANK= and WORLD_SIZE=2 in the environment: RANK must be from 0 to WORLD_SIZE - 1",
        ),
        (dict(RANK="0"), "RANK=0 and WORLD_SIZE= in the environment"),
        (dict(RANK="3", WORLD_SIZE="2"), "RANK=3 and WORLD_SIZE=2 in the environment"),
        (dict(RANK="abc", WORLD_SIZE="2"), "RANK='abc' in the environment: must be a whole number from 0 on"),
        (dict(LOCAL_RANK="-1"), "LOCAL_RANK='-1' in the environment"),
        (dict(WORLD_SIZE=""), "WORLD_SIZE='' in the environment: must be a whole number from 1 on"),
    ],
    ids=str,
)
def test_half_a_launcher_is_one_error(monkeypatch, capsys, set_, says):
    """Otherwise it would wait for ranks that are never started.

    Or it would meet them in the middle of the first step.
    """
    refused(monkeypatch, capsys, set_, says)


@pytest.mark.parametrize("set_", [dict(LOCAL_RANK="2"), dict(LOCAL_RANK="0", LOCAL_WORLD_SIZE="3")], ids=str)
def test_more_ranks_than_gpus_is_one_error(monkeypatch, capsys, set_):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    set_ |= dict(RANK="2", WORLD_SIZE="4")
    refused(
        monkeypatch,
        capsys,
        set_,
        "3 processes on this host, which shows 2 GPUs, and each needs a separate GPU: start 2 (",
    )


def test_as_many_ranks_as_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2").items():
        monkeypatch.setenv(name, value)
    assert launched() == (3, 4)


def refused(monkeypatch, capsys, set_, says):
    if dist.is_initialized():  # by a test before, in this process
        dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        train.main(["tiny"])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"error: {says}")


@pytest.mark.parametrize(
    ("words", "trains"),
    [
        ("", True),
        ("--model.moe.top-k 1", False),
        ("--model.moe.top-k 1 --model.moe.softmax after --model.moe.no-renormalize", False),
        ("--model.moe.top-k 1 --model.moe.no-renormalize", True),
        ("--model.moe.top-k 1 --model.moe.score sigmoid", False),
        ("--model.moe.top-k 1 --model.dense-layers 2", True),
    ],
)
def test_a_router_that_the_loss_does_not_train_is_told(capsys, words, trains):
    """With weights that are given it is a note; tests/moe/test_top_1.py has the error without them."""
    words = (
        f"tiny {words} --model.layers 2 --model.dim 64 --model.moe.balance-coeff 0 --model.moe.z-coeff 0"
    ).split()
    words += ["--init", "a-step"]
    cfg = parse(words, "")
    assert ("balancing losses alone train the routers" in capsys.readouterr().err) != trains
    parse([*words, "--eval-only"], "")
    parse(words, "", rank=1, world=1)
    assert not capsys.readouterr().err
    model = Transformer(cfg.model)
    model.init_weights(0)
    tokens = torch.randint(cfg.model.vocab, (2, 33))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    pulls = [p.grad.abs().max().item() for name, p in model.named_parameters() if "router" in name]
    assert all((pull > 1e-4) == trains for pull in pulls) and (pulls or "dense-layers" in " ".join(words))
