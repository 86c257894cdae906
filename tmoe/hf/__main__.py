"""Runs the command line: python -m tmoe.hf import|export|import-adapter|export-adapter|merge|gguf|..."""

from tmoe.extras.gguf.command import export_gguf, import_model
from tmoe.extras.recover import recover
from tmoe.hf.importer import main

main(**{"import": import_model}, gguf=export_gguf, recover=recover)
