"""Measures which parts of a rollout give training's bits: for each piece, the share of rows that are equal.

    python -m benchmarks.bits                                     # three shapes, bf16, about 100 s
    python -m benchmarks.bits --shapes qwen3 --json benchmarks/results/bits/h200.jsonl
    python -m benchmarks.bits --device cpu --tiny                 # does it run?

Shapes are Qwen3-30B, the pilot (with Granite's multipliers) and OLMoE, with their real widths, cut to
--layers.

1. Single pieces: a few rows, as in a decode step, are compared with the same rows among --tokens rows, as in
   training. The result is the worst over several numbers of rows, followed by the share for each number.
2. The chain: packed sequences run through the model as in training, and a prefill and decode steps process
the
   same tokens. After each piece of each block, the share of equal rows is measured: the first piece below
   100% breaks everything after it. Training's blocks run eagerly, then compiled (then only whole blocks are
   observed).
3. The engine's log-probs are compared with training's for the same answers.

Lines that begin with "bits:" repeat 2 and 3 with a model that keeps its bits (tmoe.Engine(model, bits=True)),
with
128 sequences: all must be 100%.

"max diff" is the largest difference of any element. The table is printed last. A part for which --seconds
left no time is named.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from benchmarks.moe_layer import require_gpu
from benchmarks.train import write_line
from tmoe.config.model import ModelConfig
from tmoe.config.presets import presets
from tmoe.generate import Engine, Sampling
from tmoe.generate.cache import PAGE, Cache
from tmoe.generate.forward import all_turns, decode, prefill, softmax_of
from tmoe.generate.prompt_chunks import PromptPiece, aligned, chunks
from tmoe.model.attention_backend import COMPILE, attend, make_mask
from tmoe.model.rope import rotate
from tmoe.model.transformer import Transformer
from tmoe.ops import softmax_topk
from tmoe.ops.decode.attention import decode_attention
from tmoe.ops.decode.in_blocks import decode_in_blocks
from tmoe.ops.decode.sample import Keys, sample
from tmoe.ops.loss.logprob import logprobs
from tmoe.ops.norm import rms_norm
from tmoe.ops.router.product import router_product

PRESETS = {"qwen3": "qwen3-30b-a3b", "pilot": "moe-pilot-14b", "olmoe": "olmoe-1b-7b"}
GRANITE = dict(
    embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0078125, logits_scaling=4.0
)
ROWS = (1, 2, 7, 16, 64, 128, 256, 512)


class Found(NamedTuple):
    """The share of rows whose bits are equal, and the largest difference."""

    share: float
    difference: float


class Piece(NamedTuple):
    """Training's function over all rows, and the rollout's over a few of them, with the same inputs."""

    training: Callable[..., Tensor]
    rollout: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]  # the first dimension counts rows


def compare(ours: Tensor, theirs: Tensor, rows: int = 1) -> Found:
    """Compares two tensors whose first `rows` dimensions count rows."""
    a, b = (t.detach().flatten(0, rows - 1).flatten(1) for t in (ours, theirs))
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    equal = (a == b) | (a.isnan() & b.isnan())
    difference = (a.float() - b.float()).abs().nan_to_num(0.0, float("inf")).max().item()
    return Found(equal.all(1).float().mean().item(), difference)


def blocks_of(model: Transformer) -> list[Any]:
    return list(model.blocks)


class Ledger:
    """Collects the results, and limits the time."""

    def __init__(self, seconds: float, about: dict[str, Any], json: Path | None):
        self.end = time.monotonic() + seconds
        self.about, self.json = about, json
        self.lines: list[str] = []
        self.missing: list[str] = []

    def put(self, shape: str, piece: str, found: Found, note: str = "") -> None:
        share, difference = found
        self.lines.append(f"| {shape} | {piece} | {share:.1%} | {difference:.2g} | {note} |")
        print(self.lines[-1], flush=True)
        if self.json:
            result = dict(shape=shape, piece=piece, share=share, difference=difference, note=note)
            write_line(self.json, result | self.about)

    def run(self, shape: str, piece: str, measure: Callable[[], None]) -> None:
        """Calls `measure`, unless the time is over; an error is recorded as a line."""
        if time.monotonic() > self.end:
            self.missing.append(f"{shape}, {piece}: no time left")
            return
        try:
            measure()
        except Exception as error:  # a failing piece must not prevent all other pieces
            self.missing.append(
                f"{shape}, {piece}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            )
            print(self.missing[-1], flush=True)


# ---- single pieces ----


def over_rows(piece: Piece, counts: Sequence[int]) -> tuple[Found, str]:
    """The worst result over these numbers of rows, and the share for each number."""
    whole = piece.training(*piece.inputs)
    T = len(piece.inputs[0])
    shares, difference = {}, 0.0
    for n in counts:
        rows = torch.randperm(T, device=whole.device)[:n]
        result = compare(piece.rollout(*(t[rows] for t in piece.inputs)), whole[rows])
        shares[n] = result.share
        difference = max(difference, result.difference)
    note = "all" if min(shares.values()) == 1 else " ".join(f"{n}:{share:.0%}" for n, share in shares.items())
    return Found(min(shares.values()), difference), note


@contextmanager
def reduced_precision(*settings: bool) -> Iterator[None]:
    """Whether cuBLAS may round partial sums to bf16, and (torch >= 2.10) split the inner dimension."""
    backend = torch.backends.cuda.matmul
    before = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    backend.allow_bf16_reduced_precision_reduction = settings if len(settings) > 1 else settings[0]
    try:
        yield
    finally:
        backend.allow_bf16_reduced_precision_reduction = before


def under(settings: tuple[bool, ...], run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*inputs: Tensor) -> Tensor:
        with reduced_precision(*settings):
            return run(*inputs)

    return call


def at_least(rows: int, run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`run` over at least `rows` rows, with rows of zeros appended if there are fewer."""

    def call(x: Tensor) -> Tensor:
        n = len(x)
        return run(x if n >= rows else torch.cat([x, x.new_zeros(rows - n, *x.shape[1:])]))[:n]

    return call


def products(model: Transformer, name: str, linear: nn.Module, x: Tensor, gpu: bool) -> dict[str, Piece]:
    """A product without changes, and with the settings that could make few rows equal to many."""
    run: Callable[..., Tensor] = linear
    by_title = {f"{name} product": Piece(run, run, (x,))}
    if gpu:
        by_title[f"{name} product, no reduced precision"] = Piece(run, under((False,), run), (x,))
        without = under((False, False), run)
        by_title[f"{name} product, no split-K"] = Piece(without, without, (x,))
        by_title[f"{name} product, no split-K, 2 rows at least"] = Piece(without, at_least(2, without), (x,))
        by_title[f"{name} product, 128 rows at least"] = Piece(run, at_least(128, run), (x,))
    return by_title


def pieces(
    model: Transformer, T: int, compiled: Callable[[Callable], Callable], gpu: bool
) -> dict[str, Piece]:
    """The pieces of the first block, and the head."""
    cfg, block = model.cfg, blocks_of(model)[0]
    attention, moe, weight = block.attention, block.moe, model.head_weight
    D, H, C = cfg.dim, cfg.heads, cfg.head_dim

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=weight.device).to(weight.dtype)

    x, y, q, heads = randn(T, D), randn(T, D), randn(T, H * C), randn(T, H, C)
    ids = torch.randint(cfg.vocab, (T,), device=weight.device)
    turns = all_turns(cfg, T, weight.device)[block.rope]
    norm, branch = block.attention_norm, lambda x, y: x + block.branch(y)

    def own_norm(norm: nn.RMSNorm) -> Callable[[Tensor], Tensor]:
        return lambda x: rms_norm(x, norm.weight, cfg.norm_eps)

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x[:, None], cos[:, None], sin[:, None], cfg.rope.interleave)[:, 0]

    rope = (heads, *turns)
    by_title = {
        "embedding": Piece(model.embed, model.embed, (ids[:, None],)),
        "norm": Piece(norm, norm, (x,)),
        "norm, compiled beside eager": Piece(compiled(norm), norm, (x,)),  # prose: beside
        "norm, rms_norm": Piece(own_norm(norm), own_norm(norm), (x,)),
        "rope": Piece(turn, turn, rope),
        "rope, compiled beside eager": Piece(compiled(turn), turn, rope),
        "residual": Piece(branch, branch, (x, y)),
        "residual, compiled beside eager": Piece(compiled(branch), branch, (x, y)),
        **products(model, "qkv", attention.qkv, x, gpu),
        **products(model, "o", attention.o, q, gpu),
    }
    if cfg.qk_norm != "none":
        q_norm, q_input = attention.q_norm, heads if cfg.qk_norm == "head" else q
        by_title |= {
            "q norm": Piece(q_norm, q_norm, (q_input,)),
            "q norm, compiled beside eager": Piece(compiled(q_norm), q_norm, (q_input,)),
            "q norm, rms_norm": Piece(own_norm(q_norm), own_norm(q_norm), (q_input,)),
        }
    if moe is not None:
        router, K = moe.router, cfg.moe.top_k
        over_chosen = cfg.moe.renormalize or cfg.moe.softmax == "after"
        product = partial(router_product, weight_ED=router.weight)
        logits = F.linear(x.float(), router.weight.float())
        chosen = lambda logits: softmax_topk(logits, K, over_chosen)  # noqa: E731
        mixed = lambda x: moe.experts.forward(moe.mix, x, None)[0]  # noqa: E731
        by_title |= {
            "softmax_topk, weights": Piece(lambda t: chosen(t)[0], lambda t: chosen(t)[0], (logits,)),
            "softmax_topk, ids": Piece(lambda t: chosen(t)[1], lambda t: chosen(t)[1], (logits,)),
            "router and experts": Piece(mixed, mixed, (x,)),
        }
        if x.dtype == torch.bfloat16:
            wide = randn(T, 2 * D)
            wide_weight = randn(cfg.moe.experts, 2 * D)
            doubled = partial(router_product, weight_ED=wide_weight)
            by_title["router product"] = Piece(product, product, (x,))
            by_title[f"router product, D={2 * D}"] = Piece(doubled, doubled, (wide,))
        if moe.shared is not None:
            by_title["shared experts"] = Piece(moe.shared, moe.shared, (x,))
            by_title["shared experts, compiled beside eager"] = Piece(compiled(moe.shared), moe.shared, (x,))
    head = lambda h: F.linear(model.scaled(h), weight)  # noqa: E731
    return by_title | {"head": Piece(head, head, (x,))}


def log_probs(model: Transformer, T: int, counts: Sequence[int]) -> tuple[Found, str]:
    """Compares the sampler's log-probs of a few rows with the loss's log-probs of all rows."""
    weight = model.head_weight
    x = torch.randn(T, model.cfg.dim, device=weight.device).to(weight.dtype)
    h = model.scaled(x)
    shares, difference = {}, 0.0
    for n in counts:
        rows = torch.randperm(T, device=weight.device)[:n]
        number = torch.arange(n, device=weight.device)
        drawn = sample(F.linear(h[rows], weight), Keys(0, number, number, number), Sampling(temperature=0.8))
        targets = torch.full((T,), -100, device=weight.device)
        targets[rows] = drawn.tokens_B.long()
        result = compare(drawn.logprobs_B[:, None], logprobs(h, weight, targets, 0.8)[rows][:, None])
        shares[n] = result.share
        difference = max(difference, result.difference)
    note = "all" if min(shares.values()) == 1 else " ".join(f"{n}:{share:.0%}" for n, share in shares.items())
    return Found(min(shares.values()), difference), note


def decoding_kernels() -> dict[str, Callable[..., Tensor]]:
    """The kernels for attention over pages."""
    return {"decode_attention": decode_attention, "decode_in_blocks": decode_in_blocks}


def attentions(model: Transformer, B: int, S: int) -> Iterator[tuple[str, Found, str]]:
    """Compares one query over pages with training's attention: flex over packed documents, or torch's own."""
    cfg, block = model.cfg, blocks_of(model)[0]
    device, dtype = model.head_weight.device, model.head_weight.dtype
    H, G, C, A = cfg.heads, cfg.kv_heads, cfg.head_dim, aligned(S, True)
    q, k, v = (torch.randn(B, A, heads, C, device=device).to(dtype) for heads in (H, G, G))
    scale, _ = softmax_of(block.attention)
    documents = torch.arange(B, device=device).repeat_interleave(A)[None]
    mask = make_mask(documents, 0, B * A, device, C)
    q_row, k_row, v_row = (t.flatten(0, 1)[None] for t in (q, k, v))
    packed = attend(q_row, k_row, v_row, mask, scale)
    trained = {
        "flex, packed": packed[0].unflatten(0, (B, A)),
        "no documents": attend(q, k, v, None, scale),
    }
    M = A // PAGE
    table = torch.randperm(B * M, device=device).view(B, M).int()
    pages_k, pages_v = (torch.empty(B * M, PAGE, G, C, device=device, dtype=dtype) for _ in range(2))
    for pages, t in ((pages_k, k), (pages_v, v)):
        pages[table.flatten().long()] = t.view(B * M, PAGE, G, C)
    at = sorted({t for t in (0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 255, 256, 300, S - 1) if t < S})
    for name, kernel in decoding_kernels().items():
        for other, whole in trained.items():
            shares, difference = {}, 0.0
            for t in at:
                lengths = torch.full((B,), t + 1, device=device, dtype=torch.int32)
                rows = q[:, t].contiguous()
                result = compare(kernel(rows, pages_k, pages_v, table, lengths, scale=scale), whole[:, t])
                shares[t] = result.share
                difference = max(difference, result.difference)
            note = " ".join(f"@{t}:{share:.0%}" for t, share in shares.items())
            yield f"{name} beside {other}", Found(min(shares.values()), difference), note


# ---- the chain ----


class Watch:
    """Records the outputs of the blocks' modules in the order of their calls; by hooks, so only if eager."""

    def __init__(self, model: Transformer):
        self.seen: dict[str, list[Tensor]] = defaultdict(list)
        self.hooks = []
        for i, block in enumerate(blocks_of(model)):
            self.output(f"{i} attention norm", block.attention_norm)
            self.output(f"{i} qkv", block.attention.qkv)
            if hasattr(block.attention, "q_norm"):
                self.output(f"{i} q norm", block.attention.q_norm)
                self.output(f"{i} k norm", block.attention.k_norm)
            self.input(f"{i} attention", block.attention.o)
            self.output(f"{i} o", block.attention.o)
            self.input(f"{i} residual", block.ffn_norm)
            self.output(f"{i} ffn norm", block.ffn_norm)
            if block.moe is not None:
                self.output(f"{i} router's weights", block.moe.router)
                if block.moe.shared is not None:
                    self.output(f"{i} shared experts", block.moe.shared)
            self.input(f"{i} router and experts", block.ffn_post_norm)

    def put(self, name: str, value: Any) -> None:
        t = value.weights_TK if hasattr(value, "weights_TK") else value
        # [rows, channels], for rows of shape [B, 1], [1, T] or [T]
        self.seen[name].append(t.detach().reshape(-1, *t.shape[2 if t.dim() > 2 else 1 :]))

    def output(self, name: str, module: nn.Module) -> None:
        self.hooks.append(module.register_forward_hook(lambda _m, _in, out: self.put(name, out)))

    def input(self, name: str, module: nn.Module) -> None:
        self.hooks.append(module.register_forward_pre_hook(lambda _m, inputs: self.put(name, inputs[0])))

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


class Sequences(NamedTuple):
    """B sequences of S tokens with a given prompt; when packed, each begins at a block of flex attention."""

    tokens_BS: Tensor
    prompt: int

    def packed(self, t_BS: Tensor) -> Tensor:
        """The packed row, [1, B * A]."""
        S = t_BS.shape[1]
        return F.pad(t_BS, (0, aligned(S, True) - S)).flatten()[None]

    def of_packed(self, t_TX: Tensor) -> Tensor:
        """The part after the prompts, [B, steps, ...], of a packed tensor."""
        B, S = self.tokens_BS.shape
        return t_TX.unflatten(0, (B, -1))[:, self.prompt : S]


def trained(model: Transformer, given: Sequences) -> Tensor:
    """Training's final hidden states [T, D] of the packed row."""
    B, S = given.tokens_BS.shape
    A, device = aligned(S, True), given.tokens_BS.device
    documents = torch.arange(B, device=device).repeat_interleave(A)[None]
    positions = torch.arange(A, device=device).repeat(B)[None]
    tokens = given.packed(given.tokens_BS)
    h, _ = model.hidden(tokens, documents_BS=documents, positions_BS=positions)
    return h[0]


def rolled_out(model: Transformer, given: Sequences) -> Tensor:
    """The rollout's logits [B, steps, V]; each step gets the next token of the sequences."""
    B, S = given.tokens_BS.shape
    device = given.tokens_BS.device
    M = aligned(S, True) // PAGE
    cache = Cache(model.cfg, B * M, device, model.head_weight.dtype)
    turns = all_turns(model.cfg, M * PAGE, device)
    pages = [list(range(b * M, (b + 1) * M)) for b in range(B)]
    ids = given.tokens_BS[:, : given.prompt].tolist()
    prompts = [PromptPiece(one, own, 0) for one, own in zip(ids, pages, strict=True)]
    for chunk in chunks(prompts, 8192, device, blocks=device.type == "cuda"):
        prefill(model, cache, chunk, turns, 0, False)
    table = torch.tensor(pages, dtype=torch.int32, device=device)
    steps = []
    for at in range(given.prompt, S):
        at_B = torch.full((B,), at, device=device)
        steps.append(decode(model, cache, given.tokens_BS[:, at], at_B, table, turns, 0)[0])
    return torch.stack(steps, 1)


def chain(model: Transformer, given: Sequences) -> Iterator[tuple[str, Found, str]]:
    """Compares each piece of each block in eager training with the rollout's."""
    watch = Watch(model)
    h = trained(model, given)
    ours = {name: given.of_packed(values[0]) for name, values in watch.seen.items()}
    watch.seen.clear()
    with torch.no_grad():
        logits = rolled_out(model, given)
    steps = logits.shape[1]
    watch.close()
    for name, values in watch.seen.items():
        yield name, compare(torch.stack(values[-steps:], 1), ours[name], 2), ""
    yield "logits", compare(logits, F.linear(model.scaled(given.of_packed(h)), model.head_weight), 2), ""


def engine(model: Transformer, given: Sequences) -> tuple[Found, str]:
    """Compares the engine's log-probs with training's, token by token."""
    sampling = Sampling(temperature=0.8, max_tokens=given.tokens_BS.shape[1] - given.prompt)
    prompts = given.tokens_BS[:, : given.prompt].tolist()
    answers = [samples[0] for samples in Engine(model, slots=len(prompts)).generate(prompts, 1, sampling)]
    device = given.tokens_BS.device
    ids = torch.stack([answer.ids for answer in answers]).to(device)
    whole = given._replace(tokens_BS=torch.cat([given.tokens_BS[:, : given.prompt], ids], 1)[:, :-1])
    h = trained(model, whole).unflatten(0, (len(prompts), -1))[:, given.prompt - 1 :][:, : ids.shape[1]]
    h = model.scaled(h.detach()).flatten(0, 1)
    want = logprobs(h, model.head_weight.detach(), ids.flatten(), sampling.temperature)
    got = torch.stack([answer.logprobs for answer in answers]).to(device)
    return compare(got.flatten()[:, None], want[:, None]), "share of tokens"


def compile_blocks(model: Transformer) -> None:
    """Compiles the blocks as in training."""
    for block in blocks_of(model):
        block.compute = torch.compile(block.compute, fullgraph=True, **COMPILE)


def in_compiled_blocks(model: Transformer, given: Sequences) -> Iterator[tuple[str, Found, str]]:
    """Compares compiled blocks with eager ones, and the whole compiled model with its rollout."""
    blocks: dict[str, list[Tensor]] = {"eager": [], "compiled": []}
    h, hooks = {}, []
    for mode in ("eager", "compiled"):
        if mode == "compiled":
            compile_blocks(model)
        keep = blocks[mode]
        hooks = [
            b.register_forward_hook(lambda _m, _in, out, keep=keep: keep.append(out[0])) for b in model.blocks
        ]
        h[mode] = trained(model, given)
        for hook in hooks:
            hook.remove()
    for i, (a, b) in enumerate(zip(*blocks.values(), strict=True)):
        yield f"{i} block, compiled beside eager", compare(a[0], b[0]), ""
    with torch.no_grad():
        logits = rolled_out(model, given)
    want = F.linear(model.scaled(given.of_packed(h["compiled"])), model.head_weight)
    yield "logits, compiled", compare(logits, want, 2), ""


# ---- the whole ----


def shape_of(name: str, layers: int, tiny: bool) -> ModelConfig:
    """A preset cut to some layers; the pilot gets Granite's multipliers."""
    cfg = replace(presets()[PRESETS[name]].model, layers=layers)
    if name == "pilot":
        cfg = replace(cfg, **GRANITE)
    if tiny:
        moe = replace(cfg.moe, experts=8, ffn_dim=16, shared_dim=16 if cfg.moe.shared_dim else 0)
        kv_heads = 2 if cfg.kv_heads < cfg.heads else 4
        cfg = replace(cfg, vocab=64, dim=32, heads=4, kv_heads=kv_heads, head_dim=16, moe=moe)
    return cfg


def build(cfg: ModelConfig, device: str) -> Transformer:
    """A model whose norms are random too, in training mode and bf16."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(cfg)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    return model.to(torch.bfloat16)


def measure(name: str, args: argparse.Namespace, ledger: Ledger) -> None:
    gpu = args.device == "cuda"
    model = build(shape_of(name, args.layers, args.tiny), args.device)
    T = 64 if args.tiny else args.tokens
    counts = [n for n in ROWS if n <= T // 2]
    compiled = partial(torch.compile, **COMPILE) if gpu and args.compile else lambda f: f
    B, S, prompt = (3, 20, 7) if args.tiny else (T // 256, 140, 120)
    given = Sequences(torch.randint(model.cfg.vocab, (B, S), device=args.device), prompt)

    def all_of(rows: Iterator[tuple[str, Found, str]]) -> None:
        for piece, result, note in rows:
            ledger.put(name, piece, result, note)

    def one(piece: str, result: tuple[Found, str]) -> None:
        ledger.put(name, piece, *result)

    with torch.no_grad():
        for title, piece in pieces(model, T, compiled, gpu).items():
            ledger.run(name, title, lambda t=title, p=piece: one(t, over_rows(p, counts)))
        ledger.run(name, "log-probs", lambda: one("log-probs", log_probs(model, T, counts)))
        sizes = (2, 20) if args.tiny else (T // 512, 512)
        ledger.run(name, "attention", lambda: all_of(attentions(model, *sizes)))
    ledger.run(name, "chain", lambda: all_of(chain(model, given)))
    ledger.run(name, "engine", lambda: one("engine's log-probs, training eager", engine(model, given)))
    model.keep_bits()
    longer = given._replace(
        tokens_BS=torch.randint(model.cfg.vocab, (B if args.tiny else 128, S)).to(args.device)
    )
    ledger.run(name, "bits: chain", lambda: all_of((f"bits: {a}", b, c) for a, b, c in chain(model, longer)))
    ledger.run(name, "bits: engine", lambda: one("bits: engine's log-probs", engine(model, longer)))
    model.keep_bits(False)
    if not args.compile:
        return
    ledger.run(name, "compiled blocks", lambda: all_of(in_compiled_blocks(model, given)))
    ledger.run(name, "engine, compiled", lambda: one("engine's log-probs, compiled", engine(model, given)))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--tiny", action="store_true", help="widths of 16 and 32, 64 tokens")
    p.add_argument("--shapes", nargs="+", choices=PRESETS, default=list(PRESETS))
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--tokens", type=int, default=8192, help="number of rows in training")
    p.add_argument("--seconds", type=float, default=115, help="seconds after which no part begins")
    p.add_argument("--no-compile", dest="compile", action="store_false", help="only eager training")
    p.add_argument("--json", type=Path, help="append each line to this file, as JSON")
    args = p.parse_args()
    gpu = args.device == "cuda"
    if gpu:
        require_gpu(p)
    about: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": str(date.today()),
        "command": " ".join(["python -m benchmarks.bits", *sys.argv[1:]]),
    }
    print(about)
    ledger = Ledger(args.seconds, about, args.json)
    start = time.monotonic()
    for name in args.shapes:
        ledger.run(name, "the shape", lambda name=name: measure(name, args, ledger))
        torch._dynamo.reset()
        print(f"{name}: {time.monotonic() - start:.0f} s so far", flush=True)
    print("\n| shape | piece | rows equal | max diff | by rows or by position |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(ledger.lines))
    print("\n".join(ledger.missing))


if __name__ == "__main__":
    main()
