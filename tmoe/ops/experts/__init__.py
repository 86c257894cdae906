"""The fused op of a layer of experts: its kernels, their tables, and the CPU's path."""
