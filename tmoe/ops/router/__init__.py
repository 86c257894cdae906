"""Ops of the router: top-k, its product, Sinkhorn's balance."""
