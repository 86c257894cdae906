"""Multi-token prediction: its loss against plain loops in fp64 and transformers' layer; documents apart."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from layouts import BRANCHES
from torch import Tensor

import tmoe
from tmoe.cli.parse import parse
from tmoe.config.model import IGNORE, ModelConfig, MoEConfig, MTPConfig, RopeConfig
from tmoe.model.multi_token import count_further, targets_of
from tmoe.moe.balance import Totals

CFG = ModelConfig(
    vocab=31,
    dim=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_dim=32,
    dense_layers=1,
    rope=RopeConfig(max_seq=64),
    moe=MoEConfig(experts=6, top_k=2, ffn_dim=12, balance="none", z_coeff=0.0),
    mtp=MTPConfig(depth=2, coeff=0.3),
)


def model_of(cfg: ModelConfig = CFG, seed: int = 0) -> tmoe.Transformer:
    """A model in fp64, with norms away from 1."""
    model = tmoe.Transformer(cfg).double()
    model.init_weights(seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=draw, dtype=p.dtype))
    return model


def rows_of(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and documents of two rows; a document's last target is of the next one."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(31, (2, 17), generator=draw)
    targets = torch.cat([tokens[:, 1:], torch.randint(31, (2, 1), generator=draw)], 1)
    targets[torch.rand(targets.shape, generator=draw) < 0.1] = IGNORE
    documents = torch.stack([torch.tensor([0] * 6 + [1] + [2] * 10), torch.tensor([0] * 2 + [1] * 15)])
    return tokens, targets, documents


def reference(model: tmoe.Transformer, tokens: Tensor, targets: Tensor, documents: Tensor | None):
    """The sums of each depth's cross-entropy, its places, and equal drafts, document by document."""
    D = model.cfg.mtp.depth
    sums, places, equal = [0.0] * D, [0] * D, [0] * D
    for row, aims, marks in zip(tokens, targets, tokens * 0 if documents is None else documents, strict=True):
        ends = [i + 1 for i in range(len(row)) if i + 1 == len(row) or marks[i] != marks[i + 1]]
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            one, aim = row[first:end], aims[first:end]
            h = model.hidden(one[None])[0][0]
            main = F.linear(h, model.head_weight).argmax(-1)
            for k, block in enumerate(model.mtp, 1):
                n = len(one) - k
                if n < 1:
                    continue
                e = model.embedding(one[k:])
                x = block.eh_proj(torch.cat([block.enorm(e), block.hnorm(h[:n])], -1))
                context = model.context(one[None, :n])
                x = x[None] + block.attention(
                    block.attention_norm(x[None]), *context.turns[block.rope], context.masks[block.window]
                )
                x = x + (block.moe or block.ffn)(block.ffn_norm(x))
                h = block.norm(x)[0]
                logits = F.linear(h, model.head_weight)
                for i in range(n):
                    whole = first + i + k + 1 < end or end == len(row)
                    if whole and all(aim[i + j] != IGNORE for j in range(k + 1)):
                        sums[k - 1] = sums[k - 1] + F.cross_entropy(logits[i], aim[i + k])
                        places[k - 1] += 1
                        equal[k - 1] += int(logits[i].argmax() == main[i + k])
    return sums, places, equal


ONE_BRANCH = replace(BRANCHES, mtp=CFG.mtp, moe=replace(BRANCHES.moe, balance="none", z_coeff=0.0))


@pytest.mark.parametrize(("isolated", "cfg"), [(True, CFG), (False, CFG), (True, ONE_BRANCH)])
def test_the_loss_is_the_formula(isolated, cfg):
    """Also of a model whose blocks have one branch; those of further tokens have two."""
    model = model_of(cfg)
    tokens, targets, documents = rows_of()
    documents = documents if isolated else None
    sums, places, equal = reference(model, tokens, targets, documents)
    assert places == count_further(2, targets, documents).tolist() and min(places) > 8
    loss = model(tokens, targets, documents_BS=documents)
    want = model.task_loss + 0.15 * sum(s / n for s, n in zip(sums, places, strict=True))
    assert (loss - want).abs() < 1e-6, (loss.item(), want.item())  # RoPE is in fp32
    found = model.mtp.measured.tolist()
    ours = [
        *(s.item() / n for s, n in zip(sums, places, strict=True)),
        *(e / n for e, n in zip(equal, places, strict=True)),
    ]
    assert found == pytest.approx(ours, abs=1e-6)
    theirs = torch.autograd.grad(want - model.task_loss, list(model.mtp.parameters()), retain_graph=True)
    for a, b in zip(torch.autograd.grad(loss, list(model.mtp.parameters())), theirs, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max().clamp(min=1)


def test_documents_do_not_cross():
    """The loss of a document's places neither depends on other documents nor gives them a gradient."""
    model = model_of()
    tokens, targets, documents = rows_of()
    first = documents == 0
    tokens = (tokens % 15).where(first, tokens % 15 + 15)
    seen = []
    for _ in range(2):
        model.zero_grad()
        model.mtp.measured = None
        model(tokens, targets.where(first, IGNORE), documents_BS=documents).backward()
        grads = model.embedding.weight.grad
        assert grads[:15].abs().sum() > 0 and not grads[15:].any()
        seen.append(model.mtp.measured)
        tokens = tokens.where(first, tokens.flip(1).where(tokens.flip(1) > 14, 20))
    assert torch.equal(*seen) and (seen[0][:2] > 0).all()


def test_detached_blocks_are_trained_alone():
    model = model_of(replace(CFG, mtp=replace(CFG.mtp, detach=True)))
    tokens, targets, documents = rows_of()
    loss = model(tokens, targets, documents_BS=documents)
    plain = model_of(replace(CFG, mtp=MTPConfig()))
    plain.load_state_dict(model.state_dict(), strict=False)
    plain(tokens, targets, documents_BS=documents).backward()
    loss.backward()
    for name, p in plain.named_parameters():
        assert torch.equal(p.grad, dict(model.named_parameters())[name].grad), name
    assert all(p.grad.abs().sum() > 0 for name, p in model.mtp.named_parameters() if "router" not in name)


def test_micro_batches_add_up():
    """Each depth's mean is over its own places of the whole step, which micro-batches have unequally."""
    model = model_of()
    tokens, targets, documents = rows_of()
    targets[0, 4:] = IGNORE
    whole = model(tokens, targets, documents_BS=documents)
    further = count_further(2, targets, documents)
    counts = ((targets != IGNORE).sum(), tokens.numel(), len(tokens))
    totals = Totals(*(torch.tensor(float(n)) for n in counts), further)
    parts = [model(tokens[i], targets[i], documents_BS=documents[i], totals=totals) for i in ([0], [1])]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)
    with pytest.raises(ValueError, match=r"totals.further: None, but model.mtp.depth=2"):
        model(tokens, targets, totals=totals._replace(further=None))
    model.eval()  # a validation is of the main head
    assert model(tokens, targets, totals=totals._replace(further=None)).item() == model.task_loss.item()


def test_places_at_the_ends():
    """Row: documents of 3 and 4 tokens; the last target is known, one is not trained."""
    targets = torch.tensor([[1, 2, 3, 4, 5, IGNORE, 7]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    assert targets_of(targets, documents, None, 1).tolist() == [[2, *[IGNORE] * 2, 5, *[IGNORE] * 3]]
    assert targets_of(targets, None, None, 1).tolist() == [[2, 3, 4, 5, *[IGNORE] * 3]]
    padding = torch.tensor([[False] * 3 + [True] * 4])
    assert targets_of(targets, None, padding, 1).tolist() == [[2, 3, *[IGNORE] * 5]]
    assert count_further(9, targets, documents).tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--task", "preference"], "--model.mtp.depth=1: --task=preference"),
        (["--task", "grpo", "--grpo.rewards", "exact"], "--model.mtp.no-detach: with --task=grpo"),
        (["--lora.rank", "4"], "--model.mtp.depth=1: --lora.rank=4"),
        # a step with trained blocks is refused with depth 0 too
        (["--lora.rank", "4"], "a step that has them is exported first, and --init names that folder"),
        (["--train.seq", "2"], "--train.seq=2: must be more than --model.mtp.depth=1"),
        (
            "--parallel.pp 2 --train.accumulate 2 --parallel.head divided".split(),
            "--parallel.head=divided: not with --model.mtp.depth=1",
        ),
    ],
)
def test_what_cannot_work_is_refused(words, wrong, capsys):
    with pytest.raises(SystemExit):
        parse(["tiny", "--model.mtp.depth", "1", *words], "")
    assert wrong in capsys.readouterr().err


@pytest.mark.slow
def test_a_whole_model_is_one_graph():
    """The share of equal tokens is left out of compiled code."""
    model = model_of().float()
    tokens, targets, _ = rows_of()
    want = model(tokens, targets)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens, targets)
    torch.testing.assert_close(found, want)
    found.backward()
    assert all(p.grad is not None for p in model.mtp.parameters() if p.requires_grad)
