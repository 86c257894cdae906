"""The tables of TRL's and axolotl's settings in docs/migrate.md: flags exist, usual settings are named."""

import re
from pathlib import Path

import pytest

from tmoe.extras.migrate import names

PAGE = (Path(__file__).parents[2] / "docs/migrate.md").read_text()
# Settings in use, from the configs of TRL 1.16 and from axolotl's reference page.
SETTINGS = {
    "TRL": """learning_rate per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
    lr_scheduler_type warmup_ratio warmup_steps optim weight_decay max_grad_norm bf16 fp16
    gradient_checkpointing seed logging_steps report_to save_steps save_strategy save_total_limit
    eval_strategy eval_steps output_dir load_best_model_at_end resume_from_checkpoint fsdp deepspeed
    push_to_hub use_liger_kernel use_peft lora_r load_in_4bit load_in_8bit bnb_4bit_quant_type
    use_bnb_nested_quant attn_implementation torch_compile
    ddp_timeout router_aux_loss_coef neftune_noise_alpha max_length packing padding_free
    assistant_only_loss completion_only_loss dataset_text_field loss_type chat_template_path eos_token
    activation_offloading beta label_smoothing precompute_ref_log_probs ref_model truncation_mode
    max_prompt_length max_completion_length f_divergence_type sync_ref_model rpo_alpha ld_alpha
    desirable_weight undesirable_weight reward_funcs reward_weights num_generations temperature top_p
    top_k min_p repetition_penalty num_iterations steps_per_generation epsilon epsilon_high delta
    scale_rewards importance_sampling_level mask_truncated_completions top_entropy_quantile use_vllm
    vllm_mode vllm_gpu_memory_utilization vllm_importance_sampling_correction log_completions
    entropy_coef reward_model_name_or_path use_bias_correction_kl vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max multi_objective_aggregation off_policy_mask_threshold
    train_sampling_strategy normalize_advantages dataset_test_split
    shuffle_dataset generation_batch_size disable_dropout model_name_or_path dataset_name
    dataset_num_proc""",
    "axolotl": """base_model datasets chat_template train_on_inputs roles_to_train val_set_size sequence_len
    sample_packing pad_to_sequence_len micro_batch_size gradient_accumulation_steps num_epochs max_steps
    optimizer lr_scheduler learning_rate warmup_steps warmup_ratio weight_decay max_grad_norm bf16 tf32
    gradient_checkpointing flash_attention fsdp fsdp_config deepspeed adapter lora_r load_in_4bit
    load_in_8bit bnb_config_kwargs gptq rl rl_beta trl output_dir save_steps saves_per_epoch
    save_total_limit eval_steps evals_per_epoch logging_steps wandb_project special_tokens
    resume_from_checkpoint seed
    neftune_noise_alpha plugins strict dataset_prepared_path unfrozen_parameters hub_model_id
    early_stopping_patience excess_length_strategy tensor_parallel_size context_parallel_size
    expert_parallel_size""",
}


def rows(of: str) -> list[tuple[str, str]]:
    """(their settings, what tmoe has) of each row of a section of the page."""
    text = PAGE.split(f"\n## {of}\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(theirs, ours) for theirs, ours in cells if theirs not in ("TRL", "---", "axolotl's YAML")]


@pytest.mark.parametrize("of", SETTINGS)
def test_every_flag_exists(of):
    known = names.kinds()
    for theirs, ours in rows(of):
        for span in re.findall("`(--[^`]*)`", ours):
            for flag in re.findall(r"--[a-z][\w.-]*", span):
                assert flag in known, f"{theirs}: {flag}"
        assert "`--" in ours or re.search("nothing|not there|write the rows|AdamW", ours), theirs


@pytest.mark.parametrize("of", SETTINGS)
def test_usual_settings_are_named(of):
    named = set(re.findall(r"\w+", " ".join(theirs for theirs, _ in rows(of))))
    assert set(SETTINGS[of].split()) - named == set()
