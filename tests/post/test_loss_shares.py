"""Every loss's shares add up: on 1, 2 and 4 processes, in 1 to 4 micro-batches, with a rank without tokens.

next: test_reference.py
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from tmoe import ops
from tmoe.post import losses
from tmoe.post.losses.pairs import pairs_of
from tmoe.post.losses.policy import Rollouts
from tmoe.post.losses.sequences import Completions, advantages, advantages_over_ranks, baseline_of
from tmoe.post.losses.sums import add_up, count, sequence_sums, token_weights, trained_tokens
from tmoe.post.losses.tokens import sft

D, V, N, TEMPERATURE = 6, 11, 16, 0.8
OPTIONS = {"dr_grpo": dict(max_tokens=7), "dapo": dict(kl=0.2, entropy=0.01), "gspo": dict(kl=0.2)}


def corpus():
    """Sixteen sequences of 2 to 7 tokens, the first untrained; their pairs, prompts and rewards."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 8, (N,), generator=draw).tolist()
    sequences = []
    for n, length in enumerate(lengths):
        rand = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
        targets = torch.randint(V, (length,), generator=draw)
        # the first and last four are of one rank of four: it has no trained token; 5 has none on its own
        trained = torch.rand(length, generator=draw) < (0.0 if n < 4 or n == 5 else 0.8)
        sequences.append(
            dict(
                number=n, h=rand(length, D), mask=trained, targets=targets.where(trained, -100),
                old=-2 + 0.3 * rand(length), ref=-2 + 0.3 * rand(length),
                correction=1 + 0.1 * rand(length), row=1.0 + n % 3, prompt=n % 5 + 100,
                reward=float(n * n % 7), desirable=n % 2 == 0, other_gain=0.1 * float(rand(1)) + 0.05,
            )
        )  # fmt: skip
    return sequences, torch.randn(V, D, generator=draw, requires_grad=True)


def packed(sequences, padded):
    """A micro-batch's flat tensors; padded to the longest, or one sequence behind the other."""
    most = max((len(s["h"]) for s in sequences), default=0)
    fill = dict(h=0.0, mask=False, targets=-100, old=0.0, ref=0.0, correction=1.0)
    batch = {}
    for key, blank in fill.items():
        parts = [s[key] for s in sequences]
        if padded:
            parts = [
                torch.cat([p, torch.full((most - len(p), *p.shape[1:]), blank, dtype=p.dtype)]) for p in parts
            ]
        like = torch.zeros(0, D) if key == "h" else torch.tensor([blank])[:0]
        batch[key] = torch.cat([like, *parts])
    sizes = [most if padded else len(s["h"]) for s in sequences]
    batch["segments"] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.long))
    batch["lengths"] = trained_tokens(batch["mask"], batch["segments"], len(sizes))
    return batch


def parts_of(sequences, rank, world, micros):
    """This rank's micro-batches: neighbouring pairs stay together; some may be empty."""
    own = sequences[rank * N // world : (rank + 1) * N // world]
    pairs = len(own) // 2
    borders = [2 * (pairs * i // micros) for i in range(micros + 1)]
    return [own[a:b] for a, b in itertools.pairwise(borders)]


def step(name, parts, weight, group, padded):
    """This rank's sum of shares of a whole step."""
    micros = [packed(part, padded) for part in parts]
    loss = losses.LOSSES[name]
    pairs = [len(part) // 2 for part in parts]
    rows = [torch.tensor([s["row"] for s in part]) for part in parts]
    masks = [
        m["mask"] * r[m["segments"]] if name == "sft" else m["mask"]
        for m, r in zip(micros, rows, strict=True)
    ]
    counts = add_up(
        [count(mask, m["lengths"], p) for mask, m, p in zip(masks, micros, pairs, strict=True)], group
    )
    everyone = [s for part in parts for s in part]
    A = advantages_over_ranks(
        torch.tensor([s["reward"] for s in everyone]), torch.tensor([s["prompt"] for s in everyone]), group
    ).split([len(part) for part in parts])
    gains = torch.tensor([sum(s["other_gain"] for s in everyone), float(len(everyone))])
    if group is not None:
        dist.all_reduce(gains, group=group)
    total = torch.zeros(())
    for part, m, mask, advantage in zip(parts, micros, masks, A, strict=True):
        h, targets, segments, n = m["h"], m["targets"], m["segments"], len(part)
        if name == "sft":
            weights = token_weights(mask, segments, m["lengths"], counts)
            f = lambda lp, w: w * sft(lp, dft=True)  # noqa: E731
            total = total + ops.token_loss(h, weight, targets, f, (weights,)).loss
        elif loss.task == "preference":
            logp = ops.logprobs(h, weight, targets)
            sums, refs = (sequence_sums(x * mask, segments, n) for x in (logp, m["ref"]))
            if name == "kto":
                desirable = torch.tensor([s["desirable"] for s in part], dtype=torch.bool)
                # a completion of no token counts nothing, as in counts.sequences
                kept = m["lengths"] > 0
                batch = Completions(sums[kept], refs[kept], desirable[kept])
                total = total + losses.preference_share(name, batch, counts, baseline_of(*gains))
            else:
                batch = pairs_of(sums, m["lengths"], refs)
                total = total + losses.preference_share(name, batch, counts)
        else:
            policy = losses.make_policy(name, **OPTIONS.get(name, {}))
            batch = Rollouts(
                m["old"], advantage, mask, segments, m["lengths"], m["ref"],
                m["correction"] if policy.fused else None,
            )  # fmt: skip
            if policy.fused:
                inputs, needs = policy.inputs(batch, counts), policy.needs_entropy
                found = ops.token_loss(h, weight, targets, policy, inputs, TEMPERATURE, entropy=needs)
                total = total + found.loss
            else:
                logp = ops.logprobs(h, weight, targets, TEMPERATURE)
                total = total + policy.share(logp, batch, counts)
    return total


def layouts(rank, world):
    """(loss, gradient of the head) of each loss in 1 to 4 micro-batches, summed over ranks."""
    sequences, weight = corpus()
    found = {}
    for name in losses.LOSSES:
        for micros in (1, 2, 3, 4):
            parts = parts_of(sequences, rank, world, micros)
            total = step(name, parts, weight, dist.group.WORLD, padded=micros == 2)
            grad = torch.autograd.grad(total, weight)[0]
            both = torch.cat([total.detach()[None], grad.flatten()])
            dist.all_reduce(both)
            found[name, micros] = both
    return found


@pytest.fixture(scope="module")
def whole():
    """Each loss in one process and one micro-batch."""
    sequences, weight = corpus()
    found = {}
    for name in losses.LOSSES:
        total = step(name, [sequences], weight, None, padded=False)
        found[name] = torch.cat([total.detach()[None], torch.autograd.grad(total, weight)[0].flatten()])
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shares_add_up_to_the_loss_of_one_process(gloo, whole, world):
    """In four, the first rank has no trained token; in four micro-batches so do others."""
    for found in gloo(world, layouts):
        for (name, micros), got in found.items():
            want = whole[name]
            assert want[1:].norm() > 0, name
            assert (got[0] - want[0]).abs() <= 1e-5 * want[0].abs().clamp(min=1), (name, micros)
            assert (got - want).norm() <= 1e-5 * want.norm(), (name, micros)


def some(rank, world):
    """Samples by rank: none on the first, prompts that lie on several."""
    rewards = [[], [1.0, 0.0, 5.0], [0.0, float("nan"), 1.0], [5.0, 2.0]][rank]
    prompts = [[], [7, 7, 9], [7, 7, 7], [9, 4]][rank]
    return advantages_over_ranks(torch.tensor(rewards), torch.tensor(prompts), dist.group.WORLD)


def test_groups_lie_on_several_ranks(gloo):
    rewards = torch.tensor([1.0, 0.0, 5.0, 0.0, float("nan"), 1.0, 5.0, 2.0])
    want = advantages(rewards, torch.tensor([7, 7, 9, 7, 7, 7, 9, 4]))
    found = gloo(4, some)
    assert [len(part) for part in found] == [0, 3, 3, 2]
    assert torch.equal(torch.cat(found), want)
