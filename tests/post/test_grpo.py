"""--task grpo: the same in every layout, resumed bit for bit, its loss by hand, and what it refuses."""

import functools
import json
import os
import random
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import faulty
import pytest
import runs
import torch
from tiers import slow_but

import train
from tmoe.cli.parse import parse
from tmoe.commands.warmup import traces
from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError
from tmoe.config.model import IGNORE, ModelConfig, MoEConfig
from tmoe.config.run import (
    Config,
    DataConfig,
    GrpoConfig,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from tmoe.data.chat.prompt_data import Prompt, open_prompts
from tmoe.data.tokenizer import DataError
from tmoe.log.metrics_file import read_steps
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.parallel.mesh import local_part
from tmoe.post.answers import Answer, Step, pack, rows_of
from tmoe.post.grpo import Grpo
from tmoe.post.losses.sums import StepCounts
from tmoe.run import process as runtime

FLAGS = """--task grpo --train.dtype fp32 --optim.lr 1e-3 --resume none --steps 3 --grpo.prompts 4
    --grpo.group 4 --grpo.max-tokens 6 --data.val-fraction 0.2 --log.no-progress --log.no-report""".split()
REWARD = '''
def some(sample):
    """Anything that differs from answer to answer."""
    return sum(sample.answer.encode("utf-8", "surrogateescape")) % 7 / 7


def raising(sample):
    if sample.sample == 1:
        raise KeyError("no such field")
    return some(sample)


def seldom(sample):
    return some(sample) if sum(map(ord, sample.prompt)) % 2 else 0.0
'''
KEPT = ("loss", "grad_norm", "reward/mean", "policy/entropy", "policy/kl", "policy/clipped", "answers/tokens")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prompts of sums, and rewards."""
    folder = tmp_path_factory.mktemp("sums")
    draw = random.Random(0)
    pairs = [(draw.randrange(1000), draw.randrange(10)) for _ in range(40)]
    rows = [dict(prompt=f"{a}+{b}=", answer=str(a + b)) for a, b in pairs]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    return folder


def words(data, out, *more, reward="some"):
    made = [*runs.SMALL, *FLAGS, "--out", str(out), "--data.path", str(data / "sums.jsonl")]
    return [*made, "--grpo.rewards", f"{data / 'reward.py'}:{reward}", *more]


def lines(out, names=KEPT):
    return [[line[name] for name in names] for _, line in read_steps(out / "metrics.jsonl")]


def near(got, want):
    """The first step to 1e-5. AdamW has made more of its rounding by the next."""
    bounds = [1e-5] + [1e-4] * (len(want) - 1)
    pairs = zip(got, want, bounds, strict=True)
    return all(a == pytest.approx(b, rel=bound, abs=1e-5) for a, b, bound in pairs)


def of_test(**given):
    """Settings of a run on a tiny model, without a command line."""
    grpo = GrpoConfig(rewards=("exact",), prompts=2, group=2, max_tokens=5, **given)
    return Config(task="grpo", grpo=grpo, train=TrainConfig(batch=2, seq=16), model=ModelConfig(vocab=256))


# ---- data ----


def test_prompts_are_functions_of_seed_and_step(data, tmp_path):
    cfg = Config(
        task="grpo",
        grpo=GrpoConfig(rewards=("exact",), prompts=6, max_tokens=8),
        train=TrainConfig(seq=32),
        model=ModelConfig(vocab=256),
        data=DataConfig(path=(str(data / "sums.jsonl"),), val_fraction=0.2),
    )
    found, held = (open_prompts(cfg, split) for split in ("train", "val"))
    texts = [{p.text for p in one.sources[0].prompts} for one in (found, held)]
    assert len(texts[0]) + len(texts[1]) == 40 and not texts[0] & texts[1]
    whole = found.batch(7, batch=1).numbers_P.tolist()
    assert whole == list(range(42, 48))
    parts = [found.batch(7, batch=1, rank=r, world=4).numbers_P for r in range(4)]
    assert torch.cat(parts).tolist() == whole
    once = {found.prompt(n).text for n in range(found.samples)}
    assert once == texts[0]  # an epoch has each once
    asked = found.prompt(42)
    assert bytes(asked.ids).decode() == asked.text and asked.row["answer"] == str(eval(asked.text[:-1]))


def test_messages_are_asked_by_the_template_and_long_prompts_left_out(tmp_path):
    chat = [dict(role="user", content="hello")]
    rows = [dict(prompt=chat), dict(prompt="a" * 40), dict(prompt="b"), dict(prompt="c")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    def opened(overlong):
        data = DataConfig(path=(str(path),), overlong=overlong, val_fraction=0.01)
        grpo = GrpoConfig(rewards=("exact",), max_tokens=4)
        cfg = Config(
            task="grpo", grpo=grpo, train=TrainConfig(seq=40), model=ModelConfig(vocab=256), data=data
        )
        return [open_prompts(cfg, split) for split in ("train", "val")]

    found = [p.text for one in opened("drop") for p in one.sources[0].prompts]
    assert len(found) == 3 and any("hello" in text and text != "hello" for text in found)
    with pytest.raises(DataError, match=r"1 prompts are longer than --train.seq=40 leaves"):
        opened("error")
    for rows, said in (
        ([dict(prompt=None)], r"needs .*here is prompt, its prompt is None"),
        ([dict(prompt="a\ud800")], r"rows.jsonl:1: prompt: is no Unicode text: '\\ud800' at 1"),
        (
            [dict(prompt="a")] * 9,
            r"none of its 9 prompts is in its (train|val) split \(those of equal prompts",
        ),
        ([dict(prompt=chat, tools=5)], r"rows.jsonl:1: tools: must be a list; here is int"),
        (
            [dict(prompt=chat, chat_template_kwargs=dict(messages=[]))],
            r"chat_template_kwargs: messages: cannot be set",
        ),
        ([], "rows.jsonl: is empty; valid: rows of"),
    ):
        path.write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(DataError, match=said):
            opened("drop")
    path.write_text('{"question": "a"}')
    with pytest.raises(DataError, match=r'needs \{"prompt".*here is question'):
        opened("drop")


def test_what_cannot_be_answered_or_judged_is_refused_when_data_are_opened(data, tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps(dict(prompt="a", answer=["b", "c"])))

    def opened(*val_path, **given):
        grpo = GrpoConfig(rewards=("exact",), max_tokens=4, reward_workers=1, **given)
        rows = DataConfig(path=(str(data / "sums.jsonl"),), val_path=val_path)
        task = Grpo(Config(task="grpo", grpo=grpo, train=TrainConfig(seq=40), data=rows), cast(Any, None))
        try:
            return [task.open(split, None) for split in ("train", "val")]
        finally:
            task.rewards.close()

    whole, held = opened(str(data / "sums.jsonl"))
    assert [p.text for p in held.sources[0].prompts] == [p.text for p in whole.sources[0].prompts]
    with pytest.raises(
        DataError, match=r"--data.val-path=.*held.jsonl:1: --grpo.rewards=exact: .*\['b', 'c'\]"
    ):
        opened(str(tmp_path / "held.jsonl"))
    with pytest.raises(ConfigError, match=r"--grpo.pool-gib: 1e-05 GiB .*, but one answer of .*3 pages"):
        opened(pool_gib=1e-5)


def test_the_template_has_what_the_row_gives_it(tmp_path):
    (tmp_path / "plain.jinja").write_text(
        "{% for one in messages %}{{ one.role }} {{ one.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ mood }}{% if tools %} {{ tools | length }}{% endif %}{% endif %}"
    )
    given = dict(tools=json.dumps([dict(name="f")] * 2), chat_template_kwargs=dict(mood="calm"))
    given |= dict(system="be kind")
    rows = [dict(prompt=[dict(role="user", content=f"hello {i}")]) | given for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(path=(str(tmp_path / "rows.jsonl"),), chat_template=str(tmp_path / "plain.jinja"))
    grpo = GrpoConfig(rewards=("length(4,2)",), max_tokens=4)
    cfg = Config(task="grpo", grpo=grpo, train=TrainConfig(seq=40), model=ModelConfig(vocab=256), data=data)
    texts = [prompt.text for prompt in open_prompts(cfg, "train").sources[0].prompts]
    assert texts and all(text.endswith("calm 2") for text in texts)
    assert all(text.startswith("system be kind\0user hello") for text in texts)
    ended = dict(prompt=[dict(role="user", content="a"), dict(role="assistant", content="b")])
    for row, match in (
        (ended, "ends with a turn of the assistant"),
        (dict(prompt="a", system="b"), "system"),
    ):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, row])))
        with pytest.raises(DataError, match=rf"rows.jsonl:10: .*{match}"):
            open_prompts(cfg, "train")


# ---- packing, and the loss by hand ----


def some_answers(count=7):
    draw = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        ids = torch.randint(1, 256, (3 + i % 3,), generator=draw).tolist()
        made = torch.randint(1, 256, (1 + i % 5,), generator=draw).tolist()
        finish = "length" if len(made) == 5 else "stop"
        prompt = Prompt(ids, "", {})
        found.append(Answer(prompt, i // 2, i % 2, made, -torch.rand(len(made), generator=draw), finish, ""))
    return found


def test_answers_are_packed_behind_their_prompts():
    answers = some_answers()
    rows = rows_of(answers, 16)
    assert sorted(i for row in rows for i in row) == list(range(7))
    packed = pack(answers, rows, (3, 2, 16), [False] * 6 + [True])
    batch = packed.batch
    seen = {}
    for a, micro in enumerate(batch.micros(torch.device("cpu"), True)):
        numbers = micro.given["numbers"].tolist()
        for n, number in enumerate(numbers):
            at = micro.given["sequences"] == n
            tokens, targets = micro.tokens_BS[at].tolist(), micro.targets_BS[at].tolist()
            assert micro.positions_BS[at].tolist() == list(range(len(tokens)))
            answer = answers[number]
            asked = len(answer.prompt.ids)
            assert tokens == [*answer.prompt.ids, *answer.ids[:-1]]
            want = [IGNORE] * len(answer.ids) if number == 6 else answer.ids
            assert targets == [IGNORE] * (asked - 1) + want
            if number != 6:
                assert torch.equal(packed.drawn_ABS[a][at][asked - 1 :], answer.logprobs)
            seen[number] = True
        assert bool((micro.padding_BS == (micro.given["sequences"] < 0)).all())
    assert len(seen) == 7
    assert pack([], [], (2, 2, 16), []).batch.count() == 0  # a rank without answers


def by_hand(cfg, answers, advantages, h, weight, old=None):
    """The loss of DAPO or GRPO, token by token in fp64; also each answer's log-probs."""
    g = cfg.grpo
    losses, found = [], []
    for i, answer in enumerate(answers):
        logits = h[i].double() @ weight.double().T / g.temperature
        logp = logits.log_softmax(-1)[range(len(answer.ids)), answer.ids]
        found.append(logp.detach())
        before = logp.detach() if old is None else old[i]
        w = (before - answer.logprobs.double()).exp().clamp(max=2.0)
        rho = (logp - before).exp()
        A = advantages[i].double()
        high = 0.28 if g.loss == "dapo" else 0.2
        each = -torch.minimum(rho * A, rho.clamp(0.8, 1 + high) * A) * w
        losses.append(each)
    if g.loss == "dapo":
        return torch.cat(losses).mean(), found
    return torch.stack([each.mean() for each in losses]).mean(), found


def a_task(cfg, answers, advantages, micros):
    """The task and the step that its rollout returns, on one rank."""
    task = Grpo(cfg, cast(Any, SimpleNamespace(axes=Axes.over(1), place=Axes.over(1).place(0), groups={})))
    rows = rows_of(answers, cfg.train.seq)
    packed = pack(answers, rows, (micros, -(-len(rows) // micros), cfg.train.seq), [False] * len(answers))
    counts = StepCounts(*torch.tensor([sum(len(a.ids) for a in answers), len(answers), 0.0]))
    return task, Step(packed, advantages, counts, [], [], [], torch.zeros(len(task.measures)))


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
@pytest.mark.parametrize("micros", [1, 3])
def test_the_loss_is_that_of_its_formula(loss, micros):
    cfg = of_test(loss=loss, updates=2, temperature=0.7)
    answers = some_answers()
    advantages = torch.linspace(-1, 1, len(answers))
    task, step = a_task(cfg, answers, advantages, micros)
    draw = torch.Generator().manual_seed(2)
    table = torch.randn(256, 8, generator=draw)  # hidden states are functions of the token that was read
    weight = torch.randn(256, 8, generator=draw, requires_grad=True)
    old = None
    for moved in (0.0, 0.1):
        states = table + moved
        mine = [states[[*a.prompt.ids, *a.ids[:-1]]][len(a.prompt.ids) - 1 :] for a in answers]
        want, before = by_hand(cfg, answers, advantages, mine, weight, old)
        old = old or before
        total = torch.zeros(())
        for micro in task.micros(step, torch.device("cpu")):
            h_TD = states[micro.tokens_BS.flatten()]
            given = {name: t.flatten() if t.dim() == 2 else t for name, t in micro.given.items()}
            total = total + task.objective_of(step)(h_TD, weight, micro.targets_BS.flatten(), given)
        loss_of = total / step.counts.tokens
        assert loss_of.item() == pytest.approx(want.item(), rel=1e-5)
        (got,) = torch.autograd.grad(loss_of, weight)
        (expected,) = torch.autograd.grad(want, weight)
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-6)


SETTINGS = [
    dict(loss="dapo", dual_clip=1.05, entropy=0.1, kl=0.2, kl_estimator="k3"),
    dict(loss="grpo", clip_low=0.05, clip_high=0.05, ratio_cap=1.3, normaliser="constant", mismatch="off"),
    dict(loss="cispo", ratio_cap=1.05, normaliser="sequence", entropy=0.2),
    dict(loss="dppo", ratio_penalty=0.5, clip_low=1e-4, clip_high=1e-4),
    dict(loss="gspo", dual_clip=1.02, kl=0.3, entropy=0.1),
    dict(loss="rloo", clip_high=0.01, kl=0.3, kl_estimator="k3", entropy=0.1),
]


def of_settings(g, logits, answers, advantages, old, reference):
    """The loss of these settings, its formulas written out answer by answer in fp64."""
    found = []
    for i, answer in enumerate(answers):
        n, A = len(answer.ids), advantages[i].double()
        p = logits[i].log_softmax(-1)
        lp = p[range(n), answer.ids]
        entropy = -(p.exp() * p).sum(-1)
        x = reference[i] - lp
        beside = g.kl * (x.exp() - x - 1 if g.kl_estimator == "k3" else x**2 / 2) - g.entropy * entropy
        w = (old[i] - answer.logprobs.double()).exp().clamp(max=2.0) ** (g.mismatch != "off")
        moved = lp - old[i]
        if g.loss in ("gspo", "rloo"):
            moved = moved.mean() if g.loss == "gspo" else moved.sum()
        rho = moved.exp()
        low, high = (3e-4, 4e-4) if g.loss == "gspo" else (0.2, 0.28 if g.loss == "dapo" else 0.2)
        low, high = g.clip_low or low, g.clip_high or high
        if g.loss == "cispo":
            each = -rho.detach().clamp(max=g.ratio_cap) * A * lp * w
        elif g.loss == "dppo":
            far = lp.exp() - old[i].exp()
            keep = ~((far > high) if A > 0 else (far < -low))
            each = (-keep.double() * rho * A + g.ratio_penalty * moved**2) * w
        else:
            first = rho.clamp(max=g.ratio_cap) if g.ratio_cap else rho
            each = -torch.minimum(first * A, rho.clamp(1 - low, 1 + high) * A)
            if g.dual_clip and A < 0:
                each = each.clamp(max=-g.dual_clip * A)
            each = each if each.dim() == 0 else each * w
        found.append((each, beside, n))
    N, tokens = len(found), sum(n for *_, n in found)
    per = g.normaliser or dict(grpo="sequence", gspo="sequence", rloo="sequence").get(g.loss, "token")
    share = dict(
        token=lambda n: 1 / tokens,
        sequence=lambda n: 1 / (N * n),
        constant=lambda n: 1 / (N * g.max_tokens),
    )[per]
    sums = [each / N if each.dim() == 0 else each.sum() * share(n) for each, _, n in found]
    return sum(sums) + sum(beside.sum() * share(n) for _, beside, n in found)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda case: case["loss"])
def test_every_setting_of_a_loss_is_in_its_formula(settings):
    cfg = of_test(updates=2, **settings)
    answers = some_answers()
    advantages = torch.linspace(-1.5, 2, len(answers))
    task, step = a_task(cfg, answers, advantages, 2)
    draw = torch.Generator().manual_seed(2)
    table = torch.randn(256, 8, generator=draw)
    weight = (0.3 * torch.randn(256, 8, generator=draw)).requires_grad_()
    old = None
    for states in (table, table + 1.0):
        mine = [states[[*a.prompt.ids, *a.ids[:-1]]][len(a.prompt.ids) - 1 :] for a in answers]
        logits = [h.double() @ weight.double().T for h in mine]
        now = [p.log_softmax(-1)[range(len(a.ids)), a.ids] for p, a in zip(logits, answers, strict=True)]
        old = old or [p.detach() for p in now]
        reference = [p - 0.3 for p in old]
        if cfg.grpo.kl:  # by another model: 0.3 nats less likely than at the beginning
            step.reference.clear()
            for micro in step.packed.batch.micros(torch.device("cpu"), True):
                h_TD = table[micro.tokens_BS.flatten()]
                logp_T = (h_TD @ weight.detach().T).log_softmax(-1)
                at_T = micro.targets_BS.flatten().clamp(min=0)
                step.reference.append(logp_T.gather(1, at_T[:, None])[:, 0] - 0.3)
        total = torch.zeros(())
        for micro in task.micros(step, torch.device("cpu")):
            given = {name: t.flatten() if t.dim() == 2 else t for name, t in micro.given.items()}
            h_TD = states[micro.tokens_BS.flatten()]
            total = total + task.objective_of(step)(h_TD, weight, micro.targets_BS.flatten(), given)
        loss_of = total / step.counts.tokens
        want = of_settings(cfg.grpo, logits, answers, advantages, old, reference)
        assert loss_of.item() == pytest.approx(want.item(), rel=1e-5, abs=1e-7)
        (got,) = torch.autograd.grad(loss_of, weight)
        (expected,) = torch.autograd.grad(want, weight)
        assert torch.allclose(got, expected, rtol=1e-4, atol=2e-6)
    for name in settings.keys() - {"loss", "kl_estimator", "ratio_penalty"}:  # each of them counts here
        if (cfg.grpo.loss, name) != ("cispo", "ratio_cap"):
            without = replace(cfg.grpo, **{name: getattr(GrpoConfig, name)}, kl_estimator=None)
            other = of_settings(without, logits, answers, advantages, old, reference)
            assert other.item() != pytest.approx(want.item(), rel=1e-3), name


# ---- whole runs ----

LOSSES = "dapo grpo dr_grpo gspo cispo dppo rloo".split()
CASES = [("dapo", ["--grpo.updates", "2"]), *((loss, []) for loss in LOSSES[1:])]
CASES += [("dapo", ["--grpo.kl", "0.1"]), ("gspo", ["--grpo.kl", "0.1", "--grpo.updates", "2"])]
CASES += [("dapo", ["--grpo.kl", "0.1", "--grpo.kl-in", "reward", "--grpo.resample", "2"])]
CASES += [("grpo", ["--grpo.prompts", "1", "--steps", "1"])]  # of two ranks, one has nothing to answer
LAYOUTS = [
    (2, ["--parallel.ep", "2", "--train.batch", "2"]),
    (2, ["--parallel.dp", "2", "--train.batch", "1"]),
    (2, ["--parallel.tp", "2", "--train.batch", "4"]),
    (2, ["--parallel.cp", "2", "--train.batch", "2"]),
    (4, ["--parallel.ep", "2", "--parallel.dp", "2", "--train.batch", "1"]),
]


@pytest.mark.parametrize(("loss", "more"), slow_but(CASES[:1], CASES), ids=str)
def test_every_layout_gives_the_same_numbers(data, tmp_path, gloo, loss, more):
    """One to four micro-batches a rank, on one process and two."""
    flags = ["--grpo.loss", loss, "--steps", "2", *more]
    gloo(1, runs.run, words(data, tmp_path / "alone", "--train.batch", "8", *flags))
    want = lines(tmp_path / "alone")
    assert want[0][2] > 0 and want[0][1] > 0
    some = (
        LAYOUTS if more == ["--grpo.kl", "0.1"] else LAYOUTS[2:4] if loss == "gspo" and more else LAYOUTS[:1]
    )
    for i, (world, layout) in enumerate(some):
        gloo(world, runs.run, words(data, tmp_path / str(i), *layout, *flags))
        assert near(lines(tmp_path / str(i)), want)


def told_to_stop(rank, world, argv, step):
    """A run whose last rank gets SIGTERM in the rollout of this step. Returns the steps that it had done."""
    cfg = parse(argv, "", rank=rank, world=world)
    process = runtime.start(cfg.seed)
    trainer = train.Trainer(cfg, process)
    rollout = trainer.task.rollout

    def stopped(model, batch, run, at):
        if at == step and rank == world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return rollout(model, batch, run, at)

    trainer.task.rollout = stopped
    with trainer.metrics:
        trainer.train()
    return trainer.step


RESUMED = [
    (1, ["--grpo.kl", "0.1"]),
    (2, ["--parallel.ep", "2", "--grpo.updates", "2"]),
    (1, ["--grpo.kl", "0.1", "--optim.freeze", "experts", "--train.dtype", "bf16"]),
]


def offloaded(rank, world, argv):
    """A run, and what moments and gradients hold in each rollout and validation."""
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    task, held = trainer.task, []

    def looked(name):
        call = getattr(task, name)

        def looking(*args):
            moments = [s[key] for s in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
            gradients = [p for p in trainer.model.parameters() if p.grad is not None]
            held.append((sum(local_part(t).untyped_storage().nbytes() for t in moments), len(gradients)))
            return call(*args)

        return looking

    task.rollout, task.evaluate = looked("rollout"), looked("evaluate")
    with trainer.metrics:
        trainer.train()
    return runs.whole(trainer), held


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory, gloo):
    """whole(world, *more): folder, final state and what was held of a run with its moments in place.

    The run saves after each step, and is made once.
    """

    @functools.cache
    def ran(world, *more):
        folder = tmp_path_factory.mktemp("whole")
        state, held = gloo(world, offloaded, words(data, folder, *more, "--checkpoint.every", "1"))[0]
        return folder, state, held

    return ran


@pytest.mark.parametrize(("world", "more"), slow_but(RESUMED[:1], RESUMED), ids=str)
def test_a_run_stopped_in_a_rollout_goes_on_bit_for_bit(data, tmp_path, gloo, whole, world, more):
    """The parts with the moments away in rollouts: they are back when the state is saved."""
    folder, want, _ = whole(world, *more)
    flags = words(data, tmp_path / "parts", *more, "--grpo.offload", "--resume", "auto")
    assert gloo(world, told_to_stop, flags, 1) == [1] * world
    got = gloo(world, runs.run, flags)[0]
    runs.assert_equal_state(got, want)
    assert lines(tmp_path / "parts") == lines(folder)


@pytest.mark.parametrize(("world", "more"), slow_but(RESUMED[1:], RESUMED), ids=str)
def test_moments_are_away_in_rollouts_and_come_back_bit_for_bit(data, tmp_path, gloo, whole, world, more):
    """On a CPU its memory stands in for the host's as well. A checkpoint is written after each step."""
    folder, want, held = whole(world, *more)
    assert len(held) == 4 and all(size > 0 for size, _ in held)
    assert all(gradients == 0 for _, gradients in held)
    flags = words(data, tmp_path, *more, "--checkpoint.every", "1", "--grpo.offload")
    got, held = gloo(world, offloaded, flags)[0]
    assert held == [(0, 0)] * 4
    runs.assert_equal_state(got, want)
    assert lines(tmp_path) == lines(folder)


def test_a_reward_that_raises_is_counted_and_training_goes_on(data, tmp_path, gloo):
    flags = words(data, tmp_path, "--steps", "1", "--train.eval-batches", "1", reward="raising")
    gloo(1, runs.run, flags)
    (line,) = [line for _, line in read_steps(tmp_path / "metrics.jsonl")]
    assert line["reward/faults"] == pytest.approx(4) and line["reward/mean"] > 0  # one of each group
    assert line["val_loss"] == pytest.approx(-line["val_reward/mean"])
    assert line["val_pass@1"] <= line["val_pass@2"] and line["val_pass@4"] is None  # three are known


@pytest.mark.slow
def test_prompts_are_drawn_anew_where_rewards_are_equal(data, tmp_path, gloo):
    gloo(1, runs.run, words(data, tmp_path / "0", "--steps", "2", reward="seldom"))
    gloo(1, runs.run, words(data, tmp_path / "3", "--steps", "2", "--grpo.resample", "3", reward="seldom"))
    stays, anew = (lines(tmp_path / n, ("reward/equal", "reward/mean"))[0] for n in "03")
    assert 0 < stays[0] < 1 and 0 < anew[0] < 1
    assert anew[1] > stays[1]  # groups of 0 alone are gone


def watched(rank, world, argv):
    """A run as train.py makes it, whose ranks compare their collectives in each step."""
    trainer = faulty.start(rank, world, argv)
    faulty.finish(trainer)
    return trainer.step


@pytest.mark.slow
def test_expert_groups_may_step_as_often_as_their_own_answers_are_long(data, tmp_path, gloo):
    """Here one of two has all answers: with rollouts in the journal, ranks would seem to have parted."""
    flags = ["--parallel.ep", "2", "--parallel.dp", "2", "--train.batch", "1", "--grpo.prompts", "1"]
    assert gloo(4, watched, words(data, tmp_path, *flags, "--steps", "2")) == [2] * 4


@pytest.mark.slow
def test_a_step_of_cut_answers_alone_trains_nothing(data, tmp_path, gloo):
    """A model that was never trained hardly ends an answer within three tokens."""
    flags = words(data, tmp_path, "--grpo.overlong", "drop", "--grpo.max-tokens", "3", "--grpo.prompts", "1")
    gloo(2, runs.run, [*flags, "--parallel.ep", "2", "--steps", "2"])
    found = lines(tmp_path, ("loss", "answers/truncated", "policy/entropy", "skipped"))
    assert [1.0, 0.0, 0.0] in [[cut, loss, entropy] for loss, cut, entropy, _ in found]
    assert all(skipped == 0 for *_, skipped in found)


DENSE = ModelConfig(dense_layers=ModelConfig().layers)
ACAUSAL = ModelConfig(moe=MoEConfig(selection="expert-choice"))
WRONG = [
    (dict(grpo=dict(rewards=())), r"--grpo.rewards=none: needs at least one of exact"),
    (dict(grpo=dict(group=1)), r"--grpo.group=1: must be at least 2"),
    (dict(parallel=ParallelConfig(pp=2), train=dict(accumulate=2)), r"--parallel.pp=2: --task grpo needs 1"),
    (dict(parallel=ParallelConfig(pp=2)), r"--parallel.pp=2: --task grpo needs 1"),
    (dict(train=dict(accumulate=2)), r"--train.accumulate=2.*valid: 1 and 0"),
    (dict(model=ModelConfig(dropout=0.1)), r"--model.dropout.*needs 0"),
    (dict(grpo=dict(max_tokens=32)), r"--grpo.max-tokens=32: must be below --train.seq=32"),
    (dict(grpo=dict(loss="cispo", clip_high=2.0)), r"--grpo.loss=cispo has neither"),
    (dict(grpo=dict(loss="gspo", mismatch="mask")), r"--grpo.mismatch=mask.*valid: off"),
    (dict(grpo=dict(temperature=0.0)), r"--grpo.temperature=0.0: must be positive"),
    (dict(grpo=dict(temperature=1e-37)), r"--grpo.temperature=1e-37: must be at least 1e-06"),
    (dict(grpo=dict(dual_clip=1.0)), r"--grpo.dual-clip=1.0: must be above 1"),
    (dict(grpo=dict(loss="dppo", dual_clip=3.0)), r"--grpo.dual-clip=3.0: valid with dapo.*not with .*dppo"),
    (dict(grpo=dict(ratio_cap=1.25)), r"--grpo.ratio-cap=1.25: must be above 1 \+ --grpo.clip-high=0.28"),
    (dict(grpo=dict(ratio_penalty=0.1)), r"--grpo.ratio-penalty=0.1: valid with dppo"),
    (dict(grpo=dict(loss="gspo", normaliser="token")), r"--grpo.normaliser=token: valid with dapo"),
    (dict(grpo=dict(entropy=-1.0)), r"--grpo.entropy=-1.0"),
    (dict(grpo=dict(advantage_eps=0.0)), r"--grpo.advantage-eps=0.0: must be positive"),
    (dict(grpo=dict(kl_estimator="k2")), r"--grpo.kl-estimator=k2: needs --grpo.kl above 0"),
    (dict(grpo=dict(kl=0.1, kl_estimator="k1")), r"--grpo.kl-estimator=k1.*valid.*: k2, k3"),
    (dict(grpo=dict(replay="old")), r"--grpo.replay=old.*--grpo.updates of at least 2"),
    (dict(grpo=dict(replay="rollout"), model=DENSE), r"--grpo.replay=rollout: a model without MoE layers"),
    (dict(grpo=dict(replay="rollout"), model=ACAUSAL), r"--grpo.replay=rollout.*expert-choice"),
    (
        dict(grpo=dict(offload=True), optim=OptimConfig(offload=True)),
        r"--grpo.offload: --optim.offload keeps",
    ),
    (dict(task="sft", grpo=dict(offload=True)), r"--grpo.offload: --task=sft.*valid with --task grpo"),
    (dict(log=LogConfig(routes=(1,))), r"--log.routes=1: .*leave it out with --task grpo"),
    (dict(data=DataConfig(overlong="truncate")), r"--data.overlong=truncate: prompts are never cut"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=lambda case: case if isinstance(case, str) else "")
def test_what_cannot_be_meant_is_one_error(given, said):
    given = dict(given)
    with pytest.raises(ConfigError, match=said):
        grpo = GrpoConfig(**dict(rewards=("exact",), max_tokens=6) | given.pop("grpo", {}))
        train = TrainConfig(**dict(seq=32) | given.pop("train", {}))
        Config(**dict(task="grpo", grpo=grpo, train=train) | given)


def test_the_warm_up_knows_a_rollout_s_kernels():
    """Experts and routers launch otherwise for the tokens of all slots than for a micro-batch."""
    cfg = of_test(rollout_slots=48)
    wanted: set[str] = set()
    more = dict.fromkeys(t for t in traces(cfg) if t not in traces(replace(cfg, task="sft")))
    assert any(48 in t for t in more)
    assert {"attention", "sample"} <= {trace.__module__.rpartition(".")[2] for trace, *_ in more}
    with compile_only("cuda:90", lambda name, key, compile: wanted.add(name)):
        for trace, *args in more:
            trace(*args)
    assert {"decode_kernel", "sample_kernel"} <= wanted
