"""What benchmarks/exchange.py times beside the symmetric exchange: rows sent by NCCL come back whole.

They went to their experts' ranks, here by gloo and two processes. Every contestant is called once, in
order, before the rounds in which they take turns.

next: test_benchmark_steps.py
"""

import torch
import torch.distributed as dist

from benchmarks import exchange, moe_layer
from tmoe.parallel import collectives


def there_and_back(rank, world):
    s = object.__new__(exchange.Sizes)  # its __init__ wants GPUs and their peers' memory
    draw = torch.Generator().manual_seed(rank)
    tokens = 11 + 4 * rank
    s.weights, ids = torch.rand(tokens, exchange.E, generator=draw).topk(exchange.K)
    s.ids = ids.int()
    s.x = torch.randn(tokens, exchange.D, generator=draw).bfloat16()
    s.rank = rank
    s.world = world
    s.L = exchange.E // world
    s.group = dist.group.WORLD.group_name
    s.plan = collectives.plan(s.ids, s.L, s.group)
    s.send, s.receive = s.plan[2].tolist()
    s.packed = s.x[s.plan[1]]
    s.arrived = torch.empty(sum(s.receive), exchange.D, dtype=s.x.dtype)
    first = s.packed.clone()
    copies = (s.ids // s.L == torch.arange(world)[:, None, None]).any(-1).sum(0)

    s.expert_there()
    assert s.far.shape[0] == sum(s.both[1]) and len(s.slots) == tokens * exchange.K == sum(s.both[0])
    want = s.x.float() * s.weights.sum(1, keepdim=True)
    torch.testing.assert_close(s.expert_back()[:, 0].float(), want, rtol=0.02, atol=0.02)

    s.nccl_there()
    torch.testing.assert_close(s.arrived, collectives.push(s.x, *s.plan, s.group), rtol=0, atol=0)
    back = collectives.pull(s.arrived, *s.plan, tokens, s.group)
    torch.testing.assert_close(back.float(), s.x.float() * copies[:, None], rtol=0.01, atol=0.01)
    s.packed.zero_()
    s.nccl_back()
    torch.testing.assert_close(s.packed, first, rtol=0, atol=0)


def test_rows_that_went_by_nccl_come_back(gloo):
    gloo(2, there_and_back)


class Event:
    """A GPU's event, whose clock stands still."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    synchronize = record

    def elapsed_time(self, end):
        return 1.5


def test_who_reads_what_another_left_finds_it_in_the_first_round(monkeypatch):
    """Rounds go in random order.

    `expert_back` before `expert_there` in the first one ended every run of benchmarks.exchange.
    """
    monkeypatch.setattr(torch.cuda, "Event", Event)
    called, begun = [], []
    fns = [lambda: called.append("there"), lambda: called.append("back"), lambda: called.append("other")]
    ms = moe_layer.time_all(fns, 40, begin=lambda: begun.append(len(called)))
    assert ms == [1.5] * 3 and called[:3] == ["there", "back", "other"] and begun == list(range(3, 123))
    rounds = {tuple(called[i : i + 3]) for i in range(3, 123, 3)}
    assert len(rounds) == 6 and all(len(set(r)) == 3 for r in rounds), (
        "every order of the three is drawn in 40 rounds"
    )
