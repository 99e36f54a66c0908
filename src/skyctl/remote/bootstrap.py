"""From a shell on the node to a running agent, with nothing taken for granted about either.

The command is one line, single-quoted, of characters that sh, bash, zsh, fish and csh read alike: a Python
program that says the nonce and its version (it must parse under any Python), then runs the line it is sent,
which is ``agent/store.py`` and ``agent/boot.py``. Whatever start-up files print before the nonce is skipped.
Settings and environment go over standard input: nothing secret is ever in an argument.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import shlex
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import skyctl.agent
from skyctl.agent.wire import WireError, read_frame, write_frame
from skyctl.errors import NodeError, SessionGoneError, SkyctlError, UnfitError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.base import Channel, ConnectOptions, Remote
from skyctl.remote.package import node_archive

NEEDS = (3, 11)
NOISE_BYTES = 16 << 20
LINE_BYTES = 1 << 20
TAKEN_HINT = "see which other skyctl process supervises the run"
FIRST = (
    "import os,sys;v=sys.version_info;sys.path[:]=[p for p in sys.path if p];"
    'os.write(1,("\\n%s %d.%d.%d\\n"%("NONCE",v[0],v[1],v[2])).encode());'
    "v[:2]<(3,11) and sys.exit(0);"
    "import base64,zlib;"
    'b=b"".join(iter(lambda:os.read(0,1)or b"\\n",b"\\n"));'
    'eval(compile(zlib.decompress(base64.b64decode(b)),"skyctl-boot","exec"),{"__name__":"skyctl_boot"})'
)


def start_agent(remote: Remote, options: ConnectOptions, owner: str = "") -> tuple[Channel, dict[str, Any]]:
    """Opens a channel and makes it an agent's.

    Args:
        owner: a secret by which it knows us again, where ``options`` have it hold.

    Returns:
        the channel, ready for frames, and the agent's hello.

    Raises:
        UnfitError: no Python, one too old, no place for the package.
        UnreachableError: the connection ended, or nothing came in time.
    """
    config: dict[str, Any] = {"lease_s": options.lease_s, "grace_s": options.grace_s}
    if options.hold_s:
        config |= {"hold_s": options.hold_s, "owner": owner}
    return _opened(remote, options, config, None)


def attach_agent(
    remote: Remote, options: ConnectOptions, session_id: str, words: dict[str, Any]
) -> tuple[Channel, dict[str, Any]]:
    """Opens a channel to an agent that runs already and holds.

    Args:
        words: what it must know of us: owner, adopt, n and r (``agent/held.py``).

    Returns:
        the channel, ready for frames, and the agent's hello.

    Raises:
        SessionGoneError: it is there no more, or it is another's.
        NodeError: as ``start_agent``.
    """
    return _opened(remote, options, {"attach": session_id}, {"op": "resume", **words})


def _opened(
    remote: Remote, options: ConnectOptions, config: dict[str, Any], first: dict[str, Any] | None
) -> tuple[Channel, dict[str, Any]]:
    nonce = secrets.token_hex(16)
    channel = remote.open(command(remote.node, nonce))
    late = threading.Event()

    def give_up() -> None:
        late.set()
        channel.close()

    timer = threading.Timer(options.start_timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        return channel, _shake_hands(remote.node, channel, {**config, "nonce": nonce}, first)
    except (OSError, EOFError, ValueError, SkyctlError) as exc:
        channel.close()
        if late.is_set():
            raise _late(remote.node, channel, options, running=first is not None) from exc
        if isinstance(exc, SkyctlError):
            raise
        raise UnreachableError(
            f"the connection to node {remote.node.name} ended while its agent was starting{_tail(channel)}",
            node=remote.node.name,
            hint="try again; `skyctl check` shows what is wrong with the node",
        ) from exc
    except BaseException:
        channel.close()
        raise
    finally:
        timer.cancel()
        timer.join()


def interpreter(node: Node) -> str:
    """The node's Python. A local node's default is the one that runs us, which has torch."""
    if node.transport == "local" and node.python == "python3":
        return sys.executable or "python3"
    return node.python


def command(node: Node, nonce: str) -> str:
    """The shell command. A leading ``~`` or ``~user`` is left to the shell."""
    python = interpreter(node)
    home, slash, rest = python.partition("/")
    if re.fullmatch(r"~[A-Za-z0-9._-]*", home) and slash:
        quoted = f"{home}/{shlex.quote(rest)}"
    else:
        quoted = shlex.quote(python)
    return f"{quoted} -u -c {shlex.quote(FIRST.replace('NONCE', nonce))}"


def stage_zero() -> bytes:
    """What the first line runs, as one line."""
    folder = Path(skyctl.agent.__file__).parent
    sources = [(folder / name).read_text() for name in ("store.py", "boot.py")]
    future = "from __future__ import annotations\n"
    text = future + "".join(source.replace(future, "") for source in sources) + "\nboot()\n"
    return base64.b64encode(zlib.compress(text.encode(), 9)) + b"\n"


def _shake_hands(
    node: Node, channel: Channel, config: dict[str, Any], first: dict[str, Any] | None
) -> dict[str, Any]:
    nonce = config["nonce"]
    version = _said(node, channel, nonce).decode(errors="replace")
    if tuple(int(part) for part in version.split(".")[:2]) < NEEDS:
        raise UnfitError(
            f"node {node.name} has Python {version} at {interpreter(node)}; skyctl needs 3.11 or newer",
            node=node.name,
            hint="name a newer one in cluster.yaml: `python: /path/to/python3`",
        )
    digest, archive = node_archive()
    config |= {"package": digest, "env": dict(node.env)}
    _write(channel, stage_zero() + base64.b64encode(json.dumps(config).encode()) + b"\n")
    answer = _answer(node, channel, nonce)
    if "need" in answer:
        _write(channel, b"%d\n" % len(archive) + archive)
        answer = _answer(node, channel, nonce)
    if "gone" in answer:
        raise session_gone(node, config["attach"])
    if "ready" not in answer:
        raise _no_room(node, answer)
    if first is not None:
        write_frame(channel.stdin, first)
    frame = read_frame(channel.stdout)
    if frame is None:
        raise EOFError("no hello")
    if frame[0].get("op") == "fault":
        raise _no_room(node, frame[0]) if first is None else _refused(node, config["attach"], frame[0])
    if frame[0].get("op") != "hello":
        raise WireError(f"no hello but {frame[0]}")
    return frame[0]


def session_gone(node: Node, session_id: str) -> SessionGoneError:
    """The error for a session that has ended."""
    return SessionGoneError(
        f"node {node.name} has no session {session_id} any more: it ended, or the node was restarted",
        node=node.name,
        hint="what ran there has ended with it",
    )


def _refused(node: Node, session_id: str, fault: dict[str, Any]) -> SkyctlError:
    if fault.get("gone"):
        return session_gone(node, session_id)
    text = f"session {session_id} of node {node.name} does not take us back: {fault.get('error')}"
    if fault.get("taken"):
        return SessionGoneError(
            text, node=node.name, hint="see which other skyctl process supervises the run"
        )
    return UnreachableError(text, node=node.name)


def _said(node: Node, channel: Channel, nonce: str) -> bytes:
    """What follows the nonce on the next line that begins with it."""
    mark = nonce.encode() + b" "
    noise = 0
    last = b""
    while line := channel.stdout.readline(LINE_BYTES):
        if line.startswith(mark) and line.endswith(b"\n"):
            return line[len(mark) : -1]
        noise += len(line)
        last = line if line.strip() else last
        if noise > NOISE_BYTES:
            raise UnfitError(
                f"node {node.name} prints without end before any command runs: {last[:80]!r}",
                node=node.name,
                hint="look at the shell's start-up files there (~/.bashrc, ~/.profile)",
            )
    raise _nothing_said(node, channel, last)


def _answer(node: Node, channel: Channel, nonce: str) -> dict[str, Any]:
    answer = json.loads(_said(node, channel, nonce))
    if "error" in answer:
        raise _no_room(node, answer)
    return dict(answer)


def _write(channel: Channel, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[channel.stdin.write(view[: 1 << 16]) or 0 :]
    channel.stdin.flush()


def _no_room(node: Node, answer: dict[str, Any]) -> UnfitError:
    return UnfitError(
        f"node {node.name} can't keep skyctl's files in {answer.get('path')}: {answer.get('error')}",
        node=node.name,
        hint="make room there, or name another place: `env: {XDG_CACHE_HOME: /path}` in cluster.yaml",
    )


def _nothing_said(node: Node, channel: Channel, last: bytes) -> NodeError:
    """The command ended before the nonce: why?"""
    status = channel.returncode()
    tail = channel.stderr_tail()
    python = interpreter(node)
    if status in (126, 127) or re.search(r"not found|no such file|unknown command", tail, re.IGNORECASE):
        why = "may not run" if status == 126 else "has no"
        what = f"node {node.name} {why} {python}"
        return UnfitError(
            f"{what}{_tail(channel)}",
            node=node.name,
            hint="name it in cluster.yaml: `python: /path/to/python3`",
        )
    if status is None:
        return UnreachableError(
            f"the connection to node {node.name} ended before {python} had said anything{_tail(channel)}",
            node=node.name,
            hint="try again; too many connections at once, or a restart of its sshd, look like this",
        )
    said = f"; the last it printed: {last.strip()[:200].decode(errors='replace')}" if last else ""
    return UnfitError(
        f"the shell on node {node.name} ended with status {status} before {python} had run"
        f"{_tail(channel)}{said}",
        node=node.name,
        hint="look at the shell's start-up files there (~/.bashrc, ~/.profile): does one of them exit?",
    )


def _late(node: Node, channel: Channel, options: ConnectOptions, *, running: bool) -> UnreachableError:
    after = f"after {options.start_timeout_s:g} s{_tail(channel)}"
    if running:
        return UnreachableError(
            f"node {node.name} let us in, but the session's agent had not answered {after}",
            node=node.name,
            hint="is the node overloaded, or was the agent stopped?",
        )
    return UnreachableError(
        f"node {node.name} let us in, but no agent had started {after}",
        node=node.name,
        hint="look at the shell's start-up files there: does one of them wait for something?",
    )


def _tail(channel: Channel) -> str:
    lines = [line.strip() for line in channel.stderr_tail().splitlines() if line.strip()]
    return f": {' | '.join(lines[-3:])[-500:]}" if lines else ""
