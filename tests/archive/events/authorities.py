"""Certificate authorities of one test each, and servers that they vouch for."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)
Key = ec.EllipticCurvePrivateKey


class Authority:
    """Signs certificates for servers; clients with its file trust them."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        rights = x509.BasicConstraints(ca=True, path_length=0)
        built = _builder(self._name, self._name, self._key).add_extension(rights, critical=True)
        built = built.add_extension(_own_id(self._key), critical=False)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(_pem(built.sign(self._key, hashes.SHA256())))

    def server(self, address: str) -> ssl.SSLContext:
        """Return the context of a server at an address."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        built = _builder(_name(address), self._name, key).add_extension(names, critical=False)
        built = built.add_extension(usage, critical=False).add_extension(signer, critical=False)
        file = self._folder / f"server-{address}.pem"
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        file.write_bytes(secret + _pem(built.sign(self._key, hashes.SHA256())))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _own_id(key: Key) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key.public_key())


def _builder(subject: x509.Name, issuer: x509.Name, key: Key) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
