"""The engine: samples answers to prompts, with their log-probabilities.

    engine = tmoe.Engine(model)
    samples = engine.generate([[5, 3, 8], [7]], n=4, sampling=tmoe.Sampling(temperature=0.8, seed=1))
    samples[1][3].ids, samples[1][3].logprobs

next: generate/slots.py
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.config.check import FLOATS, ConfigError, Setting, fits, require, spelt
from tmoe.config.model import no_bits
from tmoe.data.chat.format import ends_of
from tmoe.generate.cache import PAGE, bytes_a_token, bytes_of_states
from tmoe.generate.gathered_model import gathered, is_laid_out, require_whole
from tmoe.generate.pages import Span, alone, most_needed
from tmoe.generate.requests import Asked, Details, Request, Tops, joined, tops_of
from tmoe.generate.sampler import Sampling
from tmoe.generate.slots import Room, Slots, rows_of
from tmoe.generate.text import Text
from tmoe.model.float8 import float8_layers
from tmoe.model.quantised import quantised_to
from tmoe.model.transformer import Block, Transformer
from tmoe.moe.own_experts import OwnExperts
from tmoe.parallel.agree import attempt, by_reason

if TYPE_CHECKING:
    from tmoe.data.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Tensor
T = TypeVar("T")
FREE = 0.8  # largest share of a GPU's free memory that a call uses, if pool_gib is None


class Sample(NamedTuple):
    """One answer of n tokens. All tensors are on the CPU."""

    ids: Tensor
    """int64 [n]; if finish is 'stop', the last is a token that ended the answer, or part of a stop text"""
    logprobs: Tensor
    """fp32 [n], nats, by the softmax of logits / temperature over the whole vocabulary, as in training.
    At temperature 0, by the softmax of the logits."""
    sampler_logprobs: Tensor
    """fp32 [n], nats, by the distribution from which the token was drawn, after top_k, top_p and min_p.
    At temperature 0: 0."""
    routes: Tensor | None
    """int16 [MoE layers, n, K], if they were asked for: the experts of the token before each token, from
    whose output the token was drawn"""
    finish: Literal["stop", "length", "cancel", "error"]
    """'stop': a token or a text that ends answers; 'length': max_tokens, or the model's range of positions.
    Only of `Live`: 'cancel'; 'error': logits are not finite"""
    text: str | None
    """without the token or text that ended it; None for an engine without a tokenizer"""
    prompt_routes: Tensor | None = None
    """int16 [MoE layers, tokens of the prompt - 1, K], if routes were asked for and the prompt has several
    tokens: the experts of all its tokens except the last. With `routes`, the experts of every token except
    the answer's last"""
    route_weights: Tensor | None = None
    """fp16 [MoE layers, n, K], if they were asked for: the routers' weights of `routes`"""
    prompt_route_weights: Tensor | None = None
    """fp16 [MoE layers, tokens of the prompt - 1, K]: the weights of `prompt_routes`"""
    tops: Tops | None = None
    """the most probable tokens at each place, if they were asked for"""
    prompt_tops: Tops | None = None
    """of the prompt's tokens except the first, if they were asked for: `own` are their log-probs"""
    cached: int = 0
    """tokens of the prompt whose keys and values were those of an earlier prompt"""
    error: str = ""
    """why, if finish is 'error'"""


class Samples(tuple[tuple[Sample, ...], ...]):
    """The answers to each prompt: samples[prompt][number] is a Sample."""


class Piece(NamedTuple):
    """The part of an answer that one step added."""

    prompt: int
    sample: int
    text: str
    """whole characters; "" for an engine without a tokenizer"""
    done: Sample | None
    """the answer, once it is over"""


def require_bits(model: Transformer) -> None:
    """ConfigError unless rollouts of a model can equal its forward in every bit."""
    why = no_bits(model.cfg)
    require(why is None, f"bits: {why}")
    require(not float8_layers(model), "bits: the forward has float8 products and steps do not; needs none")
    kind = quantised_to(model)
    require(
        not kind, f"bits: steps multiply {kind} codes and the forward their values; needs no quantisation"
    )
    eager = not any(isinstance(block, Block) and block.must_compile for block in model.blocks)
    alone = "bits: compiled blocks round differently from single steps"
    require(eager, f"{alone}; needs {Setting('compile', False)}")


def can_be_graphs(model: Transformer) -> bool:
    """Whether steps of a model can be CUDA graphs, by what this rank can see."""
    has_own_experts = any(isinstance(module, OwnExperts) for module in model.modules())
    return model.head_weight.is_cuda and not has_own_experts


def require_pool(pool: float, spans: Sequence[Span], n: int, a_page: int, setting: str = "pool_gib") -> None:
    """ConfigError unless a pool has room for each answer alone.

    pool: its bytes. spans: of all answers. n: answers to each prompt. a_page: bytes of a page. setting: the
    pool's setting, for the error.
    """
    largest = max(spans, key=lambda span: alone(span, n))
    needs = 1 + alone(largest, n)
    has = f"{pool / 2**30:.3g} GiB for keys and values"
    asks = f"one answer of {largest.tokens} tokens, its prompt included, needs"
    where = f"{asks} {needs * a_page / 2**30:.3g}, {needs} pages of {PAGE} tokens"
    wrong = f"{has}, but {where}; a larger pool, or fewer tokens"
    require(pool >= needs * a_page, setting, True, wrong)


def whole(value: object) -> int | None:
    """A whole number, which may be numpy's or a 0-dim tensor, as int; None for other values and for bools."""
    try:
        return None if isinstance(value, bool) else operator.index(cast(Any, value))
    except TypeError:
        return None


def listed(values: object, where: str, valid: str) -> list[Any]:
    """The members of an ordered collection. ConfigError, which names `where`, for text and other objects."""
    ok = isinstance(values, Collection) and not isinstance(values, str | Mapping | Set)
    require(ok, f"{where}: got {type(values).__name__}, valid is a list{valid}")
    return list(cast(Collection[Any], values))


def ids_in(values: object, where: str, vocab: int) -> list[int]:
    """Token ids as whole numbers. ConfigError, which names `where`, for a value that is no id below vocab."""
    valid = f"valid are ids from 0 to {vocab - 1} (model.vocab={vocab})"
    if isinstance(values, Tensor):
        kind, shape = str(values.dtype).removeprefix("torch."), list(values.shape)
        ok = values.dim() == 1 and not (values.is_floating_point() or values.is_complex()) and kind != "bool"
        require(ok, f"{where}: got a tensor of {kind} {shape}, valid is one of whole numbers [n]; {valid}")
        values = values.tolist()
    members = listed(values, where, f"; {valid}")
    ids = [whole(member) for member in members]
    for member, i in zip(members, ids, strict=True):
        require(i is not None and 0 <= i < vocab, f"{where}: has the id {member!r}; {valid}")
    return cast(list[int], ids)


def _text(error: BaseException) -> str:
    """The text of an error, with its settings marked."""
    return error.text if isinstance(error, ConfigError) else str(error.args[0])


class Engine:
    """Samples answers of a model, many at a time.

    If the model is laid out over ranks, every rank must make each call, with its own prompts or with none,
    and must read streams to their end: weights are gathered for the call, and the ranks of an expert group
    step together. `numbers` then has the numbers of each rank's prompts among all prompts.

    Args:
        model: a Transformer, on one device or laid out by `parallelize`. It computes as in evaluation: no
            dropout, no jitter, no token dropped. Every call reads its current weights.
        tokenizer: for prompts and stop texts given as text, and for the texts of answers.
        eos: tokens that end an answer; None: the tokenizer's `eos`, and the end tokens of its weights
            (`ends_of`).
        begin: tokens before every prompt given as text.
        slots: most answers that are made at the same time.
        pool_gib: GiB for keys and values of answers, allocated for a call and freed after it. If they are too
            few for all slots, answers wait. None: as much as they need, on a GPU at most 80% of the free
            memory.
        graphs: run steps as CUDA graphs on a GPU, unless the host must wait within a step: for the counts of
            the nccl dispatcher, and perhaps for experts of the user's own class.
        bits: log-probs equal those of the model's own forward in every bit (docs/generate.md says for which
            models). The engine calls `model.keep_bits`, by which the forward computes in the same order; its
            blocks must not be compiled.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        *,
        eos: Sequence[int] | None = None,
        begin: Sequence[int] = (),
        slots: int = 64,
        pool_gib: float | None = None,
        graphs: bool = True,
        bits: bool = False,
    ):
        require_whole(model)
        ok = fits(slots, int) and slots >= 1
        require(ok, "slots", repr(slots), "must be a whole number of at least 1")
        ok = pool_gib is None or (fits(pool_gib, float) and 0 < pool_gib <= FLOATS[1])
        require(ok, "pool_gib", repr(pool_gib), "must be a number above 0, and finite")
        known = all(hasattr(tokenizer, name) for name in ("encode", "decode", "eos", "vocab"))
        kind = type(tokenizer).__name__
        require(tokenizer is None or known, f"tokenizer: got {kind}, valid is one of tmoe.data, or None")
        self.model = model
        self.tokenizer = tokenizer
        tokenizer_ends = () if tokenizer is None else ends_of(tokenizer, model.cfg.vocab)
        self.eos = tuple(tokenizer_ends if eos is None else ids_in(eos, "eos", model.cfg.vocab))
        self.begin = tuple(ids_in(begin, "begin", model.cfg.vocab))
        self.slots = slots
        self.pool_gib = pool_gib
        self.graphs = graphs
        if bits:
            require_bits(model)
            model.keep_bits()

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        numbers: Sequence[int] | None = None,
        routes: bool = False,
        details: Details | None = None,
        told: Callable[[], bool] = lambda: False,
    ) -> Samples:
        """n answers to each prompt.

        The drawn tokens depend on the seed, the number of the prompt, the number of the answer and the place
        in the answer, and on nothing else in the call.

        Args:
            prompts: token ids, or texts if the engine has a tokenizer.
            n: answers to each prompt.
            sampling: None: Sampling().
            numbers: the prompts' numbers in a larger batch of which they are a part; None: 0, 1, ...
            routes: keep the experts of tokens.
            details: what else is recorded of tokens.
            told: called before each pass; returns whether this rank must stop. If one rank of an expert group
                must, all its ranks raise Stopped at the same pass.

        Raises ValueError for prompts that are empty or longer than the model's range of positions, for ids
        outside its vocabulary, and for a pool without room for one answer; if the model is laid out, on all
        ranks. Raises ValueError for logits that are not finite as well, on the rank that has them; if the
        model is laid out, after all answers of the call.
        """
        details = replace(details or Details(), routes=routes or (details is not None and details.routes))
        pieces = self._streamed_pieces(prompts, n, sampling, numbers, details, False, told)
        by_prompt: list[list[Sample]] = [[] for _ in prompts]
        by_number: dict[tuple[int, int], Sample] = {}
        for prompt, sample, _, done in pieces:
            if done is not None:
                by_number[prompt, sample] = done
        for (prompt, _), done in sorted(by_number.items(), key=lambda item: item[0]):
            by_prompt[prompt].append(done)
        return Samples(tuple(answers) for answers in by_prompt)

    def stream(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[Piece]:
        """The answers of `generate` while they are made: after each step a piece of each answer."""
        return self._streamed_pieces(prompts, n, sampling, numbers, Details(), True, lambda: False)

    # ---- a call ----

    def _streamed_pieces(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling | None,
        numbers: Sequence[int] | None,
        details: Details,
        live: bool,
        told: Callable[[], bool],
    ) -> Iterator[Piece]:
        """The pieces of a call. live: decode texts while tokens are drawn, not at the end."""
        sampling = Sampling() if sampling is None else sampling
        # before the first collective, in which ranks would wait for a rank with bad prompts
        ids, keys = self.on_all_ranks(lambda: self.validated_prompts(prompts, n, sampling, numbers))
        return self._generate_batch(ids, n, sampling, keys, details, live, told)

    def validated_prompts(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, numbers: Sequence[int] | None
    ) -> tuple[list[list[int]], list[int]]:
        """The prompts' tokens and numbers. ValueError for arguments of a call that cannot work."""
        require(fits(n, int) and n >= 1, "n", repr(n), "must be a whole number of at least 1")
        self.check_sampling(sampling)
        ids = [self.ids_of(i, prompt) for i, prompt in enumerate(listed(prompts, "prompts", " of prompts"))]
        given = range(len(ids)) if numbers is None else listed(numbers, "numbers", " of whole numbers")
        keys = [whole(key) for key in given]
        ok = len(keys) == len(ids) and all(key is not None and 0 <= key < 2**63 for key in keys)
        require(ok, f"numbers: got {len(keys)} for {len(ids)} prompts, valid is one from 0 on for each")
        return ids, cast(list[int], keys)

    def check_sampling(self, sampling: Sampling) -> None:
        """ConfigError for settings that cannot work with this model and tokenizer."""
        kind = type(sampling).__name__
        require(isinstance(sampling, Sampling), f"sampling: got {kind}, valid is tmoe.Sampling(...) or None")
        needs = "needs a tokenizer: Engine(model, tokenizer)"
        require(not sampling.stop or self.tokenizer is not None, f"stop={sampling.stop}: {needs}")
        stops = ids_in(sampling.stop_ids, "stop_ids", self.model.cfg.vocab)
        left = set(range(self.known)).difference(sampling.suppress)
        require(len(left) > 0, "suppress: holds every token that has a text; valid: fewer")
        goes_on = sampling.min_tokens == 0 or not left <= {*self.eos, *stops}
        ends = "eos and stop_ids hold every token that has a text"
        require(goes_on, f"min_tokens={sampling.min_tokens}: {ends}, so every answer ends at once; valid: 0")

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """The result of `work`. If the model is laid out, an error on any rank is a ConfigError on all ranks.

        A collective of all these ranks.
        """
        group = dist.group.WORLD if is_laid_out(self.model) else None
        result, error, failures = attempt(work, group, (ValueError, TypeError), _text)
        if error is not None and group is None:
            raise error
        if failures:
            reasons = by_reason(failures)
            raise ConfigError("; ".join(f"rank {ranks}: {why}" for why, ranks in reasons.items()))
        return cast(T, result)

    @torch.no_grad()
    def _generate_batch(
        self,
        ids: list[list[int]],
        n: int,
        sampling: Sampling,
        keys: list[int],
        details: Details,
        live: bool,
        told: Callable[[], bool],
    ) -> Iterator[Piece]:
        live = live or bool(sampling.stop)
        ends = frozenset((*self.eos, *sampling.stop_ids))
        asked = [Asked(prompt, sampling, ends, details, key) for prompt, key in zip(ids, keys, strict=True)]
        top = self.model.cfg.longest
        requests = [
            self.request(i, sample, asked[i], top, live) for i in range(len(ids)) for sample in range(n)
        ]
        with gathered(self.model, rows_of(self.model, min(self.slots, len(requests))), told) as ranks:
            graphs = self.graphs and ranks.free and can_be_graphs(self.model)
            room = self.on_all_ranks(lambda: self.room(requests, n))._replace(graphs=graphs)
            slots = Slots(self.model, room, self.known, ranks, sampling)
            slots.add(requests)
            laid_out, failed = is_laid_out(self.model), ""
            for landed in slots.run():
                for request in landed:
                    if request.finish == "error":
                        where = f"prompts[{request.prompt}], answer {request.sample}"
                        failed = failed or f"{where}, token {len(request.ids)}: {request.error}"
                        require(laid_out, failed)  # other ranks need this one until all answers end
                        continue
                    text = request.text.news(bool(request.finish)) if request.text else ""
                    done = self.sample_of(request) if request.finish else None
                    if text or done or self.tokenizer is None:
                        yield Piece(request.prompt, request.sample, text, done)
            require(not failed, failed)

    def request(self, prompt: int, sample: int, asked: Asked, most: int, live: bool) -> Request:
        """An answer to be made. most: tokens of prompt and answer. live: decode its text while it is made."""
        text = self.text_of(asked, asked.sampling.stop) if live else None
        return Request(prompt, sample, min(asked.sampling.max_tokens, most - len(asked.ids) + 1), asked, text)

    def text_of(self, asked: Asked, stop: tuple[str, ...] = ()) -> Text | None:
        """An answer's text before its first token; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        hidden = self.tokenizer.special if asked.details.skip_special else frozenset()
        return Text(self.tokenizer, stop, hidden)

    @property
    def known(self) -> int:
        """Bound of the ids that may be drawn: those in the vocabularies of both model and tokenizer."""
        vocab = self.model.cfg.vocab
        return vocab if self.tokenizer is None else min(vocab, self.tokenizer.vocab)

    def ids_of(self, number: int, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, checked. number: its place in the call, for errors."""
        where = f"prompts[{number}]"
        cfg = self.model.cfg
        if isinstance(prompt, str):
            require(
                self.tokenizer is not None, f"{where}: a text needs a tokenizer: Engine(model, tokenizer)"
            )
            assert self.tokenizer
            try:
                given: Any = [*self.begin, *self.tokenizer.encode(prompt).tolist()]
            except UnicodeEncodeError as error:
                bad = f"{error.object[error.start]!r} at {error.start}"
                raise ConfigError(f"{where}: is no Unicode text: {bad}, {error.reason}") from None
        else:
            given = prompt
        ids = ids_in(given, where, cfg.vocab)
        require(len(ids) > 0, f"{where}: is empty; valid is at least one token")
        require(len(ids) <= cfg.longest, f"{where}: {len(ids)} tokens, but {spelt(cfg.longest_limit, 'key')}")
        return ids

    def room(self, requests: Sequence[Request], n: int) -> Room:
        """The slots and pages for the answers of a call, n to each prompt."""
        if not requests:
            return Room(1, 1, 1)
        weight = self.model.head_weight
        a_page = PAGE * bytes_a_token(self.model.cfg, weight.dtype)
        slots = min(self.slots, len(requests))
        spans = [request.span for request in requests]
        pages = 1 + most_needed(spans, slots)
        pool = None if self.pool_gib is None else self.pool_gib * 2**30
        if pool is None and weight.is_cuda:
            pool = FREE * torch.cuda.mem_get_info(weight.device)[0]
            pool -= bytes_of_states(self.model.cfg, slots, weight.dtype)
        if pool is not None:
            require_pool(pool, spans, n, a_page)
            pages = min(pages, int(pool // a_page)) if a_page else pages
        return Room(slots, pages, max(span.tokens for span in spans))

    def sample_of(self, request: Request) -> Sample:
        """The Sample of a request that is over."""
        text, asked = request.text, request.asked
        if text is None and (text := self.text_of(asked)) is not None:
            text.add(request.ids[:-1] if request.finish == "stop" else request.ids)
            text.end()
        return Sample(
            torch.tensor(request.ids, dtype=torch.int64),
            torch.tensor(request.logprobs, dtype=torch.float32),
            torch.tensor(request.sampler_logprobs, dtype=torch.float32),
            torch.stack(request.routes, 1) if request.routes else None,
            cast(Any, request.finish),
            None if text is None else text.text,
            torch.cat(asked.routes, 1) if asked.routes else None,
            torch.stack(request.weights, 1) if request.weights else None,
            torch.cat(asked.weights, 1) if asked.weights else None,
            tops_of(request.tops),
            joined(asked.tops),
            asked.cached,
            request.error,
        )
