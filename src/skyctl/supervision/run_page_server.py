"""Serves a run's page to this machine's browsers: on 127.0.0.1, to those who know the address's token.

Any user of the machine, and any page in its browsers, can send requests there. So each must have the token,
and name this machine as its host: a page whose own name was made to point here (DNS rebinding) has another.
A forwarded port (``ssh -L``) may have any number.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs

from skyctl.compare.run_page import RunPage
from skyctl.errors import SkyctlError

HOST = "127.0.0.1"
HOST_NAMES = (HOST, "localhost")
RENDER_INTERVAL_S = 0.5
"""A page that is younger is served again."""
REQUEST_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 64
PLAIN, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"


class RunPageServer(ThreadingMixIn, TCPServer):
    """The server; ``serving`` runs it.

    ``url``: the page's address, token included. ``end_served``: set once the page of a run that has ended
    was sent to somebody.

    Args:
        port: 0: one that is free.

    Raises:
        SkyctlError: the port is taken, or may not be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, render: Callable[[], RunPage], port: int = 0) -> None:
        self._render = render
        self._lock = threading.Lock()
        self._page: tuple[float, RunPage] | None = None
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._token = secrets.token_urlsafe(24)
        self.end_served = threading.Event()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as exc:
            raise SkyctlError(
                f"port {port} of {HOST} can't be used: {exc.strerror or exc}",
                hint="give another --port, or none for a free one",
            ) from exc
        self.url = f"http://{HOST}:{self.server_address[1]}/?token={self._token}"

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serves while the context lasts."""
        thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="run page", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def knows(self, token: str) -> bool:
        """Whether that is the token of the page's address."""
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())

    def page(self) -> RunPage:
        """The page as the run is now. Raises SkyctlError: the run's files can't be read."""
        with self._lock:
            if self._page is None or time.monotonic() - self._page[0] >= RENDER_INTERVAL_S:
                page = self._render()
                self._page = (time.monotonic(), page)
            return self._page[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own; a connection beyond ``MAX_CONNECTIONS`` is closed."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing where the other end went away: it asks again if it wants to."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request: the page (``/``), or what has changed (``/update``)."""

    server: RunPageServer
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "skyctl", ""

    def do_GET(self) -> None:
        """Sends what was asked for; 403 without the token, or where the host is called otherwise."""
        host = self.headers.get("Host") or ""
        if (host.rpartition(":")[0] or host).lower() not in HOST_NAMES:
            self._refuse(HTTPStatus.FORBIDDEN, f"this is {HOST}, and no other host")
            return
        path, _, query = self.path.partition("?")
        if not self.server.knows(parse_qs(query).get("token", [""])[0]):
            self._refuse(HTTPStatus.FORBIDDEN, "the address lacks its token: skyctl watch prints it")
            return
        if path not in ("/", "/update"):
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        try:
            page = self.server.page()
        except SkyctlError as exc:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, exc.message)
            return
        nonce = secrets.token_urlsafe(16)
        if path == "/":
            self._answer(HTTPStatus.OK, HTML, page.document(nonce), nonce)
        else:
            answer = {"title": page.title, "ended": page.ended, "parts": dict(page.parts)}
            self._answer(HTTPStatus.OK, JSON, json.dumps(answer))
        if page.ended:
            self.server.end_served.set()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """A request that can't be read, or of another method: a line that repeats nothing of it."""
        self._refuse(HTTPStatus(code), HTTPStatus(code).description)

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self.close_connection = True
        self._answer(status, PLAIN, f"{words}\n")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Nothing: requests have the token in them, and the terminal is the command's."""

    def _answer(self, status: HTTPStatus, kind: str, text: str, nonce: str = "") -> None:
        body = text.encode("utf-8", "replace")
        own = f"style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
        policy = "default-src 'none'; " + (own if nonce else "") + "base-uri 'none'; form-action 'none'; "
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", f"{policy}frame-ancestors 'none'"),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
