"""The ways of a token to its experts on other ranks, and back."""
