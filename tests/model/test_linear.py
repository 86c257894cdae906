"""Linear blocks in a model: settings, counts, start, optimizer's groups, graphs, adapters, quantising."""

from dataclasses import replace

import layouts
import pytest
import torch
from held import MostHeld, kept_of
from layouts import LINEAR

from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError
from tmoe.config.compare import as_flags, build_config, differences, facts
from tmoe.config.linear_settings import LinearConfig
from tmoe.config.model import ModelConfig, RopeConfig
from tmoe.config.presets import presets
from tmoe.config.run import Config, LoraConfig, ParallelConfig, TrainConfig, require_heads
from tmoe.model.block_bytes import rule_bytes
from tmoe.model.count import block_shapes, count_parameters, flops_per_token, rule_flops
from tmoe.model.freeze import freeze
from tmoe.model.linear import DeltaNet
from tmoe.model.lora import adapt
from tmoe.model.nf4 import slots_of
from tmoe.model.norm import OffsetNorm
from tmoe.model.quantised import quantised_copy
from tmoe.model.transformer import Block, Transformer
from tmoe.ops.delta import gpu
from tmoe.ops.delta.rule import plain_back
from tmoe.optim.adamw import parameter_groups
from tmoe.parallel.precise import Precise
from tmoe.plan.block_memory import layer_bytes

PRECISE = ("A_log", "dt_bias", "conv")


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        (dict(linear=LinearConfig("deltanet", every=2)), "lflf"),
        (dict(linear=LinearConfig("deltanet"), layer_types=("full", "linear", "linear")), "fllf"),
        (dict(linear=LinearConfig("none", every=2)), "ffff"),
        (dict(linear=LinearConfig("deltanet", every=1)), "ffff"),
    ],
)
def test_which_blocks_are_linear(settings, kinds):
    cfg = ModelConfig(**settings)
    assert "".join("fl"[cfg.is_linear(i)] for i in range(4)) == kinds
    assert build_config(facts_of(cfg)) == cfg
    windowed = replace(cfg, window=5)
    assert [windowed.window_of(i) for i in range(4)] == [5 * (kind == "f") for kind in kinds]


def facts_of(cfg):
    from dataclasses import asdict

    return asdict(cfg)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(layer_types=("linear",)), r"--model\.layer-types=linear: needs --model\.linear\.kind=deltanet"),
        (dict(layer_types=("window",)), r"--model\.layer-types=.*must be"),
        (
            dict(linear=dict(value_heads=3, key_heads=2)),
            r"value-heads=3: must be a multiple of --model\.linear\.key",
        ),
        (dict(linear=dict(conv=0)), r"--model\.linear\.conv=0: must be at least 1"),
        (dict(linear=dict(kind="mamba")), r"--model\.linear\.kind=mamba: must be one of none, deltanet"),
    ],
)
def test_what_cannot_be_is_named(settings, says):
    with pytest.raises(ConfigError, match=says):
        ModelConfig(**{n: LinearConfig(**v) if n == "linear" else v for n, v in settings.items()})


def test_models_are_told_apart():
    """Linear blocks are compared, not how they are named; settings without such blocks are no difference."""
    a = replace(LINEAR, layer_types=("linear", "linear", "linear", "full"))
    assert differences(LINEAR, a) == []
    assert differences(layouts.GQA, replace(layouts.GQA, linear=LinearConfig("none", key_dim=3))) == []
    lines = differences(LINEAR, replace(LINEAR, linear=replace(LINEAR.linear, every=2), norm_offset=False))
    assert [line.partition(":")[0] for line in lines] == ["model.norm_offset", "model.linear layers"]
    assert "--model.linear.kind deltanet" in as_flags(layouts.GQA, LINEAR)
    assert "linear layers" not in facts(layouts.GQA)


def test_counts_by_hand():
    """Parameters as in the module; a token's operations in the rule, by the numbers of docs/decisions/108."""
    model = Transformer(LINEAR)
    assert count_parameters(LINEAR).total == sum(p.numel() for p in model.parameters())
    dense, _ = block_shapes(LINEAR, 0)
    names = {n: p for n, p in model.blocks[0].named_parameters() if ".experts." not in n}
    assert sorted(dense) == sorted(tuple(p.shape) for p in names.values())
    preset = presets()["qwen3-next-80b-a3b"].model
    # 32 heads (6 K V + 2 C (3 K + 2 V) + 2 C^2 / 3), K = V = 128, C = 64
    assert rule_flops(preset) == 32 * (6 * 128 * 128 + 128 * 5 * 128 + 2 * 64 * 64 / 3)
    assert round(rule_flops(preset) / 1e6, 1) == 5.9
    seq = 4096
    whole = 6.0 * count_parameters(preset).active_flops + 3 * 36 * rule_flops(preset)
    assert flops_per_token(preset, seq) == whole + 12 * 6 * 16 * 256 * seq


def test_the_start():
    torch.manual_seed(0)
    cfg = replace(LINEAR, linear=replace(LINEAR.linear, key_heads=64, value_heads=64))
    model = Transformer(cfg)
    again = Transformer(cfg)
    model.init_weights(3)
    again.init_weights(3)
    net = model.blocks[0].attention
    assert torch.equal(net.rates.A_log, again.blocks[0].attention.rates.A_log)
    decays = net.rates.A_log.exp()
    assert 0.01 < decays.min() < 1.5 and 14.5 < decays.max() < 16
    assert (net.rates.dt_bias == 1).all() and (net.norm.weight == 1).all()
    assert 0.45 < net.rates.conv.abs().max() <= 0.5
    assert net.out.weight.std() < 0.5 * net.qkvz.weight.std()  # writes to the residual stream
    for name, module in model.named_modules():
        if isinstance(module, OffsetNorm):
            assert (module.weight == 0).all(), name
    assert isinstance(model.norm, OffsetNorm) and isinstance(model.blocks[3].attention.q_norm, OffsetNorm)


def test_norms_of_one_plus_weight():
    """In bf16 the sum 1 + w is not rounded."""
    norm = OffsetNorm(8, 1e-6).bfloat16()
    torch.nn.init.constant_(norm.weight, 2**-10)
    x = torch.randn(3, 8)
    want = x.bfloat16().double()
    want = want * (want.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + 2**-10)
    assert torch.equal(norm(x.bfloat16()), want.bfloat16())


def test_rates_are_in_fp32_and_do_not_decay():
    model = Transformer(LINEAR)
    rates = {n: p for n, p in model.named_parameters() if n.endswith(PRECISE)}
    assert len(rates) == 9
    groups = parameter_groups(model.named_parameters(), 0.1)
    decayed = {id(p) for group in groups for p in group["params"] if group["weight_decay"]}
    names = {n for n, p in model.named_parameters() if id(p) in decayed}
    assert not any(n.endswith(("A_log", "dt_bias", "norm.weight")) for n in names)
    low = model.to(torch.bfloat16)
    assert all(p.dtype == torch.float32 for n, p in low.named_parameters() if n.endswith(PRECISE))
    assert low.blocks[0].attention.qkvz.weight.dtype == torch.bfloat16
    assert low.double().blocks[0].attention.rates.A_log.dtype == torch.float64
    frozen = Transformer(LINEAR)
    freeze(frozen, "rates|qkvz", "bf16")
    assert {n: p.dtype for n, p in frozen.named_parameters() if "rates" in n and p.requires_grad} == {}
    assert frozen.blocks[0].attention.rates.A_log.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deltanet", "mamba2"])
def test_a_block_is_one_graph_and_keeps_what_is_counted(kind):
    """Compiled without a compiler's backend; and with documents the same numbers as eager."""
    torch.compiler.reset()
    cfg = replace(
        LINEAR,
        dim=256,
        rope=RopeConfig(max_seq=128),
        linear=LinearConfig(kind, 2, 2, 4, 32, 48),
        dense_layers=1,
        ffn_dim=512,
    )
    block = Block(cfg, 0).bfloat16()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.02)
    x = torch.randn(2, 128, 256, dtype=torch.bfloat16, requires_grad=True)
    tables = torch.empty(128, 0), torch.empty(128, 0)
    eager, _ = block(x, *tables, None, None, None)
    block.compute = torch.compile(
        block.compute, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition"
    )
    got, _ = block(x, *tables, None, None, None)
    torch.testing.assert_close(got, eager, rtol=2e-2, atol=2e-2)
    kept = sum(t.untyped_storage().nbytes() for t in kept_of(block, x, *tables, None, None, None))
    counted = layer_bytes(Config(model=cfg, train=TrainConfig(batch=2, seq=128)), Axes(), 0)
    assert counted == pytest.approx(kept, rel=0.05)


def test_temporaries(monkeypatch):
    """The plain form's, against what is alive; the kernels' by hand.

    A token of Qwen3-Next in bf16: 32 heads of 6 x 128 numbers, 2 x 64 of pairs of tokens, 2 x 128 x 128 / 64
    of states and 5 of decays, in fp32; q, k.
    """
    cfg = Config(model=presets()["qwen3-next-80b-a3b"].model, train=TrainConfig(batch=1, seq=4096))
    monkeypatch.setattr(gpu, "MEASURED", frozenset())
    assert rule_bytes(cfg, Axes(), 3) == 0
    q, v = (torch.zeros(1, 512, heads, 128).bfloat16() for heads in (1, 2))
    g = torch.zeros(1, 512, 2)
    with MostHeld() as held:
        plain_back(v, (q, q, v, g, g), None)
    assert rule_bytes(cfg, Axes(), 0) == pytest.approx(held.bytes / 512 / 2 * 32 * 4096, rel=0.05)
    monkeypatch.setattr(gpu, "MEASURED", {"cuda:90"})
    assert rule_bytes(cfg, Axes(), 0) == 4096 * (2 * 32 * (6 * 128 + 128 + 512) + 4 * 32 * 5 + 2 * 4096)
    for other in (replace(cfg, gpu="a100"), replace(cfg, train=replace(cfg.train, dtype="fp32"))):
        assert rule_bytes(other, Axes(), 0) == pytest.approx(held.bytes / 512 / 2 * 32 * 4096, rel=0.05)


def test_padding_and_documents_one_by_one():
    """Packed with a gap after each document and at the end; padding has no expert."""
    torch.manual_seed(1)
    model = Transformer(replace(LINEAR, moe=replace(LINEAR.moe, balance="none", z_coeff=0.0))).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.sub_(3)  # states that forget at once amplify rounding
    lengths, gaps = [11, 1, 5], [2, 3, 10]
    tokens, documents, padding, at = [], [], [], []
    parts = [torch.randint(64, (n,)) for n in lengths]
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
    # a document's first token is the norm of (q . k) v, so a small q . k amplifies rounding
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


def test_adapters_and_nf4_take_the_matrices():
    """qkvz, ba and out get adapters; in NF4 ba stays as it is, as the router does."""
    model = Transformer(LINEAR)
    lora = LoraConfig(rank=2)
    names = adapt(model, lora, "fp32")
    assert [n for n in names if n.startswith("blocks.0.attention")] == [
        f"blocks.0.attention.{leaf}" for leaf in ("qkvz", "ba", "out")
    ]
    assert model.blocks[0].attention.rates.A_log.dtype == torch.float32
    model.init_weights(0)
    assert torch.isfinite(model(torch.randint(64, (1, 20))).float()).all()
    with torch.device("meta"):
        held = Transformer(LINEAR)
        adapt(held, replace(lora, base="nf4"), "bf16")
    slots = [n for n in slots_of(held) if n.startswith("blocks.0.attention")]
    assert slots == [f"blocks.0.attention.{leaf}.weight" for leaf in ("qkvz", "out")]


def test_quantised_for_inference():
    model = Transformer(LINEAR).eval()
    low = quantised_copy(model, "int8")
    state = low.state_dict()
    assert "blocks.0.attention.qkvz.weight_codes" in state and "blocks.0.attention.ba.weight" in state
    x = torch.randint(64, (1, 20))
    with torch.no_grad():
        want, got = model(x), low(x)
    assert 0 < (got - want).norm() / want.norm() < 0.05


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (
            dict(cp=2),
            r"--parallel\.cp-exchange=keys: not with --model\.linear\.kind=deltanet, .*; valid: heads",
        ),
        (dict(tp=8), r"--parallel\.tp=8: must divide --model\.linear\.key-heads=4; valid: \[1, 2, 4\]"),
        (dict(tp=2, cp=4, cp_exchange="heads"), r"--parallel\.cp=4: must divide the 2 key heads of linear"),
    ],
)
def test_axes_that_are_not_there_are_named(axes, says):
    with pytest.raises(ConfigError, match=says):
        require_heads(ParallelConfig(**axes), LINEAR)


def test_the_rates_are_gathered_by_their_own_module():
    net = DeltaNet(LINEAR)
    assert isinstance(net.rates, Precise) and net.rates(lambda a, b: a + b, 1, 2) == 3
