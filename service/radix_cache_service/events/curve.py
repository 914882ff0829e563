"""Keys for the events over ZeroMQ (CURVE): what is sent is encrypted, and who reads is known by a key.

Certificates are files as `zmq.auth` writes and reads them. The server's has its secret key; of readers there is a
directory of public ones. It is read at each handshake: a file that comes or goes counts for whoever connects next.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import zmq
from zmq.auth import load_certificate, load_certificates

from radix_cache.errors import InvalidArgument

__all__ = ["Curve", "Readers", "read_curve"]

_log = logging.getLogger(__name__)


class Curve(NamedTuple):
    """A server's keys. readers_dir: the public certificates of those who may read; None: whoever knows ``public``."""

    public: bytes
    secret: bytes
    readers_dir: str | None


class Readers:
    """What `zmq.auth` asks about a reader."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell whether the holder of ``key`` may read."""
        try:
            return key in load_certificates(self._directory)
        except (OSError, ValueError) as error:
            _log.warning("events_readers_dir can't be read, nobody is let in: %s", error)
            return False


def read_curve(key_file: str, readers_dir: str | None) -> Curve:
    """Return what the files hold. Raises `InvalidArgument`, which names the setting and the file, if it is no good."""
    try:
        public, secret = load_certificate(key_file)
        is_pair = secret is not None and zmq.curve_public(secret) == public
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise InvalidArgument(
            f"events_key_file {key_file}: no certificate of ZeroMQ ({type(error).__name__})"
        ) from None
    if not is_pair or secret is None:
        raise InvalidArgument(
            f"events_key_file {key_file} has no secret key, or one that does not go with the public one"
        )
    if readers_dir is not None:
        try:
            load_certificates(readers_dir)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"events_readers_dir: {error}") from None
    return Curve(public, secret, readers_dir)
