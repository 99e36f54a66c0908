"""The process that is a lab's node: PID 1 of its own PID namespace, with sshd as its child.

Started as root by ``lab_setup.up`` with its configuration (JSON) on stdin; answers in JSON lines on stdout:
``{"pid": n}`` as soon as the namespaces stand, then ``{"ready": true}`` or ``{"error": "…"}``. Killing it
kills all that runs in the node. Standard library only, everything imported before anything is hidden.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (what the codecs load late must be loaded before HOME is hidden)
import json
import os
import signal
import socket
import sys
from typing import Any

from skyctl.lab import system_calls

RUN_BYTES = 64 << 20
SSHD_CONFIG = """\
Port 22
ListenAddress 0.0.0.0
HostKey /run/skyctl/host_key
AuthorizedKeysFile /run/skyctl/authorized_keys
PidFile /run/sshd.pid
UsePAM no
PermitRootLogin prohibit-password
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
PrintMotd no
PrintLastLog no
Subsystem sftp internal-sftp
"""


def main() -> None:
    """Makes the namespaces, leaves a child behind as the node, and returns."""
    config = json.load(sys.stdin)
    for folder in config["cgroups"]:
        _write(f"{folder}/cgroup.procs", "0")
    flags = (
        system_calls.CLONE_NEWNS
        | system_calls.CLONE_NEWNET
        | system_calls.CLONE_NEWUTS
        | system_calls.CLONE_NEWIPC
    )
    try:
        system_calls.unshare(flags | system_calls.CLONE_NEWPID)
    except OSError as exc:
        system_calls.say({"error": str(exc)})
        return
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        system_calls.say({"pid": pid})
        return  # and so closes the pipe: the child speaks second, however quick it is
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    try:
        _become(config)
        sshd = _start_sshd(config)
    except OSError as exc:
        system_calls.say({"error": str(exc)})
        os._exit(1)
    system_calls.say({"ready": True, "sshd": sshd})
    system_calls.leave_launcher()
    _reap_for_ever()


def _write(path: str, text: str, mode: int = 0o644) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _become(config: dict[str, Any]) -> None:
    """Gives this process its own view: HOME, /tmp, /run, /dev/shm, /proc, /sys, hosts, host name."""
    system_calls.mount("none", "/", None, system_calls.MS_REC | system_calls.MS_PRIVATE)
    socket.sethostname(config["hostname"])
    system_calls.disable_ipv6()
    system_calls.configure_tcp()
    # Sources are opened first: their paths may lie below what is hidden next.
    private = {target: os.open(source, os.O_PATH) for target, source in config["private"].items()}
    shown = {path: os.open(path, os.O_PATH) for path in config["shown"]}
    cgroup = os.open("/sys/fs/cgroup", os.O_PATH)
    with contextlib.suppress(OSError):  # an older kernel: the node could write outside its own folders
        system_calls.set_readonly("/", True, recursive=True)
    for target, fd in private.items():
        if os.path.exists(target):  # noqa: PTH110  (pathlib is not needed for this alone)
            system_calls.bind_mount(fd, target)
            with contextlib.suppress(OSError):
                system_calls.set_readonly(target, False)
    nodev = system_calls.MS_NOSUID | system_calls.MS_NODEV
    system_calls.mount("tmpfs", "/run", "tmpfs", nodev, f"mode=755,size={RUN_BYTES}")
    for path, fd in shown.items():
        _mount_point(path, fd)
        system_calls.bind_mount(fd, path, recursive=True)
    system_calls.mount("tmpfs", "/dev/shm", "tmpfs", nodev, "mode=1777")  # noqa: S108
    system_calls.mount("devpts", "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=0620")
    with contextlib.suppress(OSError):
        system_calls.mount("/dev/pts/ptmx", "/dev/ptmx", None, system_calls.MS_BIND)
    system_calls.mount("proc", "/proc", "proc", nodev | system_calls.MS_NOEXEC)
    # A sysfs of the own network namespace, with the cgroups (read-only by now) put back into it.
    system_calls.mount("sysfs", "/sys", "sysfs", nodev | system_calls.MS_NOEXEC | system_calls.MS_RDONLY)
    system_calls.bind_mount(cgroup, "/sys/fs/cgroup", recursive=True)
    for fd in (*private.values(), *shown.values(), cgroup):
        os.close(fd)
    os.chdir("/")
    if not os.access(config["python"], os.X_OK):
        raise OSError(f"the interpreter {config['python']} can't be seen inside the node")


def _mount_point(path: str, fd: int) -> None:
    if os.path.lexists(path):
        return
    is_folder = os.path.isdir(f"/proc/self/fd/{fd}")  # noqa: PTH112
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    if not is_folder:
        _write(path, "")


def _start_sshd(config: dict[str, Any]) -> int:
    os.makedirs("/run/sshd", mode=0o755)  # noqa: PTH103
    os.makedirs("/run/lock", mode=0o1777, exist_ok=True)  # noqa: PTH103
    os.makedirs("/run/skyctl", mode=0o755)  # noqa: PTH103
    _write("/run/skyctl/host_key", config["host_key"], 0o600)
    _write("/run/skyctl/authorized_keys", config["authorized_key"], 0o600)
    _write("/run/skyctl/sshd_config", SSHD_CONFIG, 0o600)
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    argv = [config["sshd"], "-D", "-e", "-f", "/run/skyctl/sshd_config"]
    return os.execve(config["sshd"], argv, environment)  # noqa: S606


def _reap_for_ever() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        signal.sigwait({signal.SIGCHLD})
