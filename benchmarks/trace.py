"""Reads a trace of `train.py --profile` and says where the step's GPU time goes.

python -m benchmarks.trace runs/x/trace-step20-rank0.json.gz
"""

import gzip
import json
import re
import sys
from collections import Counter
from pathlib import Path

KINDS = [  # the first pattern that a kernel's name matches
    ("exchange between GPUs", r"nccl|symm|dispatch_put|combine_get"),
    ("attention", r"flash|fmha|attention|cudnn.*sdpa|cunn_SoftMax"),
    ("experts", r"up_fwd|down_fwd|moe_|^_?(up|down|dh|dx|dw|combine|rank|hist|scan|route|gather|grouped)\w*"),
    ("optimizer, norm, EMA", r"multi_tensor|FusedAdam|foreach|lpnorm|norm_"),
    ("dense matrix products", r"gemm|cutlass|nvjet|sm90_xmma|cublas|splitK"),
    ("copies", r"Memcpy|Memset|CatArray|split_with_sizes|chunk_cat|copy"),
    ("compiled glue", r"^triton_"),
]


def main(path: str) -> None:
    opener = gzip.open if path.endswith(".gz") else open
    with opener(Path(path), "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        raise SystemExit(f"{path}: no GPU activity in it")
    first, last = min(e["ts"] for e in kernels), max(e["ts"] + e["dur"] for e in kernels)
    idle = (last - first) - busy(kernels)
    kinds, names = Counter(), Counter()
    for e in kernels:
        kinds[kind(e["name"])] += e["dur"]
        names[e["name"]] += e["dur"]
    total = last - first
    print(f"{total / 1e3:.2f} ms from the first kernel to the last; GPU idle {idle / total:.1%}")
    print("| kind | ms | share |\n|---|---|---|")
    for name, us in kinds.most_common():
        print(f"| {name} | {us / 1e3:.2f} | {us / total:.1%} |")
    print("| kernel | ms | share | launches |\n|---|---|---|---|")
    for name, us in names.most_common(25):
        count = sum(e["name"] == name for e in kernels)
        print(f"| `{name[:90]}` | {us / 1e3:.2f} | {us / total:.1%} | {count} |")


def kind(name: str) -> str:
    return next((label for label, pattern in KINDS if re.search(pattern, name)), "other")


def busy(kernels: list[dict]) -> float:
    """Time in which at least one stream works."""
    end, total = float("-inf"), 0.0
    for e in sorted(kernels, key=lambda e: e["ts"]):
        stop = e["ts"] + e["dur"]
        total += max(0.0, stop - max(end, e["ts"]))
        end = max(end, stop)
    return total


if __name__ == "__main__":
    main(sys.argv[1])
