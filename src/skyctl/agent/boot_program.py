"""The program that the launcher sends to a bare Python on the node, after ``node_cache.py``'s source.

It receives skyctl's node-side package where the cache lacks it, and becomes the agent. It runs in the
namespace of ``node_cache.py`` (hence the import for type checkers only), and uses nothing of the shell but
standard input and output. ``remote/bootstrap.py`` is the launcher's side.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from skyctl.agent.node_cache import NodeCache, default_cache_root


def read_line() -> bytes:
    """One line from standard input, read byte by byte so that nothing after it is taken."""
    return b"".join(iter(lambda: os.read(0, 1) or b"\n", b"\n"))


def read_exactly(count: int) -> bytes:
    """That many bytes from standard input; ends the process where it ends early."""
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            sys.exit("skyctl: the launcher went away")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def say(nonce: str, message: dict[str, Any]) -> None:
    """One JSON line on standard output, marked with the nonce."""
    data = memoryview(f"\n{nonce} {json.dumps(message)}\n".encode())
    while data:
        data = data[os.write(1, data) :]


def attach(nonce: str, root: Path, session_id: str) -> NoReturn:
    """Turns this process into the relay between the launcher and an agent that runs already."""
    from skyctl.agent import unix_socket

    try:
        sock = unix_socket.connect_to_session(root / "sessions", session_id)
    except (FileNotFoundError, ConnectionRefusedError) as exc:
        say(nonce, {"gone": str(exc)})
        sys.exit(1)
    except OSError as exc:
        say(nonce, {"error": exc.strerror or str(exc), "path": str(root / "sessions" / session_id)})
        sys.exit(1)
    say(nonce, {"ready": session_id})
    sys.exit(unix_socket.relay_streams(sock))


def boot() -> None:
    """Reads the settings, puts the package in place, runs the agent (or a relay to one)."""
    line = read_line()
    if not line:
        sys.exit("skyctl: the launcher went away")
    config = json.loads(base64.b64decode(line))
    nonce, digest = config["nonce"], config["package"]
    os.environ.update(config["env"])
    root = default_cache_root()
    try:
        store = NodeCache(root)
        package = store.tree("packages", digest)
        if package is None:
            say(nonce, {"need": digest})
            package = store.add_tree("packages", digest, read_exactly(int(read_line() or b"0")))
    except (OSError, ValueError) as exc:
        path = getattr(exc, "filename", None) or str(root)
        say(nonce, {"error": getattr(exc, "strerror", None) or str(exc), "path": str(path)})
        sys.exit(1)
    sys.path.insert(0, str(package))
    if "attach" in config:
        attach(nonce, store.root, config["attach"])
    say(nonce, {"ready": str(package)})
    from skyctl.agent.node_agent import run_agent

    sys.exit(run_agent(config, package, store.root))
