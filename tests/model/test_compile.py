"""Blocks compile whole: the numbers of eager, one graph for all blocks, no new one for other routing."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.config.run import Config, ParallelConfig, TrainConfig
from tmoe.model.transformer import Transformer
from tmoe.parallel import build_mesh, parallelize

pytestmark = pytest.mark.slow
SEQ = 32
MODEL = ModelConfig(
    vocab=64,
    dim=32,
    layers=3,
    heads=2,
    kv_heads=1,
    head_dim=16,
    qk_norm="head",
    rope=RopeConfig(max_seq=SEQ),
    moe=MoEConfig(experts=8, top_k=2, ffn_dim=16, shared_dim=16),
)


def build(compile: bool, ep: int, dtype: str = "fp32", model: ModelConfig = MODEL) -> Transformer:
    cfg = Config(
        compile=compile, model=model, train=TrainConfig(seq=SEQ, dtype=dtype), parallel=ParallelConfig(ep=ep)
    )
    mesh = build_mesh(ep=ep)
    with torch.device("meta"):
        net = Transformer(cfg.model)
    parallelize(net, mesh, cfg)
    net.to_empty(device="cpu")
    net.init_weights(0)
    return net


def step(net: Transformer, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = net(tokens, tokens.roll(-1, 1))
    loss.backward()
    grads = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
    net.zero_grad()
    return loss.detach(), grads


def compare(rank: int, world: int, ep: int) -> dict:
    """Eager against compiled, then 20 routings, some of which leave most experts empty."""
    eager, compiled = build(False, ep), build(True, ep)
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(64, (2, SEQ), generator=draw)
    want, got = step(eager, tokens), step(compiled, tokens)
    graphs = counters["stats"]["unique_graphs"]
    empty = []
    for i in range(20):
        with torch.no_grad():
            for block in compiled.blocks:  # a strong router sends everything to few experts; i changes which
                weight = block.moe.router.weight.to_local()
                weight.normal_(0, 10.0 ** (i % 4 - 2), generator=torch.Generator().manual_seed(i))
                if i % 5 == 4:
                    weight.zero_()  # all logits equal: every token takes the same two experts
        compiled.balancer.read_log()
        step(compiled, torch.randint(64, (2, SEQ), generator=draw))
        empty.append(int((compiled.balancer.read_log().counts_LE == 0).sum()))
    return dict(
        want=want,
        got=got,
        graphs=graphs,
        later=counters["stats"]["unique_graphs"],
        breaks=dict(counters["graph_break"]),
        empty=empty,
    )


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 2)])
def test_compiled_is_eager_and_never_recompiles(gloo, world, ep):
    for result in gloo(world, compare, ep):
        (want_loss, want), (got_loss, got) = result["want"], result["got"]
        torch.testing.assert_close(got_loss, want_loss, rtol=1e-6, atol=0)
        for name in want:
            assert (got[name] - want[name]).norm() <= 1e-5 * want[name].norm(), name
        assert result["graphs"] == 1, "identical blocks should share one graph"
        assert result["later"] == result["graphs"], "a routing caused a recompilation"
        assert not result["breaks"]
        assert max(result["empty"]) > 12, "no routing left many experts empty: the test lost its point"
        assert min(result["empty"]) == 0


def eager_in_disguise(rank: int, world: int) -> str:
    net = build(True, 1, model=replace(MODEL, layers=1))
    for block in net.blocks:
        block.compute = type(block).compute.__get__(block)  # what a silent fall-back to eager looks like
    try:
        net(torch.zeros(1, SEQ, dtype=torch.int64))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_block_that_ran_eager_fails_loudly(gloo):
    assert "ran eager" in gloo(1, eager_in_disguise)[0]


def test_a_whole_model_with_two_rotations_compiles():
    """By torch.compile over all of it, as somebody's own loop may: settings are made before, not inside."""
    rope = RopeConfig(max_seq=SEQ, window_theta=100.0)
    net = Transformer(replace(MODEL, layers=2, rope=rope, window=8, windowed=(1, 0)))
    tokens, targets = torch.randint(64, (2, 2, SEQ))
    want = net(tokens, targets)
    got = torch.compile(net, fullgraph=True, backend="aot_eager")(tokens, targets)
    torch.testing.assert_close(got, want)
    got.backward()
