"""Times adapters on frozen experts against training the experts, and measures memory against the dry run.

    python -m benchmarks.adapters --json FOLDER                 # one GPU, at most 8 minutes, the table last
    torchrun --nproc-per-node 2 -m benchmarks.adapters --parts exchange --json FOLDER
    python -m benchmarks.adapters --device cpu --tiny           # does it run?

layer: forward and backward of the experts' op, bf16, a random adapter of rank 16, 8 or 1 on both matrices of
each expert; gradients of x, the routing weights and everything that is trained. First the adapted op's
results are compared with merged weights in fp32. "kernels" are the microseconds of each kernel in one call.

exchange: the same for tmoe.MoE, compiled, with experts split over two or more ranks by symm and by nccl.
Expected for frozen experts, there and on one GPU: at most 0.75 of training them.

decode: tokens/s of the engine with and without adapters, qwen3-30b-a3b, 64 sequences. Two cuts of the model
give the time of all layers. `rank 16` is --lora.rank 16; `rank 16 an expert` is --lora.expert-rank 16 too.

bits: the share of sampled tokens whose log-prob in a rollout equals training's in every bit, with a model
that keeps its bits; the adapters are not merged.

train: qwen3-30b-a3b cut to 12 layers with rank 8 an expert, trained by train.py: peak memory and estimate.

grpo: the whole moe-pilot-14b with adapters, one prompt, 512 tokens an answer, groups of 256 and of 8: peak
memory and estimate, as `benchmarks.grpo_step --memory` measures them.

Each part is a process with its own time limit. A part that fails or is not done is named, and all others
still run. --json names a folder; each part appends its lines to FOLDER/adapters.jsonl.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import figures
from benchmarks.engine import drawn, free, ours, step_ms, tiny, whole_ms
from benchmarks.figures import Figure, at_most
from benchmarks.grpo_step import beside_pool, grpo_words, predicted, watched, write_prompts
from benchmarks.moe_layer import ALL, Shape, in_turn, make, require_gpu, time_all
from benchmarks.sft import TINY, Job
from benchmarks.train import launch
from benchmarks.trl_rivals import write_tokenizer
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.config.presets import presets
from tmoe.config.run import LoraConfig
from tmoe.log.metrics_file import read_steps
from tmoe.model.lora import add_adapters, is_adapter
from tmoe.model.transformer import Transformer
from tmoe.ops import moe_mlp, reference
from tmoe.ops.experts.adapted import Adapters, moe_mlp_adapted
from tmoe.ops.experts.cpu import ExpertWeights
from tmoe.plan.memory import memory_per_rank, peak_bytes

GIB = 2**30
LIMITS = dict(layer=75, exchange=90, decode=110, bits=60, train=80, grpo=190)  # seconds
LORAS = {
    "rank 16": LoraConfig(rank=16),
    "rank 16 an expert": LoraConfig(rank=16, expert_rank=16),
}


# ---- the op ----


def with_adapters(shape: Shape, r: int, device: str, dtype: torch.dtype) -> Adapters:
    """Random adapters that change the experts' values by about a third."""
    _, D, F, E, _ = shape

    def new(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype)

    sizes = dict(gate_up=(2 * F, D), down=(D, F))
    pairs = [(new(E, r, n) * n**-0.5, new(E, m, r) * 0.3 * r**-0.5) for m, n in sizes.values()]
    return Adapters(*(t for pair in pairs for t in pair))


def passes(call: Callable[[], Tensor], wanted: list[Tensor], dy: Tensor) -> Callable[[], Any]:
    """A function that runs a forward and a backward."""
    return lambda: torch.autograd.grad(call(), wanted, dy)


def largest_error(shape: Shape, r: int, device: str) -> float:
    """The largest relative error of the op's result and gradients, against merged weights in fp32."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    T, D, F, E, K = shape
    small = (T, D, F, min(E, 8), min(K, 2))
    x, logits, gate_up, down, dy = make(small, device, dtype)
    weights, ids = logits.softmax(-1).topk(small[-1], dim=-1)
    adapters = with_adapters(small, r, device, dtype)
    scales = 0.5, 2.0
    leaves = [t.detach().requires_grad_() for t in (x, weights, *adapters)]
    experts = ExpertWeights(gate_up, down, None, "swiglu")
    y = moe_mlp_adapted(leaves[0], experts, Adapters(*leaves[2:]), leaves[1], ids, scales=scales)
    got = y, *torch.autograd.grad(y, leaves, dy)
    exact = [t.detach().float().requires_grad_() for t in (x, weights, *adapters)]
    merged = gate_up.float() + 0.5 * exact[3] @ exact[2], down.float() + 2 * exact[5] @ exact[4]
    y = reference.moe_mlp(exact[0], *merged, exact[1], ids)
    want = y, *torch.autograd.grad(y, exact, dy.float())
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


def kernel_times(run: Callable[[], Any]) -> dict[str, float]:
    """GPU microseconds of each kernel in one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in seen.events() or ():
        name = event.name.split("(")[0][:60]
        times[name] = times.get(name, 0.0) + event.device_time
    return dict(sorted(times.items(), key=lambda pair: -pair[1])[:14])


def contestants(shape: Shape, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Forwards and backwards of one layer: trained, frozen, and with adapters of each rank."""
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    x, logits, gate_up, down, dy = make(shape, args.device, dtype)
    weights, ids = logits.softmax(-1).topk(shape[-1], dim=-1)
    x, weights = x.requires_grad_(), weights.detach().requires_grad_()
    trained = gate_up.clone().requires_grad_(), down.clone().requires_grad_()
    experts = ExpertWeights(gate_up, down, None, "swiglu")

    def adapted(r: int) -> Callable[[], Any]:
        factors = [t.requires_grad_() for t in with_adapters(shape, r, args.device, dtype) if t is not None]
        adapters = Adapters(*factors)
        call = lambda: moe_mlp_adapted(x, experts, adapters, weights, ids)  # noqa: E731
        return passes(call, [x, weights, *factors], dy)

    return {
        "trained": passes(lambda: moe_mlp(x, *trained, weights, ids), [x, weights, *trained], dy),
        "frozen": passes(lambda: moe_mlp(x, gate_up, down, weights, ids), [x, weights], dy),
    } | {f"rank {r}": adapted(r) for r in args.ranks}


def layer(args: argparse.Namespace) -> Iterator[Figure]:
    gpu = args.device == "cuda"
    for name in args.shapes:
        torch.manual_seed(0)
        shape = (64, 32, 16, 8, 2) if args.tiny else ALL[name]
        T, D, F, E, K = shape
        few, many = ((min(T, rows), D, F, E, K) for rows in (64, 1024))
        errors = {r: max(largest_error(part, r, args.device) for part in (few, many)) for r in args.ranks}
        runs = contestants(shape, args)
        ms = dict(zip(runs, timed(list(runs.values()), args), strict=True))
        kernels = {}
        if gpu:
            kernels = {kind: kernel_times(runs[kind]) for kind in ("trained", f"rank {args.ranks[0]}")}
            for kind, times in kernels.items():
                print(f"{name}, {kind}: " + ", ".join(f"{k} {us:.0f}" for k, us in times.items()), flush=True)
        keep(args, "layer", dict(shape=name, ms=ms, errors=errors, kernels=kernels))
        yield at_most("layer", f"{name}: frozen / trained", ms["frozen"] / ms["trained"], 0.75)
        for r in args.ranks:
            bar = 0.85 if r == 16 else None
            share = ms[f"rank {r}"] / ms["trained"]
            yield at_most("layer", f"{name}: rank {r} / trained ({ms[f'rank {r}']:.2f} ms)", share, bar)
            yield at_most("layer", f"{name}: rank {r}, largest relative error", errors[r], 0.02)


def timed(runs: list[Callable[[], Any]], args: argparse.Namespace) -> list[float]:
    """Median milliseconds of each function."""
    if args.device == "cuda":
        return time_all(runs, args.rounds)
    times = []
    for run in runs:
        run()
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return times


# ---- experts split over ranks ----


def exchange(args: argparse.Namespace) -> Iterator[Figure]:
    """Started by torchrun, one process a GPU."""
    import tmoe
    from benchmarks import exchange as bench
    from tmoe.model.parallelize import apply_ep
    from tmoe.moe.exchange import symm

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        yield Figure("exchange", "frozen / trained, experts split", "started without torchrun: not run")
        return
    bench.warm(["qwen3"], world, False)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    mesh = tmoe.parallel.build_mesh(ep=world)
    runs: dict[str, Callable[[], Any]] = {}
    for way in ("symm", "nccl"):
        for kind in ("trained", "frozen", "rank 16"):
            if kind == "rank 16" and way == "symm":
                continue
            dim, cfg = bench.LAYERS["qwen3"]
            torch.manual_seed(0)
            with torch.device("cuda"):
                moe = tmoe.MoE(dim, cfg)
                if kind == "rank 16":
                    for matrix in ("gate_up", "down"):
                        moe.experts.adapt(matrix, 16, 2.0)
                        nn.init.normal_(getattr(moe.experts, f"{matrix}_a"), std=dim**-0.5)
                        nn.init.normal_(getattr(moe.experts, f"{matrix}_b"), std=0.02)
            moe = moe.bfloat16()
            for name, p in moe.named_parameters():
                p.requires_grad_(kind == "trained" or is_adapter(f".{name}"))
            apply_ep(moe, mesh, way, bench.T, "same")
            runs[f"{way} {kind}"] = forward_and_backward(moe, bench.T, dim)
    world_group = dist.group.WORLD
    assert isinstance(world_group, dist.ProcessGroup)
    room = symm.exchange_of(world_group.group_name)
    ms = dict(zip(runs, bench.slowest(list(runs.values()), args.rounds, room), strict=True))
    if dist.get_rank() == 0:
        keep(args, "exchange", dict(world=world, ms=ms))
    for way in ("symm", "nccl"):
        share = ms[f"{way} frozen"] / ms[f"{way} trained"]
        yield at_most("exchange", f"{world} GPUs, {way}: frozen / trained", share, 0.75)
    share = ms["nccl rank 16"] / ms["nccl trained"]
    yield at_most("exchange", f"{world} GPUs, nccl: rank 16 / trained", share, 0.85)
    dist.destroy_process_group()


def forward_and_backward(moe: nn.Module, T: int, dim: int) -> Callable[[], None]:
    torch.manual_seed(dist.get_rank())
    x, dy = (torch.randn(T, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    route = torch.compile(moe.route, fullgraph=True, dynamic=False)

    def run() -> None:
        moe.experts(route, x, None)[0].backward(dy)
        x.grad = None
        moe.zero_grad(set_to_none=True)

    return run


# ---- generation ----


def adapted_copy(model: Transformer, lora: LoraConfig) -> Transformer:
    """A model with the same weight tensors and random adapters."""
    with torch.device("meta"):
        copy = Transformer(model.cfg)
        add_adapters(copy, lora)
    weights = dict(model.state_dict())
    weight = next(iter(model.parameters()))
    draw = torch.Generator(weight.device).manual_seed(1)
    for name, p in copy.named_parameters():
        if is_adapter(name):
            factor = torch.empty(p.shape, device=weight.device, dtype=weight.dtype)
            weights[name] = factor.normal_(0, 0.02, generator=draw)
    copy.load_state_dict(weights, assign=True)
    for name, p in copy.named_parameters():
        p.requires_grad_(is_adapter(name))
    return copy.train(model.training)


def decode(args: argparse.Namespace) -> Iterator[Figure]:
    gpu = args.device == "cuda"
    whole = presets()["qwen3-30b-a3b"].model
    B, tokens, context = (3, 12, 16) if args.tiny else (64, 96, 512)
    ms: dict[str, dict[int, float]] = {}
    for layers in (2, 4) if args.tiny else (4, 12):
        cfg = replace(tiny(whole) if args.tiny else whole, layers=layers)
        model = drawn(cfg, args.device)
        models = {"without": model} | {name: adapted_copy(model, lora) for name, lora in LORAS.items()}
        decoders = {name: ours(one, gpu) for name, one in models.items()}
        prompts = torch.randint(cfg.vocab, (B, context), generator=torch.Generator().manual_seed(0)).tolist()
        rounds: dict[str, list[float]] = {name: [] for name in decoders}
        for name in decoders:  # kernels and graphs
            decoders[name](prompts, 8, False)
        for i in range(args.decode_rounds):
            for (name,) in in_turn(i, list(decoders)):
                rounds[name].append(step_ms(decoders[name](prompts, tokens, False)))
                free()
        for name, each in rounds.items():
            ms.setdefault(name, {})[layers] = statistics.median(each)
        keep(args, "decode", dict(layers=layers, batch=B, context=context, step_ms=rounds))
        del models, decoders, model
        free()
    speed = {name: B / whole_ms(cuts, whole.layers) * 1e3 for name, cuts in ms.items()}  # pyrefly: ignore
    for name, rate in speed.items():
        what = f"{B} sequences of qwen3-30b-a3b, {name}: {rate:,.0f} tokens/s, of without"
        share = rate / speed["without"]
        good = None if name == "without" else share >= 0.9
        yield Figure("decode", what, f"{share:.3f}", "" if good is None else "at least 0.9", good)


def bits(args: argparse.Namespace) -> Iterator[Figure]:
    from benchmarks.bits import Sequences, build, chain, compile_blocks, engine, shape_of

    for name in ("qwen3", "pilot"):
        for lora_name, lora in LORAS.items():
            model = adapted_copy(build(shape_of(name, 2, args.tiny), args.device), lora)
            B, S, prompt = (3, 20, 7) if args.tiny else (64, 140, 120)
            given = Sequences(torch.randint(model.cfg.vocab, (B, S), device=args.device), prompt)
            model.keep_bits()
            broken = [piece for piece, found, _ in chain(model, given) if found.share < 1]
            found, _ = engine(model, given)
            shares = {"eager": found.share}
            if args.device == "cuda":
                compile_blocks(model)
                shares["compiled"] = engine(model, given)[0].share
                torch._dynamo.reset()
            keep(args, "bits", dict(shape=name, lora=lora_name, share=shares, broken=broken[:4]))
            for mode, share in shares.items():
                first = f"; first piece that differs: {broken[0]}" if broken else ""
                what = f"{name}, {lora_name}, {mode}: log-probs equal to training's{first}"
                yield Figure("bits", what, f"{share:.2%}", "100%", share == 1)


# ---- train.py ----


def train(args: argparse.Namespace) -> Iterator[Figure]:
    words = ["qwen3-30b-a3b", "--model.layers", "12", "--train.seq", "4096", "--train.batch", "1"]
    words += ["--parallel.checkpoint", "block", "--lora.rank", "64", "--train.eval-batches", "1"]
    words += ["--train.dtype", "bf16", "--optim.warmup", "0", "--optim.lr", "1e-4"]
    if args.tiny:
        words = ["qwen3-30b-a3b", *TINY.split(), "--model.layers", "2", "--lora.rank", "8"]
        words += ["--train.seq", "64", "--train.batch", "1", "--train.eval-batches", "1"]
    cfg = parse(words, "", world=1)
    estimate = peak_bytes(memory_per_rank(cfg, Axes.of(cfg.parallel, 1))) / GIB
    with tempfile.TemporaryDirectory() as made:
        launch(1, 5, words, Path(made) / "run", LIMITS["train"] - 10)
        lines = [line for _, line in read_steps(Path(made) / "run" / "metrics.jsonl")]
    peak = max(line.get("peak_gib", 0.0) for line in lines)
    losses = [line["loss"] for line in lines]
    keep(args, "train", dict(words=words, peak_gib=peak, estimate_gib=estimate, losses=losses))
    what = f"12 layers, rank 8 an expert: peak {peak:.2f} GiB, estimate {estimate:.2f}, off by"
    yield at_most("train", what, abs(estimate / peak - 1) if peak else 0.0, 0.05)
    learnt = len(losses) > 1 and all(loss == loss for loss in losses)
    yield Figure("train", "losses", " ".join(f"{loss:.3f}" for loss in losses), "finite", learnt)


def grpo(args: argparse.Namespace) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as made:
        job = Job(grpo_arguments(args), Path(made), {})
        model = ["moe-pilot-14b", *(job.words("", 2)[1:] if args.tiny else [])]
        vocab = parse(model, "", world=1).model.vocab
        write_tokenizer(job.folder / "words", vocab)
        write_prompts(job.args, job.folder, vocab)
        measured: dict[int, dict[str, float]] = {}
        for group in (8, 4) if args.tiny else (256, 8):
            words = [*model, *grpo_words(job.args, job.folder, group), "--lora.rank", "16"]
            words += ["--data.tokenizer", str(job.folder / "words"), "--steps", "2", "--resume", "none"]
            words += ["--grpo.pool-gib", "12", "--checkpoint.mode", "off", *args.train]
            words += ["--out", str(job.folder / f"run-{group}")]
            began = time.monotonic()
            result = watched(words, job.folder / f"peaks-{group}.json", args.grpo_seconds)
            result |= dict(predicted=predicted(words), seconds=time.monotonic() - began)
            keep(args, "grpo", dict(group=group, words=words) | result)
            if "missing" in result:
                yield Figure("grpo", f"group {group}", result["missing"], "an update", False)
                continue
            measured[group], estimate = result["measured"], result["predicted"]
            peak = max(measured[group]["update"], measured[group]["rollout"])
            most = max(estimate["update"], estimate["rollout"])
            what = f"the whole pilot, group {group}: peak, where the dry run says {most:.2f} GiB"
            yield at_most("grpo", what, peak, 72, " GiB")
    if len(measured) == 2:
        each = list(map(beside_pool, measured.values()))
        yield at_most("grpo", "what a larger group adds besides pages", abs(each[0] - each[1]), 0.5, " GiB")


def grpo_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """Arguments that benchmarks.grpo_step --memory would have."""
    sizes = dict(prompts=1, prompt=128, max_tokens=512, slots=256, micro=2, in_row=2)
    if args.tiny:
        sizes = dict(prompts=2, prompt=8, max_tokens=8, slots=8, micro=2, in_row=2)
    return argparse.Namespace(**sizes, tiny=args.tiny, json=None)


# ---- all parts ----


PARTS: figures.Parts = dict(layer=layer, decode=decode, bits=bits, train=train, grpo=grpo, exchange=exchange)


def keep(args: argparse.Namespace, part: str, found: dict[str, Any]) -> None:
    figures.keep(args, "adapters", part, found)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.flags(p, PARTS, [part for part in PARTS if part != "exchange"], 465)
    p.add_argument("--shapes", nargs="+", choices=list(ALL), default=["qwen3", "qwen3-4096", "pilot"])
    p.add_argument("--ranks", nargs="+", type=int, default=[16, 8, 1])
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--decode-rounds", type=int, default=2)
    p.add_argument("--grpo-seconds", type=float, default=120, help="seconds of a run of train.py")
    p.add_argument("--train", nargs=argparse.REMAINDER, default=[], help="words for train.py of part grpo")
    args = p.parse_args()
    if args.device == "cuda":
        require_gpu(p)
    if "WORLD_SIZE" in os.environ and not args.one:  # started by torchrun
        return figures.write_figures(args, "exchange", PARTS)
    figures.run("benchmarks.adapters", args, PARTS, LIMITS)


if __name__ == "__main__":
    main()
