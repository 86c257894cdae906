"""Times log-probs with entropy, and a policy loss with its gradients, against TRL, Liger and plain PyTorch.

    python -m benchmarks.logprobs                                  # T 131,072, D 2048, V 151,936, bf16
    python -m benchmarks.logprobs --sequences 8 32 256 --json benchmarks/results/logprobs/h200.jsonl
    python -m benchmarks.logprobs --device cpu --sequences 4 --length 16 --dim 32 --vocab 100   # does it run?

Expected at the full size: log-probs with entropy 145 ms on an H200 (160 on an H100), the policy loss with
gradients by h and W 450 ms (480), each with at most 0.3 GiB in addition to its results.

Every contestant gets the same h, head, targets, old log-probs and advantages: sequences of equal length, all
tokens trained, DAPO's loss (clip .2 and .28), the mean over tokens. Before a contestant is timed, its
log-probs, entropies and gradients are compared with fp64 on a few sequences. A contestant that is not
installed, fails or is wrong is named with the reason. A rival runs at the fastest of some settings, which is
named. If a rival has only log-probs, its policy loss is tmoe's, computed from them.

Times are medians over rounds in which all contestants alternate (`moe_layer.time_all`). "extra" is the peak
minus
the memory in use before and the results: log-probs and entropies, or dh and dW as they are returned.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.moe_layer import require_gpu, time_all
from benchmarks.train import write_line
from tmoe import ops
from tmoe.ops import reference
from tmoe.post.losses.tokens import clipped

LOW, HIGH = 0.2, 0.28
LIMIT = 2e-2  # relative error in bf16: logits are rounded to 2^-9, gradients once more


class Inputs(NamedTuple):
    """The inputs of every contestant: B sequences of S tokens."""

    h: Tensor  # [B * S, D]
    weight: Tensor  # [V, D]
    targets: Tensor  # [B, S]
    old: Tensor  # [B, S]
    advantages: Tensor  # [B]

    def part(self, sequences: int) -> "Inputs":
        """The first `sequences` of the sequences."""
        tokens = sequences * self.targets.shape[1]
        h = self.h.detach()[:tokens].clone().requires_grad_()
        return Inputs(h, self.weight, *(t[:sequences] for t in self[2:]))

    def loss(self, logp: Tensor) -> Tensor:
        """DAPO's loss for log-probs [B * S]."""
        return dapo(logp, self.old.flatten(), self.spread()).mean()

    def spread(self) -> Tensor:
        """The advantage of each token."""
        return self.advantages.repeat_interleave(self.targets.shape[1])


class Contestant(NamedTuple):
    """A way to compute the same results: functions of the inputs and a setting; None if it has none."""

    settings: Sequence[Any]
    logprobs: Callable[[Inputs, Any], tuple[Tensor, Tensor]] | None
    loss: Callable[[Inputs, Any], Tensor] | None


def dapo(logp: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    return clipped(logp, old, advantage, LOW, HIGH)


def make(sequences: int, length: int, D: int, V: int, device: str, dtype: torch.dtype) -> Inputs:
    """Random inputs. Old log-probs are near those of a uniform softmax, so that some ratios are clipped."""
    T = sequences * length
    h = torch.randn(T, D, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(V, D, device=device) / D**0.5).to(dtype).requires_grad_()
    targets = torch.randint(V, (sequences, length), device=device)
    with torch.no_grad():
        logp = ops.logprobs(h, weight, targets.flatten()).view(sequences, length)
    old = logp + 0.2 * torch.randn(sequences, length, device=device)
    return Inputs(h, weight, targets, old, torch.randn(sequences, device=device))


# ---- contestants ----


def tmoe() -> Contestant:
    def logprobs(x: Inputs, _: None) -> tuple[Tensor, Tensor]:
        return ops.logprobs(x.h, x.weight, x.targets.flatten(), entropy=True)

    def loss(x: Inputs, _: None) -> Tensor:
        inputs = x.old.flatten(), x.spread()
        return ops.token_loss(x.h, x.weight, x.targets.flatten(), dapo, inputs).loss / len(x.h)

    return Contestant([None], logprobs, loss)


def tmoe_compiled() -> Contestant:
    """The loss's function compiled: two launches per chunk instead of about twenty."""
    f = torch.compile(dapo, fullgraph=True)

    def loss(x: Inputs, _: None) -> Tensor:
        inputs = x.old.flatten(), x.spread()
        return ops.token_loss(x.h, x.weight, x.targets.flatten(), f, inputs).loss / len(x.h)

    return Contestant([None], None, loss)


def tmoe_apart() -> Contestant:
    """Log-probs, and the loss computed from them: logits are computed twice."""

    def loss(x: Inputs, _: None) -> Tensor:
        return x.loss(ops.logprobs(x.h, x.weight, x.targets.flatten()))

    return Contestant([None], None, loss)


def tmoe_fp32() -> Contestant:
    """tmoe with logits that are not rounded to bf16."""

    def logprobs(x: Inputs, _: None) -> tuple[Tensor, Tensor]:
        return ops.logprobs(x.h, x.weight, x.targets.flatten(), entropy=True, fp32_logits=True)

    def loss(x: Inputs, _: None) -> Tensor:
        inputs = x.old.flatten(), x.spread()
        given = x.h, x.weight, x.targets.flatten()
        return ops.token_loss(*given, dapo, inputs, fp32_logits=True).loss / len(x.h)

    return Contestant([None], logprobs, loss)


def torch_whole() -> Contestant:
    """Plain PyTorch, with the logits of all tokens at once."""

    def logprobs(x: Inputs, _: None) -> tuple[Tensor, Tensor]:
        return plain(x.h, x.weight, x.targets.flatten())

    return Contestant([None], logprobs, lambda x, _: x.loss(logprobs(x, None)[0]))


def plain(h: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = F.linear(h, weight).float().log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def torch_chunks() -> Contestant:
    """Plain PyTorch in chunks of rows, compiled, and checkpointed if there are gradients."""
    step = torch.compile(plain, dynamic=False)
    chosen = torch.compile(lambda h, w, t: plain(h, w, t)[0], dynamic=False)

    def logprobs(x: Inputs, rows: int) -> tuple[Tensor, Tensor]:
        parts = zip(x.h.split(rows), x.targets.flatten().split(rows), strict=True)
        logp, H = zip(*(step(h, x.weight, t) for h, t in parts), strict=True)
        return torch.cat(logp), torch.cat(H)

    def loss(x: Inputs, rows: int) -> Tensor:
        parts = zip(x.h.split(rows), x.targets.flatten().split(rows), strict=True)
        logp = [checkpoint(chosen, h, x.weight, t, use_reentrant=False) for h, t in parts]
        return x.loss(torch.cat(logp))

    return Contestant([1024, 4096], logprobs, loss)


def trl() -> Contestant:
    from trl.kernels import ChunkedLogProbFunction  # pyrefly: ignore[missing-import]

    def logprobs(x: Inputs, columns: int, outputs: tuple[str, ...] = ("entropy",)) -> Any:
        targets = x.targets.flatten()
        given = x.h, x.weight, None, targets, 1.0, min(columns, len(x.weight)), None, 1.0, outputs
        return ChunkedLogProbFunction.apply(*given)[:2]

    # its trainers use 32768
    return Contestant([8192, 32768, 1 << 18], logprobs, lambda x, c: x.loss(logprobs(x, c, ())[0]))


def liger_grpo() -> Contestant:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyrefly: ignore[missing-import]

    def loss(x: Inputs, sequences: int) -> Tensor:
        B, S = x.targets.shape
        module = LigerFusedLinearGRPOLoss(
            beta=0.0, use_ref_model=False, chunk_size=sequences, epsilon_low=LOW, epsilon_high=HIGH,
            loss_type="dapo",
        )  # fmt: skip
        h = x.h.view(B, S, -1)
        mask = torch.ones_like(x.targets)
        return module(h, x.weight, x.targets, mask, x.advantages, old_per_token_logps=x.old)[0]

    return Contestant([1, 4, 16], None, loss)


def liger_scaled() -> Contestant:
    """Liger's cross-entropy with entropy; logits stay on the chip if it has a kernel for the GPU."""
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module  # pyrefly: ignore[missing-import]

    Function = module.LigerFusedLinearScaledCrossEntropyFunction

    def logprobs(x: Inputs, tiles: int) -> tuple[Tensor, Tensor]:
        nll, H = Function.apply(x.h, x.weight, x.targets.flatten(), 1.0, -100, tiles, True)
        return -nll, H

    def loss(x: Inputs, tiles: int) -> Tensor:
        return x.loss(-Function.apply(x.h, x.weight, x.targets.flatten(), 1.0, -100, tiles, False))

    return Contestant([1, 2, 4], logprobs, loss)


CONTESTANTS: dict[str, Callable[[], Contestant]] = {
    "tmoe": tmoe,
    "tmoe, f compiled": tmoe_compiled,
    "tmoe, log-probs first": tmoe_apart,
    "tmoe, fp32 logits": tmoe_fp32,
    "trl": trl,
    "liger grpo": liger_grpo,
    "liger scaled": liger_scaled,
    "torch in chunks": torch_chunks,
    "torch": torch_whole,
}


# ---- measurements ----


def policy_step(loss: Callable[[Inputs, Any], Tensor]) -> Callable[[Inputs, Any], tuple[Tensor, ...]]:
    """A function that returns dh and dW."""
    return lambda x, setting: torch.autograd.grad(loss(x, setting), (x.h, x.weight))


def without_gradients(run: Callable[[Inputs, Any], Any]) -> Callable[[Inputs, Any], Any]:
    def quiet(x: Inputs, setting: Any) -> Any:
        with torch.no_grad():
            return run(x, setting)

    return quiet


def wrong(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Which results differ by more than LIMIT, in words; '' if none does."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        off = ((a.double() - b).norm() / b.norm()).item()
        if not off < LIMIT:
            return f"result {i} is off by {off:.1e}"
    return ""


def wanted(x: Inputs) -> dict[str, tuple[Tensor, ...]]:
    """The results in fp64."""
    h, weight = (t.detach().double().requires_grad_() for t in (x.h, x.weight))
    logp, H = reference.logprobs(h, weight, x.targets.flatten())
    grads = torch.autograd.grad(x._replace(old=x.old.double()).loss(logp), (h, weight))
    return {"log-probs": (logp.detach(), H.detach()), "policy": grads}


def extra_gib(run: Callable[[], Sequence[Tensor]]) -> float:
    """GiB at the peak, minus the memory in use before and the results."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    peak = torch.cuda.max_memory_allocated() - before
    return (peak - sum(t.nbytes for t in results)) / 2**30


def host_ms(fns: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median ms of each function on a CPU."""
    times: list[list[float]] = [[] for _ in fns]
    for _ in range(rounds):
        for fn, samples in zip(fns, times, strict=True):
            start = time.perf_counter()
            fn()
            samples.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(t) for t in times]


def measure(kind: str, x: Inputs, names: Sequence[str], rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """({contestant: its figures}, {contestant: why it has none}) of "log-probs" or "policy"."""
    few = x.part(min(2, len(x.targets)))
    truth = wanted(few)[kind]
    runs, missing = {}, {}
    gpu = x.h.is_cuda
    for name in names:
        try:
            entry = CONTESTANTS[name]()
            call: Callable[[Inputs, Any], Sequence[Tensor]]
            if kind == "log-probs" and entry.logprobs:
                call = without_gradients(entry.logprobs)
            elif kind == "policy" and entry.loss:
                call = policy_step(entry.loss)
            else:
                continue
            best = None
            for setting in entry.settings:
                if words := wrong(call(few, setting), truth):
                    raise ValueError(words)
                run = lambda call=call, setting=setting: call(x, setting)  # noqa: E731
                ms = time_all([run], 1)[0] if gpu else host_ms([run], 1)[0]
                if best is None or ms < best[0]:
                    best = ms, setting, run
            assert best is not None
            runs[name] = best
        except Exception as error:  # any error of a rival, reported in its own words
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        if gpu:
            torch.cuda.empty_cache()
    fns = [run for _, _, run in runs.values()]
    times = time_all(fns, rounds) if gpu else host_ms(fns, rounds)
    results = {}
    for (name, (_, setting, run)), ms in zip(runs.items(), times, strict=True):
        results[name] = {"ms": ms, "setting": setting, "extra_gib": extra_gib(run) if gpu else None}
    return results, missing


def table(kind: str, x: Inputs, found: dict[str, Any], missing: dict[str, str]) -> list[str]:
    """The lines of one table."""
    (B, S), (V, D) = x.targets.shape, x.weight.shape
    products = 1 if kind == "log-probs" else 3
    flops = 2 * products * B * S * V * D
    lines = [
        f"\n{kind}: {B} sequences of {S}, D {D}, V {V}, {x.h.dtype}\n",
        f"| contestant | ms | TFLOP/s of {2 * products}TVD | extra GiB | setting |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, r in found.items():
        extra = "" if r["extra_gib"] is None else f"{r['extra_gib']:.2f}"
        setting = "" if r["setting"] is None else r["setting"]
        lines.append(f"| {name} | {r['ms']:.2f} | {flops / r['ms'] / 1e9:.0f} | {extra} | {setting} |")
    return lines + [f"| {name} | {reason} | | | |" for name, reason in missing.items()]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sequences", nargs="+", type=int, default=[256])
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--dim", type=int, default=2048)
    p.add_argument("--vocab", type=int, default=151936)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--only", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    p.add_argument("--json", type=Path, help="append each table to this file, one JSON object a line")
    args = p.parse_args()
    gpu = args.device == "cuda"
    if gpu:
        require_gpu(p)
    about = {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rivals": {name: version(name) for name in ("trl", "liger-kernel")},
        "date": str(date.today()),
        "command": " ".join(["python -m benchmarks.logprobs", *sys.argv[1:]]),
    }
    print(about)
    dtype = torch.bfloat16 if gpu else torch.float32
    for sequences in args.sequences:
        torch.manual_seed(0)
        x = make(sequences, args.length, args.dim, args.vocab, args.device, dtype)
        for kind in ("log-probs", "policy"):
            results, missing = measure(kind, x, args.only, args.rounds)
            print(*table(kind, x, results, missing), sep="\n", flush=True)
            if args.json:
                shape = [sequences, args.length, args.dim, args.vocab]
                line = {"kind": kind, "shape": shape, "results": results, "missing": missing, **about}
                write_line(args.json, line)


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
