"""Times decoding by tmoe.Engine, in tokens/s, against transformers' generate and continuous batching.

    python -m benchmarks.engine qwen3-30b-a3b --json benchmarks/results/engine/h200.jsonl
    python -m benchmarks.engine olmoe-1b-7b --batch 256 --only tmoe "tmoe, graphs"
    python -m benchmarks.engine qwen3-30b-a3b --cuts 4 48      # the whole model, where it fits (H200)
    python -m benchmarks.engine olmoe-1b-7b --device cpu --tiny     # does it run?

The model has its real widths, but only some of its layers (--cuts); weights and prompts are random. Every
sequence has a different prompt of about --context tokens, and is sampled at temperature 1 without filters.
The whole engine
is timed: cache, sampler, host. A step's time is measured while all sequences decode: the first tokens, with
prefill and capture of graphs, are left out.

All layers: two cuts of a and b layers give t_layer = (t_b - t_a) / (b - a) and t_head = t_a - a t_layer. The
whole model takes t_head + layers * t_layer, so that embedding, head and sampler are counted once. A cut that
is the whole model is measured, not scaled. "share" is the time to read the touched weights and all keys and
values once at 2.9 TB/s (H100) or 4.2 (H200), divided by the step's time.

Rivals run the smaller cut with the same weights, written as a Hugging Face folder, in the same rounds. First,
the
first two greedy tokens of a few prompts are compared: bf16 rounds differently, so only half of them must
agree. For generate, "grouped_mm" keeps that product of the experts while decoding; by default, transformers
switches to batched_mm, which copies an expert's weights for each of its tokens. The time of a first token is
measured from the call, so for continuous batching it includes the start of its manager. A contestant that is
missing, wrong, or out of time (--seconds) is named.

Expected for all layers, tokens/s, H100 / H200: 256 sequences of Qwen3-30B 7,700 / 10,800, pilot 12,300 /
17,000, OLMoE 14,600 / 20,500; one sequence of Qwen3-30B 200 / 260; the first token within 20 s with warm
caches.
"""

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.decode import TB_S
from benchmarks.moe_layer import in_turn, require_gpu
from benchmarks.train import write_line
from tmoe.base.versions import versions
from tmoe.config.model import ModelConfig
from tmoe.config.presets import presets
from tmoe.generate import Engine, Sampling
from tmoe.generate.cache import bytes_a_token
from tmoe.hf.config import write_config
from tmoe.hf.load_weights import load_hf
from tmoe.model.shapes import model_shapes
from tmoe.model.transformer import Transformer

Prompts = Sequence[list[int]]
CUTS = {"qwen3-30b-a3b": (4, 12), "moe-pilot-14b": (4, 45), "olmoe-1b-7b": (4, 16)}
EXPECTED = {  # tokens/s for all layers
    ("qwen3-30b-a3b", 256): {"H100": 7700, "H200": 10800},
    ("moe-pilot-14b", 256): {"H100": 12300, "H200": 17000},
    ("olmoe-1b-7b", 256): {"H100": 14600, "H200": 20500},
    ("qwen3-30b-a3b", 1): {"H100": 200, "H200": 260},
}
OURS = ("tmoe", "tmoe, graphs", "tmoe, graphs, bits")
AT_ONCE = 32768  # most tokens of prompts in one forward of generate
SKIPPED = 8  # tokens of each sequence that are not timed
TINY = dict(vocab=300, dim=32, heads=4, kv_heads=2, head_dim=8)


class Answers(NamedTuple):
    """The output of a contestant: for each prompt the tokens, and the time of each token."""

    ids: list[list[int]]
    stamps: list[list[float]]
    began: float


# (prompts, tokens of each answer, whether to take the most probable token always) -> answers
Decoder = Callable[[Prompts, int, bool], Answers]


# ---- contestants ----


def ours(model: Transformer, graphs: bool, bits: bool = False) -> Decoder:
    """tmoe's engine. bits: log-probs equal those of training's forward in every bit."""

    def run(prompts: Prompts, tokens: int, greedy: bool) -> Answers:
        model.keep_bits(bits)
        began = now()
        engine = Engine(model, eos=(), slots=len(prompts), graphs=graphs)
        stamps: list[list[float]] = [[] for _ in prompts]
        ids: list[list[int]] = [[] for _ in prompts]
        sampling = Sampling(temperature=0.0 if greedy else 1.0, max_tokens=tokens)
        for piece in engine.stream(prompts, 1, sampling):
            stamps[piece.prompt].append(time.perf_counter())
            if piece.done:
                ids[piece.prompt] = piece.done.ids.tolist()
        return Answers(ids, stamps, began)

    return run


def sampled(tokens: int, greedy: bool, **more: Any) -> GenerationConfig:
    """Temperature 1 over the whole vocabulary, and no token that ends an answer."""
    how: dict[str, Any] = dict(do_sample=False) if greedy else dict(do_sample=True, top_k=0, top_p=1.0)
    return GenerationConfig(max_new_tokens=tokens, eos_token_id=None, pad_token_id=0, **how, **more)


def generate(model: Any, grouped: bool, static: bool) -> Decoder:
    """transformers' generate.

    grouped: whether it keeps grouped_mm while decoding.
    static: whether it uses its static cache, for which it compiles the model.
    """
    switch = type(model)._optimize_model_for_decode

    def run(prompts: Prompts, tokens: int, greedy: bool) -> Answers:
        x = torch.tensor(prompts, device=model.device)
        times: list[float] = []

        def stamp(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(now())  # generate waits for the GPU in each step anyway, to see whether all are done
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        more: dict[str, Any] = dict(cache_implementation="static") if static else {}
        if not static and x.numel() > AT_ONCE:  # with a static cache it would also compile the pieces
            more = dict(prefill_chunk_size=max(1, AT_ONCE // len(x)))
        model._optimize_model_for_decode = nullcontext if grouped else switch.__get__(model)
        began = now()
        sequences = model.generate(
            x,
            attention_mask=torch.ones_like(x),
            generation_config=sampled(tokens, greedy, **more),
            stopping_criteria=transformers.StoppingCriteriaList([stamp]),  # pyrefly: ignore
        )
        return Answers(sequences[:, x.shape[1] :].tolist(), [times] * len(x), began)

    return run


def batching(model: Any) -> Decoder:
    """transformers' continuous batching, with the settings that it chooses itself."""

    def run(prompts: Prompts, tokens: int, greedy: bool) -> Answers:
        began = now()
        answers = model.generate_batch(list(prompts), sampled(tokens, greedy), record_timestamps=True)
        if len(answers) < len(prompts):
            raise RuntimeError(f"gave {len(answers)} of {len(prompts)} answers")
        outputs = list(answers.values())
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return Answers([o.generated_tokens for o in outputs], [o.timestamps for o in outputs], began)

    return run


def rivals(model: Any, B: int) -> dict[str, Decoder]:
    """The rivals that may be fastest for B sequences: with one, batched_mm copies no expert twice."""
    kept = {"generate, grouped_mm": generate(model, True, False)}
    static = "generate, static, grouped_mm" if B > 1 else "generate, static"
    return (kept if B > 1 else {}) | {
        "generate": generate(model, False, False),
        "continuous batching": batching(model),
        static: generate(model, B > 1, True),
    }


# ---- models ----


def both(cfg: ModelConfig, device: str, folder: Path) -> tuple[Transformer, Any]:
    """A model of tmoe and one of transformers with the same random weights, which are written to a folder."""
    kind = "bfloat16" if device == "cuda" else "float32"
    written = write_config(cfg, kind)
    config = AutoConfig.for_model(**written)
    torch.manual_seed(0)
    with torch.device(device):
        hf_model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, kind)).eval()
    hf_model.save_pretrained(folder)
    model = empty(cfg, device)
    load_hf(folder, model.state_dict(), cfg)
    return model, hf_model


def empty(cfg: ModelConfig, device: str) -> Transformer:
    with torch.device("meta"):
        model = Transformer(cfg).to(torch.bfloat16 if device == "cuda" else torch.float32)
    return model.to_empty(device=device).eval()


def drawn(cfg: ModelConfig, device: str) -> Transformer:
    model = empty(cfg, device)
    model.init_weights(0)
    return model


def tiny(cfg: ModelConfig) -> ModelConfig:
    moe = replace(cfg.moe, experts=8, top_k=2, ffn_dim=16, shared_dim=16 if cfg.moe.shared_dim else 0)
    return replace(cfg, **TINY, moe=moe)


# ---- measurements ----


def now() -> float:
    """The current time in seconds, after waiting for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def step_ms(answers: Answers) -> float:
    """Ms of a step of all sequences, from the tokens generated while all sequences were decoding.

    Raises ValueError if there was no such time.
    """
    begin = max(row[min(SKIPPED, len(row) // 2)] for row in answers.stamps)
    end = min(row[-1] for row in answers.stamps)
    tokens = sum(begin < stamp <= end for row in answers.stamps for stamp in row)
    if not tokens:
        raise ValueError("there was no time in which all sequences decoded")
    return 1e3 * (end - begin) * len(answers.stamps) / tokens


def first_s(answers: Answers) -> float:
    """Seconds until every sequence had its first token."""
    return max(row[0] for row in answers.stamps) - answers.began


def agreement(a: Sequence[list[int]], b: Sequence[list[int]]) -> float:
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Job(NamedTuple):
    """One table: contestants that decode the same prompts."""

    contestants: dict[str, Decoder]
    prompts: Prompts
    tokens: int
    rounds: int
    deadline: float  # time.monotonic() after which no rival begins


def measure(job: Job) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """({contestant: its figures}, {contestant: why it has none}). The first contestant is the reference."""
    few = job.prompts[:8]
    missing: dict[str, str] = {}
    results: dict[str, dict[str, Any]] = {}
    want: list[list[int]] | None = None
    for name, run in job.contestants.items():
        if name not in OURS and time.monotonic() > job.deadline:
            missing[name] = "no time was left"
            continue
        say(f"  {name}: first answers")
        try:
            checked = run(few, 2, True)
            want = checked.ids if want is None else want
            agrees = agreement(checked.ids, want)
            if agrees < 0.5:
                raise ValueError(f"only {agrees:.0%} of its greedy answers are those of the first contestant")
            run(job.prompts, min(job.tokens, SKIPPED), False)  # warm: kernels, graphs and caches of this size
            results[name] = dict(
                agrees=agrees, first_ever_s=first_s(checked), steps_ms=[], first_s=[], peak=[]
            )
        except Exception as error:  # any error of a rival, reported in its own words
            missing[name] = in_words(error)
        free()
    for i in range(job.rounds):
        for (name,) in in_turn(i, list(results)):
            late = i and name not in OURS and time.monotonic() > job.deadline
            if late or name in missing:
                continue
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            try:
                answers = job.contestants[name](job.prompts, job.tokens, False)
                figures = results[name]
                figures["steps_ms"].append(step_ms(answers))
                figures["first_s"].append(first_s(answers))
                figures["peak"].append(peak_gib())
                say(f"  round {i}: {name}: {figures['steps_ms'][-1]:.2f} ms a step")
            except Exception as error:
                missing[name] = in_words(error)
            free()
    return {name: summed(figures) for name, figures in results.items() if figures["steps_ms"]}, missing


def summed(figures: dict[str, Any]) -> dict[str, Any]:
    return dict(
        ms=statistics.median(figures["steps_ms"]),
        rounds_ms=[round(ms, 3) for ms in figures["steps_ms"]],
        first_s=statistics.median(figures["first_s"]),
        first_ever_s=figures["first_ever_s"],
        agrees=figures["agrees"],
        peak_gib=max(figures["peak"], default=0.0),
    )


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def step_bytes(cfg: ModelConfig, B: int, context: int) -> float:
    """Bytes that a step must read in bf16: weights of the experts that evenly routed tokens reach, all other
    weights once, and every key and value."""
    touched = 1 - (1 - cfg.moe.top_k / cfg.moe.experts) ** B
    weights = 0.0
    for name, shape in model_shapes(cfg).items():
        if name != "embedding.weight" or cfg.tied:  # of the embedding, only one row per token is read
            weights += math.prod(shape) * (touched if ".experts." in name else 1)
    return 2 * weights + B * context * bytes_a_token(cfg, torch.bfloat16)


def whole_ms(ms: dict[int, float], layers: int) -> float | None:
    """Ms of all layers, from the ms of some cuts; None if there is only one cut."""
    if layers in ms:
        return ms[layers]
    if len(ms) < 2:
        return None
    a, b = min(ms), max(ms)
    layer = (ms[b] - ms[a]) / (b - a)
    return ms[a] + (layers - a) * layer


# ---- output ----


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rows(B: int, layers: int, found: dict[str, dict[str, Any]], missing: dict[str, str]) -> list[str]:
    lines = []
    for name, r in found.items():
        speed = f"{B / r['ms'] * 1e3:,.0f} | {r['ms']:.2f} | {r['first_s']:.2f}"
        lines.append(f"| {B} | {layers} | {name} | {speed} | {r['peak_gib']:.1f} | {r['agrees']:.0%} |")
    return lines + [f"| {B} | {layers} | {name} | {why} | | | | |" for name, why in missing.items()]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", choices=list(CUTS))
    p.add_argument("--batch", nargs="+", type=int, default=[256, 1], help="number of sequences")
    p.add_argument("--context", type=int, default=1024, help="tokens of a sequence in the middle of the run")
    p.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    p.add_argument("--cuts", nargs="+", type=int, help="numbers of layers; the model's own number: all of it")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--only", nargs="+", help="contestants; default: all")
    p.add_argument("--seconds", type=float, default=130, help="seconds after which no rival begins")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    p.add_argument("--json", type=Path, help="append each table to this file, one JSON object a line")
    args = p.parse_args()
    gpu = args.device == "cuda"
    if gpu:
        require_gpu(p)
    deadline = time.monotonic() + args.seconds
    cfg = presets()[args.model].model
    cfg = tiny(cfg) if args.tiny else cfg
    length = args.context - args.tokens // 2
    if length < 1:
        p.error(f"--context {args.context}: must be above half of --tokens {args.tokens}")
    about: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "versions": versions() | {"transformers": transformers.__version__},
        "date": str(date.today()),
        "command": " ".join(["python -m benchmarks.engine", *sys.argv[1:]]),
    }
    print(about, flush=True)
    transformers.utils.logging.set_verbosity_error()
    lines = ["| B | layers | contestant | tokens/s | ms a step | first token s | peak GiB | agrees |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    ms: dict[tuple[int, str], dict[int, float]] = {}
    made = torch.Generator().manual_seed(0)
    asked = {B: torch.randint(cfg.vocab, (B, length), generator=made).tolist() for B in args.batch}

    cuts = sorted(args.cuts or CUTS[args.model], reverse=True)  # the rivals run last, in the remaining time
    named: dict[str, Decoder] = {}
    for layers in cuts:
        short = replace(cfg, layers=layers)
        say(f"{args.model}, {layers} layers")
        hf_model = None
        if layers == cuts[-1] and (not args.only or set(args.only) - set(OURS)):
            with tempfile.TemporaryDirectory() as folder:
                model, hf_model = both(short, args.device, Path(folder))
        else:
            model = drawn(short, args.device)
        for i, B in enumerate(args.batch):
            until = time.monotonic() + (deadline - time.monotonic()) / (len(args.batch) - i)
            named = {OURS[0]: ours(model, False)}
            if gpu:
                named |= {OURS[1]: ours(model, True), OURS[2]: ours(model, True, True)}
            named |= rivals(hf_model, B) if hf_model is not None else {}
            named = {name: run for name, run in named.items() if not args.only or name in args.only}
            results, missing = measure(Job(named, asked[B], args.tokens, args.rounds, until))
            lines += rows(B, layers, results, missing)
            for name, r in results.items():
                ms.setdefault((B, name), {})[layers] = r["ms"]
            if args.json:
                line = dict(model=args.model, batch=B, context=args.context, layers=layers, results=results)
                write_line(args.json, line | dict(missing=missing, **about))
        del model, hf_model
        named.clear()
        free()

    lines += whole(args, cfg, ms, about)
    print(*lines, sep="\n")


def whole(
    args: argparse.Namespace, cfg: ModelConfig, ms: dict[tuple[int, str], dict[int, float]], about: dict
) -> list[str]:
    """The table of all layers, which is also written to the file."""
    card = next((card for card in TB_S if card in (about["gpu"] or "")), None)
    lines = ["", f"All {cfg.layers} layers of {args.model}:", ""]
    lines.append("| B | contestant | tokens/s | ms a step | how | share of the roofline | expected |")
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for (B, name), by_layers in ms.items():
        step = whole_ms(by_layers, cfg.layers)
        if step is None:
            continue
        how = "measured" if cfg.layers in by_layers else f"from {min(by_layers)} and {max(by_layers)} layers"
        floor = step_bytes(cfg, B, args.context)
        share = floor / (TB_S[card] * 1e9) / step if card else None
        expected = EXPECTED.get((args.model, B), {}).get(card or "")
        speed = f"{B / step * 1e3:,.0f} | {step:.2f} | {how}"
        cells = f"{'' if share is None else f'{share:.0%}'} | {expected or ''}"
        lines.append(f"| {B} | {name} | {speed} | {cells} |")
        if args.json:
            figures = dict(ms=step, tokens_per_s=B / step * 1e3, how=how, floor_gb=floor / 1e9, share=share)
            line = dict(model=args.model, batch=B, context=args.context, layers=cfg.layers, contestant=name)
            write_line(args.json, line | figures | dict(expected=expected, **about))
    return lines


if __name__ == "__main__":
    main()
