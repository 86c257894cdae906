"""A stand-in for the Hugging Face hub: serves one repository over HTTP to huggingface_hub.

next: tests/hf/test_hf_hub.py, tests/data/test_hub_sources.py
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

from tmoe.data import hub_datasets as data_hub
from tmoe.hf import hub_folders as hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Answers the requests of huggingface_hub for a snapshot of one repository; counts requests and files."""

    def __init__(self, name: str, files: dict[str, bytes], gated: bool):
        super().__init__(("127.0.0.1", 0), Answer)
        self.name = name
        self.files = files
        self.gated = gated
        self.commit = COMMIT
        self.revisions = ("main", COMMIT)
        self.given: list[str] = []
        self.asked = 0


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.server
        hub.asked += 1
        path = unquote(self.path.partition("?")[0])
        listed = re.fullmatch(rf"/api/(?:models|datasets)/{hub.name}(?:/(revision|tree)/(.+))?", path)
        file = re.sub(rf"^/(datasets/)?{hub.name}/resolve/{hub.commit}/", "", path)
        if listed and listed[2] and listed[2] not in (*hub.revisions, hub.commit):
            self.say(b"{}", 404, **{"X-Error-Code": "RevisionNotFound"})
        elif listed and listed[1] != "tree":
            siblings = [dict(rfilename=name) for name in hub.files]
            self.say(json.dumps(dict(id=hub.name, sha=hub.commit, siblings=siblings)).encode())
        elif listed:
            tree = [dict(type="file", path=n, size=len(b), oid=etag(b)) for n, b in hub.files.items()]
            self.say(json.dumps(tree).encode())
        elif file in hub.files and hub.gated:
            self.say(b"{}", 403, **{"X-Error-Code": "GatedRepo"})
        elif file in hub.files:
            if self.command == "GET":
                hub.given.append(file)
            self.say(hub.files[file], ETag=f'"{etag(hub.files[file])}"')
        else:
            self.say(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})

    def say(self, content: bytes, status: int = 200, **headers: str):
        standard = {"X-Repo-Commit": self.server.commit, "Content-Length": str(len(content))}
        self.send_response(status)
        for name, value in (headers | standard).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *words):
        pass


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def forget():
    """Empties this process's caches of the hub."""
    hub._download.cache_clear()
    data_hub.listing.cache_clear()
    data_hub._downloaded.cache_clear()


@contextmanager
def serving(
    name: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, cache: Path, gated: bool = False
) -> Iterator[Hub]:
    """The stand-in hub, which huggingface_hub asks in this scope; `cache` remains its cache afterwards."""
    server = Hub(name, files, gated)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # as the environment may have it
    forget()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        forget()
