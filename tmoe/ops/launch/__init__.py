"""Starts kernels: launches, replays, calls without torch's dispatcher, compiles ahead of time."""
