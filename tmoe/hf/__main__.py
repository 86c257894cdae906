"""Runs the command line: python -m tmoe.hf import|export|import-adapter|export-adapter|merge|gguf|..."""

from tmoe.hf.command_line import main

GGUF = "tmoe.extras.gguf.command"

main(
    **{"import": f"{GGUF}.import_model"},
    gguf=f"{GGUF}.export_gguf",
    recover="tmoe.extras.recover.recover",
)
