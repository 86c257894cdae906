"""python -m tmoe.eval RUN|STEP|HF_DIR --tasks NAME."""

from tmoe.eval.command_line import main

main()
