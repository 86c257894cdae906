"""generation_config.json: what answers follow, and what a line names because they do not."""

import pytest
from corpora import bpe  # noqa: F401
from transformers import GenerationConfig

from tmoe.config.presets import presets
from tmoe.data.chat.format import ChatFormat, ends_in, ends_of
from tmoe.data.tokenizer import ByteTokenizer, load_tokenizer
from tmoe.generate import Engine
from tmoe.generate.generation_config import DRAWN, SILENT, not_followed, sampling_of
from tmoe.model.transformer import Transformer


@pytest.mark.parametrize(
    ("told", "want"),
    [
        ({}, {}),
        (dict(temperature=0.5, top_k=3), {}),  # transformers draws nothing unless do_sample is true
        (dict(do_sample=False, temperature=0.5), dict(temperature=0)),
        (
            dict(do_sample=True, temperature=0.5, top_k=3, top_p=None, min_p=0.1),
            dict(temperature=0.5, top_k=3, min_p=0.1),
        ),
        (dict(do_sample=True, top_k=True, stop_strings="x"), dict(stop=("x",))),
        (dict(stop_strings=["x", "", 3]), dict(stop=("x",))),
        (dict(repetition_penalty=1.05, min_new_tokens=3), dict(repetition_penalty=1.05, min_tokens=3)),
        (dict(repetition_penalty=1, min_new_tokens=0, suppress_tokens=[]), {}),
        (dict(suppress_tokens=[-1, 3], bad_words_ids=[[4], [5, 6]]), dict(suppress=(3, 4))),
        (dict(bad_words_ids=[[4], [5]], suppress_tokens=[7], eos_token_id=[4, 7]), dict(suppress=(7, 5))),
    ],
)
def test_what_is_followed(told, want):
    assert sampling_of(told) == want


@pytest.mark.parametrize(
    ("told", "answers", "rollouts"),
    [
        (dict(do_sample=True, temperature=0.6, repetition_penalty=1.0), [], ["temperature=0.6"]),
        (dict(do_sample=False), [], ["do_sample=False"]),
        (dict(temperature=0.6), ["temperature=0.6"], ["temperature=0.6"]),
        (dict(temperature=0.6, do_sample=None), ["temperature=0.6"], ["temperature=0.6"]),
        (dict(repetition_penalty=1.05, typical_p=1.0), [], ["repetition_penalty=1.05"]),
        (dict(repetition_penalty="1.05"), *[["repetition_penalty='1.05'"]] * 2),
        (dict(no_repeat_ngram_size=3), *[["no_repeat_ngram_size=3"]] * 2),
        (
            dict(bad_words_ids=[[3]], suppress_tokens=[], begin_suppress_tokens=None),
            *[[], ["bad_words_ids=[[3]]"]],
        ),
        (dict(bad_words_ids=[[3], [4, 5]]), ["bad_words_ids=[[4, 5]]"], ["bad_words_ids=[[3], [4, 5]]"]),
        (dict(eos_token_id=[1], transformers_version="5", _from_model_config=True), [], []),
        (dict(of_tomorrow=2), ["of_tomorrow=2"], ["of_tomorrow=2"]),
        (dict(stop_strings=["x"]), [], ["stop_strings=['x']"]),
    ],
)
def test_what_is_named(told, answers, rollouts):
    assert not_followed(told) == answers
    assert not_followed(told, followed=False) == rollouts


def test_every_key_of_transformers_is_known_or_named():
    """Its defaults ask for nothing; a value of its own is followed, changes no token, or is named."""
    defaults = GenerationConfig()._get_default_generation_params()
    assert not_followed(defaults) == []
    for name in vars(GenerationConfig()):
        found = not_followed({name: 7, "do_sample": True})
        followed = {*SILENT, *DRAWN, "repetition_penalty", "min_new_tokens"}
        assert found == [f"{name}=7"] or name in followed or name[0] == "_", name


def test_an_engine_ends_answers_at_all_ends_of_its_tokenizer(bpe):  # noqa: F811
    tokenizer = ByteTokenizer()
    tokenizer.chat = ChatFormat(None, ends=(65, 66, 999))
    assert ends_of(tokenizer, 256) == (0, 65, 66)
    assert Engine(Transformer(presets()["tiny"].model), tokenizer).eos == (0, 65, 66)
    assert Engine(Transformer(presets()["tiny"].model), tokenizer, eos=[7]).eos == (7,)
    folder = bpe.parent
    assert ends_of(load_tokenizer(str(folder)), 300) == (0,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 0, 400]}')
    assert ends_of(load_tokenizer(str(folder)), 300) == ends_of(load_tokenizer(str(bpe)), 300) == (0, 5)
    assert ends_in(dict(eos_token_id=[3, "x", 3, -1, True]), dict(eos_token_id=9)) == (3,)
    assert ends_in({}, dict(eos_token_id=9)) == (9,)
    assert ends_in({}, dict(text_config=dict(eos_token_id=[9, 8]))) == (9, 8)
