"""A node's own network line: four flows at once between it (the hub) and two peers, as training sends them.

Every flow is a fixed number of messages of one size, all of its receives posted beforehand; its receiver
notes when each was there. What comes of the times is the launcher's to judge (``probe/lines.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from skyctl.errors import RunError, SkyctlError
from skyctl.probe.node.link import Line
from skyctl.transport.pair import FIRST_TAG, Pair

_READY, _GO, _DATA = FIRST_TAG, FIRST_TAG + 1, FIRST_TAG + 2


@dataclass(frozen=True)
class Flows:
    """What one pair carries, as this end sees it. Bytes are a message's, at least 1."""

    messages: int
    send_bytes: int
    receive_bytes: int


def exchange(line: Line, flows: Flows, go: Callable[[], float] | None, device: str = "cpu") -> list[float]:
    """Sends and receives all messages of a pair at once; the hub's end is the one with ``go``.

    Args:
        go: waits for the hub's other pairs; gives the time that they all count from.
        device: where messages lie, as training's do.

    Returns:
        Seconds from the go (here: when it was given, or heard) until each message had come, in order.

    Raises:
        RunError: the other end is gone or silent (from the transport).
    """
    incoming = torch.empty(flows.receive_bytes, dtype=torch.uint8, device=device)
    outgoing = torch.zeros(flows.send_bytes, dtype=torch.uint8, device=device)
    # All into one buffer: nobody reads it, and nothing has to be posted while the flows run.
    receives = [line.recv(incoming, _DATA) for _ in range(flows.messages)]
    if go is None:
        heard = line.recv(_word(), _GO)
        line.send(_word(), _READY).wait()
        heard.wait()
        start = time.perf_counter()
    else:
        line.recv(_word(), _READY).wait()
        start = go()
        line.send(_word(), _GO).wait()
    sends = [line.send(outgoing, _DATA) for _ in range(flows.messages)]
    arrivals = []
    for work in receives:
        work.wait()
        arrivals.append(time.perf_counter() - start)
    for work in sends:
        work.wait()
    return arrivals


def as_hub(
    pairs: Sequence[tuple[Pair, Flows]],
    timeout_s: float,
    device: str = "cpu",
    hold: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """The hub's end: waits for its peers, then all flows at once, a thread a pair.

    Args:
        pairs: each one listening already.
        timeout_s: how long the peers may take to connect.
        hold: called once when all are ready; the flows begin when it returns.

    Returns:
        By peer, when each of its messages had come.

    Raises:
        SkyctlError: a peer did not come, or a flow broke; the first cause.
    """
    begun: list[float] = []

    def begin() -> None:
        hold()
        begun.append(time.perf_counter())

    together = threading.Barrier(len(pairs), action=begin)
    found: dict[str, list[float]] = {}
    errors: list[SkyctlError] = []

    def go() -> float:
        together.wait(timeout_s)
        return begun[0]

    def run(pair: Pair, flows: Flows) -> None:
        try:
            pair.accept(timeout_s)
            found[pair.peer] = exchange(pair, flows, go, device)
            pair.close(politely=True)
        except threading.BrokenBarrierError:
            pass  # another pair's error, and that one is told
        except SkyctlError as exc:
            errors.append(exc)
        except (RuntimeError, OSError, ValueError) as exc:
            errors.append(RunError(f"the flows with {pair.peer} failed: {type(exc).__name__}: {exc}"))
        finally:
            if pair.peer not in found:
                together.abort()
            pair.close()

    threads = [threading.Thread(target=run, args=entry, name=f"line {entry[0].peer}") for entry in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if len(found) < len(pairs):
        raise RunError(f"the peers were not all ready within {timeout_s:.0f} s")
    return found


def _word() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)
