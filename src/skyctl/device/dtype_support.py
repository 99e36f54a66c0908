"""Which dtypes this node's processor can really compute in, found out by trying them in a child process.

A virtual machine may advertise instructions (AMX) that its host does not let it use. torch's CPU kernels
(oneDNN) believe what is advertised, and the first bfloat16 matrix product ends the process by SIGILL. oneDNN
reads ``ONEDNN_MAX_CPU_ISA`` before its first operation and keeps to that instruction set, so the trial is
repeated with older sets until one works; whoever computes in that dtype then sets the same.

Only a death by a signal counts: an exception is for the workload itself to raise. Accelerators are not tried,
because they answer with exceptions. A trial is made once per boot of the machine, Python and torch, and its
outcome is kept in the node's cache.

Source: oneDNN's developer guide, "CPU Dispatcher Control".
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from skyctl.agent.process_tree import read_boot_id
from skyctl.errors import UnsupportedDtypeError

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_CAPS = ("AVX512_CORE_BF16", "AVX2")
"""Instruction sets that are tried in turn where the processor's own choice fails, the fastest first."""

TRIED_DTYPES = ("bfloat16",)
"""The dtypes other than float32 that a workload may be trained in (``workload.workload_spec.DTYPES``)."""

CRASHES = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)
TRIAL_TIMEOUT_S = 90.0
"""A tenth of a core needs half of it to import torch. A dtype whose trial takes longer counts as working, and
the next call tries it again."""

FILE_NAME = "dtype-support.json"
MOST_KEPT = 16
"""Machines (boots, Pythons, versions of torch) whose outcomes the file keeps."""

TRIAL = """
import sys
sys.path[:] = [path for path in sys.path if path]  # nothing from the working folder
import resource, warnings
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
warnings.simplefilter("ignore")
import torch
from torch.nn import functional as F

def sample(*shape):
    return torch.randn(*shape, dtype=getattr(torch, sys.argv[1]), requires_grad=True)

for compute in (
    lambda: sample(64, 64) @ sample(64, 64),
    lambda: F.conv2d(sample(2, 8, 16, 16), sample(8, 8, 3, 3)),
    lambda: F.scaled_dot_product_attention(*(sample(1, 2, 32, 32) for _ in range(3)), is_causal=True),
):
    try:
        compute().sum().backward()
    except Exception:
        pass
"""
"""The program that the child runs: forward and backward of a matrix product, a convolution and attention."""


@dataclass(frozen=True)
class DtypeSupport:
    """The outcome of the trial of one dtype.

    ``works``: False where every instruction set fails. ``max_cpu_isa``: the value of ``ONEDNN_MAX_CPU_ISA``
    that it needs, None: none. ``died_by``: the signal (``SIGILL``) that ended the trial without it, if one
    did.
    """

    dtype: str
    works: bool
    max_cpu_isa: str | None = None
    died_by: str | None = None


def find_dtype_support(dtype: str, cache: Path) -> DtypeSupport:
    """The outcome kept in that folder, or of a trial now (seconds; a second process waits for the first)."""
    key = _machine_key()
    path = cache / FILE_NAME
    with _locked(path.with_suffix(".lock")):
        kept = _read(path)
        for earlier in kept.get(key, ()):
            if earlier.dtype == dtype:
                return earlier
        support = try_dtype(dtype)
        if support is None:
            return DtypeSupport(dtype, works=True)
        others = [other for other in kept if other != key][-(MOST_KEPT - 1) :]
        _write(path, {other: kept[other] for other in others} | {key: [*kept.get(key, ()), support]})
        return support


def try_dtype(dtype: str) -> DtypeSupport | None:
    """Tries it with the instruction set as it is, then with older ones; None: not known in time."""
    first: str | None = None
    for cap in (None, *ISA_CAPS):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if cap is None else {ISA_VARIABLE: cap})
        try:
            status = subprocess.run(
                [sys.executable, "-c", TRIAL, dtype],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TRIAL_TIMEOUT_S,
                check=False,
            ).returncode
        except (OSError, subprocess.TimeoutExpired):
            return None
        if status == 0:
            return DtypeSupport(dtype, works=True, max_cpu_isa=cap, died_by=first)
        if -status not in CRASHES:
            return None  # ended by somebody, or short of memory
        first = first or signal.Signals(-status).name
    return DtypeSupport(dtype, works=False, died_by=first)


def prepare_dtype(dtype: str, device: str, cache: Path) -> DtypeSupport | None:
    """To be called before this process's first tensor operation: lets it compute in that dtype there.

    Args:
        device: as in ``cpu:0``; nothing is done for accelerators, nor for float32 (None).

    Raises:
        UnsupportedDtypeError: no instruction set helps.
    """
    if dtype not in TRIED_DTYPES or device.partition(":")[0] != "cpu":
        return None
    support = find_dtype_support(dtype, cache)
    if not support.works:
        raise UnsupportedDtypeError(
            f"{device} can't compute in {dtype}: a trial died by {support.died_by}, also with "
            f"{ISA_VARIABLE}={ISA_CAPS[-1]}",
            node=socket.gethostname(),
            hint="train in float32 (--dtype float32), or leave this node out (--limit)",
        )
    if support.max_cpu_isa is not None:
        os.environ[ISA_VARIABLE] = support.max_cpu_isa
    return support


def _machine_key() -> str:
    """The key that must be the same for an outcome to hold; a new boot may be on another host."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "unknown"
    parts = (read_boot_id(), sys.executable, f"torch {torch_version}", os.environ.get(ISA_VARIABLE, ""))
    return " | ".join(parts)


def _read(path: Path) -> dict[str, list[DtypeSupport]]:
    """The outcomes by machine; empty where there is no file, or not one of ours."""
    try:
        kept = json.loads(path.read_text())
        return {str(key): [DtypeSupport(**entry) for entry in entries] for key, entries in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, kept: dict[str, list[DtypeSupport]]) -> None:
    """A cache that can't be written costs a trial each time, and is no error."""
    temporary = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        temporary.write_text(
            json.dumps({key: [asdict(support) for support in kept[key]] for key in kept}, indent=1)
        )
        temporary.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes of this node from the same trial; given up where the folder can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError:
        yield
        return
    with lock:
        deadline = time.monotonic() + (1 + len(ISA_CAPS)) * TRIAL_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.1)
        yield
