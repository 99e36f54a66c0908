"""What the processes of one run share: made here for each run, sent over the sessions, written nowhere."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

SECRET_BYTES = 16


def make_credentials(*, encrypt: bool) -> dict[str, Any]:
    """``secret``, without which nobody joins; to encrypt also ``tls``: a certificate and its key (PEM)."""
    made: dict[str, Any] = {"secret": secrets.token_hex(SECRET_BYTES)}
    return made | {"tls": make_tls_certificate()} if encrypt else made


def make_tls_certificate() -> dict[str, str]:
    """A key (ECDSA over P-256) and a certificate that it has signed itself.

    It is compared as a whole and forgotten with its run, so its dates mean nothing and allow for any clock.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skyctl run")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {"cert": made.public_bytes(serialization.Encoding.PEM).decode(), "key": private.decode()}
