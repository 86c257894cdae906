"""Reads and writes adapters in PEFT's formats.

next: hf/adapters/commands.py
"""
