"""The process around a run: command line, start, watching, metrics, memory."""
