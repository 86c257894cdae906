"""Makes batches of token windows; their order is a pure function of (seed, epoch, global sample).

Global sample g -> source (weights) -> n-th sample of that source -> epoch and position -> permutation ->
window. Every arrow is arithmetic, so any rank can compute any sample directly, and neither the world size nor
the number of workers changes the order. data/convert.py makes the shards that this module reads:

    python -m tmoe.data texts/ more.jsonl --out shards/ --tokenizer tokenizer.json
    python -m tmoe.data 'set/**/*.parquet' --out shards/ --tokenizer HF_DIR --text-field content
    python -m tmoe.data 'set/*.jsonl.gz' --out shards/ --tokenizer HF_DIR --skip-malformed 100

next: data/sources.py for what a source holds
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from tmoe.config.model import IGNORE
from tmoe.config.run import DataConfig
from tmoe.data.chat.format import ChatFormat
from tmoe.data.corpus import Corpus, HeldOut, Split, TokenRun
from tmoe.data.hub_datasets import PREFIX
from tmoe.data.sources import open_corpus
from tmoe.data.survey import survey
from tmoe.data.tokenizer import ByteTokenizer, Carried, DataError, Tokenizer, load_tokenizer

# The number of digits is limited, because Fraction would compute all digits of 1e99999999.
WEIGHT = re.compile(r"[\d._+]{1,40}(/\d{1,40}|[eE][+-]?\d{1,2})?")


class Micro(NamedTuple):
    """One micro-batch of a rank: whole rows of tokens [B, S], the same on all ranks that share the rows."""

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    documents_BS: torch.Tensor | None = None
    padding_BS: torch.Tensor | None = None
    positions_BS: torch.Tensor | None = None
    given: dict[str, torch.Tensor] | None = None
    """a task's inputs to its loss in addition to the targets, by name: [B, S] with a value for each token,
    or [M] of another length"""


class Batch(NamedTuple):
    """The data of one rank for one step, int64 [A, B, S]: A micro-batches of B windows of S tokens."""

    tokens_ABS: torch.Tensor
    targets_ABS: torch.Tensor
    """next token; IGNORE at a document's eos, where the next token belongs to another document"""
    documents_ABS: torch.Tensor
    """index of the document within the row, from 0; an eos belongs to the document that it ends"""

    def micros(self, device: torch.device, documents: bool) -> Iterator[Micro]:
        """Each micro-batch, copied to the device. documents: False leaves `documents_BS` None."""
        for micro in zip(*self, strict=True):
            tokens_BS, targets_BS, documents_BS = (t.to(device, non_blocking=True) for t in micro)
            yield Micro(tokens_BS, targets_BS, documents_BS if documents else None)

    def count(self) -> int:
        """Number of tokens, without padding."""
        return self.tokens_ABS.numel()

    def count_sequences(self) -> int:
        """Number of sequences, over which the `sequence` balancing loss is a mean; here the rows."""
        return self.tokens_ABS[..., 0].numel()


def permute(index: int, n: int, key: str) -> int:
    """Image of `index` under a pseudo-random permutation of range(n) that `key` chooses.

    It needs O(1) memory and about 10 us. It is a generalised Feistel network with cycle walking (Black &
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002): each round adds a keyed hash of one coordinate to
    the other, on the smallest near-square grid that holds n points. Fewer than sqrt(n) + 1 points of the grid
    are unused, so hardly any index needs a second walk. On the power-of-two grid of a plain Feistel network
    up to three in four would need one.
    """
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    while True:
        row, column = divmod(index, columns)
        for turn in range(3):
            row = (row + _hash(f"{key}/{turn}/row/{column}")) % rows
            column = (column + _hash(f"{key}/{turn}/column/{row}")) % columns
        index = row * columns + column
        if index < n:
            return index


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def choose(index: int, weights: list[int]) -> tuple[int, int]:
    """Source of global sample `index`, and the number of earlier samples from that source.

    The list of sources is halved until one is left. With p the left half's exact share of the weights of both
    halves, the left half gets floor(g p) of the first g samples that reach the two halves. So its samples are
    evenly spread, and the source of sample g is computed without the samples before it. After g samples, a
    source's count differs from its share of g by at most the depth, ceil(log2(sources)). After sum(weights)
    samples, its count is exactly its weight.
    """
    low, high = 0, len(weights)
    while high - low > 1:
        middle = (low + high) // 2
        left = sum(weights[low:middle])
        total = sum(weights[low:high])
        before = index * left // total
        if (index + 1) * left // total > before:
            high = middle
            index = before
        else:
            low = middle
            index -= before
    return low, index


class WindowSource:
    """Windows of seq + 1 tokens, seq apart, over one source's concatenated runs."""

    def __init__(self, corpus: Corpus, seq: int, vocab: int, split: Split) -> None:
        self.name = corpus.name
        self.runs = corpus.runs
        self.seq = seq
        self.vocab = vocab
        self.taken = corpus.taken
        self.starts = [0, *itertools.accumulate(len(run.tokens) for run in corpus.runs)]
        self.tokens = self.starts.pop()
        self.samples = (self.tokens - 1) // seq
        self.predicted = self.samples * seq
        """trained tokens of an epoch; the target after a document's eos, which is ignored, is counted too"""
        if self.samples < 1:
            raise DataError(
                f"{self.name}: {self.tokens} tokens in its {split} split, one sample needs {seq + 1}; "
                f"lower --train.seq={seq}, change --data.val-fraction (or --data.split), or give more data"
            )

    def window(self, index: int) -> np.ndarray:
        """Tokens [index * seq, (index + 1) * seq] as int64; DataError on an id outside the vocabulary."""
        start = index * self.seq
        end = (index + 1) * self.seq + 1
        first = bisect.bisect_right(self.starts, start) - 1
        last = bisect.bisect_left(self.starts, end)
        return np.concatenate([self._read(run, start, end) for run in range(first, last)])

    def _read(self, number: int, start: int, end: int) -> np.ndarray:
        """The tokens of one run that are within [start, end) of the source's concatenated runs."""
        run = self.runs[number]
        base = self.starts[number]
        low = max(start - base, 0)
        return self._checked(run, low, end - base)

    def _checked(self, run: TokenRun, low: int, high: int) -> np.ndarray:
        """Tokens [low, high) of a run as int64; DataError on an id outside the vocabulary."""
        tokens = run.tokens[low:high].astype(np.int64)
        bad = tokens.view(np.uint64) >= self.vocab  # a negative id is a large one
        if bad.any():
            raise run.bad_id(low + int(np.argmax(bad)), self.vocab)
        return tokens

    def frequencies(self) -> np.ndarray:
        """Share of each id in all tokens, float64 [V]. 2^22 tokens at a time are read, as int64."""
        counts = np.zeros(self.vocab)
        for run in self.runs:
            for low in range(0, len(run.tokens), 1 << 22):
                counts += np.bincount(self._checked(run, low, low + (1 << 22)), minlength=self.vocab)
        return counts / counts.sum()


class Dataset:
    """An endless, randomly accessible sequence of samples, mixed from sources; make one with `open_data`."""

    chat: ChatFormat | None = None
    """how a model that is trained on this data writes conversations; stored with each saved step"""
    notes: tuple[str, ...] = ()
    """lines that are logged at the start of a run"""

    def __init__(
        self, sources: list[WindowSource], weights: list[int], *, eos: int, fingerprint: str, seed: int
    ) -> None:
        self.sources = sources
        self.weights = weights
        self.eos = eos
        self.seed = seed
        # Samples used beyond (step number x samples of a step), because earlier steps had another size.
        self.ahead = 0
        self.fingerprint = fingerprint
        self.seq = sources[0].seq
        self.vocab = sources[0].vocab
        self.tokens = sum(source.tokens for source in sources)
        self.samples = sum(source.samples for source in sources)
        """windows in one pass over every source; without weights, the pass is the first `samples` samples"""

    def sample(self, index: int) -> np.ndarray:
        """Global sample `index` (from 0, endless) as int64 [S + 1]."""
        number, epoch, position = self.place(index)
        source = self.sources[number]
        return source.window(permute(position, source.samples, f"{self.seed}/{epoch}/{number}"))

    def place(self, index: int) -> tuple[int, int, int]:
        """Source, epoch of that source and position in the epoch of global sample `index`."""
        number, nth = choose(index, self.weights)
        return number, *divmod(nth, self.sources[number].samples)

    def go_on(
        self, step: int, tokens: int, *, batch: int, accumulate: int = 1, rank: int = 0, world: int = 1
    ) -> None:
        """Continues after `step` steps that used `tokens` tokens in all, whatever the size of each step.

        No sample is given twice, and none is left out.
        """
        self.ahead = tokens // self.seq - step * batch * accumulate * world

    def indices(
        self, step: int, *, batch: int, accumulate: int = 1, rank: int = 0, world: int = 1
    ) -> list[int]:
        """One rank's part of a step, as indices of global samples.

        The indices are ahead + (step * accumulate + a) * world * batch + rank * batch + b.

        Concatenated by (a, rank, b), the ranks' parts are the same samples in the same order for all values
        of (world, batch, accumulate) with the same product.
        """
        firsts = [self.ahead + ((step * accumulate + a) * world + rank) * batch for a in range(accumulate)]
        return [first + b for first in firsts for b in range(batch)]

    def batch(self, step: int, *, batch: int, accumulate: int = 1, rank: int = 0, world: int = 1) -> Batch:
        """The samples of `indices`, in their order."""
        wanted = self.indices(step, batch=batch, accumulate=accumulate, rank=rank, world=world)
        rows = [self.sample(i) for i in wanted]
        windows = torch.from_numpy(np.stack(rows)).view(accumulate, batch, self.seq + 1)
        tokens = windows[..., :-1].contiguous()
        ends = tokens == self.eos
        return Batch(tokens, windows[..., 1:].masked_fill(ends, IGNORE), ends.cumsum(-1) - ends.long())

    def trained_a_sample(self) -> float:
        """Mean number of trained tokens of a sample, over the mixture; 0 if it is not known."""
        weighted = zip(self.sources, self.weights, strict=True)
        return sum(weight * s.predicted / s.samples for s, weight in weighted) / sum(self.weights)

    def facts(self) -> dict[str, Any]:
        """Facts about the data that a saved step records, as values that JSON can hold."""
        return {"is": self.describe(), "tokenizer": self.fingerprint, "eos": self.eos}

    def extent(self, split: str) -> dict[str, Any]:
        """Facts that differ if two nodes' copies of the data differ; reading the data is not needed."""
        facts = dict(tokens=self.tokens, samples=self.samples, tokenizer=self.fingerprint, eos=self.eos)
        return {f"--data.path: {name} of the {split} data": value for name, value in facts.items()}

    def describe(self) -> str:
        """Size and shares of the sources, for a person to read."""
        weighted = zip(self.sources, self.weights, strict=True)
        shares = (f"{source.name} {weight / sum(self.weights):.1%}" for source, weight in weighted)
        return f"{self.tokens:,} tokens, {self.samples:,} samples of {self.seq} an epoch: {', '.join(shares)}"


def unigram_entropy(dataset: Dataset) -> float | None:
    """Entropy of the mixture's byte frequencies, in nats a byte: the loss of the best model without context.

    Reads every token once. None if the tokens are not bytes, or if there are more than 2^30 of them.
    """
    if dataset.fingerprint != "bytes" or dataset.tokens > 2**30:
        return None
    total = sum(dataset.weights)
    shares = np.zeros(dataset.vocab)
    for source, weight in zip(dataset.sources, dataset.weights, strict=True):
        shares += weight / total * source.frequencies()
    seen = shares[shares > 0]
    return float(-(seen * np.log(seen)).sum())


def open_data(cfg: DataConfig, seq: int, vocab: int, split: Split, carried: Carried | None = None) -> Dataset:
    """Opens the sources of `--data.path` for windows of seq tokens and their targets.

    Without weights, each source gives one sample for each of its windows (in proportion to its tokens, so
    that an epoch reads everything once). With weights, a source gives samples in proportion to its weight,
    whatever the sizes of the sources. Small sources then start their next epoch, in a new order, while large
    sources are still in their first.

    Text is tokenised at each opening (data/sources.py). Convert data that many runs read to shards. They hold
    their tokenizer's fingerprint, so `--data.tokenizer` may keep its default if every source is shards.
    carried: the tokenizer of the model that the run starts from. It is the default, and data of another
        tokenizer is refused, except with cfg.new_tokenizer.
    DataError for anything that cannot be trained on, the same on every rank.
    """
    part: Split = "train" if cfg.val_path else split  # with --data.val-path no source is divided
    flag, names, weights = sources_of(cfg, split)
    if cfg.new_tokenizer:
        carried = None
    tokenizer = _choose_tokenizer(cfg.tokenizer, carried)
    shares = HeldOut(*cfg.held_out)
    try:
        corpora = [
            open_corpus(source, tokenizer, vocab, shares, part, cfg.text_field, cfg.skip_malformed, carried)
            for source in (survey(name, cfg.columns) for name in names)
        ]
        sources = [WindowSource(corpus, seq, vocab, split) for corpus in corpora]
    except DataError as error:
        raise refused(flag, names, error) from None
    first = corpora[0] if cfg.tokenizer == "auto" else tokenizer
    for corpus in corpora:
        if (corpus.fingerprint, corpus.eos) != (first.fingerprint, first.eos):
            raise DataError(
                f"{corpus.name}: made with tokenizer {corpus.fingerprint}, eos {corpus.eos}, "
                f"not {first.fingerprint}, eos {first.eos}; sources that are mixed, and --data.tokenizer "
                "if given, must be of one tokenizer and end documents with the same id"
            )
    weights = weights or [source.samples for source in sources]
    data = Dataset(sources, weights, eos=first.eos, fingerprint=first.fingerprint, seed=cfg.seed)
    data.chat = carried.chat if carried else None
    return data


def sources_of(cfg: DataConfig, split: Split) -> tuple[str, list[str], list[int]]:
    """The flag that names a split's sources, their names and weights."""
    own = bool(cfg.val_path) and split == "val"
    flag = "--data.val-path" if own else "--data.path"
    return flag, *parse_sources(cfg.val_path if own else cfg.path, flag)


def refused(flag: str, names: Sequence[str], error: DataError) -> DataError:
    """The sources' error with the flag that names them added: `--data.path=a.jsonl: a.jsonl:3: not JSON`."""
    text = str(error)
    whole = [name for name in names if text.startswith(f"{name}: ")]
    return DataError(f"{flag}={text}" if whole and len(names) == 1 else f"{flag}={' '.join(names)}: {text}")


def require_alike(data: Dataset, val_data: Dataset) -> None:
    """DataError if the data of --data.val-path are of another tokenizer than the training data."""
    if (data.fingerprint, data.eos) != (val_data.fingerprint, val_data.eos):
        raise DataError(
            f"--data.val-path: of tokenizer {val_data.fingerprint}, eos {val_data.eos}; --data.path is of "
            f"{data.fingerprint}, eos {data.eos}: valid is one tokenizer for both"
        )


def _choose_tokenizer(spec: str, carried: Carried | None) -> Tokenizer:
    """The tokenizer of `--data.tokenizer`; for 'auto' that of the weights the run starts from, else bytes.

    If the weights have a format of conversations, the tokenizer gets it.
    """
    if spec == "auto" and carried and carried.files:
        return carried.load()
    chosen = ByteTokenizer(named=False) if spec == "auto" else load_tokenizer(spec)
    if carried:
        if spec != "auto":
            carried.require(f"--data.tokenizer={spec}", chosen.fingerprint)
        chosen.chat = carried.chat
    return chosen


def parse_sources(specs: Iterable[str], flag: str = "--data.path") -> tuple[list[str], list[int]]:
    """Names and weights of sources, each PATH or PATH:WEIGHT.

    The weights are returned as whole numbers in the same proportion, or [] if there are none.
    """
    parsed = [_parse_source(spec, flag) for spec in specs]
    names = [name for name, _ in parsed]
    weights = [weight for _, weight in parsed if weight is not None]
    if weights and len(weights) < len(names):
        bare = next(name for name, weight in parsed if weight is None)
        raise DataError(f"{flag} {bare}: has no weight; give every source one, PATH:WEIGHT, or none")
    scale = math.lcm(*(weight.denominator for weight in weights))
    return names, [int(weight * scale) for weight in weights]


def _parse_source(spec: str, flag: str) -> tuple[str, Fraction | None]:
    """Name and weight of one PATH or PATH:WEIGHT; None for no weight."""
    name, colon, weight = spec.rpartition(":")
    if not colon or Path(spec).exists():
        return spec, None
    if spec.startswith(PREFIX) and not WEIGHT.fullmatch(weight):  # a split, or the name itself
        return spec, None
    try:
        # The fraction is exact (0.3 is 3/10), so that proportions hold at any sample number.
        value = Fraction(weight if WEIGHT.fullmatch(weight.strip()) else 0)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not name or value <= 0:
        raise DataError(
            f"{flag} {spec}: no such path, and {weight!r} is no weight; valid: PATH, PATH:WEIGHT or "
            "hub:ORG/NAME, weight > 0 of at most 40 digits, as 3, 0.3, 1/3 or 3e-1"
        )
    return name, value


class Loader:
    """Iterates over a rank's batches from a step on; one background thread makes the next batch.

    The iteration is endless. Its position is `step`, the step of the next batch; nothing else must be saved
    to resume. An error of the background thread is raised by `next` for the step in which it occurred, and is
    raised again by each further call.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        start_step: int = 0,
        batch: int,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
        pin: bool = False,
    ) -> None:
        """pin: make batches in page-locked memory, for copies to the GPU that do not block."""
        self.step = start_step
        self.pin = pin
        self._dataset = dataset
        self._shape = {"batch": batch, "accumulate": accumulate, "rank": rank, "world": world}
        # A new thread starts on device 0, where pinning would open a CUDA context for every rank.
        setup = (torch.cuda.set_device, (torch.cuda.current_device(),)) if pin else (None, ())
        self._thread = ThreadPoolExecutor(1, "tmoe-data", *setup)
        self._pending: Future[Batch] = self._thread.submit(self._make, start_step)

    def _make(self, step: int) -> Batch:
        batch = self._dataset.batch(step, **self._shape)
        return type(batch)(*(tensor.pin_memory() for tensor in batch)) if self.pin else batch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._pending.result()
        self._pending = self._thread.submit(self._make, self.step + 1)  # RuntimeError once closed
        self.step += 1
        return batch

    def close(self) -> None:
        """Ends the thread after the batch that it is making, if any. It may be called twice."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
