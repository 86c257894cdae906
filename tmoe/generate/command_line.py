"""The command line: a model completes a text, answers in a chat, or answers the prompts of a file.

    python -m tmoe.generate runs/tiny "def mean(values):"               the newest complete step of a run
    python -m tmoe.generate STEP "def mean(values):" -n 4 --seed 1      four answers
    python -m tmoe.generate HF_DIR --chat                               a conversation in the terminal
    python -m tmoe.generate HF_DIR --adapter runs/sft --chat            the same with adapters of a run
    python -m tmoe.generate HF_DIR --file prompts.jsonl --out answers.jsonl

Text is written to stdout, notes to stderr. Without a prompt the prompt is read from stdin, unless stdin is a
terminal. Exit code 0: done; 2: refused, with the reason on stderr; 1: failed or interrupted.

The engine is imported when the command runs, so that --help loads no compiler.

next: generate/load.py, generate/engine.py
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tmoe.base.disk import expand_home
from tmoe.checkpoint.errors import CheckpointError
from tmoe.config.check import ConfigError, Section, Setting, require
from tmoe.data.chat.conversations import parse_given, parse_messages, with_system
from tmoe.data.chat.encoding import Marker, prompt_text, spoken, turn_ends
from tmoe.data.chat.held import tell
from tmoe.data.chat.template import ChatTemplate, load_template
from tmoe.data.chat.template_choice import another
from tmoe.data.tokenizer import DataError
from tmoe.front import call, one_message, spelt
from tmoe.generate.generation_config import DRAWN, not_followed, sampling_of
from tmoe.generate.prompt_file import is_chat, read_prompts, write_answers

if TYPE_CHECKING:
    from tmoe.generate.engine import Engine, Piece
    from tmoe.generate.load import Loaded
    from tmoe.generate.sampler import Sampling
    from tmoe.model.transformer import Transformer

TOKENS = 256  # default of --max-tokens
TEMPERATURE = 0.8  # if neither the flag nor generation_config.json has one
COMMANDS = "/new", "/help", "/quit"  # commands in a conversation
HELP = "/new begins a conversation, /help shows this, /quit or Ctrl-D ends it, Ctrl-C ends an answer"


@dataclass(frozen=True)
class Flags:
    """The flags of `python -m tmoe.generate`."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|STEP|HF_DIR")]
    """a run folder (its newest complete step is used), a step folder, a Hugging Face folder, or a name on the
    hub"""
    prompt: Annotated[str, tyro.conf.Positional] = ""
    """the text to complete; none: read from stdin"""
    chat: bool = False
    """treat prompts as a user's messages; without a prompt, have a conversation in the terminal"""
    system: str = ""
    """a system message before every conversation"""
    chat_template: str | None = None
    """a jinja file that replaces the tokenizer's own chat template"""
    max_tokens: int | None = None
    """most tokens of an answer;
    none: 256, but for a run's model at most the rest of the sequence length that it was trained on"""
    min_tokens: int | None = None
    """fewest tokens of an answer;
    none: the value in generation_config.json, else 0"""
    temperature: float | None = None
    """divisor of the logits; 0: always the most probable token;
    none: the value in generation_config.json, else 0.8"""
    top_k: int | None = None
    """keep the k most probable tokens; 0: all"""
    top_p: float | None = None
    """keep the smallest set of most probable tokens whose probabilities sum to this; 1: all"""
    min_p: float | None = None
    """keep tokens at least this many times as probable as the most probable one; 0: all"""
    repetition_penalty: float | None = None
    """divisor of the logits (of negative logits: factor) of tokens that prompt or answer has already; 1: no
    penalty; none: the value in generation_config.json"""
    seed: int = 0
    """equal seeds give equal answers"""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    r"""a text that ends an answer, and is left out of it; \n is a line's end; may be given several times"""
    file: Path | None = None
    """file of prompts: rows of .jsonl or .json with prompt or messages, or a text with one prompt per line"""
    out: Path | None = None
    """with --file: a new file for the answers, one line of JSON each; none: stdout"""
    n: Annotated[int, tyro.conf.arg(aliases=("-n",))] = 1
    """answers to each prompt"""
    slots: int = 64
    """most answers that are made at the same time"""
    pool_gib: float | None = None
    """GiB for keys and values; none: as much as the slots need, on a GPU at most 80% of the free memory"""
    adapter: Path | None = None
    """a step folder or run folder of --lora.rank, or a folder of PEFT's; its adapters are added to the model,
    their base"""
    tokenizer: str | None = None
    """'bytes', or a tokenizer.json, for a folder without a tokenizer"""
    device: str | None = None
    """cpu, cuda or cuda:N; none: a GPU if there is one"""
    dtype: Literal["bf16", "fp32"] | None = None
    """type of weights and computation; none: bf16 on a GPU, else fp32"""
    quantize: Literal["int8", "int4", "fp8", "nf4"] | None = None
    """quantise the matrices of experts and dense layers while loading: int8 and fp8 with a scale for each
    row, int4 with one for 128 values, nf4 as bitsandbytes does; none: weights stay as they are"""

    def check(self) -> None:
        """ConfigError for flags that cannot be combined."""
        section, chats = Section(self), f"needs {Setting('chat')}"
        section.require(self.n >= 1, "n", "must be at least 1")
        require(not (self.prompt and self.file), f"a prompt and {Setting('file')}: give one of them")
        section.require(self.out is None or self.file is not None, "out", f"needs {Setting('file')}")
        exists = self.out is not None and self.out.exists()
        section.require(not exists, "out", "is there already; name a new file")
        folder = self.out is None or self.out.parent.is_dir()
        section.require(folder, "out", "its folder is not there", "a new file in a folder that is")
        chat = self.chat or self.file is not None
        require(not self.system or chat, "system", repr(self.system), chats)
        if self.temperature == 0:
            unused = f"unused with {Setting('temperature', 0)}, the most probable token"
            for name in ("top_k", "top_p", "min_p"):
                section.require(getattr(self, name) is None, name, unused, "leave it out")
        section.require(self.chat_template is None or chat, "chat_template", chats)

    def sampling(self, loaded: Loaded) -> Sampling:
        """Settings from the flags, else from the folder, else the defaults. ConfigError for a wrong value."""
        from tmoe.generate.sampler import Sampling

        names = *DRAWN, "repetition_penalty"
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        asked = sampling_of(loaded.generation)
        least = asked.pop("min_tokens", 0)
        try:
            Sampling(**asked)
        except ConfigError as error:
            raise error.within(f"{loaded.path}: generation_config.json") from None
        stop = tuple(text.replace("\\n", "\n") for text in self.stop) + asked.pop("stop", ())
        settings: dict[str, Any] = dict(temperature=TEMPERATURE) | asked | given
        most = TOKENS if self.max_tokens is None else self.max_tokens
        least = min(least, most) if self.min_tokens is None else self.min_tokens
        lengths = dict(max_tokens=most, min_tokens=least)
        return Sampling(**settings, **lengths, stop=stop, seed=self.seed)


class TokenClock:
    """Counts tokens and the time since the first of them."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first: float | None = None
        self.tokens = 0

    def tell(self, finish: str = "") -> str:
        """A line with the number of tokens, tokens a second after the first piece, and the time until it."""
        now = time.perf_counter()
        first = self.first or now
        rate = max(self.tokens - 1, 0) / max(now - first, 1e-9)
        end = f" ({finish})" if finish else ""
        count = f"{self.tokens} token{'' if self.tokens == 1 else 's'}"
        return f"{count}{end}, {rate:,.0f} tokens/s, the first after {first - self.start:.2f} s"

    def over(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yields the pieces, and counts their tokens."""
        for piece in pieces:
            self.first = self.first or time.perf_counter()
            self.tokens += len(piece.done.ids) if piece.done else 0
            yield piece


def run(flags: Flags) -> None:
    """Executes a command line."""
    flags.check()
    rows = read_prompts(flags.file) if flags.file else None
    prompt = flags.prompt
    talks = flags.chat and not prompt and rows is None
    wrong, valid = "a conversation has one answer to each message", f"1, or a prompt or {Setting('file')}"
    require(not talks or flags.n == 1, "n", flags.n, wrong, valid)
    if not prompt and rows is None and not talks:
        ways = f'give a prompt ("..."), {Setting("file")} PROMPTS or {Setting("chat")}'
        require(not sys.stdin.isatty(), ways)
        prompt = "".join(piped())
    from tmoe.generate.load import load

    begun = time.perf_counter()
    how = flags.tokenizer, flags.device, flags.dtype, flags.adapter, flags.quantize
    loaded = load(flags.path, *how)
    for line in loaded.notes:
        note(line)
    engine = loaded.engine(flags.slots, flags.pool_gib)
    sampling = flags.sampling(loaded)
    took = time.perf_counter() - begun
    device = engine.model.head_weight.device
    penalty = sampling.repetition_penalty
    more = f", repetition_penalty {penalty:g}" if penalty != 1 else ""
    note(f"{loaded.path} on {device}, {took:.1f} s to load; temperature {sampling.temperature:g}{more}")
    if flags.quantize:
        note(f"matrices of experts and dense layers in {flags.quantize}: {size(loaded.model)}")
    if left := not_followed(loaded.generation):
        note(f"generation_config.json: not followed here: {', '.join(left)}")
    speaker = Speaker(engine, sampling, flags, loaded.seq)
    if flags.chat or (rows is not None and is_chat(rows[0])):
        speaker.say_template()
    if talks:
        speaker.converse(sys.stdin.isatty())
    elif rows is not None:
        speaker.work_through(rows)
    else:
        speaker.answer(prompt)


def size(model: Transformer) -> str:
    """The memory of a model's weights in words."""
    held = sum(t.nbytes for t in model.state_dict().values())
    return f"{held / 2**30:.2f} GiB of weights" if held >= 2**27 else f"{held / 2**20:.1f} MiB of weights"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Writes text to stdout at once; characters that the terminal's encoding lacks become '?'."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


class Speaker:
    """The engine and the settings of one command line, with its three ways to use them."""

    def __init__(self, engine: Engine, sampling: Sampling, flags: Flags, seq: int | None):
        """seq: tokens of the sequences on which the model was trained, if known."""
        self.engine, self.sampling, self.flags, self.seq = engine, sampling, flags, seq
        self.left: Counter[str] = Counter()
        """fields of rows that the template leaves out, each with the number of conversations"""

    def stream(self, prompts: list[list[int]], chat: bool, turn: int = 0) -> Iterator[Piece]:
        """Pieces of the answers to prompts. chat: answers end with a turn. turn: first prompt's number."""
        sampling = self.sampling
        if chat:
            assert self.engine.tokenizer
            with suppress(DataError):  # `say_template` has reported it
                sampling = replace(sampling, stop_ids=turn_ends(self.engine.tokenizer, self.template()))
        if self.seq is not None and self.flags.max_tokens is None:
            room = max(self.seq - max(map(len, prompts)), self.sampling.min_tokens, 1)
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        numbers = range(turn, turn + len(prompts))
        return self.engine.stream(prompts, self.flags.n, sampling, numbers=numbers)

    def ids_of(
        self, messages: list[dict[str, Any]], tools: list | None = None, more: dict[str, Any] | None = None
    ) -> list[int]:
        """The tokens of a conversation; counts in `left` the fields that the template leaves out.

        tools, more: further values of a row for the template.
        """
        system = [dict(role="system", content=self.flags.system)] if self.flags.system else []
        assert self.engine.tokenizer
        template = self.template()
        marker = Marker(self.engine.tokenizer, template)
        messages = parse_messages([*system, *messages], "messages")
        text, lacks = prompt_text(messages, marker, template, tools, more)
        self.left.update(lacks)
        return marker.encode([text])[0].ids.tolist()

    def template(self) -> ChatTemplate:
        """The template by which conversations are written, with today's date."""
        assert self.engine.tokenizer
        file = self.flags.chat_template
        return load_template(self.engine.tokenizer, file, now=True, flag="--chat-template")

    def say_template(self) -> None:
        """Prints a line on how conversations are written, and one if the weights know another template."""
        assert self.engine.tokenizer
        template = self.template()
        note(f"conversations are written by {template.source}")
        try:
            turn_ends(self.engine.tokenizer, template)
        except DataError as error:
            note(f"{error}: answers end at {list(self.engine.eos)} or --max-tokens alone")
        file = self.flags.chat_template
        if file and (line := another(f"--chat-template={file}", template, self.engine.tokenizer.chat)):
            note(line)

    def answer(self, prompt: str) -> None:
        """Answers one prompt: prints a single answer while it is made, or several ones after each other."""
        chat = self.flags.chat
        ids = self.ids_of([user(prompt)]) if chat else self.engine.ids_of(0, prompt)
        shown = "" if chat else prompt
        clock = TokenClock()
        pieces = clock.over(self.stream([ids], chat))
        if self.flags.n == 1:
            say(shown)
            finish = ""
            for piece in pieces:
                say(piece.text)
                finish = piece.done.finish if piece.done else finish
            say("\n")
            return note(clock.tell(finish))
        ends = {piece.sample: piece.done for piece in pieces if piece.done}
        for number, done in sorted(ends.items()):
            note(f"--- {number + 1} of {self.flags.n} ({done.finish})")
            say(f"{shown}{done.text}\n")
        note(clock.tell())

    def work_through(self, rows: list[dict[str, Any]]) -> None:
        """Answers a file of prompts."""
        flags = self.flags
        chat = flags.chat or is_chat(rows[0])
        mixed = not flags.chat and any(is_chat(row) != chat for row in rows)
        wrong = f"rows with prompt and rows with messages: need {Setting('chat')}"
        require(not mixed, "file", flags.file, wrong)
        prompts = []
        for number, row in enumerate(rows):
            where = f"{Setting('file', flags.file)}: prompt {number + 1}"
            try:
                if chat:
                    messages = row["messages"] if is_chat(row) else [user(row["prompt"])]
                    messages = with_system(row, parse_messages(messages, "messages"), "row")
                    prompts.append(self.ids_of(messages, *parse_given(row, "row")))
                else:
                    prompts.append(self.engine.ids_of(number, row["prompt"]))
            except ValueError as error:
                raise ConfigError(f"{where}: {spelt(error)}") from None
        if self.left:
            note(tell(self.left, self.template().source))
        clock = TokenClock()
        with flags.out.open("x", encoding="utf-8") if flags.out else nullcontext(sys.stdout) as file:
            for _ in write_answers(rows, flags.n, clock.over(self.stream(prompts, chat)), file.write):
                file.flush()
        note(f"{len(rows)} prompts, {clock.tell()}")

    def converse(self, terminal: bool) -> None:
        """Has a conversation: the user's messages are typed, or they are the lines of a pipe.

        terminal: Ctrl-D ends the conversation, Ctrl-C ends an answer, and a message that cannot be answered
        is skipped. In a pipe such a message raises ValueError, which names its line.
        """
        note(HELP if terminal else "each line of stdin is a message; /new begins a conversation")
        messages: list[dict[str, Any]] = []
        turn = -1
        for turn, line in enumerate(typed() if terminal else piped()):
            text = line.strip()
            if text == "/quit":
                break
            if text == "/help":
                note(HELP)
            if text == "/new":
                messages = []
            if text in ("", *COMMANDS):
                continue
            if wrong := no_command(text):
                if not terminal:
                    raise ConfigError(f"stdin: line {turn + 1}: {wrong}")
                note(f"error: {wrong}")
                continue
            clock = TokenClock()
            shown = ""
            try:
                for piece in clock.over(self.stream([self.ids_of([*messages, user(text)])], True, turn)):
                    say(piece.text)
                    shown += piece.text
                if terminal:
                    note("")
                else:
                    say("\n")
                note(clock.tell())
            except KeyboardInterrupt:
                if not terminal:
                    raise
                note("\nended")
            except ValueError as error:  # e.g. longer than the model's range of positions; /new helps
                if not terminal:
                    raise ValueError(f"stdin: line {turn + 1}: {spelt(error)}") from None
                note(f"error: {spelt(error)}")
                continue
            assert self.engine.tokenizer
            answer = spoken(shown, self.engine.tokenizer, self.template())
            messages += [user(text), dict(role="assistant", content=answer)]
        if terminal:
            say("\n")
        elif turn < 0:
            note("stdin holds no message")


def piped() -> Iterator[str]:
    """The lines of stdin, without a byte order mark. ValueError for bytes that are not UTF-8."""
    try:
        for number, line in enumerate(sys.stdin):
            line.encode()  # Python reads other bytes as lone surrogates in some locales
            yield line.removeprefix("\ufeff") if number == 0 else line
    except UnicodeError as error:
        raise ValueError(f"stdin: not UTF-8: {error}") from None


def no_command(text: str) -> str:
    """The error for a message whose first word looks like a command but is none; "" for another message."""
    word = text.split()[0]
    if not re.fullmatch(r"/[A-Za-z][A-Za-z_-]*", word):
        return ""
    near = get_close_matches(word.lower(), COMMANDS, 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{word}: no such command; valid: {', '.join(COMMANDS)}, or a message without the slash{meant}"


def typed() -> Iterator[str]:
    """The lines that the user types, until Ctrl-D or Ctrl-C."""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> ")


def user(text: str) -> dict[str, Any]:
    return dict(role="user", content=text)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line. An error ends the process with one message."""
    description = (__doc__ or "").partition("\nnext:")[0]
    shape = dict(description=description, config=(tyro.conf.FlagCreatePairsOff,))
    with one_message(CheckpointError):
        run(call(Flags, "python -m tmoe.generate", expand_home(argv), **shape))
