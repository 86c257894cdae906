"""The log of a run: its lines, progress, routing and reports."""
