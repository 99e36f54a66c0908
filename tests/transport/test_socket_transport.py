"""Messages over a socket pair, each end with its own threads."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch

from skyctl.transport.socket_transport import SocketTransport

LIMIT = timedelta(seconds=30)
TENSORS = 2000
"""More buffers than one system call takes (1,024 on Linux), two for each tensor."""


def test_thousands_of_short_tensors_arrive_in_order() -> None:
    left, right = (SocketTransport(end, name) for end, name in zip(socket.socketpair(), "ab", strict=True))
    try:
        got = [torch.empty(4) for _ in range(TENSORS)]
        with right.together():
            receives = [right.recv(tensor, 1) for tensor in got]
        receive = left.recv(torch.empty(1), 2)
        right.send(torch.ones(1), 2)
        receive.wait(LIMIT)  # every receive is posted by now, so the sends may leave together
        with left.together():
            sends = [left.send(torch.full((4,), float(number)), 1) for number in range(TENSORS)]
        for work in (*sends, *receives):
            work.wait(LIMIT)
        assert [tensor[3].item() for tensor in got] == list(range(TENSORS))
    finally:
        left.close()
        right.close()
