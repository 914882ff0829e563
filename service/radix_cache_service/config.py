"""What a server is started with, checked as a whole before any port opens.

A field of `ServerConfig` is all there is to say of a setting: its flag, its variable and its key are derived from it
(`radix_cache_service.settings`).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from radix_cache import NamespaceLimit, PrefixCache
from radix_cache.errors import InvalidArgument
from radix_cache.operations import Namespace, check_count, check_name, check_namespace, check_seconds
from radix_cache.pool_descriptor import PoolDescriptor
from radix_cache.shares import make_shares
from radix_cache.tokens import shown
from radix_cache_service.access.addresses import check_address, check_host_and_port
from radix_cache_service.access.limits import ClientLimits
from radix_cache_service.access.secrets import Secured, check_secrets
from radix_cache_service.clock import CallClock
from radix_cache_service.events.settings import check_events
from radix_cache_service.recording import check_recording

__all__ = ["LOG_FORMATS", "LOG_LEVELS", "ServerConfig", "check_drain", "check_logs", "message_limit", "setting"]

_OVERHEAD_BYTES = 1024 * 1024
_LEAST_MESSAGE_BYTES = 64 * 1024 * 1024
_MOST_MESSAGE_BYTES = 2**31 - 1

_CACHE_SETTINGS = frozenset(
    (
        "num_blocks",
        "block_size",
        "policy",
        "num_reserved_blocks",
        "growth_share",
        "pin_share",
        "namespace_limits",
        "lease_ttl_s",
    )
)

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


def setting(default: Any, help_text: str, *flags: str, is_mode: bool = False, is_hidden: bool = False) -> Any:
    """Return a dataclass field that is also a flag, an environment variable and a key of the configuration file.

    flags: other names of the flag. is_mode: a number written in octal. is_hidden: a flag that no help shows, and
    neither variable nor key. The type says the rest: ``int``, ``float``, ``bool``, ``str``, ``tuple[str, ...]``, or one
    of them ``| None``, where None is the default and cannot be said.
    """
    return field(
        default=default, metadata={"help": help_text, "flags": flags, "is_mode": is_mode, "is_hidden": is_hidden}
    )


@dataclass(frozen=True, slots=True)
class ServerConfig(Secured):
    """A server's settings. Raises `InvalidArgument` that names the field and the value, whatever is wrong with it."""

    listen: tuple[str, ...] = setting(
        ("127.0.0.1:50051",), "HOST:PORT (port 0: any free one) or unix:/path; may be given several times."
    )
    num_blocks: int = setting(65536, "Blocks in the pool.")
    block_size: int = setting(16, "Tokens in a block.")
    policy: str = setting(
        "lru", "Eviction policy: a name, with parameters as in slru:protected_hits=3, or module:Class."
    )
    num_reserved_blocks: int = setting(0, "Ids below this are never handed out.", "--reserve-blocks")
    growth_share: float = setting(0.01, "Share of the pool that is left to requests which are running already.")
    pin_share: float = setting(0.25, "Share of the pool that pins may keep.")
    namespace_limits: tuple[str, ...] = setting(
        (), "What the namespaces under a prefix may have together: 'namespace=a max_blocks=900 min_blocks=200'."
    )
    lease_ttl_s: float = setting(60.0, "Seconds that a lease lives unheard of.", "--lease-ttl")
    max_renew_s: float = setting(86_400.0, "The longest that a renewal can let a lease outlive its engine, in seconds.")
    max_tokens: int = setting(1_048_576, "The longest prompt; the limits of messages follow from it.")
    max_operations: int = setting(1024, "The most operations in a batch.")
    max_streams: int = setting(1024, "Sessions and other streams open at once.")
    max_waiting_calls: int = setting(1024, "Calls that wait for blocks at once.")
    max_calls_per_client: int | None = setting(None, "Calls of one client in flight; no limit unless set.")
    max_streams_per_client: int | None = setting(None, "Streams of one client open at once; no limit unless set.")
    max_leases_per_client: int | None = setting(None, "Leases that one client may hold; no limit unless set.")
    max_namespaces_per_client: int | None = setting(
        None, "Namespaces in which one client may hold or cache anything; no limit unless set."
    )
    tls_certificate: str | None = setting(None, "PEM file of the certificate chain; TCP ports then speak TLS.")
    tls_private_key: str | None = setting(None, "PEM file of the certificate's private key.")
    tls_client_ca: str | None = setting(None, "PEM file of those who sign the clients' certificates (mTLS).")
    tokens_file: str | None = setting(None, "TOML file of bearer tokens; without one, everybody may do everything.")
    allow_plaintext_tokens: bool = setting(False, "Let tokens cross a network without TLS.")
    uds_mode: int = setting(0o660, "Permissions of unix sockets.", is_mode=True)
    layout_fingerprint: str = setting("", "What the KV blocks look like; clients may insist on it.")
    drain_delay_s: float = setting(0.0, "Seconds between the end of readiness and the end of service.", "--drain-delay")
    grace_s: float = setting(5.0, "Seconds that calls in flight then have.", "--grace")
    metrics_listen: str | None = setting(None, "HOST:PORT of the Prometheus metrics, for instance 127.0.0.1:9464.")
    events: bool = setting(False, "Offer the events of the cache (WatchEvents): what is stored and removed.")
    events_listen: str | None = setting(
        None, "HOST:PORT at which the events are published over ZeroMQ, for instance 127.0.0.1:5557; port 0: any."
    )
    events_replay_listen: str | None = setting(
        None, "HOST:PORT that sends missed events again; at events_listen's host and port + 1000 unless set."
    )
    events_topic: str = setting("kv", "Topic of the events over ZeroMQ; llm-d wants kv@HOST:PORT@MODEL.")
    events_format: str = setting("map", "How an event looks over ZeroMQ: map, or array for older readers.")
    events_rank: int = setting(0, "The data-parallel rank that events over ZeroMQ name.")
    events_key_file: str | None = setting(
        None, "ZeroMQ certificate with the secret key of the events' ports; they then speak CURVE and nothing else."
    )
    events_readers_dir: str | None = setting(
        None, "Directory of the ZeroMQ certificates (*.key) of those who may read; unset, all who know the server's."
    )
    allow_plaintext_events: bool = setting(
        False, "Let events, which have the prompts in them, cross a network over ZeroMQ."
    )
    max_queued_events: int = setting(8192, "Calls whose events may wait, for the server or for one reader.")
    max_kept_events: int = setting(8192, "Calls whose events are kept to be sent again.")
    otlp_endpoint: str | None = setting(None, "Where traces are sent, for instance http://127.0.0.1:4317.")
    trace_share: float = setting(0.01, "Share of the calls that are traced where the caller does not say.")
    log_format: str = setting("text", "How the log looks: text or json.")
    log_level: str = setting("info", "The least that is logged: debug, info, warning or error.")
    record_file: str | None = setting(
        None, "A new file, with .1 and so on behind it where there is one: a trace of all requests that can be shared."
    )
    max_recorded_blocks: int = setting(
        2**20, "Different blocks after which the recording ends; each takes 160 bytes of memory until then."
    )
    state_dir: str | None = setting(None, "Directory that keeps leases and tree from one start to the next.")
    pool_epoch: str = setting(
        "", "Names a life of the GPU memory: with another one than before, the cache starts cold."
    )
    pool_in_use: bool = setting(
        False, "At a start without state, hand out no block for one lease ttl: engines of before may still use them."
    )
    pool_descriptor: str | None = setting(
        None, "The shared KV pool, as JSON or as a file with it; engines are told, and the server ends with its owner."
    )
    max_journal_bytes: int = setting(2**28, "The journal of the state directory is compacted when it is longer.")
    test_clock: str | None = setting(None, "A file that the lease clock is read from.", is_hidden=True)

    def __post_init__(self) -> None:
        if not self.listen:
            raise InvalidArgument("listen needs at least one address")
        for address in self.listen:
            check_address(address)
        for name, least, most in (
            ("max_tokens", 1, 2**28),
            ("max_operations", 1, 2**20),
            ("max_streams", 1, 2**20),
            ("max_waiting_calls", 0, 2**20),
            ("uds_mode", 0, 0o777),
            ("events_rank", 0, 2**31 - 1),
            ("max_queued_events", 1, 2**24),
            ("max_kept_events", 1, 2**24),
            ("max_journal_bytes", 1, 2**40),
        ):
            check_count(getattr(self, name), name, least, most)
        for name, limit in self.client_limits._asdict().items():
            if limit is not None:
                check_count(limit, name, 1)
        check_drain(self.drain_delay_s, self.grace_s)
        check_seconds(self.lease_ttl_s, "lease_ttl_s")
        check_seconds(self.max_renew_s, "max_renew_s")
        if self.state_dir == "":
            raise InvalidArgument("state_dir is a directory, not an empty name")
        self._check_pool()
        self._check_telemetry()
        check_events(self)
        check_recording(self.record_file, self.max_recorded_blocks)
        check_secrets(self)
        self.make_cache()  # checks all that the cache is made of

    def _check_pool(self) -> None:
        """Take over what the pool's descriptor says and the settings don't."""
        if self.pool_epoch:
            check_name(self.pool_epoch, "pool_epoch")
        if self.pool_descriptor is None:
            return
        try:
            pool = PoolDescriptor.read(self.pool_descriptor)
        except InvalidArgument as error:
            raise InvalidArgument(f"pool_descriptor: {error}") from error
        for name, here in (("num_blocks", pool.num_blocks), ("block_size", pool.layout.block_size)):
            if getattr(self, name) != here:
                raise InvalidArgument(f"{name} is {getattr(self, name)}, and the pool_descriptor's pool has {here}")
        if self.num_reserved_blocks < pool.num_reserved_blocks:  # engines pad into those
            here, there = self.num_reserved_blocks, pool.num_reserved_blocks
            raise InvalidArgument(f"num_reserved_blocks is {here}, and the pool_descriptor's pool keeps {there}")
        said = {"pool_epoch": pool.pool_id, "layout_fingerprint": pool.layout.fingerprint}
        for name, value in said.items():
            object.__setattr__(self, name, getattr(self, name) or value)
        object.__setattr__(self, "pool_descriptor", pool.to_json())  # what it says now, whatever becomes of the file

    @property
    def pool(self) -> PoolDescriptor | None:
        """The shared KV pool."""
        return None if self.pool_descriptor is None else PoolDescriptor.from_json(self.pool_descriptor)

    def _check_telemetry(self) -> None:
        check_logs(self.metrics_listen, self.log_format, self.log_level)
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise InvalidArgument(f"otlp_endpoint: {self.otlp_endpoint!r} is neither http://host:port nor https://...")
        if isinstance(self.trace_share, bool) or not 0 <= self.trace_share <= 1:
            raise InvalidArgument(f"trace_share is at least 0 and at most 1, not {self.trace_share!r}")
        if self.otlp_endpoint is not None:
            import_module("radix_cache_service.telemetry.tracing")  # which says if its extra is not installed

    @property
    def client_limits(self) -> ClientLimits:
        """What one client may have open."""
        return ClientLimits(*(getattr(self, name) for name in ClientLimits._fields))

    def cache_settings(self) -> dict[str, Any]:
        """Return what the cache is made with; a state directory is kept for these alone."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name in _CACHE_SETTINGS}

    def make_cache(self, clock: Callable[[], float] = time.monotonic) -> PrefixCache:
        """Return a new, empty cache of these settings."""
        settings = self.cache_settings()
        limits = _read_limits(settings.pop("namespace_limits"))
        try:
            make_shares(limits, check_count(self.num_blocks, "num_blocks", 1) - self.num_reserved_blocks)
        except InvalidArgument as error:
            if limits:
                raise InvalidArgument(f"namespace_limits: {error}") from error
        return PrefixCache(**settings, limits=limits, clock=clock)

    def make_clock(self) -> CallClock:
        """Return the clock that leases live by."""
        return CallClock() if self.test_clock is None else CallClock(_FileClock(self.test_clock))

    @property
    def max_message_bytes(self) -> int:
        """The longest message of either direction."""
        return message_limit(self.max_tokens)


def check_drain(drain_delay_s: float, grace_s: float) -> None:
    """Raise `InvalidArgument` for a setting of that name that is wrong."""
    for name, seconds in (("drain_delay_s", drain_delay_s), ("grace_s", grace_s)):
        if seconds != 0:
            check_seconds(seconds, f"{name}, where it is not 0,")


def check_logs(metrics_listen: str | None, log_format: str, log_level: str) -> None:
    """Raise `InvalidArgument` for a setting of that name that is wrong."""
    if metrics_listen is not None:
        check_host_and_port(metrics_listen, "metrics_listen", "is not host:port")
    for name, said, known in (("log_format", log_format, LOG_FORMATS), ("log_level", log_level, LOG_LEVELS)):
        if said not in known:
            raise InvalidArgument(f"{name} is one of {', '.join(known)}, not {said!r}")


def _read_limits(texts: tuple[str, ...]) -> dict[Namespace, NamespaceLimit]:
    limits: dict[Namespace, NamespaceLimit] = {}
    for text in texts:
        prefix, limit = _read_limit(text)
        if prefix in limits:
            raise InvalidArgument(f"namespace_limits: {shown(text)} is the second one for its namespaces")
        limits[prefix] = limit
    return limits


def _read_limit(text: str) -> tuple[Namespace, NamespaceLimit]:
    """Return one of ``namespace_limits``: ``namespace=`` for each part of the prefix, then the limits, with a shell's
    quotes.
    """
    try:
        said = [word.partition("=")[::2] for word in shlex.split(text)]
        prefix = check_namespace(tuple(value for name, value in said if name == "namespace"))
        limits = [(name, int(value)) for name, value in said if name != "namespace"]
        if len(dict(limits)) < len(limits):
            raise ValueError("named twice")
        return prefix, NamespaceLimit(**dict(limits))
    except (ValueError, TypeError, AttributeError) as error:
        wanted = "namespace=a namespace=b max_blocks=9 min_blocks=2"
        raise InvalidArgument(f"namespace_limits: {shown(text)} is not of the form {wanted!r}") from error


class _FileClock:
    """Reads the time from a file at each call."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def __call__(self) -> float:
        return float(self._path.read_text(encoding="ascii") or 0)


def message_limit(max_tokens: int) -> int:
    """Return how long a message may be that serves prompts of ``max_tokens``.

    An insert's answer at block size 1 has two ids of 4 bytes for each token; a batch has several answers.
    """
    return min(max(_LEAST_MESSAGE_BYTES, 24 * max_tokens + _OVERHEAD_BYTES), _MOST_MESSAGE_BYTES)
