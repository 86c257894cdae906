"""Commands of Megatron, Tutel and fms become tmoe's: every flag is in a table, and what is printed runs."""

from __future__ import annotations

import io
import json
import random
import re
import shlex
from pathlib import Path

import hf_tiny
import indexed
import pytest
import runs
import torch

from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.compare import flattened
from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.config.presets import presets
from tmoe.extras.migrate import names
from tmoe.extras.migrate.frameworks import FRAMEWORKS, translate
from tmoe.extras.migrate.megatron import blend, read_pattern
from tmoe.extras.migrate.tables import page, spell
from tmoe.extras.migrate.translate import main
from tmoe.log.metrics_file import read_steps
from tmoe.model.transformer import Transformer
from tmoe.optim.matrices import chosen

ROOT = Path(__file__).parents[2]
# A Mixtral 8x7B pretraining command of Megatron-Core on 16 GPUs, as its examples have it.
MIXTRAL = """
--use-mcore-models --disable-bias-linear --seq-length 2048 --max-position-embeddings 32768 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01
--attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --num-experts 8 --expert-model-parallel-size 4
--moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--tokenizer-type Llama2Tokenizer --tokenizer-model TOKENIZER --data-path DATA --split 99990,8,2
--micro-batch-size 1 --global-batch-size 128 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
--tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --sequence-parallel
--use-distributed-optimizer --log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10
--save CKPT --load CKPT --tensorboard-dir CKPT/tensorboard --no-load-optim --no-load-rng
--wandb-project NAME --wandb-exp-name NAME
""".split()
FURTHER = """--moe-z-loss-coeff --moe-input-jitter-eps --moe-token-dropping --tp-comm-overlap
--context-parallel-size --fp8-format""".split()

# Megatron-Core's MoE settings, all of transformer_config.py, and others of its MoE pages.
MEGATRON = """
num_experts expert_model_parallel_size expert_tensor_parallel_size expert_tensor_parallel_num_weight_shards
moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices moe_router_dtype
moe_router_enable_expert_bias moe_router_bias_update_rate frozen_expert_bias
moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff calculate_per_token_loss
moe_input_jitter_eps moe_router_quantile_balancing_ema moe_router_force_load_balancing
moe_router_force_biased moe_enable_routing_replay moe_expert_capacity_factor
moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference moe_token_dropping
moe_token_drop_policy moe_expert_rank_capacity_factor moe_paged_stash moe_paged_stash_page_size
moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu moe_token_dispatcher_type
moe_flex_dispatcher_backend moe_enable_deepep moe_dispatch_fwd_dtype moe_combine_bwd_dtype
moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_ncclep_zero_copy
moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs moe_permute_fusion
moe_router_fusion moe_apply_probs_on_input moe_grouped_gemm moe_use_grouped_tensor
moe_single_grouped_weight moe_single_grouped_bias moe_ffn_hidden_size moe_layer_freq
moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap
moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size moe_latent_size
moe_router_padding_for_quantization moe_router_padding_for_fp8 overlap_moe_expert_parallel_comm
delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad moe_layer_recompute moe_per_layer_logging
moe_use_upcycling moe_upcycling_granularity fake_process_group multi_latent_attention mtp_num_layers
""".split()
TUTEL = """
gate_type model_dim experts scan_expert_func result_func group seeds a2a_ffn_overlap_degree is_postscore
batch_prioritized_routing normalize_gate is_gshard_loss parallel_type use_2dh gate_index capacity_factor
top_k reserve_dims inequivalent_tokens adaptive_r megablocks_size k fp32_gate gate_noise proj_dim init_t
num_experts_per_device count_per_node hidden_size_per_expert activation_fn output_dim has_fc1_bias
has_fc2_bias group_count backend local_rank batch_size num_tokens hidden_size num_local_experts dtype top
l_aux_wt allreduce_degree num_steps checkpoint_path device eval use_tensorcore expert_type
""".split()
FMS = """
training.moe.scattermoe.ep_degree training.moe.scattermoe.disable_distributed
training.attention.padding_free.method training.fused_ops_and_kernels.fast_loss
training.fused_ops_and_kernels.fast_rms_layernorm training.fused_ops_and_kernels.fast_rope_embeddings
training.dataloader.multipack.num_processes training.mamba.cp.degree training.odm.odm.update_interval
peft.quantization.auto_gptq.kernel peft.quantization.bitsandbytes.quant_type
peft.quantization.fused_ops_and_kernels.fused_lora --model_name_or_path --training_data_path
--learning_rate --per_device_train_batch_size --gradient_accumulation_steps --packing --adam_epsilon
--torch_dtype --use_flash_attn --acceleration_framework_config_file
""".split()
LISTED = dict(
    megatron=[*(w for w in MIXTRAL if w.startswith("--")), *FURTHER, *MEGATRON], tutel=TUTEL, fms=FMS
)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_flag_is_missing(framework):
    rows = {spell(row.flag): row for row in FRAMEWORKS[framework][0]}
    assert [flag for flag in LISTED[framework] if spell(flag) not in rows] == []
    assert len(rows) == len(FRAMEWORKS[framework][0]), "a flag stands twice"


def test_the_page_shows_the_tables():
    text = (ROOT / "docs/migrate.md").read_text()
    for framework, (rows, _) in FRAMEWORKS.items():
        made = f"<!-- {framework} -->\n{page(rows)}\n<!-- end -->"
        assert made in text, f"python -m tmoe.migrate page {framework} prints it"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_flag_of_tmoe_exists(framework):
    known = names.kinds()
    for row in FRAMEWORKS[framework][0]:
        if row.kind == "same":
            assert row.becomes in known, row


def test_mixtral(capsys):
    """The whole command: model, schedule, data and layout as Megatron would have them."""
    main(["megatron", "--world", "16", "--", *MIXTRAL])
    printed = capsys.readouterr()
    words = shlex.split(printed.out)
    assert words[:6] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "8", "train.py"]
    assert "TOKENIZER: no such file here; taken to be Llama 2's" in printed.err
    cfg = parse([*words[6:], "--dry-run", "--world", "16"], "")
    moe = MoEConfig(
        experts=8, top_k=2, ffn_dim=14336, softmax="after", balance="batch", balance_coeff=0.01, z_coeff=0.0
    )
    wanted = ModelConfig(
        vocab=32256,  # 32000 up to a multiple of 128 x tp 4
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn_dim=14336,
        norm_eps=1e-5,
        init_std=0.01,
        rope=RopeConfig(max_seq=32768),
        moe=moe,
    )
    assert flattened(cfg.model) == flattened(wanted)
    train, optim = cfg.train, cfg.optim
    assert (train.batch, train.accumulate, train.seq, train.dtype) == (1, 32, 2048, "bf16")
    assert (train.eval_every, train.eval_batches, train.isolate_documents) == (1000, 10, False)
    assert (cfg.steps, optim.decay_steps, optim.warmup, optim.schedule) == (500000, 320000, 500, "cosine")
    assert (optim.lr, optim.min_lr, optim.betas) == (1e-4, pytest.approx(0.1), (0.9, 0.999))
    assert (optim.weight_decay, optim.clip, optim.eps) == (0.1, 1.0, 1e-8)
    assert (cfg.data.path, cfg.data.split) == (("DATA",), (99990, 8, 2))
    assert (cfg.data.tokenizer, cfg.out, cfg.resume) == ("TOKENIZER", "CKPT", "auto")
    assert (cfg.load_optim, cfg.load_rng, cfg.checkpoint.every) == (False, False, 10000)
    p = cfg.parallel
    assert (p.ep, p.tp, p.pp, p.etp, p.shard) == (4, 4, 1, 1, 1)
    assert (cfg.log.tensorboard, cfg.log.wandb, cfg.log.every) == (True, "NAME", 1)


SMALL = """--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0 --num-layers 2 --hidden-size 32 --num-attention-heads 2
--ffn-hidden-size 64 --seq-length 32 --num-experts 4 --moe-ffn-hidden-size 32 --mock-data --micro-batch-size 2
--lr 1e-3 --train-iters 2 --lr-decay-iters 1 --eval-iters 1 --untie-embeddings-and-output-weights""".split()


def flags(more: str, world: int | None = None) -> dict[str, list[str]]:
    outcome = translate("megatron", [*SMALL, *more.split()], world)
    assert not outcome.refused
    return outcome.flags


ROUTERS = [
    "--moe-router-pre-softmax --moe-router-topk 1",
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 2e-3",
    "--moe-router-score-function sigmoid --moe-router-num-groups 2 --moe-router-group-topk 1",
    "--moe-router-score-function sqrtsoftplus",
    "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 1e-3",
    "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.01 0.001",
    "--moe-router-load-balancing-type sinkhorn",
    "--moe-router-load-balancing-type quantile_balancing --moe-router-quantile-balancing-ema 0.5",
    "--moe-router-dtype fp64 --moe-input-jitter-eps 0.1",
    "--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position --moe-pad-expert-input-to-capacity",
    "--moe-latent-size 16 --moe-router-force-load-balancing",
    "--moe-apply-probs-on-input --moe-router-topk 1 --moe-router-pre-softmax",
    "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate --moe-layer-freq ([0]+[1]*1)",
]


@pytest.mark.parametrize("more", ROUTERS)
def test_routers_run(gloo, tmp_path, more):
    outcome = translate("megatron", [*SMALL, "--save", str(tmp_path), *more.split()])
    assert not outcome.refused
    if lacking := names.lacking(outcome.words):
        pytest.skip(f"not in this version: {lacking}")
    gloo(1, runs.run, [*outcome.words, "--no-compile", "--log.no-progress", "--log.no-report"])
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in steps} == {1, 2}


def test_routing_becomes():
    """Softmax after the choice by default, and as Megatron's formulas have it otherwise."""
    found = flags("")
    assert (found["--model.moe.softmax"], found["--model.moe.balance"]) == (["after"], ["none"])
    found = flags("--moe-router-pre-softmax")
    assert found["--model.moe.renormalize"] == ["False"]
    found = flags(ROUTERS[5])
    assert found[names.BALANCE] == ["sequence:0.01", "global:0.001"]
    found = flags(ROUTERS[6] + " --moe-aux-loss-coeff 0")
    assert found[names.SELECTION] == ["sinkhorn"] and found[names.BALANCE] == ["none"]
    found = flags(ROUTERS[12])
    assert found["--model.dense-layers"] == ["1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, more",
    [
        (2, "--expert-model-parallel-size 2 --use-distributed-optimizer --global-batch-size 8"),
        (2, "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"),
        (2, "--pipeline-model-parallel-size 2 --global-batch-size 8"),
        (2, "--context-parallel-size 2 --cp-comm-type a2a --recompute-granularity full"),
    ],
)
def test_layouts_run(gloo, tmp_path, world, more):
    outcome = translate("megatron", [*SMALL, "--save", str(tmp_path), *more.split()], world)
    assert not outcome.refused
    gloo(world, runs.run, [*outcome.words, "--no-compile", "--log.no-progress", "--log.no-report"])


TINY = dict(
    seq_length=32,
    max_position_embeddings=64,
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    num_experts=4,
    global_batch_size=8,
    train_iters=3,
    lr_decay_iters=2,
    lr_warmup_iters=1,
    expert_model_parallel_size=2,
    tensor_model_parallel_size=2,
    eval_interval=2,
    eval_iters=1,
    split="90,6,4",
)


@pytest.mark.slow
def test_mixtral_runs_when_it_is_tiny(gloo, tmp_path):
    """All flags of the Mixtral command but W&B's, with small numbers: Megatron's data, Llama's tokenizer."""
    spm = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    text = [" ".join(random.Random(n).choices("expert router token gate".split(), k=20)) for n in range(50)]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=written,
        vocab_size=280,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    data = indexed.write(tmp_path / "data", [[1 + n % 250 for n in range(60)] + [2]] * 50)
    words = list(MIXTRAL)
    new = {f"--{name.replace('_', '-')}": str(value) for name, value in TINY.items()}
    new |= {"--data-path": f"{data}", "--tokenizer-model": str(tmp_path / "tokenizer.model")}
    new |= dict.fromkeys(("--save", "--load"), str(tmp_path / "run"))
    for flag, value in new.items():
        words[words.index(flag) + 1] = value
    words = words[: words.index("--wandb-project")]
    outcome = translate("megatron", words, 2)
    assert not outcome.refused
    gloo(2, runs.run, [*outcome.words, "--no-compile", "--log.no-progress", "--log.no-report"])
    lines = [line for _, line in read_steps(tmp_path / "run" / "metrics.jsonl")]
    # Rates of each step as in Megatron: the peak after one step of warm-up, the least rate from step 2 on.
    assert [line["lr"] for line in lines] == pytest.approx([1e-4, 1e-4, 1e-5])
    assert [line.get("val_loss") is not None for line in lines] == [False, True, True]
    assert lines[-1]["test_loss"] > 0


def test_megatron_muon():
    """Megatron's update of scale 1 is five times tmoe's 0.2; with 0.2 no rate changes."""
    words = [*SMALL, *"--optimizer dist_muon --muon-num-ns-steps 6 --muon-momentum 0.9 --qk-clip".split()]
    outcome = translate("megatron", words)
    found = {flag: outcome.flags.get(flag) for flag in outcome.flags if "muon" in flag or "qk-clip" in flag}
    assert found == {
        "--optim.muon": ["."],
        "--optim.muon-momentum": ["0.9"],
        "--optim.muon-iterations": ["6"],
        "--optim.qk-clip": ["100"],
    }
    (factor,) = outcome.flags["--optim.lr-factors"]
    assert factor.endswith(":5") and any("5 times AdamW's" in note for note in outcome.notes)
    pattern = factor.rpartition(":")[0]
    matrices = "blocks.0.attention.qkv.weight blocks.1.moe.experts.gate_up blocks.1.moe.shared.down.weight"
    assert all(re.search(pattern, name) for name in matrices.split())
    others = "embedding.weight head.weight blocks.0.attention.q_norm.weight blocks.0.attention.qkv.bias"
    assert not any(re.search(pattern, name) for name in others.split())
    with torch.device("meta"):  # blocks that predict further tokens have a matrix of their own
        net = Transformer(parse([*outcome.words, "--model.mtp.depth", "1"], "").model)
    assert all(re.search(pattern, name) for name in chosen(".", net.named_parameters()))
    assert parse(outcome.words, "").optim.muon == "."
    assert any("without --muon-nesterov" in note for note in outcome.notes)
    same = translate("megatron", [*words, "--muon-nesterov", "--muon-extra-scale-factor", "0.2"])
    assert "--optim.lr-factors" not in same.flags and not any("look ahead" in note for note in same.notes)
    assert any("Muon trains routers" in note for note in same.notes)
    wrong = "--optimizer sgd --muon-scale-mode unit_rms_norm".split()
    refused = translate("megatron", [*SMALL, *wrong]).refused
    assert {text.split(":")[0] for text in refused} == {"--optimizer=sgd", "--muon-scale-mode=unit_rms_norm"}


def test_megatron_linear_layers():
    """A list of linear layers is one for each block; a half of the two flags, or another rule, is named."""
    kind, freq = "--experimental-attention-variant", "--linear-attention-freq"
    layers = SMALL[SMALL.index("--num-layers") + 1]
    some = f"([1]*{int(layers) - 1}+[0])"
    out = translate("megatron", [*SMALL, kind, "gated_delta_net", freq, some])
    assert out.flags["--model.layer-types"] == ["linear"] * (int(layers) - 1) + ["full"]
    assert translate("megatron", [*SMALL, kind, "dsa", freq, "4"]).refused[0].startswith(f"{kind}=dsa: ")
    for words in ([kind, "gated_delta_net"], [freq, "4"], [kind, "gated_delta_net", freq, "[1]"]):
        with pytest.raises(ConfigError, match=r"^--(linear|experimental)-attention-.*(missing|must be)"):
            translate("megatron", [*SMALL, *words])


def test_megatron_squared_relu():
    """Experts, shared experts and dense feed-forwards without a gate; their default width is 4 D."""
    widths = "--ffn-hidden-size", "--moe-ffn-hidden-size", "--num-experts", "--moe-router-topk"
    plain = [word for word in SMALL if word != "--swiglu"] + ["--squared-relu"]
    assert parse(translate("megatron", plain).words, "").model.moe.activation == "relu2"
    for more in ("--moe-layer-freq 2", "--moe-shared-expert-intermediate-size 48"):
        model = parse(translate("megatron", [*plain, *more.split()]).words, "").model
        assert model.moe.activation == model.moe.shared_activation == "relu2"
    bare = [word for i, word in enumerate(plain) if not {word, plain[i - 1]} & {*widths}]
    dense = parse(translate("megatron", bare).words, "").model
    assert dense.dense_layers == dense.layers and dense.ffn_dim == 4 * dense.dim
    assert dense.moe.shared_activation == "relu2"
    with pytest.raises(ConfigError, match="--squared-relu: not with --swiglu"):
        translate("megatron", [*SMALL, "--squared-relu"])


def test_megatron_refusals(capsys):
    """No half command on stdout; each flag with its reason on stderr."""
    with pytest.raises(SystemExit) as end:
        main(["megatron", "--", *SMALL, *"--fp4-format e2m1 --mamba-state-dim 64 --not-a-flag 3".split()])
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert "--fp4-format=e2m1: tmoe has no fp4 products" in said.err
    assert "--mamba-state-dim=64: give its blocks as" in said.err
    assert "error: --not-a-flag: not in the table" in said.err
    assert "note: without these flags it is: python train.py tiny" in said.err
    bare = [word for word in SMALL if word not in ("--swiglu", "--disable-bias-linear")]
    refused = translate("megatron", bare).refused
    assert [text.split(" is left out")[0] for text in refused] == ["--disable-bias-linear", "--swiglu"]


@pytest.mark.parametrize(
    "more, words",
    [
        ("--train-iters ten", r"--train-iters=ten: must be a number"),
        ("--seq-length 32.5", r"--seq-length=32.5: must be a whole number"),
        (
            "--moe-layer-freq [0]*__import__('os').getpid()",
            r"--moe-layer-freq=.*: must be a number or a list",
        ),
        ("--moe-layer-freq [1]*99999999", r"--moe-layer-freq=.*: must be a number or a list"),
        ("--moe-layer-freq [1]*3", r"--moe-layer-freq=.*: must be 2 numbers"),
        ("--split 100,0,0", r"--split=100,0,0: tmoe needs some validation data"),
        ("--data-path 0.3 a b", r"--data-path=0.3 a b: must be paths, or a weight before every path"),
        ("--expert-model-parallel-size 3", r"--world=4: must be a multiple of 3"),
    ],
)
def test_bad_values(more, words):
    with pytest.raises(ValueError, match=words):
        translate("megatron", [*SMALL, *more.split(" ", 1)[:1], *more.split(" ")[1:]], 4)


def test_types_of_states_become():
    words = [*SMALL, "--use-precision-aware-optimizer", "--main-grads-dtype", "bf16"]
    both = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16".split()
    flags = translate("megatron", [*words, *both]).flags
    assert (flags["--optim.states"], flags["--optim.sums"]) == (["bf16"], ["bf16"])
    assert not {"--optim.states", "--optim.sums"} & {*translate("megatron", SMALL).flags}
    for one, said in (
        ("--exp-avg-dtype bf16", "--exp-avg-sq-dtype=fp32: both moments have one type"),
        ("--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8", "--exp-avg-dtype=fp8: tmoe has fp32 and bf16"),
        ("--main-params-dtype fp16", "--main-params-dtype=fp16: master weights are fp32"),
    ):
        assert said in translate("megatron", [*SMALL, *one.split()]).refused[0]


def test_fp8_becomes_products_of_experts():
    words = [*SMALL, *"--bf16 --fp8-format hybrid --fp8-recipe blockwise --fp8-param-gather".split()]
    assert translate("megatron", words).flags["--train.fp8"] == ["all"]
    divided = translate("megatron", [*words, "--tensor-model-parallel-size", "2"])
    assert divided.flags["--train.fp8"] == ["experts"]
    first = SMALL.index("--num-experts")
    dense = [*SMALL[:first], *SMALL[first + 4 :], "--bf16", "--fp8-format", "e4m3"]
    flags = translate("megatron", dense).flags
    assert flags["--train.float8"] == ["rowwise"] and "--train.fp8" not in flags
    with pytest.raises(ValueError, match="--fp8-format=e5m2: must be e4m3 or hybrid"):
        translate("megatron", [*SMALL, "--bf16", "--fp8-format", "e5m2"])
    refused = translate("megatron", [*words, "--fp8-recipe", "other"]).refused
    assert refused[0].startswith("--fp8-recipe=other: scales are powers of two")


def test_fp16_becomes_a_loss_scale():
    """Megatron's defaults are a scale of 2^32, at least 1, over windows of 1000 steps, and hysteresis 2."""

    ends = ("dtype", "loss-scale", "window", "hysteresis")

    def scale(*words):
        flags = translate("megatron", [*SMALL, *words]).flags
        return {name[8:]: value for name, (value, *_) in flags.items() if name[8:].endswith(ends)}

    names = "initial-loss-scale", "min-loss-scale", "loss-scale-window", "loss-scale-hysteresis"
    default = dict(zip(names, ("4294967296", "1", "1000", "2"), strict=True))
    assert scale("--fp16") == dict(dtype="fp16") | {k: default[k] for k in names}
    given = "--initial-loss-scale 65536 --min-loss-scale 0.5 --loss-scale-window 500.0 --hysteresis 4".split()
    assert scale("--fp16", *given) == dict(dtype="fp16") | dict(
        zip(names, ("65536", "0.5", "500", "4"), strict=True)
    )
    assert scale("--fp16", "--loss-scale", "128", *given) == {"dtype": "fp16", "loss-scale": "128"}
    assert scale(*given) == {"dtype": "fp32"} and scale("--bf16", *given) == {"dtype": "bf16"}
    for word, said in (("--bf16", "--fp16: not with --bf16"), ("--hysteresis=0", "--hysteresis=0: must be")):
        with pytest.raises(ValueError, match=said):
            translate("megatron", [*SMALL, "--fp16", word])
    out = translate("tutel", ["--dtype=float16"])
    assert out.flags["--train.dtype"] == ["fp16"] and any("scales the loss" in note for note in out.notes)
    out = translate("fms", [*FMS, "--fp16"])
    assert (out.flags["--train.dtype"], out.flags["--train.loss-scale-window"]) == (["fp16"], ["2000"])
    with pytest.raises(ValueError, match="--fp16: not with --bf16"):
        translate("fms", [*FMS, "--fp16", "--bf16"])


def test_small_parts():
    assert blend(["0.3", "a", "0.7", "b"]) == ["a:0.3", "b:0.7"]
    assert blend(["a", "b"]) == ["a", "b"]
    assert read_pattern("([0]+[1]*23)") == [0] + [1] * 23
    assert read_pattern("([1]*2+[0]*1)*2") == [1, 1, 0, 1, 1, 0]


def test_launchers_and_variables_before_the_flags_are_left_out():
    words = "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node 8 pretrain_gpt.py".split()
    assert translate("megatron", [*words, *SMALL]).words == translate("megatron", SMALL, 8).words


HELLO = """--expert_type=llama_ffn --model_dim=32 --hidden_size=32 --num_tokens=32 --batch_size=2
--num_steps=2 --capacity_factor=0 --use_tensorcore --fp32_gate --a2a_ffn_overlap_degree=2 --use_2dh""".split()


@pytest.mark.parametrize(
    "words, world, wanted",
    [
        ("--num_local_experts=2", 4, dict(experts=8, ep=4)),
        ("--num_local_experts=-2", 4, dict(experts=2, ep=2)),
        ("--num_local_experts=-2 --parallel_type=model", 4, dict(experts=2, ep=2, etp=2)),
        ("--num_local_experts=-4 --parallel_type=adaptive:4", 8, dict(experts=2, ep=2, etp=4)),
        ("--num_local_experts=-4 --parallel_type=adaptive:2", 8, dict(experts=2, ep=2, etp=4, adaptive_r=2)),
        ("--num_local_experts=-2 --parallel_type=adaptive:0", 4, dict(experts=2, ep=2, adaptive_r=0)),
        ("--num_local_experts=2 --parallel_type=adaptive:0", 2, dict(experts=4, ep=2, adaptive_r=0)),
        ("--num_local_experts=2 --parallel_type=adaptive:0 is_postscore=False", 2, dict(experts=4, ep=2)),
        ("--num_local_experts=-2 --parallel_type=data", 4, dict(experts=2, ep=2)),
        ("--num_local_experts=-2 adaptive_r=1", 4, dict(experts=2, ep=2)),
    ],
)
def test_tutel_layouts(words, world, wanted):
    outcome = translate("tutel", [*HELLO, *words.split()], world)
    assert not outcome.refused
    cfg = parse([*outcome.words, "--dry-run", "--world", str(world)], "")
    p = cfg.parallel
    found = dict(experts=cfg.model.moe.experts, ep=p.ep) | (dict(etp=p.etp) if p.etp > 1 else {})
    found |= {} if p.adaptive_r is None else dict(adaptive_r=p.adaptive_r)
    assert found == wanted
    assert (cfg.model.layers, cfg.model.moe.top_k, cfg.model.moe.balance) == (1, 2, "none")


def test_tutel_runs(gloo, tmp_path):
    words = [*HELLO, "--num_local_experts=4", "--top=2", "gate_type=top", "normalize_gate=False"]
    outcome = translate("tutel", words)
    assert not outcome.refused
    gloo(
        1,
        runs.run,
        [*outcome.words, "--out", str(tmp_path), "--no-compile", "--log.no-progress", "--log.no-report"],
    )


@pytest.mark.parametrize(
    "words",
    [
        "--l_aux_wt=0.01",
        "--capacity_factor=1.25",
        "batch_prioritized_routing=True --capacity_factor=1.0 is_postscore=False",
        "gate_type=cosine_top proj_dim=16 init_t=0.5",
        "--l_aux_wt=0.01 is_gshard_loss=False gate_noise=1.0",
        "--expert_type=ffn",
    ],
)
def test_tutel_routers_run(gloo, tmp_path, words):
    outcome = translate("tutel", [*HELLO, *words.split()])
    assert not outcome.refused
    if lacking := names.lacking(outcome.words):
        pytest.skip(f"not in this version: {lacking}")
    gloo(
        1,
        runs.run,
        [*outcome.words, "--out", str(tmp_path), "--no-compile", "--log.no-progress", "--log.no-report"],
    )


def test_tutel_refusals():
    refused = translate("tutel", [*HELLO, "gate_type=custom", "--dtype=float64", "result_func=f"]).refused
    assert [text.split(":")[0].split("=")[0] for text in refused] == ["result_func", "gate_type", "--dtype"]
    with pytest.raises(ValueError, match=r"parallel_type=adaptive:3: R must be one of \[0, 1, 2, 4\]"):
        translate("tutel", [*HELLO, "--num_local_experts=-4", "--parallel_type=adaptive:3"], 8)
    with pytest.raises(ValueError, match=r"4 ranks share an expert; --world=6"):
        translate("tutel", [*HELLO, "--num_local_experts=-4"], 6)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", ("relu", True)),  # ffn, where it is left out
        ("activation_fn=F.gelu", ("gelu", True)),
        ("has_fc1_bias=False has_fc2_bias=False", ("relu", False)),
        ("--expert_type=ffn activation_fn=torch.nn.functional.relu", ("relu", True)),
        ("--expert_type=llama_ffn", ("swiglu", False)),
    ],
)
def test_tutels_experts(words, wanted):
    outcome = translate("tutel", [*(word for word in HELLO if "llama" not in word), *words.split()])
    assert not outcome.refused
    moe = parse([*outcome.words, "--dry-run"], "").model.moe
    assert (moe.activation, moe.bias) == wanted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["has_fc2_bias=False"], "has_fc1_bias, has_fc2_bias: tmoe has biases on all"),
        (["activation_fn=lambda x: F.silu(x)"], "of ffn tmoe has relu and gelu"),
        (["--expert_type=llama_ffn", "activation_fn=F.relu"], "of llama_ffn tmoe has silu and swish"),
        (["--expert_type=custom"], "--expert_type=custom: tmoe has ffn and llama_ffn"),
    ],
)
def test_experts_that_tmoe_has_not_are_named(words, said):
    (refused,) = translate("tutel", words).refused
    assert said in refused
    lambda_ = translate("tutel", ["activation_fn=lambda x: F.relu(x)"])
    assert not lambda_.refused and lambda_.flags["--model.moe.activation"] == ["relu"]


YAML = """plugins:
  training:
    attention: {padding_free: {method: huggingface}}
    fused_ops_and_kernels: {fast_loss: true, fast_rms_layernorm: true, fast_rope_embeddings: true}
    moe:
      scattermoe:
        ep_degree: 2
"""


@pytest.fixture(scope="module")
def granite(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("granite")
    return hf_tiny.saved(folder, "granitemoe")


def test_fms_runs(gloo, tmp_path, granite):
    pytest.importorskip("yaml")
    (tmp_path / "moe.yaml").write_text(YAML.replace("ep_degree: 2", "ep_degree: 1"))
    ids = indexed.write(tmp_path / "ids", [[1 + n % 25 for n in range(40)] + [30]] * 20)
    words = f"""{tmp_path / "moe.yaml"} --model_name_or_path {granite} --training_data_path {ids}
    --max_steps 2 --max_seq_length 16 --per_device_train_batch_size 2 --learning_rate 5e-5
    --torch_dtype float32 --packing False --adam_epsilon 1e-8 --logging_steps 1""".split()
    words += ["--output_dir", str(tmp_path / "run")]
    outcome = translate("fms", words)
    assert not outcome.refused
    gloo(
        1,
        runs.run,
        [
            *outcome.words,
            "--no-compile",
            "--log.no-progress",
            "--log.no-report",
            "--data.val-fraction",
            "0.3",
        ],
    )
    (tmp_path / "moe.yaml").write_text(YAML)
    assert translate("fms", words, 4).flags["--parallel.ep"] == ["2"]
    assert translate("fms", words, 4).command().startswith("torchrun --nproc-per-node 4 train.py --")


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "plugins: {peft: {quantization: {auto_gptq: {kernel: triton_v2}}}}",
            "kernel=triton_v2: the base of adapters is in 16 bits or in NF4",
        ),
        (
            "plugins: {peft: {quantization: {bitsandbytes: {quant_type: nf4}}}}",
            "quant_type=nf4: weights in NF4 are the base of adapters: --peft_method lora",
        ),
        ("plugins: {training: {odm: {odm: {gamma: 0.1}}}}", "gamma=0.1: tmoe mixes sources"),
        ("plugins: {training: {new: {thing: 1}}}", "--training.new.thing: not in the table"),
    ],
)
def test_fms_refusals(tmp_path, granite, text, words):
    pytest.importorskip("yaml")
    (tmp_path / "moe.yaml").write_text(text)
    flags = ["--model_name_or_path", str(granite), "--max_steps", "2"]
    refused = translate("fms", [str(tmp_path / "moe.yaml"), *flags]).refused
    assert len(refused) == 1 and words in refused[0]


def test_fms_optimizers(granite):
    words = ["--model_name_or_path", str(granite), "--max_steps", "2", "--optim"]
    assert translate("fms", [*words, "adamw_bnb_8bit"]).flags["--optim.states"] == ["int8"]
    assert "--optim.states" not in translate("fms", [*words, "adamw_torch"]).flags
    (refused,) = translate("fms", [*words, "adafactor"]).refused
    assert refused.startswith("--optim=adafactor: tmoe trains with AdamW")


def test_fms_adapters(granite):
    """Rank 8, alpha 32, dropout .05 and q, v are fms-hf-tuning's defaults; each expert has the whole rank."""
    words = ["--model_name_or_path", str(granite), "--max_steps", "2", "--max_seq_length", "64"]
    assert not any(flag.startswith("--lora") for flag in translate("fms", words).flags)
    flags = translate("fms", [*words, "--peft_method", "lora"]).flags
    assert {name: value for name, value in flags.items() if name.startswith("--lora")} == {
        "--lora.rank": ["8"],
        "--lora.expert-rank": ["8"],
        "--lora.alpha": ["32"],
        "--lora.dropout": ["0.05"],
        "--lora.targets": [r"\.qkv$"],
    }
    more = "--peft_method lora --r 16 --lora_alpha 8 --lora_dropout 0"
    more += " --target_modules o_proj w1 experts.down_proj"
    outcome = translate("fms", [*words, *more.split()])
    assert outcome.flags["--lora.targets"] == [r"\.o$", r"\.gate_up$", r"\.down$"] and not outcome.refused
    assert outcome.flags["--lora.rank"] == ["16"] and "--lora.dropout" not in outcome.flags
    parsed = parse([word for word in outcome.words if not word.startswith("--data.path")], "")
    assert parsed.lora.rank_of("blocks.0.moe.experts.down", 2) == 16
    assert "--lora.targets" not in translate("fms", [*words, *more.split()[:-3], "all-linear"]).flags
    for more, said in (
        ("--peft_method pt", "pt"),
        ("--target_modules router", "router"),
        ("--bias all", "bias"),
    ):
        refused = translate("fms", [*words, "--peft_method", "lora", *more.split()]).refused
        assert len(refused) == 1 and said in refused[0]


NF4 = "plugins: {peft: {quantization: {bitsandbytes: {quant_type: %s, no_peft_model: false}}}}"


def test_fms_base_in_nf4(granite, tmp_path):
    pytest.importorskip("yaml")
    words = ["--model_name_or_path", str(granite), "--max_seq_length", "64", "--peft_method", "lora"]
    assert "--lora.base" not in translate("fms", words).flags
    for more in ([], ["nf4"], ["nf4", "true"]):
        found = translate("fms", [*words, "--bnb_qlora", *more])
        assert found.flags["--lora.base"] == ["nf4"] and not found.refused
        assert any("experts are in NF4 too" in note for note in found.notes)
    for kind in ("nf4", "fp4"):
        (tmp_path / f"{kind}.yaml").write_text(NF4 % kind)
    found = translate("fms", [str(tmp_path / "nf4.yaml"), *words])
    assert found.flags["--lora.base"] == ["nf4"] and not found.refused
    parsed = parse([word for word in found.words if not word.startswith("--data.path")], "")
    assert parsed.lora.base == "nf4" and parsed.lora.rank == 8
    for given, said in (
        ([str(tmp_path / "fp4.yaml"), *words], "quant_type=fp4: tmoe has NF4 alone"),
        ([*words, "--bnb_qlora", "fp4"], "--bnb_qlora=fp4: tmoe has NF4 alone"),
        ([*words, "--bnb_qlora", "nf4", "--fast_moe", "2"], "ep_degree 1, not 2"),
    ):
        found = translate("fms", given)
        assert len(found.refused) == 1 and said in found.refused[0] and "--lora.base" not in found.flags


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "x: !!python/object/apply:os.system ['true']", "\0"])
def test_hostile_yaml(tmp_path, granite, text):
    pytest.importorskip("yaml")
    (tmp_path / "moe.yaml").write_text(text)
    flags = ["--model_name_or_path", str(granite), "--max_steps", "2"]
    with pytest.raises(ValueError, match=r"moe.yaml: no plugin file"):
        translate("fms", [str(tmp_path / "moe.yaml"), *flags])


@pytest.mark.parametrize("argv", [[], ["gshard"], ["tutel", "--world", "0", "--"], ["tutel", "--top=2"]])
def test_what_is_no_command_line(argv, capsys):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2 and not capsys.readouterr().out.startswith("python train")


def test_all_faults_at_once(capsys):
    """An unknown flag, two wrong values, a refusal and all that is missing: a line each, in one start."""
    words = "--nosuch 3 --num-layers two --moe-router-score-function softmx --decoupled-lr 1 --split 1,x"
    words += " --num-experts 8 --moe-aux-loss-coef 1"
    with pytest.raises(SystemExit) as end:
        main(["megatron", "--", *words.split()])
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert end.value.code == 2 and not said.out
    assert all(line.startswith("error: --") for line in lines), said.err
    starts = """--nosuch: not in the table
--num-layers=two: must be a number
--moe-router-score-function=softmx: must be one of softmax, sigmoid
--decoupled-lr=1: a share of the rate
--split=1,x: must be three numbers
--moe-aux-loss-coef: not in the table of this framework's flags; did you mean --moe-aux-loss-coeff?
--hidden-size: missing
--num-attention-heads: missing
--seq-length: missing
--lr: missing
--train-iters: missing
--data-path: missing
--swiglu is left out"""
    for start in starts.splitlines():
        assert sum(line.startswith(f"error: {start}") for line in lines) == 1, start


def test_an_import_names_the_checkpoint_and_the_flags_at_once(tmp_path):
    with pytest.raises(SystemExit) as end:
        main(["import", "megatron", f"{tmp_path}/CKPT", f"{tmp_path}/step", "--", *SMALL, "--nosuch", "3"])
    lines = str(end.value).splitlines()
    assert lines[0] == f"error: {tmp_path}/CKPT: no such folder"
    assert lines[1].startswith("error: --nosuch: not in the table") and len(lines) == 2


def test_what_train_py_would_refuse_is_not_printed(capsys):
    """9 of 4 experts cannot be chosen."""
    more = "--moe-router-topk 9".split()
    with pytest.raises(SystemExit):
        main(["megatron", "--", *SMALL, *more])
    said = capsys.readouterr()
    assert not said.out and "error: --moe-router-topk=9: becomes --model.moe.top-k=9: " in said.err
    with pytest.raises(SystemExit):  # another flag has a 1, too
        main("megatron -- --context-parallel-size 1 --optimizer muon --muon-momentum 1.0".split() + SMALL)
    assert "error: --muon-momentum=1: becomes --optim.muon-momentum=1.0: must be" in capsys.readouterr().err


DEEPSEEK_V3 = """
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
--max-position-embeddings 163840 --rotary-base 10000 --rotary-percent 1.0 --rotary-scaling-factor 40
--mscale 1.0 --mscale-all-dim 1.0 --vocab-size 129280 --make-vocab-size-divisible-by 3232 --norm-epsilon 1e-6
--multi-latent-attention --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58)
--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4
--moe-router-num-groups 8 --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5 --moe-grouped-gemm
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
--moe-router-dtype fp32 --moe-permute-fusion --moe-token-dispatcher-type flex --te-rng-tracker --manual-gc
--enable-experimental --cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router moe_preprocess
--log-num-zeros-in-grad --dist-ckpt-strictness log_all --no-check-for-nan-in-loss-and-grad
--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --exit-duration-in-mins 220
"""
QWEN3 = """
--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --num-query-groups 4
--group-query-attention --qk-layernorm --kv-channels 128 --norm-epsilon 1e-6 --vocab-size 151936
--make-vocab-size-divisible-by 16 --rotary-base 1000000 --rotary-percent 1.0 --max-position-embeddings 40960
--num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-router-score-function softmax
--moe-router-topk-scaling-factor 1.0 --moe-layer-freq ([1]*48) --moe-token-drop-policy probs
--moe-router-dtype fp32 --moe-aux-loss-coeff 1e-3 --moe-router-load-balancing-type seq_aux_loss
--moe-z-loss-coeff 1e-3 --moe-grouped-gemm
"""
QWEN3_NEXT = """
--num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --num-query-groups 2
--group-query-attention --kv-channels 256 --qk-layernorm --attention-output-gate --apply-layernorm-1p
--rotary-base 10000000 --rotary-percent 0.25 --max-position-embeddings 262144 --norm-epsilon 1e-6
--vocab-size 151936 --make-vocab-size-divisible-by 16 --experimental-attention-variant gated_delta_net
--linear-attention-freq 4 --linear-num-key-heads 16 --linear-num-value-heads 32 --linear-key-head-dim 128
--linear-value-head-dim 128 --linear-conv-kernel-dim 4 --num-experts 512 --moe-ffn-hidden-size 512
--moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --moe-router-topk 10
--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32
--moe-grouped-gemm --mtp-num-layers 1
"""
RECIPE = """--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --mock-data
--attention-dropout 0.0 --hidden-dropout 0.0 --untie-embeddings-and-output-weights --micro-batch-size 1
--global-batch-size 512 --lr 1e-4 --train-iters 10 --bf16 --seq-length 4096 --save X"""


@pytest.mark.parametrize(
    ("preset", "words", "refused", "same_function"),
    [
        # latent attention has neither a head dim nor key heads
        (
            "deepseek-v3",
            DEEPSEEK_V3,
            ["--exit-duration-in-mins=220"],
            {"kv_heads", "head_dim", "mtp.depth", "mtp.coeff"},
        ),
        # no dense block; softmax of the chosen is the chosen of softmax, divided by their sum
        ("qwen3-30b-a3b", QWEN3, [], {"ffn_dim", "moe.softmax"}),
        (
            "qwen3-next-80b-a3b",
            QWEN3_NEXT,
            [],
            {"ffn_dim", "moe.softmax", "moe.balance", "moe.z_coeff", "mtp.depth", "mtp.coeff"},
        ),
    ],
)
def test_published_models_are_the_presets(preset, words, refused, same_function):
    """Scripts of Megatron's model zoo are the presets, which are of the models' own config.json."""
    out = translate("megatron", f"torchrun --nproc_per_node 8 pretrain_gpt.py {RECIPE} {words}".split())
    assert [line.split(":")[0] for line in out.refused] == refused and out.world == 8
    ours, theirs = (
        flattened(cfg) for cfg in (parse([*out.words, "--dry-run"], "").model, presets()[preset].model)
    )
    assert {name for name in ours if ours[name] != theirs[name]} == same_function


def test_dropping_beside_a_capacity_factor_is_a_note():
    out = translate("megatron", [*SMALL, "--moe-expert-capacity-factor", "1.5", "--moe-token-dropping"])
    assert not out.refused and any("--moe-token-dropping" in note for note in out.notes)
    (refused,) = translate("megatron", [*SMALL, "--moe-token-dropping"]).refused
    assert refused.startswith("--moe-token-dropping: ")


FMS = """--model_name_or_path org/model --training_data_path rows.json --output_dir out --learning_rate 1e-5
--per_device_train_batch_size 4 --gradient_accumulation_steps 4""".split()


def test_fms_readme_lines():
    """fms-hf-tuning's own example: a hub name, epochs, no dtype; text rows are refused with the way out."""
    front = (
        "accelerate launch --config_file x.yaml --num_processes=8 --main_process_port=1 tuning/sft_trainer.py"
    )
    out = translate("fms", [*front.split(), *FMS, "--num_train_epochs", "5", "--max_seq_len", "1024"])
    assert not out.refused and out.world == 8
    assert out.words[:1] != ["tiny"] and out.flags["--init"] == ["org/model"]
    assert (out.flags["--epochs"], out.flags["--train.dtype"]) == (["5"], ["bf16"])
    assert out.flags["--train.seq"] == ["1024"], "argparse takes the start of a flag"
    text = translate(
        "fms", [*FMS, "--response_template", "\n### Response:", "--dataset_text_field", "output"]
    )
    (refused,) = text.refused
    assert refused.startswith("--response_template=\n### Response:: cut each row") and "--task sft" in refused
    chat = translate("fms", [*FMS, "--response_template", "<|a|>", "--instruction_template", "<|u|>"])
    assert not chat.refused and chat.flags["--task"] == ["sft"]


def test_fms_rows_of_messages_need_no_template(tmp_path):
    (tmp_path / "rows.json").write_text('[{"id": 1, "messages": [{"role": "user", "content": "a"}]}]')
    words = [*FMS, "--training_data_path", str(tmp_path / "rows.json"), "--response_template", "<|a|>"]
    out = translate("fms", words)
    assert not out.refused and out.flags["--task"] == ["sft"]


def test_fms_settings_are_checked_with_the_folder(granite, capsys):
    """The tiny model sees 128 tokens at most."""
    words = [*FMS, "--model_name_or_path", str(granite), "--max_seq_length", "4096"]
    with pytest.raises(SystemExit):
        main(["fms", "--", *words])
    said = capsys.readouterr()
    assert not said.out
    assert "error: --max_seq_length=4096: becomes --train.seq=4096: must be at most" in said.err


def test_fms_rows_of_input_and_output(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"input": "### Input: a", "output": "b"}\n{"input": 1}\n')
    out = translate("fms", [*FMS, "--training_data_path", str(tmp_path / "rows.jsonl")])
    assert out.flags["--task"] == ["sft"]
    assert out.flags["--data.columns"] == ["prompt=input", "completion=output"]


def test_fms_finds_the_plugins_of_the_variable_in_front(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "moe.yaml").write_text(YAML)
    front = f"ACCELERATION_FRAMEWORK_CONFIG_FILE={tmp_path / 'moe.yaml'} python -m tuning.sft_trainer"
    assert translate("fms", [*front.split(), *FMS]).flags["--parallel.ep"] == ["2"]


def test_a_shells_variable_stays_one():
    out = translate("fms", [*FMS, "--model_name_or_path", "$MODEL_PATH", "--output_dir", "a b"])
    assert '--init "$MODEL_PATH"' in out.command() and "--out 'a b'" in out.command()


TUTEL_README = """
python3 -m tutel.examples.helloworld --dtype=float32 --use_tensorcore
python3 -m tutel.examples.helloworld_ddp_tutel --batch_size=16
torchrun --nproc_per_node=8 -m tutel.examples.helloworld_switch --batch_size=16
torchrun --nproc_per_node=8 -m tutel.examples.helloworld --batch_size=16 --use_2dh
python3 ./tutel/examples/helloworld.py --batch_size=16
python3 -m tutel.examples.helloworld --megablocks_size=2 --num_tokens=32 --top=1 --capacity_factor=0
mpiexec -x LOCAL_SIZE=8 python3 -m tutel.launcher.run -m tutel.examples.helloworld --device cpu
mpiexec -x LOCAL_SIZE=8 python3 -m tutel.launcher.run -m tutel.examples.helloworld --num_local_experts=-2
"""


@pytest.mark.parametrize("line", TUTEL_README.strip().splitlines())
def test_tutels_readme_lines(line):
    assert translate("tutel", line.split()).refused == []


def test_values_are_of_their_settings_types():
    with pytest.raises(ValueError, match=r"^--batch_size=many: must be a whole number"):
        translate("tutel", ["--batch_size=many"])
    with pytest.raises(ValueError, match=r"--learning_rate=fast: must be a number"):
        translate("fms", [*FMS, "--learning_rate", "fast"])
