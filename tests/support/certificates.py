"""Certificates of an authority that only the tests know."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_HERE = ("127.0.0.1", "localhost")
_DAY = datetime.timedelta(days=1)


class Issued(NamedTuple):
    """The files of a server's certificate, its private key, and the authority that has issued it."""

    certificate: Path
    key: Path
    authority: Path


class Authority:
    """An authority, whose certificate is a file in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _named(name)
        self.file = folder / f"{name}.pem"
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        made = (
            self._builder(self._subject, self._key.public_key(), 30 * _DAY)
            .add_extension(x509.BasicConstraints(True, 0), critical=True)
            .add_extension(usage, critical=True)
        )
        self.file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, hosts: tuple[str, ...] = _HERE, ends: datetime.timedelta = 10 * _DAY) -> Issued:
        """Return a certificate for a server at these hosts, which ends so long from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        made = (
            self._builder(_named(name), key.public_key(), ends)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        )
        issued = Issued(self._folder / f"{name}.crt", self._folder / f"{name}.key", self.file)
        issued.certificate.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        issued.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return issued

    def _builder(
        self, subject: x509.Name, public: ec.EllipticCurvePublicKey, ends: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 20 * _DAY)
            .not_valid_after(now + ends)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(issuer, critical=False)
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
