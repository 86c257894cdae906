"""python -m tmoe.hf import|export|recover."""

from tmoe.hf.importer import main

main()
