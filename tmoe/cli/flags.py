"""Lists the flags, and finds the flag that an unknown word means: by synonyms, then by similar spelling.

next: cli/parse.py
"""

from __future__ import annotations

from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import get_type_hints

from tmoe.base.wishes import wish
from tmoe.config.check import ConfigError, Setting

# Other trainers' names of a setting, as typed in the last part of a flag.
SYNONYMS = {
    "--optim.lr": "learning-rate max-lr peak-lr",
    "--optim.min-lr": "min-learning-rate lr-min final-lr",
    "--optim.warmup": "warmup-steps lr-warmup-iters lr-warmup-steps num-warmup-steps",
    "--optim.clip": "grad-clip clip-grad max-grad-norm gradient-clip gradient-clipping max-norm",
    "--optim.offload": "cpu-offload offload-optimizer optimizer-offload",
    "--train.batch": "batch-size micro-batch-size per-device-train-batch-size bs mbs microbatch",
    "--train.global-batch": "global-batch-size gbs total-batch-size",
    "--train.seq": "seqlen seq-len seq-length sequence-length max-seq-len max-length max-seq-length "
    "context-length block-size context max-prompt-length",
    "--train.accumulate": "gradient-accumulation-steps grad-accum grad-accumulation accumulation-steps",
    "--train.dtype": "precision bf16 fp16 mixed-precision amp torch-dtype",
    "--train.fp8": "fp8 fp8-format",
    "--train.float8": "float8-recipe float8-recipe-name enable-float8-linear float8-linear",
    "--train.eval-every": "eval-steps eval-interval eval-freq val-every val-interval eval-strategy",
    "--train.eval-batches": "eval-iters eval-batch",
    "--steps": "max-steps train-iters train-steps num-steps iters iterations max-iters",
    "--epochs": "num-train-epochs num-epochs max-epochs train-epochs n-epochs",
    "--out": "output output-dir out-dir save-dir run-dir",
    "--checkpoint.every": "save-every save-steps save-interval "
    "checkpoint-interval checkpoint-every save-strategy",
    "--checkpoint.keep": "save-total-limit",
    "--checkpoint.keep-best": "save-best save-best-only load-best-model-at-end metric-for-best-model",
    "--resume": "resume-from resume-from-checkpoint",
    "--init": "model-name model-name-or-path pretrained load init-from from-pretrained checkpoint",
    "--log.every": "logging-steps log-interval log-every",
    "--log.wandb": "wandb-project use-wandb report-to",
    "--log.progress": "progress-bar disable-tqdm",
    "--data.path": "dataset data-path train-data data-dir train-file dataset-name dataset-path",
    "--data.tokenizer": "tokenizer-path tokenizer-name tokenizer-model",
    "--data.val-fraction": "val-split validation-split",
    "--model.dim": "hidden-size d-model n-embd embed-dim width",
    "--model.layers": "num-layers n-layers n-layer num-hidden-layers depth",
    "--model.heads": "num-heads n-heads n-head num-attention-heads",
    "--model.kv-heads": "num-kv-heads num-key-value-heads n-kv-heads num-query-groups",
    "--model.vocab": "vocab-size padded-vocab-size",
    "--model.moe.experts": "num-experts n-experts num-local-experts expert-count",
    "--model.moe.top-k": "topk num-experts-per-tok moe-router-topk router-topk k",
    "--model.moe.ffn-dim": "moe-intermediate-size moe-ffn-hidden-size expert-dim",
    "--model.moe.capacity-factor": "capacity moe-expert-capacity-factor",
    "--parallel.ep": "expert-parallel expert-parallel-size expert-model-parallel-size ep-size",
    "--parallel.tp": "tensor-parallel tensor-parallel-size tensor-model-parallel-size tp-size",
    "--parallel.pp": "pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size pp-size",
    "--parallel.cp": "context-parallel context-parallel-size cp-size",
    "--parallel.dp": "data-parallel data-parallel-size dp-size",
    "--parallel.checkpoint": "recompute activation-checkpointing gradient-checkpointing "
    "recompute-granularity",
    "--compile": "torch-compile",
    "--optim.schedule": "lr-scheduler-type lr-scheduler lr-decay-style scheduler",
    "--optim.betas": "adam-beta1 adam-beta2 beta1 beta2 adam-betas",
    "--optim.eps": "adam-epsilon adam-eps",
    "--optim.weight-decay": "wd",
    "--train.collective-timeout": "ddp-timeout nccl-timeout distributed-timeout",
    "--optim.warmup-fraction": "warmup-ratio lr-warmup-fraction",
    "--data.val-path": "eval-dataset eval-file validation-file val-data valid-data-path",
    "--data.chat-template": "chat-template-path template",
    "--eval-only": "do-eval evaluate eval",
    "--model.moe.balance-coeff": "router-aux-loss-coef aux-loss-coef moe-aux-loss-coeff",
    "--preference.beta": "dpo-beta",
    "--preference.loss": "loss-type dpo-loss pref-loss",
    "--preference.smoothing": "label-smoothing",
    "--preference.gamma": "simpo-gamma",
    "--sft.neftune": "neftune-noise-alpha",
    "--grpo.group": "num-generations rollout-n n-samples-per-prompt num-samples-per-prompt group-size "
    "num-rollouts samples-per-prompt",
    "--grpo.prompts": "num-prompts rollout-batch-size prompts-per-step generation-batch-size",
    "--grpo.max-tokens": "max-completion-length max-new-tokens max-response-length response-length "
    "generate-max-len max-tokens-per-answer",
    "--grpo.kl": "beta kl-coef kl-loss-coef kl-beta init-kl-coef use-kl-loss",
    "--grpo.kl-estimator": "kl-loss-type",
    "--grpo.clip-low": "epsilon epsilon-low eps-clip eps-clip-low clip-ratio clip-ratio-low cliprange",
    "--grpo.clip-high": "epsilon-high eps-clip-high clip-ratio-high",
    "--grpo.dual-clip": "delta clip-ratio-c",
    "--grpo.updates": "num-iterations ppo-epochs num-ppo-epochs mu",
    "--grpo.loss": "loss-type",
    "--grpo.normaliser": "loss-agg-mode",
    "--grpo.advantage": "scale-rewards adv-estimator advantage-estimator",
    "--grpo.rewards": "reward-funcs reward-function reward-functions reward-fn reward reward-model",
    "--grpo.reward-workers": "reward-processes",
    "--grpo.overlong": "mask-truncated-completions overlong-filter",
    "--grpo.mismatch": "importance-sampling-correction vllm-importance-sampling-correction tis",
    "--grpo.mismatch-cap": "vllm-importance-sampling-cap tis-cap",
    "--grpo.resample": "dynamic-sampling filter-groups max-num-gen-batches",
    "--grpo.entropy": "entropy-coef entropy-coeff",
    "--grpo.rollout-slots": "max-num-seqs",
    "--lora.rank": "lora-r lora-rank r use-lora use-peft lora-dim adapter-rank",
    "--lora.alpha": "lora-alpha",
    "--lora.dropout": "lora-dropout",
    "--lora.targets": "lora-target-modules target-modules lora-target lora-modules target-parameters",
    "--lora.rs": "use-rslora rslora",
    "--lora.init": "adapter adapter-name-or-path adapter-path lora-path init-adapter",
}


# The flags that a section's name without a setting probably means, settings marked.
SECTIONS = {
    "--model": f"{Setting('init')} DIR",
    "--data": f"{Setting('data.path')} SOURCE",
    "--checkpoint": f"{Setting('init')} STEP",
    "--sft": f"{Setting('task')} sft",
    "--preference": f"{Setting('task')} preference",
    "--grpo": f"{Setting('task')} grpo",
    "--lora": f"{Setting('lora.rank')} 8",
}


# Other trainers' names of a task -> the task and its flags, settings marked.
TASKS = {
    "dpo": "preference",
    "simpo": f"preference {Setting('preference.loss')} simpo",
    "orpo": f"preference {Setting('preference.loss')} orpo",
    "ipo": f"preference {Setting('preference.loss')} ipo",
    "kto": f"preference {Setting('preference.loss')} kto",
    "rlhf": "grpo",
    "ppo": "grpo",
    "rl": "grpo",
    "gspo": f"grpo {Setting('grpo.loss')} gspo",
    "dapo": f"grpo {Setting('grpo.loss')} dapo",
    "rloo": f"grpo {Setting('grpo.loss')} rloo",
    "finetune": "sft",
    "chat": "sft",
    "instruct": "sft",
    "train": "pretrain",
    "pt": "pretrain",
    "lm": "pretrain",
}


def require_task(value: str) -> None:
    """ConfigError for another trainer's name of a task, with the flags of the task."""
    tasks, low = ("pretrain", "sft", "preference", "grpo"), value.lower()
    if value not in tasks and (meant := low if low in tasks else TASKS.get(low)):
        valid = f"{', '.join(tasks)}; did you mean {Setting('task')} {meant}?"
        raise ConfigError.of("task", value, "no such task", valid)


@cache
def flags_of_settings(config: type, section: str = "--") -> tuple[tuple[str, type], ...]:
    """Every flag of a dataclass of settings, and the type of its value."""
    found: list[tuple[str, type]] = []
    for name, kind in get_type_hints(config).items():
        flag = section + name.replace("_", "-")
        found += flags_of_settings(kind, f"{flag}.") if is_dataclass(kind) else [(flag, kind)]
    return tuple(found)


def flag_of(name: str) -> str:
    """The flag of a dotted setting: --model.moe.top-k for "model.moe.top_k"."""
    return f"--{name.replace('_', '-')}"


def name_of(flag: str) -> str:
    """The dotted setting of a flag: "model.moe.top_k" for --model.moe.top-k."""
    return flag.removeprefix("--").replace("-", "_")


def require_known(words: list[str], config: type) -> None:
    """ConfigError for the first unknown flag; it names the flag that is probably meant, if there is one."""
    known = [flag for flag, _ in flags_of_settings(config)]
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if flag == "--":
            raise ConfigError("--: no such flag; train.py has no words after it", valid="leave it out")
        if not flag.startswith("--") or flag in ("--help", "--help-all") or flag.startswith("--tyro-"):
            continue
        section, dot, last = flag[2:].rpartition(".")
        if flag not in known and f"--{section}{dot}{last.removeprefix('no-')}" not in known:
            hint = answer(flag, known) or "train.py --help-all shows all"
            raise ConfigError(f"{word.partition('=')[0]}: no such flag; {hint}")


def answer(flag: str, known: list[str]) -> str:
    """The hint for an unknown flag: what to use in its place, settings marked; "" if nothing is known."""
    section, dot, last = flag[2:].rpartition(".")
    if dot and section.startswith("no-") and f"--{flag.removeprefix('--no-')}" in known:
        return f"did you mean {_setting(f'--{section[3:]}.no-{last}')}?"
    meant = meant_by(flag, known)
    exact = any(one.rpartition(".")[2].removeprefix("--") == last for one in meant)
    if (text := wish(flag)) and not (exact or is_synonym(last)):
        return text
    if inside := [one for one in known if one.startswith(f"{flag}.")]:
        usual = SECTIONS.get(flag, "")
        begins = f"a section of settings, as {_setting(inside[0])}"
        return begins + (f"; did you mean {usual}?" if usual else "")
    return f"did you mean {' or '.join(map(_setting, meant))}?" if meant else ""


def _setting(flag: str) -> Setting:
    """The setting of a flag, for the text of an error."""
    return Setting(name_of(flag))


def is_synonym(last: str) -> bool:
    """Whether the last part of a flag is another trainer's name of a setting."""
    return any(last in words.split() for words in SYNONYMS.values())


def meant_by(flag: str, known: list[str]) -> list[str]:
    """The flags that a word may mean: with the same last part, by another trainer's name, or similarly spelt.

    Another trainer's name is first looked up in the word's own section: --grpo.beta means --grpo.kl, and not
    --preference.beta.
    """
    section, dot, last = flag[2:].rpartition(".")
    others = [one for one, words in SYNONYMS.items() if last in words.split() and one in known]
    if dot and (own := [one for one in others if one.startswith(f"--{section}.")]):
        return own[:3]
    if same := [one for one in known if one[2:].rpartition(".")[2] == last]:
        return same[:3]
    if others:
        return others[:3]
    lasts = {one: one[2:].rpartition(".")[2] for one in known}
    near = get_close_matches(last, lasts.values(), 2, 0.75)
    found = [one for one in known if lasts[one] in near] or get_close_matches(flag, known, 2, 0.75)
    return found[:3]
