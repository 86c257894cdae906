"""python -m tmoe.checkpoint inspect|verify|reshard|average."""

from tmoe.checkpoint.tools import main  # python -m tmoe.checkpoint inspect|verify|reshard|average

main()
