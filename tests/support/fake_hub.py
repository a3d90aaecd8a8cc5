"""A hub in this process: the part of huggingface.co's HTTP protocol that fetching an adapter uses.

GET  /api/models/{repo}/revision/{revision}      -> the commit
GET  /api/models/{repo}/tree/{commit}            -> its files
HEAD, GET /{repo}/resolve/{commit}/{file}        -> ETag, X-Repo-Commit, the bytes
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    """What is published, and what goes wrong. `requests` are (method, path, bearer token) as they came."""

    url: str = ""
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # repo -> revision -> file -> bytes
    private: dict[str, str] = field(default_factory=dict)  # repo -> the token that opens it
    gated: set[str] = field(default_factory=set)
    failing: int | None = None  # a status that answers everything
    hold: threading.Event | None = None  # downloads wait for it
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def publish(self, repo: str, folder: Path, revision: str = "main", **more: bytes) -> str:
        """Every file of `folder`, and `more`; returns the commit."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repos.setdefault(repo, {})[revision] = files | more
        return self.commit(repo, revision)

    def commit(self, repo: str, revision: str) -> str:
        """The commit of a revision: it follows from the files."""
        state = hashlib.sha1(repo.encode())
        for name, data in sorted(self.repos[repo][revision].items()):
            state.update(name.encode() + data)
        return state.hexdigest()

    def files_at(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch, tag or commit."""
        for name, files in self.repos.get(repo, {}).items():
            if revision in (name, self.commit(repo, name)):
                return self.commit(repo, name), files
        return None

    def fetched(self) -> list[str]:
        """Names of the files whose bytes were sent."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


_API = re.compile(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/?]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve a hub on a free port until the end."""
    hub = FakeHub()

    class Handler(_Handler):
        the_hub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    the_hub: FakeHub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Not to the tests' output."""

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.the_hub, unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        hub.requests.append((self.command, path, token))
        if hub.failing is not None:
            self._send(hub.failing, b"down", {}, with_body=with_body)
            return
        match = _API.fullmatch(path) or _FILE.fullmatch(path)
        if match is None:
            self._send(404, b"", {}, with_body=with_body)
            return
        repo = match[1]
        if repo not in hub.repos or hub.private.get(repo, token) != token:
            self._send(401, b'{"error":"no"}', {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        elif repo in hub.gated and match.re is _FILE:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body=with_body)
        elif match.re is _API:
            self._api(repo, match[2], match[3])
        else:
            self._file(repo, match[2], match[3], with_body=with_body)

    def _api(self, repo: str, kind: str, revision: str) -> None:
        found = self.the_hub.files_at(repo, revision)
        if found is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body=True)
            return
        commit, files = found
        body: object = {"id": repo, "modelId": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files], "private": False}
        if kind == "tree":
            body = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in sorted(files.items())
            ]
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"}, with_body=True)

    def _file(self, repo: str, revision: str, name: str, *, with_body: bool) -> None:
        found = self.the_hub.files_at(repo, revision)
        if found is None or name not in found[1]:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body=with_body)
            return
        if with_body and self.the_hub.hold is not None:
            self.the_hub.hold.wait(30)
        data = found[1][name]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": found[0], "Accept-Ranges": "bytes"}
        self._send(200, data, headers, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)
