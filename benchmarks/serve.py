"""Speed of `tmoe serve` over HTTP, beside its own engine, `transformers serve` and transformers' generate.

    python -m benchmarks.serve --json FOLDER                    # one GPU, at most 9 minutes, the table last
    python -m benchmarks.serve --parts olmoe qwen3              # the server beside the engine, 4 minutes
    python -m benchmarks.serve --device cpu --tiny              # does it run?

qwen3, olmoe: qwen3-30b-a3b cut to 12 layers, and olmoe-1b-7b. First `Engine.generate` makes 512 tokens for
256 prompts, and for one; then a server of the same model answers the same prompts, each client with one
request. Tokens a second are compared in two ways: over the whole call, and while all answers are under way.
Of `generate` the second one is computed from two lengths, so that prefill and capture of graphs are left out.

Then two loads of prompts and answers with lengths like ShareGPT's, made from a seed: closed, 64 or 256
clients each with one request after the other; and Poisson, with 0.7 of the requests that 256 clients had in
the same time. Times are taken at the client, for each event of a stream. A server may join tokens that its
client could not have yet: "tokens of an event" shows it.

rivals: qwen3's cut, the closed load of 256 clients, and one stream, by `transformers serve` with continuous
batching. Each of its settings is warmed up and measured for a short time; the best one has the whole load.

rollout: 256 answers of 512 tokens by qwen3's cut, by tmoe's engine, and by transformers' generate with each
of its settings for a short time and then the best one. For generate, "grouped_mm" keeps that product of the
experts while decoding; by default, transformers switches to one that copies an expert's weights for each
token.

Weights are drawn in the same way for all, in bf16; texts are words of the same tokenizer, sampled at
temperature 1, and no token ends an answer. vLLM and SGLang are not compared: their wheels are larger than
what can be carried to the machine. transformers has no flash-attention there, unless it is installed.

The front's CPU time of a token is that of the server's process, the engine's excluded. `transformers serve`
has one process for both.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import figures, http_load, serve_models
from benchmarks.engine import free, generate, in_words, now, tiny
from benchmarks.figures import Figure, at_least, at_most
from benchmarks.http_load import Job, Record
from benchmarks.moe_layer import require_gpu
from benchmarks.serve_models import Server, server, words_of
from tmoe.config.model import ModelConfig
from tmoe.config.presets import presets
from tmoe.generate import Sampling

LIMITS = dict(qwen3=190.0, olmoe=190.0, rivals=170.0, rollout=150.0)  # seconds
MODELS = dict(qwen3=("qwen3-30b-a3b", 12), olmoe=("olmoe-1b-7b", None))
PROMPT = 64  # tokens of each prompt of equal lengths
SEED = 5
PATH = "/v1/completions"
START = 120.0  # seconds in which a server must answer


class Sizes(NamedTuple):
    """How much is asked."""

    streams: int = 256
    few: int = 64
    tokens: int = 512
    short: int = 64
    seconds: float = 15.0
    """of a load"""
    trial: float = 8.0
    """of a load by which a rival's settings are chosen"""
    processes: int = 4
    """of clients"""


TINY = Sizes(4, 2, 24, 8, 1.0, 0.5, 1)


def sizes_of(args: argparse.Namespace) -> Sizes:
    return TINY if args.tiny else Sizes(processes=max(1, min(4, (os.cpu_count() or 1) // 4)))


def settings_of(args: argparse.Namespace, model: str) -> ModelConfig:
    name, layers = MODELS[model]
    cfg = presets()[name].model
    cfg = replace(tiny(cfg), layers=1) if args.tiny else replace(cfg, layers=layers or cfg.layers)
    need = 2 * http_load.LONGEST + 8
    return cfg if cfg.rope.max_seq >= need else replace(cfg, rope=replace(cfg.rope, max_seq=need))


# ---- requests ----


def text_of(tokens: int, words: Sequence[str], draw: random.Random) -> str:
    """A text of exactly this number of tokens."""
    return "".join(" " + word for word in draw.choices(words, k=tokens))


def body(prompt: str, tokens: int, theirs: bool) -> dict[str, Any]:
    """theirs: for `transformers serve`, which counts tokens unasked and accepts no stream_options."""
    found = dict(prompt=prompt, max_tokens=tokens, stream=True)
    return found if theirs else found | dict(stream_options=dict(include_usage=True))


def equal_jobs(count: int, tokens: int, vocab: int, theirs: bool = False) -> list[Job]:
    draw, words = random.Random(SEED), words_of(vocab)
    return [Job(body(text_of(PROMPT, words, draw), tokens, theirs)) for _ in range(count)]


def shared_jobs(count: int, vocab: int, theirs: bool = False, seed: int = SEED) -> list[Job]:
    """Requests with lengths like ShareGPT's."""
    draw, words = random.Random(seed), words_of(vocab)
    pairs = http_load.lengths(count, seed)
    return [Job(body(text_of(prompt, words, draw), answer, theirs)) for prompt, answer in pairs]


class Load(NamedTuple):
    """What a load of requests gave."""

    records: list[Record]
    front_us: float
    """CPU microseconds of the server's process for a token"""
    engine_us: float
    """of the engine's process"""


def load(at: Server, jobs: Sequence[Job], clients: int, seconds: float, sizes: Sizes) -> Load:
    """Sends jobs. RuntimeError if a request fails, or none has an answer."""
    before = at.cpu_seconds()
    records = http_load.send(at.port, PATH, jobs, clients, seconds, sizes.processes)
    cpu = [b - a for a, b in zip(before, at.cpu_seconds(), strict=True)]
    if wrong := http_load.errors(records):
        raise RuntimeError(f"{len(wrong)} of {len(records)} requests failed: {wrong[0]}")
    tokens = sum(len(r.times) for r in records) * http_load.tokens_of_event(records)
    if not tokens:
        raise RuntimeError(f"none of {len(records)} requests has a token after {seconds:.0f} s")
    return Load(records, *(1e6 * s / tokens for s in cpu))


class Rates(NamedTuple):
    """Tokens a second: over a whole call, and while all answers are under way."""

    whole: float
    steady: float


def rates_of(records: Sequence[Record]) -> Rates:
    """Of answers to requests that are sent at once."""
    begin, end = min(r.sent for r in records), max(r.over for r in records)
    steady = http_load.all_under_way(records)
    return Rates(sum(r.tokens for r in records) / (end - begin), http_load.speed(records, *steady))


# ---- tmoe ----


def engine_rates(folder: Path, args: argparse.Namespace, streams: int, sizes: Sizes) -> Rates:
    """Rates of `Engine.generate`, the better of two rounds."""
    loaded = serve_models.load_drawn(folder, device=args.device)
    engine = loaded.engine(streams)
    jobs = equal_jobs(streams, 0, loaded.model.cfg.vocab)
    prompts = [loaded.tokenizer.encode(job.body["prompt"]).tolist() for job in jobs]
    assert {len(ids) for ids in prompts} == {PROMPT}

    def seconds(tokens: int) -> float:
        began = now()
        answers = engine.generate(prompts, 1, Sampling(max_tokens=tokens, seed=SEED))
        assert all(len(answer.ids) == tokens for (answer,) in answers)
        return now() - began

    seconds(sizes.short)
    rounds = [(seconds(sizes.short), seconds(sizes.tokens)) for _ in range(2)]
    more = streams * (sizes.tokens - sizes.short)
    whole = max(streams * sizes.tokens / long for _, long in rounds)
    steady = max(more / max(long - short, 1e-9) for short, long in rounds)
    return Rates(whole, steady)


def tmoe_flags(args: argparse.Namespace, sizes: Sizes) -> list[str]:
    most = 2 * http_load.LONGEST
    device = ["--device", "cpu"] if args.device == "cpu" else []
    return ["--slots", str(sizes.streams), "--max-len", str(most), "--waiting", "4096", *device]


def transformers_flags(args: argparse.Namespace) -> list[str]:
    device = ["--device", "cpu"] if args.device == "cpu" else []
    return ["--continuous-batching", "--host", "127.0.0.1", *device]


@contextmanager
def folder_of(args: argparse.Namespace, model: str) -> Iterator[tuple[Path, ModelConfig]]:
    cfg = settings_of(args, model)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / model
        yield serve_models.write_folder(folder, cfg, "float32" if args.device == "cpu" else "bfloat16"), cfg


def keep(args: argparse.Namespace, part: str, found: dict[str, Any]) -> None:
    figures.keep(args, "serve", part, found)


def guarded(part: str, what: str, run: Callable[[], Iterator[Figure]]) -> Iterator[Figure]:
    """The figures of a measurement; an error becomes a figure."""
    try:
        yield from run()
    except Exception as error:
        yield Figure(part, what, in_words(error), "no error", False)


def beside_engine(part: str, args: argparse.Namespace) -> Iterator[Figure]:
    """The figures of a model's server beside those of its engine."""
    sizes = sizes_of(args)
    with folder_of(args, part) as (folder, cfg):
        ours: dict[int, Rates] = {}
        for streams in (sizes.streams, 1):
            ours[streams] = engine_rates(folder, args, streams, sizes)
            free()
            keep(args, part, dict(what="engine", streams=streams, rates=ours[streams]._asdict()))
        log = Path(folder).parent / "serve.log"
        with server("tmoe", folder, tmoe_flags(args, sizes), log, START) as at:
            warm = equal_jobs(sizes.streams, sizes.short, cfg.vocab)
            for streams in (sizes.streams, 1):
                load(at, warm[:streams], streams, 60, sizes)

                def equal(streams: int = streams) -> Iterator[Figure]:
                    yield from equal_load(part, args, at, cfg, streams, ours[streams])

                yield from guarded(part, f"{streams} equal answers", equal)
            yield from guarded(part, "shared lengths", lambda: mixed_loads(part, args, at, cfg))


def equal_load(
    part: str, args: argparse.Namespace, at: Server, cfg: ModelConfig, streams: int, ours: Rates
) -> Iterator[Figure]:
    """The same prompts as the engine had, each by one client."""
    sizes = sizes_of(args)
    jobs = equal_jobs(streams, sizes.tokens, cfg.vocab)
    found = [load(at, jobs, streams, 90, sizes) for _ in range(2)]
    best = max(found, key=lambda one: rates_of(one.records).whole)
    rates, joined = rates_of(best.records), http_load.tokens_of_event(best.records)
    line: dict[str, Any] = dict(what="equal", streams=streams, rates=rates._asdict(), engine=ours._asdict())
    line |= dict(front_us=best.front_us, engine_us=best.engine_us, tokens_of_event=joined)
    keep(args, part, line | dict(all=[rates_of(one.records)._asdict() for one in found]))
    bar = 0.9 if streams > 1 else 0.95
    for name in Rates._fields:
        served, alone = getattr(rates, name), getattr(ours, name)
        how = "whole call" if name == "whole" else "all under way"
        what = f"{streams} x {sizes.tokens}, {how}: {served:,.0f} tokens/s of Engine.generate's {alone:,.0f}"
        yield at_least(part, what, served / alone, bar)
    yield Figure(part, f"{streams} streams: front's CPU time of a token", f"{best.front_us:.1f} us")
    yield Figure(
        part, f"{streams} streams: engine's process' CPU time of a token", f"{best.engine_us:.1f} us"
    )
    yield at_most(part, f"{streams} streams: tokens of an event", joined, 1.1 if streams > 1 else None)


def describe(part: str, what: str, found: Load, since: float, until: float) -> tuple[list[Figure], dict]:
    """Figures of a load, and the same for the file."""
    records = found.records
    gaps, first = http_load.gaps(records, since), http_load.first_tokens(records)
    median, p99 = http_load.part(gaps, 0.5), http_load.part(gaps, 0.99)
    speed = http_load.speed(records, since, until)
    line = dict(what=what, tokens_per_s=speed, gap_ms=[1e3 * median, 1e3 * p99, 1e3 * gaps[-1]])
    line |= dict(first_ms=[1e3 * http_load.part(first, share) for share in (0.5, 0.99)])
    line |= dict(requests=len(records), over=sum(bool(record.over) for record in records))
    line |= dict(front_us=found.front_us, engine_us=found.engine_us)
    line |= dict(tokens_of_event=http_load.tokens_of_event(records))
    begun = f"first token after {line['first_ms'][0]:.0f} ms, p99 {line['first_ms'][1]:.0f}"
    spread = f"gaps {1e3 * median:.1f} ms, p99 {1e3 * p99:.1f}, longest {1e3 * gaps[-1]:.1f}"
    shown = [Figure(part, f"{what}: {begun}; {spread}", f"{speed:,.0f} tokens/s")]
    return shown, line


def mixed_loads(part: str, args: argparse.Namespace, at: Server, cfg: ModelConfig) -> Iterator[Figure]:
    sizes = sizes_of(args)
    since, rate = 0.2 * sizes.seconds, 0.0
    for clients in (sizes.few, sizes.streams):
        jobs = shared_jobs(40 * clients, cfg.vocab)
        found = load(at, jobs, clients, sizes.seconds, sizes)
        shown, line = describe(part, f"closed, {clients} clients", found, since, sizes.seconds)
        keep(args, part, line)
        yield from shown
        median, p99, _ = line["gap_ms"]
        if clients == sizes.few:
            yield at_most(part, f"closed, {clients} clients: p99 gap, of the median", p99 / median, 3)
        rate = 0.7 * line["over"] / sizes.seconds
    jobs = shared_jobs(max(2, int(rate * sizes.seconds)), cfg.vocab, seed=SEED + 1)
    times = http_load.arrivals(len(jobs), rate, SEED) if rate else [0.0] * len(jobs)
    timed = [replace(job, at=when) for job, when in zip(jobs, times, strict=True)]
    found = load(at, timed, len(timed), 2 * sizes.seconds, sizes)
    what = f"Poisson, {rate:.1f} requests/s"
    shown, line = describe(part, what, found, since, max(times[-1], since + 0.1))
    keep(args, part, line)
    yield from shown


def qwen3(args: argparse.Namespace) -> Iterator[Figure]:
    yield from beside_engine("qwen3", args)


def olmoe(args: argparse.Namespace) -> Iterator[Figure]:
    yield from beside_engine("olmoe", args)


# ---- rivals ----

SERVERS: dict[str, list[str]] = {
    "defaults": [],
    "CUDA graphs": ["--cb-use-cuda-graph"],
    "FlashAttention": ["--attn-implementation", "flash_attention_2"],
}


def theirs(
    args: argparse.Namespace, folder: Path, flags: Sequence[str], seconds: float, single: bool
) -> tuple[Load, Load | None]:
    """The closed load of all clients by `transformers serve`, and one stream, each once it is warm."""
    vocab = settings_of(args, "qwen3").vocab
    sizes = sizes_of(args)
    log = folder.parent / "transformers.log"
    with server("transformers", folder, [*transformers_flags(args), *flags], log, START) as at:
        jobs = shared_jobs(40 * sizes.streams, vocab, theirs=True)
        load(at, jobs[: sizes.streams], sizes.streams, sizes.trial, sizes)
        one = None
        if single:
            alone = equal_jobs(1, sizes.tokens // 4, vocab, theirs=True)
            load(at, alone, 1, 30, sizes)
            one = load(at, alone, 1, 30, sizes)
        return load(at, jobs, sizes.streams, seconds, sizes), one


def closed_speed(found: Load, seconds: float) -> float:
    return http_load.speed(found.records, 0.2 * seconds, seconds)


def rivals(args: argparse.Namespace) -> Iterator[Figure]:
    sizes = sizes_of(args)
    with folder_of(args, "qwen3") as (folder, cfg):
        speeds: dict[str, float] = {}
        for name, flags in SERVERS.items():
            try:
                found, _ = theirs(args, folder, flags, sizes.trial, False)
                speeds[name] = closed_speed(found, sizes.trial)
                shown = f"{speeds[name]:,.0f} tokens/s"
            except Exception as error:
                shown = in_words(error)
            keep(args, "rivals", dict(what="trial", settings=name, flags=flags, found=shown))
            yield Figure("rivals", f"transformers serve, {sizes.trial:.0f} s, {name}", shown)
        if not speeds:
            yield Figure("rivals", "transformers serve", "none of its settings runs", "runs", False)
            return
        best = max(speeds, key=speeds.__getitem__)
        whole, one = theirs(args, folder, SERVERS[best], sizes.seconds, True)
        window = 0.2 * sizes.seconds, sizes.seconds
        shown, line = describe("rivals", f"transformers serve, {best}", whole, *window)
        assert one is not None
        single = rates_of(one.records).steady
        keep(args, "rivals", line | dict(settings=best, one_stream=single))
        yield from shown
        log = folder.parent / "serve.log"
        with server("tmoe", folder, tmoe_flags(args, sizes), log, START) as at:
            jobs = shared_jobs(40 * sizes.streams, cfg.vocab)
            load(at, jobs[: sizes.streams], sizes.streams, sizes.trial, sizes)
            ours = load(at, jobs, sizes.streams, sizes.seconds, sizes)
            alone = equal_jobs(1, sizes.tokens // 4, cfg.vocab)
            load(at, alone, 1, 30, sizes)
            our_one = rates_of(load(at, alone, 1, 30, sizes).records).steady
        shown, mine = describe(
            "rivals", "tmoe serve, the same load", ours, 0.2 * sizes.seconds, sizes.seconds
        )
        keep(args, "rivals", mine | dict(one_stream=our_one))
        yield from shown
        what = f"tmoe serve, of transformers serve: closed, {sizes.streams} clients"
        yield at_least("rivals", what, mine["tokens_per_s"] / line["tokens_per_s"], 1.0)
        yield at_least("rivals", "tmoe serve, of transformers serve: one stream", our_one / single, 1.0)


def rollout(args: argparse.Namespace) -> Iterator[Figure]:
    sizes = sizes_of(args)
    with folder_of(args, "qwen3") as (folder, cfg):
        ours = engine_rates(folder, args, sizes.streams, sizes)
        free()
        whole = f"{sizes.streams} x {sizes.tokens}"
        yield Figure("rollout", f"{whole}, Engine.generate", f"{ours.whole:,.0f} tokens/s")
        model = serve_models.transformers_model(folder, args.device)
        draw = torch.Generator().manual_seed(SEED)
        prompts = torch.randint(256, cfg.vocab, (sizes.streams, PROMPT), generator=draw).tolist()
        ways = {"defaults": generate(model, False, False), "grouped_mm": generate(model, True, False)}
        if args.device == "cuda":
            ways["grouped_mm, static cache, compiled"] = generate(model, True, True)
        speeds: dict[str, float] = {}
        for name, run in ways.items():
            try:
                run(prompts, 8, False)
                began = now()
                run(prompts, sizes.short // 2, False)
                speeds[name] = sizes.streams * (sizes.short // 2) / (now() - began)
                shown = f"{speeds[name]:,.0f} tokens/s"
            except Exception as error:
                shown = in_words(error)
            free()
            keep(args, "rollout", dict(what="trial", settings=name, found=shown))
            yield Figure("rollout", f"generate, {sizes.short // 2} tokens, {name}", shown)
        best = max(speeds, key=speeds.__getitem__)
        began = now()
        ways[best](prompts, sizes.tokens, False)
        theirs_whole = sizes.streams * sizes.tokens / (now() - began)
        keep(args, "rollout", dict(what="whole", engine=ours._asdict(), settings=best, generate=theirs_whole))
        yield Figure("rollout", f"{whole}, transformers' generate, {best}", f"{theirs_whole:,.0f} tokens/s")
        yield at_least("rollout", f"{whole}: Engine.generate, of generate", ours.whole / theirs_whole, None)


PARTS: figures.Parts = dict(qwen3=qwen3, olmoe=olmoe, rivals=rivals, rollout=rollout)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.flags(p, PARTS, list(PARTS), 540)
    args = p.parse_args()
    if args.device == "cuda":
        require_gpu(p)
    figures.run("benchmarks.serve", args, PARTS, LIMITS)


if __name__ == "__main__":
    main()
