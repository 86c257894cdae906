"""The ops that everything else stands on: `moe_mlp`, a whole layer of experts, `softmax_topk`, which chooses them, and `grouped_mm`.

They know tensors only: no config, no module, no process group. Both run on CPU and GPU, differentiate in all but their
integer arguments, trace under torch.compile(fullgraph=True), and have their definition in `reference.py`.
"""

from tmoe.ops.experts.grouped import grouped_mm
from tmoe.ops.experts.op import moe_mlp
from tmoe.ops.topk import softmax_topk

__all__ = ["grouped_mm", "moe_mlp", "softmax_topk"]
