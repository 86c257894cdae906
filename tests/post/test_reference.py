"""Reference log-probs on disk: whole or absent, taken up again, refused where something else was hashed.

next: test_losses.py
"""

import math

import pytest
import torch
from steps import step as step  # a fixture

from tmoe import ops
from tmoe.config.check import ConfigError
from tmoe.post import losses, reference_model
from tmoe.post.losses.pairs import pairs_of
from tmoe.post.losses.sums import StepCounts, sequence_sums, trained_tokens
from tmoe.post.reference_model import ReferenceStore, tokens_hash, weights_hash


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """A function that opens the store of ten rows in pieces of four."""
    monkeypatch.setattr(reference_model, "PIECE", 4)
    facts = dict(rows=10, weights="w", tokens="t", settings=dict(template="chat", temperature=1.0))

    def open_store(**changes):
        return ReferenceStore.open(tmp_path / "refs", **facts | changes)

    return open_store


def filled(store):
    values = torch.randn(10, 2, dtype=torch.float64)
    for piece in store.missing():
        store.write(piece, values[piece.start : piece.stop])
    return values


def test_a_stop_costs_a_piece_and_a_second_pass_nothing(opened):
    store = opened()
    assert store.pieces() == store.missing() == [range(0, 4), range(4, 8), range(8, 10)]
    store.write(range(4, 8), torch.ones(4, 2))
    again = opened()
    assert again.missing() == [range(0, 4), range(8, 10)]
    with pytest.raises(ConfigError, match=r"rows-000000000\.safetensors: is missing"):
        again.read()
    for piece in again.missing():
        again.write(piece, torch.full((len(piece), 2), float(piece.start)))
    got = opened().read()
    assert got[:, 0].tolist() == [0] * 4 + [1] * 4 + [8] * 2 and not opened().missing()


def test_bits_come_back(opened):
    assert torch.equal(filled(opened()), opened().read())
    assert len(ReferenceStore.open(opened().folder.parent / "none", 0, "w", "t", {}).read()) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(weights="v"), "weights: 'w' there, 'v' here"),
        (dict(tokens="u"), "tokens: 't' there, 'u' here"),
        (dict(rows=9), "rows: 10 there, 9 here"),
        (dict(settings=dict(template="other", temperature=1.0)), "template: 'chat' there, 'other' here"),
        (dict(settings=dict(template="chat")), r"temperature: 1\.0 there, None here"),
    ],
)
def test_other_hashes_are_refused_by_name(opened, change, words):
    filled(opened())
    with pytest.raises(ConfigError, match=words):
        opened(**change)


def test_a_store_that_names_its_data_is_taken_up(opened):
    """Older stores name sources and template: the tokens say as much, and files may have moved since."""
    settings = dict(template="chat", temperature=1.0)
    values = filled(opened(settings=settings | dict(data=dict(template="digest of old", tokenizer="t"))))
    again = opened()
    assert not again.missing() and torch.equal(again.read(), values)
    assert not opened(settings=settings | dict(data="new")).missing()
    with pytest.raises(ConfigError, match=r"\(tokens: 't' there, 'u' here\): do this"):
        opened(tokens="u", otherwise="do this")


def test_damage_is_named(opened):
    store = opened()
    filled(store)
    first = store.folder / "rows-000000000.safetensors"
    raw = bytearray(first.read_bytes())
    raw[-1] ^= 1
    first.write_bytes(raw)
    with pytest.raises(ConfigError, match="its hash differs"):
        store.read()
    first.write_bytes(raw[:-9])
    with pytest.raises(ConfigError, match="is damaged"):
        store.read()
    (store.folder / "identity.json").write_text("{")
    with pytest.raises(ConfigError, match=r"identity\.json: is damaged"):
        opened()


def test_a_piece_of_another_store_is_refused(opened, tmp_path):
    store = opened()
    filled(store)
    other = ReferenceStore.open(tmp_path / "other", 10, "v", "t", {})
    filled(other)
    name = "rows-000000004.safetensors"
    (store.folder / name).write_bytes((other.folder / name).read_bytes())
    with pytest.raises(ConfigError, match="belongs to another store"):
        store.read()


def test_what_is_no_piece_is_refused(opened):
    store = opened()
    for piece, rows in ((range(0, 5), 5), (range(0, 4), 3), (range(8, 12), 4)):
        with pytest.raises(ValueError, match="must be one of pieces"):
            store.write(piece, torch.ones(rows))
    assert store.missing() == store.pieces()


def test_a_write_that_fails_leaves_nothing(opened, monkeypatch):
    store = opened()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reference_model.os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        store.write(range(0, 4), torch.ones(4))
    assert [path.name for path in store.folder.iterdir()] == ["identity.json"]


def test_hashes_of_tokens_tell_rows_apart():
    a, b = torch.tensor([1, 2]), torch.tensor([3])
    seen = [[[a, b]], [[a], [b]], [[b, a]], [[torch.tensor([1, 2, 3])]], [[a, b.bool()]], [[a, b], []]]
    assert len({tokens_hash(rows) for rows in seen}) == len(seen)
    assert tokens_hash([[a, b]]) == tokens_hash(iter([(a.clone(), b.clone())]))


def test_hashes_of_weights(step, tmp_path):
    """Of a step folder's manifest, and of the files of a Hugging Face folder."""
    assert weights_hash(step) == weights_hash(str(step))
    folder = tmp_path / "hf"
    folder.mkdir()
    with pytest.raises(ValueError, match="has neither a manifest nor safetensors"):
        weights_hash(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    first = weights_hash(folder)
    (folder / "config.json").write_text('{"rope": 1}')
    assert weights_hash(folder) != first != weights_hash(step)


def test_dpo_begins_at_ln_2(opened):
    """The reference's sums, kept and read back, against the policy of the same weights in other packing."""
    torch.manual_seed(0)
    store = opened()
    lengths = torch.randint(1, 200, (20,))
    targets = torch.randint(500, (int(lengths.sum()),))
    segments = torch.arange(20).repeat_interleave(lengths)
    h, weight = torch.randn(len(targets), 16), torch.randn(500, 16)
    logp = ops.logprobs(h, weight, targets)
    sums = sequence_sums(logp, segments, 20).view(10, 2)
    for piece in store.missing():
        store.write(piece, sums[piece.start : piece.stop])
    order = torch.cat([torch.where(segments == n)[0] for n in range(19, -1, -1)])
    again = sequence_sums(ops.logprobs(h[order], weight, targets[order]), segments[order], 20)
    tokens = trained_tokens(torch.ones_like(targets), segments, 20)
    counts = StepCounts(*torch.tensor([0.0, 20.0, 10.0]))
    for policy, limit in ((sums.flatten(), 1e-7), (again, 1e-6)):
        pairs = pairs_of(policy, tokens, store.read().flatten())
        assert abs(losses.preference_share("sigmoid", pairs, counts).item() - math.log(2)) < limit
