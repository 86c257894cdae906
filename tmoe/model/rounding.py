"""How a model rounds where several ways give a token's numbers: the fastest way, or the way of training.

`--grpo.bitwise` and `Engine(bits=True)` ask that rollouts have log-probs equal to training's in every bit. A
`Rounding` has all that this decides, each decision under its own name. Transformer, engine and sampler ask
the model's `rounding` and know no switch.

next: generate/forward.py
"""

from dataclasses import dataclass

from torch import Tensor

from tmoe.ops.decode.in_blocks import BLOCK

# Where a step must round as training does, its number of rows is a multiple of this. Libraries choose other
# kernels for fewer rows. On an H200 with torch 2.11 cuBLAS splits an inner width of 4096 below 128 rows. MKL
# has another kernel below 4 rows, and a sigmoid of fewer than 32 numbers is not vectorised on a CPU.
FEW = {"cuda": 128, "cpu": 32}


@dataclass(frozen=True)
class Rounding:
    """The choices that decide where a forward rounds."""

    fused: bool
    """without gradients one kernel may replace several modules: the norm of a sum, the norms of heads with
    their rotation, SwiGLU"""
    in_blocks: bool
    """attention sums over blocks of 128 keys in flex attention's order, on every device, also for a decoded
    token (ops/decode/in_blocks.py)"""
    padded: bool
    """padding keeps the document that it is given, and is a separate document where none is given; False:
    padding is in no document"""
    log_probs_of_loss: bool
    """a sampled token's log-prob is computed by the loss from the hidden state; else by the sampler"""
    low_rank_in_order: bool
    """dense layers' adapters are computed by kernels that add up in one order for any number of rows"""
    begin: int
    """sequences in a row, and pieces of a long prompt, begin at a multiple of this"""
    few: dict[str, int]
    """the number of rows of a step is a multiple of this, by type of device; default 1"""

    def documents(self, documents_BS: Tensor | None, padding_BS: Tensor, tokens_BS: Tensor) -> Tensor:
        """The document of each token, int [B, S]; -1: none. documents_BS None: one document a row."""
        if documents_BS is None:
            documents_BS = padding_BS.long() if self.padded else tokens_BS.new_zeros(tokens_BS.shape)
        return documents_BS if self.padded else documents_BS.masked_fill(padding_BS, -1)

    def rows(self, n: int, device: str) -> int:
        """Number of rows of a step that needs at least n. device: "cuda" or "cpu"."""
        few = self.few.get(device, 1)
        return -(-n // few) * few

    def piece(self, tokens: int) -> int:
        """The longest piece of a prompt where memory has room for `tokens` tokens at once."""
        return max(self.begin, tokens // self.begin * self.begin)


FASTEST = Rounding(
    fused=True,
    in_blocks=False,
    padded=False,
    log_probs_of_loss=False,
    low_rank_in_order=False,
    begin=1,
    few={},
)
OF_TRAINING = Rounding(
    fused=False,
    in_blocks=True,
    padded=True,
    log_probs_of_loss=True,
    low_rank_in_order=True,
    begin=BLOCK,
    few=FEW,
)


def rounding(bits: bool) -> Rounding:
    """bits: as --grpo.bitwise."""
    return OF_TRAINING if bits else FASTEST
