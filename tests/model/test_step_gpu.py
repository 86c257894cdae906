"""What of a step runs on a GPU only: AdamW, offloaded moments, the fused loss, attention in blocks.

AdamW takes one pass, and nothing waits for the host.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from tmoe.config.run import Config, OptimConfig, ParallelConfig, TrainConfig
from tmoe.model.attention import Attention
from tmoe.model.attention_backend import COMPILE, attend, document_mask, make_mask, on_hopper, unequal
from tmoe.model.latent import LatentAttention
from tmoe.model.loss import cross_entropy_sum
from tmoe.model.rope import rope_table
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Totals
from tmoe.ops.adamw_op import adamw_
from tmoe.optim import adamw as optim
from tmoe.optim.adamw import build_optimizer, init_state
from tmoe.parallel import build_mesh, clip_grad_norm_, parallelize
from train import all_finite

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _alone():
    """No test meets the graphs of tests that this worker ran before.

    dynamo counts them all towards its limit.
    """
    torch._dynamo.reset()
    yield
    torch.cuda.set_sync_debug_mode("default")


CUDA = torch.device("cuda", 0)
CFG = OptimConfig(lr=1e-2, eps=1e-4)


def far(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


# ---- optimizer ----


def optimise(seed: int, grad_dtype, skip: int | None = None, cfg: OptimConfig = CFG, portable: bool = False):
    draw = torch.Generator().manual_seed(seed)
    shapes = [(1000, 33), (7,), (0, 4), (129, 64, 3)]
    params = {
        str(i): torch.nn.Parameter(torch.randn(s, generator=draw).to(CUDA)) for i, s in enumerate(shapes)
    }
    optimizer = build_optimizer(params.items(), cfg, CUDA)
    if portable:  # step makes what is missing
        init_state(optimizer)
    for step in range(4):
        for p in params.values():
            grad = torch.randn(p.shape, generator=draw).to(CUDA, grad_dtype)
            p.grad = grad.float() if portable else grad
        norm = clip_grad_norm_(params.values(), torch.inf)
        loss = torch.full((), torch.nan if step == skip else 1.0, device=CUDA)
        optimizer.decide(all_finite(loss, norm), norm, 0.7)
        if portable:
            if step != skip:
                torch._foreach_mul_([p.grad for p in params.values()], optimizer.factor)
                torch.optim.AdamW.step(optimizer)
        else:
            optimizer.step()
    state = {f"{n}.{k}": v for n, p in params.items() for k, v in optimizer.state[p].items()}
    return {n: p.detach() for n, p in params.items()} | state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skip", [None, 2])
def test_one_pass_adamw_is_torchs(dtype, skip):
    want, got = optimise(0, dtype, skip, portable=True), optimise(0, dtype, skip)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=2e-6, atol=1e-7, msg=name)
    assert got["0.step"] == (4 if skip is None else 3)


def test_offloaded_moments_change_no_bit(monkeypatch):
    monkeypatch.setattr(optim, "PIECE", 1024)
    want, got = optimise(1, torch.bfloat16), optimise(1, torch.bfloat16, cfg=replace(CFG, offload=True))
    torch.cuda.synchronize()
    for name in want:
        assert torch.equal(got[name].to(CUDA), want[name]), name
    assert got["0.exp_avg"].is_pinned() and want["0.exp_avg"].is_cuda


@pytest.mark.parametrize("offset", [1, 2, 8])
def test_one_pass_adamw_takes_any_alignment(offset):
    """A tensor off 16 bytes gives what an aligned copy gives, and nothing is written beside it."""
    one = torch.ones((), device=CUDA)
    hyper = (1e-2, (0.9, 0.95), 1e-8, 0.1)
    whole = [torch.rand(5000, device=CUDA).to(t) for t in (*[torch.float32] * 4, torch.bfloat16)]
    for shifted in (range(5), (1,), (4,), (0, 2)):
        aligned = [t[offset:-7].clone() for t in whole]
        beside = [t.clone() for t in whole]
        adamw_([(*aligned, one)], one, one, *hyper)
        tensors = [t[offset:-7] if i in shifted else t[offset:-7].clone() for i, t in enumerate(beside)]
        adamw_([(*tensors, one)], one, one, *hyper)
        for i, (got, want) in enumerate(zip(tensors, aligned, strict=True)):
            torch.testing.assert_close(got, want, rtol=1e-6 if i < 4 else 2**-7, atol=1e-7)
        for i in shifted:
            assert torch.equal(beside[i][:offset], whole[i][:offset]) and torch.equal(
                beside[i][-7:], whole[i][-7:]
            )


def test_adamw_is_in_no_graph():
    """Its table of addresses would be that of the captured step for ever."""
    tensors = [torch.zeros(64, device=CUDA) for _ in range(4)]
    one = torch.ones((), device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(graph):
        adamw_([(*tensors, None, one)], one, one, 1e-2, (0.9, 0.95), 1e-8, 0.1)


# ---- loss ----


@pytest.mark.parametrize(
    ("T", "D", "V"), [(300, 64, 512), (257, 128, 50304), (33, 64, 1001), (1, 64, 7), (0, 64, 32)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_loss(T, D, V, dtype, monkeypatch):
    monkeypatch.setattr("tmoe.model.loss.CHUNK_LOGITS_GPU", 128 * V)
    h = torch.randn(T, D, device=CUDA, dtype=dtype, requires_grad=True)
    w = (torch.randn(V, D, device=CUDA) / D**0.5).to(dtype).requires_grad_()
    targets = torch.randint(V, (T,), device=CUDA)
    targets[::5] = -100
    loss = cross_entropy_sum(h, w, targets)
    grads = torch.autograd.grad(0.37 * loss, (h, w))
    h64 = h.detach().double().requires_grad_()
    w64 = w.detach().double().requires_grad_()
    want = F.cross_entropy(h64 @ w64.T, targets, reduction="sum")
    wants = torch.autograd.grad(0.37 * want, (h64, w64))
    limit = 1e-5 if dtype == torch.float32 else 6e-3
    assert far(loss, want) < min(limit, 1e-3)
    assert all(far(a, b) < limit for a, b in zip(grads, wants, strict=True))
    assert [g.dtype for g in grads] == [dtype, dtype]


@pytest.mark.parametrize(("dtype", "top_k", "limit"), [(torch.float32, 2, 1e-4), (torch.bfloat16, 8, 0.03)])
def test_a_whole_model_with_targets_compiles_to_one_graph(dtype, top_k, limit):
    """In bf16, with every expert chosen.

    With two of eight, a rounded logit moves a token to another expert. The gradients of experts and routers
    then lie 0.13 from those in fp32, without any compiler.
    """
    moe = MoEConfig(experts=8, top_k=top_k, ffn_dim=128)
    cfg = ModelConfig(layers=2, dim=128, heads=2, kv_heads=1, vocab=512, moe=moe)
    model = Transformer(cfg)
    model.init_weights(0)
    model.to(CUDA, dtype)
    tokens = torch.randint(512, (2, 129), device=CUDA)
    runs = []
    for run in (model, torch.compile(model, fullgraph=True, **COMPILE)):
        loss = run(tokens[:, :-1], tokens[:, 1:])
        runs.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(far(b, a) < limit for a, b in zip(*runs, strict=True))


# ---- attention ----


@pytest.mark.parametrize(
    ("S", "H", "G", "C"),
    [(256, 4, 2, 64), (300, 6, 2, 40), (129, 2, 2, 8), (1024, 8, 1, 128), (40, 4, 1, 16)],
)
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_in_blocks_is_the_masks(S, H, G, C, window, sinks):
    """Many short documents, some ids that come again, padding (-1).

    The same numbers as the dense mask, forward and backward.
    """
    draw = torch.Generator().manual_seed(S)
    ids = torch.randint(4, (2, S // 16 + 1), generator=draw).repeat_interleave(16, 1)[:, :S]
    ids[1, S // 2 : S // 2 + 9] = -1
    ids = ids.to(CUDA)
    q, k, v = (torch.randn(2, S, n, C, generator=draw).to(CUDA).requires_grad_() for n in (H, G, G))
    sink = torch.randn(H, generator=draw).to(CUDA).requires_grad_() if sinks else None
    inputs = [t for t in (q, k, v, sink) if t is not None]
    c = torch.randn(2, S, H, C, generator=draw).to(CUDA)
    want = attend(q, k, v, document_mask(ids), None, window, sink)
    wants = torch.autograd.grad((want * c).sum(), inputs)
    got = attend(q, k, v, make_mask(ids, window, S, CUDA, C), None, window, sink)
    gots = torch.autograd.grad((got * c).sum(), inputs)
    assert far(got, want) < 2e-5
    assert all(far(a, b) < 2e-5 for a, b in zip(gots, wants, strict=True))


@pytest.mark.parametrize(
    ("window", "lengths"), [(300, [1024]), (0, [700, 324]), (0, [450, 62, 1, 255, 256]), (500, [130, 894])]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_every_block_is_read_in_the_backward(window, lengths, sinks):
    """Eight blocks a side, and rows of blocks that do not begin at their diagonal.

    So the order by queries and the order by keys are different.
    """
    S = 1024
    draw = torch.Generator().manual_seed(1)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, S).to(CUDA)
    q, k, v = (torch.randn(2, S, n, 64, generator=draw).to(CUDA).requires_grad_() for n in (4, 2, 2))
    sink = torch.randn(4, generator=draw).to(CUDA).requires_grad_() if sinks else None
    inputs = [t for t in (q, k, v, sink) if t is not None]
    c = torch.randn(2, S, 4, 64, generator=draw).to(CUDA)
    runs = []
    for mask in (document_mask(ids), make_mask(ids, window, S, CUDA, 64)):
        y = attend(q, k, v, mask, None, window, sink)
        runs.append([y, *torch.autograd.grad((y * c).sum(), inputs)])
    assert all(far(b, a) < 2e-5 for a, b in zip(*runs, strict=True))


MIMO = dict(window_kv_heads=4, window_sinks=True, value_multiplier=0.7)


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("S", "window", "settings"),
    [
        (127, 0, dict(heads=2, kv_heads=2, head_dim=8, qk_norm="full", o_bias=True)),
        (100, 30, dict(heads=8, kv_heads=1, head_dim=16, qk_norm="head", sinks=True)),
        (100, 0, dict(heads=4, kv_heads=1, head_dim=16, sinks=True)),
        (100, 30, dict(heads=8, kv_heads=2, head_dim=24, v_head_dim=16) | MIMO),
        (300, 128, dict(heads=16, kv_heads=4, head_dim=192, v_head_dim=128) | MIMO),
        (300, 0, dict(heads=16, kv_heads=4, head_dim=192, v_head_dim=128) | MIMO),
        (100, 30, dict(heads=4, kv_heads=2, head_dim=16, v_head_dim=32) | MIMO),
        (300, 0, dict(heads=2, kv_heads=1, head_dim=160)),
        (130, 0, dict(heads=2, kv_heads=2, attention="mla", mla=MLAConfig(0, 32, 128, 16, 128))),
        (127, 0, dict(heads=2, kv_heads=2, attention="mla", mla=MLAConfig(24, 32, 16, 8, 8))),
        (384, 0, dict(heads=2, kv_heads=2, attention="mla", mla=MLAConfig(0, 32, 128, 64, 128))),
    ],
)
def test_compiled_attention_is_the_dense_masks(S, window, settings, dtype, documents):
    """A whole module, with norms and rotation in its graph: short, narrow, wide, latent.

    Freed memory is filled before, so that none is zero.
    """
    cfg = ModelConfig(dim=64, **settings)
    module = (LatentAttention(cfg) if cfg.attention == "mla" else Attention(cfg, window)).to(CUDA, dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3 if p.dim() == 1 else 0.12)
    x, dy = (torch.randn(8, S, 64, device=CUDA, dtype=dtype) for _ in range(2))
    inputs = [x.requires_grad_(), *module.parameters()]
    ids = (torch.rand(8, S, device=CUDA) < 0.04).cumsum(1)
    tables = rope_table(cfg.rope, cfg.rotary_dim, S, CUDA)
    want = module(x, *tables, document_mask(ids if documents else torch.zeros_like(ids)))
    wants = torch.autograd.grad(want, inputs, dy)
    compiled = torch.compile(module, fullgraph=True, **COMPILE)
    mask = make_mask(
        ids if documents else None,
        window,
        S,
        CUDA,
        8 if 8 in (cfg.head_dim, cfg.mla.v_dim) else 16,
        cfg.sinks_in(window),
    )
    limit = 1e-4 if dtype == torch.float32 else 0.06
    for _ in range(2):
        held = [torch.full((1 << n,), 1e4, device=CUDA) for n in (8, 10, 12, 16, 20) for _ in range(4)]
        del held
        got = compiled(x, *tables, mask)
        gots = torch.autograd.grad(got, inputs, dy)
        assert far(got, want) < limit
        assert all(far(a, b) < limit for a, b in zip(gots, wants, strict=True))


def test_an_h200_takes_latent_attentions_widths_as_they_are():
    if not on_hopper():
        pytest.skip("another GPU")
    assert unequal(192, 128, torch.bfloat16) and not unequal(192, 128, torch.float32)


# ---- the whole step ----

SEQ = 256
MODEL = ModelConfig(
    vocab=512,
    dim=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    qk_norm="head",
    rope=RopeConfig(max_seq=SEQ),
    moe=MoEConfig(experts=8, top_k=2, ffn_dim=64, shared_dim=64),
)


def train(steps: int, strict: bool = False, **settings):
    """Losses, final parameters and the first step's gradients of a bf16 run on one GPU.

    With `strict`, a host sync after the third step is an error.
    """
    parallel = ParallelConfig(checkpoint=settings.pop("checkpoint", "none"))
    cfg = Config(
        model=MODEL, train=TrainConfig(seq=SEQ, **settings), parallel=parallel, optim=OptimConfig(lr=1e-3)
    )
    with torch.device("meta"):
        model = Transformer(cfg.model)
    parallelize(model, build_mesh(), cfg)
    model.to_empty(device=CUDA)
    model.init_weights(0)
    optimizer = build_optimizer(model.named_parameters(), cfg.optim, CUDA)
    init_state(optimizer)
    optimizer.keeps_fresh = True
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(16, (steps, 2, SEQ), generator=draw).to(CUDA)
    documents = (torch.arange(SEQ) // 100).expand(2, SEQ).to(CUDA)
    totals = Totals(*torch.tensor([2.0 * SEQ, 2.0 * SEQ, 2.0], device=CUDA))
    losses = []
    grads = {}
    for step in range(steps):
        torch.cuda.set_sync_debug_mode("error" if strict and step > 2 else "default")
        loss = model(tokens[step], tokens[step].roll(-1, 1), documents_BS=documents, totals=totals)
        loss.backward()
        grads = grads or {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        norm = clip_grad_norm_(model.parameters(), torch.inf)
        optimizer.decide(all_finite(loss.detach(), norm), norm, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    torch.cuda.set_sync_debug_mode("default")
    return torch.stack(losses).tolist(), {n: p.full_tensor() for n, p in model.named_parameters()}, grads


def test_no_step_waits_for_the_host():
    losses, *_ = train(8, strict=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("policy", ["moe", "attention", "block"])
def test_recomputing_gives_the_same_training(policy):
    """A recomputed graph is compiled otherwise and so rounds otherwise.

    By up to 1.9e-3 of a gradient, where bf16 itself is 6e-2 off float32. The weights after some steps are no
    measure: AdamW's first steps are as large for a gradient of 1e-9 as for one of 1.
    """
    want, _, grads = train(4)
    got, _, same = train(4, checkpoint=policy)
    assert got == pytest.approx(want, rel=1e-4)
    assert {n: far(same[n], grads[n]) for n in grads if not far(same[n], grads[n]) < 5e-3} == {}


def test_fresh_copies_are_the_weights():
    """The optimizer writes the bf16 copies; a new cast in each forward gives the same bits."""
    kept = optim.AdamW._step_in_one_pass
    want, weights, _ = train(5)
    try:
        optim.AdamW._step_in_one_pass = lambda self: (setattr(self, "keeps_fresh", False), kept(self))[1]
        got, same, _ = train(5)
    finally:
        optim.AdamW._step_in_one_pass = kept
    assert got == want and all(torch.equal(same[n], weights[n]) for n in weights)
