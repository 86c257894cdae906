"""Modules that every package of tmoe may import: tables, files, lists, and private names of torch."""
