"""tmoe.balancing_loss against its definition in plain torch.

The shares of ranks and micro-batches add up to the loss of the whole step.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import tmoe

D, E, K, ROWS, S = 8, 4, 2, 8, 6


class Two(nn.Module):
    """Two layers, one after the other."""

    def __init__(self, balance: str):
        super().__init__()
        cfg = tmoe.MoEConfig(experts=E, top_k=K, ffn_dim=4, balance=balance, balance_coeff=0.3, z_coeff=0.02)
        self.first, self.second = tmoe.MoE(D, cfg), tmoe.MoE(D, cfg)

    def forward(self, x):
        return self.second(x + self.first(x))


def made(balance: str) -> tuple[Two, torch.Tensor]:
    torch.manual_seed(3)
    model = Two(balance)
    for moe in model.first, model.second:
        moe.router.weight.data.mul_(20)  # uneven
    return model, torch.randn(ROWS, S, D)


def wanted(balance: str) -> tuple[float, torch.Tensor]:
    """Both losses over all rows, summed over layers, and the first router's gradient.

    Switch's loss (Fedus et al. 2021, eq. 4 with K choices) and ST-MoE's z-loss.
    """
    model, x = made(balance)
    total = torch.zeros(())
    for moe in model.first, model.second:
        logits = x @ moe.router.weight.T
        probs = logits.softmax(-1)
        chosen = nn.functional.one_hot(probs.topk(K).indices, E).sum(2).float()
        scope = 1 if balance == "sequence" else (0, 1)
        balanced = (chosen.mean(scope) / K * probs.mean(scope)).sum(-1).mean()
        total = total + 0.3 * E * balanced + 0.02 * logits.logsumexp(-1).square().mean()
        x = x + moe(x)
    total.backward()
    return total.item(), model.first.router.weight.grad


def shares(rank: int, world: int, balance: str, micros: int, counted: bool) -> tuple[float, torch.Tensor]:
    model, x = made(balance)
    mesh = tmoe.parallel.build_mesh(ep=world)
    model = tmoe.parallel.parallelize(model, mesh)
    total = torch.zeros(())
    mine = x[: ROWS // 4] if rank == 0 else x[ROWS // 4 :]  # ranks of unlike size
    mine = x if world == 1 else mine
    for i, x_BSD in enumerate(mine.chunk(micros)):
        model.set_requires_gradient_sync(i + 1 == micros)
        y_BSD = model(x_BSD)
        counts = (ROWS * S, torch.tensor(float(ROWS))) if counted else ()
        share = tmoe.balancing_loss(model, *counts)
        (
            share + 0 * y_BSD.sum()
        ).backward()  # as in a loop: FSDP2 waits for a backward that begins at what the forward returned
        total += share.detach()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item(), model.first.router.weight.grad.full_tensor()


@pytest.mark.parametrize(
    ("world", "balance", "micros", "counted"),
    [
        (1, "sequence", 1, False),
        (1, "global", 1, False),
        (1, "batch", 1, False),
        (1, "sequence", 4, True),
        (2, "sequence", 1, False),
        (2, "sequence", 2, True),
        (2, "global", 1, False),
        (2, "global", 1, True),
    ],
)
def test_shares_add_up_to_the_loss_of_the_step(gloo, world, balance, micros, counted):
    want, gradient = wanted(balance)
    for loss, grad in gloo(world, shares, balance, micros, counted):
        assert loss == pytest.approx(want, rel=1e-5)
        torch.testing.assert_close(grad, gradient, rtol=1e-4, atol=1e-6)


def test_tokens_of_no_sequence_and_padding():
    """[T, D] is one sequence; padding counts nowhere."""
    moe = made("sequence")[0].first
    x = torch.randn(1, S, D)
    moe(x)
    want = tmoe.balancing_loss(moe)
    moe(x[0])
    torch.testing.assert_close(tmoe.balancing_loss(moe), want)
    padding = torch.zeros(1, 2 * S, dtype=torch.bool)
    padding[:, S:] = True
    moe(torch.cat([x, torch.randn(1, S, D)], 1), padding)
    torch.testing.assert_close(tmoe.balancing_loss(moe), want)


def test_a_loss_that_would_be_none_is_refused():
    model, x = made("sequence")
    with pytest.raises(ValueError, match="model: got a Linear without MoE layers"):
        tmoe.balancing_loss(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="first: got no load, valid is a layer that was called before"):
        tmoe.balancing_loss(model)
    checkpoint(model, x.requires_grad_(), use_reentrant=True)
    with pytest.raises(ValueError, match=r"first: got a load without gradients.*use_reentrant=False"):
        tmoe.balancing_loss(model)
    with torch.no_grad():
        assert tmoe.balancing_loss(model) > 0  # an evaluation
    model(x)
    for counts, says in (
        ((4.0,), "tokens=4.0, sequences=None"),
        ((0, 4), "tokens: got 0"),
        ((4, -1), "sequences: got -1"),
    ):
        with pytest.raises(ValueError, match=says):
            tmoe.balancing_loss(model, *counts)
