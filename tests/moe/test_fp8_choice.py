"""--train.fp8: when experts multiply in fp8, what is refused, memory, and codes that follow their weights.

next: tests/end_to_end/test_fp8_train.py
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig, MoEConfig, MTPConfig
from tmoe.config.run import Config, GrpoConfig, LoraConfig, ParallelConfig, TrainConfig
from tmoe.model.float8 import in_compute_type
from tmoe.moe import fp8_choice
from tmoe.moe.experts import Experts
from tmoe.ops.experts import fp8_table
from tmoe.ops.experts.fp8_codes import Codes, encode
from tmoe.ops.experts.fp8_table import Measured, nearest, pays
from tmoe.parallel.copies import WorkingCopy
from tmoe.plan.memory import memory_per_rank

MOE = MoEConfig(experts=8, top_k=2, ffn_dim=128)
MODEL = ModelConfig(vocab=512, dim=256, layers=3, heads=4, kv_heads=4, head_dim=64, dense_layers=1, moe=MOE)
FP8 = TrainConfig(batch=2, seq=512, fp8="experts")
EVERYWHERE = replace(FP8, fp8_everywhere=True)
MEASURED = Measured(D=256, F=128, rows=256, bf16=10.0, fp8=8.0, cast=3.0)
ONE = Axes()


def config(train=FP8, model=MODEL, **more):
    return Config(model=model, train=train, compile=False, **more)


def test_a_shape_without_a_measurement_keeps_bf16():
    """The table that ships has three widths on Hopper, of `benchmarks.fp8_experts` on one H200."""
    shipped = {(one.D, one.F) for one in fp8_table.entries("cuda:90")}
    assert shipped == {(2048, 768), (2048, 1408), (4096, 14336)} and not fp8_table.entries("cuda:80")
    assert all(one.fp8 + one.cast < one.bf16 for one in fp8_table.entries("cuda:90"))
    choice = fp8_choice.choose(config(), ONE, "cuda:90")
    assert not choice.on and choice.why.startswith(
        "no measurement on cuda:90 of experts of 256 x 128 with 256 rows"
    )
    (line,) = fp8_choice.describe(config(), ONE, "cuda:90")
    assert line.startswith("fp8 (experts): experts of 2 blocks multiply in bf16: no measurement on cuda:90")
    further = config(model=replace(MODEL, mtp=MTPConfig(depth=1)))
    assert "experts of 3 blocks" in fp8_choice.describe(further, ONE, "cuda:90")[0]
    assert fp8_choice.choose(config(EVERYWHERE), ONE, "cuda:90").on
    for arch, gradients in (("cuda:90", "e4m3 too"), ("cpu", "bf16")):
        (line,) = fp8_choice.describe(config(EVERYWHERE), ONE, arch)
        assert line.endswith(f"; gradients of trained weights in {gradients}")
    assert fp8_choice.describe(config(TrainConfig()), ONE, "cuda:90") == []


def test_other_chips_keep_bf16_whatever_is_asked():
    for arch in ("cuda:80", "cuda:89", "cuda:100", "hip:gfx942"):
        choice = fp8_choice.choose(config(EVERYWHERE), ONE, arch)
        assert choice == (False, f"{arch} has no kernels of experts in fp8")
    odd = replace(MODEL, moe=replace(MOE, ffn_dim=80))
    assert not fp8_choice.choose(config(EVERYWHERE, odd), ONE, "cuda:90").on
    assert fp8_choice.choose(config(EVERYWHERE, odd), ONE, "cpu").on


def test_casts_count(monkeypatch):
    """bf16 10 ms, fp8 8, a cast 3: it pays from two micro-batches on, if the matrices are cast once."""
    monkeypatch.setattr(fp8_choice, "entries", lambda arch: [MEASURED])
    on = lambda cfg, axes=ONE: fp8_choice.choose(cfg, axes, "cuda:90").on  # noqa: E731
    two = replace(FP8, accumulate=2)
    assert not on(config()) and on(config(two))
    assert "is slower in fp8 on cuda:90" in fp8_choice.choose(config(), ONE, "cuda:90").why
    whole, fsdp = ParallelConfig(dp=2), ParallelConfig(dp=2, gathered_gib=0)
    assert on(config(two, parallel=whole), Axes(dp=2))
    assert not on(config(two, parallel=fsdp), Axes(dp=2)) and not on(config(two), Axes(replicate=2))
    far = replace(MODEL, moe=replace(MOE, ffn_dim=256))
    assert not on(config(two, far))


def test_the_nearest_entry():
    small, large = MEASURED, MEASURED._replace(rows=4096)
    assert (
        nearest([small, large], 256, 128, 300) == small and nearest([small, large], 256, 128, 9999) == large
    )
    assert nearest([small], 320, 128, 300) == small and nearest([small], 400, 128, 300) is None
    assert nearest([small], 256, 128, 100) is None  # fewer rows, which the casts might not repay
    assert pays(small, 2, 1) and not pays(small, 1, 1) and not pays(small, 2, 2)


DENSE = replace(MODEL, dense_layers=3, ffn_dim=64)
REFUSED = [
    (dict(train=TrainConfig(fp8_everywhere=True)), "--train.fp8-everywhere: needs --train.fp8 experts"),
    (dict(model=DENSE), "--train.fp8=experts: a model without MoE layers has no experts"),
    (dict(train=replace(FP8, dtype="fp16")), "--train.fp8=experts: not with --train.dtype=fp16"),
    (dict(lora=LoraConfig(rank=4, base="nf4")), "--train.fp8=experts: not with --lora.base=nf4"),
    (dict(parallel=ParallelConfig(etp=2)), "--train.fp8=experts: not with --parallel.etp=2"),
    (
        dict(parallel=ParallelConfig(ep=2, adaptive_r=0)),
        "--train.fp8=experts: not with --parallel.adaptive-r=0",
    ),
    (
        dict(model=replace(MODEL, moe=replace(MOE, ffn_dim=72))),
        "--train.fp8=experts: experts of 256 x 72: both must be multiples of 16",
    ),
    (
        dict(train=replace(FP8, fp8="all"), parallel=ParallelConfig(tp=2)),
        "--train.fp8=all: not with --parallel.tp=2: attention must multiply whole sequences by whole "
        "matrices; valid: tp and cp of 1, or --train.fp8 experts",  # --train.float8 none would be no way out
    ),
    (
        dict(train=replace(FP8, fp8="all"), lora=LoraConfig(rank=4)),
        "--train.fp8=all: not with --lora.rank=4: products of frozen layers in float8 are not supported; "
        "valid: --train.fp8 experts",
    ),
    (
        dict(task="grpo", grpo=GrpoConfig(rewards=("exact",), bitwise=True), train=replace(FP8, seq=512)),
        "--train.fp8=experts: --grpo.bitwise needs the same products",
    ),
]


@pytest.mark.parametrize(("more", "says"), REFUSED)
def test_refusals_name_the_setting(more, says):
    with pytest.raises(ConfigError) as refused:
        config(**more)
    assert str(refused.value).startswith(says)


def test_all_is_experts_with_dense_layers():
    train = TrainConfig(fp8="all")
    assert train.float8 == "rowwise" and TrainConfig(fp8="experts").float8 == "none"


def test_memory_counts_the_codes():
    """Two bytes an element and four for each 128 x 128, in both MoE blocks; nothing without a measurement.

    In the backward also those of dH and dy, if it is not the loss that takes most. A forward keeps H in one
    byte an element, with four for each 64 x 128: 24 tiles of 128 rows have room.
    """
    codes = 2 * (2 * 8 * 3 * 256 * 128 + 8 * 3 * 2 * 4)
    plain, off, on = (memory_per_rank(config(train), ONE) for train in (TrainConfig(2, 512), FP8, EVERYWHERE))
    assert off == plain and on["gathered"] - plain["gathered"] == codes
    pairs, scales = 2 * 512 * 2, 2 * 48 * 4
    saved = pairs * 2 * 128 - scales
    assert plain["activations"] - on["activations"] == 2 * saved
    rows = 2 * 512 * (2 * 2 * 128 + 256 + 4)
    assert 0 <= on["working"] - plain["working"] <= rows
    others = on.keys() - {"gathered", "working", "activations"}
    assert all(on[name] == plain[name] for name in others)
    halves = Codes.size((8, 256, 256), 2) + Codes.size((8, 256, 128), 1)
    assert halves == encode(torch.zeros(8, 256, 256), 2).numel() + encode(torch.zeros(8, 256, 128)).numel()


def codes_in(experts: Experts) -> tuple:
    """The codes that a call of the experts' scope hands over."""
    return experts(lambda x, local: local.codes, torch.zeros(1, 32))


def test_codes_follow_the_weights():
    """Made once while the copy is valid; again after a step; in each forward without a working copy."""
    experts = Experts(32, replace(MOE, experts=2, ffn_dim=32))
    for p in experts.parameters():
        nn.init.normal_(p)
    assert codes_in(experts) is None
    experts.fp8 = True
    first, again = codes_in(experts)[0], codes_in(experts)[0]
    assert first is not again and torch.equal(first, again)

    master = experts.gate_up
    copy = WorkingCopy(master, torch.bfloat16)
    experts._parameters["gate_up"] = copy.tensor
    copy.refresh()
    copy.written(True)  # the optimizer has written both
    copy.refresh()
    first = codes_in(experts)[0]
    copy.refresh()
    assert codes_in(experts)[0] is first and torch.equal(first, encode(copy.tensor, 2))
    with torch.no_grad():
        master.mul_(3)
        copy.tensor.data.mul_(3)
    copy.written(True)
    copy.refresh()
    later = codes_in(experts)[0]
    assert later is not first and torch.equal(later, encode(copy.tensor, 2))
    with torch.no_grad():
        master.mul_(3)
    copy.written(False)  # the copy is cast in each forward
    copy.refresh()
    assert torch.equal(codes_in(experts)[0], encode(master.bfloat16(), 2))


def test_rollouts_multiply_in_the_compute_type():
    experts = Experts(32, replace(MOE, experts=2, ffn_dim=32))
    experts.fp8 = True
    with in_compute_type(experts), in_compute_type(experts):
        assert codes_in(experts) is None
    assert experts.fp8 and codes_in(experts) is not None
