"""How kernels are started: launching, replaying, calling without dispatch, compiling ahead."""
