"""Times attention over pages and the sampler against what one would use without them.

    python -m benchmarks.decode                                   # all shapes, bf16
    python -m benchmarks.decode --parts sampler                   # the sampler alone
    python -m benchmarks.decode --json benchmarks/results/decode/h200.jsonl
    python -m benchmarks.decode --device cpu --tiny               # does it run?

Attention is timed for one layer of Qwen3-30B, of OLMoE and of DeepSeek-V2-Lite (over its latents), with 256
sequences of 1024 tokens and with one sequence. torch's scaled_dot_product_attention and compiled
flex_attention get the same keys, gathered into dense tensors before the clock starts. "share" is the time to
read keys and values, or logits, once at 2.9 TB/s (H100) or 4.2 (H200), divided by the measured time.

The sampler draws from 256 rows of 151,936 fp32 logits, with and without filters. It is compared with plain
PyTorch that sorts (compiled), and with FlashInfer if it is installed. inductor cannot compile the sum of
sorted rows that top-p needs (SplitScan, torch 2.11), so that rival is named as not run. Expected with top-k
and top-p: 160 us on an H100, 130 on an H200. Expected with top-p alone: at most 200 us on an H200, not yet
measured. Rows with different settings take at most 1.1 times the slowest of the settings.

Every contestant's result is checked first; a contestant that is wrong or missing is named.
"""

import argparse
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.logprobs import host_ms
from benchmarks.moe_layer import require_gpu, time_all
from benchmarks.train import write_line
from tmoe.generate.sampler import Sampling
from tmoe.ops.decode.attention import Query, decode_attention, plain
from tmoe.ops.decode.sample import Keys, RowFilters, keep, sample

# name -> B, tokens, H, G, C, channels of a value
ATTENTION = {
    "qwen3-30b 256": (256, 1024, 32, 4, 128, 128),
    "olmoe 256": (256, 1024, 16, 16, 128, 128),
    "latents 256": (256, 1024, 16, 1, 576, 512),
    "qwen3-30b 1": (1, 1024, 32, 4, 128, 128),
    "qwen3-30b 1 long": (1, 32768, 32, 4, 128, 128),
}
SAMPLER = {
    "no filter": Sampling(),
    "top-k 20, top-p .95": Sampling(temperature=0.6, top_k=20, top_p=0.95),
    "top-p .95": Sampling(top_p=0.95),
    "min-p .05": Sampling(min_p=0.05),
    "greedy": Sampling(temperature=0.0),
}
PARTS = ("attention", "sampler")
SPLIT_SCAN = "not run: inductor cannot compile cumsum of such rows (SplitScan)"
TB_S = {"H100": 2.9, "H200": 4.2}
PAGE = 128


def paged(shape: tuple[int, ...], device: str) -> tuple[Tensor, ...]:
    """Queries, pages of keys and values in a random order, table, lengths."""
    B, S, H, G, C, CV = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    M = -(-S // PAGE)
    k = torch.randn(B * M, PAGE, G, C, device=device, dtype=dtype)
    v = k[..., :CV] if C != CV else torch.randn_like(k)
    q = torch.randn(B, H, C, device=device, dtype=dtype)
    table = torch.randperm(B * M, device=device).view(B, M).int()
    return q, k, v, table, torch.full((B,), S, dtype=torch.int32, device=device)


def attention_contestants(inputs: tuple[Tensor, ...]) -> dict[str, Callable[[], Tensor]]:
    """Functions that return o_BHC."""
    q, k, v, table, lengths = inputs
    S, scale = int(lengths[0]), q.shape[-1] ** -0.5
    H, G = q.shape[1], k.shape[2]
    keys, values = [t[table.long()].flatten(1, 2)[:, :S].transpose(1, 2).contiguous() for t in (k, v)]
    rows = q.unflatten(1, (G, H // G))  # a group's heads as rows of one product

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(rows, keys, values, scale=scale).flatten(1, 2)

    compiled = torch.compile(flex_attention, dynamic=False)

    def flex() -> Tensor:
        return compiled(q[:, :, None], keys, values, scale=scale, enable_gqa=True)[:, :, 0]

    return {"tmoe": lambda: decode_attention(*inputs, scale=scale), "sdpa, dense": sdpa, "flex, dense": flex}


def sorted_sampler(logits: Tensor, sampling: Sampling) -> Tensor:
    """The sampler that one would write in plain PyTorch: sort, softmax, cumsum, masks, multinomial."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    z, order = (logits.float() / sampling.temperature).sort(-1, descending=True)
    if sampling.top_k:
        z = z.masked_fill(z < z[:, sampling.top_k - 1 : sampling.top_k], float("-inf"))
    if sampling.top_p < 1:
        p = z.softmax(-1)
        z = z.masked_fill(p.cumsum(-1) - p > sampling.top_p, float("-inf"))
    p = z.softmax(-1)
    p = p.masked_fill(p < sampling.min_p * p[:, :1], 0.0)
    at = (p / torch.empty_like(p).exponential_()).argmax(-1)
    return order.gather(-1, at[:, None])[:, 0]


def sampler_contestants(logits: Tensor, sampling: Sampling) -> dict[str, Callable[[], Tensor]]:
    """Functions that return tokens."""
    B = len(logits)
    number = torch.arange(B, device=logits.device)
    keys = Keys(0, number, number, number)
    by_sort = torch.compile(sorted_sampler, dynamic=False)

    def compiled() -> Tensor:
        if sampling.top_p < 1:
            raise NotImplementedError(SPLIT_SCAN)
        return by_sort(logits, sampling)

    def flashinfer() -> Tensor:
        import flashinfer  # pyrefly: ignore[missing-import]

        p = (logits.float() / (sampling.temperature or 1)).softmax(-1)
        k, top_p = sampling.top_k or logits.shape[1], sampling.top_p
        return flashinfer.sampling.top_k_top_p_sampling_from_probs(p, k, top_p)

    contestants = {
        "tmoe": lambda: sample(logits, keys, sampling).tokens_B,
        "torch, sorted": lambda: sorted_sampler(logits, sampling),
    }
    if logits.is_cuda:
        contestants["torch, sorted, compiled"] = compiled
    if not sampling.min_p and sampling.temperature:
        contestants["flashinfer"] = flashinfer
    return contestants


def mixed(B: int, V: int, device: str, rounds: int) -> tuple[dict, dict, float]:
    """The result of `measure` for rows with different settings, and for each of the settings in all rows."""
    logits = torch.randn(B, V, device=device) * 3
    number = torch.arange(B, device=device)
    hows = [list(SAMPLER.values())[i % len(SAMPLER)] for i in range(B)]
    real = [[how.temperature for how in hows], [1 - how.top_p for how in hows], [how.min_p for how in hows]]
    heat, cut, least = (torch.tensor(values, device=device) for values in real)
    filters = RowFilters(heat, torch.tensor([how.top_k for how in hows], device=device), cut, least)
    keys = Keys(torch.zeros_like(number), number, number, number)
    alone = Keys(0, number, number, number)
    contestants = {"mixed settings": lambda: sample(logits, keys, filters).tokens_B}
    for name, how in SAMPLER.items():
        contestants[f"all rows: {name}"] = lambda how=how: sample(logits, alone, how).tokens_B
    each = {how: sample(logits, alone, how).tokens_B for how in SAMPLER.values()}
    want = torch.stack([each[how][row] for row, how in enumerate(hows)])
    valid = {id(tokens): tokens for tokens in (want, *each.values())}.values()

    def right(tokens: Tensor) -> bool:
        """Whether the tokens are those of mixed settings, or of one setting."""
        return any(torch.equal(tokens, expected) for expected in valid)

    return *measure(contestants, right, rounds, device == "cuda"), logits.numel() * logits.element_size()


def measure(
    contestants: dict[str, Callable[[], Tensor]], right: Callable[[Tensor], bool], rounds: int, gpu: bool
) -> tuple[dict[str, float], dict[str, str]]:
    """({contestant: its us}, {contestant: why it has no time})."""
    runs, missing = {}, {}
    for name, run in contestants.items():
        try:
            if not right(run()):
                raise ValueError("its result is wrong")
            runs[name] = run
        except Exception as error:  # any error of a rival, reported in its own words
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    fns = list(runs.values())
    times = time_all(fns, rounds) if gpu else host_ms(fns, rounds)
    return {name: 1e3 * ms for name, ms in zip(runs, times, strict=True)}, missing


def attention(shape: tuple[int, ...], device: str, rounds: int) -> tuple[dict, dict, float]:
    """The result of `measure`, and the bytes of keys and values."""
    inputs = paged(shape, device)
    q, k, v, table, lengths = inputs
    few = slice(0, min(2, len(q)))
    want = plain(Query(q[few], k, v, table[few], lengths[few], q.shape[-1] ** -0.5, 0, None, 0.0))

    def right(got: Tensor) -> bool:
        return bool(((got[few] - want).norm() < 2e-2 * want.norm()).item())

    B, S, _, G, C, CV = shape
    bytes_ = B * S * G * (C if C != CV else C + CV) * k.element_size()
    return *measure(attention_contestants(inputs), right, rounds, device == "cuda"), bytes_


def sampler(B: int, V: int, sampling: Sampling, device: str, rounds: int) -> tuple[dict, dict, float]:
    """The result of `measure`, and the bytes of the logits."""
    logits = torch.randn(B, V, device=device) * 3

    def right(tokens: Tensor) -> bool:
        """Whether the filters keep every token."""
        z = logits / (sampling.temperature or 1)
        if sampling.temperature == 0:
            return bool((tokens == z.argmax(-1)).all())
        return bool(keep(z, sampling).gather(-1, tokens.long()[:, None]).isfinite().float().mean() > 0.99)

    measured = measure(sampler_contestants(logits, sampling), right, rounds, device == "cuda")
    return *measured, logits.numel() * logits.element_size()


def table(title: str, found: dict[str, float], missing: dict[str, str], bytes_: float, rate: float) -> str:
    lines = [f"\n{title}\n", "| contestant | us | share of reading once |", "| --- | --- | --- |"]
    for name, us in found.items():
        share = f"{bytes_ / (rate * 1e6) / us:.0%}" if rate else ""
        lines.append(f"| {name} | {us:.1f} | {share} |")
    return "\n".join(lines + [f"| {name} | {reason} | |" for name, reason in missing.items()])


def jobs(args: argparse.Namespace) -> list[tuple[str, Callable[[], tuple[dict, dict, float]]]]:
    """(title, what measures it) of each table."""
    found: list[tuple[str, Callable[[], tuple[dict, dict, float]]]] = []
    if "attention" in args.parts:
        for title, shape in ATTENTION.items():
            shape = (2, 140, *shape[2:]) if args.tiny else shape
            found.append((title, lambda shape=shape: attention(shape, args.device, args.rounds)))
    if "sampler" in args.parts:
        B, V = (2, 300) if args.tiny else (256, 151936)
        for title, sampling in SAMPLER.items():
            found.append((title, lambda s=sampling: sampler(B, V, s, args.device, args.rounds)))
        found.append(("rows with different settings", lambda: mixed(B, V, args.device, args.rounds)))
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--tiny", action="store_true", help="two sequences of 140 tokens, 300 logits")
    p.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS, help="what is timed")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--json", type=Path, help="append each table to this file, one JSON object a line")
    args = p.parse_args()
    gpu = args.device == "cuda"
    if gpu:
        require_gpu(p)
    name = torch.cuda.get_device_name() if gpu else ""
    rate = next((rate for kind, rate in TB_S.items() if kind in name), 0.0)
    about: dict[str, Any] = {
        "gpu": name or None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": str(date.today()),
        "command": " ".join(["python -m benchmarks.decode", *sys.argv[1:]]),
    }
    print(about)
    torch.manual_seed(0)
    for title, job in jobs(args):
        times, missing, bytes_ = job()
        print(table(title, times, missing, bytes_, rate), flush=True)
        if args.json:
            write_line(args.json, {"what": title, "us": times, "missing": missing, **about})


if __name__ == "__main__":
    main()
