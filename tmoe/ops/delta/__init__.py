"""Linear layers whose state is updated by the delta rule: short convolution, and the rule in chunks."""
