"""The settings that say whom a server trusts and what others see of it on its way: certificates and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix_cache.errors import InvalidArgument
from radix_cache_service.access.addresses import is_local
from radix_cache_service.access.tokens import TokenFile

if TYPE_CHECKING:
    from radix_cache_service.access.certificates import Certificates

__all__ = ["Secured", "check_secrets"]


class Secured:
    """What is made of these settings, which the class below has as its own."""

    __slots__ = ()

    listen: tuple[str, ...]
    tls_certificate: str | None
    tls_private_key: str | None
    tls_client_ca: str | None
    tokens_file: str | None
    allow_plaintext_tokens: bool

    def make_certificates(self) -> Certificates | None:
        """Return the certificate of the TCP ports, read anew; None without TLS."""
        if self.tls_certificate is None or self.tls_private_key is None:
            if (self.tls_certificate, self.tls_private_key, self.tls_client_ca) != (None, None, None):
                raise InvalidArgument("tls_certificate and tls_private_key go together, and tls_client_ca with both")
            return None
        from radix_cache_service.access.certificates import Certificates  # noqa: PLC0415 - no gRPC unless there is need

        return Certificates(self.tls_certificate, self.tls_private_key, self.tls_client_ca)

    def make_tokens(self) -> TokenFile | None:
        """Return the tokens and what they grant, read anew; None where there are none."""
        return None if self.tokens_file is None else TokenFile(self.tokens_file)


def check_secrets(config: Secured) -> None:
    """Raise `InvalidArgument` for files that are no good, and for tokens that would cross a network in the clear."""
    config.make_certificates()
    if config.make_tokens() is None or config.tls_certificate is not None or config.allow_plaintext_tokens:
        return
    for address in config.listen:
        if not is_local(address):
            raise InvalidArgument(
                f"tokens_file: tokens would come to {address} in the clear; set tls_certificate, listen on "
                "loopback or a unix socket, or set allow_plaintext_tokens"
            )
