"""Runs the command line: python -m tmoe.hf import|export|recover|families."""

from tmoe.extras.recover import recover
from tmoe.hf.importer import main

main(recover=recover)
