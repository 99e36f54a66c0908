"""From a shell on the node to a running agent, with nothing taken for granted about either.

The command is one line, single-quoted, of characters that sh, bash, zsh, fish and csh read alike: a Python
program that prints the nonce and its version (it must parse under any Python), then runs the line it is sent,
which is ``agent/node_cache.py`` and ``agent/boot_program.py``. Whatever start-up files print before the nonce
is skipped. Settings and environment go over standard input: nothing secret is ever in an argument. skyctl's
own node-side modules are sent where the node's cache lacks them: a node has Python and torch, and nothing
else.
"""

from __future__ import annotations

import base64
import functools
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
from skyctl.agent.frames import FrameError, Message, read_frame, write_frame
from skyctl.agent.node_cache import pack_archive
from skyctl.errors import NodeError, SessionGoneError, SkyctlError, UnfitError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.agent_messages import EVENTS, REPLIES, AgentFault, AgentHello, parse_agent_message
from skyctl.remote.base import CommandChannel, ConnectOptions, NodeConnection

NODE_PACKAGES = (
    "agent",
    "schedule",
    "workload",
    "checkpoint",
    "device",
    "transport",
    "worker",
    "probe/node",
    "setup/node",
)
NODE_MODULES = (
    "__init__.py",
    "errors.py",
    "probe/__init__.py",
    "check/__init__.py",
    "check/check_task.py",
    "setup/__init__.py",
)
MIN_PYTHON = (3, 11)
MAX_LOGIN_OUTPUT_BYTES = 16 << 20
MAX_LOGIN_LINE_BYTES = 1 << 20
SESSION_TAKEN_HINT = "see which other skyctl process supervises the run"
LOADER_PROGRAM = (
    "import os,sys;v=sys.version_info;sys.path[:]=[p for p in sys.path if p];"
    'os.write(1,("\\n%s %d.%d.%d\\n"%("NONCE",v[0],v[1],v[2])).encode());'
    "v[:2]<(3,11) and sys.exit(0);"
    "import base64,zlib;"
    'b=b"".join(iter(lambda:os.read(0,1)or b"\\n",b"\\n"));'
    'eval(compile(zlib.decompress(base64.b64decode(b)),"skyctl-boot","exec"),{"__name__":"skyctl_boot"})'
)


def start_agent(
    node_connection: NodeConnection, options: ConnectOptions, owner: str = ""
) -> tuple[CommandChannel, AgentHello]:
    """Opens a channel and starts an agent on it.

    Args:
        owner: a secret by which the agent of a resumable session recognises its launcher.

    Returns:
        the channel, ready for frames, and the agent's hello.

    Raises:
        UnfitError: no Python, one too old, or no room for the package.
        UnreachableError: the connection ended, or nothing arrived in time.
    """
    config: dict[str, Any] = {"lease_s": options.lease_s, "grace_s": options.grace_s}
    if options.hold_s:
        config |= {"hold_s": options.hold_s, "owner": owner}
    return _open_agent_channel(node_connection, options, config, None)


def attach_agent(
    node_connection: NodeConnection,
    options: ConnectOptions,
    session_id: str,
    owner: str,
    arrived: dict[str, int],
    *,
    adopt: bool = False,
) -> tuple[CommandChannel, AgentHello]:
    """Opens a channel to an agent that runs already.

    Args:
        owner: the launcher's secret.
        arrived: up to which number the launcher has the agent's messages, by sequence.
        adopt: take the session over from another launcher.

    Returns:
        the channel, ready for frames, and the agent's hello.

    Raises:
        SessionGoneError: it has ended, or belongs to another launcher.
        NodeError: as ``start_agent``.
    """
    resume = {"op": "resume", "owner": owner, "adopt": adopt, EVENTS: 0, REPLIES: 0, **arrived}
    return _open_agent_channel(node_connection, options, {"attach": session_id}, resume)


def _open_agent_channel(
    node_connection: NodeConnection,
    options: ConnectOptions,
    config: dict[str, Any],
    first: dict[str, Any] | None,
) -> tuple[CommandChannel, AgentHello]:
    node, nonce = node_connection.node, secrets.token_hex(16)
    channel = node_connection.open(loader_command(node, nonce))
    late = threading.Event()

    def give_up() -> None:
        late.set()
        channel.close()

    timer = threading.Timer(options.start_timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        return channel, _exchange_hello(node, channel, {**config, "nonce": nonce}, first)
    except (OSError, EOFError, ValueError, SkyctlError) as exc:
        channel.close()
        if late.is_set():
            raise _start_timeout_error(
                node_connection.node, channel, options, running=first is not None
            ) from exc
        if isinstance(exc, SkyctlError):
            raise
        what = f"ended while its agent was starting{_stderr_suffix(channel)}"
        if isinstance(exc, FrameError):
            what = f"is not usable: what came is not from its agent ({exc})"
        raise UnreachableError(
            f"the connection to node {node.name} {what}",
            node=node.name,
            hint="try again; `skyctl check` shows what is wrong with the node",
        ) from exc
    except BaseException:
        channel.close()
        raise
    finally:
        timer.cancel()
        timer.join()


@functools.cache
def node_package_files() -> dict[str, bytes]:
    """Path (``skyctl/…``) to source, of every module that may run on a node."""
    root = Path(__file__).resolve().parent.parent
    paths = [root / name for name in NODE_MODULES]
    for room in NODE_PACKAGES:
        paths += sorted((root / room).rglob("*.py"))
    return {f"skyctl/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}


@functools.cache
def node_package_archive() -> tuple[str, bytes]:
    """The package's digest and archive."""
    return pack_archive(node_package_files())


def node_python(node: Node) -> str:
    """The node's Python. A local node's default is the one that runs us, which has torch."""
    if node.transport == "local" and node.python == "python3":
        return sys.executable or "python3"
    return node.python


def loader_command(node: Node, nonce: str) -> str:
    """The shell command. A leading ``~`` or ``~user`` is left to the shell."""
    python = node_python(node)
    home, slash, rest = python.partition("/")
    if re.fullmatch(r"~[A-Za-z0-9._-]*", home) and slash:
        quoted = f"{home}/{shlex.quote(rest)}"
    else:
        quoted = shlex.quote(python)
    return f"{quoted} -u -c {shlex.quote(LOADER_PROGRAM.replace('NONCE', nonce))}"


def boot_program_line() -> bytes:
    """What the first line runs, as one line."""
    folder = Path(skyctl.agent.__file__).parent
    sources = [(folder / name).read_text() for name in ("node_cache.py", "boot_program.py")]
    future = "from __future__ import annotations\n"
    text = future + "".join(source.replace(future, "") for source in sources) + "\nboot()\n"
    return base64.b64encode(zlib.compress(text.encode(), 9)) + b"\n"


def _exchange_hello(
    node: Node, channel: CommandChannel, config: Message, first: Message | None
) -> AgentHello:
    """From the loader's first line to the agent's hello, or why there is none."""
    nonce = config["nonce"]
    version = _read_marked_line(node, channel, nonce).decode(errors="replace")
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_PYTHON:
        raise UnfitError(
            f"node {node.name} has Python {version} at {node_python(node)}; skyctl needs 3.11 or newer",
            node=node.name,
            hint="name a newer one in cluster.yaml: `python: /path/to/python3`",
        )
    digest, archive = node_package_archive()
    config |= {"package": digest, "env": dict(node.env)}
    _write_all(channel, boot_program_line() + base64.b64encode(json.dumps(config).encode()) + b"\n")
    answer = _read_answer(node, channel, nonce)
    if "need" in answer:
        _write_all(channel, b"%d\n" % len(archive) + archive)
        answer = _read_answer(node, channel, nonce)
    if "gone" in answer:
        raise session_gone_error(node, config["attach"])
    if "ready" not in answer:
        raise _cache_error(node, answer.get("error"), answer.get("path"))
    if first is not None:
        write_frame(channel.stdin, first)
    frame = read_frame(channel.stdout)
    if frame is None:
        raise EOFError("no hello")
    message = parse_agent_message(frame[0])
    if isinstance(message, AgentFault):
        if first is None:
            raise _cache_error(node, message.error, message.path)
        raise _resume_refused_error(node, config["attach"], message)
    if not isinstance(message, AgentHello):
        raise FrameError(f"no hello but {frame[0]}")
    return message


def session_gone_error(node: Node, session_id: str) -> SessionGoneError:
    """The error for a session that has ended."""
    return SessionGoneError(
        f"node {node.name} has no session {session_id} any more: it ended, or the node was restarted",
        node=node.name,
        hint="what ran there has ended with it",
    )


def _resume_refused_error(node: Node, session_id: str, fault: AgentFault) -> SkyctlError:
    if fault.gone:
        return session_gone_error(node, session_id)
    text = f"session {session_id} of node {node.name} does not take us back: {fault.error}"
    if fault.taken:
        return SessionGoneError(text, node=node.name, hint=SESSION_TAKEN_HINT)
    return UnreachableError(text, node=node.name)


def _read_marked_line(node: Node, channel: CommandChannel, nonce: str) -> bytes:
    """What follows the nonce on the next line that begins with it."""
    mark = nonce.encode() + b" "
    noise = 0
    last = b""
    while line := channel.stdout.readline(MAX_LOGIN_LINE_BYTES):
        if line.startswith(mark) and line.endswith(b"\n"):
            return line[len(mark) : -1]
        noise += len(line)
        last = line if line.strip() else last
        if noise > MAX_LOGIN_OUTPUT_BYTES:
            raise UnfitError(
                f"node {node.name} prints without end before any command runs: {last[:80]!r}",
                node=node.name,
                hint="look at the shell's start-up files there (~/.bashrc, ~/.profile)",
            )
    raise _no_output_error(node, channel, last)


def _read_answer(node: Node, channel: CommandChannel, nonce: str) -> dict[str, Any]:
    answer = json.loads(_read_marked_line(node, channel, nonce))
    if "error" in answer:
        raise _cache_error(node, answer["error"], answer.get("path"))
    return dict(answer)


def _write_all(channel: CommandChannel, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[channel.stdin.write(view[: 1 << 16]) or 0 :]
    channel.stdin.flush()


def _cache_error(node: Node, error: str | None, path: str | None) -> UnfitError:
    return UnfitError(
        f"node {node.name} can't keep skyctl's files in {path}: {error}",
        node=node.name,
        hint="make room there, or name another place: `env: {XDG_CACHE_HOME: /path}` in cluster.yaml",
    )


def _no_output_error(node: Node, channel: CommandChannel, last: bytes) -> NodeError:
    """The command ended before the nonce: why?"""
    status = channel.returncode()
    tail = channel.stderr_tail()
    python = node_python(node)
    if status in (126, 127) or re.search(r"not found|no such file|unknown command", tail, re.IGNORECASE):
        why = "may not run" if status == 126 else "has no"
        what = f"node {node.name} {why} {python}"
        return UnfitError(
            f"{what}{_stderr_suffix(channel)}",
            node=node.name,
            hint="name it in cluster.yaml: `python: /path/to/python3`",
        )
    if status is None:
        return UnreachableError(
            f"the connection to node {node.name} ended before {python} had printed anything"
            f"{_stderr_suffix(channel)}",
            node=node.name,
            hint="try again; too many connections at once, or a restart of its sshd, look like this",
        )
    said = f"; the last it printed: {last.strip()[:200].decode(errors='replace')}" if last else ""
    return UnfitError(
        f"the shell on node {node.name} ended with status {status} before {python} had run"
        f"{_stderr_suffix(channel)}{said}",
        node=node.name,
        hint="look at the shell's start-up files there (~/.bashrc, ~/.profile): does one of them exit?",
    )


def _start_timeout_error(
    node: Node, channel: CommandChannel, options: ConnectOptions, *, running: bool
) -> UnreachableError:
    after = f"after {options.start_timeout_s:g} s{_stderr_suffix(channel)}"
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


def _stderr_suffix(channel: CommandChannel) -> str:
    lines = [line.strip() for line in channel.stderr_tail().splitlines() if line.strip()]
    return f": {' | '.join(lines[-3:])[-500:]}" if lines else ""
