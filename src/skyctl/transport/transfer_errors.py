"""How a transfer between two ranks can fail, whatever carries it: a socket, TLS, NCCL or a host buffer.

NCCL raises a plain RuntimeError for everything, so only its text tells what happened; that text is read here
and nowhere else. A transfer that skyctl carries itself raises the right type at once.
"""

from __future__ import annotations

from skyctl.errors import RunError

_CLOSED_TEXTS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Socket closed",
    "pair closure",
    "onnection refused",
)
_TIMEOUT_TEXT = "imed out"


class PeerError(RunError):
    """A fault of the other end; ``peer_rank``: who that is (None: no rank)."""

    def __init__(
        self, message: str, *, peer_rank: int | None, hint: str | None = None, log: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, log=log)
        self.peer_rank = peer_rank


class PeerLostError(PeerError):
    """The other end is gone: a consequence of another failure, hardly ever the first cause."""


class PeerProtocolError(PeerError):
    """The other end has sent what skyctl never sends."""


class SpoiltSumError(PeerProtocolError):
    """As ``PeerProtocolError``, but the other end may only have passed on what it was sent itself."""


class SpoiltPartError(SpoiltSumError):
    """Of a sum's part, before the sum was whole: no rank that comes after has to do with it."""


class PeerUnreachableError(PeerError):
    """No connection with the other end came about."""


class NumberUsedError(RunError, RuntimeError):
    """Ranks are to connect under a number that they have had before. torch expects a RuntimeError."""


class TransferFrameError(RuntimeError):
    """The other end of a connection does not speak as it should."""


class TransferClosedError(RuntimeError):
    """The connection under a transfer is closed, by either end."""


class TransferTimeoutError(RuntimeError):
    """A transfer did not finish in time."""


def translate_transfer_error(
    exc: RuntimeError, peer: str, waited_s: float, peer_rank: int | None = None
) -> RunError:
    """A transport's error as skyctl's.

    Args:
        peer: what to call the other end.
        peer_rank: its rank; None: it is none.
    """
    text = str(exc)
    if isinstance(exc, TransferFrameError):
        return PeerProtocolError(f"{peer} {text}", peer_rank=peer_rank)
    if isinstance(exc, TransferClosedError) or any(part in text for part in _CLOSED_TEXTS):
        return PeerLostError(
            f"the connection to {peer} is gone: its process ended, or the network broke", peer_rank=peer_rank
        )
    if isinstance(exc, TransferTimeoutError) or _TIMEOUT_TEXT in text:
        return RunError(
            f"nothing came through between this rank and {peer} for {waited_s:.0f} s",
            hint="see whether that node sleeps, swaps or lost its network",
        )
    return RunError(f"the transfer with {peer} failed: {text.splitlines()[0] if text else exc!r}")
