"""swap_experts with products in fp8: near the unswapped model in training, equal to it in evaluation.

next: tests/hf/test_hf_swap.py
"""

import copy
import pickle

import pytest
import torch
import transformers
from hf_tiny import SIZES, far, make
from tiers import slow_but

from tmoe.config.check import ConfigError
from tmoe.hf import swap_experts
from tmoe.hf.swap import SwappedExperts
from tmoe.parallel import build_mesh

WIDE = SIZES | dict(hidden_size=64, intermediate_size=48, num_hidden_layers=1)
KINDS = dict(
    mixtral=lambda: transformers.MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
    gpt_oss=lambda: transformers.GptOssConfig(  # transposed, gate and up in turn, biases, clamped
        **WIDE, num_local_experts=4, num_experts_per_tok=2, head_dim=8
    ),
)
X = torch.arange(60).view(3, 20) * 7 % 31


def model_of(name):
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(KINDS[name]())
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3 if p.dim() > 1 else 1.0)
    return made.train()


def results(model):
    """Logits, and gradients of a loss by name."""
    model.zero_grad()
    out = model(X, labels=X)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", slow_but(["gpt_oss"], KINDS))
def test_training_is_near_and_evaluation_the_same(name):
    theirs = model_of(name)
    ours = swap_experts(copy.deepcopy(theirs), fp8=True)
    (want, grads), (got, ours_grads) = results(theirs), results(ours)
    assert 1e-3 < far(got, want) < 0.2 and grads.keys() == ours_grads.keys()
    for key, grad in grads.items():
        if ".experts." in key:
            assert 1e-3 < float((ours_grads[key] - grad).norm() / grad.norm()) < 0.25, key
    assert far(ours.eval()(X).logits, theirs.eval()(X).logits) < 1e-5
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(again.train()(X).logits, got)


def test_codes_are_those_of_the_present_weights():
    """Also after a write that autograd does not count."""
    ours = swap_experts(model_of("mixtral"), fp8=True)
    ours(X)
    for p in ours.parameters():
        p.data.mul_(0.5)
    fresh = swap_experts(model_of("mixtral"), fp8=True)
    for p in fresh.parameters():
        p.data.mul_(0.5)
    assert torch.equal(ours(X).logits, fresh(X).logits)


def spread(rank, world):
    ours = swap_experts(model_of("mixtral"), build_mesh(ep=world), fp8=True)
    logits, grads = results(ours)
    return logits, {name: grad for name, grad in grads.items() if ".experts." not in name}


@pytest.mark.slow
def test_spread_over_ranks(gloo):
    """In fp32 sums of another order change no code."""
    want, grads = results(swap_experts(model_of("mixtral"), fp8=True))
    for logits, own in gloo(2, spread):
        assert far(logits, want) < 1e-5
        for name, grad in own.items():
            assert far(grad, grads[name]) < 1e-4, name


def test_what_has_no_products_is_refused():
    for model, wrong in (
        (
            make("mixtral"),
            r"fp8=True: model\.layers\.0.*has the widths \(16, 12\); both must be multiples of 16",
        ),
        (model_of("mixtral").half(), r"fp8=True: .*has weights in torch\.float16; valid are torch\.float32"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            swap_experts(model, fp8=True)
        assert not any(isinstance(module, SwappedExperts) for module in model.modules())
