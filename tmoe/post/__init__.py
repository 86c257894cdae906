"""Post-training: losses of finetuning, preferences and policies, and what their tasks keep."""
