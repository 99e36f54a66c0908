"""Prerequisites of a lab on this machine: programs, folders that nodes see, and each node's Python."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from pathlib import Path

from skyctl.errors import InputError, UnfitError
from skyctl.files import home

_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
_PLACES = "/usr/local/sbin:/usr/sbin:/sbin"


def find_program(name: str) -> str | None:
    """The path of a program, looked for in the folders of system programs too; None where it is missing."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_PLACES}")


def check_machine() -> dict[str, str]:
    """Checks this machine and returns the paths of the programs that a lab needs, by name.

    Raises:
        InputError: not Linux, or not root.
        UnfitError: programs are missing; the hint says what to install.
    """
    if sys.platform != "linux":
        raise InputError(f"a lab needs Linux (namespaces, cgroups); this is {sys.platform}")
    if os.geteuid() != 0:
        raise InputError(
            "a lab needs root (namespaces, cgroups)", hint="run it with sudo, or in a VM as root"
        )
    programs = {name: find_program(name) for name in _PACKAGES}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        packages = " ".join(sorted({_PACKAGES[name] for name in missing}))
        raise UnfitError(
            f"this machine lacks what a lab needs: {', '.join(missing)}",
            node=os.uname().nodename,
            hint=f"apt-get install {packages} (or your system's packages of those names)",
        )
    return {name: path for name, path in programs.items() if path is not None}


def root_home() -> str:
    """The HOME of root, the user that logs in to nodes."""
    return pwd.getpwuid(0).pw_dir


def private_folders(node_folder: Path) -> dict[str, str]:
    """The paths that are mounted over in a node: path there → folder or file of its own."""
    result = {
        root_home(): str(node_folder / "home"),
        "/tmp": str(node_folder / "tmp"),  # noqa: S108
        "/var/tmp": str(node_folder / "vartmp"),  # noqa: S108
        "/etc/hosts": str(node_folder / "etc" / "hosts"),
        "/etc/shadow": str(node_folder / "etc" / "shadow"),
    }
    state = os.path.realpath(home())
    if Path(state).is_dir() and not _hidden(state):
        result[state] = str(node_folder / "nothing")
    return result


def _hidden(path: str) -> bool:
    """Whether a node sees something of its own at that path."""
    hidden = [root_home(), "/tmp", "/var/tmp", "/run", "/dev/shm", os.path.realpath(home())]  # noqa: S108
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in hidden)


def _hides(path: str) -> bool:
    """Whether showing that folder would show the launcher's whole HOME or /tmp."""
    hidden = [root_home(), "/tmp", "/var/tmp", "/run"]  # noqa: S108
    return any(folder == path or folder.startswith(f"{path.rstrip('/')}/") for folder in hidden)


def visible_paths(python: str) -> list[str]:
    """The paths, out of those hidden in a node, that must stay visible there for its interpreter to run.

    Its environment, the installation that was made from, and what links in its site-packages lead to.
    """
    wanted = {python}
    prefix = Path(python).parent.parent
    real = os.path.realpath(python)
    roots = [prefix, Path(real).parent.parent]
    config = prefix / "pyvenv.cfg"
    if config.is_file():
        for line in config.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home":
                roots.append(Path(value.strip()).parent)
    for root in roots:
        path = os.path.normpath(root)
        if not _hides(path):
            wanted |= {path, os.path.realpath(path)}
    wanted.add(real)
    for packages in prefix.glob("lib/python3*/site-packages"):
        wanted |= {os.path.realpath(entry) for entry in packages.iterdir() if entry.is_symlink()}
    hidden = sorted(path for path in wanted if Path(path).exists() and _hidden(path))
    return [p for p in hidden if not any(p != q and p.startswith(f"{q}/") for q in hidden)]


def check_python(node: str, python: str) -> str:
    """The interpreter's absolute path (links kept). Raises InputError where it can't be run."""
    program = python if os.sep in python else shutil.which(python)
    path = os.path.abspath(Path(program).expanduser()) if program else python  # noqa: PTH100  (links are kept)
    if not (Path(path).is_file() and os.access(path, os.X_OK)):
        raise InputError(f"lab node {node!r}: python is {python!r}, which is no program here")
    return path
