"""The ops that everything else stands on: experts, their choice, grouped products, log-probs.

`moe_mlp` is a whole layer of experts, `softmax_topk` chooses them, `grouped_mm` multiplies by groups of rows.
`logprobs` and `token_loss` are what losses of post-training are made of. The ops know tensors only: no
config, no module, no process group. All run on CPU and GPU, differentiate in all but their integer arguments,
trace under torch.compile(fullgraph=True), and have their definition in `reference.py`.
"""

from tmoe.ops.experts.grouped import grouped_mm
from tmoe.ops.experts.op import moe_mlp
from tmoe.ops.logprob import TokenLoss, logprobs, token_loss
from tmoe.ops.topk import softmax_topk

__all__ = ["TokenLoss", "grouped_mm", "logprobs", "moe_mlp", "softmax_topk", "token_loss"]
