"""Tiny Hugging Face folders with tokenizers and chat templates, and local tasks of lm_eval, for tests/eval.

next: tests/eval/test_harness.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from chat_tokenizers import SPECIAL, chat_tokenizer
from corpora import prose

# set while a file imports lm_eval, and in its tests; the files that run later know nothing of it
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
POSITIONS = 96  # of the models: some contexts are longer
SIZES = dict(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=POSITIONS,
    attn_implementation="eager",
    experts_implementation="eager",
)
LOCAL = dict(num_local_experts=8, num_experts_per_tok=2, head_dim=8)
MLA = dict(q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
# each model's configuration, its tokenizer of chat_tokenizers.py, and whether texts begin with bos
KINDS = dict(
    qwen3_moe=(transformers.Qwen3MoeConfig, "qwen3", False),
    llama=(transformers.LlamaConfig, "llama3", True),
    gpt_oss=(transformers.GptOssConfig, "gpt_oss", False),
    deepseek_v3=(transformers.DeepseekV3Config, "deepseek", True),
)
OWN = dict(
    qwen3_moe=dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8),
    llama={},
    gpt_oss=LOCAL | dict(sliding_window=24, layer_types=["sliding_attention", "full_attention"] * 2),
    deepseek_v3=MLA
    | dict(num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
    | dict(n_group=4, topk_group=2, first_k_dense_replace=1, n_shared_experts=1),
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets OFFLINE for the tests of a file that imports this fixture."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)


def save_model(folder: Path, kind: str) -> Path:
    """Saves a random model that is far from uniform, with its tokenizer and template."""
    config, template, begins = KINDS[kind]
    own = chat_tokenizer(template, merges=120)
    fast = tokenizers.Tokenizer.from_buffer(own.files.raw)
    bos, eos = SPECIAL[template][:2]
    if begins:
        single = tokenizers.processors.TemplateProcessing
        fast.post_processor = single(single=f"{bos} $A", special_tokens=[(bos, fast.token_to_id(bos))])
    names = dict(eos_token=eos, pad_token=eos) | (dict(bos_token=bos) if bos else {})
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **names)
    assert own.files.template is not None
    wrapped.chat_template = own.files.template.decode()
    ids = dict(eos_token_id=fast.token_to_id(eos), bos_token_id=fast.token_to_id(bos) if bos else None)
    sizes = SIZES | dict(vocab_size=len(wrapped), pad_token_id=None) | ids
    sizes |= dict(num_hidden_layers=4) if kind == "gpt_oss" else {}
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config(**sizes | OWN[kind]))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


COMMON = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, fewshot: {shots}}}}}
test_split: test
fewshot_split: fewshot
num_fewshot: {few}
"""
CHOICE = """output_type: multiple_choice
doc_to_text: "{question}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: right
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
UNTIL = """output_type: generate_until
doc_to_text: "Q: {{q}}\\nA:"
doc_to_target: "{{options[right]}}"
generation_kwargs: {until: ["\\n", "Q"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TASKS = "tiny_choice", "tiny_letter", "tiny_empty", "tiny_rolling", "tiny_until"


def save_tasks(folder: Path, count: int = 8) -> Path:
    """Saves five tasks: answers that are texts and single letters, no context, whole texts, generation.

    count: documents of each task.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [prose(number, 6 + number % 7) for number in range(4 * count)]  # of 30 to 80 characters
    rows = [
        dict(q=f"{lines[i] * (1 + 3 * (i % 5 == 0))} é 漢 {i}", right=i % 4)
        | dict(options=[" yes", " no", f" {lines[i + 1]}", " " + "x" * (i % 5 + 1)], letters=list("ABCD"))
        for i in range(count + 4)
    ]
    texts = [dict(text="\n".join(lines[i : i + 1 + i % 9])) for i in range(0, 3 * count, 3)]
    data, shots, whole = (folder / name for name in ("rows.jsonl", "shots.jsonl", "texts.jsonl"))
    for path, some in ((data, rows[4:]), (shots, rows[:4]), (whole, texts)):
        path.write_text("\n".join(map(json.dumps, some)))
    question = "Q: {{q}}\\nA:"
    letters = CHOICE.replace("options", "letters")
    kinds = dict(
        tiny_choice=(CHOICE.format(question=question), data, 0),
        tiny_letter=(letters.format(question=question), data, 2),
        tiny_empty=(CHOICE.format(question=""), data, 0),
        tiny_rolling=(ROLLING, whole, 0),
        tiny_until=(UNTIL, data, 0),
    )
    for name, (text, file, few) in kinds.items():
        few_shots = few if few else "null"
        head = COMMON.format(name=name, data=file, shots=shots if file is data else file, few=few_shots)
        (folder / f"{name}.yaml").write_text(head + text)
    return folder
