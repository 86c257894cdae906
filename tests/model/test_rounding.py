"""What a way of rounding decides: documents of padding, rows of a step, pieces of a prompt.

next: tests/generate/test_bits.py
"""

from dataclasses import replace

import torch

from tmoe.config.presets import presets
from tmoe.model.rounding import FASTEST, OF_TRAINING, rounding
from tmoe.model.transformer import Transformer
from tmoe.moe.layer import SwiGLU

TOKENS = torch.tensor([[5, 6, 7, 0]])
PADDING = torch.tensor([[False, False, False, True]])


def test_documents_of_padding():
    """Padding keeps its document, or is another one, for training; the fastest way gives it none."""
    assert FASTEST.documents(None, PADDING, TOKENS).tolist() == [[0, 0, 0, -1]]
    assert OF_TRAINING.documents(None, PADDING, TOKENS).tolist() == [[0, 0, 0, 1]]
    two = torch.tensor([[3, 3, 4, 4]])
    assert FASTEST.documents(two, PADDING, TOKENS).tolist() == [[3, 3, 4, -1]]
    assert OF_TRAINING.documents(two, PADDING, TOKENS).tolist() == [[3, 3, 4, 4]]


def test_rows_and_pieces():
    assert [FASTEST.rows(n, "cuda") for n in (1, 5, 129)] == [1, 5, 129]
    assert [OF_TRAINING.rows(n, "cuda") for n in (1, 128, 129)] == [128, 128, 256]
    assert [OF_TRAINING.rows(n, "cpu") for n in (1, 33)] == [32, 64]
    assert [FASTEST.piece(n) for n in (1, 300)] == [1, 300]
    assert [OF_TRAINING.piece(n) for n in (1, 128, 300)] == [128, 128, 256]
    assert (FASTEST.begin, OF_TRAINING.begin) == (1, 128)


def test_a_model_holds_it_and_gives_it_back():
    model = Transformer(replace(presets()["tiny"].model, dense_layers=1))
    dense = [module for module in model.modules() if isinstance(module, SwiGLU)]
    assert dense
    assert model.rounding is rounding(bits=False) is FASTEST and all(module.fused for module in dense)
    model.keep_bits()
    assert model.rounding is OF_TRAINING and not any(module.fused for module in dense)
    model.keep_bits(False)
    assert model.rounding is FASTEST and all(module.fused for module in dense)
