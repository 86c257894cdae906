"""GGUF files, llama.cpp's format: written from a step folder, and imported as one.

next: extras/gguf/command.py
"""
