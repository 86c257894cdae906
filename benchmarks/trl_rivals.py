"""Runs TRL's DPO and GRPO trainers to compare with tmoe, each in its own process, on the same model and rows.

    write_model(folder, cfg, "cuda")                       random weights as a Hugging Face folder
    run_rival("dpo", dict(model=..., rows=..., ...), 100)  figures, or {"missing": why there are none}

The folder's tokenizer has one word for each id, "t17" for 17, so a text has as many tokens as words. Id 0
ends a text.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from benchmarks.engine import free, in_words, now, peak_gib
from benchmarks.train import running
from tmoe.config.model import ModelConfig
from tmoe.hf.config import write_config

NEEDED = "trl", "datasets", "accelerate"
EOS, PAD = "<eos>", "<pad>"  # ids 0 and 1
FIRST = 2  # smallest id of random words
OFFLINE = dict(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")


# ---- model and rows ----


def write_model(folder: Path, cfg: ModelConfig, device: str) -> None:
    """A model with random weights, bf16 on a GPU, and its tokenizer, as a Hugging Face folder."""
    kind = "bfloat16" if device == "cuda" else "float32"
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**write_config(cfg, kind)), dtype=getattr(torch, kind)
        )
    model.save_pretrained(folder)
    del model
    free()
    write_tokenizer(folder, cfg.vocab)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer with one word for each id below vocab; words are separated by spaces."""
    words = {EOS: 0, PAD: 1} | {f"t{i}": i for i in range(FIRST, vocab)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=PAD))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=EOS, pad_token=PAD).save_pretrained(folder)


def words(rng: np.random.Generator, count: int, vocab: int) -> str:
    """A text of `count` random words, each with a space before it."""
    return "".join(f" t{i}" for i in rng.integers(FIRST, vocab, count))


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- a rival's process ----


def run_rival(task: str, settings: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The result of `dpo` or `grpo` of this file, or {"missing": reason}."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        return {"missing": f"not installed: {', '.join(lacking)}"}
    with tempfile.TemporaryDirectory() as made:
        out = Path(made, "found.json")
        command = [sys.executable, "-m", "benchmarks.trl_rivals", task, json.dumps(settings), str(out)]
        with running(command, dict(os.environ) | OFFLINE) as process:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                return {"missing": f"not done within {timeout:.0f} s"}
        if not out.exists():
            return {"missing": f"ended with code {process.returncode}"}
        return json.loads(out.read_text())


class Clock(TrainerCallback):
    """Records when the first step began and when each step ended; it waits for the device."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if not self.stamps:
            self.stamps.append(now())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.stamps.append(now())

    def seconds(self, warmup: int) -> list[float]:
        """Seconds of each step after the first `warmup` steps."""
        return np.diff(self.stamps).tolist()[warmup:]


def common(s: dict[str, Any], folder: str) -> dict[str, Any]:
    """Settings of both trainers: fused AdamW, no recomputing, nothing written."""
    gpu = torch.cuda.is_available()
    return dict(
        output_dir=folder,
        max_steps=s["steps"],
        per_device_train_batch_size=s["micro"],
        gradient_accumulation_steps=s["batch"] // s["micro"],
        gradient_checkpointing=False,
        bf16=gpu,
        use_cpu=not gpu,
        optim="adamw_torch_fused" if gpu else "adamw_torch",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_liger_kernel=s.get("liger", False),
    )


def load(folder: str, switch: bool = False) -> tuple[Any, Any]:
    """Model and tokenizer: bf16 on a GPU, where transformers' grouped product computes the experts.

    switch: let generate switch to batched_mm for decoding, which is its default. That copies an expert's
        weights for each of its tokens.
    """
    gpu = torch.cuda.is_available()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if gpu else torch.float32)
    if not switch:
        model._optimize_model_for_decode = nullcontext
    return model.to("cuda" if gpu else "cpu"), AutoTokenizer.from_pretrained(folder)


def read_rows(path: str) -> Any:
    from datasets import Dataset  # pyrefly: ignore[missing-import]

    return Dataset.from_list([json.loads(line) for line in Path(path).read_text().splitlines()])


def told(trainer: Any, name: str) -> list[float]:
    """The values that the trainer logged under this name."""
    return [line[name] for line in trainer.state.log_history if name in line]


def dpo(s: dict[str, Any]) -> dict[str, Any]:
    """Runs TRL's DPO. s: model, rows, steps, warmup, batch and micro (pairs), liger."""
    from trl import DPOConfig, DPOTrainer  # pyrefly: ignore[missing-import]

    model, tokenizer = load(s["model"])
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            **common(s, folder),
            precompute_ref_log_probs=True,
            max_length=None,
            loss_type=["sigmoid"],
            beta=0.1,
        )
        trainer = DPOTrainer(
            model,
            args=config,
            train_dataset=read_rows(s["rows"]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    steps = clock.seconds(s["warmup"])
    return dict(step_s=statistics.median(steps), steps_s=steps, first_loss=told(trainer, "loss")[0])


def grpo(s: dict[str, Any]) -> dict[str, Any]:
    """Runs TRL's GRPO.

    s: model, rows, steps, warmup, batch and micro (answers), group, max_tokens, continuous, switch.
    """
    from trl import GRPOConfig, GRPOTrainer  # pyrefly: ignore[missing-import]

    sys.path.insert(0, str(Path(s["reward"]).parent))
    from reward import of_text  # pyrefly: ignore

    def worth(completions: list[str], **_: Any) -> list[float | None]:
        return [of_text(text) for text in completions]

    model, tokenizer = load(s["model"], s["switch"])
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **common(s, folder),
            num_generations=s["group"],
            max_completion_length=s["max_tokens"],
            temperature=1.0,
            beta=0.0,
            use_transformers_continuous_batching=s["continuous"],
        )
        trainer = GRPOTrainer(
            model,
            reward_funcs=worth,
            args=config,
            train_dataset=read_rows(s["rows"]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        rollouts = timed(trainer, "_generate_single_turn")
        rewards = timed(trainer, "_calculate_rewards")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    steps = clock.seconds(s["warmup"])
    step_s = statistics.median(steps)
    parts = {name: statistics.median(seconds[s["warmup"] :]) for name, seconds in
             dict(rollout_s=rollouts, rewards_s=rewards).items()}  # fmt: skip
    lengths = told(trainer, "completions/mean_length")[s["warmup"] :]
    return dict(
        step_s=step_s,
        steps_s=steps,
        **parts,
        update_s=step_s - sum(parts.values()),
        length=statistics.mean(lengths),
        truncated=statistics.mean(told(trainer, "completions/clipped_ratio")[s["warmup"] :]),
    )


def timed(trainer: Any, name: str) -> list[float]:
    """A list to which each later call of a method adds its seconds."""
    method, seconds = getattr(trainer, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        began = now()
        result = method(*args, **kwargs)
        seconds.append(now() - began)
        return result

    setattr(trainer, name, call)
    return seconds


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = dict(dpo=dpo, grpo=grpo)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("task", choices=list(TASKS))
    p.add_argument("settings", type=json.loads)
    p.add_argument("out", type=Path)
    args = p.parse_args()
    transformers.utils.logging.set_verbosity_error()
    began = time.monotonic()
    try:
        import trl  # pyrefly: ignore[missing-import]

        result = TASKS[args.task](args.settings) | dict(trl=trl.__version__)
        result |= dict(peak_gib=peak_gib(), whole_s=time.monotonic() - began)
    except Exception as error:  # any error of a rival, reported in its own words
        result = {"missing": in_words(error)}
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
