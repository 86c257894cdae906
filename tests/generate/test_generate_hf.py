"""Greedy answers equal those of transformers' `generate` with its cache, and those without any cache."""

import pytest
import torch
from hf_tiny import MODELS, make, saved
from tiers import slow_but

from tmoe.generate import Engine, Sampling
from tmoe.hf.files import Folder
from tmoe.hf.plan import plan_folder
from tmoe.hf.start import load_hf
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
        assert sample.ids.tolist() == want.tolist() == without_cache(model, ids, TOKENS)
        assert sample.finish == "length"
