"""python -m tmoe.hf import|export|recover|families."""

from tmoe.hf.importer import main
from tmoe.hf.recover import recover

main(recover=recover)
