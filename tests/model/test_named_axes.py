"""Blocks that rearrange named axes are one graph, of one trace a size, and give the bits of eager blocks.

next: tmoe/model/latent.py, tmoe/moe/exchange/padded.py
"""

import pytest
import torch

from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from tmoe.model.rope import turns_of
from tmoe.model.transformer import Block

GROUPED = dict(heads=4, kv_heads=2, head_dim=8, qk_norm="head", attention_gate=True)
LATENT = dict(heads=4, attention="mla", mla=MLAConfig(q_rank=12, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=6))


@pytest.mark.parametrize("attention", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_a_block_is_one_graph_and_gives_the_bits_of_an_eager_one(attention):
    """Heads, pairs of channels, groups of experts and slots of experts: values and every gradient."""
    torch.compiler.reset()
    torch.manual_seed(0)
    moe = MoEConfig(
        experts=8,
        top_k=2,
        ffn_dim=16,
        groups=4,
        top_groups=2,
        group_score="top2",
        capacity_factor=1.0,
        pad=True,
    )
    cfg = ModelConfig(
        vocab=32, dim=16, layers=1, dense_layers=0, rope=RopeConfig(max_seq=16), moe=moe, **attention
    )
    block = Block(cfg, 0)
    for p in block.parameters():
        p.data.normal_(0.0, 0.3)
    traces = []

    def count(graph, inputs):
        traces.append(graph)
        return graph

    eager, compiled = block.compute, torch.compile(block.compute, fullgraph=True, backend=count)
    for batch in (2, 2, 3):
        x = torch.randn(batch, 16, 16, requires_grad=True)
        found = []
        for block.compute in (eager, compiled):
            y = block(x, *turns_of(cfg, 16, x.device)[block.rope], None, None, None)[0]
            found.append([y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert len(traces) == 2  # of a size, and of any other
