"""The command line of train.py: flags, settings, defaults and help."""
