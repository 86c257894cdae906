"""Steps of training and of decoding of a model with linear layers on one GPU; training also by transformers.

    python -m benchmarks.linear_step --json FOLDER                          # one H200, about 8 minutes
    python -m benchmarks.linear_step --parts short mtp                      # what a further token costs
    python -m benchmarks.linear_step --preset granite-4.0-h-tiny --layers 8
    python -m benchmarks.linear_step --device cpu --tiny                    # does it run?

short, long: train.py by `benchmarks.train`, rows of 4,096 tokens (two of them) and of 32,768: tokens/s, MFU,
and memory, with the dry run's. Moments are bf16, so that the long row has room on an H200.

transformers: forward, backward and a fused AdamW step of the same cut in bf16, two rows of 4,096, experts by
grouped_mm; fla's kernels are used where they are installed and accept the GPU, else its torch form. The row
says which. tmoe has fp32 masters, and transformers has none.

mtp: as short, with one block that predicts a further token (--model.mtp.depth 1).

decode: a step of 256 sequences of 1,024 tokens by the engine, of a cut of --decoded layers. Its bytes are the
weights of the experts that evenly routed tokens reach, all other weights, keys and values, and the states,
which are read and written. At 4.2 TB/s they are at least 0.75 of the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import figures
from benchmarks.decode import TB_S
from benchmarks.engine import Job, drawn, in_words, now, ours, step_bytes
from benchmarks.engine import measure as decoded
from benchmarks.figures import Figure, at_least, at_most
from benchmarks.moe_layer import require_gpu
from benchmarks.train import measure
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.config.model import ModelConfig
from tmoe.config.presets import presets
from tmoe.generate.cache import bytes_a_sequence
from tmoe.hf.config import write_config
from tmoe.plan.memory import held_at_most

LIMITS = dict(short=150, mtp=150, long=170, transformers=150, decode=150)  # seconds
TINY = ["--model.linear.kind", "deltanet", "--no-compile"]
SEQ, ROWS, LONG, STEPS = 4096, 2, 32768, 12
SEQUENCES, CONTEXT, ANSWER = 256, 1024, 96  # of decode


def words(args: argparse.Namespace, seq: int, rows: int) -> list[str]:
    """train.py's words for rows of a length."""
    if args.tiny:
        return ["tiny", "--train.seq", str(seq // 64), "--train.batch", str(rows), *TINY]
    cut = [args.preset, "--model.layers", str(args.layers), "--optim.states", "bf16"]
    return [*cut, "--train.seq", str(seq), "--train.batch", str(rows), "--train.no-isolate-documents"]


def planned_gib(given: list[str]) -> float:
    """The memory that the dry run plans for."""
    cfg = parse(given, "", world=1)
    return held_at_most(cfg, Axes.of(cfg.parallel, 1)) / 2**30


def step_of(
    args: argparse.Namespace, part: str, seq: int, rows: int, more: Sequence[str] = ()
) -> Iterator[Figure]:
    given = [*words(args, seq, rows), *more]
    with tempfile.TemporaryDirectory() as out:
        found = measure(1, STEPS, given, Path(out, "run"), LIMITS[part])
    figures.keep(args, "linear_step", part, found)
    yield Figure(part, f"rows of {seq}", f"{found['tokens_per_s_gpu']:,.0f} tokens/s")
    if found["mfu"] is not None:
        yield Figure(part, f"rows of {seq}", f"MFU {found['mfu']:.1%}, {found['tflops_gpu']:.0f} TFLOP/s")
    if args.device == "cuda":
        planned = planned_gib(given)
        yield Figure(part, f"rows of {seq}: peak", f"{found['peak_gib']:.1f} GiB, planned {planned:.1f}")
        yield at_most(part, f"rows of {seq}: off the plan", abs(found["peak_gib"] / planned - 1), 0.05)


def short(args: argparse.Namespace) -> Iterator[Figure]:
    yield from step_of(args, "short", SEQ, ROWS)


def long(args: argparse.Namespace) -> Iterator[Figure]:
    yield from step_of(args, "long", LONG, 1)


def mtp(args: argparse.Namespace) -> Iterator[Figure]:
    yield from step_of(args, "mtp", SEQ, ROWS, ["--model.mtp.depth", "1"])
    kept = steps_of(args)
    if "short" in kept:
        yield at_most("mtp", "a step, of one without", kept["short"] / kept["mtp"], None)


def steps_of(args: argparse.Namespace) -> dict[str, float]:
    """tokens/s of the parts that have already run."""
    if not args.json:
        return {}
    kept = map(json.loads, (args.json / "linear_step.jsonl").read_text().splitlines())
    return {one["part"]: one["tokens_per_s_gpu"] for one in kept if "tokens_per_s_gpu" in one}


def decode(args: argparse.Namespace) -> Iterator[Figure]:
    cfg = presets()[args.preset].model
    cfg = replace(small(cfg) if args.tiny else cfg, layers=args.decoded)
    B, context, tokens = (4, 24, 8) if args.tiny else (SEQUENCES, CONTEXT, ANSWER)
    model = drawn(cfg, args.device)
    prompts = torch.randint(1, cfg.vocab, (B, context - tokens // 2)).tolist()
    engine = {"engine": ours(model, args.device == "cuda")}
    found, missing = decoded(Job(engine, prompts, tokens, 3, float("inf")))
    if missing:
        yield Figure("decode", "a step", missing["engine"], "runs", False)
        return
    ms, kind = found["engine"]["ms"], next(model.parameters()).dtype
    states = 2 * B * bytes_a_sequence(cfg, kind)
    line = dict(layers=args.decoded, sequences=B, context=context, states_gb=states / 1e9)
    line |= found["engine"] | dict(floor_gb=(step_bytes(cfg, B, context) + states) / 1e9)
    figures.keep(args, "linear_step", "decode", line)
    size = f"{args.decoded} layers, {B} x {context}"
    yield Figure("decode", size, f"{ms:.2f} ms a step, {B / ms * 1e3:,.0f} tokens/s")
    yield Figure("decode", "bytes", f"{line['floor_gb']:.2f} GB, of states {line['states_gb']:.2f}")
    if args.device == "cuda":
        card = next(card for card in TB_S if card in torch.cuda.get_device_name())
        yield at_least("decode", "share of reading", line["floor_gb"] / TB_S[card] / ms, 0.75)


def kernels() -> str:
    """The way in which transformers computes linear layers here."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    return "fla" if getattr(theirs, "is_fast_path_available", False) else "torch form"


def small(cfg: ModelConfig) -> ModelConfig:
    """The same heads, with few channels and experts."""
    moe = replace(cfg.moe, experts=8, top_k=2, ffn_dim=16, shared_dim=16)
    return replace(cfg, dim=64, vocab=64, moe=moe)


def transformers(args: argparse.Namespace) -> Iterator[Figure]:
    cfg = presets()[args.preset].model
    cfg = replace(small(cfg) if args.tiny else cfg, layers=args.layers)
    seq = 64 if args.tiny else SEQ
    kind = torch.bfloat16 if args.device == "cuda" else torch.float32
    config = AutoConfig.for_model(**write_config(cfg, str(kind).removeprefix("torch.")))
    with torch.device(args.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=kind, experts_implementation="grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=args.device == "cuda")
    seconds = []
    try:
        for _ in range(6):
            ids = torch.randint(1, cfg.vocab, (ROWS, seq), device=args.device)
            began = now()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(now() - began)
    except Exception as error:
        yield Figure("transformers", f"a step, {kernels()}", in_words(error), "runs", False)
        return
    rate = ROWS * seq / statistics.median(seconds[2:])
    line = dict(layers=args.layers, kernels=kernels(), seconds=seconds, tokens_per_s=rate)
    figures.keep(args, "linear_step", "transformers", line)
    yield Figure("transformers", f"rows of {seq}, {kernels()}", f"{rate:,.0f} tokens/s")
    kept = steps_of(args)
    if "short" in kept:
        bar = 1.3 if kernels() == "fla" else 3.0
        yield at_least("transformers", "tmoe's tokens/s", kept["short"] / rate, bar, "x")


PARTS: figures.Parts = dict(short=short, mtp=mtp, long=long, transformers=transformers, decode=decode)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.flags(p, PARTS, list(PARTS), 600)
    p.add_argument("--preset", default="qwen3-next-80b-a3b")
    p.add_argument("--layers", type=int, default=4, help="of training")
    p.add_argument("--decoded", type=int, default=8, help="layers of decode")
    args = p.parse_args()
    if args.device == "cuda":
        require_gpu(p)
    figures.run("benchmarks.linear_step", args, PARTS, LIMITS)


if __name__ == "__main__":
    main()
