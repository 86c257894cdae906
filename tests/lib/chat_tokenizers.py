"""Small tokenizers with the special tokens and chat templates of published models; trained masks as text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import tokenizers

from tmoe.data.chat.encoding import Tokens
from tmoe.data.tokenizer import JsonTokenizer, TokenizerFiles

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
PROSE = (  # prose: What
    "What is the capital of France?\nIt is Paris.\n\nassistant user system think Again, please.\n\n\nNow. "
)
# special tokens, bos and eos first; the templates of these names are in tests/data/templates
SPECIAL = {
    "chatml": ("", "<|im_end|>", "<|im_start|>"),
    "chatml_generation": ("", "<|im_end|>", "<|im_start|>"),
    "qwen3": ("", "<|im_end|>", "<|im_start|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "mistral": ("<s>", "</s>"),
    "gpt_oss": (
        "<|startoftext|>",
        "<|return|>",
        *(f"<|{name}|>" for name in ("start", "end", "message", "channel", "call")),
    ),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
}
# words of the vocabulary that are not special tokens
ADDED = {
    "qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "deepseek": ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
}


def chat_tokenizer(
    name: str, template: str | None = None, merges: int = 60, text: str = PROSE
) -> JsonTokenizer:
    """A byte-level BPE with a template and its special tokens.

    template: the template's text; None: that of the file of this name. text: what merges are trained on.
    """
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    special = [text for text in SPECIAL[name] if text]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + len(special) + merges,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([text * 3], trainer)
    model.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ADDED.get(name, ())])
    settings = dict(eos_token=SPECIAL[name][1]) | (
        {"bos_token": SPECIAL[name][0]} if SPECIAL[name][0] else {}
    )
    if template is None:
        template = (TEMPLATES / f"{name}.jinja").read_text()
    raw = model.to_str().encode()
    return JsonTokenizer(TokenizerFiles(name, raw, json.dumps(settings).encode(), template=template.encode()))


def shown(sequence: Tokens, tokenizer) -> str:
    """The text of a sequence, with ⟦ ⟧ around the trained parts."""
    trained = sequence.trained
    edges = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(trained)]
    parts = [
        ("⟦{}⟧" if trained[low] else "{}").format(tokenizer.decode(sequence.ids[low:high]))
        for low, high in itertools.pairwise(edges)
    ]
    return "".join(parts)
