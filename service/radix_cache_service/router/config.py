"""What a router is started with, checked as a whole before any port opens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from radix_cache.errors import InvalidArgument
from radix_cache.operations import check_count, check_seconds
from radix_cache.tokens import shown
from radix_cache_service.access.addresses import check_address, is_local
from radix_cache_service.access.secrets import Secured, check_secrets
from radix_cache_service.access.tokens import is_token
from radix_cache_service.config import check_drain, check_logs, message_limit, setting

if TYPE_CHECKING:
    from radix_cache_service.client.tls import Tls

__all__ = ["NodeName", "RouterConfig", "check_distinct", "check_node"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST = 1e6
_NEEDED = "route needs more: pip install 'radix-cache[service,router]' (on Linux, x86-64)"


class NodeName(NamedTuple):
    """What a server is called, and where it listens."""

    name: str
    address: str


def check_node(name: str, address: str) -> NodeName:
    """Return a node's name and address. Raises `InvalidArgument`."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"a node's name is 1 to 64 letters, digits, dots, dashes and underscores, not {shown(name)}"
        )
    try:
        check_address(address)
    except InvalidArgument as error:
        raise InvalidArgument(f"node {name}: {shown(address)} is neither host:port nor unix:/path") from error
    host = address.rpartition(":")[0]
    is_plain = "/" not in host and (":" not in host or (host[0] == "[" and host[-1] == "]"))
    if not address.startswith("unix:") and not is_plain:
        raise InvalidArgument(
            f"node {name}: {shown(address)} has more than a host and a port; is it to be [::1]:50051?"
        )
    return NodeName(name, address)


def check_distinct(nodes: Iterable[NodeName]) -> None:
    """Raise `InvalidArgument` for two nodes of one name, or at one address: it would get twice its share."""
    places: dict[str, str] = {}
    for name, address in nodes:
        if name in places:
            raise InvalidArgument(f"node {name} is there already, at {places[name]}")
        for other, there in places.items():
            if there == address:
                raise InvalidArgument(f"nodes {other} and {name} are both at {address}")
        places[name] = address


@dataclass(frozen=True, slots=True)
class RouterConfig(Secured):
    """A router's settings. Raises `InvalidArgument` that names the field and the value, whatever is wrong with it."""

    listen: tuple[str, ...] = setting(
        ("127.0.0.1:50050",), "HOST:PORT (port 0: any free one) or unix:/path; may be given several times."
    )
    nodes: tuple[str, ...] = setting((), "NAME=ADDRESS of a server; may be given several times.", "--node")
    block_size: int | None = setting(None, "Tokens in a block; unless set, what the first of nodes that answers says.")
    heartbeat_s: float = setting(2.0, "Seconds within which a node that is gone is noticed.", "--heartbeat")
    max_load: float = setting(
        1.5, "A node with so many times the mean of requests in flight is passed over, whatever it has cached."
    )
    prefill_weight: float = setting(
        4.0, "What a token that is yet to be computed weighs; one that a request in flight holds weighs 1."
    )
    request_weight: int = setting(128, "What a request in flight weighs besides its tokens.")
    request_ttl_s: float = setting(
        600.0, "Seconds after which a request that nobody finished is no load.", "--request-ttl"
    )
    max_requests: int = setting(100_000, "Requests in flight at once; of each token, where there are tokens.")
    max_tokens: int = setting(1_048_576, "The longest prompt; the limits of messages follow from it.")
    node_tls: bool = setting(False, "Speak TLS to the nodes, and trust whom gRPC trusts.")
    node_tls_ca: str | None = setting(None, "Speak TLS to the nodes, and trust who is in this PEM file.")
    node_tls_certificate: str | None = setting(None, "PEM file of the router's certificate, where nodes ask for one.")
    node_tls_private_key: str | None = setting(None, "PEM file of its private key.")
    node_token_file: str | None = setting(None, "A file with the bearer token that nodes are shown.")
    tls_certificate: str | None = setting(None, "PEM file of the certificate chain; TCP ports then speak TLS.")
    tls_private_key: str | None = setting(None, "PEM file of the certificate's private key.")
    tls_client_ca: str | None = setting(None, "PEM file of those who sign the clients' certificates (mTLS).")
    tokens_file: str | None = setting(None, "TOML file of bearer tokens; without one, everybody may do everything.")
    allow_plaintext_tokens: bool = setting(False, "Let tokens cross a network without TLS.")
    uds_mode: int = setting(0o660, "Permissions of unix sockets.", is_mode=True)
    drain_delay_s: float = setting(0.0, "Seconds between the end of readiness and the end of service.", "--drain-delay")
    grace_s: float = setting(5.0, "Seconds that calls in flight then have.", "--grace")
    metrics_listen: str | None = setting(None, "HOST:PORT of the Prometheus metrics, for instance 127.0.0.1:9465.")
    log_format: str = setting("text", "How the log looks: text or json.")
    log_level: str = setting("info", "The least that is logged: debug, info, warning or error.")

    def __post_init__(self) -> None:
        if not self.listen:
            raise InvalidArgument("listen needs at least one address")
        for address in self.listen:
            check_address(address)
        self._check_numbers()
        check_logs(self.metrics_listen, self.log_format, self.log_level)
        check_secrets(self)
        self._check_nodes()
        try:
            from radix_cache_service.router import selection  # noqa: F401, PLC0415 - what can't be imported is no use
        except ImportError as error:
            raise InvalidArgument(f"{_NEEDED}: {error}") from error

    def _check_numbers(self) -> None:
        for name, least, most in (
            ("request_weight", 0, 2**28),
            ("max_requests", 1, 2**24),
            ("max_tokens", 1, 2**28),
            ("uds_mode", 0, 0o777),
        ):
            check_count(getattr(self, name), name, least, most)
        if self.block_size is not None:
            check_count(self.block_size, "block_size", 1)
        for name in ("heartbeat_s", "request_ttl_s"):
            check_seconds(getattr(self, name), name)
        check_drain(self.drain_delay_s, self.grace_s)
        for name, least in (("max_load", 1), ("prefill_weight", 0)):
            said = getattr(self, name)
            if isinstance(said, bool) or not least <= said <= _MOST:
                raise InvalidArgument(f"{name} is at least {least} and at most {_MOST:g}, not {shown(said)}")

    def _check_nodes(self) -> None:
        tls = self.make_node_tls()
        if tls is not None:
            try:
                tls.credentials()
            except InvalidArgument as error:
                raise InvalidArgument(f"node_tls: {error}") from error
        self.make_node_token()
        try:
            check_distinct(self.node_names())
        except InvalidArgument as error:
            raise InvalidArgument(f"nodes: {error}") from error
        for node in self.node_names():
            self.check_node_secrecy(node)

    def node_names(self) -> Iterator[NodeName]:
        """Yield the nodes. Raises `InvalidArgument` for one that is not NAME=ADDRESS."""
        for text in self.nodes:
            name, sign, address = text.partition("=")
            if not sign:
                raise InvalidArgument(f"nodes: {shown(text)} is not NAME=ADDRESS")
            yield check_node(name, address)

    def check_node_secrecy(self, node: NodeName) -> None:
        """Raise `InvalidArgument` where the token for nodes would go to this one in the clear."""
        if self.node_token_file is None or self.make_node_tls() is not None or self.allow_plaintext_tokens:
            return
        if not is_local(node.address):
            raise InvalidArgument(
                f"node_token_file: the token would go to {node.address} in the clear; set node_tls or node_tls_ca, "
                "or set allow_plaintext_tokens"
            )

    def make_node_tls(self) -> Tls | None:
        """Return whom to trust among nodes, and who the router is to them; None without TLS."""
        files = (self.node_tls_ca, self.node_tls_certificate, self.node_tls_private_key)
        if not self.node_tls and files == (None, None, None):
            return None
        from radix_cache_service.client.tls import Tls  # noqa: PLC0415 - no gRPC unless there is need

        return Tls(*files)

    def make_node_token(self) -> str | None:
        """Return the token that nodes are shown, read anew; None without one. No error quotes it."""
        if self.node_token_file is None:
            return None
        try:
            token = Path(self.node_token_file).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise InvalidArgument(f"node_token_file {self.node_token_file}: {error.strerror}") from error
        if not is_token(token):
            raise InvalidArgument(f"node_token_file {self.node_token_file} has no token in it")
        return token

    @property
    def max_message_bytes(self) -> int:
        """The longest message of either direction."""
        return message_limit(self.max_tokens)
