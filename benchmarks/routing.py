"""Times the routing part of an MoE layer's forward, from scores to metadata, for each policy.

    python -m benchmarks.routing                          # OLMoE's and Qwen3's layer, 32,768 tokens, bf16
    python -m benchmarks.routing --json benchmarks/results/routing/h200.jsonl
    python -m benchmarks.routing --device cpu --tiny      # does it run?

"scores to metadata" begins with the router's logits and ends with the tables that the products read: scores,
choice, weights, sorted rows. "product" is the preceding x W^T. "load" is the later sums for losses and the
log. Shares are relative to the whole layer's forward with the same policy, all compiled as in training.
Expected: at most 4%, and 8% for Sinkhorn with its default of 32 rounds.

Times are medians over rounds in which all parts alternate (`moe_layer.time_all`).
"""

import argparse
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

import tmoe
from benchmarks.moe_layer import require_gpu, time_all
from benchmarks.train import write_line
from tmoe.moe.balance import measure as load_of
from tmoe.moe.router import Router
from tmoe.ops.experts.pair_order import route

SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {  # tokens, D, settings of the layer
    "olmoe": (32768, 2048, dict(experts=64, top_k=8, ffn_dim=1024, renormalize=False)),
    "qwen3": (32768, 2048, dict(experts=128, top_k=8, ffn_dim=768)),
}
TINY: dict[str, tuple[int, int, dict[str, Any]]] = {"tiny": (64, 32, dict(experts=16, top_k=4, ffn_dim=16))}
POLICIES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid, bias": dict(score="sigmoid", choice_bias=True),
    "groups": dict(score="sigmoid", choice_bias=True, groups=8, top_groups=4, group_score="top2"),
    "sinkhorn": dict(selection="sinkhorn"),
    "quantile": dict(selection="quantile"),
    "expert choice": dict(selection="expert-choice"),
}
EXPECTED = {"sinkhorn": 0.08}  # share of the layer's forward; 4% for every other policy


def cpu_ms(fns: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Milliseconds of each function, from a single call: only a check that it runs, not a measurement."""
    times = []
    for fn in fns:
        begun = time.perf_counter()
        fn()
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def measure(name: str, policy: str, device: str, rounds: int) -> dict[str, Any]:
    """The times of one shape with one policy, in ms."""
    tokens, D, settings = (SHAPES | TINY)[name]
    cfg = tmoe.MoEConfig(**settings, **POLICIES[policy])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    compiled = torch.compile if device == "cuda" else lambda f, **_: f
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.device(device):
        moe = tmoe.MoE(D, cfg).to(dtype)
        x = torch.randn(1, tokens, D, dtype=dtype)
    moe.router.weight.data.normal_(0, D**-0.5)  # logits of standard deviation 1
    alone = Router(D, cfg).to(device)
    alone.choice_bias = moe.router.choice_bias
    moe.route = compiled(moe.route, fullgraph=True, dynamic=False)
    product = compiled(moe.router.logits, fullgraph=True, dynamic=False)
    with torch.no_grad():
        logits = moe.router.logits(x[0])
        alone.logits = lambda x_TD: x_TD
        choose = compiled(alone, fullgraph=True, dynamic=False)
        chosen = choose(logits)
    sums = compiled(lambda r: load_of(r, 1, None, cfg.score, None, cfg), fullgraph=True, dynamic=False)

    def to_metadata() -> Any:
        ids_TK = choose(logits).ids_TK
        return route(ids_TK, cfg.experts) if device == "cuda" else ids_TK

    fns = [lambda: moe(x), lambda: product(x[0]), to_metadata, lambda: sums(chosen)]
    with torch.no_grad():
        layer, before, routing, behind = (time_all if device == "cuda" else cpu_ms)(fns, rounds)
    return dict(
        shape=name,
        policy=policy,
        layer_ms=layer,
        product_ms=before,
        routing_ms=routing,
        load_ms=behind,
        share=routing / layer,
        expected=EXPECTED.get(policy, 0.04),
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--tiny", action="store_true", help="64 tokens of 32 channels")
    p.add_argument("--rounds", type=int, default=25)
    p.add_argument("--json", type=Path, help="append a line for each row to this file")
    args = p.parse_args()
    if args.device == "cuda":
        require_gpu(p)
    rows = []
    for name in TINY if args.tiny else SHAPES:
        for policy in POLICIES:
            row = measure(name, policy, args.device, args.rounds)
            rows.append(row)
            if args.json:
                gpu = torch.cuda.get_device_name() if args.device == "cuda" else "none"
                made = dict(gpu=gpu, torch=torch.__version__, date=date.today().isoformat())
                write_line(args.json, row | made)
    print("| shape | policy | layer ms | product | scores to metadata | load | share | expected |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        times = [f"{row[key]:.3f}" for key in ("layer_ms", "product_ms", "routing_ms", "load_ms")]
        bars = [f"{row['share']:.1%}", f"{row['expected']:.0%}"]
        print(f"| {' | '.join([row['shape'], row['policy'], *times, *bars])} |")


if __name__ == "__main__":
    main()
