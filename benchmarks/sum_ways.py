"""Times forward and backward of a step by the way in which weight gradients are summed.

    python -m benchmarks.sum_ways --json results.jsonl          # one GPU, two minutes
    python -m benchmarks.sum_ways --cpu                         # does it run?

qwen3-30b-a3b with 4 layers, rows of 4096 random tokens, no optimizer. One process holds the model, and the
ways alternate, so that they are compared on the same GPU at the same temperature. Milliseconds are medians
over the rounds. GiB are the most memory that was allocated.

autograd: autograd gets each weight gradient in bf16, and a separate kernel adds it to the sum.
sums: the ops of experts, head and embedding add to the sums.
all: linear layers too (model/dense_sums.py).

Expected: with several micro-batches each way is faster than the one before; with one no slower. No way takes
more memory than "autograd". If "all" is slower than "sums" with one micro-batch, dense_sums.py is taken out.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.moe_layer import require_gpu
from benchmarks.train import write_line
from tmoe.cli.parse import parse
from tmoe.config.run import Config
from tmoe.model.dense_sums import SummedLinear
from tmoe.model.transformer import Transformer
from tmoe.moe.experts import Experts
from tmoe.parallel import build_mesh, parallelize

WAYS = "autograd", "sums", "all"
KINDS = {"4 x 1": (4, 1), "1 x 4": (1, 4), "4 x 4": (4, 4)}  # micro-batches, rows in each
MODEL = "qwen3-30b-a3b --model.layers 4 --train.seq 4096 --train.accumulate 4 --train.batch 1"
TINY = "tiny --train.seq 64 --train.accumulate 4 --train.batch 1 --train.dtype bf16"


def build(cfg: Config, device: str) -> Transformer:
    """The laid-out model, with random weights."""
    with torch.device("meta"):
        net = Transformer(cfg.model)
    parallelize(net, build_mesh(), cfg, whole_forwards=True)
    net.to_empty(device=device)
    net.init_weights(0)
    for p in net.parameters():
        p.grad_dtype = None  # as build_optimizer does on a GPU
    return net


@contextmanager
def summing(net: Transformer, way: str) -> Iterator[None]:
    """In this context, the model's weight gradients are summed in this way."""
    for module in net.modules():
        if isinstance(module, Experts):
            module.summed = way != "autograd"
    for module in net.blocks.modules():
        if type(module) in (nn.Linear, SummedLinear):
            module.__class__ = SummedLinear if way == "all" else nn.Linear
    if way != "autograd":
        yield
        return
    places = "tmoe.model.loss.find", "tmoe.model.transformer.find"
    with mock.patch(places[0], lambda matrix: None), mock.patch(places[1], lambda matrix: None):
        yield


def step(net: Transformer, micros: int, tokens_BS: torch.Tensor) -> None:
    """Forwards and backwards of a step, on a GPU without waiting for it."""
    net.balancer.start_step()
    for i in range(micros):
        net.set_requires_gradient_sync(i + 1 == micros)
        (net(tokens_BS, tokens_BS.roll(-1, 1)) / micros).backward()
    for p in net.parameters():
        p.grad = None


def measured(net: Transformer, way: str, micros: int, tokens_BS: torch.Tensor) -> tuple[float, float]:
    """Milliseconds and GiB of one step."""
    on_gpu = tokens_BS.is_cuda
    with summing(net, way):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step(net, micros, tokens_BS)
        if on_gpu:
            torch.cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - began)
    return ms, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def compare(net: Transformer, cfg: Config, rounds: int, device: str) -> Iterator[dict[str, Any]]:
    """The figures of each kind of step and each way."""
    for kind, (micros, rows) in KINDS.items():
        tokens_BS = torch.randint(cfg.model.vocab, (rows, cfg.train.seq), device=device)
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for i in range(rounds + 2):  # two are not counted
            for way in WAYS if i % 2 else reversed(WAYS):
                figures = measured(net, way, micros, tokens_BS)
                found[way] += [figures] if i >= 2 else []
        for way, figures in found.items():
            ms, peaks = zip(*figures, strict=True)
            yield dict(kind=kind, way=way, ms=statistics.median(ms), gib=max(peaks))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=16)
    p.add_argument("--cpu", action="store_true", help="a tiny model")
    p.add_argument("--json", type=Path, help="append each result to this file, one JSON object a line")
    args = p.parse_args()
    if not args.cpu:
        require_gpu(p)
    device = "cpu" if args.cpu else "cuda"
    cfg = parse((TINY if args.cpu else MODEL).split(), "", world=1)
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if args.cpu else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        net = build(cfg, device)
        lines = []
        for r in compare(net, cfg, args.rounds, device):
            lines.append(f"| {r['kind']} | {r['way']} | {r['ms']:.2f} | {r['gib']:.2f} |")
            print(lines[-1], flush=True)
            if args.json:
                write_line(args.json, dict(part="ways") | r)
        dist.destroy_process_group()
    print("\n".join(["", "| step | way | ms | GiB |", "|---" * 4 + "|", *lines]))


if __name__ == "__main__":
    main()
