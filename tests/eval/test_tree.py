"""Rows of trees: what each token sees, what is saved, and the model's forward over them.

next: tests/eval/test_harness.py
"""

import random
from dataclasses import replace

import pytest
import torch
from layouts import GPT_OSS, GQA, KINDS, LATENT, ROUTED
from tiers import slow_but

from tmoe.eval.forward import Batch, batch_of, hidden, target_logprobs, tree_blocks, tree_mask
from tmoe.eval.tree import SHARED, rows
from tmoe.generate.forward import all_turns
from tmoe.generate.gathered_model import gathered
from tmoe.model.attention_backend import BLOCK
from tmoe.model.transformer import Transformer


def sequences(seed: int, longest: int, count: int = 40) -> list[list[int]]:
    """Sequences of few different tokens, many of which begin with an earlier one."""
    draw = random.Random(seed)
    found = [[draw.randrange(3) for _ in range(draw.randint(1, longest))] for _ in range(count // 4)]
    while len(found) < count:
        head = draw.choice(found)
        tail = [draw.randrange(3) for _ in range(draw.randint(0, 9))]
        found.append((head[: draw.randint(1, len(head))] + tail)[:longest])
    return [*found, found[0]]


@pytest.mark.parametrize("most", [30, 100, 5000])
def test_each_sequence_sees_itself(most):
    """The visible places of a sequence's token are those of the sequence's tokens up to it, in order."""
    given = sequences(most, 60)
    packed = rows(given, most)
    assert sorted(member for row in packed for member in row.members) == list(range(len(given)))
    for row in packed:
        assert len(row.ids) <= max(most, 60)
        for member, path in zip(row.members, row.places, strict=True):
            assert [row.ids[place] for place in path] == given[member]
            assert [row.at[place] for place in path] == list(range(len(path)))
            for place in path[:: max(1, len(path) // 5)]:
                seen = [k for k in range(place + 1) if place < row.ends[k]]
                assert seen == path[: row.at[place] + 1]


def test_a_question_is_computed_once():
    """A context of 20 tokens with answers of 1, 1, 3 and 5 tokens, whose last tokens are no inputs."""
    context = list(range(20))
    answers = [[], [], [7, 8], [9, 5, 6, 4]]
    other = [*range(SHARED - 1), 3]  # too few tokens are equal to share them
    (row,) = rows([context + answer for answer in answers] + [other], 1000)
    assert len(row.ids) == 20 + 2 + 4 + SHARED


@pytest.mark.parametrize("window", [0, 50, 300])
def test_blocks_hold_what_is_visible(window):
    """No pair that the mask of all pairs shows is outside the blocks; whole blocks have no other."""
    (row,) = rows(sequences(1, 900, 12), 5000)
    batch = batch_of(row, torch.device("cpu"))
    seen = tree_mask(batch, window, 64)[0, 0]
    S, reach = len(row.ids), window or 2**30
    blocks = tree_blocks(batch, reach, lambda b, h, q, k: seen[q, k])
    count = -(-S // BLOCK)
    dense = torch.zeros(count * BLOCK, count * BLOCK, dtype=torch.bool)
    dense[:S, :S] = seen
    tiles = dense.view(count, BLOCK, count, BLOCK).transpose(1, 2)

    def marked(numbers: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(count, count, dtype=torch.bool)
        for i in range(count):
            found[i, order[0, 0, i, : numbers[0, 0, i]].long()] = True
        return found

    part = marked(blocks.kv_num_blocks, blocks.kv_indices)
    whole = marked(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (part & whole).any() and whole.any() == (window != 50)
    assert not (tiles.any(-1).any(-1) & ~(part | whole)).any()
    assert tiles.flatten(2)[whole].all()
    assert (part | whole).sum() < count * (count + 1) / 2  # some blocks are skipped


CAPPED = replace(GQA, moe=replace(ROUTED, capacity_factor=1.0))  # drops tokens in training


MODELS = dict(gqa=GQA, gpt_oss=GPT_OSS, latent=LATENT, kinds=KINDS, capped=CAPPED)


@pytest.mark.parametrize("name", slow_but(["gpt_oss", "latent"], MODELS))
def test_hidden_states_are_those_of_whole_forwards(name):
    """Rows in which sequences share beginnings. With a capacity, a row drops no token."""
    cfg = replace(MODELS[name], rope=replace(GQA.rope, max_seq=64))
    torch.manual_seed(0)
    model = Transformer(cfg).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    given = sequences(3, 40, 12)
    device = torch.device("cpu")
    with torch.no_grad(), gathered(model, 512):
        turns = all_turns(cfg, 40, device)
        packed = rows(given, 150)
        assert 1 < len(packed) < len(given)
        for row in packed:
            h_SD = hidden(model, batch_of(row, device), turns, 0)
            for member, path in zip(row.members, row.places, strict=True):
                ids = given[member]
                if name == "capped":  # the whole forward drops tokens
                    want = hidden(model, batch_of(rows([ids], 64)[0], device), turns, 0)
                else:
                    want = model.hidden(torch.tensor([ids]))[0][0]
                torch.testing.assert_close(h_SD[path], want, atol=2e-4, rtol=2e-4)


def test_padding_of_a_gpus_row_changes_nothing():
    """The row filled up to a length of flex attention's, as on a GPU."""
    torch.manual_seed(0)
    model = Transformer(GQA).eval()
    (row,) = rows([[3, 5, 8, 2], [3, 9]], 64)
    plain = batch_of(row, torch.device("cpu"))
    S = len(row.ids)
    more = torch.zeros(1, 3, dtype=torch.int64)
    padding_1S = torch.arange(S + 3)[None] >= S
    ends_S = torch.cat([plain.ends_S, torch.arange(S + 1, S + 4)])
    filled = Batch(torch.cat([plain.ids_1S, more], 1), torch.cat([plain.at_S, more[0]]), ends_S, padding_1S)
    with torch.no_grad(), gathered(model, 64):
        turns = all_turns(GQA, 4, torch.device("cpu"))
        want, got = (hidden(model, batch, turns, 0) for batch in (plain, filled))
    torch.testing.assert_close(got[:S], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_targets(monkeypatch, dtype):
    """They are those of torch's log_softmax. Places repeat, are in no order, and need several chunks."""
    monkeypatch.setattr("tmoe.eval.forward.chunk_rows", lambda columns, width: 4)
    torch.manual_seed(0)
    h_SD, weight_VD = torch.randn(17, 8).to(dtype), torch.randn(31, 8).to(dtype)
    logp_SV = (h_SD.float() @ weight_VD.float().T).log_softmax(-1)
    places_P = torch.tensor([16, 3, 3, 0, 9, 16, 3, 12])
    targets_P = torch.tensor([5, 30, 2, 0, 7, 6, 2, 1])
    targets_P[4], targets_P[7] = logp_SV[9].argmax(), logp_SV[12].argmax()
    logp_P, best_P = target_logprobs(h_SD, weight_VD, places_P, targets_P)
    torch.testing.assert_close(logp_P, logp_SV[places_P, targets_P])
    assert best_P.tolist() == (logp_SV.argmax(-1)[places_P] == targets_P).tolist()
    assert best_P[4] and best_P[7] and not best_P.all()
    none = torch.empty(0, dtype=torch.int64)
    assert [len(t) for t in target_logprobs(h_SD, weight_VD, none, none)] == [0, 0]
