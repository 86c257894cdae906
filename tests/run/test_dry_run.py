"""The dry run of every mixture of axes: what it says of ranks, tokens, stages and placements."""

import re

import pytest
from tiers import slow_but

from tmoe.cli.parse import parse
from tmoe.commands.dry_run import dry_run, runs

STEP = "--train.batch 1 --train.seq 240"
CASES = [
    ("--parallel.tp 2 --parallel.ep 4 --world 16", ["16 ranks: dp 4 x ep 4 x tp 2", "8 readers"]),
    (
        "--parallel.pp 2 --parallel.replicate 2 --parallel.ep 2 --parallel.etp 2 --parallel.cp 2 "
        "--train.accumulate 4 --world 16",
        [
            "16 ranks: dp 1 x ep 2 x pp 2 x replicate 2 x etp 2 x cp 2",
            "4 readers x 4 micro-batches x 1 sequences x 240 = 3,840 tokens; a rank works on 120",
            "80 of 160 channels",
            "(Replicate(), ",
            "8 to 15",
            "embedding, blocks 0 to",
            "norm and head",
        ],
    ),
    ("--parallel.replicate 4 --world 8", ["('replicate', 'shard')", "8 readers"]),
    ("--parallel.cp 4 --parallel.cp-exchange keys --world 8", ["by keys", "2 readers"]),
    (
        "--parallel.cp 3 --parallel.cp-exchange heads --parallel.tp 2 --world 6",
        ["by heads", "3 of 6", "1 readers"],
    ),
    (
        "--parallel.pp 2 --parallel.schedule v --train.accumulate 4 --world 2",
        ["4 chunks of 4 blocks", "embedding, block 0, block 3, norm and head"],
    ),
    (
        "--parallel.pp 2 --parallel.schedule interleaved --train.accumulate 4 --parallel.ep 2 --model.tied",
        ["4 ranks: dp 1 x ep 2 x pp 2", "embedding, block 0, block 2", "block 1, block 3, norm and head"],
    ),
]


@pytest.mark.parametrize(("words", "says"), slow_but(CASES[:2], CASES))
def test_every_mixture_of_axes(capsys, words, says):
    dry_run(parse(["tiny", *STEP.split(), *words.split(), "--dry-run"], ""))
    said = re.sub(r"\s+", " ", re.sub(r"[│┃]", " ", capsys.readouterr().out))
    for what in says:
        assert what in said, said
    assert said.count("blocks.attention.qkv.weight 4 ") == 1, "one row for all blocks"


def test_the_mixtral_script(capsys):
    """Megatron's flags for 16 GPUs, tensor parallel 4 and expert parallel 4, folded."""
    words = "mixtral-8x7b --parallel.tp 4 --parallel.ep 4 --parallel.dp 4 --train.seq 2048 --train.batch 1"
    dry_run(parse([*words.split(), "--train.accumulate", "32", "--dry-run", "--world", "16"], ""))
    said = capsys.readouterr().out
    assert "4 readers x 32 micro-batches x 1 sequences x 2048 = 262,144 tokens" in said  # 128 sequences
    assert "16 ranks: dp 4 x ep 4 x tp 4" in said and "8 of 32" in said


def test_stages_in_words():
    assert runs([0]) == "0" and runs([0, 1, 2]) == "0 to 2" and runs([0, 2, 3, 7]) == "0, 2 to 3, 7"
