"""The command line: an HTTP server with OpenAI's interface for one model.

    tmoe serve runs/tiny                                the newest complete step of a run, on 127.0.0.1:8000
    tmoe serve HF_DIR --port 9000 --slots 64            a Hugging Face folder
    TMOE_TOKEN=secret tmoe serve HF_DIR --host 0.0.0.0  for other machines, which must know the token

Needs the extra: pip install 'tmoe[serve]'. SIGTERM and Ctrl-C end the server once the requests under way are
answered; a second signal ends it at once. Exit code 0: ended by a signal; 1: the engine failed; 2: refused.

next: serve/server.py, serve/engine_process.py
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from tmoe.base.disk import expand_home
from tmoe.checkpoint.errors import CheckpointError
from tmoe.config.check import Section, Setting, require
from tmoe.front import call, one_message

if TYPE_CHECKING:
    from tmoe.serve.engine_client import EngineClient
    from tmoe.serve.front import Front
    from tmoe.serve.page import RunRouting


@dataclass(frozen=True)
class Flags:
    """The flags of `tmoe serve`."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|STEP|HF_DIR")]
    """a run folder (its newest complete step is used), a step folder, a Hugging Face folder, or a name on the
    hub"""
    host: str = "127.0.0.1"
    """address to listen on; any but 127.0.0.1, ::1 and localhost needs a token"""
    port: int = 8000
    """port to listen on; 0: any that is free"""
    name: str | None = None
    """name of the model for clients; none: the folder's name"""
    slots: int = 32
    """most answers that are made at the same time"""
    max_len: int | None = None
    """most tokens of a prompt and its answer; none: the model's range of positions, at most 32768"""
    waiting: int = 256
    """most answers that wait for a slot; further requests get status 503"""
    pool_gib: float | None = None
    """GiB for keys and values; none: room for all slots at --max-len, at most 80% of a GPU's free memory"""
    token: str | None = None
    """secret that clients must send as Authorization: Bearer; none: the environment variable TMOE_TOKEN,
    which other users of the machine cannot read in the list of processes"""
    drain: float = 30.0
    """seconds in which requests under way may end after a signal"""
    chat_template: str | None = None
    """a jinja file that replaces the tokenizer's own chat template"""
    adapter: Path | None = None
    """a step folder or run folder of --lora.rank, or a folder of PEFT's; its adapters are added to the model,
    their base"""
    tokenizer: str | None = None
    """'bytes', or a tokenizer.json, for a folder without a tokenizer"""
    device: str | None = None
    """cpu, cuda or cuda:N; none: a GPU if there is one"""
    dtype: Literal["bf16", "fp32"] | None = None
    """type of weights and computation; none: bf16 on a GPU, else fp32"""
    run: Path | None = None
    """a run folder whose load of experts the page at / shows; none: MODEL's own, if it is of a run"""
    quantize: Literal["int8", "int4", "fp8", "nf4"] | None = None
    """quantise the matrices of experts and dense layers while loading, as tmoe generate does"""

    def check(self) -> str | None:
        """ConfigError for flags that cannot work. Returns the token."""
        section = Section(self)
        world = os.environ.get("WORLD_SIZE", "1")
        require(world == "1", f"WORLD_SIZE={world}: one process serves a model; valid: 1, without torchrun")
        section.require(0 <= self.port < 2**16, "port", "must be from 0 to 65535")
        section.require(self.slots >= 1, "slots", "must be at least 1")
        section.require(self.waiting >= 0, "waiting", "must be at least 0")
        section.require(0 <= self.drain <= 86400, "drain", "must be from 0 to 86400 seconds")
        token = os.environ.get("TMOE_TOKEN") if self.token is None else self.token
        plain = token is None or re.fullmatch(r"[!-~]+", token) is not None
        require(plain, "token", True, "must be one or more ASCII characters without blanks")
        from tmoe.serve.guard import is_loopback

        section.require(
            is_loopback(self.host) or token is not None,
            "host",
            f"other machines can ask there, so it needs {Setting('token')} or TMOE_TOKEN",
        )
        return token


def run(flags: Flags, start: Literal["spawn", "fork"] = "spawn") -> int:
    """Executes a command line. Returns the exit code. start: how the engine's process starts."""
    missing = [name for name in ("starlette", "uvicorn", "h11") if find_spec(name) is None]
    require(not missing, f"tmoe serve needs {', '.join(missing)}: pip install 'tmoe[serve]'")
    token = flags.check()
    from tmoe.serve.engine_client import EngineClient, EngineGone
    from tmoe.serve.guard import LOOPBACK
    from tmoe.serve.messages import EngineSettings
    from tmoe.serve.page import routing_of
    from tmoe.serve.server import bind, serve

    routing = routing_of(flags.run, flags.path)
    listening = bind(flags.host, flags.port)
    port = listening.getsockname()[1]
    shared = {name: getattr(flags, name) for name in EngineSettings.__dataclass_fields__}
    try:
        engine = EngineClient(EngineSettings(**shared), start)
    except EngineGone as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    try:
        sizes = len(engine.ready.moe_blocks), engine.ready.experts
        front = front_of(flags, engine, routing and routing.of_model(*sizes, flags.run is not None))
        at = f"http://[{flags.host}]:{port}" if ":" in flags.host else f"http://{flags.host}:{port}"
        print(f"{front.model} is served at {at}/v1, with a page at {at}/", file=sys.stderr, flush=True)
        hosts = {*LOOPBACK, flags.host.lower()} if flags.host not in ("0.0.0.0", "::") else None
        return asyncio.run(serve(front, listening, hosts, token, flags.drain))
    finally:
        engine.close()


def front_of(flags: Flags, engine: EngineClient, routing: RunRouting | None) -> Front:
    """The front of an engine. A model without a chat template answers completions only."""
    from tmoe.data.chat.template import load_template
    from tmoe.data.chat.template_choice import another
    from tmoe.data.tokenizer import DataError
    from tmoe.generate.generation_config import not_followed
    from tmoe.serve.front import Front, Sizes

    ready = engine.ready
    lines = [*ready.notes]
    if left := not_followed(ready.generation):
        lines.append(f"generation_config.json: not followed here: {', '.join(left)}")
    template, why, file = None, "", flags.chat_template
    try:
        template = load_template(ready.tokenizer, file, now=True, flag="--chat-template")
    except DataError as error:
        require(file is None, str(error))
        why = str(error)
    lines.append(f"conversations are written by {template.source}" if template else f"no chat: {why}")
    if template and file and (line := another(f"--chat-template={file}", template, ready.tokenizer.chat)):
        lines.append(line)
    name = flags.name or (flags.path.resolve().name if flags.path.exists() else str(flags.path))
    if routing is not None:
        lines.append(f"the page shows the load of the run {routing.run}")
    front = Front(engine, name, template, why, Sizes(flags.slots, flags.waiting), routing)
    if template and not front.protocol.ends:
        lines.append(f"the template ends no turn: answers end at {list(ready.eos)} or max_tokens alone")
    for line in lines:
        print(line, file=sys.stderr)
    return front


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line. An error ends the process with one message."""
    description = (__doc__ or "").partition("\nnext:")[0]
    shape = dict(description=description, config=(tyro.conf.FlagCreatePairsOff,))
    with one_message(CheckpointError):
        sys.exit(run(call(Flags, "python -m tmoe.serve", expand_home(argv), **shape)))
