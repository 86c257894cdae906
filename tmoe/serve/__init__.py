"""An HTTP server with OpenAI's interface: one process is the front for clients, another has the engine.

next: serve/command_line.py
"""
