"""Each activation of the table has a right gradient, a formula for kernels, and a name that settings take.

next: tmoe/activations.py
"""

import inspect
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from tmoe.activations import ACTIVATIONS
from tmoe.config import model
from tmoe.config.model import MoEConfig
from tmoe.ops.experts import kernels


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_gradient_is_autograds(name):
    torch.manual_seed(0)
    gate, up = (6 * torch.randn(2, 50, 20, dtype=torch.float64)).requires_grad_()
    d_act = torch.randn(50, 20, dtype=torch.float64)
    want = torch.autograd.grad(ACTIVATIONS[name].formula(gate, up), (gate, up), d_act)
    d_gate, d_up = torch.empty(2, 50, 20, dtype=torch.float64)
    with torch.no_grad():
        ACTIVATIONS[name].gradient(gate, up, d_act.clone(), d_gate, d_up)
    torch.testing.assert_close((d_gate, d_up), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gate_of_its_own_or_one_of_transformers(name):
    entry = ACTIVATIONS[name]
    gate, up = torch.randn(2, 9, 5)
    if entry.of_gate:
        torch.testing.assert_close(entry.formula(gate, up), entry.of_gate(gate) * up)
    assert entry.keys == {f"swiglu_{key}": value for key, value in entry.constants.items()}


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "swiglu"])
@pytest.mark.parametrize("kernel", [kernels.activate, kernels.activate_backward], ids=str)
def test_kernels_know_it(name, kernel):
    """What they do not know by name they would compute as swiglu, in silence."""
    assert f'ACT == "{name}"' in inspect.getsource(kernel.fn)


def test_settings_take_every_name_and_their_help_says_it():
    assert get_args(get_type_hints(MoEConfig)["activation"]) == tuple(ACTIVATIONS)
    text = Path(model.__file__).read_text()
    told = text[text.index("    activation: ") :].split('"""')[1]
    assert all(f"({name}" in told for name in ACTIVATIONS)


def test_two_are_published():
    """gpt-oss's config.json says swiglu_limit 7.0; its class's alpha is 1.702."""
    assert ACTIVATIONS["clamped"].keys == dict(swiglu_alpha=1.702, swiglu_limit=7.0)
    assert ACTIVATIONS["swiglu"].hidden_act == "silu"
