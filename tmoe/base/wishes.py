"""Features of other trainers that tmoe lacks: a flag for one is answered with what to do instead.

next: tmoe/front.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

# A pattern that is searched for in a flag, and the answer. The first pattern found counts.
WISHES = (
    (
        r"\bdo[.-]?lora|\bdora\b|galore|bitfit|lora.?(plus|bias|fan|ga)|modules.?to.?save",
        "the low-rank adapters are LoRA and rsLoRA; valid: --lora.rank N, --lora.rs",
    ),
    (
        r"^(use.?)?(lora|adapters?)$|peft",
        "low-rank adapters are trained by train.py with --lora.rank N, and --lora.alpha, .targets, .dropout; "
        "tmoe.generate MODEL --adapter STEP generates with them",
    ),
    (
        r"adam.?8.?bit|8.?bit.?adam|paged.?adam|optim.?bits",
        "valid: --optim.states int8 stores AdamW's moments in 8 bits, bf16 in 16; --optim.offload keeps them "
        "in the host's memory",
    ),
    (
        r"gguf|llama.?cpp",
        "two commands handle files of llama.cpp: `tmoe hf gguf STEP X.gguf --type q4_k_m` writes one, "
        "`tmoe hf import X.gguf STEP` reads one",
    ),
    (
        r"\bq[.-]?lora|load.?in.?4.?bit|\bnf4\b|\b4.?bit\b|bnb.?4.?bit|bnb.?qlora",
        "a frozen base in 4 bits is for low-rank adapters; valid: --lora.rank N --lora.base nf4",
    ),
    (
        r"quant(?!il)|load.?in.?[48].?bit|\b[48].?bit\b|int[48]|nf4|gptq|\bawq|bnb|bitsandbytes|hqq",
        "weights of 8 bits and fewer are not trained; valid: bf16 or fp32, or adapters on a base in 4 bits "
        "by --lora.base nf4; `python -m tmoe.generate MODEL --quantize int8` (fp8, int4, nf4) decodes with "
        "them",
    ),
    (
        r"fp4|transformer.?engine",
        "the narrowest products are in fp8: --train.fp8 experts, or all with dense layers; --train.float8 "
        "rowwise for dense layers and shared experts alone; --parallel.dispatch-dtype fp8 sends rows in fp8",
    ),
    (
        r"vllm|sglang|tensorrt|trt.?llm",
        "another engine for rollouts is not there yet; valid: tmoe's own, which --task grpo starts "
        "automatically; `tmoe hf export` writes a folder that such engines serve",
    ),
    (
        r"\bserve\b|\bport\b|openai.?api|api.?server",
        "a server is not there yet; valid: `tmoe hf export STEP DIR`, then a server of Hugging Face folders",
    ),
    (
        r"lm.?eval|mmlu|gsm8k|\bbenchmarks?\b|eval.?tasks?",
        "evaluation on tasks is not there yet; valid: `tmoe hf export STEP DIR`, then a tool that evaluates "
        "Hugging Face folders",
    ),
    (
        r"early.?stop|patience",
        "early stopping is not there yet; valid: --train.eval-every, and Ctrl-C, which saves",
    ),
    (
        r"^(use.?)?muon",
        "valid: --optim.muon PATTERN trains the matrices that the pattern finds, '.' is every matrix",
    ),
    (
        r"adafactor|\blion\b|shampoo|\bsgd\b|sophia|optimizer.?(name|type)|\b(optimizer|optim)$",
        "another optimizer is not there yet; valid: AdamW, with the settings of --optim, and --optim.muon",
    ),
    (
        r"critic|value.?model|value.?head\b|\bppo\b|\bgae\b|vf.?coef",
        "PPO with a value model is not there yet; valid: --task grpo, whose --grpo.advantage needs none",
    ),
    (
        r"deepspeed|zero.?stage|fsdp",
        "tmoe divides weights automatically; valid: --parallel.shard 1, 2 or 3 (as ZeRO's stages)",
    ),
    (
        r"flash.?att|attn.?impl|use.?flash|sdpa|xformers|torch.?backend",
        "tmoe chooses its attention automatically; valid: leave it out",
    ),
    (
        r"\b(sample.?)?packing\b|group.?by.?length|padding.?free",
        "tmoe always packs rows, and no row sees another; valid: leave it out",
    ),
    (
        r"push.?to.?hub|\bhub.?(model|token)",
        "training uploads nothing; valid: `tmoe hf export STEP DIR --push OWNER/NAME`",
    ),
    (
        r"\bref(erence)?.?(model|policy)",
        "the reference is the model that the run begins with; valid: leave it out; --init names that model",
    ),
    (
        r"precompute.?ref",
        "tmoe always computes the reference's log-probs once, before the first step; valid: leave it out",
    ),
    (
        r"(assistant|completion|response).?only|train.?on.?(inputs|responses)|mask.?(inputs|prompt)",
        "tmoe trains the assistant's tokens and completions alone; valid: leave it out",
    ),
    (r"liger|unsloth", "tmoe has its own kernels; valid: leave it out"),
    (r"\b(run|exp|experiment).?name\b", "a run has the name of its folder; valid: --out DIR"),
    (
        r"^(local.?rank|nproc.?per.?node|num.?gpus|n.?gpus|devices|nnodes|num.?nodes|world.?size)$",
        "the launcher sets the number of processes; valid: torchrun --nproc-per-node N, and --world N with "
        "--dry-run",
    ),
    (r"trust.?remote", "tmoe runs no code of a folder; valid: leave it out"),
    (r"dataloader|num.?workers|pin.?memory", "tmoe reads data automatically; valid: leave it out"),
)


# Other trainers' names of a value: by setting, our value (a flag and its value may follow) -> their names.
VALUES: dict[str, dict[str, str]] = {
    "preference.loss": {
        "sigmoid": "dpo logistic sigmoid_norm",
        "robust": "rdpo robust_dpo",
        "sigmoid --preference.smoothing 0.1": "cdpo conservative",
        "hinge": "slic slic_hf slichf rso",
        "kto": "kto_pair unpaired",
        "orpo": "odds_ratio",
    },
    "grpo.loss": {
        "dapo": "ppo clip vanilla bnpo",
        "rloo": "reinforce",
        "dr_grpo": "drgrpo dr-grpo",
    },
    "train.dtype": {
        "bf16": "bfloat16 torch.bfloat16 auto mixed",
        "fp16": "float16 torch.float16 half",
        "fp32": "float32 float full",
    },
    "train.fp8": {"all": "true on hybrid e4m3", "experts": "moe", "none": "false off no"},
    "train.float8": {"rowwise": "true on e4m3 hybrid row-wise per_row tensorwise", "none": "false off no"},
    "optim.schedule": {
        "cosine": "cosine_with_min_lr cosine_decay",
        "constant": "constant_with_warmup none",
        "wsd": "warmup_stable_decay wsd_linear",
    },
    "checkpoint.mode": {"off": "no none false", "async": "true steps"},
    "parallel.checkpoint": {"block": "full true all layer", "moe": "selective", "none": "false no off"},
    "model.attention": {"gqa": "mha mqa sdpa flash flash_attention_2 eager"},
}


def meant_by_value(name: str, value: str, options: Sequence[str]) -> str:
    """The hint for a value that is none of a setting's options: `; did you mean A?`; "" if none is similar.

    name: a dotted setting.
    """
    low = value.lower()
    theirs = VALUES.get(name, {})
    found = next((one for one, words in theirs.items() if low in words.split()), "")
    found = found or next(iter(get_close_matches(low, options, 1, 0.7)), "")
    return f"; did you mean {found}?" if found else ""


def wish(flag: str) -> str:
    """The answer to a flag for a feature that tmoe lacks; "" for another flag."""
    text = flag.lstrip("-").replace("_", "-").lower()
    return next((answer for pattern, answer in WISHES if re.search(pattern, text)), "")
