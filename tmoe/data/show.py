"""Prints rows of chat data as a model gets them, with trained tokens in colour: python -m tmoe.data --show.

next: data/chat/tokenise.py
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.text import Text

from tmoe.config.run import require_columns
from tmoe.data.chat.conversations import ChatRow, Plain, parse_row
from tmoe.data.chat.encoding import Encoder, Tokens
from tmoe.data.chat.held import NULLS
from tmoe.data.chat.template import load_template
from tmoe.data.chat.tokenise import first_row
from tmoe.data.chat.unpaired import without_label
from tmoe.data.row_files import read_rows
from tmoe.data.survey import survey
from tmoe.data.tokenizer import DataError, Tokenizer, load_tokenizer


def show(
    show: str,
    *,
    tokenizer: str = "bytes",
    chat_template: str | None = None,
    rows: int = 3,
    columns: tuple[str, ...] = (),
) -> None:
    """Prints the first rows of chat data as they are trained on.

    Args:
        show: a file, folder or pattern of chat rows, or a set of the hub: hub:ORG/NAME:SPLIT
        tokenizer: 'bytes', or the path of a Hugging Face tokenizer.json or of a folder that holds one
        chat_template: a jinja file in place of the tokenizer's own chat template
        rows: how many rows
        columns: columns to rename, OURS=THEIRS: messages=conversations
    """
    require_columns(columns, "columns")
    console = Console(highlight=False, soft_wrap=True)
    source = survey(show, columns)
    chosen = load_tokenizer(tokenizer, "--tokenizer")
    template = load_template(chosen, chat_template, flag="--chat-template")
    kind, _ = first_row(source)
    encoder = Encoder(chosen, template)
    console.print(Text(f"{show}: {source.form} of {kind}; {template.source}"))
    coloured = console.color_system is not None
    console.print(
        Text.assemble(
            "trained tokens are ", ("green", TRAINED) if coloured else "in ⟦ ⟧", "; other tokens are plain"
        )
    )
    read = (
        entry for path, file in source.files for entry in ((file, *row) for row in read_rows(path, file, ""))
    )
    for file, where, value, error, _ in itertools.islice(read, max(rows, 0)):
        try:
            if error is not None:
                raise error
            label = None
            if kind == "prompt/completion" and isinstance(value, dict) and value.get("label") is not None:
                value, label = without_label(value, where)
            row = parse_row(value, where, kind, file.form == "parquet")
        except DataError as wrong:
            console.print(Text(f"\n{wrong}", "red"))
            continue
        parts = ("chosen", "rejected") if kind == "preference" else (LABELS[label],)
        encoded = encoder.encode(row.samples)
        lacks = set().union(*encoder.left) | ({NULLS} if row.nulls else set())
        for part, sequences in zip(parts, encoded, strict=True):
            if isinstance(sequences, DataError):
                console.print(Text(f"\n{where}: {sequences}", "red"))
                continue
            for number, sequence in enumerate(sequences, start=1):
                nth = f", sequence {number} of {len(sequences)}" if len(sequences) > 1 else ""
                trained = int(sequence.trained[1:].sum())
                head = (
                    f"{where}{f' {part}' if part else ''}{nth}: {len(sequence.ids)} tokens, {trained} trained"
                )
                console.print(Text(f"\n{head}", "bold"))
                console.print(coloured_text(sequence, chosen, coloured))
        for note in _notes(row, lacks):
            console.print(Text(f"{where}: {note}", "yellow"))


def _notes(row: ChatRow, lacks: set[str]) -> Iterator[str]:
    """The parts of a row that are not used. lacks: the fields that the template leaves out."""
    if isinstance(row.samples[0], Plain):
        yield "texts without a chat template"
    if lacks:
        yield f"left out by the template: {', '.join(sorted(lacks))}"
    if row.unread:
        yield f"fields that are not read: {', '.join(row.unread)}"


TRAINED = "bold green"
LABELS = {None: "", True: "desirable", False: "undesirable"}


def coloured_text(sequence: Tokens, tokenizer: Tokenizer, coloured: bool) -> Text:
    """A sequence's text; trained tokens are coloured, or put between brackets if there is no colour."""
    text = Text()
    edges = np.flatnonzero(np.diff(sequence.trained)) + 1
    for ids, trained in zip(np.split(sequence.ids, edges), np.split(sequence.trained, edges), strict=True):
        part = tokenizer.decode(ids)
        # make control characters visible, such as the NUL that separates documents of bytes
        part = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in part)
        if not trained[0]:
            text.append(part)
        elif coloured:
            text.append(part, TRAINED)
        else:
            text.append(f"⟦{part}⟧")
    return text
