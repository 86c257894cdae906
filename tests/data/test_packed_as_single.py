"""Packed rows train a model as their sequences one by one do: loss and gradients, whatever lies beside."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import MODEL

from tmoe.config.model import IGNORE, ModelConfig
from tmoe.config.run import DataConfig
from tmoe.data.chat.chat_dataset import ChatBatch, ChatDataset, open_chat
from tmoe.data.synthetic_chat import write_facts
from tmoe.model.transformer import Transformer

SEQ = 256
CFG = replace(
    MODEL,
    vocab=256,
    rope=replace(MODEL.rope, max_seq=SEQ),
    # of a sequence's last token too, which `single` leaves out
    moe=replace(MODEL.moe, balance_coeff=0.0, z_coeff=0.0),
)


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatDataset:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write_facts(tmp_path / "facts")
    path = str(tmp_path / "facts" / "chat.jsonl")
    return open_chat(DataConfig(path=(path,)), SEQ, 256, "train", "sft")


def built(cfg: ModelConfig) -> Transformer:
    model = Transformer(cfg)
    model.init_weights(0)
    return model


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def packed(model: Transformer, batch: ChatBatch) -> torch.Tensor:
    (micro,) = batch.micros(torch.device("cpu"), True)
    return model(**micro._asdict())


def single(model: Transformer, dataset: ChatDataset, indices: list[int]) -> torch.Tensor:
    """By plain cross-entropy over each sequence alone, in a row of its own."""
    total, count = torch.zeros(()), 0
    for _, ids, trained in (one for index in indices for one in dataset.row(index)):
        tokens = torch.tensor(ids.tolist())
        targets = tokens.masked_fill(~torch.from_numpy(trained.copy()), IGNORE)[1:]
        logits = model(tokens[None, :-1])[0]
        total = total + F.cross_entropy(logits, targets, reduction="sum")
        count += int((targets != IGNORE).sum())
    return total / count


@pytest.mark.parametrize("kind", ["moe", "windows"])
def test_loss_and_gradients_are_those_of_single_sequences(dataset: ChatDataset, kind: str):
    cfg = CFG if kind == "moe" else replace(CFG, window=20)
    model = built(cfg)
    batch = dataset.batch(0, batch=1)
    assert batch.documents_ABS.max() >= 3
    loss = packed(model, batch)
    loss.backward()
    mine = gradients(model)
    want = single(model, dataset, dataset.indices(0, batch=1))
    want.backward()
    theirs = gradients(model)
    assert loss.item() == pytest.approx(want.item(), abs=1e-6)
    assert mine.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(mine[name], grad, atol=1e-6, rtol=1e-5, msg=name)


def test_the_sequence_balance_is_that_of_single_sequences(dataset: ChatDataset):
    """The mean over sequences, however many share a row: each alone in a row of its own length."""
    model = built(replace(CFG, moe=replace(CFG.moe, balance=("sequence:0.5",))))
    batch = dataset.batch(0, batch=2)
    (micro,) = batch.micros(torch.device("cpu"), True)
    nothing = micro._replace(targets_BS=torch.full_like(micro.targets_BS, IGNORE))
    loss = model(**nothing._asdict())
    loss.backward()
    mine = gradients(model)
    rows = [one for index in dataset.indices(0, batch=2) for one in dataset.row(index)]
    assert len(rows) == batch.count_sequences() >= 5
    tokens = [torch.tensor(ids.tolist())[None] for _, ids, _ in rows]
    want = sum(model(one, torch.full_like(one, IGNORE)) for one in tokens) / len(rows)
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-6) and want.item() > 0.4
    for name, grad in gradients(model).items():
        torch.testing.assert_close(mine[name], grad, atol=1e-7, rtol=1e-4, msg=name)


def test_neighbours_change_nothing(dataset: ChatDataset):
    """Other tokens in another sequence of the row: the same hidden states in this one, bit for bit."""
    model = built(CFG)
    (micro,) = dataset.batch(0, batch=1).micros(torch.device("cpu"), True)
    tokens_BS, documents_BS = micro.tokens_BS, micro.documents_BS
    with torch.no_grad():
        before = model(tokens_BS, documents_BS=documents_BS)
        changed = tokens_BS.where(documents_BS != 0, 65)
        after = model(changed, documents_BS=documents_BS)
    others = documents_BS[0] != 0
    torch.testing.assert_close(before[0, others], after[0, others], atol=1e-6, rtol=0)
    assert not torch.equal(before[0, ~others], after[0, ~others])


def test_positions_count_from_a_sequences_first_token(dataset: ChatDataset):
    batch = dataset.batch(0, batch=1)
    starts = batch.documents_ABS[0, 0].diff(prepend=torch.tensor([-1])) != 0
    assert (batch.positions_ABS[0, 0] == 0)[starts].all()
    inside = (batch.sequences_ABS[0, 0] >= 0) & ~starts
    assert (batch.positions_ABS[0, 0].diff(prepend=torch.tensor([0])) == 1)[inside].all()
