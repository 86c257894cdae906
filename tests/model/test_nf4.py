"""A base in NF4 under adapters: losses and gradients are those of a whole base of the same values.

next: tests/end_to_end/test_nf4_train.py
"""

from dataclasses import replace

import pytest
import torch
from tiny_models import MODEL
from torch import Tensor

from tmoe.base.quantised import dequantise, quantise
from tmoe.config.linear_settings import LinearConfig
from tmoe.config.model import MLAConfig, ModelConfig
from tmoe.config.run import LoraConfig
from tmoe.generate import Engine, Sampling
from tmoe.model.lora import adapt, is_adapter, off
from tmoe.model.nf4 import has_nf4, slots_of
from tmoe.model.parallelize import apply_checkpoint
from tmoe.model.transformer import Transformer
from tmoe.ops.experts.adapted import Adapters, moe_mlp_adapted
from tmoe.ops.experts.cpu import ExpertWeights
from tmoe.ops.quantised.adapted import Nf4Weights, moe_mlp_nf4, nf4_linear
from tmoe.ops.quantised.gpu import Matrix

LORA = LoraConfig(rank=4)
LATENT = MLAConfig(q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8)
LINEAR = LinearConfig("deltanet", key_heads=2, value_heads=4, key_dim=8, value_dim=8)
LATENT = replace(MODEL, attention="mla", qk_norm="none", mla=LATENT)


def nf4(weight: Tensor) -> Matrix:
    return Matrix("nf4", tuple(weight.shape), quantise(weight, "nf4"))


def values(matrix: Matrix) -> Tensor:
    return dequantise(matrix.parts, "nf4", matrix.shape)


def both(cfg: ModelConfig, lora: LoraConfig) -> tuple[Transformer, Transformer]:
    """A model on a base in NF4, and one on a whole base that holds its values."""
    torch.manual_seed(0)
    state = Transformer(cfg).state_dict()
    weights = {name: torch.randn(t.shape) * 0.2 + (t.dim() == 1) for name, t in state.items()}
    with torch.device("meta"):
        small = Transformer(cfg)
        adapt(small, replace(lora, base="nf4"), "fp32")
    small.to_empty(device="cpu").init_weights(0)
    whole = Transformer(cfg)
    adapt(whole, lora, "fp32")
    slots, ours, theirs = slots_of(small), small.state_dict(), whole.state_dict()
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, t in weights.items():
            if name in slots:
                slots[name].put(t)
                theirs[name].copy_(values(nf4(t)))
            else:
                ours[name].copy_(t)
                theirs[name].copy_(t)
        for name in filter(is_adapter, ours):
            ours[name].normal_(0, 0.1, generator=drawn)
            theirs[name].copy_(ours[name])
    return small, whole


def gradients(model: Transformer, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


CASES = {
    "all": (MODEL, LORA),
    "some, rs": (MODEL, LoraConfig(rank=4, rs=True, targets=("attention", "experts.down"))),
    "weights before": (replace(MODEL, moe=replace(MODEL.moe, weigh="before")), LORA),
    "latent experts": (replace(MODEL, moe=replace(MODEL.moe, latent_dim=16)), LORA),
    "latent attention": (LATENT, LORA),
    "linear layers": (replace(MODEL, layer_types=("linear", "full"), linear=LINEAR), LORA),
    "biases": (
        replace(MODEL, moe=replace(MODEL.moe, bias=True, activation="clamped:alpha=1.7,limit=7")), LORA
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_the_values(case):
    small, whole = both(*CASES[case])
    tokens = torch.randint(0, 64, (2, 12))
    (loss, found), (want_loss, want) = (gradients(model, tokens) for model in (small, whole))
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    assert found.keys() == want.keys() and all(map(is_adapter, found))
    for name, gradient in found.items():
        assert gradient.any()
        torch.testing.assert_close(gradient, want[name], rtol=1e-5, atol=1e-7)
    with torch.no_grad(), off(small), off(whole):
        torch.testing.assert_close(small(tokens), whole(tokens), rtol=1e-5, atol=1e-5)


def test_compiled_blocks_have_the_losses_and_gradients_of_eager_ones():
    """Each block is one graph, with recomputation, as train.py compiles it."""
    small, whole = both(replace(MODEL, layers=2), LORA)
    tokens = torch.randint(0, 64, (2, 12))
    apply_checkpoint(small, "block")
    for block in small.blocks:
        block.compute = torch.compile(block.compute, fullgraph=True, dynamic=False, backend="aot_eager")
    (loss, found), (want_loss, want) = (gradients(model, tokens) for model in (small, whole))
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    assert found.keys() == want.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        torch.testing.assert_close(small(tokens), whole(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cfg", [MODEL, LATENT], ids=["grouped", "latent"])
def test_an_engine_answers_with_adapters_on_nf4(cfg):
    cfg = replace(cfg, rope=replace(cfg.rope, max_seq=64))
    answers = [
        Engine(model.eval()).generate([[1, 2, 3], [4]], 1, Sampling(temperature=0, max_tokens=6))
        for model in both(cfg, LORA)
    ]
    for one, two in zip(*answers, strict=True):
        assert one[0].ids.tolist() == two[0].ids.tolist()
        torch.testing.assert_close(one[0].logprobs, two[0].logprobs, rtol=1e-4, atol=1e-5)


def test_only_matrices_of_blocks_are_in_nf4():
    small, _ = both(MODEL, LoraConfig(rank=2, targets=("attention.o",)))
    assert has_nf4(small) and len(slots_of(small)) == 3 * 2 + 2 + 2 * (2 + 2)
    names = {name for name, _ in small.named_parameters()}
    matrices = {n for n in names if n.endswith((".weight", "gate_up", "down")) and "norm" not in n}
    kept = {f"blocks.{i}.moe.{part}.weight" for i in (1, 2) for part in ("router", "shared_gate")}
    assert matrices == kept | {"embedding.weight", "head.weight"}


def test_backward_keeps_codes_and_no_values():
    """Saved tensors of both ops: none of the size of a matrix in floating point."""
    torch.manual_seed(0)
    E, D, F = 3, 64, 32
    up, down = nf4(torch.randn(E, 2 * F, D)), nf4(torch.randn(E, D, F))
    x = torch.randn(4, D, requires_grad=True)
    ids, weights = torch.randint(0, E, (4, 2)), torch.rand(4, 2)
    factors = [torch.randn(E, 2, D), torch.randn(E, 2 * F, 2), torch.randn(E, 2, F), torch.randn(E, D, 2)]
    adapters = Adapters(*(t.requires_grad_() for t in factors))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = moe_mlp_nf4(x, Nf4Weights(up, down, None, "swiglu"), adapters, weights, ids)
        z = nf4_linear(y, nf4(torch.randn(48, D)))
    assert kept and all(t.numel() < D * F for t in kept if t.is_floating_point())
    (z.sum() + y.square().sum()).backward()
    want = moe_mlp_adapted(x, ExpertWeights(values(up), values(down), None, "swiglu"), adapters, weights, ids)
    torch.testing.assert_close(y, want)


def test_other_kinds_and_shapes_are_refused():
    x, matrix = torch.randn(2, 64), nf4(torch.randn(8, 64))
    with pytest.raises(ValueError, match="kind: got int8, valid is nf4"):
        nf4_linear(x, matrix._replace(kind="int8"))
    with pytest.raises(ValueError, match=r"weight: got shape \(8, 64\), valid is \(8, 32\)"):
        nf4_linear(torch.randn(2, 32), matrix)
