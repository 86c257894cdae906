"""Mamba-2 blocks in a model: counts, start, groups of the optimizer, documents, adapters, axes by name."""

from dataclasses import asdict, replace

import pytest
import torch
from held import MostHeld
from layouts import MAMBA2

from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError
from tmoe.config.compare import build_config, differences
from tmoe.config.linear_settings import LinearConfig
from tmoe.config.run import Config, LoraConfig, ParallelConfig, TrainConfig, require_heads
from tmoe.model.block_bytes import rule_bytes
from tmoe.model.count import block_shapes, count_parameters, flops_per_token, rule_flops
from tmoe.model.lora import adapt
from tmoe.model.mamba2 import Mamba2
from tmoe.model.muon import parts_of
from tmoe.model.transformer import Transformer
from tmoe.ops.delta import gpu
from tmoe.ops.delta.rule import plain_back
from tmoe.optim.adamw import parameter_groups

PRECISE = ("A_log", "dt_bias", ".D", "conv", "conv_bias")
# a layer of Granite-4-H-Tiny: 48 heads of 64 channels, one group with a state of 128
TINY = replace(MAMBA2, dim=1536, linear=LinearConfig("mamba2", 10, 1, 48, 128, 64))


def test_counts_by_hand():
    """Parameters as in the module; a token's operations: 4 K V + 2 C (K + V) a head, C = 64."""
    model = Transformer(MAMBA2)
    assert count_parameters(MAMBA2).total == sum(p.numel() for p in model.parameters())
    dense, _ = block_shapes(MAMBA2, 1)
    names = {n: p for n, p in model.blocks[1].named_parameters() if ".experts." not in n}
    assert sorted(dense) == sorted(tuple(p.shape) for p in names.values())
    assert rule_flops(TINY) == 48 * (4 * 128 * 64 + 128 * (128 + 64))
    seq = 32
    whole = 6.0 * count_parameters(MAMBA2).active_flops + 3 * 3 * rule_flops(MAMBA2)
    assert flops_per_token(MAMBA2, seq) == whole + 6 * 4 * 2 * 8 * seq / 2


def test_temporaries(monkeypatch):
    """The plain form's, against what is alive."""
    monkeypatch.setattr(gpu, "MEASURED", frozenset())
    cfg = Config(model=TINY, train=TrainConfig(batch=1, seq=32))
    q, v, g = (
        torch.zeros(1, 512, 1, 128).bfloat16(),
        torch.zeros(1, 512, 2, 64).bfloat16(),
        torch.zeros(1, 512, 2),
    )
    with MostHeld() as held:
        plain_back(v, (q, q, v, g, g), None, False)
    assert rule_bytes(cfg, Axes(), 0) == pytest.approx(held.bytes / 512 / 2 * 48 * 32, rel=0.05)


def test_the_start():
    """Steps between 0.001 and 0.1, decay rates between 1 and 16, as Mamba-2's authors draw them."""
    cfg = replace(MAMBA2, linear=replace(MAMBA2.linear, value_heads=256))
    model, again = Transformer(cfg), Transformer(cfg)
    model.init_weights(3)
    again.init_weights(3)
    rates = model.blocks[0].attention.rates
    assert torch.equal(rates.dt_bias, again.blocks[0].attention.rates.dt_bias)
    steps = torch.nn.functional.softplus(rates.dt_bias)
    assert 0.001 <= steps.min() < 0.0015 and 0.07 < steps.max() <= 0.1001
    assert steps.log().mean().exp().item() == pytest.approx(0.01, rel=0.3)
    assert 1 <= rates.A_log.exp().min() < 1.5 and 15.5 < rates.A_log.exp().max() <= 16
    assert (rates.D == 1).all() and (rates.conv_bias == 0).all() and rates.conv.abs().max() <= 0.5


def test_rates_are_in_fp32_and_do_not_decay():
    model = Transformer(MAMBA2)
    groups = parameter_groups(model.named_parameters(), 0.1)
    decayed = {id(p) for group in groups for p in group["params"] if group["weight_decay"]}
    names = {n for n, p in model.named_parameters() if id(p) in decayed}
    assert not any(n.endswith(("A_log", "dt_bias", ".D", "conv_bias", "norm.weight")) for n in names)
    low = model.to(torch.bfloat16)
    rates = {n: p for n, p in low.named_parameters() if n.endswith(PRECISE)}
    assert len(rates) == 15 and {p.dtype for p in rates.values()} == {torch.float32}


def test_muon_has_a_matrix_for_each_section():
    """C, B, x, z and the steps; together they cover all rows."""
    model = Transformer(MAMBA2)
    net = model.blocks[0].attention
    (parts,) = [
        found for name, found in parts_of(model, False).items() if name == "blocks.0.attention.qkvz.weight"
    ]
    n, D = MAMBA2.linear, MAMBA2.dim
    shapes = [part.shape(D) for part in parts]
    rows = [n.key_width, n.key_width, n.value_width, n.value_width, n.value_heads]
    assert shapes == [(1, one, D) for one in rows] and sum(rows) == len(net.qkvz.weight)
    assert [part.first for part in parts] == [sum(rows[:i]) for i in range(5)]


def test_padding_and_documents_one_by_one():
    """Packed with a gap after each document and at the end; the convolution's bias reaches no state."""
    torch.manual_seed(1)
    model = Transformer(replace(MAMBA2, moe=replace(MAMBA2.moe, balance="none", z_coeff=0.0))).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("conv_bias"):
                p.normal_()
    lengths, gaps = [11, 1, 5], [2, 3, 10]
    parts = [torch.randint(64, (n,)) for n in lengths]
    tokens, documents, padding, at = [], [], [], []
    for number, (part, gap) in enumerate(zip(parts, gaps, strict=True)):
        tokens += [*part.tolist(), *[7] * gap]
        documents += [number] * (len(part) + gap)
        padding += [False] * len(part) + [True] * gap
        at += [*range(len(part)), *[0] * gap]
    row = dict(
        documents_BS=torch.tensor([documents]),
        padding_BS=torch.tensor([padding]),
        positions_BS=torch.tensor([at]),
    )
    got = model(torch.tensor([tokens]), **row)[0][~torch.tensor(padding)]
    want = torch.cat([model(part[None])[0] for part in parts])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_limits_of_the_step():
    """Both limits hold in the forward and for single tokens."""
    torch.manual_seed(0)
    linear = replace(MAMBA2.linear, least_step=0.2, most_step=0.3)
    net = Mamba2(replace(MAMBA2, linear=linear))
    for p in net.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(1, 9, MAMBA2.dim)
    g, step = net.gates(net.projected(x)[2])
    fp = dict(rtol=1e-6, atol=0)
    assert step.min() == torch.tensor(0.2) and step.max() == torch.tensor(0.3) and step.std() > 0
    torch.testing.assert_close(g, -net.rates.A_log.exp() * step, **fp)
    state = net.begin(1, torch.float32, x.device)
    with torch.no_grad():
        one_by_one = torch.cat([net.step(x[:, i : i + 1], state) for i in range(9)], 1)
        torch.testing.assert_close(one_by_one, net(x, x, x, None), rtol=1e-4, atol=1e-4)


def test_adapters_take_the_matrices():
    model = Transformer(MAMBA2)
    names = adapt(model, LoraConfig(rank=2), "fp32")
    names = [n for n in names if n.startswith("blocks.0.attention")]
    assert names == [f"blocks.0.attention.{leaf}" for leaf in ("qkvz", "out")]


def test_models_are_compared():
    """Settings of Mamba-2 alone are no difference of a DeltaNet."""
    assert build_config(asdict(MAMBA2)) == MAMBA2
    other = replace(MAMBA2, linear=replace(MAMBA2.linear, conv_bias=False, least_step=0.1))
    assert [line.partition(":")[0] for line in differences(MAMBA2, other)] == [
        "model.linear.conv_bias",
        "model.linear.least_step",
    ]
    delta = replace(MAMBA2, linear=replace(MAMBA2.linear, kind="deltanet"))
    assert differences(delta, replace(delta, linear=replace(delta.linear, least_step=0.1))) == []


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (
            dict(cp=2),
            r"--parallel\.cp-exchange=keys: not with --model\.linear\.kind=mamba2, .*; valid: heads",
        ),
        (dict(tp=3), r"--parallel\.tp=3: must divide --model\.linear\.value-heads=8; valid: \[1, 2, 4, 8\]"),
        (dict(tp=4, cp=4, cp_exchange="heads"), r"--parallel\.cp=4: must divide the 2 value heads of linear"),
        (
            dict(tp=2, cp=4, cp_exchange="heads"),  # of attention; cp by keys would be refused
            r"--parallel\.cp=4: must divide the 2 heads that tp leaves a rank; valid: \[1, 2\]$",
        ),
    ],
)
def test_axes_that_are_not_there_are_named(axes, says):
    with pytest.raises(ConfigError, match=says):
        require_heads(ParallelConfig(**axes), MAMBA2)


def test_wrong_limits_are_named():
    with pytest.raises(ConfigError, match=r"--model\.linear\.most-step=0.1: must be at least --model"):
        LinearConfig("mamba2", least_step=0.2, most_step=0.1)
