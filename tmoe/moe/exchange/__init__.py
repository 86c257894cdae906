"""How tokens are sent to experts on other ranks, and results back."""
