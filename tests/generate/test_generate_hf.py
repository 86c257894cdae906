"""Greedy answers equal those of transformers' `generate` with its cache, and those without any cache."""

import pytest
import torch
from hf_tiny import MODELS, make, saved
from tiers import slow_but

from tmoe.generate import Engine, Sampling
from tmoe.generate.generation_config import sampling_of
from tmoe.hf.files import Folder
from tmoe.hf.load_weights import load_hf
from tmoe.hf.tensor_plan import plan_folder
from tmoe.model.transformer import Transformer

pytestmark = pytest.mark.filterwarnings("ignore:--model.moe.top-k=1")
TOKENS = 14
# Of different lengths, one a single token, one longer than every window of MODELS.
LENGTHS = [1, 4, 23, 9]
# each kind of attention, of its scalings and of windows once; the slow tier has all
FAST = [
    "qwen3, tied, yarn",
    "mixtral, window",
    "gpt_oss",
    "deepseek_v2, lite: no query latent, greedy, mscale",
    "deepseek_v3",
    "mistral4",
    "olmoe",
]

# transformers ignores the limits of Mamba-2's steps for single tokens
LIMITED = ("nemotron_h, latent experts, groups, no bias of the convolution",)


def prompts() -> list[list[int]]:
    made = torch.Generator().manual_seed(3)
    return [torch.randint(3, 31, (n,), generator=made).tolist() for n in LENGTHS]


def without_cache(model: Transformer, ids: list[int], tokens: int) -> list[int]:
    """Greedy tokens, each from a whole forward."""
    for _ in range(tokens):
        with torch.no_grad():
            ids = ids + [int(model(torch.tensor([ids]))[0, -1].argmax())]
    return ids[-tokens:]


@pytest.mark.parametrize("name", slow_but(FAST, MODELS))
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    folder = saved(tmp_path / "hf", name)
    cfg = plan_folder(Folder(folder)).cfg
    model = Transformer(cfg)
    load_hf(folder, model.state_dict(), cfg)
    theirs = make(name)
    theirs.generation_config.eos_token_id = None
    found = Engine(model, slots=3).generate(prompts(), 1, Sampling(temperature=0, max_tokens=TOKENS))
    for ids, (sample,) in zip(prompts(), found, strict=True):
        asked = torch.tensor([ids])
        how = dict(max_new_tokens=TOKENS, do_sample=False, attention_mask=torch.ones_like(asked))
        with torch.no_grad():
            want = theirs.generate(asked, **how)[0, len(ids) :]
        assert sample.ids.tolist() == without_cache(model, ids, TOKENS)
        assert name in LIMITED or sample.ids.tolist() == want.tolist()
        assert sample.finish == "length"


FILES = [  # keys of generation_config.json that every answer follows
    dict(repetition_penalty=1.7),
    dict(repetition_penalty=0.6, suppress_tokens=[-1, 7, 11]),
    dict(bad_words_ids=[[5], [9]], min_new_tokens=6, eos_token_id=list(range(16))),
]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_answers_follow_the_file_as_those_of_transformers(file, tmp_path):
    """More prompts than slots, whose answers end at different steps. Log-probs are the model's own."""
    folder = saved(tmp_path / "hf", FAST[0])
    cfg = plan_folder(Folder(folder)).cfg
    model = Transformer(cfg)
    load_hf(folder, model.state_dict(), cfg)
    theirs = make(FAST[0])
    theirs.generation_config.eos_token_id = None
    how = Sampling(**(dict(temperature=0, max_tokens=TOKENS) | sampling_of(file)))
    ends = file.get("eos_token_id", ())
    found = Engine(model, slots=2, eos=ends).generate(prompts(), 1, how)
    plain = Engine(model, eos=ends).generate(prompts(), 1, Sampling(temperature=0, max_tokens=TOKENS))
    changed = [a.ids.tolist() != b.ids.tolist() for (a,), (b,) in zip(found, plain, strict=True)]
    assert any(changed)
    for ids, (sample,) in zip(prompts(), found, strict=True):
        asked = torch.tensor([ids])
        told = dict(max_new_tokens=TOKENS, do_sample=False, attention_mask=torch.ones_like(asked)) | file
        with torch.no_grad():
            want = theirs.generate(asked, pad_token_id=0, **told)[0, len(ids) :]
            logits = model(torch.tensor([[*ids, *sample.ids.tolist()]]))[0, len(ids) - 1 : -1]
        assert sample.ids.tolist() == want.tolist()
        own = logits.float().log_softmax(-1).gather(1, sample.ids[:, None])[:, 0]
        torch.testing.assert_close(sample.logprobs, own, atol=1e-4, rtol=0)
