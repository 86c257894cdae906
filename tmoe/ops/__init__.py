"""The ops that everything else stands on: `moe_mlp`, `softmax_topk`, which chooses experts, and `grouped_mm`.

`moe_mlp` is a whole layer of experts. The ops know tensors only: no config, no module, no process group. All
run on CPU and GPU, differentiate in all but their integer arguments, trace under
torch.compile(fullgraph=True), and have their definition in `reference.py`.
"""

from tmoe.ops.experts.grouped import grouped_mm
from tmoe.ops.experts.op import moe_mlp
from tmoe.ops.topk import softmax_topk

__all__ = ["grouped_mm", "moe_mlp", "softmax_topk"]
