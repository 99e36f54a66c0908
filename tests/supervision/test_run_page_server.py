"""The requests that get a run's page, over real sockets."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from skyctl.compare.run_page import render_run
from skyctl.errors import SkyctlError
from skyctl.supervision.run_page_server import RunPageServer
from skyctl.supervision.run_status import resolve_run
from skyctl.supervision.run_watcher import RunWatcher

from ..helpers.watched_runs import write_state


@pytest.fixture
def server() -> Iterator[RunPageServer]:
    write_state()
    watcher = RunWatcher(resolve_run(None))
    made = RunPageServer(lambda: render_run(watcher.figures()))
    with made.serving():
        yield made


def ask(
    server: RunPageServer, path: str | None = None, *, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], str]:
    """(status, headers, body); ``path``: default: the page's own, with its token."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    try:
        address = urlsplit(server.url)
        connection.putrequest(method, path or f"{address.path}?{address.query}", skip_host=True)
        connection.putheader("Host", host or address.netloc)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def token(server: RunPageServer) -> str:
    return urlsplit(server.url).query


def test_the_page_is_only_at_the_address_with_the_token(server: RunPageServer) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", server.url)
    status, _, body = ask(server)
    assert status == 200
    assert "gpt:layers=2" in body
    wrong = ("/", "/?token=", "/?token=x", f"/?{token(server)}x", f"/x?{token(server)[:-1]}", "/update",
             "/?token=%C3%A9%FF", f"/?x={token(server)}")  # fmt: skip
    for path in wrong:
        status, _, body = ask(server, path)
        assert (status, "gpt" in body) == (403, False), path
    assert ask(server, f"/etc/passwd?{token(server)}")[0] == 404
    assert ask(server, f"/../?{token(server)}")[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "0.0.0.0", "[::1]:1"]
)
def test_a_name_that_was_made_to_point_here_is_refused(server: RunPageServer, host: str) -> None:
    assert ask(server, host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "LOCALHOST"])
def test_a_forwarded_port_may_have_any_number(server: RunPageServer, host: str) -> None:
    assert ask(server, host=host)[0] == 200


def test_what_is_no_request_of_ours_is_refused_without_a_word_of_it(
    server: RunPageServer,
) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "<b>"):
        status, headers, body = ask(server, method=method)
        assert status == 501, method
        assert headers["Content-Type"].startswith("text/plain")
        assert method not in body
    with socket.create_connection(server.server_address[:2], timeout=10) as stranger:
        stranger.sendall(b"nonsense <b>\r\n\r\n")
        assert b"<b>" not in stranger.recv(4096)


def test_the_page_may_load_nothing_and_run_its_own_script_only(server: RunPageServer) -> None:
    _, headers, body = ask(server)
    policy = headers["Content-Security-Policy"]
    (nonce,) = set(re.findall(r"'nonce-([\w-]+)'", policy))
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert body.count(f'nonce="{nonce}"') == 2
    assert len(re.findall("<script|<style", body)) == 2
    assert not re.search(r"https?://|@import|url\((?!#)|\sstyle=|\son\w+=", body)
    assert nonce not in ask(server)[2]
    assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert "Python" not in headers["Server"]


def test_connections_that_say_nothing_keep_nobody_out(server: RunPageServer) -> None:
    silent = [socket.create_connection(server.server_address[:2]) for _ in range(8)]
    try:
        assert ask(server)[0] == 200
    finally:
        for one in silent:
            one.close()


def test_the_end_counts_as_served_once_it_was_sent(server: RunPageServer) -> None:
    assert ask(server)[0] == 200
    assert not server.end_served.is_set()
    write_state(status="done", step=20)
    server._page = None
    assert ask(server, "/update")[0] == 403
    assert not server.end_served.is_set()
    assert '"ended": true' in ask(server, f"/update?{token(server)}")[2]
    assert server.end_served.wait(10)


def test_a_run_that_can_not_be_read_is_said_so(server: RunPageServer) -> None:
    resolve_run(None).paths.state.write_text("{")
    status, _, body = ask(server)
    assert status == 503
    assert "state.json" in body


def test_a_port_that_is_taken_is_said_so(server: RunPageServer) -> None:
    with pytest.raises(SkyctlError, match="can't be used") as refused:
        RunPageServer(server.page, server.server_address[1])
    assert "--port" in str(refused.value.hint)
