"""The fused op of a layer of experts: its kernels, their tables, and its implementation for CPUs."""
