"""Every family of the installed transformers: swapped it is the same model, or it is refused by name.

A tiny random model of each: logits, the gradient of every parameter, saved tensors, what is loaded from them,
and greedy generation with a cache. A family that next month's transformers adds is tested like the others.

next: tests/lib/hf_families.py
"""

import copy

import pytest
import torch
from hf_families import BESIDE, FAMILIES, build
from hf_tiny import assert_bits, far, tensors_of
from tiers import slow_but

from tmoe.config.check import ConfigError
from tmoe.hf import swap_experts
from tmoe.hf.swap import SwappedExperts

UNMARKED = "has none of transformers' marks"
NONE = "is marked as experts by transformers"
REFUSED = {  # family: what it is refused with
    "dbrx": NONE,
    "doge": NONE,
    "inkling2": r"its own gate, Inkling2Experts\._apply_gate; the fused op computes swiglu",
    "jetmoe": NONE,
    "llama4": f"Llama4TextExperts {UNMARKED}",
    "longcat_flash": f"LongcatFlashExperts {UNMARKED}",
    "muse_spark": "is marked has_post_expert_norm=True: a norm after each expert",
    "nllb_moe": NONE,
    "step3p7": f"Step3p7Experts {UNMARKED}",
    "switch_transformers": NONE,
}
# activations other than SwiGLU, which a model is known by
OTHERS = {
    "deepseek_v4": "clamped_silu:limit=0.5",
    "diffusion_gemma": "geglu",
    "gemma4": "geglu",
    "glm5_next": "clamped_silu",
    "gpt_oss": "clamped:limit=0.5",
    "hy_v4": "clamped_silu",
    "minimax_m3_vl": "clamped",
    "nemotron_h": "relu2",
    "openai_privacy_filter": "clamped",
}
FAST = ("ernie4_5_vl_moe", "gemma4", "llama4", "nemotron_h")


def result(out) -> torch.Tensor:
    return out.logits if "logits" in out else out.last_hidden_state


def result_and_gradients(model, tokens, seen, **beside):
    out = result(model(tokens, **beside))
    (out * seen).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return out.detach(), gradients


@pytest.mark.parametrize("family", slow_but(FAST, FAMILIES))
def test_a_family_is_right_or_refused_by_name(tmp_path, family):
    theirs = build(family)
    if family in REFUSED:
        with pytest.raises(ConfigError, match=f"swap_experts: .*{REFUSED[family]}"):
            swap_experts(theirs)
        assert not any(isinstance(module, SwappedExperts) for module in theirs.modules())
        return

    ours = swap_experts(copy.deepcopy(theirs))
    swapped = [module for module in ours.modules() if isinstance(module, SwappedExperts)]
    assert {module.marks.activation for module in swapped} == {OTHERS.get(family, "swiglu")}
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 60, (2, 10), generator=draw)
    beside = BESIDE.get(family, {})
    seen = torch.randn(result(theirs(tokens, **beside)).shape, generator=draw)
    found = [result_and_gradients(model, tokens, seen, **beside) for model in (theirs, ours)]
    (want, wanted), (got, gradients) = found
    assert far(got, want) < 1e-5
    assert gradients.keys() == wanted.keys()
    largest = max(g.norm().item() for g in wanted.values() if g is not None)
    for name, g in wanted.items():
        assert (g is None) == (gradients[name] is None), name
        if g is not None:  # of what is zero but for rounding, as much as of the largest
            assert (gradients[name] - g).norm() < 1e-4 * max(g.norm().item(), 1e-3 * largest), name
    trained = [wanted[n] for n in wanted if "experts" in n and n.endswith(".down_proj")]
    assert any(g is not None and g.norm() > 1e-3 * largest for g in trained), "the experts count"

    for model, name in ((theirs, "theirs"), (ours, "ours")):
        model.save_pretrained(tmp_path / name)
    assert_bits(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    how = dict(attn_implementation="eager", experts_implementation="eager")
    again = type(theirs).from_pretrained(tmp_path / "ours", **how).eval()
    assert torch.equal(result(again(tokens, **beside)), want)

    if theirs.can_generate():
        how = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(ours.generate(tokens, **how), theirs.generate(tokens, **how))


def test_sixty_families_are_swapped():
    assert len([family for family in FAMILIES if family not in REFUSED]) >= 60
