"""Predicts the time of a training step from counted FLOPs, bytes and measured constants: which layout to rent.

    python -m benchmarks.model --tokens 1e12 -- olmoe-1b-7b                     8 to 4096 GPUs, every dp x ep
    python -m benchmarks.model --gpus 4 --parts -- olmoe-1b-7b --parallel.ep 4  where the time of one layout
    goes python -m benchmarks.model --check                                          against shipped steps;
    code 1 beyond 10% python -m benchmarks.model --fit glue_passes --check FILES                  the
    constants that fit these points best

Everything behind `--` goes where train.py's words go. The constants (h200.json) say of themselves whether
they were measured, fitted (and on which points) or assumed. They describe the code that took those points:
when it has become faster, measure again, `--fit` the constants that have moved, and write the values that it
prints into the file.

--check takes the busiest rank's share of the tokens from the lines that have it (`busiest_rank`), else
`skew`; benchmarks/points.py says which lines it reads. A point counts as fitted if any run of its layout set
a constant.

A step is the sum of these parts, of the busiest rank:

    kernel                max(FLOPs/rate, bytes/rate) + kernel_overlap * min(the same two)
    projections           three products for every matrix of attention, shared experts, dense feed-forward,
    router attention             2/7 of its FLOPs forward, 5/7 backward (flash: scores are made again), at
    rates by heads' width experts               six products over the T*K routed pairs of the busiest rank,
    two sums over a token's rows loss                  the head's three products, and each logit's traffic
    exchange              a row for each (token, rank) to experts and back, forward and backward; waiting for
                          others; two movements fewer where a shared expert runs beside them; across nodes a
                          row for each (token, node) over the network first (--parallel.dispatch auto)
    glue                  everything else in a block: passes over [T, D], and activations between a dense
                          feed-forward's or shared expert's products
    recomputed            forwards that activation checkpointing runs again
    copies, optimizer     traffic around FSDP2's collectives, gradients that add up; of AdamW and the gradient
    norm exposed all-gathers   what of FSDP2's all-gathers and reduce-scatters compute does not hide
    slowed                what compute loses beside those that it does hide, by the time of their bytes on
    NVLink

Across nodes a group's ring enters each node through the network cards of its members there: dense parameters
through all eight, a rank's own experts (ep 8) through one. What runs at the same time is not modelled to
share links, nor are failures, stragglers or checkpoints. What an exchange costs in a layer, and how much of
the gathers of dense parameters hides, was measured on four GPUs with dp 1; what compute loses beside them on
two, with dp 2. A global batch grows with the GPUs: whether it still trains well is not in these numbers.
"""

import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.network import collective_seconds, padded_groups, times
from benchmarks.points import RESULTS, UNHELD, Point, fitted_layouts, held, read_points, summary
from tmoe.config.check import MOST, divisors
from tmoe.config.run import Config
from tmoe.model.count import block_shapes, flops_per_token, mfu, numel, qk_width, root_shapes, v_width
from tmoe.moe.two_level import expected_rows_across
from tmoe.run.cli import parse
from tmoe.run.memory import (
    FP32,
    compute_bytes,
    kept_whole,
    memory_per_rank,
    peak_bytes,
    rows_received,
    runs_beside,
)

CONSTANTS = Path(__file__).with_name("h200.json")
GPUS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
TOLERANCE = 0.1  # of a measured step time
RECOMPUTED = {  # parts whose forward runs again in the backward, by --parallel.checkpoint
    "none": (),
    "attention": ("projections", "attention"),
    "moe": ("experts", "exchange"),
    "block": ("projections", "attention", "experts", "exchange", "glue"),
}
# FLOPs that flash attention does over those that MFU counts: five products in the backward, not four.
FLASH = 7 / 6


class Prediction(NamedTuple):
    """One step of one layout."""

    parts: dict[str, float]
    """seconds, by what they are spent on"""
    tokens: int
    """of the global batch"""
    gpus: int
    mfu: float | None
    peak_bytes: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s_gpu(self) -> float:
        return self.tokens / self.seconds / self.gpus

    @property
    def exposed(self) -> float:
        """Share of the step in which a GPU waits for bytes of other GPUs."""
        return (self.parts["exchange"] + self.parts["exposed all-gathers"]) / self.seconds


def predict(cfg: Config, dp: int, ep: int, m: SimpleNamespace, skew: float | None = None) -> Prediction:
    """One step of `cfg` on a (dp, ep) mesh.

    skew: pairs of the busiest rank over the mean; None: m.skew if ep > 1.
    """
    model = cfg.model
    T = cfg.train.batch * cfg.train.seq
    again = cfg.train.accumulate
    width = compute_bytes(cfg)

    # Compute, and the collectives beside it.
    busiest = 1.0 if ep == 1 else m.skew if skew is None else skew
    forward, backward = passes(cfg, ep, m, busiest)
    recomputed = sum(forward[part] for part in RECOMPUTED[cfg.parallel.checkpoint])
    hiding_forward, hiding_backward = (sum(p.values()) - p["exchange"] for p in (forward, backward))
    hiding_backward += recomputed
    exposed, beside = collective_seconds(cfg, dp, ep, m, hiding_forward, hiding_backward)

    # Bytes that are copied around the collectives.
    groups = parameter_groups(cfg, dp, ep)
    own = sum(elements / size for elements, size in groups)
    keeps = kept_whole(cfg, dp, ep)
    # an all-gather reads fp32 shards and writes them in the compute type, then copies what arrived into
    # place; twice
    moved = padded_groups(cfg, dp, ep)[: 1 if keeps else 2]
    shared = [(elements, size) for elements, size in moved if size > 1]
    copied = sum(
        again * 2 * ((FP32 + width) * n / size + 2 * width * n) + (width + FP32) * n for n, size in shared
    )
    if keeps:  # what arrives of the gradients is read, and a sum written
        copied += (width + FP32 / dp) * groups[1][0]
    # gradients in the compute type add up in fp32 over micro-batches, if there are several, before any is
    # reduced
    added = sum(n for n, _ in groups) * ((again > 1) * (width + FP32) + (again - 1) * (width + 2 * FP32))

    parts = {part: again * (forward[part] + backward[part]) for part in forward}
    parts["recomputed"] = again * recomputed
    parts["copies"] = (m.copy_factor * copied + added) / m.memory_rate
    parts["optimizer"] = (m.optimizer_bytes + 3 * FP32 * (cfg.optim.ema > 0)) * own / m.memory_rate
    if cfg.optim.offload:  # both moments, in and out at the same time
        parts["optimizer"] = max(parts["optimizer"], 2 * FP32 * own / m.host_rate)
    parts["exposed all-gathers"] = exposed
    parts["slowed"] = m.slowed * beside

    tokens = dp * ep * T * again
    rate = T * again / sum(parts.values())
    used = mfu(flops_per_token(model, cfg.train.seq), rate, m.peak if cfg.train.dtype == "bf16" else None)
    memory = m.memory_factor * peak_bytes(memory_per_rank(cfg, dp, ep))
    return Prediction(parts, tokens, dp * ep, used, memory)


def passes(
    cfg: Config, ep: int, m: SimpleNamespace, skew: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a micro-batch's forward and backward by part, without FSDP2."""
    model = cfg.model
    width = compute_bytes(cfg)
    T = cfg.train.batch * cfg.train.seq
    moe_layers = sum(map(model.is_moe, range(model.layers)))
    matrices = [s for layer in range(model.layers) for s in block_shapes(model, layer)[0] if len(s) == 2]
    projections = sum(product(T, rows, columns, width, m) for rows, columns in matrices)
    attention = sum(attention_seconds(cfg, layer, m) for layer in range(model.layers))
    head = 3 * product(T, model.vocab, model.dim, width, m) + m.logit_bytes * T * model.vocab / m.memory_rate
    experts = expert_seconds(cfg, ep, m, skew)
    exchange = exchange_seconds(cfg, ep, m)
    layers = range(model.layers)
    wide = sum(model.moe.shared_dim if model.is_moe(layer) else model.ffn_dim for layer in layers)
    # The forward reads gate and up and writes their product. The backward reads these and the product's
    # gradient, and makes the product again and both gradients.
    glue = (m.glue_passes * model.layers * model.dim + 9 * wide) * T * width / m.memory_rate
    forward = {
        "projections": projections,
        "attention": attention * 2 / 7,
        "experts": moe_layers * experts[0],
        "loss": head,  # its gradient is made while the logits exist
        "exchange": moe_layers * exchange / 2,
        "glue": glue / 3,
    }
    backward = {
        "projections": 2 * projections,
        "attention": attention * 5 / 7,
        "experts": moe_layers * experts[1],
        "loss": 0.0,
        "exchange": moe_layers * exchange / 2,
        "glue": glue * 2 / 3,
    }
    return forward, backward


def attention_seconds(cfg: Config, layer: int, m: SimpleNamespace) -> float:
    """Seconds of one layer's attention, forward and backward.

    They are those of cuDNN's plain causal kernel or of flex attention's, each with a curve of rates over the
    heads' channels. A window costs flex attention as much as some tokens more would.
    """
    model = cfg.model
    S = cfg.train.seq
    window = model.window_of(layer)
    windowed = 0 < window < S
    plain = not (cfg.train.isolate_documents or windowed or model.sinks)
    widths = qk_width(model) + v_width(model)
    seen = min(window + m.window_more, S) if windowed else S
    curve = m.attention_rate if plain else m.isolated_attention_rate
    rate = np.interp(widths / 2, *zip(*curve, strict=True))
    flops = FLASH * 6 * model.heads * widths * (seen - seen**2 / (2 * S)) * cfg.train.batch * S
    return float(flops / rate)


def parameter_groups(cfg: Config, dp: int, ep: int) -> list[tuple[float, int]]:
    """(elements, ranks that share them): dense parameters over the world, the experts of a rank over dp."""
    blocks = [block_shapes(cfg.model, layer) for layer in range(cfg.model.layers)]
    dense = numel(root_shapes(cfg.model)) + sum(numel(dense) for dense, _ in blocks)
    return [(dense, dp * ep), (sum(numel(experts) for _, experts in blocks) / ep, dp)]


def kernel(flops: float, moved: float, m: SimpleNamespace) -> float:
    """Seconds of a kernel of so many FLOPs and bytes."""
    arithmetic = flops / m.product_rate
    traffic = moved / m.memory_rate
    return max(arithmetic, traffic) + m.kernel_overlap * min(arithmetic, traffic)


def product(rows: int, inner: int, columns: int, width: int, m: SimpleNamespace) -> float:
    """Seconds of [rows, inner] times [inner, columns]; the backward's two products move and multiply as much each."""
    return kernel(2 * rows * inner * columns, width * (rows * inner + inner * columns + rows * columns), m)


def expert_seconds(cfg: Config, ep: int, m: SimpleNamespace, skew: float) -> tuple[float, float]:
    """(forward, backward) seconds of one layer's experts on the busiest rank, by the kernels of docs/kernels.md."""
    moe = cfg.model.moe
    D, F, width = cfg.model.dim, moe.ffn_dim, compute_bytes(cfg)
    T = cfg.train.batch * cfg.train.seq
    rows = T if ep == 1 else rows_received(T, moe.top_k, ep)
    N = skew * T * moe.top_k  # routed pairs
    one = 2 * N * D * F  # FLOPs of a product with F columns
    # elements: rows, pre-activations, activations, weights
    x, h, a, w = N * D, 2 * N * F, N * F, moe.experts // ep * D * F
    sum_rows = kernel(0, width * (x + rows * D), m)
    up = kernel(2 * one, width * (x + 2 * w + h + a), m)
    down = kernel(one, width * (a + w + x), m)
    dh = kernel(one, width * (x + w + h + h + a), m)
    dx = kernel(2 * one, width * (h + 2 * w + x), m)
    dw_down = kernel(one, width * (a + x + w), m)
    dw_up = kernel(2 * one, width * (h + x + 2 * w), m)
    slower = 1.0 if ep == 1 else exchange_of(cfg, ep, m)["experts"]
    forward = up + down + sum_rows
    backward = dh + dx + dw_down + dw_up + sum_rows
    return slower * forward + m.layer_fixed / 3, slower * backward + m.layer_fixed * 2 / 3


def exchange_of(cfg: Config, ep: int, m: SimpleNamespace) -> dict:
    """The constants of the backend that --parallel.dispatch comes to."""
    backend = cfg.parallel.dispatch
    if backend == "auto":
        backend = "nccl" if ep > m.node or cfg.model.moe.bias else m.exchange["auto"]
    return m.exchange[backend]


def exchange_seconds(cfg: Config, ep: int, m: SimpleNamespace) -> float:
    """Seconds of one layer's movements, forward and backward: each moves a row for each (token, rank) that leaves."""
    if ep == 1:
        return 0.0
    if cfg.parallel.dispatch == "auto" and ep > m.node > 1 < cfg.model.moe.top_k:
        return two_level_seconds(cfg, ep, m)
    T = cfg.train.batch * cfg.train.seq
    D, width = cfg.model.dim, compute_bytes(cfg)
    local = min(ep, m.node)
    how = exchange_of(cfg, ep, m)
    rows = rows_received(T, cfg.model.moe.top_k, ep)
    wire = times(how["curve"], rows * (local - 1) / ep * D * width)
    if ep > local:
        away = rows * (ep - local) / ep * D * width
        wire = max(wire, away / m.nic_rate + (ep // local - 1) * m.nic_hop)
    # Rows are read and written before they leave. Where they come home they are read, widened and added to
    # the token's sum.
    copied = (2 * width + width + FP32 + 3 * FP32) * rows * D + (2 * FP32 + width) * T * D
    # beside a shared expert x of the forward and dy of the backward
    moves = how["moves"] - 2 * (how is m.exchange.get("symm") and runs_beside(cfg, ep))
    return moves * wire + how["copies"] * 2 * copied / m.memory_rate + how["fixed"]


def two_level_seconds(cfg: Config, ep: int, m: SimpleNamespace) -> float:
    """The same across nodes by moe/two_level.py: a row for each (token, node), then one for each (token, rank).

    The hops follow each other. What is done for counts and plan is assumed to take twice the flat one's time.
    """
    T, top_k = cfg.train.batch * cfg.train.seq, cfg.model.moe.top_k
    D, width = cfg.model.dim, compute_bytes(cfg)
    nodes, how = ep // m.node, m.exchange["nccl"]
    away = expected_rows_across(T, top_k, ep, nodes).two_level
    held, rows = away * nodes / (nodes - 1), rows_received(T, top_k, ep)  # of hop 1 and hop 2, with one's own
    network = away * D * width / m.nic_rate + (nodes - 1) * m.nic_hop
    links = times(how["curve"], rows * (m.node - 1) / m.node * D * width)
    # as for the flat one at either end of both hops, and rows of hop 2 are put into the flat one's order
    copied = (2 * width + width + FP32 + 3 * FP32) * (held + rows) * D + (2 * FP32 + width) * (T + held) * D
    copied += 4 * width * rows * D
    return how["moves"] * (network + links) + how["copies"] * 2 * copied / m.memory_rate + 2 * how["fixed"]


# The page --------------------------------------------------------------------------------------------------


def layouts(cfg: Config, gpus: int, node: int) -> list[int]:
    """Degrees of expert parallelism to compare: what divides experts and GPUs and fits nodes, up to two of them."""
    degrees = divisors(math.gcd(cfg.model.moe.experts, gpus))
    return [ep for ep in degrees if ep <= 2 * node and fits(ep, gpus, node)]


def fits(ep: int, gpus: int, node: int) -> bool:
    """Whether groups of ep neighbours lie in one node, or fill nodes.

    train.py refuses others, and this model is not for them.
    """
    return gpus <= node or node % ep == 0 or ep % node == 0


def refused(cfg: Config, gpus: list[int], tokens: float, m: SimpleNamespace, parts: bool) -> str:
    """Why what is asked for is not in this model; "" if it is."""
    p = cfg.parallel
    if not 0 < tokens < math.inf:
        return f"--tokens {tokens}: must be above 0 and finite"
    if cfg.train.dtype != "bf16":
        return f"--train.dtype={cfg.train.dtype}: the constants were measured in bf16; add --train.dtype bf16"
    if p.wire != "same":
        return f"--parallel.wire={p.wire}: not in this model; valid: same"
    if not parts:
        known = p.dispatch in ("auto", "nccl")
        return "" if known else f"--parallel.dispatch={p.dispatch}: the page takes auto or nccl"
    if p.dispatch == "symm" and cfg.model.moe.bias:
        return "--parallel.dispatch=symm: experts have biases (--model.moe.bias); valid: auto, nccl"
    if p.dispatch == "symm" and p.ep > m.node:
        return f"--parallel.dispatch=symm: one node of {m.node} at most, not --parallel.ep={p.ep}"
    if bad := [n for n in gpus if not fits(p.ep, n, m.node)]:
        return (
            f"--parallel.ep={p.ep}: on {bad[0]} GPUs groups would straddle nodes of {m.node}; "
            f"valid: what divides {m.node}, or multiples of it"
        )
    return ""


def page(cfg: Config, gpus: list[int], tokens: float, m: SimpleNamespace) -> Table:
    """A line for every layout; the fastest that fits is bold, those that do not fit are dim."""
    train = cfg.train
    sizes = f"{train.accumulate} x {train.batch} x {train.seq}"
    table = Table(title=f"{sizes} tokens a GPU, recomputed: {cfg.parallel.checkpoint}")
    heads = ["GPUs", "dp x ep", "M tokens a step", "ms", "tokens/s/GPU", "MFU", "exposed", "GiB"]
    for name in [*heads, f"days for {tokens:.3g} tokens", "GPU-hours"]:
        table.add_column(name, justify="right")
    for world in gpus:
        found = {ep: predict(cfg, world // ep, ep, m) for ep in layouts(cfg, world, m.node)}
        fit = [ep for ep, p in found.items() if p.peak_bytes <= m.memory]
        best = max(fit, key=lambda ep: found[ep].tokens_per_s_gpu, default=None)
        for ep, p in found.items():
            gib = f"{p.peak_bytes / 2**30:.0f}" + ("" if ep in fit else " too much")
            hours = tokens / p.tokens_per_s_gpu / 3600
            across = "" if ep <= m.node else " across nodes"
            table.add_row(
                str(world),
                f"{world // ep} x {ep}{across}",
                f"{p.tokens / 1e6:.2f}",
                f"{p.seconds * 1e3:.0f}",
                f"{p.tokens_per_s_gpu:,.0f}",
                "" if p.mfu is None else f"{p.mfu:.1%}",
                f"{p.exposed:.0%}",
                gib,
                f"{hours / world / 24:,.1f}",
                f"{hours:,.0f}",
                style="bold" if ep == best else "" if ep in fit else "dim",
            )
        table.add_section()
    return table


def parts_table(p: Prediction) -> Table:
    """A line for every part of one step, the longest first."""
    table = Table("part", "ms", "share", title=f"{p.gpus} GPUs, {p.seconds * 1e3:.1f} ms")
    for name, seconds in sorted(p.parts.items(), key=lambda part: -part[1]):
        table.add_row(name, f"{seconds * 1e3:.1f}", f"{seconds / p.seconds:.1%}")
    return table


# Measured points -------------------------------------------------------------------------------------------


def ratio(point: Point, m: SimpleNamespace) -> float:
    """Predicted seconds over measured ones."""
    return predict(point.cfg, point.dp, point.ep, m, point.skew).seconds / point.seconds


def check(points: list[Point], constants: dict[str, dict]) -> tuple[Table, bool]:
    """Predicted beside measured; whether all agree within TOLERANCE."""
    m = values(constants)
    used = fitted_layouts(constants)
    table = Table("GPUs", "command", "measured ms", "predicted ms", "off", "point")
    worst = 0.0
    for p in points:
        off = ratio(p, m) - 1
        worst = max(worst, abs(off))
        measured, predicted = p.seconds * 1e3, p.seconds * (1 + off) * 1e3
        role = "fitted" if p.layout in used else "predicted"
        numbers = f"{measured:.1f}", f"{predicted:.1f}", f"{off:+.1%}"
        table.add_row(str(p.dp * p.ep), p.command, *numbers, role)
    return table, worst <= TOLERANCE


def unheld(m: SimpleNamespace) -> list[str]:
    """How far off the shipped steps are that do not decide --check's code: a line a file."""
    errors = {name: [ratio(p, m) - 1 for p in read_points([RESULTS / name])] for name in UNHELD}
    return [f"left out: {n}, off by {min(e):+.1%} to {max(e):+.1%}: {UNHELD[n]}" for n, e in errors.items()]


def fit(points: list[Point], names: list[str], m: SimpleNamespace) -> dict[str, float]:
    """Values of the named constants for which the sum of squared log ratios of these points is smallest.

    It is a search: each constant in turn is multiplied or divided by a step, which shrinks.
    """

    def loss(trial: dict[str, float]) -> float:
        return sum(math.log(ratio(p, SimpleNamespace(**{**vars(m), **trial}))) ** 2 for p in points)

    best = {name: getattr(m, name) for name in names}
    lowest = loss(best)
    step = 2.0
    while step > 1.001:
        tries = [{**best, name: best[name] * f} for name in names for f in (step, 1 / step)]
        found = min(tries, key=loss)
        if loss(found) < lowest:
            best = found
            lowest = loss(found)
        else:
            step = math.sqrt(step)
    return best


def check_constant(name: str, value: Any, like: Any) -> None:
    """Raises ValueError unless a constant is of the shipped one's kind and in its range.

    A number must not be below 0, and above 0 if it is divided by; a curve must have two points or more.
    """
    kinds = [(int, float) if isinstance(v, (int, float)) else type(v) for v in (value, like)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{name}: {value} must be of the kind of {like}")
    if isinstance(value, (int, float)):
        divides = name.endswith("_rate") or name in ("peak", "memory", "memory_factor", "node")
        least = 1 if name in ("node", "skew") else 0
        if not (math.isfinite(value) and value >= least and (value > 0 or not divides)):
            range_ = "above 0" if divides and not least else f"{least} or more"
            raise ValueError(f"{name}: {value} must be finite and {range_}")
    if isinstance(value, list) and not (len(value) > 1 and all(len(p) == 2 and min(p) >= 0 for p in value)):
        raise ValueError(f"{name}: {value} must be two points or more, of two numbers not below 0 each")


def values(constants: dict[str, dict]) -> SimpleNamespace:
    return SimpleNamespace(**{name: c["value"] for name, c in constants.items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--tokens", type=float, default=1e12, help="to train on, for days and GPU-hours")
    parser.add_argument(
        "--parts", action="store_true", help="of the one layout that the words of train.py name"
    )
    parser.add_argument(
        "--check",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="of benchmarks.train --json; none: the shipped steps",
    )
    parser.add_argument(
        "--fit", nargs="+", default=[], metavar="CONSTANT", help="print what fits the checked points best"
    )
    parser.add_argument("--constants", type=Path, default=CONSTANTS)
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- PRESET --section.field value ...")
    args = parser.parse_args()
    try:
        constants = json.loads(args.constants.read_text())
        shipped = json.loads(CONSTANTS.read_text())
        if unknown := shipped.keys() - constants.keys():
            raise ValueError(f"lacks {', '.join(sorted(unknown))}")
        for name in shipped:
            check_constant(name, constants[name]["value"], shipped[name]["value"])
        numbers = [name for name, c in constants.items() if isinstance(c["value"], (int, float))]
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        parser.error(f"--constants={args.constants}: {error}")
    console = Console(width=170)
    if unknown := set(args.fit) - set(numbers):
        raise SystemExit(f"--fit {' '.join(unknown)}: must be among {', '.join(numbers)}")
    if args.fit and args.check is None:
        parser.error("--fit: needs --check, the points to fit")
    if args.check is not None:
        points = read_points(args.check or held())
        for name, value in (fit(points, args.fit, values(constants)) if args.fit else {}).items():
            console.print(f"{name}: {constants[name]['value']:.4g} -> {value:.4g}")
            runs = [dict(gpus=p.dp * p.ep, command=p.command) for p in points]
            constants[name] |= dict(value=value, points=runs)
        table, good = check(points, constants)
        console.print(table)
        m = values(constants)
        console.print(summary(points, [ratio(p, m) - 1 for p in points], fitted_layouts(constants)))
        console.print("\n".join([] if args.check else unheld(m)), soft_wrap=True)
        raise SystemExit(not good)
    words = [w for w in args.train if w != "--"]
    taken = [w for w in words if w.split("=")[0] in ("--parallel.ep", "--parallel.dp")]
    if taken and not args.parts:
        parser.error(f"{taken[0]}: the page compares every layout; --parts takes one")
    m = values(constants)
    # Before `parse`, which would complain of the number as a world.
    if wrong := [n for n in args.gpus if not 1 <= n <= MOST["world"]]:
        parser.error(f"--gpus {wrong[0]}: must be 1 or more, at most {MOST['world']}")
    for world in args.gpus if args.parts else (1,):
        if no := refused(parse(words, "", world=world), args.gpus, args.tokens, m, args.parts):
            parser.error(no)
    if args.parts:
        for world in args.gpus:
            cfg = parse(words, "", world=world)
            console.print(parts_table(predict(cfg, world // cfg.parallel.ep, cfg.parallel.ep, m)))
        return
    console.print(page(parse(words, ""), args.gpus, args.tokens, m))


if __name__ == "__main__":
    main()
