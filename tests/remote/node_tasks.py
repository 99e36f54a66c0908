"""The tasks that the tests run on nodes. Shipped there; imports the standard library only."""

import os
import signal
import subprocess
import sys
import time

from skyctl.errors import UnfitError, WorkloadError


def main(payload, channel):
    return globals()[payload["do"]](payload, channel)


def echo(payload, channel):
    while True:
        message, body = channel.recv()
        if message.get("op") == "stop":
            return {"stopped": True, "where": os.environ.get("WHERE"), "folder": str(channel.folder)}
        channel.send({"event": "echo", **message}, body)


def noisy(payload, channel):
    print("a line")
    os.write(1, b"\x00\x00\x00\x05\x00\x00\x00\x00 raw bytes on fd 1\n")
    os.system("echo from a shell; echo on stderr >&2")
    sys.stderr.write("no end of line")
    return {}


def flood(payload, channel):
    for index in range(payload["lines"]):
        print(index, "x" * 200)
    return {"lines": payload["lines"]}


def fail(payload, channel):
    print("before it")
    kinds = {
        "value": ValueError("a b"),
        "workload": WorkloadError("layer 3 does not fit", hint="look at it"),
        "unfit": UnfitError("no room", node="x"),
        "memory": MemoryError(),
        "disk": OSError(28, "No space left on device", "/tmp/y"),
    }
    if payload["kind"] in kinds:
        raise kinds[payload["kind"]]
    if payload["kind"] == "module":
        import torch_that_is_not_there  # noqa: F401
    if payload["kind"] == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.Signals[payload["kind"]])
    time.sleep(60)


def sleep(payload, channel):
    if payload.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel.send({"event": "up", "pid": os.getpid()})
    time.sleep(600)


def orphan(payload, channel):
    """Leaves a double-forked grandchild in a session of its own, which ignores TERM and HUP."""
    code = (
        "import os,signal,sys,time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True)\n"
        "os.close(0); os.close(1); os.close(2)\n"
        "time.sleep(600)\n"
    )
    out = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pid = int(out.stdout.readline())
    out.wait()
    channel.send({"event": "up", "pid": os.getpid(), "orphan": pid})
    if payload.get("stay"):
        time.sleep(600)
    return {"orphan": pid}


def kill_agent(payload, channel):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def write(payload, channel):
    path = channel.folder / "big"
    path.write_bytes(os.urandom(1 << 20) * payload["mib"])
    return {"path": str(path)}


def forked(payload, channel):
    """Leaves a child that was only forked, in a session of its own, and ends with TERM."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)
    channel.send({"event": "up", "child": child})
    time.sleep(600)


def imported(payload, channel):
    """Whether torch is there already, and what this process has for itself."""
    from pathlib import Path

    torch = sys.modules.get("torch")
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
    return {
        "torch": torch is not None and "torch._dynamo" in sys.modules,
        "threads": len(os.listdir("/proc/self/task")),
        "private_mib": private / 1024,
        "cuda": torch is not None and torch.cuda.is_initialized(),
    }


def count(payload, channel):
    """Lines and events with rising numbers, until told to stop; gives what it was sent by then."""
    number, heard = 0, []
    while True:
        for _ in range(20):
            print(f"line {number}")
            channel.send({"event": "count", "number": number}, b"x" * payload.get("bytes", 0))
            number += 1
        got = channel.recv(0.005)
        if got is not None:
            if got[0].get("op") == "stop":
                return {"numbers": number, "heard": heard}
            heard.append(got[0]["k"])
