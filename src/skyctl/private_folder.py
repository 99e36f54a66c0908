"""Folders that nobody else can put anything into: how they are made, and how one that is there is judged.

Files that run (shipped code, environments) or decide what runs are safe only if nobody else can write to
their folder or replace it. So the way to it is walked from the root of the file system, a descriptor at a
time, and judged as OpenSSH does for ``authorized_keys`` (``StrictModes``): every folder and link on it
belongs to this user or root, and nobody else may write there, unless its sticky bit is set (``/tmp``).
A group may write that has no other member, as under the umask 002 of Debian and Red Hat.

Standard library only, and it must import nothing of skyctl: the bootstrap sends this source to nodes.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import shlex
import stat
from collections import deque
from pathlib import Path

MAX_LINKS = 40
MAX_NAMED_MEMBERS = 3
ACL_ATTRIBUTE = "system.posix_acl_access"
_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafeFolderError(PermissionError):
    """Somebody else could put things into a folder, or another folder in its place.

    ``strerror`` says who, ``filename`` which folder or link it is, ``hint`` what to do about it there.
    """

    def __init__(self, path: str, who: str, hint: str) -> None:
        super().__init__(errno.EPERM, who, path)
        self.hint = hint


def make_private_folder(path: Path) -> Path:
    """Makes a folder and its missing parents (0700), or judges what is there.

    If others may read the folder, but not write to it, it becomes 0700.

    Raises:
        UnsafeFolderError: somebody else can put things there, or could until now.
        OSError: the system refuses; it names the path.
    """
    _walk(path, make=True, close=True)
    return path


def check_private_folder(path: Path, *, make: bool = False) -> Path:
    """Judges a folder as ``make_private_folder`` does, and leaves its mode as it is: others may read it.

    Args:
        make: make it (0700) where it is missing.

    Raises:
        UnsafeFolderError: somebody else can put things there.
        FileNotFoundError: it is missing.
        OSError: the system refuses; it names the path.
    """
    _walk(path, make=make, close=False)
    return path


def _walk(path: Path, *, make: bool, close: bool) -> None:
    """Judges every folder and link from the root to ``path``; ``close``: the last folder becomes 0700.

    A path that has passed stays what it is: those who could change it are this user and root.
    """
    todo = deque(_parts(os.path.join(os.getcwd(), path)))  # noqa: PTH109, PTH118 - ".." is left to the system
    here, links = "/", 0
    with contextlib.ExitStack() as opened:
        at = _open_folder("/", None, opened)
        _judge_folder(at, here, is_last=not todo)
        while todo:
            name = todo.popleft()
            there = os.path.normpath(Path(here, name))
            try:
                status = _look_up(name, at, make=make)
                if stat.S_ISLNK(status.st_mode):
                    links += 1
                    if links > MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), there)
                    _judge_owner(status.st_uid, there, may_be_root=True)
                    target = os.readlink(name, dir_fd=at)
                    todo.extendleft(reversed(_parts(target)))
                    if target.startswith("/"):
                        at, here = _open_folder("/", None, opened), "/"
                    continue
                parent, at, here = at, _open_folder(name, at, opened), there
                mode = _judge_folder(at, here, is_last=not todo)
                if close and not todo and mode & 0o077:
                    os.chmod(name, 0o700, dir_fd=parent)
            except UnsafeFolderError:
                raise
            except OSError as exc:
                raise OSError(exc.errno, os.strerror(exc.errno or 0), there) from exc


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _open_folder(name: str, parent: int | None, opened: contextlib.ExitStack) -> int:
    fd = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    opened.callback(os.close, fd)
    return fd


def _look_up(name: str, parent: int, *, make: bool) -> os.stat_result:
    """The status of that entry; if nothing is there and ``make`` is set, it is a new folder."""
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # another process was quicker
        os.mkdir(name, 0o700, dir_fd=parent)
    return os.stat(name, dir_fd=parent, follow_symlinks=False)


def _judge_folder(fd: int, path: str, *, is_last: bool) -> int:
    """The folder's permissions; UnsafeFolderError where somebody else may change what is in it."""
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    _judge_owner(status.st_uid, path, may_be_root=not is_last)
    if mode & stat.S_ISVTX and not is_last:
        return mode  # what lies in it can be replaced by its owner only, who is judged next
    who = _find_other_writers(fd, status)
    if who is not None:
        quoted = shlex.quote(path)
        hint = f"`chmod go-w {quoted}` there"
        if is_last:
            hint = f"what others have put into it must go: look at it there, then `rm -r {quoted}`"
        raise UnsafeFolderError(path, who, hint)
    return mode


def _judge_owner(owner: int, path: str, *, may_be_root: bool) -> None:
    if owner in _own_ids() or (may_be_root and owner in (0, _unmapped_id())):
        return
    who = f"it belongs to {_user_name(owner)}, not to {_user_name(os.geteuid())}"
    raise UnsafeFolderError(path, who, f"`ls -ld {shlex.quote(path)}` there shows it; remove it or move it")


def _own_ids() -> set[int]:
    """This user's, and under sudo that of who typed it, who can be root anyway and whose home it may be."""
    sudo = os.environ.get("SUDO_UID", "")
    return {os.geteuid()} | ({int(sudo)} if os.geteuid() == 0 and sudo.isdecimal() else set())


def _unmapped_id() -> int | None:
    """In a container's user namespace the owner that all users outside of it have, root too; else None."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


def _find_other_writers(fd: int, status: os.stat_result) -> str | None:
    """The users beside this one and root who may write to a folder, as a clause; None: there are none."""
    if status.st_mode & stat.S_IWOTH:
        return "anybody may write to it"
    if not status.st_mode & stat.S_IWGRP:
        return None
    with contextlib.suppress(OSError, AttributeError):  # no ACL, or a system without them
        os.getxattr(f"/proc/self/fd/{fd}", ACL_ATTRIBUTE)  # its mask is what the group's permission shows
        return "its access control list may let others write to it"
    return _find_other_members(status.st_gid)


def _find_other_members(gid: int) -> str | None:
    """Other members of a group that may write, as a clause; None if it is this user's (or root's) alone."""
    own = _own_ids()
    users = pwd.getpwall()
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return f"group {gid} may write to it, and the system doesn't know who is in that"
    members = set(group.gr_mem) | {user.pw_name for user in users if user.pw_gid == gid}
    others = sorted(name for name in members if _user_id(name) not in own | {0})
    if others:
        more = f" and {len(others) - MAX_NAMED_MEMBERS} more" if len(others) > MAX_NAMED_MEMBERS else ""
        named = ", ".join(others[:MAX_NAMED_MEMBERS])
        return f"group {group.gr_name} may write to it, which has {named}{more} in it"
    # A directory service may not list its users, and so not whose first group this is.
    if any(user.pw_uid in own for user in users) or group.gr_name in map(_user_name, own):
        return None
    return f"group {group.gr_name} may write to it, and the system doesn't say who else is in that"


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _user_id(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None
