"""Turns text and JSONL into a folder of token shards: python -m tmoe.data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tyro
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from tmoe.data.shards import write_shards
from tmoe.data.sources import Document, Skips, beginning, encode_documents, read_documents
from tmoe.data.survey import Facts, Survey, survey
from tmoe.data.tokenizer import DataError, load_tokenizer


def convert(
    sources: tyro.conf.Positional[tuple[str, ...]],
    *,
    out: Path,
    tokenizer: str = "bytes",
    shard_tokens: int = 100_000_000,
    text_field: str = "text",
    skip_malformed: int = 0,
    columns: tuple[str, ...] = (),
) -> None:
    """Turns texts and rows (JSON lines, a JSON array, parquet; compressed or not) into a folder of
    memory-mapped token shards.

    Other commands: --show FILE prints chat rows as they are trained on, --facts FOLDER makes a tiny chat set;
    python -m tmoe.data --show --help and --facts --help describe them.

    Args:
        sources: 'stdlib', files, folders of files of one kind, patterns in quotes: 'set/*.jsonl.gz',
            or sets of the Hugging Face hub: hub:ORG/NAME[@REVISION][:CONFIG][:SPLIT]
        out: folder to make; must not exist
        tokenizer: 'bytes', or the path of a Hugging Face tokenizer.json, of a sentencepiece model, or of a
            folder that holds one
        shard_tokens: most tokens in a shard, unless one document is longer
        text_field: name of the string field that holds a row's text
        skip_malformed: documents that may be left out because they are malformed; the first are named
        columns: columns to rename, OURS=THEIRS: text=content
    """
    if not sources or shard_tokens < 1 or skip_malformed < 0:
        raise DataError(
            "needs at least one source, --shard-tokens of at least 1 and --skip-malformed of at least 0"
        )
    from tmoe.config.run import require_columns  # imported late, so that --help need not load torch

    require_columns(columns, "columns")
    surveyed = [survey(name, columns) for name in sources]
    skips = Skips(skip_malformed)
    size = sum(path.stat().st_size for source in surveyed for path, _ in source.files)
    bar = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    chosen = load_tokenizer(tokenizer, "--tokenizer")
    counts = [ConversionCounts() for _ in surveyed]

    # These are generators: one document after another is read, encoded and written.
    with Progress(*bar) as progress:
        task = progress.add_task("tokenizing", total=size)
        read = (
            _track(source, text_field, skips, count, progress, task)
            for source, count in zip(surveyed, counts, strict=True)
        )
        encoded = (
            ids
            for documents, count in zip(read, counts, strict=True)
            for ids in count.tokens_of(encode_documents(documents, chosen, skips))
        )
        tokens = write_shards(out, encoded, chosen, shard_tokens)
    for source, count in zip(surveyed, counts, strict=True):
        print(f"{source.name}: {source.tell(Facts(count.documents, count.first))}; {count.tokens:,} tokens")
    if skips.found:
        print(skips.tell())
    print(f"{out}: {tokens:,} tokens in {len(list(out.glob('*.bin')))} shards")


class ConversionCounts:
    """Counts of one source in a conversion: its documents and tokens, and how the first document begins."""

    documents = 0
    tokens = 0
    first = ""

    def tokens_of(self, encoded: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields the ids unchanged and counts documents and tokens."""
        for ids in encoded:
            self.documents += 1
            self.tokens += len(ids)
            yield ids


def _track(
    source: Survey, field: str, skips: Skips, count: ConversionCounts, progress: Progress, task: TaskID
) -> Iterator[Document]:
    """Yields the documents of a source unchanged and advances the progress bar."""
    for number, document in enumerate(read_documents(source, field, skips)):
        if number == 0:
            count.first = beginning(document.text)
        yield document
        progress.advance(task, document.size)
