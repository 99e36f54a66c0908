"""The credentials of one run's processes: made here for each run, sent over the sessions, written nowhere."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from skyctl.transport.tls_identity import TlsIdentity

SECRET_BYTES = 16


@dataclass(frozen=True)
class RankCredentials:
    """The secrets that one rank shares with others in one attempt.

    Attributes:
        secrets: by rank, what it shares with that peer, and with nobody else.
        tls: the run's certificate, the same for all; None: nothing is encrypted.
        replica_secret: what it shares with all others that hold its layers; empty: nobody else does.
    """

    secrets: Mapping[int, str] = field(repr=False)
    tls: TlsIdentity | None
    replica_secret: str = field(default="", repr=False)


def make_credentials(
    ranks: int,
    pairs: Sequence[tuple[int, int]],
    replicas: Iterable[Sequence[int]] = (),
    *,
    encrypt: bool,
) -> list[RankCredentials]:
    """The credentials of each rank, in rank order.

    Args:
        pairs: the ranks that exchange tensors with each other.
        replicas: those that hold the same layers, by set.
    """
    identity = make_tls_certificate() if encrypt else None
    peers: list[dict[int, str]] = [{} for _ in range(ranks)]
    for rank, other in pairs:
        peers[rank][other] = peers[other][rank] = secrets.token_hex(SECRET_BYTES)
    group_secrets: dict[int, str] = {}
    for alike in replicas:
        group_secrets |= dict.fromkeys(alike, secrets.token_hex(SECRET_BYTES))
    return [
        RankCredentials(peer_secrets, identity, group_secrets.get(rank, ""))
        for rank, peer_secrets in enumerate(peers)
    ]


def make_admission(members: Iterable[int], tls: TlsIdentity | None) -> RankCredentials:
    """The credentials of a rank that enters an attempt under way.

    Args:
        members: the ranks that it exchanges tensors with.
        tls: the certificate of the others.
    """
    shared = {member: secrets.token_hex(SECRET_BYTES) for member in members}
    return RankCredentials(shared, tls, secrets.token_hex(SECRET_BYTES))


def make_tls_certificate() -> TlsIdentity:
    """A key (ECDSA over P-256) and a certificate that it has signed itself.

    It is compared as a whole and forgotten with its run, so its dates mean nothing and nobody checks them.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skyctl run")])
    certificate = (
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
    return TlsIdentity(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())
