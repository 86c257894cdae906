"""Templates of models that call tools, each with a byte-level tokenizer that has the model's own marks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import tokenizers

from tmoe.data.tokenizer import JsonTokenizer, TokenizerFiles

FOLDER = Path(__file__).parents[1] / "data" / "templates" / "calls"
CHATML = ("<|im_end|>", "<|im_start|>")
DEEPSEEK = (
    "<｜end▁of▁sentence｜>",
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *(f"<｜tool▁{name}｜>" for name in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
)
# special tokens: eos first; bos is among them if BOS names it
SPECIAL = {
    "qwen2_5": CHATML,
    "hermes": CHATML,
    "llama3_1": ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    "glm4_5": (
        "<|endoftext|>",
        "[gMASK]",
        "<sop>",
        "<|user|>",
        "<|system|>",
        "<|assistant|>",
        "<|observation|>",
    ),
    "deepseek_r1": DEEPSEEK,
    "deepseek_v3_1": DEEPSEEK,
    "kimi_k2": (
        "<|im_end|>",
        *(f"<|im_{name}|>" for name in ("system", "user", "assistant", "middle")),
        *(f"<|tool_{name}|>" for name in ("calls_section_begin", "calls_section_end")),
        *(f"<|tool_call_{name}|>" for name in ("begin", "end", "argument_begin")),
    ),
    "mistral_v7": (
        "</s>",
        "<s>",
        *(
            f"[{end}{name}]"
            for name in ("INST", "SYSTEM_PROMPT", "AVAILABLE_TOOLS", "TOOL_RESULTS")
            for end in ("", "/")
        ),
        "[TOOL_CALLS]",
    ),
    "minimax_m2": ("[e~[", "]~!b[", "]~b]"),
    "gemma4": (
        "<turn|>",
        *(f"<|{name}>" for name in ("turn", "tool", "tool_call", "tool_response")),
        *(f"<{name}|>" for name in ("tool", "tool_call", "tool_response")),
        '<|"|>',
    ),
}
BOS = dict(llama3_1="<|begin_of_text|>", mistral_v7="<s>")
# words of the vocabulary that are not special tokens
WORDS = {name: ("<think>", "</think>", "<tool_call>", "</tool_call>") for name in SPECIAL}
WORDS |= dict.fromkeys(
    ("deepseek_r1", "deepseek_v3_1"), ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
)


@cache
def call_tokenizer(name: str) -> JsonTokenizer:
    """A byte-level tokenizer with the marks and the template of this name."""
    return byte_tokenizer((FOLDER / f"{name}.jinja").read_text(), SPECIAL[name], BOS.get(name), WORDS[name])


def byte_tokenizer(
    template: str, special: tuple[str, ...] = CHATML, bos: str | None = None, words: tuple[str, ...] = ()
) -> JsonTokenizer:
    """A tokenizer of bytes, special tokens and words. special: the first is eos."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + len(special),
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    model.train_from_iterator(["x"], trainer)
    model.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in words])
    settings = dict(eos_token=special[0]) | (dict(bos_token=bos) if bos else {})
    files = TokenizerFiles(
        "t", model.to_str().encode(), json.dumps(settings).encode(), template=template.encode()
    )
    return JsonTokenizer(files)
