"""Perplexity of a model before and after quantisation: trains a model of 21M numbers on a CPU, and compares.

    python -m benchmarks.perplexity --json FILE            half an hour on one core: trains, then compares
    python -m benchmarks.perplexity --model RUN --json FILE

The text is Python's standard library, byte by byte. Files are assigned to training or to evaluation by their
names' hashes. Every width of the model is a multiple of 128, so all formats have full groups. The
bounds are 0.5% of the perplexity for int8 and fp8, and 2% for int4.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.base.quantised import FORMATS
from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.model.quantised import quantised_copy
from tmoe.model.transformer import Transformer

MODEL = ModelConfig(
    vocab=256,
    dim=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    qk_norm="head",
    dense_layers=0,
    rope=RopeConfig(max_seq=512),
    moe=MoEConfig(experts=18, top_k=2, ffn_dim=384, balance_coeff=0.01, z_coeff=0.001),
)
SEQ, BATCH = 256, 8
KINDS = {"int8": 0.005, "fp8": 0.005, "int4": 0.02, "nf4": 0.02}  # largest relative growth of the perplexity


def text(evaluation: bool) -> Tensor:
    """The bytes of the standard library's files, an eighth of which are for evaluation."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if (hashlib.sha256(path.name.encode()).digest()[0] % 8 == 0) == evaluation:
            found.append(path.read_bytes())
    return torch.frombuffer(bytearray(b"\n".join(found)), dtype=torch.uint8).long()


def train(cfg: ModelConfig, steps: int, seed: int = 0) -> Transformer:
    """A model after `steps` steps of AdamW on random pieces of the text."""
    torch.manual_seed(seed)
    model, data = Transformer(cfg), text(evaluation=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    begun = time.time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        first = torch.randint(len(data) - SEQ - 1, (BATCH, 1)) + torch.arange(SEQ + 1)
        rows = data[first]
        loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}, loss {loss.item():.4f}, {time.time() - begun:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def perplexity(model: Transformer, sequences: int) -> float:
    """exp of the mean cross-entropy over the first sequences of the text for evaluation."""
    data = text(evaluation=True)
    most = min(sequences, (len(data) - 1) // SEQ)
    total = 0.0
    for i in range(0, most, BATCH):
        n = min(BATCH, most - i)
        rows = data[i * SEQ : (i + n) * SEQ + 1]
        logits = model(rows[:-1].view(n, SEQ))
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), rows[1:], reduction="sum"))
    return math.exp(total / (most * SEQ))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    flags.add_argument("--steps", type=int, default=600)
    flags.add_argument("--sequences", type=int, default=256)
    flags.add_argument("--model", type=Path, help="a file of weights that this command has written")
    flags.add_argument("--save", type=Path, help="a file for the weights")
    flags.add_argument("--json", type=Path)
    asked = flags.parse_args()
    if asked.model:
        model = Transformer(MODEL).eval()
        model.load_state_dict(torch.load(asked.model, weights_only=True))
    else:
        model = train(MODEL, asked.steps)
    if asked.save:
        torch.save(model.state_dict(), asked.save)
    numbers = sum(p.numel() for p in model.parameters())
    base = perplexity(model, asked.sequences)
    print(f"{numbers / 1e6:.1f}M numbers, perplexity of a byte in fp32 {base:.5f}")
    found = dict(fp32=base)
    for kind in (kind for kind in FORMATS if kind in KINDS):
        found[kind] = perplexity(quantised_copy(model, kind), asked.sequences)
        growth, most = found[kind] / base - 1, KINDS[kind]
        good = "within" if growth <= most else "ABOVE"
        print(f"{kind}: {found[kind]:.5f}, {growth:+.3%} ({good} {most:.1%})")
    if asked.json:
        line = dict(
            what="perplexity", numbers=numbers, steps=asked.steps, sequences=asked.sequences, found=found,
            date=datetime.now(UTC).isoformat(), torch=torch.__version__,
        )  # fmt: skip
        with asked.json.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
