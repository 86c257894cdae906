"""An engine with bits gives the log-probs of training's forward in every bit, alone and over ranks.

next: tests/generate/test_bits_gpu.py
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rollout_bits import in_training, share_equal
from tiers import slow_but

from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.config.run import Config, LoraConfig, TrainConfig
from tmoe.generate import Engine, Sampling
from tmoe.model.lora import add_adapters, is_adapter, off
from tmoe.model.transformer import Transformer
from tmoe.parallel import build_mesh, parallelize

BASE = ModelConfig(
    vocab=67,
    dim=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rope=RopeConfig(max_seq=4096),
    moe=MoEConfig(experts=8, top_k=3, ffn_dim=24),
)
MODELS = {
    "qwen3": replace(BASE, qk_norm="head"),
    "pilot": replace(
        BASE,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.08,
        logits_scaling=4.0,
        moe=replace(BASE.moe, shared_dim=16),
    ),
    "olmoe": replace(BASE, kv_heads=4, qk_norm="full", moe=replace(BASE.moe, renormalize=False)),
}
LENGTHS = 1, 5, 127, 128, 140  # of prompts: below, at and after a block
HOW = Sampling(temperature=0.8, max_tokens=12, seed=3)


def prompts_of(rank: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randint(67, (n,), generator=draw).tolist() for n in LENGTHS[rank:]]


def spread_weights(model: Transformer) -> Transformer:
    """Norms that are not 1, and routers that choose apart."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            if name.endswith("router.weight"):
                p.mul_(20)
    return model


CASES = [(name, dtype) for name in MODELS for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), slow_but(CASES[:1], CASES), ids=str)
def test_log_probs_are_trainings(name, dtype):
    torch.manual_seed(0)
    model = spread_weights(Transformer(MODELS[name])).to(dtype)
    prompts = prompts_of()
    found = Engine(model, slots=5, bits=True).generate(prompts, 2, HOW)
    ours = [sample.logprobs for group in found for sample in group]
    want = in_training(model, prompts, found, 0.8)
    assert all(torch.equal(a, b) for a, b in zip(ours, want, strict=True)), share_equal(ours, want)


@pytest.mark.parametrize(("name", "dtype"), slow_but([("pilot", torch.float32)], CASES[:4]), ids=str)
def test_log_probs_with_adapters_are_trainings(name, dtype):
    torch.manual_seed(0)
    model = spread_weights(Transformer(MODELS[name]))
    add_adapters(model, LoraConfig(rank=6))
    for name, p in model.named_parameters():
        p.requires_grad_(is_adapter(name))
        if is_adapter(name):
            torch.nn.init.normal_(p, std=0.1)
    model.to(dtype)
    prompts = prompts_of()
    found = Engine(model, slots=5, bits=True).generate(prompts, 2, HOW)
    ours = [sample.logprobs for group in found for sample in group]
    want = in_training(model, prompts, found, 0.8)
    assert all(torch.equal(a, b) for a, b in zip(ours, want, strict=True)), share_equal(ours, want)
    with off(model):
        base = in_training(model, prompts, found, 0.8)
    assert not any(torch.equal(a, b) for a, b in zip(base, want, strict=True)), "adapters change nothing"


def over_ranks(rank: int, world: int, dtype: str) -> tuple[float, float]:
    torch.manual_seed(0)
    cfg = Config(model=MODELS["qwen3"], train=TrainConfig(seq=512, dtype=dtype), compile=False)
    cfg = replace(cfg, parallel=replace(cfg.parallel, ep=world))
    model = Transformer(cfg.model)
    parallelize(model, build_mesh(ep=world), cfg)
    prompts = prompts_of(rank)
    found = Engine(model, slots=3, bits=True).generate(prompts, 2, HOW)
    with torch.no_grad():
        want = in_training(model, prompts, found, 0.8)
    dist.barrier()
    return share_equal([sample.logprobs for group in found for sample in group], want)


@pytest.mark.parametrize("dtype", slow_but(["bf16"], ["bf16", "fp32"]))
def test_over_an_expert_group(gloo, dtype):
    """Ranks have other prompts, and other numbers of rows of each expert in each pass."""
    assert gloo(2, over_ranks, dtype) == [(1.0, 0.0)] * 2


def test_what_has_no_bits_is_refused():
    for more, words in (
        (dict(window=16), "--model.window=16"),
        (dict(sinks=True), "--model.sinks"),
        (dict(v_head_dim=8), "--model.v-head-dim=8"),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine(Transformer(replace(BASE, **more)), bits=True)
