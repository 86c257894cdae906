"""The dry run refuses the layouts that the start of a run refuses, and no others."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tiers import slow_but
from torch.testing._internal.distributed.fake_pg import FakeStore

from tmoe.cli.parse import parse
from tmoe.commands.plan_command import plan
from tmoe.config.axes import Axes
from tmoe.config.gpus import GPUS
from tmoe.model.float8 import require_layers
from tmoe.model.freeze import require_matches
from tmoe.moe.exchange import dispatch, symm
from tmoe.parallel import mesh
from tmoe.plan.fitting import require_room, verdict
from tmoe.run.start import build_model

NODE = 8  # ranks of a node, in these launches and in a dry run
MODEL = "tiny --model.moe.experts 16 --model.heads 16 --model.kv-heads 8 --train.seq 64 --no-compile"
NAMED = [
    "--parallel.ep 8",
    "--parallel.ep 16",
    "--parallel.ep 16 --parallel.ep-across-nodes",
    "--parallel.tp 16 --parallel.ep 16",
    "--parallel.tp 16 --parallel.ep 16 --parallel.ep-across-nodes",
    "--parallel.tp 16",
    "--parallel.tp 4 --parallel.ep 4",
    "--parallel.etp 4 --parallel.ep 4",
    "--parallel.etp 2 --parallel.ep 4 --parallel.dispatch symm",
    "--parallel.ep 16 --parallel.ep-across-nodes --parallel.dispatch symm",
    "--parallel.ep 16 --parallel.ep-across-nodes --parallel.dispatch-dtype fp8",
    "--parallel.ep 8 --parallel.dispatch symm",
    "--parallel.ep 8 --parallel.dispatch symm --model.moe.bias",
    "--parallel.ep 8 --parallel.dispatch-dtype fp8 --model.moe.bias",
    "--parallel.ep 8 --parallel.dispatch symm --model.moe.weigh input",
    "--parallel.ep 8 --parallel.dispatch symm --lora.rank 4",
    "--parallel.ep 32",
    "--parallel.ep 3",
    "--parallel.dp 4 --parallel.ep 8",
    "--parallel.cp 32",
    "--parallel.tp 3",
    "--parallel.cp 16 --parallel.cp-exchange heads --parallel.tp 2",
    "--parallel.pp 2",
    "--parallel.pp 8 --train.accumulate 8",
    "--parallel.pp 2 --train.accumulate 2 --parallel.ep 8",
    "--parallel.pp 2 --train.accumulate 3 --parallel.schedule interleaved",
    "--parallel.replicate 4 --parallel.ep 4 --parallel.shard 2",
    "--optim.freeze nothing.of.this.name",
    "--lora.rank 2 --lora.targets nothing",
    "--train.global-batch 24",
    "--parallel.etp 2 --parallel.adaptive-r 3",
]


def mixtures(count: int) -> list[str]:
    """Random mixtures of axes for 16 ranks, the same in every run."""
    degrees = dict(ep=(1, 4, 8, 16), tp=(1, 2, 16), cp=(1, 2), pp=(1, 2), etp=(1, 2), replicate=(1, 2))
    every = list(itertools.product(*degrees.values(), ("", " --parallel.ep-across-nodes")))
    words = []
    for *sizes, across in random.Random(5).sample(every, count):
        flags = [f"--parallel.{name} {size}" for name, size in zip(degrees, sizes, strict=True) if size > 1]
        words.append(" ".join([*flags, "--train.accumulate 2"]) + across)
    return words


def refusal(work) -> str:
    """The line with which work is refused, "" if it is not."""
    try:
        work()
    except (ValueError, SystemExit) as error:
        return str(error)
    return ""


def a_run(words: list[str], world: int) -> None:
    """The start of a run on rank 0, up to the model, without other processes."""
    cfg = parse(words, "", world=world)
    p = cfg.parallel
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        degrees = dict(tp=p.tp, cp=p.cp, pp=p.pp, replicate=p.replicate, etp=p.etp)
        laid = mesh.build_mesh(p.dp, p.ep, **degrees, ep_across_nodes=p.ep_across_nodes)
        require_matches(cfg)
        require_layers(cfg)
        build_model(cfg, laid, torch.device("meta"))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def launched(monkeypatch):
    """A launcher's 16 ranks on two nodes of GPUs with NVLink, as far as the start of rank 0 looks."""
    world = 2 * NODE
    place = dict(RANK=0, WORLD_SIZE=world, LOCAL_RANK=0, LOCAL_WORLD_SIZE=NODE)
    for name, value in dict(place, GROUP_RANK=0, GROUP_WORLD_SIZE=2).items():
        monkeypatch.setenv(name, str(value))

    def as_gloo(group=None) -> str:
        return "gloo" if group is None else dist.get_backend(group)

    def members(group) -> str:
        nodes = {rank // NODE for rank in dist.get_process_group_ranks(group)}
        return "its ranks are on several hosts" if len(nodes) > 1 else ""

    def use() -> None:
        monkeypatch.setattr(mesh, "dist", SimpleNamespace(**{**vars(dist), "get_backend": as_gloo}))
        everywhere = {**vars(dist), "get_backend": lambda group=None: "gloo"}
        monkeypatch.setattr(dispatch, "dist", SimpleNamespace(**everywhere))
        monkeypatch.setattr(mesh, "nodes_of_ranks", lambda: [str(rank // NODE) for rank in range(world)])
        monkeypatch.setattr(symm, "obstacle", members)
        monkeypatch.setattr(dispatch, "gathered", lambda value, group: [value] * group.size())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    return use


@pytest.mark.parametrize("words", slow_but(NAMED[:6], [*NAMED, *mixtures(24)]))
def test_a_dry_run_refuses_what_a_run_refuses(launched, monkeypatch, capsys, words):
    argv = [*MODEL.split(), *words.split()]
    planned = refusal(lambda: plan(parse([*argv, "--dry-run", "--world", "16"], "")))
    said = capsys.readouterr().err
    launched()
    monkeypatch.setattr("tmoe.model.stages.can_defer", lambda parts: False)
    run = refusal(lambda: a_run(argv, 16))
    assert bool(planned) == bool(run), (planned, said, run)
    if planned:
        assert planned == "2" and said.startswith("error: --") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--dry-run --world 16 --parallel.tp 16 --node 16", ""),
        (
            "--dry-run --world 16 --parallel.ep 8 --node 4",
            "--parallel.ep=8: 2 of 2 expert groups would span nodes (of [4] processes); valid: [1, 2, 4], "
            "or --parallel.ep-across-nodes to exchange tokens over the slower network; planned with --node=4",
        ),
        ("--parallel.ep 1 --node 8", "--node=8: only for --dry-run; a run has the nodes of its launcher"),
        ("--dry-run --node 0", "--node=0: must be at least 1"),
        (
            "--dry-run --world 1 --task grpo --data.path a.jsonl --grpo.rewards length",
            "--grpo.rewards=length: must be length(LONGEST,MARGIN) in tokens",
        ),
        (
            "--dry-run --world 1 --task grpo --data.path a.jsonl --grpo.rewards none.py:reward",
            "--grpo.rewards=none.py:reward: ",
        ),
        ("--dry-run --world 1 --task grpo --data.path a.jsonl --grpo.rewards exact length(64,16):0.5", ""),
    ],
)
def test_settings_of_a_plan(capsys, words, says):
    code = refusal(lambda: plan(parse([*MODEL.split(), *words.split()], "")))
    assert code == ("2" if says else "")
    assert not says or f"error: {says}" in capsys.readouterr().err


@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_the_verdict_says_whether_a_run_would_start(world):
    """Qwen3-30B-A3B in fp32 states needs 57 GiB a rank on 8 ranks."""
    axes = Axes(ep=min(world, 8), dp=max(1, world // 8))
    cfg = parse(f"qwen3-30b-a3b --parallel.ep {axes.ep} --dry-run --world {world}".split(), "")
    refused = bool(refusal(lambda: require_room(cfg, axes, GPUS["h100"].memory)))
    said = "\n".join(verdict(cfg, axes, "h100"))
    assert refused == (world < 8) and ("a run refuses to start" in said) == refused
    assert ("a run starts all the same" in said) == ("does not fit" in said and not refused)
