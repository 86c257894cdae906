"""The engine: prompts in, sampled answers with their log-probabilities out.

    engine = tmoe.Engine(model)
    samples = engine.generate([[5, 3, 8], [7]], n=4, sampling=tmoe.Sampling(temperature=0.8, seed=1))
    samples[1][3].ids, samples[1][3].logprobs

next: generate/slots.py
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.config.check import FLOATS, ConfigError, Setting, fits, require
from tmoe.config.model import no_bits
from tmoe.data.chat.format import ends_of
from tmoe.generate.cache import PAGE, bytes_a_token
from tmoe.generate.pages import Span, alone, most_needed
from tmoe.generate.sampler import Sampling
from tmoe.generate.slots import Request, Room, Slots, rows_of
from tmoe.generate.text import Text
from tmoe.generate.whole import gathered, is_laid_out, require_whole
from tmoe.model.float8 import float8_layers
from tmoe.model.transformer import Block, Transformer
from tmoe.moe.own_experts import OwnExperts
from tmoe.parallel.agree import attempt, by_reason

if TYPE_CHECKING:
    from tmoe.data.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Tensor
T = TypeVar("T")
FREE = 0.8  # of a GPU's free memory that a call takes at most, where pool_gib does not say


class Sample(NamedTuple):
    """One answer of n tokens. All tensors are on the CPU."""

    ids: Tensor
    """int64 [n]; the last is a token that ended the answer, or part of a stop text, where finish is 'stop'"""
    logprobs: Tensor
    """fp32 [n], by the softmax of logits / temperature over the whole vocabulary: what training computes.
    At temperature 0, of the logits themselves."""
    sampler_logprobs: Tensor
    """fp32 [n], by what top_k, top_p and min_p left of it: by what the token was drawn from.
    At temperature 0: 0."""
    routes: Tensor | None
    """int16 [MoE layers, n, K], where they were asked for: the experts that each token's predecessor went to,
    from whose output the token was drawn"""
    finish: Literal["stop", "length"]
    """'stop': a token or a text that ends answers; 'length': max_tokens, or the model's range of positions"""
    text: str | None
    """without what ended it; None for an engine without a tokenizer"""
    prompt_routes: Tensor | None = None
    """int16 [MoE layers, tokens of the prompt - 1, K], where routes were asked for and a prompt has several
    tokens: where all of them but the last went. Together with `routes`: every token but the answer's last"""


class Samples(tuple[tuple[Sample, ...], ...]):
    """The answers to each prompt: samples[prompt][number] is a Sample."""


class Piece(NamedTuple):
    """What a step added to an answer."""

    prompt: int
    sample: int
    text: str
    """whole characters; "" for an engine without a tokenizer"""
    done: Sample | None
    """the answer, once it is over"""


def require_bits(model: Transformer) -> None:
    """ConfigError unless rollouts of a model can have the bits of its forward."""
    why = no_bits(model.cfg)
    require(why is None, f"bits: {why}")
    require(not float8_layers(model), "bits: the forward has float8 products and steps do not; needs none")
    eager = not any(isinstance(block, Block) and block.must_compile for block in model.blocks)
    alone = "bits: compiled blocks round otherwise than single steps"
    require(eager, f"{alone}; needs {Setting('compile', False)}")


def can_be_graphs(model: Transformer) -> bool:
    """Whether steps of a model can be CUDA graphs, as far as one rank knows."""
    own = any(isinstance(module, OwnExperts) for module in model.modules())
    return model.head_weight.is_cuda and not own


def require_pool(pool: float, spans: Sequence[Span], n: int, a_page: int, setting: str = "pool_gib") -> None:
    """ConfigError unless so many bytes, in pages of so many, hold each answer alone, n to each prompt."""
    largest = max(spans, key=lambda span: alone(span, n))
    needs = 1 + alone(largest, n)
    has = f"{pool / 2**30:.3g} GiB for keys and values"
    asks = f"one answer of {largest.tokens} tokens, its prompt included, needs"
    where = f"{asks} {needs * a_page / 2**30:.3g}, {needs} pages of {PAGE} tokens"
    wrong = f"{has}, but {where}; a larger pool, or fewer tokens"
    require(pool >= needs * a_page, setting, True, wrong)


def whole(value: object) -> int | None:
    """A whole number, numpy's and a 0-dim tensor's too; None for anything else, true and false included."""
    try:
        return None if isinstance(value, bool) else operator.index(cast(Any, value))
    except TypeError:
        return None


def listed(values: object, where: str, valid: str) -> list[Any]:
    """The members of what has an order. ConfigError that names `where` for text and what has none."""
    ok = isinstance(values, Collection) and not isinstance(values, str | Mapping | Set)
    require(ok, f"{where}: got {type(values).__name__}, valid is a list{valid}")
    return list(cast(Collection[Any], values))


def ids_in(values: object, where: str, vocab: int) -> list[int]:
    """Token ids as whole numbers. ConfigError that names `where` for what is no id of the vocabulary."""
    valid = f"valid are ids from 0 to {vocab - 1} (model.vocab={vocab})"
    if isinstance(values, Tensor):
        kind, shape = str(values.dtype).removeprefix("torch."), list(values.shape)
        ok = values.dim() == 1 and not (values.is_floating_point() or values.is_complex()) and kind != "bool"
        require(ok, f"{where}: got a tensor of {kind} {shape}, valid is one of whole numbers [n]; {valid}")
        values = values.tolist()
    members = listed(values, where, f"; {valid}")
    ids = [whole(one) for one in members]
    for one, i in zip(members, ids, strict=True):
        require(i is not None and 0 <= i < vocab, f"{where}: has the id {one!r}; {valid}")
    return cast(list[int], ids)


def _text(error: BaseException) -> str:
    """What is wrong, settings marked."""
    return error.text if isinstance(error, ConfigError) else str(error.args[0])


class Engine:
    """Samples answers of a model, many at a time.

    Of a model that is laid out over ranks, every rank makes each call, with prompts of its own or with none,
    and reads streams to their end: weights are gathered for the call, and ranks whose experts are spread
    step together. `numbers` then say which prompts of all each rank has.

    model: a Transformer, on one device or laid out by `parallelize`. It computes as in evaluation: no
        dropout, no jitter, no token dropped. Its weights are read anew in every call.
    tokenizer: for prompts and stop texts given as text, and for the texts of answers.
    eos: tokens that end an answer; None: the tokenizer's `eos`, and the ends of its weights (`ends_of`).
    begin: tokens in front of every prompt given as text.
    slots: answers that are made at the same time, at most.
    pool_gib: room for their keys and values, taken for a call and given back after. Answers wait where it
        does not hold those of all slots. None: what they need, on a GPU at most 80% of what is free.
    graphs: steps are CUDA graphs, on a GPU, unless the host must wait in them: for the nccl dispatcher's
        counts, and perhaps for experts of somebody's own.
    bits: log-probs are those of the model's own forward in every bit (docs/generate.md says where). It calls
        `model.keep_bits`, by which that forward works in the same order; its blocks may not be compiled.
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
        own = () if tokenizer is None else ends_of(tokenizer, model.cfg.vocab)
        self.eos = tuple(own if eos is None else ids_in(eos, "eos", model.cfg.vocab))
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
        told: Callable[[], bool] = lambda: False,
    ) -> Samples:
        """n answers to each prompt.

        Which tokens are drawn depends on the seed, the prompt's number, the answer's and the place in it, and
        on nothing else of the call.

        Args:
            prompts: token ids, or texts where the engine has a tokenizer.
            sampling: None: Sampling().
            numbers: the prompts' numbers in a batch that these are a part of; None: 0, 1, ...
            routes: keep the experts that tokens went to.
            told: whether this rank is to stop, asked before each pass. Where one of an expert group is, all
                of it raise Stopped at the same pass.

        Raises ValueError for prompts that are empty or longer than the model's range of positions, for ids
        outside its vocabulary, and where the pool has no room for one answer. Of a model that is laid out it
        is raised on all ranks, whichever has the prompt. It is raised too, where it is met, for logits that
        are not finite.
        """
        pieces = self._pieces(prompts, n, sampling, numbers, routes, False, told)
        found: list[list[Sample]] = [[] for _ in prompts]
        by_number: dict[tuple[int, int], Sample] = {}
        for prompt, sample, _, done in pieces:
            if done is not None:
                by_number[prompt, sample] = done
        for (prompt, _), done in sorted(by_number.items(), key=lambda item: item[0]):
            found[prompt].append(done)
        return Samples(tuple(answers) for answers in found)

    def stream(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[Piece]:
        """The same answers while they are made: a piece for each that a step has added to."""
        return self._pieces(prompts, n, sampling, numbers, False, True, lambda: False)

    # ---- a call ----

    def _pieces(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling | None,
        numbers: Sequence[int] | None,
        routes: bool,
        live: bool,
        told: Callable[[], bool],
    ) -> Iterator[Piece]:
        """live: texts are made while tokens come, not at the end."""
        sampling = Sampling() if sampling is None else sampling
        # before the first collective: ranks would wait for one whose prompts are none
        ids, keys = self.on_all(lambda: self.checked(prompts, n, sampling, numbers))
        return self._run(ids, n, sampling, keys, routes, live, told)

    def checked(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, numbers: Sequence[int] | None
    ) -> tuple[list[list[int]], list[int]]:
        """The prompts' tokens and numbers; ValueError unless all of a call can be made."""
        require(fits(n, int) and n >= 1, "n", repr(n), "must be a whole number of at least 1")
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
        ids = [self.ids_of(i, prompt) for i, prompt in enumerate(listed(prompts, "prompts", " of prompts"))]
        given = range(len(ids)) if numbers is None else listed(numbers, "numbers", " of whole numbers")
        keys = [whole(key) for key in given]
        ok = len(keys) == len(ids) and all(key is not None and 0 <= key < 2**63 for key in keys)
        require(ok, f"numbers: got {len(keys)} for {len(ids)} prompts, valid is one from 0 on for each")
        return ids, cast(list[int], keys)

    def on_all(self, work: Callable[[], T]) -> T:
        """What `work` gives. Of a model that is laid out, its error on any rank is a ConfigError on all.

        A collective of these.
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
    def _run(
        self,
        ids: list[list[int]],
        n: int,
        sampling: Sampling,
        keys: list[int],
        routes: bool,
        live: bool,
        told: Callable[[], bool],
    ) -> Iterator[Piece]:
        live = live or bool(sampling.stop)
        most = [min(sampling.max_tokens, self.model.cfg.rope.max_seq - len(one) + 1) for one in ids]
        queue = deque(
            Request(
                i,
                sample,
                first=len(ids[i]) - 1,
                most=most[i],
                number=keys[i],
                text=Text(self.tokenizer, sampling.stop) if self.tokenizer and live else None,
            )
            for i in range(len(ids))
            for sample in range(n)
        )
        ends = {*self.eos, *sampling.stop_ids}
        known = self.known
        with gathered(self.model, rows_of(self.model, min(self.slots, len(queue))), told) as ranks:
            graphs = self.graphs and ranks.free and can_be_graphs(self.model)
            room = self.on_all(lambda: self.room(queue, n))._replace(graphs=graphs)
            slots = Slots(self.model, ids, sampling, ends, room, known, routes, ranks)
            for requests in slots.run(queue):
                for request in requests:
                    text = request.text.news(bool(request.finish)) if request.text else ""
                    done = self.sample_of(request, slots.prompt_routes) if request.finish else None
                    if text or done or self.tokenizer is None:
                        yield Piece(request.prompt, request.sample, text, done)

    @property
    def known(self) -> int:
        """Ids that may be drawn are below this: those of the model that the tokenizer has, too."""
        vocab = self.model.cfg.vocab
        return vocab if self.tokenizer is None else min(vocab, self.tokenizer.vocab)

    def ids_of(self, number: int, prompt: Prompt) -> list[int]:
        """A prompt's tokens, checked."""
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
        require(len(ids) > 0, f"{where}: is empty; valid is at least one token to go on from")
        top = cfg.rope.max_seq
        require(len(ids) <= top, f"{where}: {len(ids)} tokens, but model.rope.max_seq={top}")
        return ids

    def room(self, requests: Sequence[Request], n: int) -> Room:
        """How many slots and pages the answers of a call get, n to each prompt."""
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
        if pool is not None:
            require_pool(pool, spans, n, a_page)
            pages = min(pages, int(pool // a_page))
        return Room(slots, pages, max(span.tokens for span in spans))

    def sample_of(self, request: Request, prompt_routes: dict[int, Tensor]) -> Sample:
        """What a request has become."""
        text = request.text
        if text is None and self.tokenizer is not None:
            text = Text(self.tokenizer)
            text.add(request.ids[:-1] if request.finish == "stop" else request.ids)
            text.end()
        return Sample(
            torch.tensor(request.ids, dtype=torch.int64),
            torch.tensor(request.logprobs, dtype=torch.float32),
            torch.tensor(request.sampler_logprobs, dtype=torch.float32),
            torch.stack(request.routes, 1) if request.routes else None,
            "stop" if request.finish == "stop" else "length",
            None if text is None else text.text,
            prompt_routes.get(request.prompt),
        )
