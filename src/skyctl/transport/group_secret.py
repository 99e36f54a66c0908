"""The secret that all ranks of a script's own group share: where the environment says that it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from skyctl.errors import RunError

SECRET_FILE, SECRET_DESCRIPTOR = "SKYCTL_SECRET_FILE", "SKYCTL_SECRET_FD"
"""The variables that say where the secret is: a file that its owner alone can read, or a descriptor."""
LEAST_SECRET_BYTES = 16


def read_secret(environment: Mapping[str, str]) -> bytes:
    """The secret that the environment says where to find.

    Raises:
        RunError: it does not say, or others could read it, or it is too short.
    """
    if number := environment.get(SECRET_DESCRIPTOR):
        with open(int(number), "rb", closefd=False) as file:
            secret = file.read().strip()
        where = f"descriptor {number}"
    elif name := environment.get(SECRET_FILE):
        with Path(name).open("rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
                raise RunError(
                    f"{name} holds the secret of a process group, and others than this user can read it",
                    hint=f"chmod 600 {name}, a file of your own; if others saw it, make another secret",
                )
            secret = file.read().strip()
        where = name
    else:
        raise RunError(
            "ranks over the backend skyctl have to share a secret, and there is none",
            hint=f"openssl rand -hex 32 > secret; chmod 600 secret; {SECRET_FILE}=secret, on each machine",
        )
    if len(secret) < LEAST_SECRET_BYTES:
        raise RunError(
            f"the secret in {where} has {len(secret)} bytes; it needs {LEAST_SECRET_BYTES}",
            hint="openssl rand -hex 32 makes one",
        )
    return secret


@cache
def secret_of_process() -> bytes:
    """The secret of the environment: once, since what a pipe has given is gone."""
    return read_secret(os.environ)
