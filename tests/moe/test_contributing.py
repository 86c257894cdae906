"""The router of CONTRIBUTING.md works as it stands there: one file and one line.

next: tests/moe/test_selection.py
"""

import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import train
from tmoe.cli.parse import parse
from tmoe.config import routing_choices
from tmoe.config.check import ConfigError
from tmoe.config.model import MoEConfig
from tmoe.config.routing_choices import SELECTIONS
from tmoe.moe.layer import MoE
from tmoe.moe.router import Router

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def added(monkeypatch):
    """The page's file as a module of tmoe.moe.select, and the page's line in the table."""
    section = PAGE.read_text().split("## A router")[1].split("\n## ")[0]
    file, line = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(file.splitlines()) - file.count("\n\n") <= 15
    module = ModuleType("tmoe.moe.select.lottery")
    exec(compile(file, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "tmoe.moe.select.lottery", module)
    for name, entry in eval("{" + line + "}", vars(routing_choices)).items():
        monkeypatch.setitem(SELECTIONS, name, entry)
    return module


def test_it_draws_experts_by_their_softmax(added):
    cfg = MoEConfig(experts=4, top_k=2, ffn_dim=4, selection="lottery", renormalize=False)
    router = Router(4, cfg)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, 0.0, -1.0, 0.5]])
    got = router.train()(logits.repeat(20000, 1))
    p = logits.softmax(-1)[0]
    first = torch.bincount(got.ids_TK[:, 0], minlength=4) / 20000
    torch.testing.assert_close(first, p, atol=4 * 0.5 / 20000**0.5, rtol=0)
    assert (got.ids_TK[:, 0] != got.ids_TK[:, 1]).all()
    torch.testing.assert_close(got.weights_TK, p[got.ids_TK.long()])
    assert router.eval()(logits).ids_TK.tolist() == [[0, 3]]


@pytest.mark.slow
def test_a_layer_with_it_trains_in_one_graph(added):
    torch._dynamo.reset()
    moe = MoE(8, MoEConfig(experts=8, top_k=2, ffn_dim=4, selection="lottery", groups=4, top_groups=2))
    route = torch.compile(moe.route, fullgraph=True, backend="aot_eager", dynamic=False)
    y, load = moe.experts(route, torch.randn(2, 16, 8), None)
    y.square().sum().backward()
    assert moe.router.weight.grad.abs().sum() > 0 and load.counts_BE.sum() == 2 * 16 * 2


def test_what_its_line_excludes_is_refused_by_name(added):
    with pytest.raises(
        ConfigError, match=r"--model\.moe\.selection=lottery: not with --model\.moe\.choice-bias"
    ):
        MoEConfig(selection="lottery", choice_bias=True)


def commands() -> list[list[str]]:
    """The words behind `python train.py` of the page on routers."""
    page = (PAGE.parent / "docs/routers.md").read_text()
    lines = [line.split("#")[0] for line in page.splitlines() if line.startswith("    python train.py")]
    return [line.split()[2:] for line in lines]


def test_the_commands_of_the_page_on_routers_are_valid():
    assert len(commands()) >= 8
    for words in commands():
        parse(words, "")


@pytest.mark.slow
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_they_train_and_go_on(tmp_path, capsys, words):
    few = "--model.layers 1 --train.batch 4 --train.seq 128 --no-compile --log.no-progress --log.no-report"
    few = [*few.split(), "--out"]
    for steps in ("2", "4"):
        train.main([*words, *few, str(tmp_path), "--steps", steps])
    assert "resumed after step 2" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["loss"]) for line in lines if "loss" in line)
