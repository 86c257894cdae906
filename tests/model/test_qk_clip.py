"""QK-Clip: a head's largest logit above the limit becomes the limit, in every kind of attention and layout.

next: tests/lib/layouts.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import layouts
import pytest
import torch
from tiers import slow_but

from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.run import ParallelConfig
from tmoe.model.attention import Attention
from tmoe.model.attention_backend import dense_mask, document_mask, make_mask, window_mask
from tmoe.model.freeze import require_matches
from tmoe.model.latent import LatentAttention
from tmoe.model.qk_clip import clip_logits, describe
from tmoe.ops.largest_logit import largest_logit
from tmoe.parallel.mesh import local_part

LIMIT = 0.02
PLAIN = replace(layouts.GQA, qk_norm="none", qkv_bias=True)
GPT_OSS = layouts.GPT_OSS
layouts.MODELS |= dict(plain=PLAIN)
LAYOUTS = [
    (2, dict(tp=2), "plain"),
    (4, dict(tp=2, ep=2), "latent"),
    (2, dict(cp=2), "gpt_oss"),
    (2, dict(pp=2), "plain"),
]


def clipped(
    rank: int, world: int, axes: dict[str, int], model: str, finite: float = 1.0, compile=False, **parallel
):
    """Largest logits of each layer [H] before and after a clip, and the weights after it.

    compile: the blocks, each as one graph, with the graphs of Inductor's partition run by PyTorch.
    """
    micros = 4 if axes.get("pp") else 1
    cfg = layouts.config(
        ParallelConfig(**axes, **parallel), model, micros, compile=compile, optim=dict(qk_clip=LIMIT)
    )
    layouts.partitioned()
    mesh = layouts.build_mesh(**axes)
    net = layouts.pipeline(cfg, mesh) if mesh.axes.pp > 1 else layouts.transformer(cfg, mesh, True)
    net.to_empty(device="cpu")
    net.init_weights(0)
    with torch.no_grad():  # biases begin at 0
        for name, p in net.named_parameters():
            if name.endswith("qkv.bias"):
                local_part(p).fill_(0.03)
    tokens, targets, marks = next(iter(layouts.batches(True)))
    counts = ((targets != -100).sum(), targets.numel(), layouts.SEQUENCES)
    totals = layouts.Totals(*(torch.as_tensor(float(count)) for count in counts))
    readers, reader = mesh.axes.readers, mesh.place.reader
    per = layouts.SEQUENCES // readers // micros
    rows = [slice((a * readers + reader) * per, (a * readers + reader + 1) * per) for a in range(micros)]
    parts = [(tokens[r], targets[r], marks[r]) for r in rows]
    found = []
    for _ in range(2):
        if mesh.axes.pp > 1:
            net.forward_backward(parts, totals)
        else:
            layouts.accumulate(net, parts, totals)
        for p in net.parameters():
            p.grad = None
        seen = {}
        for name, module in net.named_modules():
            if isinstance(module, Attention | LatentAttention):
                assert module.largest_H is not None
                layer = int(name.split("blocks.")[1].split(".")[0])
                seen[layer] = module.largest_H.clone()
        stage = mesh.world.get_group()
        for largest_H in seen.values():
            torch.distributed.all_reduce(largest_H, torch.distributed.ReduceOp.MAX, group=stage)
        found.append(seen)
        if len(found) == 1:
            clip_logits(net, LIMIT, torch.tensor(finite), stage)
    everyone = [None] * world
    torch.distributed.all_gather_object(everyone, (found, layouts.whole_parameters(net)))
    before, after, weights = {}, {}, {}
    for (one, two), own in everyone:
        before, after, weights = before | one, after | two, weights | own
    return before, after, weights


@pytest.fixture(scope="module")
def one_process(gloo):
    return cache(lambda model: gloo(1, clipped, {}, model)[0])


@pytest.mark.parametrize("model", slow_but(["plain", "latent"], ["plain", "latent", "latent_0"]))
def test_a_head_above_the_limit_reaches_it(one_process, model):
    """The first layer's inputs do not change with the clip; its logits become gamma times what they were."""
    before, after, _ = one_process(model)
    assert (before[0] > LIMIT).any(), before[0]
    torch.testing.assert_close(after[0], before[0].clamp(max=LIMIT), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("world", "axes", "model"), slow_but(LAYOUTS[:2], LAYOUTS))
def test_layouts_clip_alike(gloo, one_process, world, axes, model):
    want, got = one_process(model), gloo(world, clipped, axes, model)[0]
    for a, b in zip(got[:2], want[:2], strict=True):
        assert a.keys() == b.keys()
        for layer in b:
            torch.testing.assert_close(a[layer], b[layer], rtol=1e-5, atol=1e-7)
    for name, p in want[2].items():
        torch.testing.assert_close(got[2][name], p, rtol=1e-5, atol=1e-8, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "checkpoint"), [("plain", "attention"), ("latent", "block")])
def test_compiled_and_recomputed_blocks_record_the_same(gloo, one_process, model, checkpoint):
    want = one_process(model)
    found = gloo(1, partial(clipped, compile=True, checkpoint=checkpoint), {}, model)[0]
    for a, b in zip(found[:2], want[:2], strict=True):
        for layer in b:
            torch.testing.assert_close(a[layer], b[layer], rtol=1e-5, atol=1e-7)


def test_a_skipped_step_changes_no_weight(gloo):
    before, after, weights = gloo(1, clipped, {}, "plain", 0.0)[0]
    assert all(torch.equal(before[layer], after[layer]) for layer in before)
    assert weights.keys() > {"blocks.0.attention.qkv.weight"}


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("documents", [False, True])
def test_the_op_sees_the_visible_pairs_alone(window, documents):
    """Against a loop over pairs; the op passes queries and their gradient on."""
    B, S, H, G, C = 2, 7, 4, 2, 3
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(B, S, H, C, generator=draw), torch.randn(B, S, G, C, generator=draw)
    marks = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]]) if documents else None
    want = torch.zeros(H)
    for b in range(B):
        for i in range(S):
            for j in range(i + 1):
                near = not window or i - j < window
                if near and (marks is None or marks[b, i] == marks[b, j]):
                    dots = (q[b, i].view(G, -1, C) * k[b, j][:, None]).sum(-1).abs().flatten() * 0.5
                    want = torch.maximum(want, dots)
    mask = None if marks is None else document_mask(marks)
    found = torch.zeros(H + 2)
    q.requires_grad_()
    passed = largest_logit(q, k, mask, found, 1, window, 0.5)
    torch.testing.assert_close(found, torch.cat([torch.zeros(1), want, torch.zeros(1)]))
    assert torch.equal(passed, q) and passed.data_ptr() != q.data_ptr()
    passed.sum().backward()
    assert q.grad.eq(1).all()

    # a mask of blocks, as a GPU has it, shows the same pairs; a compiled block may ask for it
    blocks = make_mask(marks, window, S, torch.device("cpu"), 16, in_blocks=True)
    seen = torch.ones(1, 1, S, S, dtype=torch.bool).tril() if mask is None else mask
    seen = seen & window_mask(S, window, q.device) if window else seen
    assert torch.equal(dense_mask(blocks, S, S), seen)
    graph = torch.compile(lambda mask: dense_mask(mask, S, S), backend="eager", fullgraph=True)
    assert torch.equal(graph(blocks.mask), seen)


def test_a_normed_model_says_that_the_clip_is_off():
    cfg = parse(["tiny", "--optim.qk-clip", "100"], "")
    (line,) = describe(cfg)
    assert line.startswith("--optim.qk-clip=100 is off: --model.qk-norm=head norms queries and keys"), line
    words = ["tiny", "--optim.qk-clip", "100", "--model.qk-norm", "none"]
    assert describe(parse(words, "")) == []
    for kinds in ("linear", "linear moe"):
        linear = f"--model.linear.kind deltanet --model.layer-types {kinds}".split()
        assert describe(parse([*words, *linear], "")) == [
            "--optim.qk-clip=100 is off: no block has attention"
        ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optim.qk-clip -1", "--optim.qk-clip=-1.0: must be 0 (no limit), or positive"),
        ("--optim.qk-clip 1e-50", "positive and finite in float32"),  # 0 in float32: it would clear queries
        ("--optim.qk-clip inf", "--optim.qk-clip=inf: must be 0 (no limit), or positive and finite"),
        ("--optim.qk-clip 9 --lora.rank 4", "--optim.qk-clip=9.0: not with --lora.rank=4"),
    ],
)
def test_contradictions_are_refused(capsys, words, said):
    with pytest.raises(SystemExit):
        parse(["tiny", *words.split()], "")
    assert said in capsys.readouterr().err


def test_frozen_queries_of_another_stage_are_refused():
    """Only one stage of a pipeline has the block: without an error on all ranks, the others would wait."""
    words = "tiny --model.qk-norm none --optim.qk-clip 9".split()
    with pytest.raises(ConfigError, match=r"qk-clip=9.0: not with --optim.freeze=blocks.3.attention"):
        require_matches(parse([*words, "--optim.freeze", "blocks.3.attention"], ""))
    require_matches(parse([*words, "--optim.freeze", r"attention\.o"], ""))
