"""Layout never changes the mathematics: the same model on the same global batches.

However model and batches are spread and split.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tiers import slow_but
from tiny_models import MODEL, SEQ, SEQUENCES, STEPS

from tmoe.config.model import ModelConfig
from tmoe.config.run import Config, OptimConfig, ParallelConfig, TrainConfig
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Totals
from tmoe.optim.adamw import build_optimizer
from tmoe.parallel import build_mesh, clip_grad_norm_, mesh, parallelize

BIASED = replace(  # gpt-oss's parts: biases everywhere, those of the experts on (dp, ep), sinks, windows
    MODEL,
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    window=5,
    windowed=(1, 0),
    moe=replace(MODEL.moe, softmax="after", router_bias=True, bias=True, activation="clamped"),
)


def config(ep: int, balance: str = "sequence", compile: bool = False, model: ModelConfig = MODEL) -> Config:
    return Config(
        compile=compile,
        model=replace(model, moe=replace(model.moe, balance=balance)),
        train=TrainConfig(seq=SEQ, dtype="fp32"),
        parallel=ParallelConfig(ep=ep),
        optim=OptimConfig(lr=3e-3, eps=1e-4),
    )


def learnable(vocab: int, draw: torch.Generator) -> torch.Tensor:
    """[SEQUENCES, SEQ] tokens, each 3 times the one before plus 0 or 1.

    On noise the losses would rise, and a step that amplifies rounding tells nothing about layouts.
    """
    tokens = torch.randint(vocab, (SEQUENCES, SEQ), generator=draw)
    steps = torch.randint(2, tokens.shape, generator=draw)
    for t in range(1, SEQ):
        tokens[:, t] = (3 * tokens[:, t - 1] + steps[:, t]) % vocab
    return tokens


def train(
    rank: int,
    world: int,
    ep: int,
    micro: int,
    balance: str = "sequence",
    compile: bool = False,
    model_cfg: ModelConfig = MODEL,
    seed: int = 0,
    whole_forwards: bool = False,
):
    """Trains STEPS steps; returns (losses, norms, final parameters on rank 0)."""
    cfg = config(ep, balance, compile, model_cfg)
    mesh = build_mesh(ep=ep)
    with torch.device("meta"):
        model = Transformer(cfg.model)
    parallelize(model, mesh, cfg, whole_forwards)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    optimizer = build_optimizer(model.named_parameters(), cfg.optim, torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    # one target in ten is ignored, unevenly over ranks: means over a rank's own targets would be wrong
    losses, norms = [], []
    for _ in range(STEPS):
        tokens = learnable(cfg.model.vocab, draw)
        targets = tokens.roll(-1, 1)
        targets[torch.rand(tokens.shape, generator=draw) < torch.linspace(0, 0.5, SEQUENCES)[:, None]] = -100
        counts = ((targets != -100).sum(), targets.numel(), SEQUENCES)
        totals = Totals(*(torch.as_tensor(float(c)) for c in counts))
        model.balancer.start_step()
        loss = torch.zeros(())
        per = SEQUENCES // world // micro
        for a in range(micro):
            model.set_requires_gradient_sync(a == micro - 1)
            mine = slice((a * world + rank) * per, (a * world + rank + 1) * per)
            part = model(tokens[mine], targets[mine], totals=totals)
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        norms.append(clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.full_tensor() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def one_process(gloo):
    return {balance: gloo(1, train, 1, 1, balance)[0] for balance in ("sequence", "global")}


LAYOUTS = [  # (processes, ep, micro-batches)
    (1, 1, 2),
    (1, 1, 4),
    (2, 1, 1),
    (4, 1, 1),
    (2, 2, 1),
    (4, 4, 1),
    (4, 2, 1),
    (8, 4, 1),
    (2, 2, 4),
    (4, 2, 2),
]
FAST = [(1, 1, 2), (2, 1, 1), (2, 2, 1), (4, 2, 2)]


@pytest.mark.parametrize(("world", "ep", "micro"), slow_but(FAST, LAYOUTS), ids=lambda v: str(v))
def test_layout(gloo, one_process, world, ep, micro):
    for result in gloo(world, train, ep, micro)[:1]:
        assert_same(result, one_process["sequence"])


@pytest.mark.parametrize(("world", "ep"), slow_but([(2, 1)], [(2, 1), (4, 2)]))
def test_layout_global_balance(gloo, one_process, world, ep):
    assert_same(gloo(world, train, ep, 1, "global")[0], one_process["global"])


def train_in_units(rank: int, world: int, ep: int, micro: int, unit: int):
    mesh.UNIT = unit
    return train(rank, world, ep, micro, whole_forwards=True)


@pytest.mark.parametrize("unit", [2**26, 40_000])
@pytest.mark.parametrize(("world", "ep", "micro"), slow_but([(2, 1, 1)], [(2, 1, 1), (4, 2, 2)]))
def test_layout_in_units(gloo, one_process, world, ep, micro, unit):
    """All three blocks are one unit, or the first two are; elsewhere each is one."""
    assert_same(gloo(world, train_in_units, ep, micro, unit)[0], one_process["sequence"])


def test_units():
    assert mesh.units([]) == []
    assert mesh.units([2**26] * 3) == [[0], [1], [2]]
    assert mesh.units([2**25] * 5) == [[0, 1], [2, 3], [4]]
    assert mesh.units([1] * 6) == [[0, 1, 2, 3], [4, 5]]
    assert mesh.units([2**27, 1, 2**27, 1]) == [[0], [1, 2], [3]]


def test_layout_biases(gloo):
    # from seed 0, one token's third and fourth expert come within 1.2e-7 of each other in step 9:
    # rounding decides such a tie
    seed = 1
    one = gloo(1, train, 1, 2, "sequence", False, BIASED, seed)[0]
    assert_same(gloo(4, train, 2, 1, "sequence", False, BIASED, seed)[0], one)


@pytest.mark.slow
def test_layout_biases_compiled(gloo):
    one = gloo(1, train, 1, 1, "sequence", False, BIASED)[0]
    assert_same(gloo(1, train, 1, 1, "sequence", True, BIASED)[0], one)


@pytest.mark.slow
def test_layout_compiled(gloo, one_process):
    assert_same(gloo(2, train, 2, 1, "sequence", True)[0], one_process["sequence"])


def assert_same(result, reference):
    losses, norms, parameters = result
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference[0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(reference[1]), rtol=1e-5, atol=0)
    for name, want in reference[2].items():
        assert (parameters[name] - want).norm() <= 1e-5 * want.norm(), name
    assert reference[0][-1] < reference[0][0] - 0.01, (
        "nothing was learnt: the test would pass on frozen weights"
    )
