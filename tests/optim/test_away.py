"""Tensors that are away for a while: nothing is held meanwhile, and every bit comes back, after an error too.

next: test_optim.py
"""

import pytest
import torch

from tmoe.config.run import OptimConfig
from tmoe.optim.adamw import AdamW, build_optimizer, init_state
from tmoe.optim.states import MOMENTS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def steps(device: str, away: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], AdamW]:
    """Weights and moments after three steps, between which the moments are away where they are to be."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, 8, generator=draw).to(device)) for n in (7, 4096, 1, 0)]
    named = ((str(i), p) for i, p in enumerate(params))
    optimizer = build_optimizer(named, OptimConfig(lr=0.1), torch.device(device))
    init_state(optimizer)
    moments = [optimizer.state[p][key] for p in params for key in MOMENTS]
    for _ in range(3):
        with optimizer.away(away):
            assert all((m.untyped_storage().nbytes() == 0) == (away or m.numel() == 0) for m in moments)
            torch.full((100_000,), 7.0, device=device)  # in the room that they leave
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw).to(device)
        optimizer.step()
    return params, moments, optimizer


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_the_same_in_every_bit(device):
    got, want = steps(device, True)[:2], steps(device, False)[:2]
    for mine, theirs in zip(got, want, strict=True):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_brings_them_back(device):
    _, moments, optimizer = steps(device, False)
    want = [m.clone() for m in moments]
    with pytest.raises(KeyboardInterrupt), optimizer.away(True):
        raise KeyboardInterrupt
    assert all(map(torch.equal, moments, want))
