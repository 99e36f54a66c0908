"""From a shell on the node to a running agent, with nothing taken for granted about either.

The command is one line, single-quoted, of characters that sh, bash, zsh, fish and csh read alike: a Python
program that prints the nonce and its version (it must parse under any Python), then runs the line it is sent
(``node_package.boot_program_line``). Anything that start-up files print before the nonce is skipped. Settings
and environment go over standard input: nothing secret is ever in an argument. skyctl's own node-side modules
are sent where the node's cache lacks them: a node has Python and torch, and nothing else.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from skyctl.agent.frames import FrameError, Message, read_frame, write_frame
from skyctl.errors import (
    NodeError,
    PythonTooOldError,
    SessionGoneError,
    SkyctlError,
    UnfitError,
    UnreachableError,
)
from skyctl.records.base import describe
from skyctl.records.cluster import Node
from skyctl.remote.agent_messages import (
    EVENTS,
    REPLIES,
    AgentFault,
    AgentHello,
    CacheCleaned,
    CleanedKind,
    parse_agent_message,
)
from skyctl.remote.base import CommandChannel, ConnectOptions, NodeConnection
from skyctl.remote.node_archive import CLEANUP_SOURCE, boot_program_line, node_package_archive

T = TypeVar("T")

MIN_PYTHON = (3, 10)
"""A node's; Ubuntu 22.04 has it. ``make check`` holds what runs on nodes against it."""
MIN_PYTHON_TEXT = ".".join(map(str, MIN_PYTHON))
CACHE_VARIABLE = "XDG_CACHE_HOME"
NONCE_CHARS = 32
MAX_LOGIN_OUTPUT_BYTES = 16 << 20
MAX_LOGIN_LINE_BYTES = 1 << 20
STARTUP_FILES = "~/.bashrc, ~/.profile, ~/.zshenv, ~/.config/fish/config.fish, ~/.cshrc"
SESSION_TAKEN_HINT = "see which other skyctl process supervises the run"
LOADER_PROGRAM = (
    "import os,sys;v=sys.version_info;sys.path[:]=[p for p in sys.path if p];"
    'os.write(1,("\\n%s %d.%d.%d\\n"%("NONCE",v[0],v[1],v[2])).encode());'
    f"v[:2]<{MIN_PYTHON} and sys.exit(0);"
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
        UnfitError: no Python, one too old (PythonTooOldError), or no room for the package.
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


def clean_node_cache(
    node_connection: NodeConnection, options: ConnectOptions, *, dry_run: bool
) -> Sequence[CleanedKind]:
    """Removes from the node's cache what no process there uses (``agent.cache_cleanup``); needs no agent.

    Args:
        options: ``start_timeout_s``: how long that may take.
        dry_run: what would be removed, and nothing is changed.

    Raises:
        NodeError: as ``start_agent``.
    """
    node = node_connection.node

    def exchange(channel: CommandChannel, nonce: str) -> Sequence[CleanedKind]:
        config = {"nonce": nonce, "clean": {"dry_run": dry_run}}
        _send_boot_program(node, channel, config, CLEANUP_SOURCE)
        try:
            return CacheCleaned.model_validate(_read_answer(node, channel, nonce)).cleaned
        except ValidationError as exc:
            raise FrameError(describe(exc, limit=1)) from exc

    channel, cleaned = open_channel(node_connection, options, exchange)
    channel.close()
    return cleaned


def _open_agent_channel(
    node_connection: NodeConnection,
    options: ConnectOptions,
    config: dict[str, Any],
    first: dict[str, Any] | None,
) -> tuple[CommandChannel, AgentHello]:
    def exchange(channel: CommandChannel, nonce: str) -> AgentHello:
        return _exchange_hello(node_connection.node, channel, {**config, "nonce": nonce}, first)

    return open_channel(node_connection, options, exchange, running=first is not None)


def open_channel(
    node_connection: NodeConnection,
    options: ConnectOptions,
    exchange: Callable[[CommandChannel, str], T],
    *,
    command: str | None = None,
    running: bool = False,
) -> tuple[CommandChannel, T]:
    """A channel with a command started, and what ``exchange`` makes of it; that gets channel and nonce.

    Args:
        options: ``start_timeout_s``: how long the exchange may take.
        command: for the shell; None: Python's loader.
        running: the agent should run already.

    Raises:
        NodeError: as ``start_agent``, and what ``exchange`` raises.
    """
    node, nonce = node_connection.node, secrets.token_hex(NONCE_CHARS // 2)
    channel = node_connection.open(command or loader_command(node, nonce))
    late = threading.Event()

    def give_up() -> None:
        late.set()
        channel.close()

    timer = threading.Timer(options.start_timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        return channel, exchange(channel, nonce)
    except (OSError, EOFError, ValueError, SkyctlError) as exc:
        channel.close()
        if late.is_set():
            raise _start_timeout_error(node, channel, options, running=running) from exc
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


def _exchange_hello(
    node: Node, channel: CommandChannel, config: Message, first: Message | None
) -> AgentHello:
    """From the loader's first line to the agent's hello, or why there is none."""
    nonce = config["nonce"]
    digest, archive = node_package_archive()
    _send_boot_program(node, channel, {**config, "package": digest})
    answer = _read_answer(node, channel, nonce)
    if "need" in answer:
        write_all(channel, b"%d\n" % len(archive) + archive)
        answer = _read_answer(node, channel, nonce)
    if "gone" in answer:
        raise session_gone_error(node, config["attach"])
    if "ready" not in answer:
        raise _cache_error(node, None, None)
    if first is not None:
        write_frame(channel.stdin, first)
    frame = read_frame(channel.stdout)
    if frame is None:
        raise EOFError("no hello")
    message = parse_agent_message(frame[0])
    if isinstance(message, AgentFault):
        if first is None:
            raise _cache_error(node, message.error, message.path, message.hint)
        raise _resume_refused_error(node, config["attach"], message)
    if not isinstance(message, AgentHello):
        raise FrameError(f"no hello but {frame[0]}")
    return message


def _send_boot_program(node: Node, channel: CommandChannel, config: Message, *more: str) -> None:
    """Waits for the loader's first line, then sends the boot program, with ``more`` sources, and settings."""
    version = read_marked_line(node, channel, config["nonce"]).decode(errors="replace")
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_PYTHON:
        error = PythonTooOldError(
            f"node {node.name} has Python {version} at {node_python(node)}; "
            f"skyctl needs {MIN_PYTHON_TEXT} or newer",
            node=node.name,
            hint=f"`skyctl setup --limit {node.name}` brings one; or name a newer one in cluster.yaml: "
            "`python: /path/to/python3` (`uv python install 3.12` brings one without root)",
        )
        error.version = version
        raise error
    settings = json.dumps({**config, "env": dict(node.env)}).encode()
    write_all(channel, boot_program_line(*more) + base64.b64encode(settings) + b"\n")


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


def read_marked_line(node: Node, channel: CommandChannel, nonce: str) -> bytes:
    """The rest, after the nonce, of the next line that begins with it. Raises NodeError where none comes."""
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
                hint=f"look at the shell's start-up files there ({STARTUP_FILES})",
            )
    raise _no_output_error(node, channel, last)


def _read_answer(node: Node, channel: CommandChannel, nonce: str) -> dict[str, Any]:
    answer = json.loads(read_marked_line(node, channel, nonce))
    if "error" in answer:
        variable = str(answer.get("variable", CACHE_VARIABLE))
        raise _cache_error(node, answer["error"], answer.get("path"), answer.get("hint"), variable)
    return dict(answer)


def write_all(channel: CommandChannel, data: bytes) -> None:
    """Writes it to the command. Raises OSError where that has ended."""
    view = memoryview(data)
    while view:
        view = view[channel.stdin.write(view[: 1 << 16]) or 0 :]
    channel.stdin.flush()


def _cache_error(
    node: Node, error: str | None, path: str | None, hint: str | None = None, variable: str = CACHE_VARIABLE
) -> UnfitError:
    """``variable``: names another place for it."""
    place = f"or name another place: `env: {{{variable}: /path}}` in cluster.yaml"
    return UnfitError(
        f"node {node.name} can't keep skyctl's files in {path}: {error}",
        node=node.name,
        hint=f"{hint or 'it has to be writable, and have room'}; {place}",
    )


def _no_output_error(node: Node, channel: CommandChannel, last: bytes) -> NodeError:
    """The command ended before the nonce: why?"""
    status = channel.returncode()
    python = node_python(node)
    if status in (126, 127):
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
    quoted = f"; the last it printed: {last.strip()[:200].decode(errors='replace')}" if last else ""
    return UnfitError(
        f"the shell on node {node.name} ended with status {status} before {python} had run"
        f"{_stderr_suffix(channel)}{quoted}",
        node=node.name,
        hint=f"look at the shell's start-up files there ({STARTUP_FILES}): does one of them exit? "
        f"A csh ends so, too, where it finds no {python}; name one: `python: /path/to/python3`",
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
    quoted = LOADER_PROGRAM.partition("NONCE")[0]  # fish repeats what it can't run
    lines = [line.strip() for line in channel.stderr_tail().splitlines() if quoted not in line]
    lines = [line for line in lines if line]
    return f": {' | '.join(lines[-3:])[-500:]}" if lines else ""
