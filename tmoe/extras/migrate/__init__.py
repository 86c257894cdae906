"""Translates commands, data and checkpoints of Megatron-Core, Tutel and fms-acceleration to those of tmoe."""
