"""Ops of a decoding step: attention over pages, norms and sampling."""
