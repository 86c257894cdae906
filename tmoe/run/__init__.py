"""The process of a run: its start, its signals, the watch over its ranks, traces."""
