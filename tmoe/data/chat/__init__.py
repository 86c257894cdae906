"""Conversations: rows, templates, masks, packing and prompts."""
