"""From text to batches: sources, tokenizers, shards, and the order of samples."""
