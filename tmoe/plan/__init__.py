"""The plan of memory: what each rank will hold, worked out before a run starts."""
