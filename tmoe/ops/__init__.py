"""The ops that everything else stands on: layers of experts, their choice, grouped products, moves of rows.

`moe_mlp` is a whole layer of experts, `softmax_topk` chooses them, `grouped_mm` multiplies groups of rows by
their own matrices, `gather_rows` and `scatter_rows` take rows to where they are needed and back.

The ops know tensors only: no config, no module, no process group. All run on CPU and GPU, differentiate in
all but their integer arguments, trace under torch.compile(fullgraph=True), and have their definition in
`reference.py`.
"""

from tmoe.ops.experts.grouped import grouped_mm
from tmoe.ops.experts.op import moe_mlp
from tmoe.ops.rows import gather_rows, scatter_rows
from tmoe.ops.topk import softmax_topk

__all__ = ["gather_rows", "grouped_mm", "moe_mlp", "scatter_rows", "softmax_topk"]
