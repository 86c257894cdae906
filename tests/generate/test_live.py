"""An engine that stays open: answers are those of requests alone, whatever comes, ends or fails meanwhile.

next: tests/generate/test_pages.py
"""

import random
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tiny_models import MODEL

import tmoe
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig
from tmoe.data.chat.template import ChatTemplate
from tmoe.data.tokenizer import ByteTokenizer, DataError
from tmoe.generate import Details, Engine, Live, Sampling, slots
from tmoe.generate.cache import PAGE, bytes_a_token

CFG = replace(MODEL, vocab=270, layers=2, rope=replace(MODEL.rope, max_seq=400))
BROKEN = 200  # a token without a finite embedding


def made(cfg: ModelConfig = CFG) -> tmoe.Transformer:
    torch.manual_seed(0)
    model = tmoe.Transformer(cfg)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 1.7 * cfg.dim**-0.5)
        model.embedding.weight[BROKEN] = torch.nan
    return model.eval()


@pytest.fixture(scope="module")
def model() -> tmoe.Transformer:
    return made()


def asks(rng: random.Random, kinds: int) -> list[tuple]:
    """Requests (prompt, sampling, n). Some prompts share a beginning, some have the broken token."""
    base = [rng.randrange(1, 127) for _ in range(300)]
    found = []
    for i in range(kinds):
        length = rng.choice([1, 2, 5, 20, 60, 127, 128, 129, 150, 260])
        ids = base[:length] if rng.random() < 0.5 else [rng.randrange(1, 127) for _ in range(length)]
        ids = ids + [rng.randrange(1, 127)]
        if i % 20 == 19:
            ids[rng.randrange(len(ids))] = BROKEN
        how = Sampling(
            temperature=rng.choice([0, 0.7, 1.0, 1.3]),
            top_k=rng.choice([0, 0, 3, 20]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            max_tokens=rng.choice([1, 2, 6, 12]),
            min_tokens=rng.choice([0, 0, 1]),
            stop=rng.choice([(), (), ("e", "A"), ("\x03",)]),
            stop_ids=rng.choice([(), (), tuple(range(60, 90))]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.4]),
            suppress=rng.choice([(), (), (), tuple(range(0, 250, 3))]),
            seed=rng.randrange(2**31),
        )
        found.append((ids, how, rng.choice([1, 1, 1, 2, 3])))
    return found


def alone(engine: Engine, ask: tuple) -> tuple | None:
    """The answers of Engine.generate; None if it finds logits that are not finite."""
    ids, how, n = ask
    try:
        return engine.generate([ids], n, how, routes=True)[0]
    except ConfigError as error:
        assert "logits are not finite" in str(error)
        return None


def come_and_go(live: Live, kinds: list[tuple], requests: int, rng: random.Random) -> list[tuple]:
    """Submits random requests while others run, and cancels some: (number of its kind, ticket, cancelled)."""
    found, open_ = [], []
    for _ in range(requests):
        kind = rng.randrange(len(kinds))
        ids, how, n = kinds[kind]
        ticket = live.submit(ids, how, n=n, details=Details(routes=True) if rng.random() < 0.3 else None)
        doomed = rng.random() < 0.15
        found.append((kind, ticket, doomed))
        if doomed and rng.random() < 0.5:
            live.cancel(ticket)
        open_.append((ticket, doomed))
        while len(open_) > rng.choice([1, 10, 40]):
            ticket, doomed = open_.pop(rng.randrange(len(open_)))
            if doomed:
                next(iter(ticket), None)  # it has begun, or is over
                ticket.cancel()
            else:
                ticket.result()
    for ticket, doomed in open_:
        ticket.cancel() if doomed else ticket.result()
    return found


def compare(kinds: list[tuple], came: list[tuple], engine: Engine) -> dict[str, int]:
    """Compares answers with those of requests alone; counts of what happened."""
    want, seen = {}, dict(equal=0, cancelled=0, errors=0, cached=0, routes=0, other_routes=0)
    for kind, ticket, doomed in came:
        if kind not in want:
            want[kind] = alone(engine, kinds[kind])
        got = ticket.result()
        seen["cached"] += got[0].cached
        if want[kind] is None:
            assert doomed or "error" in {sample.finish for sample in got}
            seen["errors"] += 1
            continue
        for a, b in zip(got, want[kind], strict=True):
            if a.finish == "cancel":
                assert doomed and a.ids.tolist() == b.ids.tolist()[: len(a.ids)]
                seen["cancelled"] += 1
                continue
            assert (a.ids.tolist(), a.text, a.finish) == (b.ids.tolist(), b.text, b.finish), kinds[kind]
            assert torch.allclose(a.logprobs, b.logprobs, atol=1e-4)
            assert torch.allclose(a.sampler_logprobs, b.sampler_logprobs, atol=1e-4)
            seen["equal"] += 1
            if a.routes is None:
                continue
            for x, y in ((a.routes, b.routes), (a.prompt_routes, b.prompt_routes)):
                if y is not None:  # else the prompt has one token
                    differ = (x.sort(-1).values != y.sort(-1).values).any(-1)
                    seen["routes"] += differ.numel()
                    seen["other_routes"] += int(differ.sum())
    return seen


def test_a_thousand_requests_come_end_and_are_cancelled(model):
    rng = random.Random(1)
    kinds = asks(rng, 220)
    with Live(model, ByteTokenizer(), slots=8, pool_gib=26 * 128 * 256 / 2**30, budget=128) as live:
        came = come_and_go(live, kinds, 1000, rng)
        assert live.room.pages < 27, "answers wait for pages"
    seen = compare(kinds, came, Engine(model, ByteTokenizer()))
    assert seen["equal"] > 700 and seen["cancelled"] > 50 and seen["errors"] > 20 and seen["cached"] > 1000
    # a token's experts may differ where two are equally probable up to rounding
    assert seen["other_routes"] <= seen["routes"] // 5000, seen
    state = live.state
    assert state.steps > 1000
    assert (state.running, state.waiting, state.pages_in_use) == (0, 0, 0), state


def test_a_host_that_is_a_step_late(model, monkeypatch):
    """A GPU's results are read a step later: cancelled and failed answers are then in one more step."""
    init = slots.Slots.__init__

    def late(self, *args):
        init(self, *args)
        self.lag = 1

    monkeypatch.setattr(slots.Slots, "__init__", late)
    rng = random.Random(2)
    kinds = asks(rng, 60)
    with Live(model, ByteTokenizer(), slots=6, pool_gib=26 * 128 * 256 / 2**30, budget=128) as live:
        came = come_and_go(live, kinds, 150, rng)
    seen = compare(kinds, came, Engine(model, ByteTokenizer()))
    assert seen["equal"] > 100 and seen["cancelled"] and seen["errors"] and seen["cached"], seen
    assert live.state.pages_in_use == 0


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("tokens", [1, 5])
def test_neighbours_of_a_broken_prompt_are_answered(model, monkeypatch, lag, tokens):
    """A NaN prompt makes all prompts of its row NaN. Each of the other prompts is then computed alone."""
    init = slots.Slots.__init__

    def late(self, *args):
        init(self, *args)
        self.lag = lag

    monkeypatch.setattr(slots.Slots, "__init__", late)
    first, submitted = threading.Event(), threading.Event()

    def after(_):
        first.set()
        submitted.wait()

    how = Sampling(max_tokens=tokens, seed=4, suppress=(BROKEN,))
    prompts = [[5] * 140, [BROKEN, 3, 4], [6, 7, 8], [9] * 130]
    with Live(model, slots=5, after=after) as live:
        live.submit([1, 2], Sampling(max_tokens=1))
        assert first.wait()
        tickets = [live.submit(prompt, how, n=2) for prompt in prompts]
        submitted.set()
        found = [ticket.result() for ticket in tickets]
        # no later prompt reuses the pages of the broken row, because those pages have no key
        assert live.submit([5] * 140, how).result()[0].cached == 0
    assert [sample.error for sample in found[1]] == ["log-prob nan: the model's logits are not finite"] * 2
    engine = Engine(model)
    for i in (0, 2, 3):
        want = engine.generate([prompts[i]], 2, how)[0]
        assert [s.ids.tolist() for s in found[i]] == [s.ids.tolist() for s in want]
    assert live.state.pages_in_use == 0


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_a_thousand_requests_on_a_gpu(graphs):
    """With bits, so that no batch rounds in another way."""
    rng = random.Random(1)
    kinds = asks(rng, 120)
    moe = replace(CFG.moe, ffn_dim=128, shared_dim=128)
    cfg = replace(CFG, dim=256, heads=8, kv_heads=2, head_dim=128, ffn_dim=256, moe=moe)
    engine = Engine(made(cfg).to("cuda", torch.bfloat16), ByteTokenizer(), graphs=graphs, bits=True)
    a_page = PAGE * bytes_a_token(cfg, torch.bfloat16)
    with Live(engine, slots=24, pool_gib=80 * a_page / 2**30, budget=128) as live:
        came = come_and_go(live, kinds, 1000, rng)
    seen = compare(kinds, came, engine)
    assert seen["equal"] > 700 and seen["cancelled"] > 50 and seen["errors"] > 20 and seen["cached"] > 1000
    assert seen["other_routes"] == 0, seen
    assert (live.state.running, live.state.waiting, live.state.pages_in_use) == (0, 0, 0), live.state


def test_what_is_recorded_is_the_models(model):
    """Alternatives, log-probs of the prompt and weights of experts, against a whole forward."""
    prompt = [5, 17, 3, 99, 4] * 40
    how = Sampling(temperature=0.7, top_k=9, seed=3, max_tokens=5)
    asked = Details(routes=True, route_weights=True, top_logprobs=4, prompt_logprobs=True)
    with Live(model, slots=4, budget=128) as live:
        live.submit([9, 8], Sampling(max_tokens=30))  # so that the prompt is computed in pieces
        plain = live.submit(prompt, how)
        ticket = live.submit(prompt, how, n=2, details=asked)
        pieces = [piece for piece in ticket if piece.sample == 1]
        experts = Details(routes=True, route_weights=True)
        (before,), (reused,) = [live.submit(prompt, how, details=experts).result() for _ in range(2)]
        samples = ticket.result()
    assert plain.result()[0].ids.tolist() == samples[0].ids.tolist() and plain.result()[0].tops is None
    for sample in (*samples, *Engine(model).generate([prompt], 2, how, details=asked)[0]):
        routings = []
        hooks = [
            block.moe.router.register_forward_hook(lambda m, x, out, to=routings: to.append(out))
            for block in model.blocks
            if block.moe is not None
        ]
        with torch.no_grad():
            z = model(torch.tensor([[*prompt, *sample.ids.tolist()]]))[0].log_softmax(-1)
        for hook in hooks:
            hook.remove()
        first = len(prompt) - 1
        for tops, at, ids in (
            (sample.prompt_tops, z[:first], torch.tensor(prompt[1:])),
            (sample.tops, z[first:-1], sample.ids),
        ):
            assert torch.allclose(tops.own, at.gather(1, ids[:, None])[:, 0], atol=1e-4)
            assert torch.allclose(tops.logprobs, at.topk(4).values, atol=1e-4)
            assert torch.allclose(at.gather(1, tops.ids), tops.logprobs, atol=1e-4)
        weights = torch.stack([routing.weights_TK for routing in routings])
        assert sample.route_weights.dtype == torch.float16
        found = torch.cat([sample.prompt_route_weights, sample.route_weights], 1).float()
        assert torch.allclose(found.sort(-1).values, weights[:, :-1].sort(-1).values, atol=2e-3)
    whole = samples[1]
    assert [i for piece in pieces for i in piece.ids] == whole.ids.tolist()
    assert torch.equal(torch.cat([piece.tops.own for piece in pieces]), whole.tops.own)
    assert torch.equal(torch.cat([piece.route_weights for piece in pieces], 1), whole.route_weights)
    # routes of tokens that an earlier prompt left in the cache are those that it had
    assert samples[0].cached == before.cached == 0 and reused.cached == 128
    assert torch.equal(reused.prompt_routes, before.prompt_routes)
    assert torch.allclose(reused.prompt_route_weights, before.prompt_route_weights, atol=1e-3)


def test_a_long_prompt_is_computed_between_steps(model, monkeypatch):
    log: list[int] = []  # tokens of prompts; 0: a step
    real, step = slots.prefill, slots.Slots.step
    monkeypatch.setattr(slots, "prefill", lambda *a: (log.append(a[2].tokens_1S.numel()), real(*a))[1])
    monkeypatch.setattr(slots.Slots, "step", lambda self: (log.append(0), step(self))[1])
    with Live(model, slots=4, budget=128) as live:
        streams = [live.submit([7, i], Sampling(max_tokens=200, seed=i), n=2) for i in range(1)]
        next(iter(streams[0]))
        begun = len(log)
        long = live.submit([3] * 390, Sampling(max_tokens=1))
        long.result()
        sizes = log[begun:]
        assert [size for size in sizes if size] == [128, 128, 128, 5]
        assert all(not (a and b) for a, b in pairwise(sizes)), "a step between two pieces"
        for ticket in streams:
            ticket.cancel()


@pytest.mark.parametrize("bits", [False, True])
def test_reused_pages_change_nothing(bits):
    """The common beginning of prompts is computed once. With bits the log-probs are equal."""
    rng = random.Random(0)
    base = [rng.randrange(32, 127) for _ in range(390)]
    prompts = [base[:300], base[:260] + [65] * 90, base[:150], base[:128] + [66, 67], base, base[:129]]
    engine = Engine(made(), slots=4, bits=bits)
    how = Sampling(temperature=0.8, seed=3, max_tokens=6, suppress=(BROKEN,))
    found = {}
    for reuse in (False, True):
        with Live(engine, slots=4, reuse=reuse) as live:
            found[reuse] = [live.submit(prompt, how, n=2).result() for prompt in prompts]
            state = live.state
            burst = [live.submit(prompt, how, n=2) for prompt in prompts]  # several ends in a row
            found[reuse, "burst"] = [ticket.result() for ticket in burst]
        want = 300 + 350 + 150 + 130 + 390 + 129
        cached = [0, 256, 128, 128, 256, 128] if reuse else [0] * 6
        assert [samples[0].cached for samples in found[reuse]] == cached
        assert (state.prompt_tokens, state.cached_tokens) == (want, sum(cached))
    for i, prompt in enumerate(prompts):
        want = engine.generate([prompt], 2, how)[0]
        for how_made, samples in found.items():
            for x, y in zip(samples[i], want, strict=True):
                assert x.ids.tolist() == y.ids.tolist(), how_made
                assert torch.equal(x.logprobs, y.logprobs) or not bits, how_made
                assert torch.allclose(x.logprobs, y.logprobs, atol=1e-4)


@pytest.mark.parametrize(("bits", "lag"), [(False, 0), (False, 1), (True, 0)])
def test_a_second_turn_reuses_the_first_ones_answer(bits, lag, monkeypatch):
    init = slots.Slots.__init__

    def late(self, *args):
        init(self, *args)
        self.lag = lag

    monkeypatch.setattr(slots.Slots, "__init__", late)
    engine = Engine(made(), slots=4, bits=bits)
    how = Sampling(temperature=0.8, seed=3, max_tokens=150, suppress=(BROKEN,))
    experts = Details(routes=True, route_weights=True)
    with Live(engine, slots=4) as live:
        for details in (experts,) if bits else (None, experts):
            first = [5, 6, 7] * 40
            answers = live.submit(first, how, n=2, details=details).result()
            second = [*first, *answers[1].ids.tolist(), 8, 9]  # 120 + 150 + 2 tokens
            again = live.submit(second, replace(how, max_tokens=5), details=details).result()[0]
            assert again.cached == 256
            want = engine.generate([second], 1, replace(how, max_tokens=5), details=experts)[0][0]
            assert again.ids.tolist() == want.ids.tolist()
            assert torch.equal(again.logprobs, want.logprobs) or not bits
            assert torch.allclose(again.logprobs, want.logprobs, atol=1e-4)
            if details is not None:
                assert torch.equal(again.prompt_routes.sort(-1).values, want.prompt_routes.sort(-1).values)
                got, expected = again.prompt_route_weights, want.prompt_route_weights
                assert torch.allclose(got.sort(-1).values, expected.sort(-1).values, atol=2e-3)


def test_requests_are_cancelled_wherever_they_are(model):
    """One that runs, one whose prompt is being computed, and one that waits; their pages are free at once."""
    with Live(model, slots=2, budget=128, pool_gib=14 * 128 * 256 / 2**30) as live:
        runs = live.submit([1, 2, 3], Sampling(max_tokens=390, seed=1))
        next(iter(runs))
        filled = live.submit([4] * 380, Sampling(max_tokens=20), n=3)
        waits = live.submit([5], Sampling(max_tokens=300), n=2)
        for ticket in (filled, waits, runs):
            ticket.cancel()
        assert [s.finish for t in (runs, filled, waits) for s in t.result()] == ["cancel"] * 6
        assert runs.result()[0].ids.tolist() and waits.result()[0].ids.tolist() == []
        runs.cancel()  # again, which changes nothing
        assert live.submit([6], Sampling(max_tokens=3)).result()[0].finish == "length"
    assert live.state.pages_in_use == 0
    with pytest.raises(RuntimeError, match="drained"):
        live.submit([1])


def test_drain_waits_or_cancels(model):
    live = Live(model, slots=2)
    tickets = [live.submit([i], Sampling(max_tokens=9, seed=i)) for i in range(5)]
    assert live.drain()
    assert {sample.finish for ticket in tickets for sample in ticket.result(0)} == {"length"}
    live = Live(model, slots=1)
    tickets = [live.submit([i], Sampling(max_tokens=390)) for i in range(3)]
    next(iter(tickets[0]))
    assert not live.drain(timeout=0)
    assert [ticket.result(0)[0].finish for ticket in tickets] == ["cancel"] * 3
    assert tickets[0].result()[0].ids.tolist()


def test_a_template_that_raises_ends_its_request_alone(model):
    refuses = "{% for m in messages %}{{ raise_exception('no ' + m['role']) }}{% endfor %}"
    tokenizer = ByteTokenizer()
    shows = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with Live(model, tokenizer, slots=2) as live:
        other = live.submit("abc", Sampling(max_tokens=20))
        messages = [dict(role="user", content="ab")]
        with pytest.raises(DataError, match="no user"):
            live.submit(messages, chat=dict(template=ChatTemplate(refuses, "test", {})))
        said = live.submit(
            messages, Sampling(max_tokens=4, seed=2), chat=dict(template=ChatTemplate(shows, "test", {}))
        )
        assert (
            said.result()[0].ids.tolist()
            == live.submit("ab", Sampling(max_tokens=4, seed=2)).result()[0].ids.tolist()
        )
        assert other.result()[0].finish in ("stop", "length")


def test_a_failed_engine_is_said_to_all(model):
    def fail(pieces):
        raise OSError("the pipe is closed")

    live = Live(model, slots=1, after=fail)
    tickets = [live.submit([i], Sampling(max_tokens=5)) for i in range(3)]
    for ticket in tickets:
        with pytest.raises(RuntimeError, match="the pipe is closed"):
            ticket.result()
        with pytest.raises(RuntimeError, match="the pipe is closed"):
            list(ticket)
    assert not live.drain()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(slots=0), "--slots=0: must be"),
        (dict(pool_gib=0), "--pool-gib=0"),
        (dict(pool_gib=1e-9), "must hold two pages"),
        (dict(max_len=500), r"--max-len=500: must be from 1 to model.rope.max_seq=400"),
        (dict(budget=5), "--budget=5: must be"),
    ],
    ids=str,
)
def test_bad_settings_are_named(model, given, words):
    with pytest.raises(ConfigError, match=words):
        Live(model, **given)


def test_bad_requests_are_named(model):
    with Live(model, slots=1, max_len=300, pool_gib=3.5 * 128 * 256 / 2**30) as live:
        for prompt, more, words in (
            ([], {}, "is empty"),
            ("text", {}, "needs a tokenizer"),
            ([dict(role="user", content="a")], {}, "need a tokenizer"),
            ([1] * 301, {}, "301 tokens, but max_len=300"),
            ([1], dict(n=0), "n=0"),
            ([1], dict(number=-1), "number=-1"),
            ([1], dict(sampling=Sampling(stop=("a",))), "needs a tokenizer"),
            ([1], dict(chat={}), "chat: valid only"),
            ([1] * 280, dict(sampling=Sampling(max_tokens=20)), "3 pages|4 pages"),
        ):
            with pytest.raises(ConfigError, match=words):
                live.submit(prompt, **more)
        with pytest.raises(ConfigError, match="top-logprobs=21"):
            Details(top_logprobs=21)
        assert live.submit([1], Sampling(max_tokens=2)).result()[0].finish == "length"


def asks_of(rank: int) -> list[tuple[list[int], Sampling]]:
    return [([1 + rank, 2 + i, 7], Sampling(seed=10 * rank + i, max_tokens=4 + 5 * i)) for i in range(3)]


def on_ranks(rank: int, world: int) -> list[list[list[int]]]:
    """The tokens of a rank's requests, which the two ranks submit at different times."""
    net = tmoe.Transformer(MODEL)
    net.init_weights(0)
    net = tmoe.parallel.parallelize(net, tmoe.parallel.build_mesh(ep=world))
    with Live(net.eval(), slots=2, max_len=16) as live:
        tickets = []
        for ids, how in asks_of(rank):
            if rank == 0 and tickets:
                tickets[-1].result()
            tickets.append(live.submit(ids, how, n=2))
            time.sleep(0.05 * rank)
        return [[sample.ids.tolist() for sample in ticket.result()] for ticket in tickets]


def test_ranks_that_share_experts_have_requests_of_their_own(gloo):
    found = gloo(2, on_ranks)
    net = tmoe.Transformer(MODEL)
    net.init_weights(0)
    engine = Engine(net.eval())
    for rank in range(2):
        want = [engine.generate([ids], 2, how)[0] for ids, how in asks_of(rank)]
        assert found[rank] == [[sample.ids.tolist() for sample in samples] for samples in want]
