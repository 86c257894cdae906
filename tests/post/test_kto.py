"""--preference.loss kto: rows with a label, TRL's formula, one baseline for every layout, validation."""

import json
import math
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import runs
import torch
from tiers import slow_but
from torch.distributed.tensor import DTensor

import train
from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig
from tmoe.config.run import Config, DataConfig, PreferenceConfig, TrainConfig
from tmoe.data.chat.chat_dataset import open_chat
from tmoe.data.chat.mismatched import Mismatched
from tmoe.data.tokenizer import DataError
from tmoe.log.metrics_file import read_steps
from tmoe.moe.balance import Totals
from tmoe.post.kto import Kto
from tmoe.run import process as runtime

FLAGS = """--task preference --preference.loss kto --train.dtype fp32 --train.seq 64 --optim.lr 3e-3
    --resume none --steps 3 --preference.desirable-weight 1.5 --preference.undesirable-weight 0.5""".split()
KEPT = (
    "loss",
    "grad_norm",
    "rewards/desirable",
    "rewards/undesirable",
    "rewards/margin",
    "rewards/accuracy",
    "kl",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sums, right and wrong ones, of several lengths; each prompt once or twice in a row."""
    folder = tmp_path_factory.mktemp("kto")
    draw = random.Random(0)
    rows = []
    for _ in range(60):
        a, b = draw.randrange(1000), draw.randrange(10)
        for _ in range(draw.randrange(1, 3)):
            good = draw.random() < 0.6
            told = str(a + b) if good else str(a + b + draw.randrange(1, 10**6))
            rows.append(dict(prompt=f"{a}+{b}=", completion=told, label=good))
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def words(data, out, *more):
    return [*runs.SMALL, *FLAGS, "--data.path", str(data / "sums.jsonl"), "--out", str(out), *more]


# ---- rows ----


def opened(path, split="train", **given):
    cfg = DataConfig(path=(str(path),), val_fraction=0.2, **given)
    return open_chat(cfg, 64, 256, split, "kto")


def test_labels_and_prompts_are_of_the_file(tmp_path):
    """A prompt as text or messages; pairs are taken apart; whatever says nothing is refused with its line."""
    rows = [dict(prompt=f"{n}?", completion=f"{n * n}!", label=n % 3 == 0) for n in range(12)]
    chat = [dict(role="user", content="hello")], [dict(role="assistant", content="hi")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, dict(prompt=chat[0], completion=chat[1], label=True)])))
    found = {}
    for split in ("train", "val"):
        source = opened(path, split).sources[0]
        for i in source.units:
            ids, trained = source.sequence(i)
            found[bytes(ids.tolist()).decode()] = (
                bytes(ids[trained].tolist()).decode(),
                bool(source.desirable[i]),
            )
    plain = {text: told for text, told in found.items() if "hello" not in text}
    assert len(found) == 13 and len(plain) == 12
    for n in range(12):
        ((answer, good),) = [told for text, told in plain.items() if text.startswith(f"{n}?")]
        assert answer.startswith(f"{n * n}!") and good == (n % 3 == 0)
    assert [told[1] for text, told in found.items() if "hello" in text] == [True]

    pairs = [dict(prompt=f"{n}?", chosen=f"{n}", rejected=f"not {n}") for n in range(9)]
    path.write_text("\n".join(map(json.dumps, pairs)))
    source = opened(path).sources[0]
    texts = [bytes(source.sequence(i)[0].tolist()).decode() for i in source.units]
    assert ["not" not in text for text in texts] == source.desirable[source.units].tolist()
    for label, said in (("no", "label='no'"), (1, "label=1"), (None, "label=None"), (..., "no label")):
        row = dict(prompt="a", completion="b") | ({} if label is ... else dict(label=label))
        path.write_text("\n".join(map(json.dumps, [*rows, row])))
        with pytest.raises(DataError, match=rf"rows.jsonl:13: {said}: --preference.loss kto needs rows of"):
            opened(path)
    path.write_text(
        json.dumps(dict(messages=[dict(role="user", content="a"), dict(role="assistant", content="b")]))
    )
    with pytest.raises(DataError, match=r"--task sft trains on, not --task preference --preference.loss kto"):
        opened(path)
    for few in (rows[:2], [row | dict(completion=str(n)) for row in rows[:2] for n in range(4)]):
        path.write_text("\n".join(map(json.dumps, few)))
        with pytest.raises(DataError, match=r"a split has only one prompt: .*two or more prompts in each"):
            Mismatched(opened(path))
    with pytest.raises(ConfigError, match=r"--preference.desirable-weight=0.0: must be positive"):
        PreferenceConfig(desirable_weight=0.0)


def by_file(data, split="train"):
    """Of each sequence of a split: prompt, completion, label; and the next row's prompt that is another."""
    source = opened(data / "sums.jsonl", split).sources[0]
    rows = [json.loads(line) for line in (data / "sums.jsonl").read_text().splitlines()]
    units = source.units.tolist()
    mine = [rows[int(source.where(i).rpartition(":")[2]) - 1] for i in units]
    found = {}
    for n, (i, row) in enumerate(zip(units, mine, strict=True)):
        after = (other["prompt"] for other in [*mine[n + 1 :], *mine] if other["prompt"] != row["prompt"])
        found[i] = row["prompt"], row["completion"], row["label"], next(after)
    return found


def test_a_completion_is_put_under_the_next_prompt_that_is_another(data):
    dataset = opened(data / "sums.jsonl")
    mismatched = Mismatched(dataset)
    for i, (_, completion, _, prompt) in by_file(data).items():
        number, ids, trained = mismatched.sequence(i)
        text, learned = (bytes(part.tolist()).decode() for part in (ids, ids[trained]))
        assert number == i and text.startswith(prompt + completion) and learned.startswith(completion)
        assert text == prompt + learned
    rows = mismatched.rows(list(by_file(data)))
    assert sorted(number for row in rows for number, _, _ in row) == sorted(by_file(data))
    assert all(sum(len(ids) for _, ids, _ in row) <= 64 for row in rows)


# ---- the loss ----


def trl(policy, reference, policy_kl, reference_kl, label, beta, desirable, undesirable):
    """Mean loss and z of trl.KTOTrainer.kto_loss (its loss_type "kto"), over a whole step."""
    kl = (policy_kl - reference_kl).mean().clamp(min=0).detach()
    ratios = policy - reference
    chosen = 1 - torch.sigmoid(beta * (ratios[label] - kl))
    rejected = 1 - torch.sigmoid(beta * (kl - ratios[~label]))
    return torch.cat([desirable * chosen, undesirable * rejected]).mean(), kl


def alone(model, texts):
    """Log-probs of the completions of (prompt, completion) bytes, each by itself, from logits in fp64."""
    found = []
    one = torch.ones(())

    def look(h_TD, weight_VD, targets_T, given):
        logp = (h_TD.double() @ weight_VD.double().T).log_softmax(-1)
        found.append(sum(logp[at, ids[at + 1]] for at in range(first - 1, len(ids) - 1)))
        return h_TD.new_zeros(())

    model.eval()
    for prompt, completion in texts:
        ids, first = [*prompt.encode(), *completion], len(prompt)
        tokens = torch.tensor([ids + [0] * (64 - len(ids))])
        model(tokens, tokens, totals=Totals(one, one, one), objective=look)
    model.train()
    return torch.stack(found)


def step_beside_trl(rank, world, argv, rows):
    """The loss, its numbers and gradient norm of a step after weights have moved, and TRL's."""
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    trainer.prepare()
    model, task, source = trainer.model, trainer.task, trainer.data.sources[0]
    batch = trainer.data.batch(0, **trainer.shape())
    numbers = [n for n in batch.numbers_AN.flatten().tolist() if n >= 0]
    answers = {n: bytes(source.sequence(n)[0][source.sequence(n)[1]].tolist()) for n in numbers}
    texts = [[(rows[n][place], answers[n]) for n in numbers] for place in (0, 3)]
    with torch.no_grad():
        before = [alone(model, each) for each in texts]
        draw = torch.Generator().manual_seed(3)
        for p in model.parameters():
            own = p.to_local() if isinstance(p, DTensor) else p
            own += 0.05 * torch.randn(own.shape, generator=draw)
        after = [alone(model, each) for each in texts]
    batch = task.rollout(model, batch, trainer.run, 0)
    totals, _ = trainer.agree(batch)
    loss = trainer.forward_backward(batch, totals).item()
    measured = dict(zip(task.measures, torch.stack(trainer.measured).tolist(), strict=True))
    label = torch.tensor([rows[n][2] for n in numbers])
    want, z = trl(after[0], before[0], after[1], before[1], label, 0.1, 1.5, 0.5)
    rewards = 0.1 * (after[0] - before[0])
    return loss, measured, want.item(), z.item(), rewards[label].mean().item(), rewards[~label].mean().item()


def test_a_step_is_that_of_trls_formula(data, tmp_path, gloo):
    flags = words(
        data, tmp_path, "--train.batch", "2", "--train.accumulate", "2", "--data.val-fraction", "0.2"
    )
    ((loss, measured, want, z, good, bad),) = gloo(1, step_beside_trl, flags, by_file(data))
    assert z > 0.01 and loss == pytest.approx(want, rel=1e-5)
    assert measured["kl"] == pytest.approx(z, abs=2e-6)
    assert measured["rewards/desirable"] == pytest.approx(good, rel=1e-4, abs=1e-6)
    assert measured["rewards/undesirable"] == pytest.approx(bad, rel=1e-4, abs=1e-6)
    assert measured["rewards/margin"] == pytest.approx(good - bad, rel=1e-4, abs=1e-6)


LAYOUTS = [
    (2, "--train.batch 4 --train.accumulate 1 --parallel.ep 2"),
    (2, "--train.batch 2 --train.accumulate 4 --parallel.tp 2"),
    (2, "--train.batch 4 --train.accumulate 2 --parallel.pp 2"),
    (4, "--train.batch 1 --train.accumulate 4 --parallel.cp 2 --parallel.ep 4"),
]


def lines(out):
    steps = [line for _, line in read_steps(out / "metrics.jsonl")]
    found = [[line[name] for name in KEPT] for line in steps]
    return [
        *found,
        [steps[-1][f"val_{name}"] for name in ("loss", "kl", "rewards/margin", "rewards/accuracy")],
    ]


@pytest.fixture(scope="module")
def by_itself(data, tmp_path_factory, gloo):
    out = tmp_path_factory.mktemp("alone")
    gloo(1, runs.run, words(data, out, "--train.batch", "8"))
    return lines(out)


@pytest.mark.parametrize(("world", "layout"), slow_but(LAYOUTS[:1], LAYOUTS))
def test_every_layout_gives_the_same_numbers(data, tmp_path, gloo, by_itself, world, layout):
    """z is positive from the second step on, once the weights have moved; at the first all rewards are 0."""
    gloo(world, runs.run, words(data, tmp_path, *layout.split()))
    for got, want in zip(lines(tmp_path), by_itself, strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-5)
    first, _, third, val = by_itself
    share = first[0]  # of weights, halved: s(0) is a half
    assert 0.25 < share < 0.75 and first[2] == pytest.approx(0, abs=1e-5) and third[-1] > 0
    assert val[0] > 0 and math.isfinite(val[2])


def test_a_start_says_how_labels_and_weights_are_balanced():
    task = Kto(
        Config(
            task="preference",
            model=ModelConfig(vocab=256),
            train=TrainConfig(),
            preference=PreferenceConfig(loss="kto", undesirable_weight=0.5),
        ),
        cast(Any, SimpleNamespace()),
    )
    task.labels = 300, 100
    (note,) = task.notes({})
    assert note.startswith("kto: 300 desirable completions, 100 others; weight x number is 6 to 1; the paper")
    task.labels = 100, 160
    (note,) = task.notes({})
    assert note.endswith("weight x number is 1.25 to 1")
    task.labels = 160, 0
    (note,) = task.notes({})
    assert note.startswith("kto: 160 desirable completions, 0 others: one kind alone")
