"""Swapped experts and imported models with tmoe's kernels, against transformers' own on the same GPU.

next: tmoe/hf/swap.py
"""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from hf_tiny import MODELS, SPARSE, far, gradients_by_their_names, load_step, make, saved, tensors_of

from tmoe.hf import import_hf, swap_experts

pytestmark = pytest.mark.gpu
# weights of 0.3 are large for 128 columns, so roundings grow
LOGITS, GRADIENTS = dict(tiny=1e-5, wide=5e-5), dict(tiny=2e-5, wide=2e-3)


def wide(name, monkeypatch, dtype=torch.float32):
    """The tiny model with experts of 128 x 64, which have descriptors in 16 bits.

    Its usual 16 x 10 have none.
    """
    config = MODELS[name]()
    for key in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if hasattr(config, key):
            setattr(config, key, 64)
    config.hidden_size = 128
    monkeypatch.setitem(MODELS, name, lambda: config)
    return make(name, dtype).cuda()


def gradients(model, x):
    logits = model(x).logits.float()
    F.cross_entropy(logits.flatten(0, 1), x.flatten()).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", ["tiny", "wide"])
@pytest.mark.parametrize("name", SPARSE)
def test_swapped_model_is_the_same_function(name, size, monkeypatch):
    theirs = make(name).cuda() if size == "tiny" else wide(name, monkeypatch)
    ours = swap_experts(copy.deepcopy(theirs))
    for T in (20, 1, 33):
        x = torch.randint(31, (3, T)).cuda()
        theirs.zero_grad()
        ours.zero_grad()
        (a, want), (b, got) = gradients(theirs, x), gradients(ours, x)
        assert far(b, a) < LOGITS[size] and got.keys() == want.keys()
        assert max(far(got[key], want[key]) for key in want) < GRADIENTS[size]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe"])
def test_swapped_in_16_bits_is_no_further_from_fp32(name, dtype, monkeypatch):
    exact = wide(name, monkeypatch)
    # a second block's router would choose otherwise for a rounding
    exact.model.layers = exact.model.layers[:1]
    with torch.no_grad():
        for p in exact.parameters():
            p.copy_(p.to(dtype))
    theirs = copy.deepcopy(exact).to(dtype)
    ours = swap_experts(copy.deepcopy(theirs))
    x = torch.randint(31, (4, 64)).cuda()
    (want, d_want), (a, d_a), (b, d_b) = (gradients(m, x) for m in (exact, theirs, ours))
    assert far(b, want) < 1.5 * far(a, want) + 1e-3
    for key in d_want:
        assert far(d_b[key].float(), d_want[key]) < 1.5 * far(d_a[key].float(), d_want[key]) + 1e-2, key


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_swapped_model_generates_alike(name, monkeypatch):
    theirs = wide(name, monkeypatch)
    ours = swap_experts(copy.deepcopy(theirs))
    x = torch.randint(3, 31, (2, 7)).cuda()
    how = dict(max_new_tokens=24, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(x))
    assert torch.equal(ours.generate(x, **how), theirs.generate(x, **how))


@pytest.mark.parametrize("how", ["checkpointing", "autocast", "compile"])
def test_swapped_under_what_users_put_around(how, monkeypatch):
    theirs = wide("qwen3_moe", monkeypatch)
    ours = swap_experts(copy.deepcopy(theirs))
    x = torch.randint(31, (3, 40)).cuda()
    want, d_want = gradients(theirs, x)
    if how == "checkpointing":
        ours.train().gradient_checkpointing_enable()
        got, d_got = gradients(ours, x)
    elif how == "compile":
        compiled = torch.compile(ours)
        got, d_got = gradients(compiled, x)
        d_got = {name: p.grad for name, p in ours.named_parameters()}
    else:
        with torch.autocast("cuda", torch.bfloat16):
            got, d_got = gradients(ours, x)
    limit = 0.1 if how == "autocast" else 2e-5
    assert far(got, want) < limit
    assert how == "autocast" or max(far(d_got[key], d_want[key]) for key in d_want) < limit


def by_their_names(tmp_path, theirs):
    """The gradients, under the names of files: saved as if they were weights. Choice biases have none."""
    for p in theirs.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    theirs.cpu().save_pretrained(tmp_path / "gradients")
    found = tensors_of(tmp_path / "gradients").items()
    return {n: g for n, g in found if not n.endswith(("e_score_correction_bias", "expert_bias"))}


@pytest.mark.parametrize("size", ["tiny", "wide"])
@pytest.mark.parametrize("name", MODELS)
def test_imported_model_is_the_same_function_on_a_gpu(name, size, tmp_path, monkeypatch):
    theirs = make(name).cuda() if size == "tiny" else wide(name, monkeypatch)
    hf_dir = saved(tmp_path / "hf", name)
    import_hf(hf_dir, tmp_path / "step")
    ours = load_step(tmp_path / "step").cuda()
    x, targets = torch.randint(31, (2, 3, 40)).cuda()
    logits = theirs(x).logits
    turned = 2 * len(getattr(theirs.model.rotary_emb, "inv_freq", ()))
    if name == "minimax_m2" and turned != theirs.config.rotary_dim:
        pytest.skip("this transformers turns all channels, whatever rotary_dim says (5.17 does)")
    assert far(ours(x), logits) < LOGITS[size]
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    ours(x, targets).backward()
    want = by_their_names(tmp_path, theirs)
    got = gradients_by_their_names(ours, json.loads((hf_dir / "config.json").read_text()))
    assert got.keys() == want.keys()
    for key, gradient in want.items():
        assert far(got[key], gradient) < GRADIENTS[size] or (gradient.norm() == 0 and got[key].norm() == 0), (
            key
        )
    with torch.autocast("cuda", torch.bfloat16):
        loss = ours(x, targets)
    loss.backward()
    assert (
        torch.isfinite(loss)
        and abs(loss.item() - F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()) < 0.5
    )
