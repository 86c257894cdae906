"""python -m tmoe.generate RUN|STEP|HF_DIR "prompt"."""

from tmoe.generate.command_line import main

main()
