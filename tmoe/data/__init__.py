"""Turns text into batches: sources, tokenizers, shards, and the order of samples."""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.data.convert import convert
    from tmoe.data.dataset import Batch, Dataset, Loader, open_data
    from tmoe.data.tokenizer import DataError, load_tokenizer

__all__ = [
    "Batch",
    "DataError",
    "Dataset",
    "Loader",
    "convert",
    "load_tokenizer",
    "open_data",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Batch": "tmoe.data.dataset",
        "DataError": "tmoe.data.tokenizer",
        "Dataset": "tmoe.data.dataset",
        "Loader": "tmoe.data.dataset",
        "convert": "tmoe.data.convert",
        "load_tokenizer": "tmoe.data.tokenizer",
        "open_data": "tmoe.data.dataset",
    },
)
