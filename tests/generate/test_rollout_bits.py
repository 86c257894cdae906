"""Log-probabilities of a rollout are those of training's forward, and its routes replay in training.

next: tests/generate/test_command.py
"""

from dataclasses import replace

import pytest
import torch
from layouts import GQA, OLMOE, ROUTED
from tiers import slow_but

from tmoe.generate import Engine, Sample, Sampling
from tmoe.model.transformer import Transformer
from tmoe.moe.trace import keeping, replaying

PLAIN = replace(ROUTED, shared_dim=0, shared_gate=False)
MODELS = dict(
    qwen3=replace(GQA, dense_layers=0, moe=PLAIN),
    pilot=replace(
        GQA,
        qk_norm="none",
        dense_layers=0,
        moe=PLAIN,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    olmoe=replace(OLMOE, dense_layers=0, moe=PLAIN),
)
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 9, 8]]
HOW = Sampling(temperature=0.8, max_tokens=16, seed=3)


def net_of(name: str, dtype: torch.dtype = torch.float32) -> Transformer:
    torch.manual_seed(0)
    net = Transformer(MODELS[name])
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() > 1:
                p.mul_(5)
    return net.to(dtype)


def in_training(net: Transformer, prompt: list[int], sample: Sample) -> torch.Tensor:
    """Log-probabilities of an answer's tokens by a forward over the whole of it."""
    logits = net(torch.tensor([[*prompt, *sample.ids.tolist()]]))[0, len(prompt) - 1 : -1].float()
    return (logits / HOW.temperature).log_softmax(-1).gather(1, sample.ids[:, None])[:, 0]


CASES = [(name, dtype) for name in MODELS for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("name, dtype", slow_but([CASES[0], CASES[1]], CASES), ids=str)
def test_log_probabilities_are_those_of_training(name, dtype):
    net = net_of(name, dtype)
    found = Engine(net).generate(PROMPTS, 3, HOW)
    pairs = [
        (s.logprobs, in_training(net, p, s))
        for p, answers in zip(PROMPTS, found, strict=True)
        for s in answers
    ]
    ours, theirs = (torch.cat(parts).detach() for parts in zip(*pairs, strict=True))
    far = (ours - theirs).abs()
    equal = (ours == theirs).float().mean().item()
    print(f"{name}, {dtype}: {equal:.0%} equal in bits, {far.max().item():.1e} at most")
    if dtype == torch.float32:
        assert far.max() < 1e-5
    else:  # a logit of 4 has steps of 2^-6 in bf16
        assert far.max() < 0.1 and far.mean() < 0.02


@pytest.mark.parametrize("name", slow_but(["qwen3"], MODELS))
def test_routes_replay_in_training(name):
    """R3: after the weights have moved, training takes the experts of the rollout, with its own weights."""
    net = net_of(name)
    prompt = PROMPTS[1]
    (sample,) = Engine(net).generate([prompt], 1, HOW, routes=True)[0]
    routes_YTK = torch.cat([sample.prompt_routes, sample.routes], 1)
    ids = torch.tensor([[*prompt, *sample.ids.tolist()]])
    tokens, targets = ids[:, :-1], ids[:, 1:]
    assert routes_YTK.shape == (4, tokens.shape[1], 3)
    with torch.no_grad():
        for block in net.blocks:
            weight = block.moe.router.weight
            weight += 0.5 * weight.std() * torch.randn_like(weight)
    with keeping(net) as live:
        net(tokens, targets)
    assert not torch.equal(live[0].sort(-1).values.int(), routes_YTK.sort(-1).values.int())
    with keeping(net) as calls, replaying(net, routes_YTK):
        net(tokens, targets).backward()
    assert torch.equal(calls[0].int(), routes_YTK.int())
    for block in net.blocks:
        assert block.moe.router.weight.grad.abs().max() > 1e-6


def test_routes_of_prompts_are_those_of_whole_forwards():
    net = net_of("qwen3").eval()
    net.train()  # only training's forwards are kept; this model has no noise
    found = Engine(net, slots=2).generate(PROMPTS, 2, HOW, routes=True)
    assert found[0][0].prompt_routes is None, "a prompt of one token"
    for prompt, answers in zip(PROMPTS[1:], found[1:], strict=True):
        with keeping(net) as calls, torch.no_grad():
            net(torch.tensor([prompt[:-1]]))
        for sample in answers:
            assert torch.equal(sample.prompt_routes.sort(-1).values.int(), calls[0].sort(-1).values.int())
