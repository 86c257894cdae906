"""The ops that the other packages use: experts, their choice, grouped products, row copies, log-probs.

`moe_mlp` is a whole layer of experts. `softmax_topk` chooses experts. `grouped_mm` multiplies each group of
rows by the group's matrix. `gather_rows` copies rows into the order in which they are needed, and
`scatter_rows` adds them up in the original order. Losses of post-training are built from `logprobs` and
`token_loss`.

The ops depend on tensors only, not on a config, a module or a process group. All of them run on CPU and GPU,
are differentiable in all arguments that are not integers, trace under torch.compile(fullgraph=True), and have
their definition in `reference.py`.
"""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.ops.experts.gather_scatter import gather_rows, scatter_rows
    from tmoe.ops.experts.grouped import grouped_mm
    from tmoe.ops.experts.op import moe_mlp
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
        "gather_rows": "tmoe.ops.experts.gather_scatter",
        "grouped_mm": "tmoe.ops.experts.grouped",
        "logprobs": "tmoe.ops.loss.logprob",
        "moe_mlp": "tmoe.ops.experts.op",
        "scatter_rows": "tmoe.ops.experts.gather_scatter",
        "softmax_topk": "tmoe.ops.router.topk",
        "token_loss": "tmoe.ops.loss.logprob",
    },
)
