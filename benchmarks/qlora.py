"""Loss of adapters on a base in NF4 against adapters on a whole base: three seeds, on a CPU.

    python -m benchmarks.qlora WEIGHTS --json FILE       WEIGHTS: a file of benchmarks.perplexity --save

The base is the model of benchmarks.perplexity, with weights rounded to bf16. It is finetuned on the packages
of Python's standard library, of which it has seen no file, with --lora.rank 8. The seed decides the adapters'
first values and the order of the data. The result is the mean loss over the same pieces of files that no run
has trained on. The bound: for each seed the two bases are apart by at most twice the largest difference
between seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import platform
import sysconfig
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.perplexity import MODEL
from tmoe.config.run import LoraConfig
from tmoe.model.lora import adapt
from tmoe.model.nf4 import slots_of
from tmoe.model.transformer import Transformer

SEQ, BATCH = 128, 8
LORA = LoraConfig(rank=8)


def text(evaluation: bool) -> Tensor:
    """The bytes of packages of the standard library; an eighth of the files are for evaluation."""
    found, root = [], Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.glob("[a-z]*/*.py")):
        own = path.relative_to(root).parts[0] not in ("test", "idlelib", "lib2to3") and "site-" not in str(
            path
        )
        digest = hashlib.sha256(str(path.relative_to(root)).encode()).digest()[0]
        if own and (digest % 8 == 0) == evaluation:
            found.append(path.read_bytes())
    return torch.frombuffer(bytearray(b"\n".join(found)), dtype=torch.uint8).long()


def model_of(weights: dict[str, Tensor], base: str, seed: int, dtype: str) -> Transformer:
    """A model with fresh adapters on a base. base: whole or nf4."""
    with torch.device("meta"):
        model = Transformer(MODEL)
        adapt(model, replace(LORA, base=base), dtype)  # pyrefly: ignore
    model.to_empty(device="cpu").init_weights(seed)
    slots, state = slots_of(model), model.state_dict()
    with torch.no_grad():
        for name, weight in weights.items():
            if name in slots:
                slots[name].put(weight.to(slots[name].module.dtype))
            else:
                state[name].copy_(weight)
    return model


def finetuned(model: Transformer, steps: int, seed: int, cast: torch.dtype) -> float:
    """The loss after training; products are in `cast`."""
    data, unseen = text(evaluation=False), text(evaluation=True)
    order = torch.Generator().manual_seed(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        first = torch.randint(len(data) - SEQ - 1, (BATCH, 1), generator=order)
        rows = data[first + torch.arange(SEQ + 1)]
        with torch.autocast("cpu", cast, enabled=cast != torch.float32):
            loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    model.eval()
    total = 0.0
    with torch.no_grad():
        for i in range(32):
            rows = unseen[i * 8 * SEQ : (i + 1) * 8 * SEQ + 1]
            logits = model(rows[:-1].view(8, SEQ))
            total += float(F.cross_entropy(logits.flatten(0, 1).float(), rows[1:]))
    return total / 32


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    flags.add_argument("weights", type=Path)
    flags.add_argument("--steps", type=int, default=300)
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--nf4-seeds", type=int, default=3, help="how many of them are compared")
    flags.add_argument("--json", type=Path)
    asked = flags.parse_args()
    loaded = torch.load(asked.weights, weights_only=True)
    weights = {name: t.bfloat16().float() for name, t in loaded.items()}
    found: dict[str, list[float]] = dict(whole=[], nf4=[])
    for seed, base in itertools.product(range(asked.seeds), found):
        if base == "nf4" and seed >= asked.nf4_seeds:
            continue
        begun = time.time()
        found[base].append(finetuned(model_of(weights, base, seed, "fp32"), asked.steps, seed, torch.float32))
        print(f"seed {seed}, {base}: {found[base][-1]:.5f}, {time.time() - begun:.0f} s", flush=True)
    bound = 2 * (max(found["whole"]) - min(found["whole"]))
    apart = max(abs(a - b) for a, b in zip(found["whole"], found["nf4"], strict=False))
    judged = "within" if apart <= bound else "ABOVE"
    print(f"apart by at most {apart:.5f}, {judged} twice the seeds' largest difference {bound:.5f}")
    if asked.json:
        line = dict(what="qlora", steps=asked.steps, loss=found, apart=apart, bound=bound)
        line |= dict(date=datetime.now(UTC).isoformat(), torch=torch.__version__, cpu=platform.processor())
        with asked.json.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
