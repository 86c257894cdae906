"""Pages: who shares which, that admission never stops, long prompts in pieces, and that memory goes back.

next: tests/generate/test_sampler.py
"""

import gc
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts import GPT_OSS, GQA, LATENT, MIMO
from tiers import slow_but

from tmoe.generate import Details, Engine, Live, Sampling, gathered_model, live, slots
from tmoe.generate.cache import bytes_a_token
from tmoe.generate.pages import Pages, Span, alone, keys_of, most_needed
from tmoe.generate.prompt_chunks import chunks
from tmoe.generate.warm_up import warm_up
from tmoe.model.transformer import Transformer
from tmoe.moe.layer import MoE

LONG = {
    name: replace(cfg, rope=replace(cfg.rope, max_seq=400))
    for name, cfg in dict(
        gqa=GQA, gpt_oss=replace(GPT_OSS, window=150), latent=LATENT, mimo=replace(MIMO, window=150)
    ).items()
}
ALL = slow_but(["gqa", "gpt_oss", "latent"], LONG)


def test_answers_share_full_pages_and_copy_the_last():
    spans = [Span(0, 299, 379)] * 3
    pages = Pages(6, spans)
    first, second, third = (pages.admit(span) for span in spans)
    assert first.pages[:2] == second.pages[:2] == third.pages[:2] == first.fresh[:2]
    assert first.copied == (first.fresh[2], first.pages[2]) and second.copied == (
        first.fresh[2],
        second.pages[2],
    )
    assert third.copied is None and third.pages[2] == first.fresh[2] and not second.fresh and not third.fresh


@pytest.mark.parametrize("seed", range(20))
def test_admission_never_stops_and_no_page_has_two_writers(seed):
    draw = random.Random(seed)
    spans = []
    answers = draw.randint(1, 5)
    for prompt in range(draw.randint(1, 8)):
        first = draw.choice([0, 1, 127, 128, 129, 300, 384])
        spans += [Span(prompt, first, first + draw.randint(1, 400)) for _ in range(answers)]
    least = 1 + max(alone(span, answers) for span in spans)
    count = least + draw.choice([0, 1, 5, 50])
    pages = Pages(count, spans)
    waiting, running = list(spans), []
    while waiting or running:
        while waiting and (seat := pages.admit(waiting[0])) is not None:
            running.append((waiting.pop(0), seat))
        assert running, "with nothing running the next one is admitted"
        written = [page for span, seat in running for page in seat.pages[span.whole :]]
        written += [page for kept in pages.kept.values() for page in kept]
        assert len(set(written)) == len(written) and 0 not in written
        assert not set(written) & set(pages.free) and len(set(pages.free)) == len(pages.free)
        pages.drop(running.pop(draw.randrange(len(running)))[1].pages)
    assert sorted(pages.free) == list(range(1, count)), "all are free in the end"
    roomy = Pages(1 + most_needed(spans, 7), spans)
    assert all(roomy.admit(span) for span in spans[:7]), "so many neighbours have room at once"


@pytest.mark.parametrize("seed", range(20))
def test_pages_of_common_beginnings_are_shared_and_none_is_lost(seed):
    """Random prompts of a few beginnings; some answers are cancelled while they wait."""
    draw = random.Random(seed)
    count = draw.choice([12, 20, 40])
    pages, content = Pages(count), {}  # content: of each page, the tokens that were written to it last
    waiting, running, reused, number = [], [], 0, 0
    base = [draw.randrange(9) for _ in range(600)]
    for _ in range(300):
        if draw.random() < 0.4:
            ids = base[: draw.choice([0, 5, 128, 200, 256, 384])] + [number % 9] * draw.choice([1, 2, 130])
            span = Span(number, len(ids) - 1, len(ids) + draw.randint(1, 200))
            if 1 + alone(span, 3) <= count:
                answers = draw.choice([1, 3])
                pages.expect(number, answers)
                waiting += [(span, ids, keys_of(ids[:-1]))] * answers
                number += 1
        while waiting and (seat := pages.admit(waiting[0][0], waiting[0][2])) is not None:
            span, ids, keys = waiting.pop(0)
            reused += seat.reused
            for i, page in enumerate(seat.fresh):
                part = ids[i * 128 : min((i + 1) * 128, len(ids) - 1)]
                assert i >= seat.reused or content[page] == part, "a reused page has the prompt's tokens"
                content[page] = part
                if i < span.whole:
                    pages.publish(page, keys[i])
            for page in seat.pages[span.whole :]:
                content[page] = None
            running.append((span, seat.pages))
        if waiting and draw.random() < 0.3:
            gone = waiting[-1][0].prompt
            left = [one for one in waiting if one[0].prompt != gone]
            pages.forget(gone, len(waiting) - len(left))
            waiting = left
        own = [page for span, own in running for page in own[span.whole :]]
        used = set(own).union(*(held for _, held in running), *pages.kept.values())
        assert len(set(own)) == len(own) and 0 not in used and pages.in_use == len(used)
        assert len(used) + len(pages.free) + len(pages.unused) == count - 1
        assert not used & {*pages.free, *pages.unused} and len(set(pages.free)) == len(pages.free)
        if running and draw.random() < 0.6:
            pages.drop(running.pop(draw.randrange(len(running)))[1])
    for prompt in {span.prompt for span, _, _ in waiting}:
        pages.forget(prompt, sum(span.prompt == prompt for span, _, _ in waiting))
    for _, own in running:
        pages.drop(own)
    assert pages.in_use == 0 and len(pages.free) + len(pages.unused) == count - 1 and reused
    pages.unpublish(list(pages.unused))
    assert sorted(pages.free) == list(range(1, count)) and not pages.page_of and not pages.notes


def test_the_longest_unused_page_goes_first():
    """And of one prompt the last page first, because a page without those before it is not found."""
    pages = Pages(5)
    for prompt, first in ((0, 256), (1, 128)):
        pages.expect(prompt, 1)
        keys = keys_of([prompt] * first)
        seat = pages.admit(Span(prompt, first, first), keys)
        for page, key in zip(seat.pages, keys, strict=True):
            pages.publish(page, key)
        pages.drop(seat.pages)
    zero, one = keys_of([0] * 256), keys_of([1] * 128)
    pages.expect(2, 1)
    assert len(pages.admit(Span(2, 5, 200), []).pages) == 2  # one is free, one is taken from prompt 0
    assert set(pages.page_of) == {zero[0], one[0]}
    assert keys_of([0] * 255) == zero[:1] and keys_of([0] * 128, "routes") != zero[:1]


def long_model(name: str) -> Transformer:
    torch.manual_seed(0)
    net = Transformer(LONG[name]).eval()
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() > 1:
                p.mul_(6)
    return net


@pytest.mark.parametrize("name", ALL)
def test_prompts_and_answers_over_several_pages(name, monkeypatch):
    """Prompts in one chunk and in pieces; full and partial pages; a pool in which answers wait."""
    net = long_model(name)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(64, (n,), generator=draw).tolist() for n in (129, 230, 257, 3)]
    how = Sampling(temperature=0.7, max_tokens=30, seed=3)
    want = Engine(net).generate(prompts, 2, how, routes=True)
    for prompt, answers in zip(prompts, want, strict=True):
        for sample in answers:
            with torch.no_grad():
                z = net(torch.tensor([[*prompt, *sample.ids.tolist()]]))[0, len(prompt) - 1 : -1] / 0.7
            expected = z.log_softmax(-1).gather(1, sample.ids[:, None])[:, 0]
            assert torch.allclose(sample.logprobs, expected, atol=2e-4)
    monkeypatch.setattr(gathered_model, "ON_CPU", 60)
    page = 128 * bytes_a_token(net.cfg, torch.float32)
    few = Engine(net, pool_gib=10 * page / 2**30).generate(prompts, 2, how, routes=True)
    for a, b in zip([s for x in want for s in x], [s for x in few for s in x], strict=True):
        assert torch.equal(a.ids, b.ids) and torch.allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert torch.equal(a.prompt_routes.sort(-1).values, b.prompt_routes.sort(-1).values)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("most", [1024, 128])
def test_rows_of_blocks_change_no_token(name, most, monkeypatch):
    """The input of a GPU: prompts on blocks of 128, gaps after them, keys of later pieces padded."""
    net = long_model(name)
    prompts = [list(range(5)), [3] * 130, [1, 2] * 70, [7, 8, 9]]
    how = Sampling(temperature=0.7, max_tokens=4, seed=3)
    want = Engine(net).generate(prompts, 2, how, routes=True)
    seen = []

    def in_blocks(*args, blocks):
        for chunk in chunks(*args, blocks=True):
            seen.append(chunk)
            yield chunk

    monkeypatch.setattr(slots, "chunks", in_blocks)
    monkeypatch.setattr(gathered_model, "ON_CPU", most)
    got = Engine(net).generate(prompts, 2, how, routes=True)
    assert [len(chunk.tokens_1S[0]) for chunk in seen] == ([1024] if most == 1024 else [128] * 6)
    for a, b in zip([s for x in want for s in x], [s for x in got for s in x], strict=True):
        assert torch.equal(a.ids, b.ids) and torch.allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert torch.equal(a.prompt_routes.sort(-1).values, b.prompt_routes.sort(-1).values)


class Direct:
    """Stands for CudaGraphs where there is no GPU: the same inputs, computed in each run."""

    def __init__(self, device: torch.device) -> None:
        self.keys: list[Any] = []

    def run(self, key: Any, step: Callable[[], Any]) -> Any:
        self.keys += [key]
        return step()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["rows", "blocks", "graphs"])
def test_ends_of_several_prompts_share_a_row(name, kind, monkeypatch):
    """Prompts whose beginnings are in the cache: their ends as a CPU gets them, and as a GPU does."""
    blocks = kind != "rows"
    graphs = Direct(torch.device("cpu"))
    if kind == "graphs":
        monkeypatch.setattr(live, "can_be_graphs", lambda model: True)
        monkeypatch.setattr(slots, "CudaGraphs", lambda device: graphs)
    net = long_model(name)
    draw = torch.Generator().manual_seed(1)
    base = torch.randint(64, (300,), generator=draw).tolist()
    prompts = [base[:200], base[:150] + [3] * 9, base[:129] + [5], base[:290]]
    how = Sampling(temperature=0.7, max_tokens=4, seed=3)
    seen = []

    def watched(*args, **_):
        for chunk in chunks(*args, blocks=blocks):
            seen.append(chunk)
            yield chunk

    monkeypatch.setattr(slots, "chunks", watched)
    first, submitted = threading.Event(), threading.Event()

    def after(_):
        first.set()
        submitted.wait()

    with Live(net, slots=4, after=after) as opened:
        opened.submit(base[:260], Sampling(max_tokens=1))
        assert first.wait()
        tickets = [
            opened.submit(prompt, how, details=Details(routes=name == "gqa")) for prompt in prompts[:-1]
        ]
        tickets += [opened.submit(prompts[-1], how)]
        submitted.set()
        found = [ticket.result()[0] for ticket in tickets]
        if kind == "graphs":  # the same shapes again: the inputs of the first chunks are overwritten
            prompts += [base[2:200], [9, *base[:140]]]
            found += [opened.submit(prompt, how).result()[0] for prompt in prompts[4:]]
            of_chunks = [key for key in graphs.keys if key[0] == "prompt"]
            assert len(of_chunks) == len(seen) > len(set(of_chunks))
    monkeypatch.undo()
    seen, cached = seen[: 3 if name == "gqa" else 2], [sample.cached for sample in found[:4]]
    assert [len(chunk.lengths) for chunk in seen] == ([1, 3, 1] if name == "gqa" else [1, 4])
    assert cached == ([0, 0, 0, 256] if name == "gqa" else [128, 128, 128, 256])
    for prompt, sample in zip(prompts, found, strict=True):
        want = Engine(net).generate([prompt], 1, how)[0][0]
        assert torch.equal(sample.ids, want.ids) and torch.allclose(sample.logprobs, want.logprobs, atol=1e-4)


def test_an_engine_is_warm_before_its_first_request(monkeypatch):
    """Each shape of steps and prompts runs twice: compiled, then captured. No count stays."""
    graphs = Direct(torch.device("cpu"))
    monkeypatch.setattr(live, "can_be_graphs", lambda model: True)
    monkeypatch.setattr(slots, "CudaGraphs", lambda device: graphs)
    monkeypatch.setattr(slots, "chunks", lambda *args, blocks: chunks(*args, blocks=True))
    monkeypatch.setattr(gathered_model, "ON_CPU", 8192)
    net = long_model("gqa")
    with Live(net, slots=3, max_len=400) as opened:
        assert warm_up(opened) > 0
        runs = Counter(graphs.keys)
        assert {key[1:3] for key in runs if key[0] == "prompt"} == {(128, 0), (512, 0)}
        assert {key[0] for key in runs if key[0] != "prompt"} == {1, 4} and min(runs.values()) > 1
        ((answer,),) = (opened.submit([1, 2, 3], Sampling(max_tokens=2)).result(),)
        assert len(answer.ids) == 2 and opened.state.tokens == 2 and opened.state.prompt_tokens == 3
        assert Counter(graphs.keys).keys() == runs.keys()


def test_memory_goes_back():
    net = Transformer(replace(GQA, layers=2))
    engine = Engine(net, slots=2)

    def cycle() -> int:
        engine.generate([[1, 2, 3]], 3, Sampling(max_tokens=2), routes=True)
        next(engine.stream([[1, 2, 3]], 1, Sampling(max_tokens=2)))
        gc.collect()
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return sum(t.untyped_storage().nbytes() for t in found)

    cycle()
    before = cycle()
    for _ in range(48):
        engine.generate([[1, 2, 3]], 3, Sampling(max_tokens=2))
    assert cycle() == before


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_memory_goes_back_on_a_gpu(graphs):
    net = Transformer(LONG["gqa"]).cuda()
    engine = Engine(net, pool_gib=0.1, graphs=graphs)
    held = []
    for _ in range(50):
        engine.generate([[1] * 200], 5, Sampling(max_tokens=4))
        held.append(torch.cuda.memory_allocated())
    assert len(set(held[1:])) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONG)
def test_graphs_change_no_token(name):
    net = long_model(name).cuda()
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(64, (n,), generator=draw).tolist() for n in (129, 200, 257, 3)]
    how = Sampling(temperature=0.7, top_p=0.9, max_tokens=70, min_tokens=5, stop_ids=(1, 2), seed=3)
    plain = Engine(net, slots=70, graphs=False).generate(prompts, 20, how, routes=True)
    captured = Engine(net, slots=70, graphs=True).generate(prompts, 20, how, routes=True)
    for a, b in zip([s for x in plain for s in x], [s for x in captured for s in x], strict=True):
        assert torch.equal(a.ids, b.ids) and torch.allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.gpu
def test_experts_of_ones_own_may_wait_for_the_gpu():
    """So their steps are no graphs, in which a wait is an error."""

    def waits(x_ND: torch.Tensor, ends_L: torch.Tensor) -> torch.Tensor:
        return x_ND * min(ends_L.tolist())

    net = long_model("gqa")
    for block in net.blocks:
        block.moe = MoE(net.cfg.dim, net.cfg.moe, experts=waits)
    ((answer,),) = Engine(net.cuda(), slots=2).generate([[1, 2, 3]], 1, Sampling(max_tokens=4))
    assert len(answer.ids) == 4
