"""One of the processes that ``averaging.py`` has average by hivemind. A program, for hivemind's own Python.

The first process opens a DHT and gives its address to the others over a socket. The group is found ahead of
each turn (``require_trigger``), so that a turn holds what averaging takes and no matchmaking.
"""

from __future__ import annotations

import socket
import sys
import time

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.utils import get_dht_time

HOST = "127.0.0.1"
MATCHMAKING_S = 3.0
TIMEOUT_S = 60.0


def say(*words):
    """A line for the program that started this one."""
    print("bench", *words, flush=True)


def open_dht(rank, count, port):
    """This process's DHT; those of the others join the first's."""
    address = [f"/ip4/{HOST}/tcp/0"]
    if rank == 0:
        dht = hivemind.DHT(host_maddrs=address, start=True)
        told = " ".join(map(str, dht.get_visible_maddrs())).encode()
        with socket.create_server((HOST, port)) as server:
            for _ in range(count - 1):
                peer, _ = server.accept()
                with peer:
                    peer.sendall(told)
        return dht
    end = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with socket.create_connection((HOST, port), TIMEOUT_S) as peer, peer.makefile("rb") as heard:
                peers = heard.read().decode().split()
            return hivemind.DHT(host_maddrs=address, initial_peers=peers, start=True)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def main():
    """Connects, says so, and averages whenever told to, until nothing is told any more."""
    rank, count, numbers, port = map(int, sys.argv[1:5])
    torch.set_num_threads(1)
    dht = open_dht(rank, count, port)
    averager = DecentralizedAverager(
        [torch.zeros(numbers)],
        dht,
        start=True,
        prefix="averaging",
        target_group_size=count,
        min_group_size=count,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=1.0,
    )
    expected = sum(range(1, count + 1)) / count
    control = None
    say("ready")
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "prepare":
            with averager.get_tensors() as (values,):
                values.fill_(rank + 1.0)
            control = averager.step(
                scheduled_time=get_dht_time() + MATCHMAKING_S,
                timeout=TIMEOUT_S,
                wait=False,
                require_trigger=True,
            )
            while control.stage != AveragingStage.AWAITING_TRIGGER:
                if control.done():
                    control.result()
                    raise RuntimeError("no group was found")
                time.sleep(0.005)
            say("prepared")
            continue
        time.sleep(max(0.0, float(rest) - time.monotonic()))
        control.allow_allreduce()
        control.result()
        ended = time.monotonic()
        with averager.get_tensors() as (values,):
            if not torch.allclose(values, torch.full_like(values, expected)):
                say("wrong")
                return
        say("done", repr(ended))
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
