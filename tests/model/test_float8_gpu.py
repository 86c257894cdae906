"""--train.float8 on a GPU: a compiled block's products are float8's, and near those of eager and of bf16.

next: tests/model/test_float8.py
"""

import pytest
import torch

from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.config.run import Config, TrainConfig
from tmoe.model import float8
from tmoe.model.attention_backend import COMPILE
from tmoe.model.rope import turns_of
from tmoe.model.transformer import Block, Transformer

pytestmark = pytest.mark.gpu
pytest.importorskip("torchao")
GPU = torch.device("cuda")
WIDE = ModelConfig(
    vocab=64,
    dim=512,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=128,
    dense_layers=0,
    rope=RopeConfig(max_seq=256),
    moe=MoEConfig(experts=4, top_k=2, ffn_dim=128, shared_dim=512),
)


def block_of(recipe: str) -> Block:
    torch.manual_seed(0)
    model = Transformer(WIDE)
    model.init_weights(0)
    float8.apply_float8(model, recipe)
    return model.blocks[0].to(GPU, torch.bfloat16)


def test_a_compiled_block_is_near_an_eager_one_and_bf16():
    """e4m3 rounds an operand by about 2.6%; a result and a gradient are within a tenth of bf16's.

    x is small, so that bf16's rounding of the residual sum is small beside the block's result. Compiled code
    rounds to bf16 at other points, and e4m3 then rounds some operands to the other neighbour.
    """
    cfg = Config(model=WIDE, train=TrainConfig(seq=256, float8="rowwise"))
    if float8.lacking(GPU):
        pytest.skip("this GPU has no float8 products")
    float8.require_device(cfg, GPU)
    torch.manual_seed(1)
    x = torch.randn(2, 256, 512, device=GPU).mul(0.05).bfloat16().requires_grad_()
    context = (*turns_of(WIDE, 256, GPU)[WIDE.rope_of(0)], None, None, None)
    found = {}
    for name, recipe in (("bf16", "none"), ("eager", "rowwise"), ("compiled", "rowwise")):
        block = block_of(recipe)
        if name == "compiled":
            block.compute = torch.compile(block.compute, fullgraph=True, **COMPILE)
        y = block(x, *context)[0] - x
        found[name] = [y, *torch.autograd.grad(y.float().square().sum(), [x, block.attention.qkv.weight])]
    for bf16, eager, compiled in zip(*found.values(), strict=True):
        size, apart = bf16.float().norm(), [(t - bf16).float().norm() for t in (eager, compiled)]
        assert max(apart) <= 0.1 * size
        assert apart[1] <= 1.1 * apart[0]
        assert (compiled - eager).float().norm() <= 0.08 * size
    assert not torch.equal(found["eager"][0], found["bf16"][0])
