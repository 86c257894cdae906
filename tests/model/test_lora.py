"""Adapters on a model: which matrices have one, what is trained, and the model without them.

next: tests/end_to_end/test_lora_layouts.py
"""

from dataclasses import asdict, replace
from pathlib import Path

import layouts
import pytest
import torch

from tmoe.checkpoint.base import refuse_adapters
from tmoe.checkpoint.manifest import Manifest
from tmoe.checkpoint.resume import require_same_settings
from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError, spelt
from tmoe.config.run import Config, GrpoConfig, LoraConfig, OptimConfig, PreferenceConfig, TrainConfig
from tmoe.generate import Engine, Sampling
from tmoe.model.freeze import require_matches, settle
from tmoe.model.lora import adapter_counts, describe, is_adapter, off, require_ranks
from tmoe.model.transformer import Transformer
from tmoe.plan.memory import memory_per_rank


def config(model="gqa", **lora):
    lora = dict(rank=6, alpha=12.0) | lora
    return Config(
        model=layouts.MODELS[model], lora=LoraConfig(**lora), train=TrainConfig(seq=32, dtype="fp32")
    )


def built(cfg):
    torch.manual_seed(0)
    model = Transformer(cfg.model)
    settle(model, cfg)
    model.init_weights(3)
    return model


def moved(model, std=0.05):
    """The same model with b that are not zero."""
    draw = torch.Generator().manual_seed(9)
    for name, p in model.named_parameters():
        if is_adapter(name):
            p.data.add_(torch.randn(p.shape, generator=draw) * std)
    return model


def batch(cfg):
    return torch.randint(0, cfg.model.vocab, (2, 33), generator=torch.Generator().manual_seed(1))


def test_experts_have_the_rank_over_top_k_and_the_base_is_frozen():
    cfg = config()  # top-k 3
    model = built(cfg)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if is_adapter(name)}
    assert shapes["blocks.1.moe.experts.gate_up_a"] == (8, 2, 32)
    assert shapes["blocks.1.moe.experts.gate_up_b"] == (8, 32, 2)
    assert shapes["blocks.1.moe.experts.down_a"] == (8, 2, 16) and shapes["blocks.0.ffn.down.a"] == (6, 48)
    kinds = {name.split(".", 2)[2].rpartition(".")[0] for name in shapes}
    dense = {f"moe.shared.{m}" for m in ("gate_up", "down")} | {f"ffn.{m}" for m in ("gate_up", "down")}
    assert kinds == dense | {"attention.qkv", "attention.o", "moe.experts"}
    for name, p in model.named_parameters():
        assert p.requires_grad == (name in shapes)
    for name, p in model.named_parameters():
        if name in shapes and name.endswith("a"):
            most = p.shape[-1] ** -0.5
            assert 0.9 * most < p.abs().max() <= most and abs(p.mean()) < 0.2 * most
        elif name in shapes:
            assert not p.any()


def test_the_base_is_held_in_bf16_and_adapters_in_fp32():
    cfg = replace(config(), train=TrainConfig(seq=32, dtype="bf16"))
    for name, p in built(cfg).named_parameters():
        assert p.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16)


@pytest.mark.parametrize("model", ["gqa", "gpt_oss", "latent", "narrow", "olmoe"])
def test_new_adapters_and_adapters_off_give_the_bits_of_the_base(model):
    cfg = config(model)
    ours, base = built(cfg), built(replace(cfg, lora=LoraConfig()))
    tokens = batch(cfg)
    with torch.no_grad():
        want = base(tokens[:, :-1])
        assert torch.equal(ours(tokens[:, :-1]), want)
        moved(ours)
        assert not torch.equal(ours(tokens[:, :-1]), want)
        with off(ours):
            assert torch.equal(ours(tokens[:, :-1]), want)
    assert (ours(tokens[:, :-1]) - want).abs().max() > 1e-4


@pytest.mark.parametrize("rs", [False, True])
@pytest.mark.parametrize("model", ["gqa", "latent", "gpt_oss"])
def test_the_model_is_the_one_of_merged_weights(model, rs):
    """In fp64: logits, and the gradients of a and b by the chain rule, dB = s dW A^T, dA = s B^T dW."""
    cfg = config(model, rs=rs)
    ours = moved(built(cfg)).double()
    merged = built(replace(cfg, lora=LoraConfig())).double()
    weights = dict(merged.named_parameters())
    pairs = {}
    for name, p in ours.named_parameters():
        if not is_adapter(name) or not name.endswith("a"):
            continue
        expert = "experts" in name
        target = name.removesuffix("_a") if expert else name.removesuffix("a") + "weight"
        b = ours.get_parameter(name[:-1] + "b")
        rank = p.shape[-2]
        s = 12.0 / (rank**0.5 if rs else rank)
        assert rank == (2 if expert else 6)
        weights[target].data.add_(s * b.data @ p.data)
        pairs[target] = s, p, b
    tokens = batch(cfg)
    losses = [m(tokens[:, :-1], tokens[:, 1:].contiguous()) for m in (ours, merged)]
    assert abs(losses[0].item() - losses[1].item()) < 1e-12
    for p in merged.parameters():
        p.requires_grad_()
    merged(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
    losses[0].backward()
    for target, (s, a, b) in pairs.items():
        dw = weights[target].grad
        for got, want in ((b.grad, s * dw @ a.mT), (a.grad, s * b.mT @ dw)):
            assert (got - want).abs().max() <= 1e-12 * max(want.abs().max().item(), 1e-3), target


def test_blocks_can_be_compiled_before_weights_have_memory():
    """model/compile_ahead.py calls a block whose parameters cannot be read: the op scales, not its caller."""
    experts = built(config()).blocks[1].moe.experts
    for p in experts.parameters():
        p.data.untyped_storage().resize_(0)
    factors, scales = experts.local_adapters()
    assert factors.down_b is experts.down_b and factors.gate_up_a is experts.gate_up_a
    assert scales == (6.0, 6.0)


def test_targets():
    model = built(config(targets=("attention", r"experts\.down")))
    kinds = {name.split(".", 2)[2] for name, p in model.named_parameters() if p.requires_grad}
    assert kinds == {
        *(f"attention.{m}.{x}" for m in ("qkv", "o") for x in "ab"),
        *(f"moe.experts.down_{x}" for x in "ab"),
    }
    require_matches(config(targets=("attention", r"experts\.down")))
    with pytest.raises(
        ConfigError, match=r"--lora.targets=q_proj: found in the name of no matrix .*attention.qkv"
    ):
        require_matches(config(targets=("attention", "q_proj")))
    for other in ("head", "router", "embedding", "shared_gate"):
        with pytest.raises(ConfigError, match="found in the name of no matrix"):
            require_matches(config(targets=(other,)))
    with pytest.raises(ConfigError, match=r"--lora.targets=\(: must be a regular expression"):
        LoraConfig(targets=("(",))


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (
            dict(rank=64),
            "--lora.rank=64: gives blocks.0.attention.qkv the rank 64, above 32, the",
        ),
        (
            dict(rank=2, expert_rank=33),
            "--lora.expert-rank=33: gives blocks.1.moe.experts.gate_up the",
        ),
        (dict(rank=2, ranks=("down:99",)), "--lora.ranks=down:99: gives blocks.0.ffn.down the rank 99"),
        (dict(rank=64, targets=("experts",)), ""),  # 64 / top-k = 32
        (dict(rank=64, init="runs/a"), ""),  # as they were trained
        (dict(rank=16, ranks=("nothing:99",)), ""),
    ],
)
def test_a_rank_above_a_side_of_its_matrix_is_refused(lora, said):
    cfg = replace(config(), init="runs/b", lora=LoraConfig(**lora))
    moe = replace(cfg.model.moe, top_k=2, ffn_dim=32)
    cfg = replace(cfg, model=replace(cfg.model, moe=moe, dim=32))
    found = ""
    try:
        require_ranks(cfg)
    except ConfigError as error:
        found = spelt(str(error))
    assert found.startswith(said) and bool(found) == bool(said)


def test_settings_that_cannot_go_with_adapters():
    def refused(match, **changes):
        with pytest.raises(ConfigError, match=match):
            replace(config(), **changes)

    refused("--optim.freeze=router: with --lora.rank=6 adapters alone", optim=OptimConfig(freeze="router"))
    refused("--lora.init=runs/a: needs --init", lora=LoraConfig(rank=4, init="runs/a"))
    refused("--lora.dropout=0.1: changes log-probs", task="preference", lora=LoraConfig(rank=4, dropout=0.1))
    changed = r"--lora.targets=attention moe: s was trained with --lora.targets=none$"
    with pytest.raises(ConfigError, match=changed):
        require_same_settings(
            Path("s"), asdict(LoraConfig(rank=6)), config(alpha=32.0, targets=("attention", "moe"))
        )
    with pytest.raises(ConfigError, match=r"--lora.rank=-1: must be at least 0"):
        LoraConfig(rank=-1)
    with pytest.raises(ConfigError, match=r"--lora.alpha=0.*must be positive"):
        LoraConfig(alpha=0.0)
    factors = OptimConfig(lr_factors=(r"\.b$:16",))
    require_matches(replace(config(), optim=factors))
    with pytest.raises(ConfigError, match=r"--optim.lr-factors=router: found in no parameter's name"):
        require_matches(replace(config(), optim=OptimConfig(lr_factors=("router:2",))))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(task="preference"), True),
        (dict(task="preference", preference=PreferenceConfig(loss="simpo")), False),
        (dict(task="grpo", grpo=GrpoConfig(rewards=("exact",), kl=0.1)), True),
        (dict(task="grpo", grpo=GrpoConfig(rewards=("exact",))), False),
        (dict(task="sft"), False),
    ],
)
def test_a_reference_without_the_adapters_of_the_start_is_stated(changes, said):
    lines = describe(replace(config(), init="base", lora=LoraConfig(rank=4, init="runs/a"), **changes), ep=1)
    assert any("without the adapters of --lora.init=runs/a" in line for line in lines) == said


def test_a_step_of_adapters_is_no_whole_model():
    """The error names the command that makes one; only --init of train.py has the flags of train.py."""

    def said(setting, **info):
        manifest = Manifest(0, 0, 1, 0, dict(config=dict(lora=dict(rank=4))) | info, {}, {}, {})
        with pytest.raises(ConfigError) as error:
            refuse_adapters(Path("s"), manifest, setting)
        return error.value.spelt("flag")

    based, merge = dict(base=dict(path="b", sha256="0")), "`python -m tmoe.hf merge s DIR`"
    assert said("", **based).startswith("s: holds adapters on b, ") and merge in said("", **based)
    assert said("init", **based).endswith("valid: --init=b --lora.init=s with --lora.rank")
    assert said("base", **based).startswith("--base=s: ") and merge in said("base", **based)
    assert merge in said("init") and said("").startswith("s: holds adapters next to their base")
    refuse_adapters(Path("s"), Manifest(0, 0, 1, 0, dict(config=dict(lora=dict(rank=0))), {}, {}, {}), "")


def test_every_adapter_moves_in_one_step_or_two():
    """After the first step every b has moved; a, whose gradient is 0 while b is, after the second."""
    cfg = config()
    model = built(cfg)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    for _ in range(2):
        tokens = torch.randint(0, cfg.model.vocab, (16, 33), generator=torch.Generator().manual_seed(1))
        model(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != is_adapter(name), name


def test_dropout_is_of_dense_layers_and_of_training():
    cfg = config(dropout=0.5)
    model = moved(built(cfg))
    tokens = batch(cfg)[:, :-1]
    with torch.no_grad():
        model.eval()
        assert torch.equal(model(tokens), model(tokens))
        model.train()
        assert not torch.equal(model(tokens), model(tokens))
    only = moved(built(config(dropout=0.5, targets=("experts",))))
    with torch.no_grad():
        assert torch.equal(only(tokens), only(tokens))


def test_memory_counts_adapters_and_a_base_without_masters():
    """Computed by hand: fp32, gradient, two moments and a bf16 copy of each number; 2 bytes of the base."""
    cfg = replace(config(), train=TrainConfig(seq=32, batch=1, dtype="bf16"))
    plain = replace(cfg, lora=LoraConfig())
    whole, ours = (memory_per_rank(one, Axes()) for one in (plain, cfg))
    model = built(cfg)
    n = sum(p.numel() for p in model.parameters() if p.requires_grad)
    base = sum(p.numel() for p in model.parameters()) - n
    assert adapter_counts(cfg.model, cfg.lora, range(4))[:2] == (
        sum(p.numel() for name, p in model.named_parameters() if is_adapter(name) and "experts" not in name),
        sum(p.numel() for name, p in model.named_parameters() if is_adapter(name) and "experts" in name),
    )
    assert ours["parameters"] == 2 * base + 4 * n and whole["parameters"] == 4 * base
    assert ours["moments"] == 8 * n and ours["gradients"] == ours["gathered"] == 2 * n
    tokens, dense_matrices, experts = 32, 4 * 2 + 3 * 2 + 2, 3 * 3 * 2
    assert ours["activations"] - whole["activations"] == 2 * tokens * (dense_matrices * 6 + experts * 2)
    spread = memory_per_rank(cfg, Axes(ep=2))
    dense = adapter_counts(cfg.model, cfg.lora, range(4)).dense
    share = 8 * (dense // 2 + (n - dense) // 2)
    assert spread["moments"] == pytest.approx(share, rel=0.01)  # the base's pieces are rounded up


@pytest.mark.parametrize("model", ["gqa", "latent", "narrow"])
def test_decoding_has_the_adapters_of_training(model):
    """Log-probs of tokens made one at a time are those of the whole row; latent matrices are absorbed."""
    cfg = config(model)
    cfg = replace(cfg, model=replace(cfg.model, rope=replace(cfg.model.rope, max_seq=64)))
    net = moved(built(cfg), 0.3).eval()
    prompt = [5, 9, 1, 33, 7]
    ((sample,),) = Engine(net).generate([prompt], 1, Sampling(temperature=0.0, max_tokens=9))
    row = torch.tensor([[*prompt, *sample.ids.tolist()]])
    with torch.no_grad():
        logp = net(row).log_softmax(-1)[0, len(prompt) - 1 : -1]
        with off(net):
            plain = net(row).log_softmax(-1)[0, len(prompt) - 1 : -1]
    want, without = (t.gather(-1, sample.ids[:, None])[:, 0] for t in (logp, plain))
    torch.testing.assert_close(sample.logprobs, want, rtol=1e-4, atol=1e-5)
    assert (want - without).abs().max() > 1e-2
