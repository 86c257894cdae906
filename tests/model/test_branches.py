"""Blocks of one branch: counts, memory, answers, comparison, and settings that they do not have."""

from dataclasses import asdict, replace

import pytest
import torch
from layouts import BRANCHES, GQA

import tmoe
from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError
from tmoe.config.compare import build_config, differences
from tmoe.config.run import Config, TrainConfig
from tmoe.generate.cache import bytes_a_token
from tmoe.model.count import block_shapes, count_parameters, flops_per_token, rule_flops
from tmoe.model.muon import parts_of
from tmoe.model.stage_times import kinds_of
from tmoe.moe.layer import SquaredRelu
from tmoe.optim.matrices import Rows
from tmoe.plan.block_memory import layer_bytes

KINDS = ("linear", "moe", "full", "moe", "linear", "dense")


def test_each_block_has_its_branch():
    """One norm and one branch; parameters are those that the counts say."""
    model = tmoe.Transformer(BRANCHES)
    assert count_parameters(BRANCHES).total == sum(p.numel() for p in model.parameters())
    for layer, (block, kind) in enumerate(zip(model.blocks, KINDS, strict=True)):
        dense, _ = block_shapes(BRANCHES, layer)
        own = {n: p for n, p in block.named_parameters() if ".experts." not in n}
        assert sorted(dense) == sorted(tuple(p.shape) for p in own.values()), kind
        norms = [n for n in own if n in ("attention_norm.weight", "ffn_norm.weight")]
        assert norms == ["ffn_norm.weight" if kind in ("moe", "dense") else "attention_norm.weight"]
        assert block.feeds == (kind in ("moe", "dense")) and (block.attention is None) == block.feeds
    seq = 32
    rule, attention = 3 * 2 * rule_flops(BRANCHES), 6 * 4 * 2 * 8 * seq / 2
    assert flops_per_token(BRANCHES, seq) == 6.0 * count_parameters(BRANCHES).active_flops + rule + attention


def test_relu_squared_has_no_gate():
    """The dense feed-forward by its formula; a shared expert is the same layer."""
    torch.manual_seed(0)
    model = tmoe.Transformer(BRANCHES)
    layer = model.blocks[5].ffn
    assert type(layer) is type(model.blocks[1].moe.shared) is SquaredRelu and layer.plain
    x = torch.randn(3, BRANCHES.dim)
    want = torch.clamp(x @ layer.gate_up.weight.T, min=0) ** 2 @ layer.down.weight.T
    torch.testing.assert_close(layer(x), want)
    assert layer.gate_up.weight.shape == (BRANCHES.ffn_dim, BRANCHES.dim)
    found = parts_of(model)  # Muon's matrices: up is one
    assert found["blocks.5.ffn.gate_up.weight"] == [Rows(0, BRANCHES.ffn_dim)]
    assert found["blocks.1.moe.shared.gate_up.weight"] == [Rows(0, BRANCHES.moe.shared_dim)]


def test_a_block_is_counted_as_a_half():
    """Bytes kept by a block, its keys, and its kind for a pipeline's cut."""
    cfg = Config(model=BRANCHES, train=TrainConfig(batch=2, seq=32))
    kept = [layer_bytes(cfg, Axes(), i) for i in range(6)]
    assert kept[0] == kept[4] and kept[1] == kept[3] and len({*kept}) == 4 and min(kept) > 0
    two = replace(BRANCHES, layer_types=("linear", "full"), layers=2)  # blocks of a mixer and an MoE
    both = layer_bytes(replace(cfg, model=two), Axes(), 0)
    assert both == kept[0] + kept[1]
    assert bytes_a_token(BRANCHES, torch.bfloat16) == 2 * 2 * 8 * 2  # keys and values of one block
    assert len({*kinds_of(cfg)}) == 4


def test_answers_are_the_forwards():
    """Prompts of several lengths in fewer slots; the last block is a feed-forward."""
    torch.manual_seed(0)
    net = tmoe.Transformer(replace(BRANCHES, init_std=0.3, rope=replace(BRANCHES.rope, max_seq=200))).eval()
    prompts = [torch.randint(64, (n,)).tolist() for n in (1, 140, 9)]
    sampling = tmoe.Sampling(temperature=0.0, max_tokens=5)
    for prompt, (sample,) in zip(
        prompts, tmoe.Engine(net, slots=2).generate(prompts, sampling=sampling), strict=True
    ):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(5):
                ids.append(int(net(torch.tensor([ids]))[0, -1].argmax()))
        assert sample.ids.tolist() == ids[len(prompt) :]


def test_models_are_compared():
    assert build_config(asdict(BRANCHES)) == BRANCHES
    other = replace(BRANCHES, layer_types=("linear", "moe", "full", "moe", "linear", "moe"))
    names = [line.partition(":")[0] for line in differences(BRANCHES, other)]
    assert "model.branches" in names and "model.MoE layers" in names
    gated = replace(BRANCHES, moe=replace(BRANCHES.moe, shared_activation="swiglu"))
    names = [line.partition(":")[0] for line in differences(BRANCHES, gated)]
    assert names == ["model.moe.shared_activation"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(norms="sandwich"), r"--model\.norms=sandwich: not with --model\.layer-types=.*one branch"),
        (
            dict(mtp=replace(GQA.mtp, depth=1), layer_types=("linear", "dense")),
            r"--model\.mtp\.depth=1: needs moe in --model\.layer-types",
        ),
        (dict(dense_layers=1), r"--model\.dense-layers=1: not with"),
        (dict(dense_blocks=(3,)), r"--model\.dense-blocks=.*: not with"),
    ],
)
def test_what_one_branch_does_not_have_is_named(change, says):
    with pytest.raises(ConfigError, match=says):
        replace(BRANCHES, **change)
