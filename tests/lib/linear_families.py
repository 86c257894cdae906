"""One test of a family with linear layers: direct start, packed documents, and greedy answers.

next: tests/lib/hf_tiny.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hf_tiny import assert_bits, far, load_step, make, saved

import tmoe
from tmoe.hf import import_hf, load_hf
from tmoe.hf.config import read_config
from tmoe.hf.files import Folder
from tmoe.model.transformer import Transformer

LENGTHS = [20, 1, 24]  # tokens of the documents
ANSWER = 12  # tokens


def assert_starts_and_answers(folder: Path, name: str, bound: float, cached: bool = True) -> Transformer:
    """Fails unless --init reads an import's weights, and tmoe computes what transformers does; the model.

    Documents in one row are compared one by one, within `bound`, then greedy answers of two prompts.
    cached: transformers answers with its cache; otherwise each token is that of a whole sequence.
    """
    hf_dir = saved(folder / "hf", name)
    import_hf(hf_dir, folder / "step")
    cfg = read_config(Folder(hf_dir).config)
    model = Transformer(cfg).eval()
    load_hf(hf_dir, model.state_dict(), cfg)
    assert_bits(model.state_dict(), load_step(folder / "step").state_dict())
    theirs = make(name)
    x = torch.randint(31, (1, sum(LENGTHS)))
    doc = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    at = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        packed = model(x, documents_BS=doc, positions_BS=at)
        one_by_one = torch.cat([theirs(part).logits for part in x.split(LENGTHS, 1)], 1)
    assert far(packed, one_by_one) < bound
    prompts = [x[0, :17].tolist(), x[0, 5:6].tolist()]
    sampling = tmoe.Sampling(temperature=0.0, max_tokens=ANSWER)
    for prompt, (sample,) in zip(
        prompts, tmoe.Engine(model).generate(prompts, sampling=sampling), strict=True
    ):
        assert sample.ids.tolist() == (with_cache if cached else whole)(theirs, prompt)
    return model


def with_cache(theirs: Any, prompt: list[int]) -> list[int]:
    """The greedy answer of transformers' generate."""
    ids, how = torch.tensor([prompt]), dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    answer = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, **how)
    return answer[0, len(prompt) :].tolist()


def whole(theirs: Any, prompt: list[int]) -> list[int]:
    """The greedy answer, each token from a forward of the whole sequence."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(ANSWER):
            ids.append(int(theirs(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
