"""The dry run's bytes of a base in NF4: those of the built model, and what fits in 24 GB.

next: tests/run/test_memory.py
"""

import pytest
import torch

from tmoe.base.quantised import size_of
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.model.freeze import settle
from tmoe.model.lora import adapter_counts
from tmoe.model.transformer import Transformer
from tmoe.plan.fitting import verdict
from tmoe.plan.memory import memory_of_stages, peak_bytes
from tmoe.plan.nf4_memory import nf4_sizes

PILOT = "qwen3-30b-a3b --lora.rank 8 --lora.base nf4 --world 1 --train.batch 1 --train.seq 4096"
PILOT += " --parallel.checkpoint block --dry-run"


def memory(words: str):
    cfg = parse(words.split(), "")
    axes = Axes.of(cfg.parallel, cfg.world)
    (parts,) = memory_of_stages(cfg, axes)
    return cfg, axes, parts


@pytest.mark.parametrize("words", ["tiny", "deepseek-v2-lite", "gpt-oss-20b"])
def test_parameters_are_those_of_the_built_model(words):
    cfg, _, parts = memory(f"{words} --lora.rank 8 --lora.base nf4 --train.dtype bf16 --dry-run --world 1")
    with torch.device("meta"):
        model = Transformer(cfg.model)
        settle(model, cfg)
    built = sum(t.nbytes for t in model.state_dict().values())
    biases = sum(b.nbytes for n, b in model.named_buffers() if n.endswith("choice_bias"))
    assert abs(parts["parameters"] - built) <= biases + 1e-4 * built


def test_a_base_of_30b_numbers_by_hand():
    """48 layers of 128 experts, each 3 x 2048 x 768, and of attention: 29.9e9 numbers of 4.127 bits."""
    cfg, axes, parts = memory(PILOT + " --lora.expert-rank 1")
    sizes = nf4_sizes(cfg.model, range(48))
    assert sizes.experts == 48 * 128 * 3 * 2048 * 768
    assert sizes.dense == 48 * 2048 * (32 * 128 + 2 * 4 * 128 + 32 * 128)
    assert sizes.layer == 128 * 3 * 2048 * 768
    assert abs(sizes.bytes * 8 / (sizes.experts + sizes.dense) - 4.127) < 0.001
    assert sizes.bytes == 48 * (
        size_of("nf4", (128, 1536, 2048)) + size_of("nf4", (128, 2048, 768))
        + size_of("nf4", (5120, 2048)) + size_of("nf4", (2048, 4096))
    )  # fmt: skip
    assert 18.5 < peak_bytes(parts) / 2**30 < 20.4
    assert verdict(cfg, axes, "rtx4090")[0].startswith("verdict: fits")
    cfg, axes, parts = memory(PILOT + " --lora.expert-rank 8")
    assert 22 < peak_bytes(parts) / 2**30 < 25
    assert "does not fit" in verdict(cfg, axes, "rtx4090")[0]


def test_ranks_that_share_a_batch_hold_the_base_and_gather_none_of_it():
    """Embedding, head, norms, routers and adapters are sharded over 8 ranks, and gathered in bf16."""
    words = PILOT.replace("--world 1", "--world 8 --parallel.dp 8")
    cfg, _, parts = memory(words)
    base = nf4_sizes(cfg.model, range(48)).bytes
    small = 2 * 151_936 * 2048 + 2048 + 48 * (128 * 2048 + 2 * 2048 + 2 * 128)
    adapters = adapter_counts(cfg.model, cfg.lora, range(48))
    adapted = 4 * (adapters.dense + adapters.experts)
    assert parts["parameters"] - base == pytest.approx((2 * small + adapted) / 8, rel=1e-3)
    most = 2 * small + 2 * (adapters.dense + adapters.experts)
    assert 2 * 2 * 151_936 * 2048 < parts["gathered"] < most
    grpo = "--task grpo --grpo.rewards exact --data.path x"
    _, _, one = memory(f"{PILOT} {grpo}")
    _, _, rollout = memory(f"{words} {grpo}")
    assert rollout["rollout"] - one["rollout"] == pytest.approx(2 * small, rel=1e-3)
    assert one["rollout"] > 2 * 128 * 3 * 2048 * 768  # the values of a layer


@pytest.mark.parametrize(("words", "peak"), [("--model.layers 12 --lora.expert-rank 8", 7.84), ("", 18.60)])
def test_peaks_are_those_of_an_h200(words, peak):
    """GiB, by benchmarks.nf4: 12 layers with rank 64, and all layers with rank 8."""
    words = f"{PILOT.replace('rank 8', 'rank 64') if words else PILOT} {words} --train.dtype bf16"
    _, _, parts = memory(words)
    assert abs((peak_bytes(parts) - parts["exchange"]) / 2**30 / peak - 1) < 0.03


def test_a_whole_base_has_a_layers_values_less():
    """The loss takes more than a block without values, and less than a block with them."""
    _, _, small = memory(PILOT)
    _, _, whole = memory(PILOT.replace("nf4", "whole"))
    same = {name for name in small if small[name] == whole[name]}
    assert set(small) - same == {"parameters", "working"}
    assert 0 < small["working"] - whole["working"] < 2 * 128 * 3 * 2048 * 768
    _, _, small = memory(PILOT + " --model.vocab 512")
    _, _, whole = memory(PILOT.replace("nf4", "whole") + " --model.vocab 512")
    assert small["working"] - whole["working"] == 2 * 128 * 3 * 2048 * 768
