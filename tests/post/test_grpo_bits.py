"""--grpo.bitwise: a step's update has the rollout's log-probs in every bit; what cannot is refused."""

import json

import pytest
import runs
import torch
from tiers import slow_but

import train
from tmoe.cli.parse import parse
from tmoe.data.chat.prompt_data import Prompt
from tmoe.model.lora import is_adapter
from tmoe.parallel.mesh import local_part
from tmoe.post.answers import Answer, pack, rows_of
from tmoe.run import process as runtime

FLAGS = """--task grpo --resume none --steps 1 --grpo.prompts 4 --grpo.group 4 --train.seq 256
    --model.rope.max-seq 256 --grpo.max-tokens 6 --data.val-fraction 0.2 --train.eval-batches 1
    --grpo.rewards length(6,6) --no-compile --grpo.bitwise""".split()


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The command without its layout."""
    folder = tmp_path_factory.mktemp("prompts")
    rows = [dict(prompt="+" * (1 + 30 * (i % 5)) + str(i)) for i in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [*runs.SMALL, *FLAGS, "--data.path", str(folder / "rows.jsonl"), "--out", str(folder / "run")]


def apart(rank, world, argv):
    """How many log-probs an update compared with the sampler's, and the most that one was off."""
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    loss, found = trainer.task.loss, []
    corrected = loss.corrected
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if is_adapter(name):  # b is zero at first
                local_part(p).normal_(std=0.1)

    def of_sampler(before, drawn):
        found.append((before - drawn)[drawn != 0].abs())
        return corrected(before, drawn)

    loss.corrected = of_sampler
    with trainer.metrics:
        trainer.train()
    off = torch.cat(found)
    return len(off), off.max().item()


LAYOUTS = [
    (1, ["--train.batch", "2", "--train.dtype", "bf16"]),
    (2, ["--parallel.ep", "2", "--train.batch", "1", "--train.dtype", "fp32"]),
    (2, ["--parallel.ep", "2", "--train.batch", "1", "--train.dtype", "bf16"]),
    (2, ["--parallel.ep", "2", "--train.batch", "1", "--train.dtype", "bf16", "--lora.rank", "6"]),
    (1, ["--train.batch", "2", "--train.dtype", "fp32", "--lora.rank", "6"]),
]


@pytest.mark.parametrize(("world", "layout"), slow_but([LAYOUTS[1], LAYOUTS[3]], LAYOUTS), ids=str)
def test_an_update_finds_the_rollouts_log_probs(words, gloo, world, layout):
    for count, off in gloo(world, apart, [*words, *layout]):
        assert count > 20 and off == 0.0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--compile"], "--no-compile"),
        (["--train.seq", "192"], "--train.seq=192"),
        (["--model.window", "16"], "--model.window=16"),
        (["--parallel.tp", "2"], "--parallel.tp=2"),
    ],
    ids=str,
)
def test_what_cannot_be_equal_is_refused(words, capsys, flags, told):
    kept = [word for word in words if word != "--no-compile"] if flags == ["--compile"] else words
    with pytest.raises(SystemExit):
        parse([*kept, *flags], "", rank=0, world=2 if "tp" in told else 1)
    assert told in capsys.readouterr().err


def test_sequences_begin_on_blocks():
    """A gap is of its sequence's document, and of no sequence; what is left of a row is another document."""
    answers = [
        Answer(Prompt([5] * n, "", {}), n, 0, [7, 8], torch.zeros(2), "stop", "") for n in (6, 3)
    ]  # of 7 tokens and of 4
    rows = rows_of(answers, 16, 4)
    packed = pack(answers, rows, (1, 1, 16), [False] * 2, 4).batch
    assert packed.documents_ABS[0, 0].tolist() == [0] * 8 + [1] * 4 + [2] * 4
    assert packed.sequences_ABS[0, 0].tolist() == [0] * 7 + [-1] + [1] * 4 + [-1] * 4
    assert packed.positions_ABS[0, 0, 8:12].tolist() == [0, 1, 2, 3]
