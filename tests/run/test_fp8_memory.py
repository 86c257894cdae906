"""The dry run's bytes of frozen experts in fp8, against the memory that a model holds after a forward.

next: tests/run/test_memory.py
"""

import functools
from dataclasses import replace

import layouts
import pytest
import torch
from held import MostHeld

from tmoe.config.axes import Axes
from tmoe.config.model import MoEConfig, RopeConfig
from tmoe.config.run import Config, GrpoConfig, LoraConfig, OptimConfig, ParallelConfig, TrainConfig
from tmoe.moe.fp8_choice import describe
from tmoe.moe.moe_bytes import coded_row_bytes, moe_bytes, turned_bytes
from tmoe.ops.experts import fp8_gpu, gpu
from tmoe.ops.experts.fp8_codes import encode_gpu
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.parallel import build_mesh, values_away
from tmoe.parallel.copies import working_copy
from tmoe.parallel.mesh import local_part
from tmoe.plan.block_memory import backward_bytes
from tmoe.plan.frozen_codes import describe_freed
from tmoe.plan.memory import memory_per_rank

WHAT = dict(frozen=dict(optim=OptimConfig(freeze="experts")), lora=dict(lora=LoraConfig(rank=6)))
WIDE = dict(fp8="experts", fp8_everywhere=True)


def config(what, fp8=True, **more) -> Config:
    cfg = layouts.config(ParallelConfig(**more), "wide", 1, dtype="bf16", train=WIDE if fp8 else {})
    return replace(cfg, **(WHAT[what] if isinstance(what, str) else what))


def held(rank, world, axes, what, fp8):
    """Bytes of parameters on "the GPU", and of working copies and codes, after a forward."""
    away = []
    move, values_away.moves = values_away.move_to_host, lambda local: True

    def noting(master):
        move(master)
        away.append(master)

    values_away.move_to_host = noting
    mesh = build_mesh(**axes)
    net = layouts.transformer(config(what, fp8, **axes), mesh, True)
    net.to_empty(device="cpu")
    net.init_weights(0)
    tokens = torch.randint(layouts.VOCAB, (2, layouts.SEQ))
    net(tokens, tokens)
    parameters = list(net.parameters())
    kept = {local_part(p).untyped_storage() for p in parameters if not any(p is one for one in away)}
    sizes = {storage.data_ptr(): storage.nbytes() for storage in kept}
    copies = [copy for copy in map(working_copy, parameters) if copy]
    tensors = [t for copy in copies for t in (copy.tensor, *copy.codes)]
    gathered = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values()), sum(size for at, size in gathered.items() if at not in sizes), len(away)


LAYOUTS = [("frozen", {}), ("lora", {}), ("frozen", dict(dp=2)), ("lora", dict(ep=2))]


@pytest.mark.parametrize("what, axes", LAYOUTS, ids=str)
def test_bytes_are_those_of_a_model(gloo, what, axes):
    """Within 5%; one layer's values, which are freed after its first forward, are left out.

    With several ranks FSDP2 has freed the dense weights, so bytes beyond those without fp8 are compared.
    """
    world = Axes(**axes)
    (parameters, gathered, away) = gloo(world.world, held, axes, what, True)[0]
    parts = memory_per_rank(config(what, **axes), world)
    elements = 3 * 8 * 3 * 64 * 64 // world.ep
    assert away == (0 if "dp" in axes else 6)  # two matrices in three blocks
    planned = parts["parameters"], parts["gathered"] - 2 * elements // 3
    found = parameters, gathered
    if axes:
        plain = memory_per_rank(config(what, False, **axes), world)
        planned = planned[0] - plain["parameters"], planned[1] - plain["gathered"]
        found = tuple(map(int.__sub__, found, gloo(world.world, held, axes, what, False)[0][:2]))
    for ours, theirs in zip(planned, found, strict=True):
        assert abs(ours - theirs) < 0.05 * 2 * elements, (planned, found)


def test_the_difference_to_bf16_by_hand():
    """Codes take two bytes an element, as the values did: 8 experts of 3 x 64 x 64 in three blocks."""
    elements, scales = 3 * 8 * 3 * 64 * 64, 3 * 8 * 3 * 4
    for what in WHAT:
        plain, coded = (memory_per_rank(config(what, fp8), Axes()) for fp8 in (False, True))
        assert plain["parameters"] - coded["parameters"] == 2 * elements
        assert coded["gathered"] - plain["gathered"] == 2 * elements + scales + 2 * elements // 3
        plain, coded = (memory_per_rank(config(what, fp8, dp=2), Axes(dp=2)) for fp8 in (False, True))
        assert coded["parameters"] == plain["parameters"]
        assert coded["gathered"] - plain["gathered"] == scales + 2 * elements // 3
        (line,) = describe_freed(config(what), Axes(), "cuda:90")
        assert line.endswith("their values, 0.0 GiB a rank, are in host memory")
    trained = config({})
    assert describe_freed(trained, Axes(), "cuda:90") == [] and describe(trained, Axes(), "cuda:90")


def test_rollouts_and_averages_keep_the_values():
    grpo = dict(task="grpo", grpo=GrpoConfig(rewards=("exact",), max_tokens=8))
    for what in (WHAT["lora"] | grpo, dict(optim=OptimConfig(freeze="experts", ema=0.9))):
        plain, coded = (memory_per_rank(config(what, fp8), Axes()) for fp8 in (False, True))
        assert plain["parameters"] == coded["parameters"]
        assert describe_freed(config(what), Axes(), "cuda:90") == []


@pytest.mark.parametrize("pairs", [None, 32768])
def test_codes_of_rows_are_those_that_a_backward_holds(pairs):
    """Live storages of both kinds of launches on meta tensors, to 1% of the whole.

    Codes of dH and dy, and transposed codes of dH and x next to gate_up's gradient in place of dx's rows.
    With two windows the second one holds most, and its gradients are in bf16. Codes of H, which the forward
    keeps, to the byte.
    """
    T, D, F, E, K = 8192, 2048, 768, 16, 8
    make = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    x, dy, gate_up, down = make(T, D), make(T, D), make(E, 2 * F, D), make(E, D, F)
    tensors = x, gate_up, down, make(T, K, dtype=torch.float32)
    ids, how, held, kept = make(T, K, dtype=torch.int32), ("swiglu", pairs or T * K), [], []
    with compile_only("cuda:90", lambda *launched: None):
        codes = encode_gpu(gate_up, 2), encode_gpu(down, 1)
        for ops, packed in ((gpu, ()), (fp8_gpu, codes)):
            _, h, meta = ops.forward(*tensors, ids, None, *packed, *how, True)
            kept.append(h.nbytes)
            with MostHeld(dy, *tensors, ids, h, meta, *packed) as backward:
                ops.backward(dy, *tensors, h, meta, None, *packed, *how)
            held.append(backward.bytes)
    moe = MoEConfig(experts=E, top_k=K, ffn_dim=F)
    model = replace(layouts.WIDE, dim=D, moe=moe, dense_layers=0, rope=RopeConfig(max_seq=T))
    cfg = Config(model=model, train=TrainConfig(batch=1, seq=T, **WIDE), compile=False)
    rows = pairs or T * K
    codes_of_dh, codes_of_dy, padded = rows * 2 * F, T * (D + 4), 128 * (rows // 128 + E)
    turned = padded * (2 * F + D), padded * (F + D) + 2 * rows * F
    assert 0.5 < kept[1] / kept[0] < 0.51
    if pairs is None:
        more = codes_of_dh + codes_of_dy
        assert coded_row_bytes(cfg, Axes()) == more + kept[0] - kept[1]
        assert turned_bytes(cfg, Axes()) == max(turned) - 2 * rows * D
        plain = replace(cfg, train=replace(cfg.train, fp8="none", fp8_everywhere=False))
        assert moe_bytes(plain, Axes()) - moe_bytes(cfg, Axes()) == kept[0] - kept[1]
        assert backward_bytes(cfg, Axes(), 0) - backward_bytes(plain, Axes(), 0) == (
            more + max(turned) - 2 * rows * D
        )
        frozen = [replace(one, optim=OptimConfig(freeze="experts")) for one in (cfg, plain)]
        fp8, bf16 = (backward_bytes(one, Axes(), 0) for one in frozen)
        assert fp8 - bf16 == more  # no gradients of matrices
    h_again = kept[1] - kept[0] if pairs else 0  # of a later window
    with_gradient = 0 if pairs else turned[0] + gate_up.nbytes - 2 * rows * D
    beyond = codes_of_dh + codes_of_dy + h_again + with_gradient
    assert abs(held[1] - held[0] - beyond) < 0.01 * held[0], (held, beyond)
