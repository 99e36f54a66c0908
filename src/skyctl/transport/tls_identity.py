"""A run's TLS identity: one certificate and its key, the same for all of its ranks. No torch.

The launcher makes it and sends it over its sessions; here it is held in memory. Both ends of a connection
must present this very certificate: nobody else can be either end, whatever an authority may have signed.

The certificate is the run's, not a rank's. So both ends also prove, through TLS, that they hold the key of
the proof before (``handshake``), which is this connection's alone: whoever stands between several pairs can't
join the beginning of one to the end of another.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.errors import RunError
from skyctl.transport.handshake import AuthenticatedSocket, recv_exactly

if TYPE_CHECKING:
    import ssl

_NO_CHECK_TIME = 0x200000
"""OpenSSL's ``X509_V_FLAG_NO_CHECK_TIME``, which Python's ``ssl`` has no name for."""


@dataclass(frozen=True)
class TlsIdentity:
    """A certificate and its private key, both as PEM text."""

    certificate: str
    key: str = field(repr=False)

    def wrap(self, admitted: AuthenticatedSocket, *, server: bool, timeout_s: float) -> ssl.SSLSocket:
        """TLS 1.3 on a connection, both ends having shown this certificate and its key. Left blocking.

        Raises:
            RunError: this Python has no TLS 1.3.
            OSError: the other end shows another certificate or key, breaks off, or is silent.
        """
        context = self._context(server=server)
        admitted.sock.settimeout(timeout_s)
        wrapped = context.wrap_socket(admitted.sock, server_side=server, do_handshake_on_connect=False)
        try:
            wrapped.do_handshake()
            _check_same_certificate(wrapped, self.certificate)
            roles = (b"tls server", b"tls client") if server else (b"tls client", b"tls server")
            mine, theirs = (hmac.digest(admitted.key, role, "sha256") for role in roles)
            if server:
                wrapped.sendall(mine)
            if not hmac.compare_digest(recv_exactly(wrapped, len(theirs)), theirs):
                raise ConnectionError("what speaks TLS there is not the one that proved itself before")
            if not server:  # by the server's proof it knows that its certificate was taken
                wrapped.sendall(mine)
        except BaseException:
            wrapped.close()
            raise
        wrapped.settimeout(None)
        return wrapped

    def _context(self, *, server: bool) -> ssl.SSLContext:
        try:
            import ssl
        except ImportError as exc:
            raise RunError(
                f"--encrypt needs TLS, and {sys.executable} was built without Python's ssl module",
                hint="name another Python with 'python:' in cluster.yaml, or train without --encrypt",
            ) from exc
        if not ssl.HAS_TLSv1_3:
            raise RunError(
                f"--encrypt needs TLS 1.3; {sys.executable} has {ssl.OPENSSL_VERSION}",
                hint="name another Python with 'python:' in cluster.yaml, or train without --encrypt",
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # it is this one certificate or none
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        context.verify_flags |= _NO_CHECK_TIME  # nor do its dates count: a node's clock may be off by decades
        if server:
            context.num_tickets = 0  # nothing is resumed
        with _text_as_file(self.certificate + self.key) as path:
            context.load_cert_chain(path)
        return context


def _check_same_certificate(wrapped: ssl.SSLSocket, certificate: str) -> None:
    import ssl

    theirs = wrapped.getpeercert(binary_form=True)
    if theirs is None or not hmac.compare_digest(theirs, ssl.PEM_cert_to_DER_cert(certificate)):
        raise ConnectionError("the other end shows another certificate than this run's")


@contextlib.contextmanager
def _text_as_file(text: str) -> Iterator[str]:
    """A path under which the text can be read meanwhile: ``load_cert_chain`` takes nothing else.

    In memory where the system has that (Linux), else a file for this user alone, which is removed at once.
    """
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        fd = os.memfd_create("identity", os.MFD_CLOEXEC)
        try:
            os.write(fd, text.encode())
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
        return
    fd, path = tempfile.mkstemp()  # 0600
    try:
        os.write(fd, text.encode())
        os.close(fd)
        yield path
    finally:
        Path(path).unlink()
