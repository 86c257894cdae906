"""The page at `/`: one HTML file with its Content-Security-Policy, and the routing of a run as data.

next: serve/page.html, log/routing_history.py
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tmoe.config.check import ConfigError, require
from tmoe.log.routing_history import History, last_shares, read_history
from tmoe.serve.protocol import Refused

FILE = Path(__file__).with_name("page.html")
MOST_STEPS = 128  # maps of a run: a page cannot show more


class RunMaps(NamedTuple):
    """The routing of a run, for the page."""

    head: dict[str, Any]
    """run, blocks, experts, records, and edges: the first step of each map, then the step after the last"""
    mean: np.ndarray
    """fp32 [Y, E]: loads divided by the layer's mean, over the last tenth of the records"""
    maps: np.ndarray
    """fp32 [maps, Y, E]: the same for each map; NaN without a pair"""


def maps_of(history: History) -> RunMaps:
    """Loads of consecutive bins, added up into at most MOST_STEPS maps."""
    size = -(-len(history.load) // MOST_STEPS)
    starts = np.arange(0, len(history.load), size)
    load = np.add.reduceat(history.load, starts)
    mean = load.mean(-1, keepdims=True)
    maps = np.divide(load, mean, out=np.full_like(load, np.nan), where=mean > 0)
    edges = [*history.edges[starts].tolist(), int(history.edges[-1])]
    head = dict(run=history.name, blocks=history.blocks, experts=load.shape[-1], edges=edges)
    return RunMaps(
        head | dict(records=len(history.steps)),
        last_shares(history).astype(np.float32),
        maps.astype("<f4"),
    )


class RunRouting:
    """A run folder's routing; it is read again once its file has changed.

    Raises ConfigError, which names --run, if the folder has no record of routing.
    """

    def __init__(self, run: Path):
        self.run = run
        self.lock = threading.Lock()
        self.stamp: tuple[int, int] | None = None
        try:
            self.read()
        except (OSError, ValueError) as error:
            require(False, "run", run, str(error).removeprefix(f"{run}: "))

    def read(self) -> RunMaps:
        with self.lock:
            stamp = self._stamp()
            if stamp is None or stamp != self.stamp:
                self.maps, self.stamp = maps_of(read_history(self.run)), stamp
            return self.maps

    def _stamp(self) -> tuple[int, int] | None:
        """Time and size of the file; None if it is missing: an old run has its routing in metrics.jsonl."""
        try:
            found = (self.run / "routing.bin").stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def of_model(self, blocks: int, experts: int, given: bool) -> RunRouting | None:
        """Itself; None for a run of a model with other MoE layers. given: by --run, so that is refused."""
        layers, of_run = self.maps.mean.shape
        same = (layers, of_run) == (blocks, experts)
        wrong = f"its record has {layers} MoE layers of {of_run} experts, the model {blocks} of {experts}"
        require(same or not given, "run", self.run, wrong)
        return self if same else None


def routing_of(run: Path | None, model: Path) -> RunRouting | None:
    """The routing of a run; without one, of the run that the served folder is or lies in, if it has any."""
    if run is not None:
        return RunRouting(run)
    near = [p for p in (model, *model.absolute().parents[:2]) if (p / "routing.bin").is_file()]
    try:
        return RunRouting(near[0]) if near else None
    except ConfigError:  # a run without a record yet
        return None


def policy(html: str) -> str:
    """A page's Content-Security-Policy: its own script and style, by hash, and requests to its server."""

    def own(tag: str) -> str:
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return " ".join(f"'sha256-{b64encode(sha256(t.encode()).digest()).decode()}'" for t in texts)

    rules = ["default-src 'none'", f"script-src {own('script')}", f"style-src {own('style')}"]
    rules += ["img-src data:", "connect-src 'self'", "base-uri 'none'", "form-action 'none'"]
    return "; ".join([*rules, "frame-ancestors 'none'", "require-trusted-types-for 'script'"])


class Page:
    """The routes of the page. routing: of a run; None: no run is shown."""

    def __init__(self, routing: RunRouting | None):
        self.routing = routing
        self.html = FILE.read_bytes().decode()
        self.headers = {
            "content-security-policy": policy(self.html),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page),
            Route("/tmoe/run", self.run),
            Route("/tmoe/run/load", self.load),
        ]

    async def page(self, request: Request) -> Response:
        return Response(self.html, media_type="text/html; charset=utf-8", headers=self.headers)

    async def run(self, request: Request) -> Response:
        """The run in JSON, with its mean load; null for an expert of a layer without a pair."""
        found = await self._read()
        mean = [[None if x != x else round(x, 4) for x in row] for row in found.mean.tolist()]
        return JSONResponse(found.head | dict(mean=mean))

    async def load(self, request: Request) -> Response:
        """A line of JSON with the shape, then the maps as fp32, little-endian."""
        found = await self._read()
        line = json.dumps(found.head | dict(shape=found.maps.shape)).encode() + b"\n"
        return Response(line + found.maps.tobytes(), media_type="application/octet-stream")

    async def _read(self) -> RunMaps:
        if self.routing is None:
            wrong = "no run is shown; start the server with --run RUN, a folder with a routing.bin"
            raise Refused(404, wrong, None, "no_run")
        try:
            return await asyncio.to_thread(self.routing.read)
        except (OSError, ValueError) as error:
            raise Refused(404, f"the run cannot be read: {error}", None, "no_run") from None
