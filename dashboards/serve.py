"""Serves a built site on this machine and rebuilds it when results arrive.

Only files of the site are served, to requests that name this server: a web page from elsewhere
that resolves its own name to this address gets nothing.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import http.server
import ipaddress
import mimetypes
import socket
import socketserver
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path, PurePosixPath

from dashboards.files import MANIFEST
from dashboards.reading import stamp
from dashboards.site import POLICY, build
from harness.errors import HarnessError
from harness.store import Store

POLL_S = 2.0
# A browser needs these even where the system has no table of types.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".csv": "text/csv; charset=utf-8",
}


class Server(http.server.ThreadingHTTPServer):
    """An HTTP server of one folder. `hosts` are the names it answers to; empty: to any."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], root: Path, hosts: frozenset[str]) -> None:
        self.root, self.hosts = root.resolve(), hosts
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service who we are, which may take long and is not needed.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "decode-harness"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: requests of one's own browser are no news."""

    def _answer(self, *, body: bool) -> None:
        if self.server.hosts and _host_of(self.headers.get("Host", "")) not in self.server.hosts:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this server has another name")
            return
        path = find(self.server.root, urllib.parse.urlsplit(self.path).path)
        try:
            content = path.read_bytes() if path is not None else None
        except OSError:
            content = None
        if path is None or content is None:
            self.send_error(HTTPStatus.NOT_FOUND, "no such page")
            return
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self._headers(path, tag, 0)
            return
        self.send_response(HTTPStatus.OK)
        self._headers(path, tag, len(content))
        if body:
            self.wfile.write(content)

    def _headers(self, path: Path, tag: str, size: int) -> None:
        kind = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
        self.send_header("Content-Type", kind or "application/octet-stream")
        self.send_header("Content-Length", str(size))
        self.send_header("ETag", tag)
        with contextlib.suppress(OSError):  # replaced by a rebuild just now
            changed = email.utils.formatdate(path.stat().st_mtime, usegmt=True)
            self.send_header("Last-Modified", changed)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Content-Security-Policy", f"{POLICY}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()


def find(root: Path, url_path: str) -> Path | None:
    """The file of the site that a URL's path names; None for anything else.

    Hidden files (the list of files among them) and what lies outside `root` are not of the site.
    """
    parts = PurePosixPath(urllib.parse.unquote(url_path, errors="replace")).parts
    names = [part for part in parts if part != "/"]
    if any(name.startswith(".") or "\\" in name or "\0" in name for name in names):
        return None
    path = root.joinpath(*names)
    if url_path.endswith("/"):
        path /= "index.html"
    inside = path.resolve().is_relative_to(root)
    return path if inside and path.is_file() and path.name != MANIFEST else None


def _host_of(header: str) -> str:
    return urllib.parse.urlsplit(f"//{header}").hostname or ""


def names_of(host: str) -> frozenset[str]:
    """The names under which a server on `host` may be asked; empty where that cannot be told."""
    if host == "localhost":
        return frozenset({"localhost", "127.0.0.1", "::1"})
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return frozenset({host.lower()})
    if address.is_loopback:
        return frozenset({host, "localhost"})
    return frozenset() if address.is_unspecified else frozenset({host})


@contextlib.contextmanager
def serving(root: Path, host: str, port: int) -> Iterator[Server]:
    """A running server. Raises HarnessError where the address cannot be used."""
    try:
        server = Server((host, port), root, names_of(host))
    except (OSError, OverflowError) as error:
        raise HarnessError(
            f"cannot listen: {getattr(error, 'strerror', None) or error}",
            where=f"{host}:{port}",
            remedy="choose another --port (0 takes a free one) or --host",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="dashboard server", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def rebuild_when_changed(
    store: Store,
    out: Path,
    known: tuple[object, ...],
    stop: threading.Event,
    said: Callable[[str], None],
    *,
    period_s: float = POLL_S,
) -> None:
    """Builds the site whenever the store's results have changed, until `stop` is set.

    `known` is the store's stamp from before the last build, so that what arrived during it counts.
    Trouble (a full disk, a locked database) is told and tried again; what is built stays served.
    """
    while not stop.wait(period_s):
        try:
            now = stamp(store)
            if now != known:
                report = build(store, out)
                known = now
                said(f"results arrived: {report.written} files rewritten")
        except HarnessError as error:
            said(f"not rebuilt: {error}")
