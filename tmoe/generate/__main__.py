"""python -m tmoe.generate RUN|STEP|HF_DIR "prompt"."""

from tmoe.generate.command import main

main()
