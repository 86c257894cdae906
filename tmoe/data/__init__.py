"""From text to batches: sources, tokenizers, shards, and the order of samples."""

from tmoe.data.convert import convert
from tmoe.data.dataset import Batch, Dataset, Loader, open_data
from tmoe.data.tokenizer import DataError, load_tokenizer

__all__ = ["Batch", "DataError", "Dataset", "Loader", "convert", "load_tokenizer", "open_data"]
