"""The server's certificate, read again when its files change.

gRPC asks before each handshake whether there is a new one, on a thread of its own, and each port keeps its own copy of
the answer. So a renewed certificate needs no restart and no signal: connections of before go on, new ones see it. Files
that can't be used (the key of another certificate, as long as only one of the two was replaced) leave what was there
in force.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from radix_cache.errors import InvalidArgument
from radix_cache_service.access.files import Signature, signature

__all__ = ["Certificates"]

_log = logging.getLogger(__name__)


class _Read(NamedTuple):
    """What the files held. number: rises with each change."""

    number: int
    certificate: bytes
    private_key: bytes
    client_ca: bytes | None


class Certificates:
    """The PEM files of a certificate chain, its private key, and whoever signs the clients' (None: no mTLS).

    Thread-safe. Raises `InvalidArgument`, which names the setting and the file, when made of files that are no good.
    """

    def __init__(self, certificate: str, private_key: str, client_ca: str | None = None) -> None:
        self._certificate = Path(certificate)
        self._private_key = Path(private_key)
        self._client_ca = None if client_ca is None else Path(client_ca)
        self._lock = threading.Lock()
        self._seen = self._signatures()
        self._last = self._read(0)

    def credentials(self) -> grpc.ServerCredentials:
        """Return what one port is opened with."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._last), self._fetcher(), require_client_authentication=self._client_ca is not None
        )

    def _fetcher(self) -> Callable[[], Any]:  # the stubs don't know of None: no change
        known = self._last.number

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal known
            last = self._latest()
            if last.number == known:
                return None
            known = last.number
            return _configuration(last)

        return fetch

    def _latest(self) -> _Read:
        """Return what the files hold, or held when they were last good."""
        with self._lock:
            seen = self._signatures()
            if seen != self._seen:
                self._seen = seen
                try:
                    self._last = self._read(self._last.number + 1)
                    _log.info("certificate read anew from %s", self._certificate)
                except InvalidArgument as error:
                    _log.warning("the certificate of before stays in force: %s", error)
            return self._last

    def _signatures(self) -> list[Signature]:
        paths = (self._certificate, self._private_key, self._client_ca)
        return [signature(path) for path in paths if path is not None]

    def _read(self, number: int) -> _Read:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._certificate, self._private_key, password=str)  # "": never ask a terminal
            certificate, private_key = self._certificate.read_bytes(), self._private_key.read_bytes()
        except OSError as error:  # those of ssl are, too
            named = f"tls_certificate {self._certificate} and tls_private_key {self._private_key}"
            raise InvalidArgument(f"{named}: {_reason(error)}") from error
        return _Read(number, certificate, private_key, None if self._client_ca is None else _read_ca(self._client_ca))


def _read_ca(path: Path) -> bytes:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"tls_client_ca {path}: {_reason(error)}") from error


def _configuration(read: _Read) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(read.private_key, read.certificate)], read.client_ca)


def _reason(error: OSError) -> str:
    """Name the fault; OpenSSL's own words come with a place in its source."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM data").lower().replace("_", " ")
    return error.strerror or str(error)
