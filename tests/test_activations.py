"""Each activation of the table has a right gradient, a formula for kernels, and a name that settings take.

next: tmoe/base/activations.py
"""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tmoe.base.activations import ACTIVATIONS, UNGATED, activation, canonical, full
from tmoe.config import Config, model
from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.model.count import count_parameters, flops_per_token
from tmoe.model.transformer import Transformer
from tmoe.moe.moe_bytes import gathered_expert_bytes, left_bytes, moe_bytes, slice_bytes
from tmoe.ops import moe_mlp, reference
from tmoe.ops.experts import kernels

SPELLED = [*ACTIVATIONS, "clamped:alpha=1.2,limit=3", "clamped_silu:limit=2.5"]


@pytest.mark.parametrize("name", SPELLED)
def test_the_gradient_is_autograds(name):
    torch.manual_seed(0)
    entry = activation(name)
    h = (6 * torch.randn(50, entry.halves * 20, dtype=torch.float64)).requires_grad_()
    d_act = torch.randn(50, 20, dtype=torch.float64)
    want = torch.autograd.grad(entry.of(h), h, d_act)[0]
    dh = torch.empty_like(h)
    with torch.no_grad():
        entry.gradient_of(h, d_act.clone(), dh)
    torch.testing.assert_close(dh, want, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(entry.of, h[:2])


def test_formulas_are_the_published_ones():
    """Worked out anew: sums and products of exp and erf, with the constants that are given."""
    g, u = 8 * torch.randn(2, 200, dtype=torch.float64)
    sigmoid = lambda x: 1 / (1 + torch.exp(-x))  # noqa: E731
    tanh = lambda x: 1 - 2 / (torch.exp(2 * x) + 1)  # noqa: E731
    up = lambda limit: torch.minimum(torch.maximum(u, -limit), limit)  # noqa: E731
    three, ten = torch.tensor([3.0, 10.0], dtype=torch.float64)
    low, lower = torch.minimum(g, three), torch.minimum(g, ten)
    want = {
        "swiglu": g * sigmoid(g) * u,
        "clamped:limit=3,alpha=1.2": low * sigmoid(1.2 * low) * (up(three) + 1),
        "clamped_silu": lower * sigmoid(lower) * up(ten),
        "geglu": g / 2 * (1 + tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) * u,
    }
    for name, act in want.items():
        torch.testing.assert_close(activation(name).of(torch.cat([g, u])), act, rtol=1e-12, atol=1e-12)
    alone = {
        "relu": torch.where(g > 0, g, 0),
        "relu2": torch.where(g > 0, g * g, 0),
        "gelu": g / 2 * (1 + torch.erf(g / 2**0.5)),
    }
    for name, act in alone.items():
        torch.testing.assert_close(activation(name).of(g), act, rtol=1e-12, atol=1e-12)
    assert {name.partition(":")[0] for name in (*want, *alone)} == {*ACTIVATIONS}
    assert tuple(name for name in ACTIVATIONS if name in alone) == UNGATED


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "swiglu"])
@pytest.mark.parametrize("kernel", [kernels.activate, kernels.activate_backward], ids=str)
def test_kernels_know_it(name, kernel):
    """Of what they do not know by name they say so when they are compiled."""
    assert f'NAME == "{name}"' in inspect.getsource(kernel.fn)


def test_settings_take_every_name_and_their_help_says_it():
    text = Path(model.__file__).read_text()
    told = text[text.index("    activation: ") :].split('"""')[1]
    for name in SPELLED:
        assert MoEConfig(activation=name).activation == canonical(name)
        assert f"({name}" in told or ":" in name


def test_two_are_published():
    """gpt-oss's config.json says swiglu_limit 7.0; its class's alpha is 1.702."""
    assert ACTIVATIONS["clamped"].keys == dict(swiglu_alpha=1.702, swiglu_limit=7.0)
    assert ACTIVATIONS["swiglu"].hidden_act == "silu"


def test_one_spelling():
    for text in ("clamped", "clamped:limit=7", "clamped:limit=7.0,alpha=1.702"):
        assert canonical(text) == "clamped" and full(text) == "clamped:alpha=1.702,limit=7.0"
    assert canonical("clamped:limit=5,alpha=1.702") == "clamped:limit=5.0"
    assert full("relu2") == canonical("relu2") == "relu2"
    assert kernels.constant(full("clamped:limit=5"), "limit") == 5.0
    assert kernels.constant(full("clamped:limit=5"), "alpha") == 1.702
    assert [kernels.halves_of(full(name)) for name in ACTIVATIONS] == [a.halves for a in ACTIVATIONS.values()]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("silu", "must be one of swiglu, clamped"),
        ("swiglu:limit=3", "'limit' is no constant of swiglu; it has none"),
        ("clamped:beta=3", "'beta' is no constant of clamped; it has alpha and limit"),
        ("clamped:limit=-1", "'limit=-1' must be limit= and a positive, finite number"),
        ("clamped:limit", "'limit' must be limit= and a positive, finite number"),
        ("clamped_silu:limit=nan", "'limit=nan' must be limit= and a positive, finite number"),
        ("clamped:", "'' is no constant of clamped"),
    ],
)
def test_what_is_none_is_said_by_name(text, says):
    with pytest.raises(ConfigError, match=f"--model.moe.activation={text}: {says}"):
        MoEConfig(activation=text)
    one = torch.ones(1, 1, 1)
    with pytest.raises(ValueError, match=f"activation: got '{text}', {says}"):
        moe_mlp(one[0], one.repeat(1, 2, 1), one, one[0], one[0].int(), activation=text)


def test_a_matrix_of_the_wrong_rows_is_refused():
    x, down, ids = torch.ones(3, 4), torch.ones(2, 4, 6), torch.zeros(3, 1, dtype=torch.int32)
    for name, rows, valid in [("relu2", 12, r"\(2, 6, 4\) = \[E, F, D\]"), ("geglu", 6, r"\(2, 12, 4\)")]:
        with pytest.raises(ValueError, match=f"gate_up: got shape .*valid is {valid}"):
            moe_mlp(x, torch.ones(2, rows, 4), down, torch.ones(3, 1), ids, activation=name)


# ---- what is counted of experts without a gate ----

GATED = Config(
    model=ModelConfig(dim=32, heads=2, kv_heads=2, layers=2, moe=MoEConfig(experts=4, ffn_dim=24, bias=True))
)


def plain(cfg: Config) -> Config:
    return replace(cfg, model=replace(cfg.model, moe=replace(cfg.model.moe, activation="relu2")))


def test_parameters_flops_and_memory_without_a_gate():
    """By hand: E F D weights (and E F biases) fewer a layer, and F elements a pair fewer that are kept."""
    E, F, D, K, layers = 4, 24, 32, 2, 2
    ours, theirs = plain(GATED), GATED
    built = Transformer(ours.model)
    assert count_parameters(ours.model).total == sum(p.numel() for p in built.parameters())
    fewer = count_parameters(theirs.model).total - count_parameters(ours.model).total
    assert fewer == layers * (E * F * D + E * F)
    flops = flops_per_token(theirs.model, 64) - flops_per_token(ours.model, 64)
    assert flops == 6 * layers * K * (F * D + F)

    T, alone, far = theirs.train.batch * theirs.train.seq, Axes(), Axes(ep=2, etp=2)
    assert moe_bytes(theirs, alone) - moe_bytes(ours, alone) == T * K * F * 2
    assert left_bytes(theirs, alone) - left_bytes(ours, alone) == T * K * F * 2
    assert [slice_bytes(cfg, far) for cfg in (theirs, ours)] == [n * 2 * (F // 2) * D * 2 for n in (3, 2)]
    near = Axes(ep=2)
    gathers = [replace(cfg, parallel=replace(cfg.parallel, adaptive_r=0)) for cfg in (theirs, ours)]
    assert [gathered_expert_bytes(cfg, near) for cfg in gathers] == [2 * n * E * F * D * 2 for n in (3, 2)]


def test_experts_without_a_gate_in_a_model():
    """Logits of the layer by the definition, at random weights and biases."""
    torch.manual_seed(0)
    moe = Transformer(plain(GATED).model).blocks[0].moe
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(9, 32)
    routing, own = moe.router(x), moe.experts
    want = torch.zeros_like(x)
    for t in range(9):
        for w, e in zip(routing.weights_TK[t], routing.ids_TK[t].tolist(), strict=True):
            h = F.relu(own.gate_up[e] @ x[t] + own.gate_up_bias[e]).square()
            want[t] += w * (own.down[e] @ h + own.down_bias[e])
    torch.testing.assert_close(moe(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["swiglu", *UNGATED, "geglu", "clamped_silu:limit=2"])
def test_the_reference_passes_gradcheck(name):
    torch.manual_seed(0)
    rows = activation(name).halves * 3
    shapes = [(4, 5), (3, rows, 5), (3, 5, 3), (4, 2), (3, rows)]
    x, *rest = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    ids = torch.tensor([[0, 2], [1, -1], [2, 2], [0, 1]])
    for op in (reference.moe_mlp, moe_mlp):
        assert torch.autograd.gradcheck(lambda *a, op=op: op(*a[:4], ids, a[4], name), (x, *rest))
