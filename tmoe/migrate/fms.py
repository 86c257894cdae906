"""fms-acceleration's plugin YAML and the flags of its trainer as tmoe's.

The model is read from the config.json of --model_name_or_path, so that the command says all of it.

next: command.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.config.model import STEPS_READ, ModelConfig
from tmoe.config.presets import presets
from tmoe.config.same import differences, flattened
from tmoe.hf.config import read_config
from tmoe.hf.files import CONFIG
from tmoe.migrate.tables import Given, Outcome, Row, nothing, refused, same, switch, worked

ALWAYS = "tmoe always does"
LORA = "adapters are flags of --lora, not of a plugin"

ROWS: tuple[Row, ...] = (
    # the plugins' YAML, by dotted keys
    worked("training.moe.scattermoe.ep_degree", "`--parallel.ep`"),
    nothing("training.moe.scattermoe.disable_distributed", "FSDP2 shares experts over dp where ep is 1"),
    worked("training.attention.padding_free.method", "`--train.isolate-documents True`: rows are packed"),
    nothing("training.dataloader.multipack.num_processes", "windows are full: there is nothing to balance"),
    nothing("training.fused_ops_and_kernels.fast_loss", ALWAYS),
    nothing("training.fused_ops_and_kernels.fast_rms_layernorm", ALWAYS),
    nothing("training.fused_ops_and_kernels.fast_rope_embeddings", ALWAYS),
    refused("training.mamba.cp.degree", "tmoe has no Mamba blocks"),
    refused(
        "training.odm.odm.update_interval", "tmoe mixes sources by fixed weights, --data.path PATH:WEIGHT"
    ),
    refused("training.odm.odm.sampling_interval", "tmoe mixes sources by fixed weights"),
    refused("training.odm.odm.reward_type", "tmoe mixes sources by fixed weights"),
    refused("training.odm.odm.gamma", "tmoe mixes sources by fixed weights"),
    refused("training.odm.odm.eta", "tmoe mixes sources by fixed weights"),
    refused("peft.quantization.auto_gptq.kernel", "tmoe does not train on quantised weights"),
    refused("peft.quantization.auto_gptq.from_quantized", "tmoe does not train on quantised weights"),
    nothing("peft.quantization.auto_gptq.use_external_lib", "of auto_gptq"),
    refused("peft.quantization.bitsandbytes.quant_type", "tmoe does not train on quantised weights"),
    nothing("peft.quantization.bitsandbytes.no_peft_model", "of bitsandbytes"),
    nothing("peft.quantization.fused_ops_and_kernels.base_layer", "of quantised weights"),
    nothing("peft.quantization.fused_ops_and_kernels.fused_lora", "of quantised weights"),
    nothing("peft.quantization.fused_ops_and_kernels.fast_loss", ALWAYS),
    nothing("peft.quantization.fused_ops_and_kernels.fast_rms_layernorm", ALWAYS),
    nothing("peft.quantization.fused_ops_and_kernels.fast_rsm_layernorm", ALWAYS),
    nothing("peft.quantization.fused_ops_and_kernels.fast_rope_embeddings", ALWAYS),
    # the trainer's flags
    worked("--acceleration_framework_config_file", "the YAML, as above"),
    worked("--fast_moe", "`--parallel.ep`"),
    worked("--model_name_or_path", "`--init`, and every setting of its config.json"),
    nothing("--tokenizer_name_or_path", "the tokenizer of `--init`; another one by --data.tokenizer"),
    worked("--training_data_path", "`--data.path`", "some"),
    refused(
        "--validation_data_path",
        "name it with --data.val-path; without that a part of --data.path is held out",
        "some",
    ),
    same("--dataset_text_field", "--data.text-field"),
    refused("--response_template", "python train.py --task sft trains answers alone, of chat rows"),
    refused("--data_formatter_template", "make a text field of it beforehand"),
    same("--output_dir", "--out"),
    same("--max_seq_length", "--train.seq"),
    same("--max_steps", "--steps"),
    refused("--num_train_epochs", "tmoe counts steps: --max_steps"),
    same("--per_device_train_batch_size", "--train.batch"),
    nothing("--per_device_eval_batch_size", "a validation's batches are as large as a step's"),
    same("--gradient_accumulation_steps", "--train.accumulate"),
    switch("--gradient_checkpointing", "`--parallel.checkpoint block`"),
    same("--learning_rate", "--optim.lr"),
    worked("--lr_scheduler_type", "`--optim.schedule`; linear where left out; both to 0"),
    worked("--warmup_steps", "`--optim.warmup`"),
    worked("--warmup_ratio", "`--optim.warmup-fraction`"),
    worked("--weight_decay", "`--optim.weight-decay`; 0 where left out"),
    worked("--adam_beta1", "`--optim.betas`; 0.9 0.999 where left out"),
    worked("--adam_beta2", "`--optim.betas`; 0.9 0.999 where left out"),
    same("--adam_epsilon", "--optim.eps"),
    same("--max_grad_norm", "--optim.clip"),
    nothing("--optim", "AdamW", "one", "adamw_torch", "adamw_torch_fused"),
    worked("--torch_dtype", "`--train.dtype` bf16 or fp32; others are refused"),
    switch("--bf16", "`--train.dtype bf16`"),
    refused("--fp16", "no loss scaling; use --bf16", "nothing"),
    nothing("--use_flash_attn", "tmoe chooses attention's kernels", "one"),
    worked("--packing", "True is how tmoe always reads; False is refused unless padding_free is on"),
    same("--logging_steps", "--log.every"),
    same("--save_steps", "--checkpoint.every"),
    worked("--save_strategy", "no: `--checkpoint.mode off`"),
    worked("--save_total_limit", "`--checkpoint.keep`"),
    same("--eval_steps", "--train.eval-every"),
    nothing("--eval_strategy", "`--train.eval-every`"),
    nothing("--include_tokens_per_second", "metrics.jsonl has it", "one"),
    nothing("--report_to", "`--log.tensorboard`, `--log.wandb`"),
    nothing("--ddp_timeout", "`--train.collective-timeout`"),
    nothing("--accelerator_config", "order and split of batches are tmoe's own"),
    nothing("--aim_repo", "metrics.jsonl is the record"),
    same("--seed", "--seed"),
    refused("--peft_method", LORA),
    refused("--r", LORA),
    refused("--lora_alpha", LORA),
    refused("--lora_dropout", LORA),
    refused("--target_modules", LORA, "some"),
)
SCHEDULES = dict(linear="linear", cosine="cosine", constant="constant", constant_with_warmup="constant")


def translate(words: list[str], world: int | None = None) -> Outcome:
    """The command of train.py for the trainer's flags; the plugins' YAML by its flag or as the first word."""
    out = Outcome()
    files = [word for word in words[:1] if word.endswith((".yaml", ".yml"))]
    given = Given(ROWS, words[len(files) :], out)
    files += given.list("--acceleration_framework_config_file")
    settings = [f"--{key}={value}" for file in files for key, value in read_yaml(Path(file))]
    plugins = Given(ROWS, settings, out)
    ep = plugins.whole("training.moe.scattermoe.ep_degree", given.whole("--fast_moe", 1))
    out.world = world or ep
    if out.world % max(ep, 1):
        raise ConfigError(f"--world={out.world}: must be a multiple of ep_degree {ep}")
    out.set("--parallel.ep", ep)
    _model(given, out)
    _data(given, plugins, out)
    _train(given, out)
    return out


def read_yaml(path: Path) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a plugin file, without a sample's `plugins:`. ConfigError for any other."""
    try:
        import yaml  # pyrefly: ignore[missing-import] (transformers brings it)
    except ImportError:
        raise ConfigError(f"{path}: reading YAML needs the package PyYAML: pip install pyyaml") from None
    try:
        told = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: no plugin file: {error}") from error
    if not isinstance(told, dict):
        raise ConfigError(
            f"{path}: no plugin file: must hold keys, as training: moe: scattermoe: ep_degree: 2"
        )
    plugins = told.get("plugins", told)
    yield from _flat(plugins if isinstance(plugins, dict) else {"plugins": plugins}, "", 0)


def _flat(told: dict, before: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > 20:
        raise ConfigError(f"{before}: nested too deeply for a plugin file")
    for key, value in told.items():
        name = f"{before}.{key}" if before else str(key)
        if isinstance(value, dict):
            yield from _flat(value, name, depth + 1)
        else:
            yield name, value


def _model(given: Given, out: Outcome) -> None:
    name = given.text("--model_name_or_path")
    if not name:
        raise ConfigError("--model_name_or_path: give the folder of the model")
    try:
        config = json.loads(Path(name, CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--model_name_or_path={name}: must be a folder with {CONFIG} and safetensors "
            f"(huggingface-cli download {name} --local-dir DIR): {error}"
        ) from None
    try:
        model = read_config(config)
    except CheckpointError as error:
        raise ConfigError(f"--model_name_or_path={name}: {error}") from error
    out.preset, flags = flags_of(model)
    for flag, values in flags.items():
        out.set(flag, *values)
    out.set("--init", name)
    out.set("--model.moe.z-coeff", 0)
    if not config.get("output_router_logits", False):
        out.set("--model.moe.balance", "none")
        return
    # transformers' loss is not divided by K, and its means are over the tokens of all layers together.
    layers = sum(map(model.is_moe, range(model.layers)))
    coeff = config.get("router_aux_loss_coef", 0.001) * model.moe.top_k / max(layers, 1)
    out.set("--model.moe.balance", "batch")
    out.set("--model.moe.balance-coeff", float(coeff))
    out.notes.append(
        "the balancing loss is each layer's own; transformers' takes the tokens of all layers together"
    )


def flags_of(model: ModelConfig) -> tuple[str, dict[str, list[Any]]]:
    """The preset that is this model, or tiny with every setting that differs."""
    for name, preset in presets().items():
        if not differences(preset.model, model):
            return name, {}
    base = flattened(presets()["tiny"].model)
    found: dict[str, list[Any]] = {}
    for name, value in flattened(model).items():
        if value == base[name] or name in STEPS_READ or (value is None):
            continue
        found[f"--model.{name.replace('_', '-')}"] = list(value) if isinstance(value, tuple) else [value]
    return "tiny", found


def _data(given: Given, plugins: Given, out: Outcome) -> None:
    if given.has("--training_data_path"):
        out.set("--data.path", *given.list("--training_data_path"))
    free = plugins.has("training.attention.padding_free.method")
    out.set("--train.isolate-documents", True)
    if given.text("--packing", "true").lower() == "false" and not free:
        why = "tmoe fills its windows with documents that do not see each other, as padding_free does"
        out.notes.append(f"--packing=False: {why}; padding would compute the same and more")


def _train(given: Given, out: Outcome) -> None:
    kind = given.text("--lr_scheduler_type", "linear")
    if kind not in SCHEDULES:
        out.refuse(f"--lr_scheduler_type={kind}", f"tmoe has {', '.join(SCHEDULES)}")
    out.set("--optim.schedule", SCHEDULES.get(kind, "linear"))
    out.set("--optim.min-lr", 0)
    if given.has("--warmup_steps"):
        out.set("--optim.warmup", given.whole("--warmup_steps", 0))
    elif given.has("--warmup_ratio"):
        out.set("--optim.warmup-fraction", given.number("--warmup_ratio", 0.0))
    out.set("--optim.weight-decay", given.number("--weight_decay", 0.0))
    out.set("--optim.betas", given.number("--adam_beta1", 0.9), given.number("--adam_beta2", 0.999))
    if not given.has("--max_steps"):
        raise ConfigError("--max_steps: give it; tmoe counts steps, not epochs")
    for flag, ours, default in (
        ("--learning_rate", "--optim.lr", 5e-5),
        ("--per_device_train_batch_size", "--train.batch", 8),
        ("--max_seq_length", "--train.seq", 4096),
        ("--seed", "--seed", 42),
        ("--output_dir", "--out", "runs/fms"),
    ):
        if not given.has(flag):
            out.set(ours, default)
    kinds = dict(bfloat16="bf16", float32="fp32")
    dtype = given.text("--torch_dtype", "bfloat16" if given.has("--bf16") else "float32")
    if dtype not in kinds:
        out.refuse(f"--torch_dtype={dtype}", f"tmoe trains in {' or '.join(kinds)}")
    out.set("--train.dtype", kinds.get(dtype, "fp32"))
    if given.has("--gradient_checkpointing"):
        out.set("--parallel.checkpoint", "block")
    if given.text("--save_strategy") == "no":
        out.set("--checkpoint.mode", "off")
    if given.has("--save_total_limit"):
        out.set("--checkpoint.keep", given.whole("--save_total_limit", 0))
