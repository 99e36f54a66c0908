"""The node's part of ``skyctl check``. Task: ``skyctl.check.check_task``.

By what it gets (``check_orders``) it answers:

- ``RouteRequest`` (``agent.network_interfaces``) → ``address``, or None;
- ``TorchOrder`` → versions, devices, what dtypes they compute in; a crash of torch ends this task alone;
- ``CountAcceleratorsOrder`` → ``count``, ``source``: torch, or where it can't be imported ``nvidia-smi``;
- ``ServeOrder`` → each request with ``{"event": "answer", "id", …}``, until told to stop.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyctl.agent.message_fields import with_index
from skyctl.agent.network_interfaces import RouteRequest, find_source_address
from skyctl.agent.task_orders import read_order, read_request
from skyctl.check.check_orders import (
    CHECK_ORDERS,
    CHECK_REQUESTS,
    ClockRequest,
    ConnectRequest,
    CountAcceleratorsOrder,
    EnvironmentRequest,
    ListenRequest,
    PeerPort,
    StopCheckRequest,
    TorchOrder,
)
from skyctl.device.nvidia_smi import run_nvidia_smi
from skyctl.setup.node.environment_store import free_bytes
from skyctl.transport.handshake import (
    AuthenticatingListener,
    AuthenticationError,
    authenticate,
    open_listener,
)

PURPOSE = "check"
_CONNECTIONS_AT_ONCE = 32
_FOREVER_S = 86400.0


def main(message: dict[str, Any], channel: Any) -> dict[str, Any]:
    """The task that serves one ``skyctl check`` on a node, as the module says.

    Raises:
        MismatchError, RecordError: it can't follow the order.
    """
    if "op" in message:
        return {"address": find_source_address(list(read_request([RouteRequest], message).towards))}
    order = read_order(CHECK_ORDERS, message)
    if isinstance(order, TorchOrder):
        return _torch_environment(order.devices, channel.cache)
    if isinstance(order, CountAcceleratorsOrder):
        return count_accelerators()
    return _answer_questions(channel)


def _answer_questions(channel: Any) -> dict[str, Any]:
    listener: _Listener | None = None
    try:
        while True:
            request = read_request(CHECK_REQUESTS, channel.recv()[0])
            answer: dict[str, Any] = {}
            try:
                if isinstance(request, ClockRequest):
                    answer = {"time_s": time.time()}
                elif isinstance(request, EnvironmentRequest):
                    answer = _host_environment(channel.cache)
                elif isinstance(request, ListenRequest):
                    listener = _Listener(request.address, request.secret)
                    answer = {"port": listener.port}
                elif isinstance(request, ConnectRequest):
                    answer = {"results": _connect_peers(request.peers, request.wait_s)}
            except OSError as exc:
                answer = {"error": _error_text(exc)}
            channel.send({"event": "answer", "id": request.id, **answer})
            if isinstance(request, StopCheckRequest):
                return {}
    finally:
        if listener is not None:
            listener.close()


def count_accelerators() -> dict[str, Any]:
    """How many accelerators torch sees; where it can't be imported, how many GPUs ``nvidia-smi`` lists."""
    try:
        from skyctl.device.accelerator import list_accelerators
    except (ImportError, OSError):
        listed = sum(line.startswith("GPU ") for line in run_nvidia_smi("-L"))
        return {"count": listed, "source": "nvidia-smi"}
    return {"count": len(list_accelerators()), "source": "torch"}


def _torch_environment(devices: Sequence[str] | None, cache: Path) -> dict[str, Any]:
    import warnings

    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch
    import torch.distributed as dist

    from skyctl.device.accelerator import list_accelerators
    from skyctl.device.dtype_support import TRIED_DTYPES, find_dtype_support

    there = [
        {**accelerator, "memory_bytes": _accelerator_bytes(torch, accelerator["id"])}
        for accelerator in list_accelerators()
    ]
    there.append({"id": "cpu:0", "name": "cpu", "memory_bytes": None})
    device_ids = [str(device["id"]) for device in there]
    wanted = device_ids if devices is None else list(map(with_index, devices))
    faults = {
        device: fault for device in wanted if device in device_ids and (fault := _device_fault(torch, device))
    }
    missing = [device for device in wanted if device not in device_ids]
    computes = (
        wanted if devices is not None else device_ids[:1]
    )  # without a choice, the CPU where nothing else is
    on_cpu = any(device.startswith("cpu") for device in computes)
    tried = [find_dtype_support(dtype, cache) for dtype in TRIED_DTYPES] if on_cpu else []
    return {
        "torch": str(torch.__version__),
        "distributed": dist.is_available(),
        "threads": torch.get_num_threads(),
        "devices": there,
        "missing": missing,
        "faults": faults,
        "dtypes": [asdict(trial) for trial in tried],
    }


def _accelerator_bytes(torch: Any, device: str) -> int | None:
    from skyctl.device.accelerator import free_and_total_bytes

    with suppress(Exception):  # not every kind of accelerator says
        return free_and_total_bytes(torch.device(device))[1]
    return None


def _device_fault(torch: Any, device: str) -> str | None:
    """Why a small piece of work does not run there: a driver too old, a card this torch was not built for."""
    try:
        ones = torch.ones(8, 8, device="cpu" if device.startswith("cpu") else device)
        if float((ones @ ones).sum().item()) != 512.0:
            return "a small product came out wrong"
    except Exception as exc:  # noqa: BLE001 - whatever the driver raises is the finding
        return (
            f"{type(exc).__name__}: {str(exc).strip().splitlines()[0] if str(exc).strip() else 'no reason'}"
        )
    return None


def _host_environment(cache: Path) -> dict[str, Any]:
    import platform

    from skyctl.device.cgroup import read_limits
    from skyctl.device.host import memory_bytes, usable_cpus

    limits = read_limits()
    total, available = memory_bytes()
    limit = limits.memory
    if limit is not None and limit.limit_bytes >= total:
        limit = None
    if limit is not None:
        available = min(available, limit.left_bytes)
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "cpus": usable_cpus(),
        "cpu_quota": limits.quota.cpus if limits.quota else None,
        "memory_total_bytes": total,
        "memory_available_bytes": available,
        "memory_limit_bytes": None if limit is None else limit.limit_bytes,
        "nofile": _open_files_limit(),
        "shm_bytes": _filesystem_bytes("/dev/shm"),  # noqa: S108
        "cache": {"path": str(cache), "free_bytes": free_bytes(cache)},
        "tmp": {"path": tempfile.gettempdir(), "free_bytes": free_bytes(Path(tempfile.gettempdir()))},
    }


def _open_files_limit() -> list[int] | None:
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError, ValueError):
        return None
    unlimited = 1 << 30
    return [unlimited if v == resource.RLIM_INFINITY else v for v in (soft, hard)]


def _filesystem_bytes(path: str) -> int | None:
    try:
        filesystem = os.statvfs(path)
    except OSError:
        return None
    return filesystem.f_frsize * filesystem.f_blocks


class _Listener:
    """Answers whoever knows the secret, so that the one who connects knows it is this node it reached."""

    def __init__(self, address: str, secret: str) -> None:
        self._gate = AuthenticatingListener(
            open_listener(address), secret, purpose=PURPOSE, log=lambda _: None
        )
        self.port = self._gate.port
        threading.Thread(target=self._answer, daemon=True).start()

    def close(self) -> None:
        self._gate.close()

    def _answer(self) -> None:
        while True:
            try:
                self._gate.accept(_FOREVER_S).sock.close()
            except OSError:  # closed
                return


def _connect_peers(peers: Mapping[str, PeerPort], timeout_s: float) -> dict[str, dict[str, Any]]:
    with ThreadPoolExecutor(_CONNECTIONS_AT_ONCE) as pool:
        jobs = {name: pool.submit(_connect_peer, peer, timeout_s) for name, peer in peers.items()}
        return {name: job.result() for name, job in jobs.items()}


def _connect_peer(peer: PeerPort, timeout_s: float) -> dict[str, Any]:
    try:
        began = time.monotonic()
        with socket.create_connection((peer.host, peer.port), timeout_s) as connection:
            connect_s = time.monotonic() - began
            authenticate(connection, peer.secret, purpose=PURPOSE, timeout_s=timeout_s)
    except AuthenticationError:
        return {"error": "something else answered there"}
    except TimeoutError:
        return {"error": f"no answer in {timeout_s:g} s"}
    except OSError as exc:
        return {"error": _error_text(exc)}
    return {"connect_s": connect_s}


def _error_text(exc: OSError) -> str:
    return exc.strerror or str(exc) or type(exc).__name__
