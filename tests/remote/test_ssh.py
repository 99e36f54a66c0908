"""Over a real sshd on loopback."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest
from paramiko import ssh_exception

from skyctl.errors import (
    HostKeyError,
    InputError,
    LoginError,
    NodeError,
    PythonTooOldError,
    SkyctlError,
    UnfitError,
    UnreachableError,
)
from skyctl.remote import ssh, ssh_authentication
from skyctl.remote.agent_session import Session
from skyctl.remote.session_factory import open_session, open_sessions
from skyctl.remote.ssh_config import resolve_ssh_target

from .answers import run_node_task

Env = Callable[[Session], dict[str, str]]


def refused(sshd, node, options) -> SkyctlError:
    with pytest.raises(SkyctlError) as caught:
        open_session(node, options)
    return caught.value


def test_whole_way(sshd, task_env: Env, tmp_path: Path) -> None:
    node = sshd.node(name="n 1;$(x)'", env={"WHERE": "there; $(touch y)"})
    with open_session(node, sshd.options()) as session:
        assert session.host == "127.0.0.1"
        assert session.hello.home == str(sshd.home)
        task = session.start_task("node_tasks", {"do": "echo"}, env=task_env(session))
        body = os.urandom(4 << 20)
        task.send({"n": 1}, body)
        assert task.recv(20) == ({"event": "echo", "n": 1}, body)
        task.send({"op": "stop"})
        event = task.recv(20)
        assert event is not None
        assert event[0]["where"] == "there; $(touch y)"
        data = os.urandom(1 << 20) * 20
        path = session.push(data, hashlib.sha256(data).hexdigest())
        session.fetch(path, tmp_path / "back", 1 << 30)
        assert (tmp_path / "back").read_bytes() == data
        orphan = session.start_task("node_tasks", {"do": "orphan", "stay": True}, env=task_env(session))
        while (event := orphan.recv(20)) and event[0].get("event") != "up":
            pass
    assert session.surviving_pids == []
    with open_session(node, sshd.options()) as session:  # the package is there already
        assert run_node_task(session, {"do": "noisy"}, 20, task_env(session)) == {}


def test_noise_before_the_nonce(sshd) -> None:
    if not os.environ.get("SHELL", "/bin/bash").endswith("bash"):
        pytest.skip("start-up files are read under sshd by bash only")
    noise = 'python3 -c "print(chr(120)*(1<<20)); print(chr(0)*99); import sys; sys.stderr.write(chr(101))"'
    (sshd.home / ".bashrc").write_text(f"{noise}\nprintf 'no end of line'\n")
    with open_session(sshd.node(), sshd.options()) as session:
        assert session.hello.home == str(sshd.home)


def test_startup_file_that_exits(sshd) -> None:
    (sshd.home / ".bashrc").write_text("echo go away\nexit 7\n")
    failure = refused(sshd, sshd.node(), sshd.options())
    assert isinstance(failure, UnfitError)
    assert "status 7" in failure.message
    assert "go away" in failure.message


def test_unknown_host_key(sshd) -> None:
    sshd.known_hosts.write_text("")
    failure = refused(sshd, sshd.node(), sshd.options())
    blob = base64.b64decode(sshd.public("ed25519").split()[1])
    mark = "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    assert type(failure) is HostKeyError
    assert mark in failure.message
    assert "--accept-new-host-keys" in str(failure.hint)
    sshd.known_hosts.unlink()
    open_session(sshd.node(), sshd.options(accept_new_host_keys=True)).close()
    assert sshd.known_hosts.stat().st_mode & 0o777 == 0o600
    assert sshd.known_hosts.read_text() == f"[127.0.0.1]:{sshd.port} {sshd.public('ed25519')}\n"
    open_session(sshd.node(), sshd.options()).close()


def test_changed_host_key(sshd) -> None:
    other = " ".join((sshd.folder / "other.pub").read_text().split()[:2])
    sshd.known_hosts.write_text(f"# comment\n[127.0.0.1]:{sshd.port} {other}\n")
    for accept in (False, True):
        failure = refused(sshd, sshd.node(), sshd.options(accept_new_host_keys=accept))
        assert type(failure) is HostKeyError
        assert "has changed" in failure.message
        assert f"{sshd.known_hosts}:2" in failure.message
    assert len(sshd.known_hosts.read_text().splitlines()) == 2


def test_known_by_another_kind_of_key(sshd) -> None:
    sshd.trust("ecdsa")
    open_session(sshd.node(), sshd.options()).close()


def test_revoked_and_extra_known_hosts(sshd) -> None:
    extra = sshd.folder / "extra"
    extra.write_text(sshd.known_hosts.read_text())
    sshd.known_hosts.write_text("")
    open_session(sshd.node(), sshd.options(known_hosts=str(extra))).close()
    extra.write_text("@revoked * " + sshd.public("ed25519"))
    failure = refused(sshd, sshd.node(), sshd.options(known_hosts=str(extra), accept_new_host_keys=True))
    assert "revoked" in failure.message


def test_wrong_key(sshd) -> None:
    failure = refused(sshd, sshd.node(identity_file=str(sshd.folder / "other")), sshd.options())
    assert type(failure) is LoginError
    assert str(sshd.folder / "other") in failure.message


def test_many_agent_keys_do_not_use_up_the_tries(sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [paramiko.ECDSAKey.generate() for _ in range(8)]
    monkeypatch.setattr(ssh_authentication, "_agent_keys", lambda hop, stack: keys)
    open_session(sshd.node(), sshd.options()).close()
    node = sshd.node(identity_file=None)
    open_session(node, sshd.options(f"Host *\n  IdentityFile {sshd.key}")).close()
    assert type(refused(sshd, node, sshd.options())) is LoginError


@pytest.mark.parametrize("fault", ["missing", "folder", "text", "public", "passphrase", "unreadable"])
def test_unusable_key_file(sshd, tmp_path: Path, fault: str) -> None:
    path = tmp_path / "a key'"
    words = "not a private key"
    if fault == "missing":
        words = "does not exist"
    elif fault == "folder":
        path.mkdir()
        words = "can't be read"
    elif fault == "text":
        path.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nnot base64\n")
    elif fault == "public":
        path = sshd.folder / "client.pub"
    elif fault == "passphrase":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(path)], check=True)
        words = "protected by a passphrase"
    else:
        path.write_text("x")
        path.chmod(0)
        words = "not a private key" if os.geteuid() == 0 else "can't be read"
    failure = refused(sshd, sshd.node(identity_file=str(path)), sshd.options())
    assert type(failure) is InputError
    assert failure.exit_code == 2
    assert str(path) in failure.message
    assert words in failure.message


def test_python_missing_and_too_old(sshd, tmp_path: Path) -> None:
    failure = refused(sshd, sshd.node(python="/no such/python3"), sshd.options())
    assert type(failure) is UnfitError
    assert "node n1 has no /no such/python3" in failure.message
    assert "python: /path" in str(failure.hint)
    old = tmp_path / "old python"
    old.write_text(
        "#!/bin/sh\nexec python3 -c 'import sys; sys.version_info = (3, 8, 10); exec(sys.argv[1])' \"$3\"\n"
    )
    old.chmod(0o755)
    failure = refused(sshd, sshd.node(python=str(old)), sshd.options())
    assert isinstance(failure, PythonTooOldError)
    assert failure.version == "3.8.10"
    assert "has Python 3.8.10 at" in failure.message
    assert "3.10" in failure.message
    assert "uv python install" in str(failure.hint)


def test_python_below_home(sshd) -> None:
    (sshd.home / "my env").symlink_to(Path(os.sys.prefix))
    with open_session(sshd.node(python="~/my env/bin/python3"), sshd.options()) as session:
        assert session.hello.python.startswith(str(sshd.home))


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_unreachable(sshd, silent_port: int) -> None:
    with socket.socket() as sock:  # bound, not listening: refuses
        sock.bind(("127.0.0.1", 0))
        failure = refused(sshd, sshd.node(port=sock.getsockname()[1]), sshd.options())
    assert type(failure) is UnreachableError
    assert "refused the connection" in failure.message
    failure = refused(sshd, sshd.node(port=silent_port), sshd.options(timeout_s=0.3))
    assert type(failure) is UnreachableError
    assert "did not answer in time" in failure.message
    failure = refused(sshd, sshd.node(host="no-such-host.invalid"), sshd.options())
    assert type(failure) is UnreachableError
    assert "name is unknown" in failure.message
    failure = refused(sshd, sshd.node(host="-oProxyCommand=x"), sshd.options())
    assert type(failure) is InputError


def test_not_an_sshd(sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs up at once is tried again, then reported."""
    import threading

    monkeypatch.setattr(ssh.time, "sleep", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        dials = 0

        def serve() -> None:
            nonlocal dials
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                dials += 1
                sock.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        failure = refused(sshd, sshd.node(port=server.getsockname()[1]), sshd.options())
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert type(failure) is UnreachableError
    assert dials == ssh.MAX_DIALS


def test_jump(sshd, task_env: Env) -> None:
    """Through the same sshd, twice; each hop's key is checked."""
    hop = f"127.0.0.1:{sshd.port}"
    text = f"Host *\n  IdentityFile {sshd.key}"
    with open_session(sshd.node(proxy_jump=f"{hop},{hop}"), sshd.options(text)) as session:
        assert run_node_task(session, {"do": "noisy"}, 20, task_env(session)) == {}
    failure = refused(sshd, sshd.node(proxy_jump=hop, port=1), sshd.options(text))
    assert type(failure) is UnreachableError
    assert "the way there was refused" in failure.message
    failure = refused(sshd, sshd.node(proxy_jump="127.0.0.1:1"), sshd.options(text))
    assert "jump host 127.0.0.1:1 of node n1" in failure.message
    sshd.known_hosts.write_text("")
    failure = refused(sshd, sshd.node(proxy_jump=hop), sshd.options(text))
    assert type(failure) is HostKeyError
    assert "jump host" in failure.message


def test_alias_and_proxy_command(sshd) -> None:
    """``ssh alias`` works, so this does: the alias is all that cluster.yaml has."""
    user = os.environ.get("USER") or "root"
    text = (
        f"Host tower\n  HostName 127.0.0.1\n  Port {sshd.port}\n  User {user}\n  IdentityFile {sshd.key}\n"
        f"Host piped\n  HostName 127.0.0.1\n  Port {sshd.port}\n  User {user}\n  IdentityFile {sshd.key}\n"
        "  ProxyCommand python3 -c \"import socket,sys,threading,os;s=socket.create_connection(('%%h',%%p));"
        "threading.Thread(target=lambda:[os.write(1,d) for d in iter(lambda:s.recv(65536),b'')],daemon=True)"
        ".start();[s.sendall(d) for d in iter(lambda:os.read(0,65536),b'')]\"\n"
    ).replace("%%", "%")
    user_node = sshd.node().model_copy(update={"port": None, "user": None, "identity_file": None})
    for alias in ("tower", "piped"):
        node = user_node.model_copy(update={"name": alias, "host": alias})
        with open_session(node, sshd.options(text)) as session:
            assert session.host == "127.0.0.1"


def test_full_disk(sshd) -> None:
    (sshd.home / ".cache").write_text("a file where a folder should be")
    failure = refused(sshd, sshd.node(), sshd.options())
    assert type(failure) is UnfitError
    assert str(sshd.home / ".cache") in failure.message
    assert "XDG_CACHE_HOME" in str(failure.hint)


def test_connection_dropped(sshd, task_env: Env) -> None:
    with open_session(sshd.node(), sshd.options()) as session:
        task = session.start_task("node_tasks", {"do": "orphan", "stay": True}, env=task_env(session))
        while (event := task.recv(20)) and event[0].get("event") != "up":
            pass
        session._node_connections[-1]._transports[-1].sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        with pytest.raises(UnreachableError, match="node n1 was lost"):
            task.recv(20)


def test_many_at_once(sshd) -> None:
    nodes = [sshd.node(name=f"n{i}") for i in range(12)]
    outcomes = open_sessions(nodes, sshd.options())
    sessions = [outcome for outcome in outcomes.values() if isinstance(outcome, Session)]
    for session in sessions:
        session.close()
    assert len(sessions) == 12


def test_every_error_of_paramiko_is_mapped(sshd) -> None:
    kinds = [
        kind
        for kind in vars(ssh_exception).values()
        if isinstance(kind, type)
        and issubclass(kind, Exception)
        and kind.__module__ == ssh_exception.__name__
    ]
    assert len(kinds) > 10
    hop = resolve_ssh_target(sshd.node(), sshd.options(), ssh._read_config_with_paramiko)
    for kind in kinds:
        assert kind in ssh.SSH_ERROR_MAP
        exc = kind.__new__(kind)
        exc.args = ("words",)
        exc.__dict__.update(allowed_types=["x"], explanation="e", command="c", error="e", code=1, text="t")
        if kind is ssh_exception.BadHostKeyException:
            key = paramiko.ECDSAKey.generate()
            exc = kind("h", key, key)
        error = ssh.translate_ssh_error(hop, exc)
        assert isinstance(error, NodeError)
        assert type(error) is ssh.SSH_ERROR_MAP[kind][0]
        assert error.node == "n1"


def test_without_the_ssh_program(sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyctl.remote.ssh_config.shutil.which", lambda _: None)
    text = f"Host tower\n  HostName 127.0.0.1\n  Port {sshd.port}\n  IdentityFile {sshd.key}\n"
    node = sshd.node(name="tower", host="tower", identity_file=None).model_copy(update={"port": None})
    open_session(node, sshd.options(text)).close()
