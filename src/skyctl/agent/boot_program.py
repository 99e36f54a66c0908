"""The program that the launcher sends to a bare Python on the node, after the sources of what it needs.

It receives skyctl's node-side package where the cache lacks it, and becomes the agent. All these sources run
in one namespace, without the lines that begin with ``from skyctl``. Nothing of the shell is used but standard
input and output. ``remote/bootstrap.py`` is the launcher's side.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from skyctl.agent.cache_cleanup import clean_cache
from skyctl.agent.node_cache import ENVIRONMENT_MARKER, NodeCache, default_cache_root
from skyctl.private_folder import check_private_folder


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
    """Reads the settings, puts the package in place, runs the agent (or a relay to one, or cleans up)."""
    line = read_line()
    if not line:
        sys.exit("skyctl: the launcher went away")
    config = json.loads(base64.b64decode(line))
    nonce = config["nonce"]
    os.environ.update(config["env"])
    root, variable = default_cache_root(), "XDG_DATA_HOME"
    try:
        if (Path(sys.prefix) / ENVIRONMENT_MARKER).exists():
            check_private_folder(Path(sys.prefix))
        variable = "XDG_CACHE_HOME"
        if "clean" in config:
            say(nonce, {"cleaned": clean_cache(root, dry_run=config["clean"]["dry_run"])})
            return
        store = NodeCache(root)
        package = put_package(nonce, store, config["package"])
    except (OSError, ValueError) as exc:
        path = getattr(exc, "filename", None) or str(root)
        reason, hint = getattr(exc, "strerror", None) or str(exc), getattr(exc, "hint", None)
        say(nonce, {"error": reason, "path": str(path), "hint": hint, "variable": variable})
        sys.exit(1)
    sys.path.insert(0, str(package))
    if "attach" in config:
        attach(nonce, store.root, config["attach"])
    say(nonce, {"ready": str(package)})
    from skyctl.agent.node_agent import run_agent

    sys.exit(run_agent(config, package, store.root))


def put_package(nonce: str, store: NodeCache, digest: str) -> Path:
    """The folder of skyctl's node side, sent by the launcher where the cache has no whole one."""
    package = store.tree("packages", digest)
    if package is None:
        say(nonce, {"need": digest})
        package = store.add_tree("packages", digest, read_exactly(int(read_line() or b"0")))
    return package
