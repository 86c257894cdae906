"""Answers do not depend on batch, slots or the host's delay; log-probabilities and routes are the model's."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_models import MODEL

import tmoe
from tmoe.data.tokenizer import ByteTokenizer
from tmoe.generate import Engine, Sampling
from tmoe.generate.cache import PAGE, bytes_a_token
from tmoe.generate.sampler import keep
from tmoe.generate.slots import Slots, rows_of

CFG = replace(MODEL, dropout=0.3, rope=replace(MODEL.rope, max_seq=64), moe=replace(MODEL.moe, jitter=0.3))
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 9], [1, 2, 3], [63, 0, 17, 40]]
WARM = Sampling(temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, max_tokens=9, seed=4, stop_ids=(11, 30))


@pytest.fixture(scope="module")
def model() -> tmoe.Transformer:
    torch.manual_seed(0)
    made = tmoe.Transformer(CFG)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    return made


@pytest.fixture(scope="module")
def bytes_model() -> tmoe.Transformer:
    torch.manual_seed(1)
    return tmoe.Transformer(replace(CFG, vocab=300))  # more ids than bytes: those have no text


def ids_of(samples) -> list[list[list[int]]]:
    return [[sample.ids.tolist() for sample in answers] for answers in samples]


def test_slots_and_neighbours_change_no_token(model):
    want = Engine(model).generate(PROMPTS, 3, WARM)
    assert {sample.finish for answers in want for sample in answers} == {"stop", "length"}
    assert len({tuple(s.ids.tolist()) for answers in want for s in answers}) > 11
    for slots in (1, 3, 7):
        got = Engine(model, slots=slots).generate(PROMPTS, 3, WARM)
        assert ids_of(got) == ids_of(want)
        for a, b in zip(got, want, strict=True):
            for s, t in zip(a, b, strict=True):
                assert torch.allclose(s.logprobs, t.logprobs, atol=1e-5) and s.finish == t.finish
    some = Engine(model, slots=2).generate([PROMPTS[3], PROMPTS[1]], 2, WARM, numbers=[3, 1])
    assert ids_of(some) == [ids_of(want)[3][:2], ids_of(want)[1][:2]]


@pytest.mark.parametrize("selection", ["topk", "expert-choice"])
def test_rows_without_an_answer_change_nothing(selection, monkeypatch):
    """A graph's step has as many rows as its size; experts that choose tokens do not see the empty ones."""
    torch.manual_seed(0)
    moe = replace(CFG.moe, selection=selection)
    model = tmoe.Transformer(replace(CFG, moe=moe))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    want = Engine(model, slots=5).generate(PROMPTS, 1, WARM)
    monkeypatch.setattr(Slots, "size", lambda self, slots: rows_of(self.model, slots))
    got = Engine(model, slots=5).generate(PROMPTS, 1, WARM)
    assert ids_of(got) == ids_of(want)
    for (a,), (b,) in zip(got, want, strict=True):
        assert torch.allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_a_host_that_is_a_step_late_changes_nothing(model, monkeypatch):
    want = Engine(model, slots=3).generate(PROMPTS, 3, WARM, routes=True)
    init = Slots.__init__

    def late(self, *args):
        init(self, *args)
        self.lag = 1

    monkeypatch.setattr(Slots, "__init__", late)
    got = Engine(model, slots=3).generate(PROMPTS, 3, WARM, routes=True)
    assert ids_of(got) == ids_of(want)
    for a, b in zip(got, want, strict=True):
        for s, t in zip(a, b, strict=True):
            assert s.finish == t.finish and torch.equal(s.routes, t.routes)


def test_log_probabilities_and_routes_are_those_of_a_whole_forward(model):
    found = Engine(model, slots=4).generate(PROMPTS, 3, WARM, routes=True)
    model.eval()
    for prompt, answers in zip(PROMPTS, found, strict=True):
        for sample in answers:
            n = len(sample.ids)
            chosen = []
            hooks = [
                block.moe.router.register_forward_hook(lambda m, x, out, to=chosen: to.append(out.ids_TK))
                for block in model.blocks
                if block.moe is not None
            ]
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *sample.ids.tolist()]]))[0]
            for hook in hooks:
                hook.remove()
            z = logits[len(prompt) - 1 : -1] / WARM.temperature
            assert sample.ids.dtype == torch.int64 and sample.logprobs.dtype == torch.float32
            for logprobs, want in (
                (sample.logprobs, z.log_softmax(-1)),
                (sample.sampler_logprobs, keep(z, WARM).log_softmax(-1)),
            ):
                assert torch.allclose(logprobs, want.gather(1, sample.ids[:, None])[:, 0], atol=1e-4)
            assert sample.routes.dtype == torch.int16 and sample.routes.shape == (2, n, CFG.moe.top_k)
            want = torch.stack(chosen)[:, len(prompt) - 1 : -1]
            assert torch.equal(sample.routes.sort(-1).values.int(), want.sort(-1).values.int())
    model.train()


def test_first_tokens_have_the_models_probabilities(model):
    how = replace(WARM, max_tokens=1, stop_ids=())
    found = Engine(model, slots=512).generate([[3, 1, 4]], 4000, how)[0]
    model.eval()
    with torch.no_grad():
        p = keep(model(torch.tensor([[3, 1, 4]]))[:, -1] / 0.9, how)[0].double().softmax(-1)
    model.train()
    counts = torch.cat([sample.ids for sample in found]).bincount(minlength=64).double()
    assert counts[p == 0].sum() == 0
    often = p * 4000 > 5
    want = p[often] * 4000
    k = len(want) - 1
    assert abs(((counts[often] - want) ** 2 / want).sum().item() - k) < 4 * math.sqrt(2 * k)


def test_the_models_mode_comes_back_even_if_a_stream_is_left(model):
    assert model.training
    stream = Engine(model).stream(PROMPTS, 1, WARM)
    next(stream)
    assert not model.training
    stream.close()
    assert model.training


def test_groups_prefill_their_prompt_once(model, monkeypatch):
    from tmoe.generate import slots

    calls = []
    real = slots.prefill
    monkeypatch.setattr(
        slots, "prefill", lambda *args: (calls.append(args[2].tokens_1S.shape), real(*args))[1]
    )
    Engine(model, slots=3).generate([PROMPTS[1]], 8, WARM)
    assert calls == [(1, 6)]
    calls.clear()
    Engine(model).generate(PROMPTS, 4, WARM)
    assert calls == [(1, 12)], "prompts of several lengths in one row; one of a token needs none"


def test_lengths(model):
    greedy = Sampling(temperature=0, max_tokens=50)
    (answer,) = Engine(model).generate([list(range(60))], 1, greedy)[0]
    assert len(answer.ids) == 5 and answer.finish == "length", "positions end at model.rope.max_seq=64"
    assert not answer.sampler_logprobs.any()
    first = int(answer.ids[0])
    (stopped,) = Engine(model, eos=[first]).generate([list(range(60))], 1, greedy)[0]
    assert stopped.ids.tolist() == [first] and stopped.finish == "stop" and stopped.text is None
    how = replace(greedy, min_tokens=3, stop_ids=(first,))
    (later,) = Engine(model).generate([list(range(60))], 1, how)[0]
    assert first not in later.ids[:3].tolist() and len(later.ids) >= 3
    assert Engine(model).generate([], 1, greedy) == ()


def test_texts_and_stop_texts(bytes_model):
    engine = Engine(bytes_model, ByteTokenizer())
    how = Sampling(temperature=1.0, max_tokens=30, seed=2)
    (plain,) = engine.generate(["héy"], 1, how)[0]
    assert plain.ids.max() < 256, "an id without a text never comes"
    raw = bytes(plain.ids.tolist()[:-1] if plain.finish == "stop" else plain.ids.tolist())
    assert plain.text == raw.decode("utf-8", "replace")
    pieces = list(engine.stream(["héy"], 1, how))
    assert "".join(piece.text for piece in pieces) == plain.text and pieces[-1].done.text == plain.text
    character = next(c for c in plain.text if c.isprintable() and c.isascii())
    (cut,) = engine.generate(["héy"], 1, replace(how, stop=(character,)))[0]
    assert cut.text == plain.text.partition(character)[0] and cut.finish == "stop"
    assert cut.ids.tolist() == plain.ids.tolist()[: len(cut.ids)] and cut.ids[-1] == ord(character)


def test_a_pool_that_holds_few_answers_takes_turns(model, monkeypatch):
    from tmoe.generate import slots

    rows = []
    real = slots.decode
    monkeypatch.setattr(slots, "decode", lambda *args: (rows.append(len(args[2])), real(*args))[1])
    a_page = PAGE * bytes_a_token(CFG, torch.float32)
    small = Engine(model, pool_gib=4.5 * a_page / 2**30)  # nowhere, a prompt's end, two answers
    assert ids_of(small.generate(PROMPTS, 4, WARM)) == ids_of(Engine(model).generate(PROMPTS, 4, WARM))
    assert max(rows[: rows.index(20)]) == 3, "an answer to a prompt of one token needs no page of the prompt"
    with pytest.raises(ValueError, match=r"--pool-gib: .* GiB .*, but one answer of 15 tokens.*3 pages"):
        Engine(model, pool_gib=2.5 * a_page / 2**30).generate(PROMPTS, 4, WARM)


def test_what_is_cached_of_a_token():
    assert bytes_a_token(CFG, torch.float32) == 3 * 2 * (8 + 8) * 4
    deepseek = tmoe.presets()["deepseek-v2-lite"].model
    assert bytes_a_token(deepseek, torch.bfloat16) == 27 * (512 + 64) * 2  # 30 KiB
    assert bytes_a_token(tmoe.presets()["qwen3-30b-a3b"].model, torch.bfloat16) == 96 * 1024
    kinds = replace(CFG, window=8, windowed=(1, 0, 0), window_kv_heads=4, v_head_dim=6)
    assert bytes_a_token(kinds, torch.float32) == (4 + 2 + 2) * (8 + 6) * 4


@pytest.mark.parametrize(
    "prompts, how, names",
    [
        ([[1], []], WARM, r"prompts\[1\]: is empty"),
        ([[64]], WARM, r"prompts\[0\]: has the id 64; valid are ids from 0 to 63 \(model\.vocab=64\)"),
        ([[-1]], WARM, r"prompts\[0\]: has the id -1"),
        ([[1] * 65], WARM, r"prompts\[0\]: 65 tokens, but model\.rope\.max_seq=64"),
        (["text"], WARM, r"prompts\[0\]: a text needs a tokenizer"),
        ([[1]], Sampling(stop=("a",)), r"stop=\('a',\): needs a tokenizer"),
        ("text", WARM, r"prompts: got str, valid is a list of prompts"),
        ([5, 3], WARM, r"prompts\[0\]: got int, valid is a list; valid are ids from 0 to 63"),
        ([[1], [2.0]], WARM, r"prompts\[1\]: has the id 2\.0"),
        ([[True]], WARM, r"prompts\[0\]: has the id True"),
        ([[1, None]], WARM, r"prompts\[0\]: has the id None"),
        ([torch.tensor([1.0])], WARM, r"prompts\[0\]: got a tensor of float32 \[1\]"),
        ([torch.tensor([[1, 2]])], WARM, r"prompts\[0\]: got a tensor of int64 \[1, 2\]"),
        ([[1]], Sampling(stop_ids=(64,)), r"stop_ids: has the id 64; valid are ids from 0 to 63"),
        ([[1]], Sampling(suppress=tuple(range(64))), "suppress: holds every token that has a text"),
        ([[1]], Sampling(min_tokens=2, stop_ids=tuple(range(64))), r"min_tokens=2: eos and stop_ids hold"),
        ([[1]], dict(temperature=1.0), r"sampling: got dict, valid is tmoe\.Sampling"),
    ],
    ids=str,
)
def test_bad_prompts_are_named(model, prompts, how, names):
    with pytest.raises(ValueError, match=names):
        Engine(model).generate(prompts, 1, how)


def test_bad_arguments_are_named(model):
    with pytest.raises(ValueError, match="model: got a Linear"):
        Engine(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="--slots=0"):
        Engine(model, slots=0)
    with pytest.raises(ValueError, match="n=0"):
        Engine(model).generate([[1]], 0)
    with pytest.raises(ValueError, match="numbers: got 1 for 2 prompts"):
        Engine(model).generate([[1], [2]], 1, numbers=[0])
    with pytest.raises(ValueError, match="numbers: got 1 for 1 prompts, valid is one from 0 on"):
        Engine(model).generate([[1]], 1, numbers=[0.5])
    with pytest.raises(ValueError, match=r"n=1\.5: must be a whole number"):
        Engine(model).generate([[1]], 1.5)  # pyrefly: ignore


@pytest.mark.parametrize(
    "given, names",
    [
        (dict(slots="4"), r"--slots='4': must be a whole number"),
        (dict(pool_gib=math.inf), r"--pool-gib=inf: must be a number above 0, and finite"),
        (dict(pool_gib=math.nan), r"--pool-gib=nan"),
        (dict(eos=[-1]), r"eos: has the id -1; valid are ids from 0 to 63"),
        (dict(eos=5), r"eos: got int, valid is a list"),
        (dict(begin=[64]), r"begin: has the id 64"),
        (dict(tokenizer="bytes"), r"tokenizer: got str"),
    ],
    ids=str,
)
def test_bad_settings_of_an_engine_are_named(model, given, names):
    with pytest.raises(ValueError, match=names):
        Engine(model, **given)


def test_a_text_that_is_no_unicode_is_named(bytes_model):
    with pytest.raises(ValueError, match=r"prompts\[1\]: is no Unicode text: '\\ud800' at 1"):
        Engine(bytes_model, ByteTokenizer()).generate(["a", "a\ud800"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_no_answer(temperature):
    torch.manual_seed(0)
    broken = tmoe.Transformer(CFG)
    with torch.no_grad():
        broken.head_weight[3] = math.nan
    with pytest.raises(ValueError, match=r"prompts\[0\], answer 0, token 0: .* logits are not finite"):
        Engine(broken).generate([[1]], 1, Sampling(temperature=temperature, max_tokens=2))


def test_the_coldest_temperature_is_the_most_probable_token(model):
    cold, none = (Sampling(temperature=t, max_tokens=4) for t in (1e-6, 0.0))
    assert ids_of(Engine(model).generate(PROMPTS, 1, cold)) == ids_of(
        Engine(model).generate(PROMPTS, 1, none)
    )
