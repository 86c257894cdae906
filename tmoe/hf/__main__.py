"""python -m tmoe.hf import|export|recover|families."""

from tmoe.hf.importer import main

main()
