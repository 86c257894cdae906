"""tmoe.lora: adapters in transformers' models with tmoe's experts, against PEFT's logits and merged weights.

next: tests/hf/test_adapters_read.py
"""

import copy

import pytest
import torch
from peft_tiny import STORED, TOKENS, base_of, copied, logits_of, logits_of_step, off, saved_base
from safetensors.torch import load_file
from torch import nn

import tmoe
from tmoe.config.check import ConfigError
from tmoe.hf.adapters.commands import import_adapter
from tmoe.hf.swap import SwappedExperts, swap_experts
from tmoe.model.lora import off as without
from tmoe.parallel import build_mesh

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "granitemoe"]
BAR = 1e-5


def swapped(family):
    return swap_experts(base_of(family))


@torch.no_grad()
def logits(model):
    return model.eval()(TOKENS).logits[0]


@pytest.mark.parametrize("name", [*(f"{f}-0.19" for f in FAMILIES), "olmoe-0.18", "qwen3_moe-apart"])
def test_a_loaded_adapter_has_pefts_logits_also_merged_and_saved(name, tmp_path):
    family = name.split("-")[0]
    model = tmoe.lora.load(swapped(family).double(), STORED / name)
    want = logits_of(STORED / name)
    assert off(logits(model), want) < BAR
    with without(model):
        plain = logits(model)
    assert torch.equal(plain, logits(swapped(family).double()))
    tmoe.lora.save(model, tmp_path / "saved")
    again = tmoe.lora.load(swapped(family).double(), tmp_path / "saved")
    assert off(logits(again), want) < BAR
    import_adapter(tmp_path / "saved", tmp_path / "step", base=saved_base(family, tmp_path))
    assert off(logits_of_step(tmp_path / "step"), want) < BAR
    names = dict(swapped(family).named_parameters()).keys()
    assert off(logits(tmoe.lora.merge(model)), want) < BAR
    assert dict(model.named_parameters()).keys() == names
    assert not any(isinstance(m, tmoe.lora.AdaptedLinear) for m in model.modules())


def test_add_freezes_the_model_and_begins_with_its_function():
    model = tmoe.lora.add(swapped("qwen3_moe"), rank=4, alpha=8)
    assert torch.equal(logits(model), logits(swapped("qwen3_moe")))
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    at = "model.layers.0."
    assert {n.removeprefix(at): s for n, s in trained.items() if n.startswith(at)} == {
        **{f"self_attn.{n}_proj.a": (4, 32 if n == "o" else 16) for n in "qkvo"},
        **{f"self_attn.{n}_proj.b": (dict(q=32, k=16, v=16, o=16)[n], 4) for n in "qkvo"},
        "mlp.experts.gate_up_a": (8, 2, 16),
        "mlp.experts.gate_up_b": (8, 24, 2),
        "mlp.experts.down_a": (8, 2, 12),
        "mlp.experts.down_b": (8, 16, 2),
    }
    a = model.model.layers[0].mlp.experts.gate_up_a
    assert 0.9 / 4 < a.abs().max() <= 1 / 4 and not model.model.layers[0].mlp.experts.down_b.any()
    one = tmoe.lora.add(swapped("qwen3_moe"), rank=4, targets=["q_proj", r"experts\.down"])
    kinds = {name.split(".", 3)[3] for name, p in one.named_parameters() if p.requires_grad}
    assert kinds == {f"self_attn.q_proj.{x}" for x in "ab"} | {f"mlp.experts.down_{x}" for x in "ab"}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gradients_are_those_of_merged_weights(family):
    """dA = s B^T dW and dB = s dW A^T, dW of the model with merged weights."""
    model = tmoe.lora.add(swapped(family).double(), rank=4, alpha=6, rs=True).double()
    draw = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:
            p.data = torch.randn(p.shape, generator=draw, dtype=torch.float64) * 0.1
    whole = tmoe.lora.merge(copy.deepcopy(model))
    weights = dict(whole.named_parameters())
    for p in weights.values():
        p.requires_grad_(True)
    for one in (model, whole):
        one(TOKENS, labels=TOKENS).loss.backward()
    q, s = model.model.layers[1].self_attn.q_proj, 6 / 2
    dw = weights["model.layers.1.self_attn.q_proj.weight"].grad
    assert off(q.a.grad, s * q.b.T @ dw) < 1e-9 and off(q.b.grad, s * dw @ q.a.T) < 1e-9
    experts = model.model.layers[1].mlp.experts
    s = 6 / 2**0.5
    for matrix in ("gate_up", "down"):
        dw = weights[f"model.layers.1.mlp.experts.{matrix}_proj"].grad
        dw = dw.mT if family == "gpt_oss" else dw
        if family == "gpt_oss" and matrix == "gate_up":
            dw = torch.cat([dw[:, 0::2], dw[:, 1::2]], 1)
        a, b = (getattr(experts, f"{matrix}_{x}") for x in "ab")
        assert off(a.grad, s * b.mT @ dw) < 1e-9 and off(b.grad, s * dw @ a.mT) < 1e-9, matrix
    assert experts.down_proj.grad is None


def test_bf16_weights_keep_fp32_adapters():
    model = tmoe.lora.add(swapped("mixtral").bfloat16(), rank=2)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    merged = tmoe.lora.merge(model)
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}


def test_what_cannot_have_adapters_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no experts of tmoe's; valid: tmoe"):
        tmoe.lora.add(base_of("mixtral"), rank=2)
    with pytest.raises(ConfigError, match="targets=nothing: found in no name"):
        tmoe.lora.add(swapped("mixtral"), rank=2, targets=["nothing"])
    with pytest.raises(ConfigError, match=r"rank=17: gives model.layers.0.* the rank 17, above 16, the"):
        tmoe.lora.add(swapped("mixtral"), rank=17)
    with pytest.raises(ConfigError, match=r"expert-rank=13: gives .*experts.* the rank 13, above 12"):
        tmoe.lora.add(swapped("mixtral"), rank=2, expert_rank=13)
    with pytest.raises(ConfigError, match="rank=0: must be 1 or more"):
        tmoe.lora.add(swapped("mixtral"), rank=0)
    model = tmoe.lora.add(swapped("mixtral"), rank=2)
    with pytest.raises(ConfigError, match=r"targets=q_proj: one text.*valid: \['q_proj'\]"):
        tmoe.lora.add(swapped("mixtral"), rank=2, targets="q_proj")
    with pytest.raises(ConfigError, match=r"lora\.load: the model has adapters"):
        tmoe.lora.load(model, STORED / "mixtral-0.19")
    with pytest.raises(ConfigError, match="the model has adapters"):
        tmoe.lora.add(model, rank=2)
    with pytest.raises(ConfigError, match="the model has no adapters"):
        tmoe.lora.save(swapped("mixtral"), tmp_path / "a")
    with pytest.raises(ConfigError, match="use_dora"):
        tmoe.lora.load(swapped("mixtral"), copied("mixtral-0.19", tmp_path, use_dora=True))


def spread(rank, world, folder):
    """On two ranks: logits of a loaded adapter, and what rank 0 saves."""
    model = swap_experts(base_of("qwen3_moe"), build_mesh(dp=1, ep=world))
    tmoe.lora.load(model, STORED / "qwen3_moe-0.19")
    experts = next(m for m in model.modules() if isinstance(m, SwappedExperts))
    assert isinstance(experts.down_a, nn.Parameter) and experts.down_a.to_local().shape[0] == 8 // world
    got = logits(model)
    tmoe.lora.save(model, folder)
    return got


def test_a_mesh_spreads_the_adapters_of_experts(gloo, tmp_path):
    for got in gloo(2, spread, tmp_path / "two"):
        assert off(got, logits_of(STORED / "qwen3_moe-0.19")) < BAR
    tmoe.lora.save(tmoe.lora.load(swapped("qwen3_moe"), STORED / "qwen3_moe-0.19"), tmp_path / "one")
    one, two = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
