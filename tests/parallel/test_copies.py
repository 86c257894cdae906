"""Working copies: what stands in while a module runs, what its gradient becomes, and who may see it.

Nothing outside ever sees a copy.

next: tests/model/test_recompute.py
"""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from tmoe.optim.ema import Ema
from tmoe.parallel.copies import make_stale, stand_in, working_copy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 5)
        self.b = nn.Linear(5, 6, bias=False)
        self.b.weight.requires_grad_(False)
        self.seen = []

    def forward(self, x, fail=False):
        self.seen = [p.dtype for p in self.parameters()]
        if fail:
            raise KeyError
        return self.b(torch.tanh(self.a(x.to(self.a.weight.dtype))))


def net(dtype=torch.bfloat16, mesh=None):
    torch.manual_seed(0)
    module = Net()
    if mesh is not None:
        for owner in (module.a, module.b):
            for name, p in list(owner.named_parameters()):
                owner._parameters[name] = nn.Parameter(
                    DTensor.from_local(p.data, mesh, [Shard(0)]), requires_grad=p.requires_grad
                )
    stand_in(module, dtype)
    return module


def plain(dtype):
    torch.manual_seed(0)
    return Net().to(dtype)


def backward(module, x):
    module(x).float().square().sum().backward()


def test_computes_in_bf16_and_hands_the_gradient_over():
    module = net()
    want = plain(torch.bfloat16)
    x = torch.randn(3, 6)
    masters = list(module.parameters())
    backward(module, x), backward(want, x)
    assert module.seen == [torch.bfloat16] * 3 and [p.dtype for p in masters] == [torch.float32] * 3
    assert all(p is q for p, q in zip(module.parameters(), masters, strict=True)), (
        "masters are back in their places"
    )
    for p, q in zip(masters, want.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert p.grad.dtype == torch.float32 and torch.equal(p.grad, q.grad.float())
            assert working_copy(p).tensor.grad is None


def test_takes_bf16_gradients_where_allowed_and_adds_micro_batches_in_fp32():
    module = net()
    want = plain(torch.bfloat16)
    weight = module.a.weight
    weight.grad_dtype = None
    draws = torch.randn(3, 4, 6)
    total = torch.zeros(5, 6)
    for i, x in enumerate(draws):
        backward(module, x), backward(want, x)
        total += want.a.weight.grad.float()
        want.a.weight.grad = None
        assert weight.grad.dtype == (torch.bfloat16 if i == 0 else torch.float32)
    torch.testing.assert_close(weight.grad, total, rtol=1e-6, atol=1e-6)


def test_fp32_needs_no_copy():
    module = net(None)
    backward(module, torch.randn(3, 6))
    copy = working_copy(module.a.weight)
    assert (
        copy.tensor.data_ptr() == module.a.weight.data_ptr() and module.a.weight.grad.dtype == torch.float32
    )


def test_two_forwards_before_their_backwards():
    module = net()
    want = plain(torch.bfloat16)
    (x, y) = torch.randn(2, 3, 6)
    for m in (module, want):
        first, second = m(x), m(y)
        (first.float().sum() + second.float().square().sum()).backward()
    assert torch.equal(module.a.weight.grad, want.a.weight.grad.float())


def test_weights_that_change_between_forwards_are_seen():
    """Whatever writes the weights, unless the writer has said that the copy is fresh.

    An average that is swapped in says that the copy is not fresh.
    """
    module = net()
    x = torch.randn(3, 6)
    ema = Ema(dict(module.named_parameters()).items(), 0.5)
    first = module(x)
    with torch.no_grad():
        module.a.weight.add_(1.0)
    second = module(x)
    assert not torch.equal(first, second)
    working_copy(module.a.weight).fresh = True
    with ema.swapped():
        assert torch.equal(module(x), first)
    assert torch.equal(module(x), second)
    working_copy(module.a.weight).fresh = True
    with torch.no_grad():
        module.a.weight.sub_(1.0)
    make_stale(module.parameters())
    assert torch.equal(module(x), first)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("again", [False, True])
def test_a_backward_behind_a_write_is_refused(dtype, again):
    """Autograd does the same for plain parameters.

    Two forwards with equal weights do not disturb each other (above).
    """
    module = net(dtype)
    x = torch.randn(3, 6, requires_grad=True)
    loss = module(x).float().sum()
    with torch.no_grad():
        module.a.weight.mul_(2)
    if again:
        module(x)
    with pytest.raises(
        RuntimeError, match=r"written between a forward and its backward|modified by an inplace operation"
    ):
        loss.backward()
    module.a.weight.grad = None
    backward(module, x.detach())
    assert module.a.weight.grad.abs().sum() > 0


def test_a_copy_made_in_inference_mode_serves_training():
    module = net()
    x = torch.randn(3, 6)
    with torch.inference_mode():
        want = module(x)
    assert torch.equal(module(x), want)
    backward(module, x)
    assert module.a.weight.grad.abs().sum() > 0


def test_an_error_inside_puts_the_masters_back():
    module = net()
    masters = list(module.parameters())
    with pytest.raises(KeyError):
        module(torch.randn(3, 6), fail=True)
    assert all(p is q for p, q in zip(module.parameters(), masters, strict=True))


def placed(rank: int, world: int):
    module = net(mesh=init_device_mesh("cpu", (world,)))
    x = torch.randn(3, 6)
    backward(module, x)
    grad = module.a.weight.grad
    return str(grad.placements), tuple(grad.shape), grad.full_tensor()


def test_gradients_are_placed_as_the_parameter(gloo):
    placements, shape, grad = gloo(1, placed)[0]
    assert placements == "(Shard(dim=0),)" and shape == (5, 6) and grad.abs().sum() > 0


def test_backward_of_a_module_that_is_gone_is_nobodys():
    loss = net()(torch.ones(2, 6)).sum()
    gc.collect()
    loss.backward()


def test_a_module_that_ran_can_be_collected():
    module = net()
    module(torch.ones(2, 6)).sum().backward()
    assert module.a.weight.grad is not None
    dead = weakref.ref(module.a.weight)
    del module
    gc.collect()
    assert dead() is None
