"""sample: draws a token from each row of logits, filtered as in transformers but without a sort.

A row's random number is a function of (seed, prompt, sample, place) by Philox, so slots, batches and ranks do
not affect the tokens. The kernel and `uniforms` compute the same bits.

One program a row reads the logits once, and keeps the greatest logit and the sum of weights of each group of
64 tokens. Without filters these sums determine the group that contains the drawn token. With filters they
first give a lower bound of the filters' threshold: if k groups have a greatest logit of at least t, at least
k tokens have a logit of at least t. Tokens above the bound are listed. The threshold is then found by
bisection over that list, on integers that have the order of the logits, in registers. If there are too many
tokens (top_p of a flat row), a sample of the row gives an interval of the threshold. A second read of the row
lists only the tokens in the interval, and sums the weights of all others.

next: tmoe/generate/sampler.py
"""

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tmoe.ops.argument_checks import FLOATS, check_device, require
from tmoe.ops.decode.sample_kernels import sample_kernel
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, device_facts, empty, launch
from tmoe.ops.launch.shapes import DecodeShapes
from tmoe.ops.register import collect

GROUP = 64  # neighbouring tokens of which the greatest logit is kept
BLOCK = 4096  # tokens that are read at once
HELD = 2048  # room of the list of tokens that the filters may keep, all in registers
LISTED = 8192  # room of the list of tokens near a threshold; at least HELD
SAMPLED = 4096  # tokens of a row from which its threshold is estimated


class Filters(Protocol):
    """Settings of a draw; `tmoe.generate.Sampling` has them."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


class RowFilters(NamedTuple):
    """Settings of each row's draw, [B] on the logits' device. They give a row the same token as `Filters`."""

    temperature_B: Tensor  # fp32; 0: the most probable token
    top_k_B: Tensor  # int64; 0: all tokens
    cut_B: Tensor  # fp32: 1 - top_p
    min_p_B: Tensor  # fp32


class Keys(NamedTuple):
    """The arguments of each row's random number: the seed, and int64 [B] on the logits' device."""

    seed: int | Tensor  # a tensor: int64 [B] of the same 64 bits, for seeds that differ
    prompt_B: Tensor
    sample_B: Tensor
    place_B: Tensor  # position of the token in its answer


class Drawn(NamedTuple):
    """A token for each row, and its log-probabilities, fp32."""

    tokens_B: Tensor
    logprobs_B: (
        Tensor  # under softmax(logits / temperature) over the whole vocabulary; greedy: under softmax(logits)
    )
    sampler_logprobs_B: Tensor  # under the filtered distribution it was drawn from; greedy: 0


def sample(
    logits_BV: Tensor, keys: Keys, filters: Filters | RowFilters, barred: Tensor | None = None
) -> Drawn:
    """`draw` with the random numbers of `keys`; on a GPU one launch, for which the host does not wait.

    The GPU adds in another order than `draw`, so the two may differ on a token whose probability is within
    1e-6 of a filter's threshold. Both keep all logits equal to the k-th. If several logits at the threshold
    of top_p are equal, both keep the same number of them: the GPU keeps the tokens with the higher ids;
    `draw`, like transformers, keeps the tokens that torch.sort happens to put last.

    Args:
        logits_BV: [B, V] of any float type, rows contiguous. B may be 0.
        keys: see `Keys`.
        filters: temperature, top_k, top_p, min_p, as in `tmoe.generate.Sampling`; or for each row its own.
            The two need the same form of seed: a number, or one for each row.
        barred: bool [B, V] or [V], contiguous: True at tokens that must not be drawn. In each row at least
            one token must be allowed.

    Raises ValueError for shapes, types or devices that do not fit.
    """
    fits = logits_BV.dim() == 2 and logits_BV.shape[1] and logits_BV.stride(1) == 1
    require(fits, "logits", f"shape {tuple(logits_BV.shape)}", "[B, V], rows contiguous")
    require(logits_BV.dtype in FLOATS, "logits", logits_BV.dtype, "float32, bfloat16 or float16")
    B, V = logits_BV.shape
    for name in ("prompt_B", "sample_B", "place_B"):
        t = getattr(keys, name)
        require(t.shape == (B,) and t.dtype == torch.int64, name, (tuple(t.shape), t.dtype), f"int64 [{B}]")
        check_device(logits_BV, **{name: t})
    _check_settings(logits_BV, keys.seed, filters)
    if barred is not None:
        fits = tuple(barred.shape) in ((V,), (B, V)) and barred.dtype == torch.bool and barred.is_contiguous()
        words = f"shape {tuple(barred.shape)}, {barred.dtype}"
        require(fits, "barred", words, f"bool [B={B}, V={V}] or [V], contiguous")
        check_device(logits_BV, barred=barred)
    if logits_BV.is_cuda:
        return forward(logits_BV, keys, filters, barred)
    return draw(logits_BV, uniforms_at(keys), filters, barred)


def _check_settings(logits: Tensor, seed: int | Tensor, filters: Filters | RowFilters) -> None:
    """Raise ValueError unless seed and filters are both numbers, or both tensors for the logits' rows."""
    if not isinstance(filters, RowFilters):
        ok = not isinstance(seed, Tensor) and 0 <= seed < 2**64
        require(ok, "seed", seed, "from 0 to 2**64 - 1")
        return
    B = len(logits)
    kinds = dict(seed_B=torch.int64, temperature_B=torch.float32, top_k_B=torch.int64)
    kinds |= dict(cut_B=torch.float32, min_p_B=torch.float32)
    for (name, kind), t in zip(kinds.items(), (seed, *filters), strict=True):
        if not isinstance(t, Tensor) or t.shape != (B,) or t.dtype != kind:
            got = (tuple(t.shape), t.dtype) if isinstance(t, Tensor) else t
            require(False, name, got, f"{kind} [{B}]")
        else:
            check_device(logits, **{name: t})


# ---- random numbers ----


def philox(seed: int, counter: list[int]) -> np.random.Philox:
    """numpy's Philox generator, made from arrays: in lists numpy converts numbers from 2^63 on to floats."""
    return np.random.Philox(key=np.array([seed, 0], np.uint64), counter=np.array(counter, np.uint64))


def uniforms(seed: int, prompt: int, sample: int, count: int) -> Tensor:
    """Random numbers [count] in [0, 1) for the tokens of one answer.

    Each is a function of seed, prompt, sample and the token's place in the answer, by Philox 4x64 (Salmon et
    al. 2011) with the place as its counter. So the first numbers do not depend on `count`.
    """
    raw = philox(seed, [0, prompt, sample, 0]).random_raw(count)
    return torch.from_numpy((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def uniforms_at(keys: Keys) -> Tensor:
    """The random number of each row, fp64 [B] on the CPU: `uniforms` of its answer at its place."""
    numbers = []
    per_row = isinstance(keys.seed, Tensor)
    seeds = keys.seed.tolist() if per_row else [keys.seed] * len(keys.place_B)
    rows = zip(seeds, *(t.tolist() for t in keys[1:]), strict=True)
    for seed, prompt, number, place in rows:
        counter = [place // 4, prompt, number, 0]  # four numbers for each counter
        raw = philox(seed % 2**64, counter).random_raw(place % 4 + 1)[-1]
        numbers.append(int(raw >> np.uint64(11)) * 2.0**-53)
    return torch.tensor(numbers, dtype=torch.float64)


# ---- the op in plain PyTorch ----


def draw(
    logits_BV: Tensor, uniform_B: Tensor, filters: Filters | RowFilters, barred: Tensor | None = None
) -> Drawn:
    """Draws one token a row: the first at which the filtered probabilities, summed by id, exceed uniform.

    uniform_B: random numbers in [0, 1).
    barred: bool [B, V] or [V], True at tokens that must not be drawn; log-probabilities over the whole
        vocabulary do not depend on it.
    """
    if isinstance(filters, RowFilters):
        return _draw_groups(logits_BV, uniform_B, filters, barred)
    z_BV = logits_BV.float()
    greedy = filters.temperature == 0
    if not greedy:
        z_BV = z_BV / filters.temperature
    full_B = z_BV.logsumexp(-1)
    open_BV = z_BV if barred is None else z_BV.masked_fill(barred, -math.inf)
    if greedy:
        tokens_B = open_BV.argmax(-1)
        own_B = z_BV.gather(-1, tokens_B[:, None])[:, 0]
        return Drawn(tokens_B, own_B - full_B, torch.zeros_like(own_B))
    kept_BV = keep(open_BV, filters)
    tokens_B = pick(kept_BV.softmax(-1), uniform_B)
    own_B = z_BV.gather(-1, tokens_B[:, None])[:, 0]
    return Drawn(tokens_B, own_B - full_B, own_B - kept_BV.logsumexp(-1))


def _draw_groups(logits_BV: Tensor, uniform_B: Tensor, filters: RowFilters, barred: Tensor | None) -> Drawn:
    """`draw` with settings of each row: rows with equal settings are drawn together."""
    groups: dict[tuple, list[int]] = {}
    for row, settings in enumerate(zip(*(t.tolist() for t in filters), strict=True)):
        groups.setdefault(settings, []).append(row)
    B, device = len(logits_BV), logits_BV.device
    fp32 = [torch.empty(B, device=device) for _ in range(2)]
    every = Drawn(torch.empty(B, dtype=torch.int64, device=device), *fp32)
    for (temperature, top_k, cut, min_p), rows in groups.items():
        rows_I = torch.tensor(rows, device=device)
        given = _Given(temperature, top_k, 1 - cut, min_p)
        left = barred[rows_I] if barred is not None and barred.dim() == 2 else barred
        for whole, part in zip(every, draw(logits_BV[rows_I], uniform_B[rows], given, left), strict=True):
            whole[rows_I] = part
    return every


def keep(z_BV: Tensor, filters: Filters) -> Tensor:
    """Logits over the temperature with -inf at tokens that top_k, top_p or min_p leave out."""
    V = z_BV.shape[-1]
    if 0 < filters.top_k < V:
        least_B1 = z_BV.topk(filters.top_k, -1).values[:, -1:]
        z_BV = z_BV.masked_fill(z_BV < least_B1, -math.inf)
    if filters.top_p < 1:
        # the sum of the probabilities up to and including each token, from the least probable on
        sorted_BV, order_BV = z_BV.sort(dim=-1, descending=False)
        below_BV = sorted_BV.softmax(-1).cumsum(-1) <= 1 - filters.top_p
        below_BV[:, -1] = False  # the most probable token is always kept
        z_BV = z_BV.masked_fill(below_BV.scatter(-1, order_BV, below_BV), -math.inf)
    if filters.min_p > 0:
        p_BV = z_BV.softmax(-1)
        z_BV = z_BV.masked_fill(p_BV < filters.min_p * p_BV.amax(-1, keepdim=True), -math.inf)
    return z_BV


def pick(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Ids [B] at which the cumulative probabilities exceed uniform times their total.

    It never returns a token with probability 0. If probabilities are NaN it returns some valid id.
    """
    sums_BV = p_BV.double().cumsum(-1)
    whole_B1 = sums_BV[:, -1:]
    at_B1 = torch.minimum(uniform_B[:, None] * whole_B1, whole_B1.nextafter(torch.zeros_like(whole_B1)))
    return torch.searchsorted(sums_BV, at_B1, right=True)[:, 0].clamp(max=p_BV.shape[-1] - 1)


# ---- the GPU ----


def forward(logits: Tensor, keys: Keys, filters: Filters | RowFilters, barred: Tensor | None) -> Drawn:
    """`sample` on a GPU."""
    B, V = logits.shape
    device = logits.device
    tokens = empty((B,), torch.int64, device)
    logprobs, own_logprobs = (empty((B,), torch.float32, device) for _ in range(2))
    if not B:
        return Drawn(tokens, logprobs, own_logprobs)
    NG = cdiv(V, GROUP)
    NGP = max(16, power_of_2(NG))
    BG = min(BLOCK // GROUP, NGP)
    greatest, sums = (empty((B, NGP), torch.float32, device) for _ in range(2))
    groups, words = (empty((B, 2 * NGP), torch.int32, device) for _ in range(2))
    ids = empty((B, LISTED), torch.int32, device)
    settings, flags = _rows(keys, filters) if isinstance(filters, RowFilters) else _numbers(V, keys, filters)
    # Blocks loaded at a time: as many as the registers of two programs on a multiprocessor allow.
    stages = 4 if logits.dtype == torch.float32 and V % 16 == logits.stride(0) % 16 == 0 else 2
    on_cuda = device.type != "cpu" and device_facts(device)[0].startswith("cuda")  # cpu: the interpreter
    options = {"maxnreg": 128} if on_cuda else {}
    launch(
        sample_kernel, (B,), logits, logits if barred is None else barred, *keys[1:], tokens, logprobs,
        own_logprobs, greatest, sums, groups, words, ids, *settings, logits.stride(0),
        barred.stride(0) if barred is not None and barred.dim() == 2 else 0,
        V, NG, NGP, GROUP, BG, HELD, LISTED, SAMPLED, stages, flags.greedy, flags.divide, barred is not None,
        *flags[2:], num_warps=8, **options,
    )  # fmt: skip
    return Drawn(tokens, logprobs, own_logprobs)


class _Flags(NamedTuple):
    """Constants of the kernel, in its order; `barred` is between the second and the third."""

    greedy: bool
    divide: bool
    top_k: bool
    top_p: bool
    min_p: bool
    rows: bool


def _numbers(V: int, keys: Keys, filters: Filters) -> tuple[tuple, _Flags]:
    """The kernel's seed, temperature, top_k, cut and min_p, and its constants, for equal settings."""
    assert not isinstance(keys.seed, Tensor)
    greedy = filters.temperature == 0
    flags = _Flags(
        greedy,
        not greedy and filters.temperature != 1,
        not greedy and 0 < filters.top_k < V,
        not greedy and filters.top_p < 1,
        not greedy and filters.min_p > 0,
        rows=False,
    )
    seed = keys.seed if keys.seed < 2**63 else keys.seed - 2**64
    cut = float(1 - filters.top_p)
    return (seed, float(filters.temperature), filters.top_k, cut, float(filters.min_p)), flags


def _rows(keys: Keys, filters: RowFilters) -> tuple[tuple, _Flags]:
    """The same for settings of each row. The binary has all filters, and each row uses its own."""
    return (keys.seed, *filters), _Flags(False, True, True, True, True, rows=True)


class _Given(NamedTuple):
    """Settings of a draw."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def trace(V: int, dtype: torch.dtype, filters: Filters) -> None:
    """Launch the kernel on meta tensors, inside compile_only: with barred tokens and without."""
    logits = torch.empty(1, V, dtype=dtype, device="meta")
    number = torch.empty(1, dtype=torch.int64, device="meta")
    for barred in (None, torch.empty(1, V, dtype=torch.bool, device="meta")):
        forward(logits, Keys(0, number, number, number), filters, barred)


def trace_rows(V: int, dtype: torch.dtype) -> None:
    """The same for settings of each row."""
    number = torch.empty(1, dtype=torch.int64, device="meta")
    real = torch.empty(1, device="meta")
    logits = torch.empty(1, V, dtype=dtype, device="meta")
    for barred in (None, torch.empty(1, V, dtype=torch.bool, device="meta")):
        forward(logits, Keys(number, number, number, number), RowFilters(real, number, real, real), barred)


def _of_decoding(step: DecodeShapes) -> Iterable[tuple]:
    yield trace, step.vocab, step.dtype, step.filters


collect("sample", {DecodeShapes: _of_decoding})
