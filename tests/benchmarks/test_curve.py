"""benchmarks/curve.py's reference path: every definition is called, and no fast path beside it."""

from collections import Counter

import torch
from runs import SMALL

import train
from benchmarks import curve
from tmoe.optim.adamw import AdamW

DOCUMENTS = ["--model.moe.shared-dim", "0", "--steps", "2", "--checkpoint.mode", "off"]


def fast_ops(prof: torch.profiler.profile) -> set[str]:
    """Names of the ops of tmoe that ran."""
    return {event.key for event in prof.key_averages() if event.key.startswith("tmoe::")}


def two_steps(rank: int, world: int, words: list[str], plain: bool) -> tuple[set[str], Counter[str]]:
    """tmoe's ops in two steps, and how often each definition was called."""
    calls: Counter[str] = Counter()
    if plain:
        curve.become_plain()
        for part in curve.plain_parts():

            def counted(*args, part=part, **settings):
                calls[part.name] += 1
                return part.plain(*args, **settings)

            setattr(part.owner, part.name, counted)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        train.main(words)
    return fast_ops(prof), calls


def test_the_reference_path_calls_every_definition_and_no_op_of_tmoe(gloo, tmp_path):
    words = [*SMALL, *DOCUMENTS, "--out", str(tmp_path)]
    fast, _ = gloo(1, two_steps, [*words, "--resume", "none"], False)[0]
    assert {"tmoe::moe_mlp", "tmoe::softmax_topk"} <= fast  # else the next assertion says nothing
    ops, calls = gloo(1, two_steps, [*words, "--resume", "none"], True)[0]
    assert not ops
    # The step in one pass is a GPU's: on a CPU torch's AdamW steps anyway.
    assert set(calls) == {part.name for part in curve.plain_parts()} - {"_step_in_one_pass"}
    assert "_step_in_one_pass" in AdamW._step_of_adamw.__code__.co_names
