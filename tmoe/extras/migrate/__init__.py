"""The commands, data and checkpoints of Megatron-Core, Tutel and fms-acceleration, as tmoe's."""
