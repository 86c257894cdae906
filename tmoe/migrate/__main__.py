"""python -m tmoe.migrate megatron|tutel|fms|import."""

from tmoe.migrate.command import main

main()
