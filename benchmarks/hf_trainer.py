"""Times Hugging Face's Trainer on a GraniteMoE, with its own experts and with tmoe's, in tokens a second.

    python -m benchmarks.hf_trainer --experts theirs
    python -m benchmarks.hf_trainer --experts tmoe
    torchrun --nproc-per-node 2 -m benchmarks.hf_trainer --experts tmoe --ep 2
    python -m benchmarks.hf_trainer --experts tmoe --tiny        # on a CPU

The shape is that of granite-3.0-3b-a800m with random weights: D 1536, F 512, 40 experts of which 8 are
selected, 32 layers. --batch is the batch of all ranks together. With Trainer's own experts, two ranks use DDP
around the model. The first steps, in which kernels are compiled, are not counted. The result is one line of
JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GraniteMoeConfig, Trainer, TrainerCallback, TrainingArguments

from tmoe.hf.swap import swap_experts
from tmoe.hf.trainer import ExpertParallel

WARMUP = 4  # steps left out of the median
VOCAB = 49155
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=1536,
    intermediate_size=512,
    num_hidden_layers=32,
    num_attention_heads=24,
    num_key_value_heads=8,
    num_local_experts=40,
    num_experts_per_tok=8,
    embedding_multiplier=12.0,
    attention_multiplier=0.015625,
    residual_multiplier=0.22,
    logits_scaling=6.0,
    tie_word_embeddings=True,
)
TINY: dict[str, Any] = SIZES | dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class Clock(TrainerCallback):
    """Measures the seconds of every step; it waits for the device."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(now() - self.began)


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", choices=["theirs", "tmoe"], default="tmoe")
    parser.add_argument("--ep", type=int, default=1, help="number of ranks that share the experts")
    parser.add_argument("--batch", type=int, default=128, help="sequences a step, all ranks together")
    parser.add_argument("--micro", type=int, default=4, help="sequences of one forward on a rank")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if args.steps <= WARMUP:
        parser.error(f"--steps {args.steps}: must be above {WARMUP}, the steps left out")
    if args.batch % (args.micro * world):
        parser.error(f"--batch {args.batch}: must be a multiple of --micro {args.micro} x {world} ranks")
    if args.experts == "theirs" and args.ep > 1:
        parser.error(f"--ep {args.ep}: spreads tmoe's experts; valid with --experts tmoe")

    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    config = GraniteMoeConfig(**(TINY if args.tiny else SIZES), max_position_embeddings=args.seq)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (args.batch, args.seq), generator=draw)
    rows: Any = [dict(input_ids=x, labels=x) for x in tokens]
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        settings = TrainingArguments(
            out,
            max_steps=args.steps,
            per_device_train_batch_size=args.micro,
            gradient_accumulation_steps=args.batch // args.micro // world,
            use_cpu=not on_gpu,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        if args.experts == "tmoe" and world == 1:
            swap_experts(model)
        trainer = Trainer(model, settings, train_dataset=rows, callbacks=[clock])
        if args.experts == "tmoe" and world > 1:
            trainer.add_callback(ExpertParallel(trainer, ep=args.ep))
        trainer.train()
    step_s = statistics.median(clock.seconds[WARMUP:])
    result = dict(
        experts=args.experts,
        ranks=world,
        ep=args.ep,
        batch=args.batch,
        micro=args.micro,
        seq=args.seq,
        step_s=round(step_s, 4),
        tokens_per_s=round(args.batch * args.seq / step_s),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
    )
    if trainer.is_world_process_zero():
        print(json.dumps(result))


if __name__ == "__main__":
    main()
