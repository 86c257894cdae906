"""Times Newton-Schulz on a stack of experts, and a step of Muon and of AdamW, on one GPU.

    python -m benchmarks.muon_step
    python -m benchmarks.muon_step --layers 2 --tiles --json muon.jsonl

The first table has five iterations of stacks [E, out, in] in bf16: by torch's products, by the portable
kernel that computes half of a symmetric result, and by the kernels for Hopper. Kernels compute each iteration
in bf16, each in fp16 between the first product and the last, or pairs of iterations in fp16. The table has
milliseconds, TFLOP/s of the whole products of single iterations, and distances of the result from an
iteration in fp32: of normal numbers, and of 32 directions with noise of a hundredth of their norm. On an H200
torch's products take 34.2 ms for [512, 768, 2048]; at most 21 are wanted, and 16 aimed at.

The second, with --tiles, has each product of an iteration for each tile that a kernel can have.

The third has a step of `--layers` layers of Qwen3-30B-A3B (bf16 gradients and copies): AdamW's, Muon's, and
Muon's without the products, which should be at most 1.3 times AdamW's.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.moe_layer import require_gpu
from benchmarks.optimizer_step import LAYER, milliseconds
from benchmarks.sft import about
from benchmarks.train import at_least_one, write_line
from tmoe.config.run import OptimConfig
from tmoe.ops import newton_schulz, symmetric
from tmoe.ops.newton_schulz import by_launches, by_torch, flops, orthogonal
from tmoe.ops.symmetric import Terms, Tile, commuting_product, stacked_product, symmetric_product
from tmoe.optim.adamw import AdamW, build_optimizer, init_state
from tmoe.optim.matrices import Rows
from tmoe.parallel.copies import WorkingCopy

STACKS = [(512, 768, 2048), (512, 2048, 768), (192, 1024, 2048), (128, 1408, 2048), (16, 4096, 14336)]
STACKS += [(96, 2880, 2880), (8, 2048, 4096)]
SWEPT = [STACKS[0], STACKS[2], STACKS[5]]  # in the table of tiles
# Tiles of ops/muon_hopper.py that the second table compares; none is the portable kernel, or the library.
HALVES = [
    Tile(256, 3, 64, 2),
    Tile(256, 4, 32, 2),
    Tile(256, 3, 32, 4),
    Tile(128, 5, 32, 2),
    Tile(128, 4, 64, 2),
]
WHOLE = [Tile(256, 3, 128, 2), Tile(256, 4, 64, 2), Tile(256, 4, 128, 1), Tile(128, 5, 64, 2)]
CANDIDATES = dict(
    gram=[*HALVES, None], mix=[*HALVES[1:], None], commuting=[*HALVES[1:], None], update=[*WHOLE, None]
)


def timed(run: Callable[[], object], rounds: int) -> float:
    """The median milliseconds of a call on the GPU."""
    times = []
    for i in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end)] if i >= 2 else []
    return sorted(times)[len(times) // 2]


def of_stack(shape: tuple[int, int, int], way: str, rounds: int) -> dict:
    """A row of the first table. way: of WAYS."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    _, rows, columns = shape
    some = x[:2].float()
    few = torch.randn(2, rows, 32, device="cuda") @ torch.randn(2, 32, columns, device="cuda")
    with replaced(**WAYS[way]):
        far = distance(x[:2])
        far_few = distance((few / few.norm() + 0.01 * some / some.norm()).to(x.dtype))
        ms = timed(lambda: orthogonal(x), rounds)
    rate = shape[0] * flops(*shape[1:]) / ms / 1e9
    return dict(stack=list(shape), products=way, ms=ms, tflops=rate, far=far, far_few=far_few)


def distance(x: Tensor) -> float:
    """The distance of `orthogonal` in x's type from an iteration of the same numbers in fp32."""
    want = orthogonal(x.float())
    return ((orthogonal(x).float() - want).norm() / want.norm()).item()


@contextmanager
def replaced(**functions: Any) -> Iterator[None]:
    """Inside this context Newton-Schulz has other functions, by their names in ops/."""
    modules = (newton_schulz, symmetric)
    owners = [(next(m for m in modules if hasattr(m, name)), name) for name in functions]
    before = [getattr(owner, name) for owner, name in owners]
    for owner, name in owners:
        setattr(owner, name, functions[name])
    try:
        yield
    finally:
        for (owner, name), function in zip(owners, before, strict=True):
            setattr(owner, name, function)


# Functions of ops/ for each way, by their names
FORMS: dict[str, dict[str, Any]] = {
    "bf16": dict(by_launches=partial(by_launches, pairs=False, between=torch.bfloat16)),
    "fp16": dict(by_launches=partial(by_launches, pairs=False)),
    "pairs": dict(by_launches=partial(by_launches, pairs=True)),
}
WAYS: dict[str, dict[str, Any]] = {"torch": dict(by_launches=by_torch)}
for form, functions in FORMS.items():
    WAYS[f"portable, {form}"] = functions | dict(on_hopper=lambda *_: False)
    WAYS[f"Hopper, {form}"] = functions


def of_tiles(shape: tuple[int, int, int], rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of the second table: each product of an iteration, with each tile of CANDIDATES."""
    E, m, n = shape
    x = torch.randn(shape, device="cuda", dtype=newton_schulz.BETWEEN) / n**0.5
    scales = torch.ones(E, device="cuda")
    gram, room = symmetric_product(x, scales, Terms(1.0)), torch.empty_like(x)
    turned, other = x.mT.contiguous(), gram.clone()
    ways: dict[str, tuple[Callable[[], object], float]] = {
        "gram": (lambda: symmetric_product(x, scales, Terms(1.0)), E * m * (m + 128) * n),
        "gram, tall": (lambda: symmetric_product(turned, scales, Terms(1.0), True), E * m * (m + 128) * n),
        "mix": (lambda: symmetric_product(gram, scales, Terms(0.5, -2.0, 3.0)), E * m * (m + 128) * m),
        "commuting": (lambda: commuting_product(gram, other, scales), E * m * (m + 128) * m),
        "update": (lambda: stacked_product(gram, x, room), E * 2 * m * m * n),
        "update, tall": (lambda: stacked_product(turned, gram, room.view(turned.shape)), E * 2 * m * m * n),
    }
    for name, (run, work) in ways.items():
        kind = name.partition(",")[0]
        chosen = symmetric.TILES[kind]
        for tile in CANDIDATES[kind]:
            symmetric.TILES[kind] = tile
            ms = timed(run, rounds)
            how = "none" if tile is None else " ".join(map(str, tile))
            yield dict(product=name, stack=list(shape), tile=how, ms=ms, tflops=work / ms / 1e9)
        symmetric.TILES[kind] = chosen


def prepared(layers: int, muon: bool) -> AdamW:
    """An optimizer whose parameters have gradients and working copies."""
    named, parts = {}, {}
    for layer in range(layers):
        for name, shape in LAYER.items():
            p = nn.Parameter(torch.randn(shape, device="cuda") * 0.02)
            named[f"{layer}.{name}"] = p
            vars(p)["working_copy"] = WorkingCopy(p, torch.bfloat16)
        parts[f"{layer}.gate_up"] = [Rows(0, 768), Rows(768, 768)]
        parts[f"{layer}.qkv"] = [Rows(0, 4096), Rows(4096, 512), Rows(4608, 512)]
    cfg = OptimConfig(muon="." if muon else None)
    device = torch.device("cuda")
    optimizer = build_optimizer(named.items(), cfg, device, True, parts=parts, products=torch.bfloat16)
    init_state(optimizer)
    for p in named.values():
        p.grad = torch.randn(p.shape, device="cuda", dtype=torch.bfloat16) * 1e-3
    return optimizer


def of_steps(layers: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of the third table."""
    rows: list[dict[str, Any]] = []
    for name, muon, products in (("AdamW", False, True), ("Muon", True, True), ("Muon, passes", True, False)):
        optimizer = prepared(layers, muon)
        with replaced(**({} if products else dict(_iterated=lambda *_: None))):
            rows.append(dict(step=name, layers=layers, ms=milliseconds(optimizer, rounds)))
        del optimizer
        torch.cuda.empty_cache()
    return [row | dict(of_adamw=row["ms"] / rows[0]["ms"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=at_least_one, default=1)
    parser.add_argument("--rounds", type=at_least_one, default=10)
    parser.add_argument("--tiles", action="store_true", help="also time each product with each tile")
    parser.add_argument("--json", type=Path, help="append a line for every row to this file")
    args = parser.parse_args()
    require_gpu(parser)

    def show(row: dict[str, Any], values: str) -> None:
        print(f"| {values} |", flush=True)
        if args.json:
            write_line(args.json, row | about("muon_step"))

    print("| stack | products | ms | TFLOP/s | distance | of few and noise |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in STACKS:
        for way in WAYS:
            row = of_stack(shape, way, args.rounds)
            values = f"{row['ms']:.2f} | {row['tflops']:.0f} | {row['far']:.4f} | {row['far_few']:.4f}"
            show(row, f"{row['stack']} | {row['products']} | {values}")
    if args.tiles:
        print("\n| product | stack | tile | ms | TFLOP/s of the tiles |\n| --- | --- | --- | --- | --- |")
    for shape in SWEPT if args.tiles else ():
        for row in of_tiles(shape, args.rounds):
            values = f"{row['ms']:.3f} | {row['tflops']:.0f}"
            show(row, f"{row['product']} | {row['stack']} | {row['tile']} | {values}")
    print("\n| step | ms | of AdamW's time |\n| --- | --- | --- |")
    for row in of_steps(args.layers, args.rounds):
        show(row, f"{row['step']} | {row['ms']:.2f} | {row['of_adamw']:.2f}")


if __name__ == "__main__":
    main()
