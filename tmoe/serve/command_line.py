"""The command line: an HTTP server with OpenAI's interface for one model.

    tmoe serve runs/tiny                                the newest complete step of a run, on 127.0.0.1:8000
    tmoe serve HF_DIR --port 9000 --slots 64            a Hugging Face folder
    TMOE_TOKEN=secret tmoe serve HF_DIR --host 0.0.0.0  for other machines, which must know the token
    torchrun --nproc-per-node 8 -m tmoe serve HF_DIR --parallel.ep 4    two copies of the model on 8 GPUs

Needs the extra: pip install 'tmoe[serve]'. SIGTERM and Ctrl-C end the server once the requests under way are
answered; a second signal ends it at once. Exit code 0: ended by a signal; 1: the engine failed; 2: refused.

next: serve/server.py, serve/engine_process.py
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tmoe.base.disk import expand_home
from tmoe.checkpoint.errors import CheckpointError
from tmoe.config.axes import Copies
from tmoe.config.check import ConfigError, Section, Setting, require
from tmoe.front import call, flags_of, one_message

if TYPE_CHECKING:
    from tmoe.serve.engine_client import EngineClient
    from tmoe.serve.front import Front
    from tmoe.serve.page import RunRouting

TORCHRUN_S = 30  # seconds that torchrun gives its processes after a signal, by default
AFTER_FIRST_S = 5.0  # rank 0 prints before, because torchrun ends all ranks once one has ended
# flags that the engine reads
SHARED = "path", "slots", "max_len", "pool_gib", "tokenizer", "device", "dtype", "adapter", "quantize"


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
    """most answers that are made at the same time, by each rank"""
    max_len: int | None = None
    """most tokens of a prompt and its answer; none: the model's range of positions, at most 32768"""
    waiting: int = 256
    """most answers that wait for a slot; further requests get status 503"""
    pool_gib: float | None = None
    """GiB for keys and values of each rank; none: room for all slots at --max-len, at most 80% of a GPU's
    free memory"""
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
    """quantise the matrices of experts and dense layers while loading, as tmoe generate does; not with
    --parallel.ep"""
    parallel: Copies = field(default_factory=Copies)

    def check(self) -> str | None:
        """ConfigError for flags that cannot work. Returns the token."""
        missing = [name for name in ("starlette", "uvicorn", "h11") if find_spec(name) is None]
        require(not missing, f"tmoe serve needs {', '.join(missing)}: pip install 'tmoe[serve]'")
        section = Section(self)
        self._check_world(section)
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

    def _check_world(self, section: Section) -> None:
        """ConfigError for a number of processes, or hosts, that cannot serve the model."""
        from tmoe.generate.processes import require_ep
        from tmoe.parallel.launcher import launcher_world

        world, ep = launcher_world(), self.parallel.ep
        require_ep(ep, world.size)
        hosts = (world.nodes or 1) > 1 or world.local_size not in (None, world.size)
        there = f"{world.local_size} of {world.size} processes are on this host"
        require(not hosts, f"{there}; valid: one host, or a server on each host")
        one = self.device in (None, "cpu", "cuda") or world.size == 1
        section.require(one, "device", f"one device for {world.size} processes", "cpu, cuda, or none")
        whole = self.quantize is None or ep == 1
        wrong = f"not with {Setting('parallel.ep', ep)}: quantised weights are not divided over ranks"
        section.require(
            whole, "quantize", wrong, f"{Setting('parallel.ep', 1)}, a copy of the model for each rank"
        )


@contextmanager
def said_once() -> Iterator[None]:
    """A context whose refusal rank 0 alone prints: all ranks have the same words."""
    try:
        yield
    except ConfigError:
        if os.environ.get("RANK", "0") == "0":
            raise
        time.sleep(AFTER_FIRST_S)
        raise SystemExit(2) from None


def run(flags: Flags, start: Literal["spawn", "fork"] = "spawn") -> int:
    """Executes a command line. Returns the exit code. start: how the engine's process starts."""
    with said_once():
        token = flags.check()
    from tmoe.parallel.launcher import launcher_world
    from tmoe.serve.engine_client import EngineClient
    from tmoe.serve.engine_process import engine_rank
    from tmoe.serve.guard import LOOPBACK
    from tmoe.serve.links import EngineGone
    from tmoe.serve.messages import EngineSettings
    from tmoe.serve.page import routing_of
    from tmoe.serve.server import bind, serve

    shared: dict[str, Any] = {name: getattr(flags, name) for name in SHARED}
    settings = EngineSettings(**shared, ep=flags.parallel.ep)
    world = launcher_world()
    if world.rank:
        engine_rank(settings)
    routing = routing_of(flags.run, flags.path)
    listening = bind(flags.host, flags.port)
    port = listening.getsockname()[1]
    try:
        engine = EngineClient(settings, start, world.size)
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

    ready, ranks, ep = engine.ready, len(engine.links), flags.parallel.ep
    lines = [*ready.notes]
    if ranks > 1:
        copies = f"{ranks // ep} {'copies' if ranks > ep else 'copy'} of the model"
        lines.append(f"{ranks} processes have {copies}" + f", the experts of each over {ep}" * (ep > 1))
    if "TORCHELASTIC_RUN_ID" in os.environ and flags.drain >= TORCHRUN_S:
        asked = f"--drain={flags.drain:g} needs torchrun --shutdown-timeout with more seconds"
        lines.append(f"torchrun kills what is left {TORCHRUN_S} s after a signal by default; {asked}")
    if not ready.reuse:
        lines.append("linear layers: each prompt is computed whole, also one that begins as an earlier one")
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
    front = Front(engine, name, template, why, Sizes(flags.slots, flags.waiting, ranks), routing)
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
        known = [*flags_of(Flags), "--parallel.ep"]
        with said_once():
            flags = call(Flags, "python -m tmoe.serve", expand_home(argv), known=known, **shape)
        code = run(flags)
        for file in (sys.stdout, sys.stderr):
            file.flush()
        os._exit(code)  # Python would take a second or more to delete the modules
