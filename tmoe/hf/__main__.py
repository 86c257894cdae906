"""python -m tmoe.hf import|export."""

from tmoe.hf.importer import main

main()
