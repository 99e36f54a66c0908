"""The door of an expert host: ranks that prove their secret come in, over links of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from skyctl.errors import RunError, SkyctlError
from skyctl.experts.message_link import MessageLink
from skyctl.transport.handshake import (
    AuthenticatingListener,
    Caller,
    connect_authenticated,
    open_listener,
    os_error_reason,
)
from skyctl.transport.tls_identity import TlsIdentity

_ACCEPT_TIMEOUT_S = 3600.0


class HostGate:
    """Listens on one address, in a thread of its own, until ``close``.

    Args:
        secrets: by rank, what proves that it is this one.
        admit: called there with a rank and its link, which is still to be started.

    Raises:
        SkyctlError: the address is not this machine's.
    """

    def __init__(
        self,
        address: str,
        secrets: Mapping[int, str],
        *,
        purpose: str,
        identity: TlsIdentity | None,
        admit: Callable[[int, MessageLink], None],
    ) -> None:
        self._identity, self._admit = identity, admit
        try:
            sock = open_listener(address)
        except OSError as exc:
            raise SkyctlError(f"a host of experts can't listen on {address}: {os_error_reason(exc)}") from exc
        callers = {rank: Caller(secret, purpose) for rank, secret in secrets.items()}
        first = next(iter(callers.values()))
        self._listener = AuthenticatingListener(sock, first.secret, purpose=purpose)
        self._listener.expect(callers)
        self.address, self.port = address, int(self._listener.port)
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="expert host: accepts")
        self._thread.start()

    def close(self) -> None:
        """Stops listening; links that were let in stay. Idempotent."""
        self._closed = True
        self._listener.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            try:
                admitted = self._listener.accept(_ACCEPT_TIMEOUT_S)
            except TimeoutError:
                continue
            except (OSError, ValueError):
                return  # the listener was closed
            name = f"rank {admitted.caller}"
            with suppress(OSError):  # it broke off, or shows another certificate
                self._admit(
                    admitted.caller, MessageLink(admitted, name, server=True, identity=self._identity)
                )


def connect_to_host(
    host: str,
    port: int,
    secret: str,
    *,
    purpose: str,
    name: str,
    identity: TlsIdentity | None,
    limit_s: float,
) -> MessageLink:
    """A rank's link to a host, which is still to be started.

    Raises:
        RunError: no connection within ``limit_s``, or what answers there is not the host.
    """
    try:
        admitted = connect_authenticated(host, port, secret, purpose=purpose, timeout_s=limit_s)
        return MessageLink(admitted, name, server=False, identity=identity)
    except OSError as exc:
        raise RunError(f"{name} can't be reached: {os_error_reason(exc)}") from exc
