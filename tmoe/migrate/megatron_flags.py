"""Megatron-Core's flags, each with what it becomes.

next: megatron.py
"""

from __future__ import annotations

from tmoe.migrate import names
from tmoe.migrate.tables import Row, nothing, refused, same, switch, worked

ALWAYS = "tmoe always does"
ITSELF = "tmoe decides for itself; results do not depend on it"
KERNELS = "which kernels run is tmoe's choice; results do not depend on it"
NO_FP8 = "tmoe has no fp8 products; leave it out to train in bf16"
ROTARY = "tmoe has rotary positions only"

ROWS: tuple[Row, ...] = (
    # the model
    nothing("--use-mcore-models", ALWAYS, "nothing"),
    nothing("--transformer-impl", ITSELF),
    switch("--disable-bias-linear", "needed: tmoe's linear layers have no bias"),
    switch("--add-qkv-bias", "`--model.qkv-bias True`"),
    same("--num-layers", "--model.layers"),
    same("--hidden-size", "--model.dim"),
    worked(
        "--ffn-hidden-size", "`--model.ffn-dim`, and `--model.moe.ffn-dim` without `--moe-ffn-hidden-size`"
    ),
    same("--num-attention-heads", "--model.heads"),
    switch("--group-query-attention", "`--model.kv-heads` of `--num-query-groups`"),
    worked("--num-query-groups", "`--model.kv-heads`"),
    worked("--kv-channels", "`--model.head-dim`; hidden size / heads where left out"),
    same("--seq-length", "--train.seq"),
    worked("--max-position-embeddings", "`--model.rope.max-seq`"),
    same("--init-method-std", "--model.init-std"),
    nothing("--attention-dropout", "tmoe has no dropout inside attention", "one", "0", "0.0"),
    worked("--hidden-dropout", "`--model.dropout`; 0.1 where left out, as in Megatron"),
    nothing("--normalization", "tmoe has RMSNorm only", "one", "RMSNorm"),
    same("--norm-epsilon", "--model.norm-eps"),
    same("--layernorm-epsilon", "--model.norm-eps"),
    switch("--qk-layernorm", "`--model.qk-norm head`"),
    nothing("--position-embedding-type", ROTARY, "one", "rope"),
    nothing("--no-position-embedding", "rotary positions come instead", "nothing"),
    nothing("--use-rotary-position-embeddings", ALWAYS, "nothing"),
    same("--rotary-base", "--model.rope.theta"),
    nothing("--rotary-percent", "all channels of a head turn", "one", "1", "1.0"),
    switch("--use-rope-scaling", "`--model.rope.scaling llama3`"),
    worked("--rope-scaling-factor", "`--model.rope.factor`"),
    switch("--swiglu", "needed: tmoe's feed-forwards are SwiGLU"),
    refused(
        "--squared-relu",
        "tmoe's dense feed-forwards are SwiGLU; of experts alone it is --model.moe.activation relu2",
        "nothing",
    ),
    switch("--untie-embeddings-and-output-weights", "`--model.tied False`; without it `--model.tied True`"),
    nothing("--no-masked-softmax-fusion", KERNELS, "nothing"),
    nothing("--no-bias-swiglu-fusion", KERNELS, "nothing"),
    nothing("--no-bias-dropout-fusion", KERNELS, "nothing"),
    nothing("--no-rope-fusion", KERNELS, "nothing"),
    nothing("--use-flash-attn", KERNELS, "nothing"),
    nothing("--attention-backend", KERNELS),
    nothing("--attention-softmax-in-fp32", ALWAYS, "nothing"),
    nothing("--no-gradient-accumulation-fusion", KERNELS, "nothing"),
    nothing("--cross-entropy-loss-fusion", ALWAYS, "nothing"),
    nothing("--cross-entropy-fusion-impl", ITSELF),
    nothing("--distribute-saved-activations", ITSELF, "nothing"),
    switch("--multi-latent-attention", "`--model.attention mla`"),
    same("--q-lora-rank", "--model.mla.q-rank"),
    same("--kv-lora-rank", "--model.mla.kv-rank"),
    same("--qk-head-dim", "--model.mla.nope-dim"),
    same("--qk-pos-emb-head-dim", "--model.mla.rope-dim"),
    same("--v-head-dim", "--model.mla.v-dim"),
    refused("--mtp-num-layers", "tmoe predicts one token ahead"),
    # experts and routing
    same("--num-experts", "--model.moe.experts"),
    same("--moe-ffn-hidden-size", "--model.moe.ffn-dim"),
    worked("--moe-layer-freq", "`--model.moe-every` or `--model.dense-blocks`"),
    same("--moe-shared-expert-intermediate-size", "--model.moe.shared-dim"),
    switch("--moe-shared-expert-gate", "`--model.moe.shared-gate True`"),
    nothing(
        "--moe-shared-expert-overlap", "the shared expert runs beside the exchange where it can", "nothing"
    ),
    worked("--moe-router-topk", "`--model.moe.top-k`; 2 where left out"),
    worked("--moe-router-score-function", f"`{names.SCORE}`"),
    switch("--moe-router-pre-softmax", "`--model.moe.softmax before --model.moe.renormalize False`"),
    same("--moe-router-topk-scaling-factor", "--model.moe.scaling"),
    same("--moe-router-num-groups", "--model.moe.groups"),
    same("--moe-router-group-topk", "--model.moe.top-groups"),
    refused("--moe-router-topk-limited-devices", "deprecated there: use its --moe-router-num-groups"),
    worked("--moe-router-dtype", f"`{names.ROUTER_DTYPE}`; tmoe's is fp32 where left out"),
    switch("--moe-router-enable-expert-bias", "`--model.moe.choice-bias True`"),
    same("--moe-router-bias-update-rate", "--model.moe.bias-speed"),
    refused(
        "--frozen-expert-bias",
        "the bias moves while tmoe trains; --model.moe.bias-speed 0 holds it",
        "nothing",
    ),
    worked(
        "--moe-router-load-balancing-type",
        f"`{names.BALANCE}` batch (aux_loss), sequence (seq_aux_loss), global (global_aux_loss) or none; "
        f"`{names.SELECTION}` for sinkhorn and quantile_balancing",
        "some",
    ),
    worked(
        "--moe-aux-loss-coeff", f"`{names.BALANCE_COEFF}`, or in `{names.BALANCE}`; 0 where left out", "some"
    ),
    worked("--moe-z-loss-coeff", "`--model.moe.z-coeff`; 0 where left out"),
    same("--moe-input-jitter-eps", "--model.moe.jitter"),
    nothing("--calculate-per-token-loss", "tmoe's losses are always of the global batch's tokens", "nothing"),
    same("--moe-router-quantile-balancing-ema", names.QUANTILE_EMA),
    switch("--moe-router-force-load-balancing", f"`{names.FORCE} even`"),
    worked("--moe-router-force-biased", f"`{names.FORCE} skew {names.FORCE_SKEW}`"),
    refused(
        "--moe-enable-routing-replay", "replay is a call of the library, not a flag of training", "nothing"
    ),
    worked("--moe-expert-capacity-factor", f"`{names.CAPACITY}` with `{names.ROUNDING} megatron`"),
    switch("--moe-pad-expert-input-to-capacity", f"`{names.PAD} True`"),
    worked("--moe-token-drop-policy", f"`{names.DROP}`"),
    refused(
        "--moe-token-dropping", "Megatron calls it unsupported; --moe-expert-capacity-factor drops", "nothing"
    ),
    nothing("--moe-pad-experts-for-cuda-graph-inference", "of inference alone", "nothing"),
    refused(
        "--moe-expert-rank-capacity-factor",
        "tmoe's buffers hold whatever the routing sends; nothing overflows",
    ),
    nothing("--moe-paged-stash", "tmoe's buffers do not overflow", "nothing"),
    nothing("--moe-paged-stash-page-size", "tmoe's buffers do not overflow"),
    nothing("--moe-paged-stash-buffer-size-factor-cuda", "tmoe's buffers do not overflow"),
    nothing("--moe-paged-stash-buffer-size-factor-cpu", "tmoe's buffers do not overflow"),
    same("--moe-latent-size", names.LATENT),
    switch("--moe-apply-probs-on-input", f"`{names.WEIGH} before`"),
    nothing("--moe-grouped-gemm", ALWAYS, "nothing"),
    nothing("--moe-use-legacy-grouped-gemm", KERNELS, "nothing"),
    nothing("--moe-use-grouped-tensor", KERNELS, "nothing"),
    nothing("--moe-single-grouped-weight", KERNELS, "nothing"),
    nothing("--moe-single-grouped-bias", KERNELS, "nothing"),
    nothing("--moe-permute-fusion", KERNELS, "nothing"),
    nothing("--moe-router-fusion", KERNELS, "nothing"),
    nothing("--moe-router-padding-for-quantization", "of fp8, which tmoe does not have", "nothing"),
    nothing("--moe-router-padding-for-fp8", "of fp8, which tmoe does not have", "nothing"),
    nothing("--moe-token-dispatcher-type", "`--parallel.dispatch auto` chooses; results do not depend on it"),
    nothing("--moe-flex-dispatcher-backend", "`--parallel.dispatch auto` chooses"),
    nothing("--moe-enable-deepep", "`--parallel.dispatch auto` chooses", "nothing"),
    nothing("--moe-permute-fusion-into-hybridep", KERNELS, "nothing"),
    nothing("--moe-hybridep-pad-uneven-dispatch-inputs", KERNELS, "nothing"),
    nothing("--moe-flex-dispatcher-num-sms", KERNELS),
    nothing("--moe-deepep-num-sms", KERNELS),
    nothing("--moe-hybridep-num-sms", KERNELS),
    nothing("--moe-hybridep-num-sms-preprocessing", KERNELS),
    nothing("--moe-hybridep-num-blocks-permute", KERNELS),
    nothing("--moe-hybridep-num-blocks-unpermute", KERNELS),
    nothing("--moe-ncclep-zero-copy", KERNELS, "nothing"),
    nothing(
        "--moe-dispatch-fwd-dtype", "`--parallel.wire fp8` is the narrower type that tmoe has", "one", "bf16"
    ),
    nothing(
        "--moe-combine-bwd-dtype", "`--parallel.wire fp8` is the narrower type that tmoe has", "one", "bf16"
    ),
    nothing("--moe-mlp-glu-interleave-size", "how gate and up lie in memory", "one"),
    nothing("--moe-shared-expert-glu-interleave-size", "how gate and up lie in memory", "one"),
    nothing("--moe-per-layer-logging", "metrics.jsonl has every layer's numbers", "nothing"),
    refused("--moe-routing-trace-path", "python -m tmoe.routing RUN draws what metrics.jsonl has"),
    refused(
        "--moe-use-upcycling", "python -m tmoe.upcycle makes the step to start from with --init", "nothing"
    ),
    refused("--moe-upcycling-granularity", "python -m tmoe.upcycle --granularity"),
    # data
    worked("--tokenizer-type", "with `--tokenizer-model`: `--data.tokenizer`, and the vocabulary's size"),
    worked("--tokenizer-model", "`--data.tokenizer`"),
    worked("--vocab-size", "`--model.vocab`, made a multiple as Megatron does"),
    worked("--make-vocab-size-divisible-by", "`--model.vocab`: 128 times tp where left out"),
    worked("--data-path", "`--data.path`; a blend `0.3 a 0.7 b` is `a:0.3 b:0.7`", "some"),
    worked("--split", "`--data.split`"),
    refused(
        "--train-data-path", "tmoe takes validation and test data out of --data.path (--data.split)", "some"
    ),
    refused(
        "--valid-data-path", "tmoe takes validation and test data out of --data.path (--data.split)", "some"
    ),
    refused(
        "--test-data-path", "tmoe takes validation and test data out of --data.path (--data.split)", "some"
    ),
    switch("--mock-data", "`--data.path stdlib`: real text, of bytes"),
    nothing("--data-cache-path", "tmoe's order of samples is arithmetic and needs no cache"),
    nothing("--num-workers", "one thread makes the next batch"),
    nothing("--dataloader-type", "tmoe's order of samples is its own", "one", "single", "cyclic"),
    nothing("--no-create-attention-mask-in-dataloader", ALWAYS, "nothing"),
    nothing("--no-mmap-bin-files", "tmoe maps them", "nothing"),
    switch("--reset-attention-mask", "`--train.isolate-documents True`; without it False"),
    nothing(
        "--reset-position-ids", "rotary positions are relative: nothing changes inside a document", "nothing"
    ),
    nothing("--eod-mask-loss", "tmoe never trains the token after a document's end", "nothing"),
    # training
    same("--micro-batch-size", "--train.batch"),
    worked("--global-batch-size", "`--train.global-batch`"),
    refused(
        "--rampup-batch-size", "tmoe's batch does not grow; resume with another --train.global-batch", "some"
    ),
    same("--train-iters", "--steps"),
    worked("--train-samples", "`--steps`, samples / global batch"),
    same("--lr", "--optim.lr"),
    worked("--min-lr", "`--optim.min-lr`, as a share of the peak"),
    worked("--lr-decay-style", "`--optim.schedule`; linear where left out; inverse-square-root is refused"),
    worked("--lr-decay-iters", "`--optim.decay-steps`"),
    worked("--lr-decay-samples", "`--optim.decay-steps`, samples / global batch"),
    worked("--lr-wsd-decay-style", "linear is `--optim.schedule wsd`'s; others are refused"),
    worked("--lr-wsd-decay-iters", "`--optim.decay-fraction`"),
    worked("--lr-warmup-iters", "`--optim.warmup`"),
    worked("--lr-warmup-fraction", "`--optim.warmup-fraction`"),
    worked("--lr-warmup-samples", "`--optim.warmup`, samples / global batch"),
    nothing("--lr-warmup-init", "tmoe's warm-up begins at peak / warm-up steps", "one", "0", "0.0"),
    nothing("--override-opt-param-scheduler", "a resume takes the settings of the command", "nothing"),
    refused("--use-checkpoint-opt-param-scheduler", "a resume takes the settings of the command", "nothing"),
    worked("--weight-decay", "`--optim.weight-decay`; 0.01 where left out"),
    refused("--start-weight-decay", "tmoe's decay is constant"),
    refused("--end-weight-decay", "tmoe's decay is constant"),
    nothing("--weight-decay-incr-style", "tmoe's decay is constant", "one", "constant"),
    nothing("--optimizer", "tmoe trains with AdamW", "one", "adam"),
    worked("--adam-beta1", "`--optim.betas`; 0.9 0.999 where left out"),
    worked("--adam-beta2", "`--optim.betas`; 0.9 0.999 where left out"),
    same("--adam-eps", "--optim.eps"),
    same("--clip-grad", "--optim.clip"),
    switch("--bf16", "`--train.dtype bf16`; without it fp32"),
    refused("--fp16", "no loss scaling; use --bf16", "nothing"),
    refused("--fp8-format", NO_FP8),
    refused("--fp8-recipe", NO_FP8),
    refused("--fp8-param-gather", NO_FP8, "nothing"),
    worked("--seed", "`--seed` and `--data.seed`; 1234 where left out"),
    nothing("--accumulate-allreduce-grads-in-fp32", ALWAYS, "nothing"),
    nothing("--grad-reduce-in-bf16", "tmoe sums gradients in fp32", "nothing"),
    nothing("--manual-gc", "tmoe collects garbage between steps", "nothing"),
    nothing("--manual-gc-interval", "tmoe collects garbage between steps"),
    nothing("--empty-unused-memory-level", ITSELF),
    switch(
        "--deterministic-mode", "nothing: one layout repeats its own numbers on a CPU; no promise on GPUs"
    ),
    # layout
    worked("--tensor-model-parallel-size", "`--parallel.tp`"),
    same("--pipeline-model-parallel-size", "--parallel.pp"),
    same("--context-parallel-size", "--parallel.cp"),
    worked("--cp-comm-type", "`--parallel.cp-by keys` (p2p, allgather) or `heads` (a2a)"),
    same("--expert-model-parallel-size", "--parallel.ep"),
    worked(
        "--expert-tensor-parallel-size",
        "`--parallel.etp`; where left out Megatron takes tp, tmoe 1: the same numbers, faster",
    ),
    refused("--expert-tensor-parallel-num-weight-shards", "FSDP2 shares experts' weights over dp already"),
    worked("--num-layers-per-virtual-pipeline-stage", "`--parallel.schedule interleaved --parallel.chunks`"),
    worked("--num-virtual-stages-per-pipeline-rank", "`--parallel.schedule interleaved --parallel.chunks`"),
    refused("--pipeline-model-parallel-layout", "tmoe cuts blocks into stages of about equal work itself"),
    nothing("--sequence-parallel", ALWAYS, "nothing"),
    switch("--use-distributed-optimizer", "`--parallel.shard 1`"),
    switch("--use-torch-fsdp2", "`--parallel.shard 3`"),
    switch("--use-megatron-fsdp", "`--parallel.shard 3`"),
    worked("--data-parallel-sharding-strategy", "`--parallel.shard` 1, 2 or 3; no_shard is 1"),
    nothing("--overlap-param-gather", ALWAYS, "nothing"),
    nothing("--overlap-grad-reduce", ALWAYS, "nothing"),
    nothing("--tp-comm-overlap", "`--parallel.tp-pieces 2` sends tokens beside products", "nothing"),
    nothing("--overlap-moe-expert-parallel-comm", ITSELF, "nothing"),
    nothing("--delay-wgrad-compute", "`--parallel.schedule v` does", "nothing"),
    nothing("--overlap-dispatch-backward-with-experts-wgrad", ITSELF, "nothing"),
    worked("--recompute-granularity", "`--parallel.checkpoint` block (full), or by `--recompute-modules`"),
    nothing("--recompute-method", ITSELF),
    nothing("--recompute-num-layers", "tmoe computes all blocks again or none"),
    worked(
        "--recompute-modules",
        "`--parallel.checkpoint` moe where an MoE part is named, else attention",
        "some",
    ),
    switch("--recompute-activations", "`--parallel.checkpoint attention`"),
    switch("--moe-layer-recompute", "`--parallel.checkpoint moe`"),
    switch("--optimizer-cpu-offload", "`--optim.offload True`"),
    refused(
        "--fine-grained-activation-offloading",
        "activations stay on the GPU; --parallel.checkpoint saves",
        "nothing",
    ),
    nothing("--cuda-graph-impl", "blocks are compiled; kernels are launched by replay"),
    nothing("--cuda-graph-scope", "blocks are compiled; kernels are launched by replay", "some"),
    nothing("--enable-cuda-graph", "blocks are compiled; kernels are launched by replay", "nothing"),
    switch("--fake-process-group", "`--dry-run`"),
    nothing("--distributed-backend", "NCCL on GPUs, gloo on CPUs"),
    worked("--distributed-timeout-minutes", "`--train.collective-timeout`, in seconds"),
    # logs and checkpoints
    same("--log-interval", "--log.every"),
    nothing("--log-throughput", ALWAYS, "nothing"),
    nothing("--timing-log-level", "metrics.jsonl has the step's time"),
    switch("--log-timers-to-tensorboard", "nothing: metrics.jsonl has the step's time"),
    same("--save-interval", "--checkpoint.every"),
    worked("--save", "`--out`"),
    worked(
        "--load", "`--resume auto` where it is `--save`'s folder; else `--init`, of an imported checkpoint"
    ),
    switch("--no-load-optim", "`--no-load-optim`"),
    switch("--no-load-rng", "`--no-load-rng`"),
    nothing(
        "--no-save-optim", "a step always has it; python -m tmoe.checkpoint reshard --only model", "nothing"
    ),
    nothing("--no-save-rng", "a step always has it", "nothing"),
    switch("--finetune", "`--init` of `--load`"),
    worked("--pretrained-checkpoint", "`--init`"),
    nothing("--ckpt-format", "tmoe has one", "one"),
    nothing("--dist-ckpt-format", "tmoe has one", "one"),
    nothing("--use-dist-ckpt", ALWAYS, "nothing"),
    nothing("--auto-detect-ckpt-format", ALWAYS, "nothing"),
    nothing("--async-save", "`--checkpoint.mode async` is the default", "nothing"),
    nothing("--exit-on-missing-checkpoint", "`--resume` of a path that is missing is an error", "nothing"),
    worked("--most-recent-k", "`--checkpoint.keep`"),
    same("--eval-interval", "--train.eval-every"),
    same("--eval-iters", "--train.eval-batches"),
    switch("--skip-train", "`--eval-only True`"),
    nothing("--exit-signal-handler", "SIGTERM saves and ends a run", "nothing"),
    worked("--tensorboard-dir", "`--log.tensorboard True`, in the run's folder"),
    nothing("--tensorboard-log-interval", "as often as `--log.every`"),
    same("--wandb-project", "--log.wandb"),
    nothing("--wandb-exp-name", "a run is called as its folder, `--out`"),
    nothing("--wandb-save-dir", "W&B's files lie in the run's folder"),
)
