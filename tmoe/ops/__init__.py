"""The ops that everything else stands on: experts, their choice, grouped products, moves of rows, log-probs.

`moe_mlp` is a whole layer of experts, `softmax_topk` chooses them, `grouped_mm` multiplies groups of rows by
their own matrices, `gather_rows` and `scatter_rows` take rows to where they are needed and back. `logprobs`
and `token_loss` are what losses of post-training are made of.

The ops know tensors only: no config, no module, no process group. All run on CPU and GPU, differentiate in
all but their integer arguments, trace under torch.compile(fullgraph=True), and have their definition in
`reference.py`.
"""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.ops.experts.grouped import grouped_mm
    from tmoe.ops.experts.op import moe_mlp
    from tmoe.ops.experts.rows import gather_rows, scatter_rows
    from tmoe.ops.loss.logprob import TokenLoss, logprobs, token_loss
    from tmoe.ops.router.topk import softmax_topk

__all__ = [
    "TokenLoss",
    "gather_rows",
    "grouped_mm",
    "logprobs",
    "moe_mlp",
    "scatter_rows",
    "softmax_topk",
    "token_loss",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "TokenLoss": "tmoe.ops.loss.logprob",
        "gather_rows": "tmoe.ops.experts.rows",
        "grouped_mm": "tmoe.ops.experts.grouped",
        "logprobs": "tmoe.ops.loss.logprob",
        "moe_mlp": "tmoe.ops.experts.op",
        "scatter_rows": "tmoe.ops.experts.rows",
        "softmax_topk": "tmoe.ops.router.topk",
        "token_loss": "tmoe.ops.loss.logprob",
    },
)
