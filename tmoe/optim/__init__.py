"""The optimizer, its schedule, averages of weights, and the guard against bad steps."""
