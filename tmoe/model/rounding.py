"""How a model rounds where several ways give a token's numbers: the fastest way, or the way of training.

`--grpo.bitwise` and `Engine(bits=True)` ask that rollouts have log-probs equal to training's in every bit. A
`Rounding` has all that this decides, each decision under its own name. Transformer, engine and sampler ask
the model's `rounding` and know no switch.

next: generate/forward.py
"""

from dataclasses import dataclass

from torch import Tensor

from tmoe.ops.decode.in_blocks import BLOCK

# Rows of a step are a multiple of this where they round as training: of fewer, libraries choose other
# kernels. On an H200 with torch 2.11 cuBLAS splits an inner width of 4096 below 128 rows. MKL has a kernel of
# its own below 4, and a sigmoid of fewer than 32 numbers is not in the CPU's vectors.
FEW = {"cuda": 128, "cpu": 32}


@dataclass(frozen=True)
class Rounding:
    """What a way of rounding decides."""

    fused: bool
    """without gradients one kernel may take the place of several modules: the norm of a sum, norms of heads
    with their rotation, SwiGLU"""
    in_blocks: bool
    """attention goes through blocks of 128 keys in flex attention's order, on every device, for a token that
    is decoded too (ops/decode/in_blocks.py)"""
    padded: bool
    """padding keeps the document that it is given, and is a document too where none is given; else it has
    none"""
    log_probs_of_loss: bool
    """a sampled token's log-prob is computed by the loss from the hidden state; else by the sampler"""
    begin: int
    """sequences begin on a multiple of this in a row, pieces of a long prompt too"""
    few: dict[str, int]
    """rows of a step are a multiple of this, by the type of the device; default 1"""

    def documents(self, documents_BS: Tensor | None, padding_BS: Tensor, tokens_BS: Tensor) -> Tensor:
        """Documents of tokens, of which some are padding: int [B, S]; -1: of none. documents_BS None: one."""
        if documents_BS is None:
            documents_BS = padding_BS.long() if self.padded else tokens_BS.new_zeros(tokens_BS.shape)
        return documents_BS if self.padded else documents_BS.masked_fill(padding_BS, -1)

    def rows(self, n: int, device: str) -> int:
        """How many rows a step has that needs n of them; device: "cuda" or "cpu"."""
        few = self.few.get(device, 1)
        return -(-n // few) * few

    def piece(self, tokens: int) -> int:
        """The longest piece of a prompt, where there is room for so many tokens at once."""
        return max(self.begin, tokens // self.begin * self.begin)


FASTEST = Rounding(fused=True, in_blocks=False, padded=False, log_probs_of_loss=False, begin=1, few={})
OF_TRAINING = Rounding(fused=False, in_blocks=True, padded=True, log_probs_of_loss=True, begin=BLOCK, few=FEW)


def rounding(bits: bool) -> Rounding:
    """bits: as --grpo.bitwise."""
    return OF_TRAINING if bits else FASTEST
