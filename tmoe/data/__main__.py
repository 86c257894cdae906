"""python -m tmoe.data: text and JSONL to token shards."""

import sys

import tyro

from tmoe.data.convert import convert
from tmoe.data.tokenizer import DataError
from tmoe.disk import expand_home

try:
    tyro.cli(convert, prog="python -m tmoe.data", args=expand_home())
except (DataError, OSError) as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit("error: interrupted; nothing was written")
