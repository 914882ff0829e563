"""What a client shows and trusts on a TLS connection."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from radix_cache.errors import InvalidArgument

__all__ = ["Tls"]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files, by their paths.

    root_certificates: whom to trust; None: those that gRPC comes with. certificate, private_key: who this client is,
    where the server asks for it (mTLS); both or neither. They are read when a client is made: one that is to go on
    beyond the end of its certificate needs a successor.
    """

    root_certificates: str | Path | None = None
    certificate: str | Path | None = None
    private_key: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return what opens a channel. Raises `InvalidArgument` that names a file which it can't read or is no PEM."""
        if (self.certificate is None) is not (self.private_key is None):
            raise InvalidArgument("certificate and private_key go together: one of them is missing")
        root, certificate, private_key = (
            None if path is None else _read(name, path)
            for name, path in (
                ("root_certificates", self.root_certificates),
                ("certificate", self.certificate),
                ("private_key", self.private_key),
            )
        )
        return grpc.ssl_channel_credentials(root, private_key, certificate)


def _read(name: str, path: str | Path) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{name} {path}: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise InvalidArgument(f"{name} {path}: this is no PEM file")
    return content
