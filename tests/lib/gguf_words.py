"""Small tokenizers of the kinds that a GGUF file holds, trained on a few sentences."""

from __future__ import annotations

import io
import json

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from tmoe.extras.gguf.splits import BY_NAME, OWN

TEXTS = [
    "The quick brown fox jumps over the lazy dog, 1234 times; isn't it?\n\n  Yes: it IS!",
    "Grüße aus Köln, 東京 und Москва – für 99 €.\tMixture of experts: 8 of 128.",
    "def f(x):\n    return x ** 2  # squared\r\n",
]
MORE = [
    "A token is sent to the experts that its router chooses, and their results are added, each weighed.",
    "Experts that get too many tokens would be late; a bias on their scores makes other experts more likely.",
    "In every step the weights of all experts are read, while each token meets a few of them only.",
]
UNSEEN = [*TEXTS, "Zürich's 20250 cafés 🦙\n\n\n   end ", " a  b   c 'LL they'll ", "x=1;y=22;z=333333", ""]
END, START = "<|end|>", "<|start|>"


def byte_level(split: str = "qwen2", size: int = 400) -> dict:
    """tokenizer.json of a byte-level BPE with one of `SPLITS`, and two special tokens."""
    built = tokenizers.Tokenizer(models.BPE(ignore_merges=BY_NAME[split].whole))
    (expression,) = BY_NAME[split].expressions
    own = expression == OWN
    steps = [] if own else [pre_tokenizers.Split(Regex(expression), "isolated")]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    built.pre_tokenizer = pre_tokenizers.Sequence(steps)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[END, START], show_progress=False
    )
    built.train_from_iterator([*TEXTS, *MORE] * 4, trainer)
    return json.loads(built.to_str())


def sentencepiece_model(size: int = 400, kind: str = "bpe", **more) -> bytes:
    """A sentencepiece model as Llama 2's: no normalizer, tokens for bytes."""
    import sentencepiece

    raw = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, *MORE] * 4),
        model_writer=raw,
        model_type=kind,
        vocab_size=size,
        minloglevel=2,
        **dict(normalization_rule_name="identity", remove_extra_whitespaces=False, byte_fallback=True) | more,
    )
    return raw.getvalue()
