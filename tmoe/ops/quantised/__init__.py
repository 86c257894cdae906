"""Products with quantised weights: a kernel reads the codes, or the values are computed first."""
