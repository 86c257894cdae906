"""Speed of `tmoe serve` over HTTP, against its own engine, `transformers serve` and transformers' generate.

    python -m benchmarks.serve --json FOLDER                    # one GPU, at most 8 minutes, the table last
    python -m benchmarks.serve --parts olmoe qwen3              # the server beside the engine, 4 minutes
    python -m benchmarks.serve --device cpu --tiny              # does it run?

qwen3, olmoe: qwen3-30b-a3b cut to 12 layers, and olmoe-1b-7b. First `Engine.generate` makes 512 tokens for
256 prompts, and for one; then a server of the same model answers the same prompts, each client with one
request. Tokens a second are compared over the whole call, and while all answers are under way. The latter
figure of `generate` is computed from two lengths, so that it has no prefill and no capture of graphs.

Then two loads of prompts and answers with lengths like ShareGPT's, made from a seed: closed, 64 or 256
clients each with one request after the other; and Poisson, with 0.7 of the requests that 256 clients had in
the same time. Times are taken at the client, for each event of a stream. A server may join tokens that its
client could not have yet: "tokens of an event" shows it.

rollout: 256 answers of 512 tokens by transformers' generate and by `Engine.generate`, of qwen3's cut. Each
setting of transformers runs for a short time, and the best one makes the whole. "grouped_mm" keeps that
product of the experts while decoding; by default, transformers switches to one that copies an expert's
weights for each token. Its compiled static cache is left out: benchmarks.engine measured it at half the speed
of grouped_mm.

rivals: the closed load of 256 clients, and one stream, by `transformers serve` with continuous batching, of
qwen3's cut. Each of its settings is warmed up and has the whole load; the best one counts.

rollout and rivals take the figures of part qwen3 from the same call; alone, they measure tmoe themselves.

Weights are drawn in the same way for all, in bf16; texts are words of the same tokenizer, sampled at
temperature 1, and no token ends an answer. vLLM and SGLang are not compared: their wheels could not be copied
to the GPUs at hand. FlashAttention is a setting of transformers only where flash_attn is installed.

The front's CPU time of a token is that of the server's process, the engine's excluded. `transformers serve`
has one process for both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import figures, http_load, serve_models
from benchmarks.engine import free, generate, in_words, now, tiny
from benchmarks.figures import Figure, at_least, at_most
from benchmarks.http_load import Job, Record
from benchmarks.moe_layer import require_gpu
from benchmarks.serve_models import Server, server, words_of
from benchmarks.train import write_line
from tmoe.config.model import ModelConfig
from tmoe.config.presets import presets
from tmoe.generate import Sampling

LIMITS = dict(qwen3=220.0, olmoe=200.0, rollout=120.0, rivals=190.0)  # seconds
MODELS = dict(qwen3=("qwen3-30b-a3b", 12), olmoe=("olmoe-1b-7b", None))
PROMPT = 64  # tokens of each prompt of equal lengths
SEED = 5
PATH = "/v1/completions"
SHARED = "numbers.jsonl"  # of the parts of a call
START = 240.0  # seconds in which a server must answer


class Sizes(NamedTuple):
    """How much is asked."""

    streams: int = 256
    few: int = 64
    tokens: int = 512
    short: int = 64
    seconds: float = 10.0
    """of a load"""
    warm: float = 6.0
    """of a rival's load before"""
    processes: int = 4
    """of clients"""


TINY = Sizes(4, 2, 24, 8, 3.0, 3.0, 1)


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


def mixed_jobs(count: int, vocab: int, seed: int, theirs: bool = False) -> list[Job]:
    """Requests with lengths like ShareGPT's. Loads have different seeds, so that no prompt is cached yet."""
    draw, words = random.Random(seed), words_of(vocab)
    pairs = http_load.lengths(count, seed)
    return [Job(body(text_of(prompt, words, draw), answer, theirs)) for prompt, answer in pairs]


def closed_jobs(clients: int, vocab: int, theirs: bool = False) -> list[Job]:
    """More requests than clients can have answered in a load."""
    return mixed_jobs(clients * (40 if clients <= 64 else 15), vocab, SEED + clients, theirs)


class Load(NamedTuple):
    """The results of a load of requests."""

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
    """The rates of answers to requests that are sent at once."""
    begin, end = min(r.sent for r in records), max(r.over for r in records)
    whole = sum(r.tokens for r in records) / (end - begin)
    since, until = http_load.all_under_way(records)
    # a client that reads all its events at once has no time between them
    return Rates(whole, http_load.speed(records, since, until) if until > since else whole)


# ---- tmoe ----


def engine_rates(
    folder: Path, args: argparse.Namespace, counts: Sequence[int], sizes: Sizes
) -> dict[int, Rates]:
    """Rates of `Engine.generate` by the number of streams, the better of two rounds."""
    loaded = serve_models.load_drawn(folder, device=args.device)
    found = {}
    for streams in counts:
        engine = loaded.engine(streams)
        jobs = equal_jobs(streams, 0, loaded.model.cfg.vocab)
        prompts = [loaded.tokenizer.encode(job.body["prompt"]).tolist() for job in jobs]
        assert {len(ids) for ids in prompts} == {PROMPT}

        def seconds(tokens: int, engine: Any = engine, prompts: Any = prompts) -> float:
            began = now()
            answers = engine.generate(prompts, 1, Sampling(max_tokens=tokens, seed=SEED))
            assert all(len(answer.ids) == tokens for (answer,) in answers)
            return now() - began

        seconds(sizes.short)
        rounds = [(seconds(sizes.short), seconds(sizes.tokens)) for _ in range(2)]
        more = streams * (sizes.tokens - sizes.short)
        whole = max(streams * sizes.tokens / long for _, long in rounds)
        found[streams] = Rates(whole, max(more / max(long - short, 1e-9) for short, long in rounds))
    return found


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


def remember(args: argparse.Namespace, name: str, value: float) -> None:
    """Keeps a number for the later parts of the call."""
    if args.figures:
        write_line(args.figures.parent / SHARED, dict(name=name, value=value))


def remembered(args: argparse.Namespace, name: str) -> float | None:
    """The number that an earlier part of the call has kept."""
    file = args.figures.parent / SHARED if args.figures else None
    lines = file.read_text().splitlines() if file and file.exists() else []
    found = [line["value"] for line in map(json.loads, lines) if line["name"] == name]
    return found[-1] if found else None


def guarded(part: str, what: str, run: Callable[[], Iterator[Figure]]) -> Iterator[Figure]:
    """The figures of a measurement; an error becomes a figure."""
    try:
        yield from run()
    except Exception as error:
        yield Figure(part, what, in_words(error), "no error", False)


def beside_engine(part: str, args: argparse.Namespace) -> Iterator[Figure]:
    """The figures of a model's server, against those of its engine."""
    sizes = sizes_of(args)
    with folder_of(args, part) as (folder, cfg):
        ours = engine_rates(folder, args, (sizes.streams, 1), sizes)
        free()
        for streams, rates in ours.items():
            keep(args, part, dict(what="engine", streams=streams, rates=rates._asdict()))
        remember(args, f"{part}: engine", ours[sizes.streams].whole)
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
    remember(args, f"{part}: {streams} equal", rates.steady)
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
    line: dict[str, Any] = dict(
        what=what, tokens_per_s=speed, gap_ms=[1e3 * median, 1e3 * p99, 1e3 * gaps[-1]]
    )
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
        found = load(at, closed_jobs(clients, cfg.vocab), clients, sizes.seconds, sizes)
        shown, line = describe(part, f"closed, {clients} clients", found, since, sizes.seconds)
        keep(args, part, line)
        remember(args, f"{part}: {clients} closed", line["tokens_per_s"])
        yield from shown
        median, p99, _ = line["gap_ms"]
        if clients == sizes.few:
            yield at_most(part, f"closed, {clients} clients: p99 gap, of the median", p99 / median, 3)
        rate = 0.7 * line["over"] / sizes.seconds
    jobs = mixed_jobs(max(2, int(rate * sizes.seconds)), cfg.vocab, SEED + 1)
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


class Rival(NamedTuple):
    """The results of `transformers serve`."""

    line: dict[str, Any]
    """figures of the closed load"""
    shown: list[Figure]
    single: float
    """tokens a second of one stream"""


def theirs(args: argparse.Namespace, folder: Path, name: str) -> Rival:
    """The closed load of all clients by `transformers serve`, and one stream, each once it is warm."""
    vocab, sizes = settings_of(args, "qwen3").vocab, sizes_of(args)
    log = folder.parent / "transformers.log"
    with server("transformers", folder, [*transformers_flags(args), *SERVERS[name]], log, START) as at:
        alone = equal_jobs(1, sizes.tokens // 4, vocab, theirs=True)
        load(at, alone, 1, START, sizes)  # it begins with its first request
        one = load(at, alone, 1, START, sizes)
        warm = mixed_jobs(2 * sizes.streams, vocab, SEED + 2, theirs=True)
        http_load.send(at.port, PATH, warm, sizes.streams, sizes.warm, sizes.processes)
        found = load(at, closed_jobs(sizes.streams, vocab, theirs=True), sizes.streams, sizes.seconds, sizes)
    window = 0.2 * sizes.seconds, sizes.seconds
    what = f"transformers serve, {name}: closed, {sizes.streams} clients"
    shown, line = describe("rivals", what, found, *window)
    return Rival(line, shown, rates_of(one.records).steady)


def ours_alone(args: argparse.Namespace, folder: Path, cfg: ModelConfig) -> tuple[float, float]:
    """Tokens a second of `tmoe serve`: the closed load of all clients, and one stream."""
    sizes = sizes_of(args)
    with server("tmoe", folder, tmoe_flags(args, sizes), folder.parent / "serve.log", START) as at:
        alone = equal_jobs(1, sizes.tokens // 4, cfg.vocab)
        load(at, alone, 1, START, sizes)
        single = rates_of(load(at, alone, 1, START, sizes).records).steady
        load(at, equal_jobs(sizes.streams, sizes.short, cfg.vocab), sizes.streams, START, sizes)
        found = load(at, closed_jobs(sizes.streams, cfg.vocab), sizes.streams, sizes.seconds, sizes)
    return http_load.speed(found.records, 0.2 * sizes.seconds, sizes.seconds), single


def rivals(args: argparse.Namespace) -> Iterator[Figure]:
    sizes = sizes_of(args)
    with folder_of(args, "qwen3") as (folder, cfg):
        known: list[Rival] = []
        for name in SERVERS:
            if name == "FlashAttention" and find_spec("flash_attn") is None:
                continue
            try:
                known.append(theirs(args, folder, name))
                keep(args, "rivals", known[-1].line | dict(settings=name, one_stream=known[-1].single))
                yield from known[-1].shown
            except Exception as error:
                yield Figure("rivals", f"transformers serve, {name}", in_words(error))
        if not known:
            yield Figure("rivals", "transformers serve", "none of its settings runs", "runs", False)
            return
        closed, single = (
            remembered(args, f"qwen3: {sizes.streams} closed"),
            remembered(args, "qwen3: 1 equal"),
        )
        mine = (closed, single) if closed and single else ours_alone(args, folder, cfg)
        best = [max(rival.line["tokens_per_s"] for rival in known), max(rival.single for rival in known)]
        keep(args, "rivals", dict(what="tmoe serve", tokens_per_s=mine[0], one_stream=mine[1], best=best))
        for what, a, b in zip((f"closed, {sizes.streams} clients", "one stream"), mine, best, strict=True):
            shown = f"{what}: tmoe serve's {a:,.0f} tokens/s, of transformers serve's {b:,.0f}"
            yield at_least("rivals", shown, a / b, 1.0)


def rollout(args: argparse.Namespace) -> Iterator[Figure]:
    sizes, whole = sizes_of(args), "qwen3: engine"
    asked = f"{sizes.streams} x {sizes.tokens}"
    with folder_of(args, "qwen3") as (folder, cfg):
        ours = (
            remembered(args, whole)
            or engine_rates(folder, args, (sizes.streams,), sizes)[sizes.streams].whole
        )
        free()
        model = serve_models.transformers_model(folder, args.device)
        draw = torch.Generator().manual_seed(SEED)
        prompts = torch.randint(256, cfg.vocab, (sizes.streams, PROMPT), generator=draw).tolist()
        ways = {"grouped_mm": generate(model, True, False), "defaults": generate(model, False, False)}
        speeds: dict[str, float] = {}
        for name, run in ways.items():
            try:
                run(prompts, 4, False)
                began = now()
                run(prompts, sizes.short // 4, False)
                speeds[name] = sizes.streams * (sizes.short // 4) / (now() - began)
                shown = f"{speeds[name]:,.0f} tokens/s"
            except Exception as error:
                shown = in_words(error)
            free()
            keep(args, "rollout", dict(what="trial", settings=name, found=shown))
            yield Figure("rollout", f"generate, {sizes.short // 4} tokens, {name}", shown)
        if not speeds:
            yield Figure("rollout", "transformers' generate", "none of its settings runs", "runs", False)
            return
        best = max(speeds, key=speeds.__getitem__)
        began = now()
        ways[best](prompts, sizes.tokens, False)
        other = sizes.streams * sizes.tokens / (now() - began)
        keep(args, "rollout", dict(what="whole", engine=ours, settings=best, generate=other))
        what = f"{asked}: Engine.generate's {ours:,.0f} tokens/s, of generate's {other:,.0f} ({best})"
        yield at_least("rollout", what, ours / other, 1.0)


PARTS: figures.Parts = dict(qwen3=qwen3, olmoe=olmoe, rollout=rollout, rivals=rivals)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.flags(p, PARTS, list(PARTS), 465)
    args = p.parse_args()
    if args.device == "cuda":
        require_gpu(p)
    figures.run("benchmarks.serve", args, PARTS, LIMITS)


if __name__ == "__main__":
    main()
