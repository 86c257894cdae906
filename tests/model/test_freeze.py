"""--optim.freeze and --optim.lr-factors: what they name stays, or moves as fast as they say."""

from dataclasses import replace

import pytest
import runs
import torch
from tiers import slow_but
from tiny_models import MODEL

from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError
from tmoe.config.run import Config, OptimConfig, ParallelConfig, TrainConfig
from tmoe.model.freeze import freeze, require_matches
from tmoe.model.transformer import Transformer
from tmoe.optim.adamw import parameter_groups
from tmoe.optim.learning_rate import set_lr
from tmoe.plan.memory import memory_per_rank


def frozen(pattern, **changes):
    return Config(model=MODEL, optim=OptimConfig(freeze=pattern), train=TrainConfig(seq=16, **changes))


def test_a_frozen_parameter_has_no_gradient_and_no_master_copy():
    model = Transformer(MODEL)
    names = freeze(model, r"experts|embedding", "bf16")
    assert len(names) == 1 + 2 * 2
    for name, p in model.named_parameters():
        assert p.requires_grad == (name not in names)
        assert p.dtype == (torch.bfloat16 if name in names else torch.float32)
    groups = parameter_groups(model.named_parameters(), 0.1)
    trained = sum(p.numel() for group in groups for p in group["params"])
    assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_patterns_that_cannot_be_meant():
    for pattern, said in ((r"rooter", "found in no parameter"), (".", "nothing is left to train")):
        with pytest.raises(ConfigError, match=f"--optim.freeze=.*{said}"):
            require_matches(frozen(pattern))
    with pytest.raises(ConfigError, match=r"--optim.freeze=\(: must be a regular expression"):
        frozen("(")
    with pytest.raises(ConfigError, match=r"--optim.lr-factors=router: must be PATTERN:FACTOR"):
        OptimConfig(lr_factors=("router",))
    with pytest.raises(ConfigError, match=r"--optim.lr-factors=rooter: found in no parameter"):
        require_matches(replace(frozen(None), optim=OptimConfig(lr_factors=("rooter:2",))))
    require_matches(frozen("router"))


def test_the_first_pattern_that_is_found_gives_the_factor():
    model = Transformer(MODEL)
    cfg = OptimConfig(lr_factors=("router:0.1", r"blocks\.1\.:2", "embedding:0"))
    groups = parameter_groups(model.named_parameters(), 0.1, cfg.factors)
    optimizer = torch.optim.AdamW(groups)
    set_lr(optimizer, 1e-3)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert found["blocks.1.moe.router.weight"] == pytest.approx(1e-4)
    assert found["blocks.1.moe.experts.down"] == pytest.approx(2e-3)
    assert found["embedding.weight"] == 0 and found["blocks.2.moe.experts.down"] == pytest.approx(1e-3)


def test_memory_counts_no_gradients_and_moments_of_what_is_frozen():
    elements = 2 * 8 * 3 * 16 * 32  # of two layers' experts
    axes = Axes.of(ParallelConfig(), 1)
    less = {
        name: size - memory_per_rank(frozen("experts", dtype="bf16"), axes)[name]
        for name, size in memory_per_rank(frozen(None, dtype="bf16"), axes).items()
    }
    want = dict(parameters=2, gradients=2, moments=8, gathered=2)
    assert {name: n for name, n in less.items() if n} == {name: n * elements for name, n in want.items()}


LAYOUTS = [dict(ep=2), dict(dp=2), dict(pp=2)]


FLAGS = "--optim.freeze experts|embedding|blocks.0 --train.dtype fp32 --train.accumulate 2".split()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_frozen_parameters_stay_in_every_layout(gloo, tmp_path, axes, dtype):
    """A whole pipeline stage is frozen as well: blocks.0 and the embedding are the first."""
    flags = [word for name, size in axes.items() for word in (f"--parallel.{name}", str(size))]
    words = [*runs.SMALL, "--out", str(tmp_path), "--resume", "none", *FLAGS, "--train.dtype", dtype, *flags]
    before = gloo(2, runs.load, words)[0]
    after = gloo(2, runs.run, words)[0]
    for name in before:
        if name.startswith("model."):
            stays = any(part in name for part in ("experts", "embedding", "blocks.0."))
            assert torch.equal(before[name], after[name]) == stays, name
    assert not any("experts" in name for name in after if name.startswith("optim."))


HELD = [  # what is frozen, and the rest of the error
    ("--optim.freeze experts", "; start a new run from its weights with --init"),
    ("--lora.rank 4", "; valid: bf16"),
]


@pytest.mark.parametrize(("words", "said"), slow_but(HELD[:1], HELD))
def test_frozen_weights_are_resumed_in_their_type(gloo, tmp_path, words, said):
    """One line; `reshard --dtype` would cast the trained weights too."""
    flags = [*runs.SMALL, "--out", str(tmp_path), *words.split(), "--train.batch", "2", "--steps", "2"]
    gloo(1, runs.run, [*flags, "--train.dtype", "bf16", "--steps", "1"])
    code, error = gloo(1, runs.begin, [*flags, "--train.dtype", "fp16"])[0]
    step = tmp_path / "checkpoints/step-1"
    wanted = f"error: --train.dtype=fp16: {step} holds frozen weights of --train.dtype=bf16{said}"
    assert code == 2 and error.strip().startswith(wanted) and len(error.strip().splitlines()) == 1, error
