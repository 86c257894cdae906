"""Evaluation of a model: lm_eval's tasks, perplexity of texts, pass@k; see `tmoe eval --help`."""
