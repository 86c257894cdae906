"""python -m tmoe.serve RUN|STEP|HF_DIR."""

from tmoe.serve.command_line import main

if __name__ == "__main__":
    main()
