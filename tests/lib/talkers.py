"""Tiny models that have learned one answer to each of a few prompts, with tokenizers of published formats.

    talker = talkers.made(folder, tokenizer, [Lesson(messages, answer, tools)])

next: tests/lib/served.py
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.data.chat.encoding import chat_prompt
from tmoe.data.chat.special_tokens import Marker
from tmoe.data.chat.template import load_template
from tmoe.data.tokenizer import JsonTokenizer, own_files
from tmoe.model.transformer import Transformer

MOST_STEPS = 400


class Lesson(NamedTuple):
    """A prompt, and the text that the model answers, with the token that ends it."""

    messages: list[dict[str, Any]]
    answer: str
    tools: list[dict[str, Any]] | None = None
    kwargs: dict[str, Any] = {}  # noqa: RUF012


def made(folder: Path, tokenizer: JsonTokenizer, lessons: list[Lesson]) -> tuple[Path, Path]:
    """A run folder of a model that gives these answers without sampling, and its tokenizer.json."""
    folder.mkdir(parents=True)
    for name, content in own_files(tokenizer).items():
        (folder / name).write_bytes(content)
    template = load_template(tokenizer, now=True)
    marker = Marker(tokenizer, template)
    rows = []
    for lesson in lessons:
        prompt = chat_prompt(lesson.messages, tokenizer, template, lesson.tools, **lesson.kwargs).tolist()
        answer = marker.encode([lesson.answer])[0].ids.tolist()
        rows.append((torch.tensor([prompt + answer]), len(answer)))
    cfg = ModelConfig(
        vocab=tokenizer.vocab,
        dim=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        rope=RopeConfig(max_seq=4096),
        moe=MoEConfig(experts=4, top_k=2, ffn_dim=32),
    )
    torch.manual_seed(0)
    model = Transformer(cfg)
    learn(model, rows)
    tensors = {f"model.{n}": t.detach() for n, t in model.state_dict().items()} | {"optim.x": torch.zeros(2)}
    checkpoints = Checkpoints(
        folder / "run/checkpoints", keep=0, mode="sync", info=dict(config=dict(model=asdict(cfg)))
    )
    checkpoints.save(1, tensors, dict(step=1, tokens=1), {})
    return folder / "run", folder / "tokenizer.json"


def learn(model: Transformer, rows: list[tuple[torch.Tensor, int]]) -> None:
    """Trains until each answer is certain."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(MOST_STEPS):
        worst = 0.0
        for tokens, n in rows:
            logits = model(tokens[:, :-1])[0, -n:]
            losses = F.cross_entropy(logits.float(), tokens[0, -n:], reduction="none")
            worst = max(worst, float(losses.detach().max()))
            losses.mean().backward()
        if worst < 0.1:
            return
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError(f"not learned: {worst}")
