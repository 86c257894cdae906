"""The plan of memory: the bytes that each rank will hold, computed before a run starts."""
