"""A server of a tiny model in a forked process, and requests to it over sockets.

with served.server(folder) as port: served.post(port, "/v1/completions", dict(prompt="a"))
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.front import one_message
from tmoe.generate.engine import Engine, Sample
from tmoe.generate.sampler import Sampling
from tmoe.model.transformer import Transformer

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CFG = ModelConfig(
    vocab=256,
    dim=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    rope=RopeConfig(max_seq=512),
    moe=MoEConfig(experts=2, top_k=1, ffn_dim=8, renormalize=False),
)


def tiny_run(folder: Path, broken: int | None = None) -> Path:
    """A run folder of one step, whose tokenizer is 'bytes'. broken: a token without a finite embedding."""
    torch.manual_seed(0)
    model = Transformer(CFG)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.4)
        if broken is not None:
            model.embedding.weight[broken] = torch.nan
    config = dict(model=asdict(CFG), train=dict(seq=40), data=dict(tokenizer="bytes"))
    info = dict(config=config, data=dict(tokenizer="bytes"))
    tensors = {f"model.{n}": t for n, t in model.state_dict().items()} | {"optim.x": torch.zeros(2)}
    checkpoints = Checkpoints(folder / "checkpoints", keep=0, mode="sync", info=info)
    checkpoints.save(1, tensors, dict(step=1, tokens=1), {})
    return folder


def body(prompt: Any = "def f(", **more: Any) -> dict[str, Any]:
    """A body for TEXT."""
    return dict(prompt=prompt, max_tokens=12, temperature=0.8, seed=3) | more


def alone(engine: Engine, prompt: Any, n: int = 1, **how: Any) -> tuple[Sample, ...]:
    """The engine's own answers to one prompt."""
    return engine.generate([prompt], n, Sampling(**how))[0]


class Served(NamedTuple):
    """A server under way."""

    port: int
    process: Any
    log: Path
    others: Sequence[Any] = ()
    """the processes of ranks above 0"""

    def children(self) -> list[str]:
        """Process ids of the front's children."""
        pid = self.process.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    @property
    def engine(self) -> int:
        """The process id of the engine."""
        children = self.children()
        # a spawned engine has a resource tracker next to it
        trackers = [b"resource_tracker" in Path(f"/proc/{c}/cmdline").read_bytes() for c in children]
        (found,) = [int(c) for c, tracker in zip(children, trackers, strict=True) if not tracker]
        return found

    def files(self) -> list[int]:
        """Numbers of open files of the front and of the engine."""
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (self.process.pid, self.engine)]

    def mib(self) -> float:
        """MiB of memory that the front and the engine have together."""
        lines = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in (self.process.pid, self.engine)]
        rows = [row.split() for text in lines for row in text.splitlines()]
        return sum(int(row[1]) for row in rows if row[0] == "Anonymous:") / 1024

    def ended(self, timeout: float = 120) -> int | None:
        """The exit code, once the server has ended."""
        self.process.join(timeout)
        return self.process.exitcode


def _child(
    folder: Path, log: Path, start: Any, patches: dict[str, Any], world: dict[str, str], more: dict[str, Any]
) -> None:
    from tmoe.serve import command_line

    os.environ.update(world)

    for name, value in patches.items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(f"tmoe.serve.{module}"), attribute, value)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    torch.set_num_threads(1)
    file = open(log, "w", buffering=1)  # noqa: SIM115
    os.dup2(file.fileno(), 2)
    sys.stderr = file
    faulthandler.enable(file)
    flags = command_line.Flags(folder, **dict[str, Any](port=0, device="cpu") | more)
    with one_message():
        code = command_line.run(flags, start)
    file.flush()
    os._exit(code)


@contextmanager
def server(
    folder: Path,
    log: Path,
    start: str = "fork",
    patches: dict[str, Any] | None = None,
    ranks: int = 1,
    **more: Any,
) -> Iterator[Served]:
    """A server of the folder. It is killed at the end if it is still there.

    start: how the engine's process starts. patches: names in tmoe.serve and their values. ranks: processes,
    as torchrun starts them. more: flags.
    """
    with launched(folder, log, start, patches, ranks, **more) as processes:
        process, *others = processes
        end = time.monotonic() + 120
        while not (log.exists() and "is served at" in log.read_text()):
            assert process.is_alive() and time.monotonic() < end, log.exists() and log.read_text()
            time.sleep(0.05)
        try:
            yield Served(int(log.read_text().rpartition(":")[2].partition("/")[0]), process, log, others)
        finally:
            print(log.read_text())  # pytest shows it next to a failure


@contextmanager
def started(
    folder: Path, log: Path, start: str = "fork", patches: dict[str, Any] | None = None, **more: Any
) -> Iterator[Any]:
    """`server` without waiting until it listens. Yields the front's process."""
    with launched(folder, log, start, patches, 1, **more) as (process,):
        yield process


@contextmanager
def launched(
    folder: Path, log: Path, start: str, patches: dict[str, Any] | None, ranks: int, **more: Any
) -> Iterator[list[Any]]:
    """The processes of a server, by rank, started; the file of a rank above 0 is LOG.RANK."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        world = dict(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        world |= dict(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        file = Path(f"{log}.{rank}") if rank else log
        args = folder, file, start, patches or {}, world if ranks > 1 else {}, more
        processes.append(multiprocessing.get_context("fork").Process(target=_child, args=args))
        processes[-1].start()
    try:
        yield processes
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


class Reply(NamedTuple):
    """A reply, read until its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The values of a stream's events; [DONE] is None."""
        lines = [line[6:] for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        return [None if line == b"[DONE]" else json.loads(line) for line in lines]


def head_of(path: str, size: int | None, **headers: str) -> bytes:
    """The head of a request. size: bytes of its body; None: a GET. Underscores become dashes."""
    given = dict(host="localhost", connection="close")
    if size is not None:
        given |= {"content-type": "application/json", "content-length": str(size)}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{'GET' if size is None else 'POST'} {path} HTTP/1.1\r\n{lines}\r\n".encode()


def connect(port: int, buffer: int = 0) -> socket.socket:
    """buffer: bytes that the kernel may hold for a client that does not read; 0: its own choice."""
    link = socket.socket()
    link.settimeout(120)
    if buffer:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    link.connect(("127.0.0.1", port))
    return link


def receive(link: socket.socket, first: bytes = b"") -> Reply:
    """Reads a reply until the server closes. first: bytes of it that were read already."""
    parts = [first]
    with suppress(ConnectionResetError):
        while part := link.recv(65536):
            parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        whole, rest = [], body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            n = int(size or b"0", 16)
            whole.append(rest[:n])
            rest = rest[n + 2 :] if n else b""
        body = b"".join(whole)
    return Reply(int(status.split(" ")[1]) if status else 0, headers, body)


def begin(port: int, path: str, body: Any) -> socket.socket:
    """Sends a request, and returns the connection."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    link = connect(port)
    link.sendall(head_of(path, len(raw)) + raw)
    return link


def post(port: int, path: str, body: Any, **headers: str) -> Reply:
    """The reply to a body, JSON or bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with connect(port) as link:
        with suppress(BrokenPipeError, ConnectionResetError):
            link.sendall(head_of(path, len(raw), **headers) + raw)
        return receive(link)


def get(port: int, path: str, **headers: str) -> Reply:
    with connect(port) as link:
        link.sendall(head_of(path, None, **headers))
        return receive(link)


def gauges(port: int) -> dict[str, float]:
    """The values of /metrics."""
    lines = get(port, "/metrics").body.decode().splitlines()
    return {name: float(value) for name, _, value in (l.rpartition(" ") for l in lines if l[:1] != "#")}


def wait_for(ready: Callable[[], Any]) -> None:
    """Waits until `ready` is true."""
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


def settled(port: int) -> None:
    """Waits until no page is in use and no request is open."""
    names = "tmoe_pages_in_use", "tmoe_requests", "tmoe_waiting", "tmoe_running"
    wait_for(lambda: not any(map(gauges(port).get, names)))


def typed(found: Any) -> Any:
    """An object of the openai package, once its own types have accepted it: the package does not check."""
    fields = found.to_dict()
    for choice in fields.get("choices", []):
        if fields["object"] == "text_completion" and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"  # OpenAI's chunks have null, which their type does not name
        logprobs = choice.get("logprobs") or {}
        if logprobs.get("token_logprobs", [0])[:1] == [None]:  # of the first token, with echo
            del logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]
    type(found).model_validate(fields, strict=True)
    return found
