"""Translates fms-acceleration's plugin YAML and the flags of its trainer to tmoe's flags.

--init names the model. Its config.json, if it exists on this machine, decides whether there is a balancing
loss.

next: translate.py
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.extras.migrate.launchers import Launch
from tmoe.extras.migrate.tables import (
    FlagRow,
    GivenFlags,
    TranslatedCommand,
    nothing,
    refused,
    same,
    switch,
    worked,
)
from tmoe.hf.config import read_config
from tmoe.hf.foreign import CONFIG
from tmoe.hf.hub_folders import NAME

ALWAYS = "tmoe always does"
PROMPTS = "tmoe trains no prompt tokens; adapters: --peft_method lora"
TARGETS = {  # PEFT's names of layers, their ends -> the matrix that holds them
    r"\.qkv$": ("q_proj", "k_proj", "v_proj"),
    r"\.o$": ("o_proj",),
    r"\.gate_up$": ("gate_proj", "up_proj", "w1", "w3", "gate_up_proj", "input_linear"),
    r"\.down$": ("down_proj", "w2", "output_linear"),
    r"\.qkv_a$": ("q_a_proj", "kv_a_proj_with_mqa"),
    r"\.q_b$": ("q_b_proj",),
    r"\.kv_b$": ("kv_b_proj",),
}
QUANTISED = "the base of adapters is in 16 bits or in NF4, --bnb_qlora nf4"
NF4 = "nf4: `--lora.base nf4`, for adapters; fp4 is refused"
YAML_NF4 = "peft.quantization.bitsandbytes.quant_type"
CHAT = "messages", "conversations"

ROWS: tuple[FlagRow, ...] = (
    # the plugins' YAML, by dotted keys
    worked("training.moe.scattermoe.ep_degree", "`--parallel.ep`"),
    nothing("training.moe.scattermoe.disable_distributed", "FSDP2 shares experts over dp where ep is 1"),
    worked("training.attention.padding_free.method", "`--train.isolate-documents True`: rows are packed"),
    nothing("training.dataloader.multipack.num_processes", "windows are full: there is nothing to balance"),
    nothing("training.fused_ops_and_kernels.fast_loss", ALWAYS),
    nothing("training.fused_ops_and_kernels.fast_rms_layernorm", ALWAYS),
    nothing("training.fused_ops_and_kernels.fast_rope_embeddings", ALWAYS),
    refused(
        "training.mamba.cp.degree", "`--parallel.cp N --parallel.cp-exchange heads` divides Mamba-2 by heads"
    ),
    refused(
        "training.odm.odm.update_interval", "tmoe mixes sources by fixed weights, --data.path PATH:WEIGHT"
    ),
    refused("training.odm.odm.sampling_interval", "tmoe mixes sources by fixed weights"),
    refused("training.odm.odm.reward_type", "tmoe mixes sources by fixed weights"),
    refused("training.odm.odm.gamma", "tmoe mixes sources by fixed weights"),
    refused("training.odm.odm.eta", "tmoe mixes sources by fixed weights"),
    refused("peft.quantization.auto_gptq.kernel", QUANTISED),
    refused("peft.quantization.auto_gptq.from_quantized", QUANTISED),
    nothing("peft.quantization.auto_gptq.use_external_lib", "for auto_gptq"),
    worked(YAML_NF4, NF4),
    nothing("peft.quantization.bitsandbytes.no_peft_model", "tmoe adds the adapters itself"),
    nothing("peft.quantization.fused_ops_and_kernels.base_layer", "for quantised weights"),
    nothing("peft.quantization.fused_ops_and_kernels.fused_lora", "for quantised weights"),
    nothing("peft.quantization.fused_ops_and_kernels.fast_loss", ALWAYS),
    nothing("peft.quantization.fused_ops_and_kernels.fast_rms_layernorm", ALWAYS),
    nothing("peft.quantization.fused_ops_and_kernels.fast_rsm_layernorm", ALWAYS),
    nothing("peft.quantization.fused_ops_and_kernels.fast_rope_embeddings", ALWAYS),
    # the trainer's flags
    worked("--acceleration_framework_config_file", "the YAML, as above"),
    worked("--fast_moe", "`--parallel.ep`"),
    worked("--model_name_or_path", "`--init`, which says what the model is"),
    nothing("--tokenizer_name_or_path", "the tokenizer of `--init`; another one by --data.tokenizer"),
    worked("--training_data_path", "`--data.path`", "some"),
    refused(
        "--validation_data_path",
        "name it with --data.val-path; without that a part of --data.path is held out",
        "some",
    ),
    same("--dataset_text_field", "--data.text-field"),
    worked(
        "--response_template", "`--task sft` of rows of messages; text rows are cut into two fields first"
    ),
    worked("--instruction_template", "`--task sft`: the turns of messages say what is trained"),
    nothing("--dataset_conversation_field", "`--task sft` finds messages and conversations", "one", *CHAT),
    refused("--chat_template", "save it into a file: --data.chat-template FILE, with --task sft"),
    refused("--data_formatter_template", "make a text field, or a prompt and a completion, of it beforehand"),
    refused(
        "--data_config", "name the sources: --training_data_path A B; weights by --data.path A:0.3 B:0.7"
    ),
    refused("--add_special_tokens", "add them to tokenizer.json and to the model first", "some"),
    refused("--multimodal", "tmoe trains on text", "nothing"),
    refused("--dataset_image_field", "tmoe trains on text"),
    nothing("--logging_strategy", "`--log.every`"),
    nothing("--evaluation_strategy", "`--train.eval-every`"),
    nothing("--skip_memory_metrics", "metrics.jsonl has the memory", "one"),
    nothing("--log_level", "metrics.jsonl is the record"),
    nothing("--logging_dir", "`--log.tensorboard` writes into the run's folder"),
    nothing("--tracker", "`--log.tensorboard`, `--log.wandb`"),
    nothing("--trackers", "`--log.tensorboard`, `--log.wandb`", "some"),
    nothing("--experiment", "a run has the name of its folder, `--out`"),
    nothing("--run_name", "a run has the name of its folder, `--out`"),
    nothing("--gradient_checkpointing_kwargs", "how transformers recomputes"),
    nothing("--dataloader_num_workers", "one thread makes the next batch"),
    nothing("--dataloader_drop_last", "each step is whole"),
    nothing("--dataloader_pin_memory", ALWAYS),
    nothing("--remove_unused_columns", "fields that are not read are left alone"),
    nothing("--ddp_find_unused_parameters", "experts without a token are no fault"),
    nothing("--fsdp", "FSDP2 always shards; `--parallel.shard`", "some"),
    nothing("--fsdp_config", "FSDP2 always shards; `--parallel.shard`"),
    nothing("--deepspeed", "FSDP2 shards; `--parallel.shard`"),
    nothing("--tf32", "fp32 runs with TF32 as torch is set"),
    nothing("--use_reentrant", "how transformers recomputes"),
    nothing("--attn_implementation", "tmoe chooses attention's kernels"),
    nothing("--flash_attn_implementation", "tmoe chooses attention's kernels"),
    nothing("--group_by_length", "windows are full: there is no padding"),
    nothing("--padding_free", "rows are packed", "some"),
    nothing("--multipack", "windows are full: there is nothing to balance", "some"),
    nothing("--fast_kernels", "tmoe has fused kernels", "some"),
    nothing("--fused_lora", "for adapters", "some"),
    nothing("--use_cpu", "a GPU where there is one"),
    nothing("--full_determinism", "one layout repeats its own numbers on a CPU; no promise on GPUs"),
    nothing("--save_model_dir", "python -m tmoe.hf export RUN DIR writes it"),
    nothing("--save_safetensors", "an export is safetensors"),
    nothing("--overwrite_output_dir", "`--resume none`"),
    nothing("--do_train", "it trains", "one", "true"),
    nothing("--do_eval", "`--train.eval-every`"),
    nothing("--embedding_size_multiple_of", "for a vocabulary that grows"),
    nothing("--push_to_hub", "python -m tmoe.hf export --push-to NAME", "one", "false"),
    worked("--resume_from_checkpoint", "False: `--resume none`; a step: `--resume STEP`"),
    nothing("--load_best_model_at_end", "metrics.jsonl says which step validated best", "one", "false"),
    refused("--metric_for_best_model", "metrics.jsonl says which step validated best"),
    refused("--trainer_controller_config_file", "a run ends by --steps or by a signal"),
    refused("--neftune_noise_alpha", "--sft.neftune ALPHA, with --task sft"),
    refused("--quantization_method", QUANTISED),
    nothing("--dequantize", "`--init` reads quantised weights as 16 bits", "one", "true"),
    refused("--auto_gptq", QUANTISED, "some"),
    worked("--bnb_qlora", f"{NF4}; nf4 where left out", "some"),
    worked("--lr_scheduler_kwargs", "min_lr_rate of cosine_with_min_lr: `--optim.min-lr`"),
    refused("--num_virtual_tokens", PROMPTS),
    refused("--prompt_tuning_init", PROMPTS),
    refused("--prompt_tuning_init_text", PROMPTS),
    worked("--lora_r", "`--lora.rank`, `--lora.expert-rank`, as `--r`"),
    worked("--bias", "nothing for none; all and lora_only are refused"),
    refused("--modules_to_save", "whole weights are not trained next to adapters", "some"),
    same("--output_dir", "--out"),
    same("--max_seq_length", "--train.seq"),
    same("--max_steps", "--steps"),
    worked("--num_train_epochs", "`--epochs`, unless `--max_steps` is above 0; 3 where both are left out"),
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
    worked("--optim", "adamw_torch, or of 8 bits: `--optim.states int8`; others are refused: AdamW"),
    worked("--torch_dtype", "`--train.dtype` bf16, where left out, fp16 or fp32; others are refused"),
    switch("--bf16", "`--train.dtype bf16`"),
    switch("--fp16", "`--train.dtype fp16`, with the loss scale of torch's GradScaler"),
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
    worked("--peft_method", "lora: the flags below; none: all weights are trained; pt is refused"),
    worked("--r", "`--lora.rank`, `--lora.expert-rank`; 8 where left out"),
    worked("--lora_alpha", "`--lora.alpha`; 32 where left out"),
    worked("--lora_dropout", "`--lora.dropout`, on dense layers; 0.05 where left out"),
    worked(
        "--target_modules",
        "`--lora.targets`: q_proj, k_proj, v_proj: attention's qkv; o_proj, gate_proj, up_proj, w1, w3, "
        "down_proj, w2; all-linear: all; q_proj and v_proj where left out",
        "some",
    ),
)
OPTIMIZERS = ["adamw_torch", "adamw_torch_fused"]
OPTIMIZERS += ["adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"]
SCHEDULES = dict(linear="linear", cosine="cosine", constant="constant", constant_with_warmup="constant")


FILE = "ACCELERATION_FRAMEWORK_CONFIG_FILE"
RECIPE = (
    "cut each row at this text into a prompt, which ends with it, and a completion; then --task sft "
    "(docs/migrate.md has the lines); rows of messages need no template"
)


def translate(launch: Launch, world: int | None = None) -> TranslatedCommand:
    """The command of train.py for the trainer's flags.

    The plugins' YAML is named by its flag, by an environment variable, or as the first word.
    """
    out = TranslatedCommand(preset="")
    words = launch.words
    files = [word for word in words[:1] if word.endswith((".yaml", ".yml"))]
    given = GivenFlags(ROWS, words[len(files) :], out, abbreviated=True)
    files += given.list("--acceleration_framework_config_file")
    files = files or [name for name in [launch.variables.get(FILE, os.environ.get(FILE, ""))] if name]
    out.read.add(FILE)
    settings = []
    for file in files:
        try:
            settings += [f"--{key}={value}" for key, value in read_yaml(Path(file))]
        except ConfigError as error:
            out.wrong.append(error.spelt("flag"))
    plugins = GivenFlags(ROWS, settings, out)
    ep = plugins.whole("training.moe.scattermoe.ep_degree", given.whole("--fast_moe", 1, 1), 1)
    out.world = world or ep
    if out.world % ep:
        out.reject(f"--world={out.world}", f"must be a multiple of ep_degree {ep}")
    out.set("--parallel.ep", ep)
    _model(given, out)
    _data(given, plugins, out)
    _length(given, out)
    _train(given, out)
    _adapters(given, out)
    _base(given, plugins, ep, out)
    return out


def read_yaml(path: Path) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a plugin file, without a leading `plugins:`. ConfigError for other files."""
    try:
        import yaml  # pyrefly: ignore[missing-import] (transformers installs it)
    except ImportError:
        raise ConfigError(f"{path}: reading YAML needs the package PyYAML: pip install pyyaml") from None
    try:
        read = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: no plugin file: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(
            f"{path}: no plugin file: must hold keys, as training: moe: scattermoe: ep_degree: 2"
        )
    plugins = read.get("plugins", read)
    yield from _flat(plugins if isinstance(plugins, dict) else {"plugins": plugins}, "", 0)


def _flat(read: dict, before: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > 20:
        raise ConfigError(f"{before}: nested too deeply for a plugin file")
    for key, value in read.items():
        name = f"{before}.{key}" if before else str(key)
        if isinstance(value, dict):
            yield from _flat(value, name, depth + 1)
        else:
            yield name, value


def _model(given: GivenFlags, out: TranslatedCommand) -> None:
    """Sets --init and the balancing loss, which transformers adds only with output_router_logits."""
    flag = "--model_name_or_path"
    name = given.text(flag)
    if not name:
        return out.reject(flag, "missing; it names the folder of the model")
    out.set("--init", name)
    out.set("--model.moe.z-coeff", 0)
    elsewhere = "$" in name or (NAME.fullmatch(name) and not Path(name).exists())
    config, model = {}, None
    if elsewhere:
        out.notes.append(f"{flag}={name}: not read here; no balancing loss, as output_router_logits is off")
    else:
        try:
            config = json.loads(Path(name, CONFIG).read_text())
            model = read_config(config)
        except CheckpointError as error:
            return out.reject(f"{flag}={name}", str(error))
        except (OSError, ValueError, RecursionError) as error:
            why = f"must be a name on the hub, or a folder with {CONFIG} and safetensors: {error}"
            return out.reject(f"{flag}={name}", why)
    if model is None or not config.get("output_router_logits", False):
        return out.set("--model.moe.balance", "none")
    # transformers does not divide its loss by K, and its means are over the tokens of all layers together.
    layers = sum(map(model.is_moe, range(model.layers)))
    coeff = config.get("router_aux_loss_coef", 0.001) * model.moe.top_k / max(layers, 1)
    out.set("--model.moe.balance", "batch")
    out.set("--model.moe.balance-coeff", float(coeff))
    out.notes.append(
        "the balancing loss is each layer's own; transformers' takes the tokens of all layers together"
    )
    return None


def _data(given: GivenFlags, plugins: GivenFlags, out: TranslatedCommand) -> None:
    paths = given.list("--training_data_path")
    if paths:
        out.set("--data.path", *paths)
    elif not given.has("--data_config"):
        out.notes.append("--training_data_path: missing; tmoe would train on Python's own sources, stdlib")
    if _is_chat(given, paths):
        out.set("--task", "sft")
        out.flags.pop("--data.text-field", None)
        out.notes.append("rows of messages: --task sft trains what the assistant says, wherever it is marked")
    elif _holds(paths, "input", "output") and not given.has("--dataset_text_field"):
        out.set("--task", "sft")
        out.set("--data.columns", "prompt=input", "completion=output")
    elif given.has("--response_template"):
        out.refuse(f"--response_template={given.text('--response_template')}", RECIPE)
    free = plugins.has("training.attention.padding_free.method") or given.has("--padding_free")
    out.set("--train.isolate-documents", True)
    if given.text("--packing", "true").lower() == "false" and not free:
        why = "tmoe fills its windows with documents that do not see each other, as padding_free does"
        out.notes.append(f"--packing=False: {why}; padding would compute the same and more")


def _is_chat(given: GivenFlags, paths: list[str]) -> bool:
    """Whether the rows are conversations, by flags for conversations or by the first row."""
    flags = "--instruction_template", "--dataset_conversation_field", "--chat_template"
    if any(map(given.has, flags)):
        return True
    return any(_holds(paths, field) for field in CHAT)


def _holds(paths: list[str], *fields: str) -> bool:
    """Whether the first file exists on this machine and its first row has these fields."""
    try:
        with Path(paths[0]).open() as file:
            text = file.read(2**16)
    except (OSError, UnicodeDecodeError, IndexError):
        return False
    row = re.match(r"\s*(?:\[\s*)?(\{.*)", text, re.S)
    try:
        found, _ = json.JSONDecoder().raw_decode(row[1]) if row else ({}, 0)
    except ValueError:
        return False
    return all(field in found for field in fields)


def _adapters(given: GivenFlags, out: TranslatedCommand) -> None:
    """Sets --lora for --peft_method lora; each expert's adapter has PEFT's rank, not rank / top-k."""
    method = given.text("--peft_method", "none").lower()
    if method not in ("lora", "none"):
        return out.refuse(f"--peft_method={method}", PROMPTS if method == "pt" else "lora and none are known")
    if method == "none":
        for flag in ("--r", "--lora_r", "--lora_alpha", "--lora_dropout", "--target_modules"):
            if given.has(flag):
                out.notes.append(f"{flag}: not read without --peft_method lora")
        return None
    if (bias := given.text("--bias", "none")) != "none":
        out.refuse(f"--bias={bias}", "tmoe trains no biases next to adapters")
    rank = given.whole("--r", given.whole("--lora_r", 8, 1), 1)
    out.set("--lora.rank", rank)
    out.set("--lora.expert-rank", rank)
    out.set("--lora.alpha", given.number("--lora_alpha", 32.0, 0))
    if dropout := given.number("--lora_dropout", 0.05, 0):
        out.set("--lora.dropout", dropout)
        out.notes.append("--lora_dropout: on dense layers alone; PEFT has none on stacks of experts")
    names = given.list("--target_modules") or ["q_proj", "v_proj"]
    if "all-linear" in names:
        return out.notes.append("--target_modules=all-linear: experts get adapters too")
    found = {
        target
        for target, theirs in TARGETS.items()
        if {name.rpartition(".")[2] for name in names} & {*theirs}
    }
    known = {name for theirs in TARGETS.values() for name in theirs}
    for name in names:
        if name.rpartition(".")[2] not in known:
            out.refuse(f"--target_modules={name}", "tmoe has no adapter of this layer")
    out.set("--lora.targets", *(target for target in TARGETS if target in found))
    if r"\.qkv$" in found:
        out.notes.append("--target_modules: q, k and v are one matrix, whose adapter changes all three")
    return None


def _base(given: GivenFlags, plugins: GivenFlags, ep: int, out: TranslatedCommand) -> None:
    """Sets --lora.base for bitsandbytes' NF4, which the plugin doubles as tmoe does. After `_adapters`."""
    flag = "--bnb_qlora" if given.has("--bnb_qlora") else YAML_NF4
    kind = given.text(flag, "nf4") if given.has(flag) else plugins.text(flag)
    if not kind:
        return None
    if kind != "nf4":
        return out.refuse(f"{flag}={kind}", "tmoe has NF4 alone: nf4")
    if "--lora.rank" not in out.flags:
        return out.refuse(f"{flag}={kind}", "weights in NF4 are the base of adapters: --peft_method lora")
    if ep > 1:
        return out.refuse(f"{flag}={kind}", f"every rank holds the whole base in NF4: ep_degree 1, not {ep}")
    out.set("--lora.base", kind)
    return out.notes.append(f"{flag}={kind}: experts are in NF4 too, as are all matrices of blocks")


def _length(given: GivenFlags, out: TranslatedCommand) -> None:
    """Sets --steps or --epochs; transformers' default is 3 epochs."""
    steps = given.whole("--max_steps", -1, -1)
    if steps > 0:
        return out.set("--steps", steps)
    out.flags.pop("--steps", None)
    return out.set("--epochs", given.number("--num_train_epochs", 3.0, 0))


def _types(given: GivenFlags, out: TranslatedCommand) -> None:
    """The type of products, and the loss scale of fp16."""
    kinds = dict(bfloat16="bf16", float16="fp16", float32="fp32")
    dtype = given.text("--torch_dtype", "bfloat16").removeprefix("torch.")
    if dtype not in kinds:
        out.refuse(f"--torch_dtype={dtype}", f"tmoe trains in {' or '.join(kinds)}")
    out.set("--train.dtype", "fp16" if given.has("--fp16") else kinds.get(dtype, "bf16"))
    if given.has("--fp16") and given.has("--bf16"):
        out.reject("--fp16", "not with --bf16, as in its Trainer")
    if given.has("--fp16"):
        out.set("--train.loss-scale-window", 2000)
        out.set("--train.loss-scale-hysteresis", 1)


def _train(given: GivenFlags, out: TranslatedCommand) -> None:
    kind, least = given.text("--lr_scheduler_type", "linear"), 0.0
    if kind == "cosine_with_min_lr":
        found = re.search(r"min_lr_rate\W+(\d[\d.e-]*)", given.text("--lr_scheduler_kwargs"))
        kind, least = "cosine", float(found[1]) if found else 0.0
    elif given.has("--lr_scheduler_kwargs"):
        out.refuse("--lr_scheduler_kwargs", "of cosine_with_min_lr alone, its min_lr_rate")
    if kind not in SCHEDULES:
        out.refuse(f"--lr_scheduler_type={kind}", f"tmoe has {', '.join(SCHEDULES)}, cosine_with_min_lr")
    out.set("--optim.schedule", SCHEDULES.get(kind, "linear"))
    out.set("--optim.min-lr", least)
    if given.has("--warmup_steps"):
        out.set("--optim.warmup", given.whole("--warmup_steps", 0))
    elif given.has("--warmup_ratio"):
        out.set("--optim.warmup-fraction", given.number("--warmup_ratio", 0.0))
    out.set("--optim.weight-decay", given.number("--weight_decay", 0.0))
    out.set("--optim.betas", given.number("--adam_beta1", 0.9), given.number("--adam_beta2", 0.999))
    for flag, ours, default in (
        ("--learning_rate", "--optim.lr", 5e-5),
        ("--per_device_train_batch_size", "--train.batch", 8),
        ("--max_seq_length", "--train.seq", 4096),
        ("--seed", "--seed", 42),
        ("--output_dir", "--out", "runs/fms"),
    ):
        if not given.has(flag):
            out.set(ours, default)
    optimizer = given.text("--optim", OPTIMIZERS[0])
    if optimizer not in OPTIMIZERS:
        out.refuse(f"--optim={optimizer}", f"tmoe trains with AdamW: {', '.join(OPTIMIZERS)}")
    elif optimizer.endswith("8bit"):
        out.set("--optim.states", "int8")
    _types(given, out)
    if given.has("--gradient_checkpointing"):
        out.set("--parallel.checkpoint", "block")
    if given.text("--save_strategy") == "no":
        out.set("--checkpoint.mode", "off")
    if given.has("--save_total_limit"):
        out.set("--checkpoint.keep", given.whole("--save_total_limit", 0))
    again = given.text("--resume_from_checkpoint", "true")
    if again.lower() != "true":
        out.set("--resume", "none" if again.lower() == "false" else again)
