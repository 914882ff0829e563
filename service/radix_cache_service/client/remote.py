"""What both clients have in common: their settings, their books, and all that needs no waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import grpc
from google.protobuf.message import Message

from radix_cache.errors import InvalidArgument, ServiceUnavailable
from radix_cache.leases import Lease
from radix_cache.operations import (
    MAX_TOKENS,
    Operation,
    Outcome,
    Release,
    check_count,
    check_name,
    check_namespace,
    check_seconds,
)
from radix_cache.stats import Description
from radix_cache_service.calls import batch_request, read_batch, read_description
from radix_cache_service.client.books import Books
from radix_cache_service.client.connection import MAX_MESSAGE_BYTES, Connection
from radix_cache_service.client.exchange import Call, Exchange
from radix_cache_service.client.tls import Tls
from radix_cache_service.pb import prefix_cache_pb2 as pb

__all__ = ["Remote"]

_NUM_RELEASES_AT_ONCE = 256
_RELEASE_TIMEOUT_S = 1.0
_LEAST_WAIT_S = 1.0


class Remote(Connection):
    """A client's settings and state, without its channel.

    target: ``"127.0.0.1:50051"`` or ``"unix:/run/radix-cache.sock"``. engine_id: names this engine process; all its
    leases live as long as it is heard of. timeout_s: for each call. block_size, layout_fingerprint: what the caller's
    KV blocks look like; pool_epoch: which life of the GPU memory they lie in. A server that differs is refused with
    `LayoutMismatch`, at the first call.
    heartbeat_interval_s: a third of the server's ttl where none is given. max_message_bytes: for both directions.
    tls: speak TLS, see `Tls`; ``channel_credentials`` in its place are gRPC's own. token: shown to a server that wants
    to know who calls, or a function that returns it, asked before each call and each stream. It leaves the machine only
    over TLS, unless ``allow_plaintext_token`` is set.

    Nothing is sent before the first call. A forked child gets a channel and books of its own: the leases stay the
    parent's. But fork only where no other thread is in a call; better, spawn.
    """

    def __init__(
        self,
        target: str,
        engine_id: str | None = None,
        timeout_s: float = 5.0,
        block_size: int | None = None,
        layout_fingerprint: str | None = None,
        heartbeat_interval_s: float | None = None,
        channel_credentials: grpc.ChannelCredentials | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tls: Tls | None = None,
        token: str | Callable[[], str] | None = None,
        allow_plaintext_token: bool = False,
        pool_epoch: str | None = None,
    ) -> None:
        self.engine_id = None if engine_id is None else check_name(engine_id, "engine_id")
        self._wanted = pb.DescribeRequest(layout_fingerprint=layout_fingerprint, pool_epoch=pool_epoch)
        if block_size is not None:
            self._wanted.block_size = check_count(block_size, "block_size", 1)
        if heartbeat_interval_s is not None:
            check_seconds(heartbeat_interval_s, "heartbeat_interval_s")
        self._heartbeat_interval_s = heartbeat_interval_s
        super().__init__(target, timeout_s, tls, channel_credentials, token, allow_plaintext_token, max_message_bytes)

    def _reset(self) -> None:
        """Begin as a client that has done nothing yet."""
        super()._reset()
        self._books = Books(self.engine_id)
        self._began_at = self._books.clock()

    # Until when, and which server.

    @property
    def valid_until(self) -> float | None:
        """When the last answered call was sent, plus the server's ttl, on the clock of `time.monotonic`.

        Past it the leases may have run out, and an engine must launch nothing that touches their blocks. An answer that
        comes only then proves nothing for a lease that its call did not name: this stays where it is until each has
        been named in a call (`renew` will do), which tells what became of it, or released. A lease that was promised a
        time of its own, to be handed over, does not count. None where
        leases don't run out, or there is none yet. Without an engine id, the earliest of what is known of each lease.
        A server that begins anew has none of them: see `epoch`.
        """
        return self._books.valid_until

    @property
    def epoch(self) -> str | None:
        """The server's epoch; when it changes, all leases are gone. None before the first call."""
        return self._books.epoch

    @property
    def num_available_blocks(self) -> int | None:
        """Free and evictable blocks as of the last answer: a hint. None before the first."""
        return self._books.num_available_blocks

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.target}, engine {self.engine_id!r}>"

    # For the clients.

    @property
    def _interval_s(self) -> float | None:
        """Seconds between heartbeats; None where none are needed."""
        if self.engine_id is None or self._books.ttl_s is None:
            return None
        return self._heartbeat_interval_s or self._books.ttl_s / 3

    @property
    def _silence_s(self) -> float:
        """Seconds since the last answered call that renewed the engine's leases; before the first, since the start."""
        heard_at = self._books.heard_at
        return self._books.clock() - (self._began_at if heard_at is None else heard_at)

    @property
    def _until_beat_s(self) -> float:
        """Seconds until there is something to do though no call comes."""
        interval, until_orphans = self._interval_s or 1.0, self._books.until_orphans_s()
        wait = interval - self._silence_s
        least = min(interval / 10, _LEAST_WAIT_S)  # also where nothing gets through
        return max(wait if until_orphans is None else min(wait, until_orphans), least)

    @property
    def _is_idle(self) -> bool:
        return self._interval_s is not None and self._silence_s >= self._interval_s

    def _is_news(self, call: Call, state: pb.ServerState) -> bool:
        """Tell whether another server has answered the call than the one that is known."""
        if state.epoch == self._books.epoch:
            return False
        call.note_arrival()
        return True

    def _described(self, answer: pb.DescribeResponse) -> Description:
        description = read_description(answer)
        self._books.described(description)
        self._books.num_available_blocks = answer.state.num_available_blocks
        return description

    def _ask(self, method: str, request: Message) -> Call:
        return Call(self._books, method, request, self.timeout_s)

    def _ask_for_tree(self, namespace: Iterable[str], max_nodes: int, max_span_tokens: int) -> Call:
        request = pb.DumpTreeRequest(
            namespace=check_namespace(namespace),
            max_nodes=max(check_count(max_nodes, "max_nodes"), 1),  # 0 means all there
            max_span_tokens=check_count(max_span_tokens, "max_span_tokens", most=MAX_TOKENS),
        )
        return self._ask("DumpTree", request)

    def _ask_for_namespaces(self, namespace: Iterable[str], max_namespaces: int) -> Call:
        most = check_count(max_namespaces, "max_namespaces", 1)
        request = pb.GetStatsRequest(namespace=check_namespace(namespace), max_namespaces=most)
        return self._ask("GetStats", request)

    def _ask_for_leases(self, engine_id: str | None) -> Call:
        name = "" if engine_id is None else check_name(engine_id, "engine_id")
        return self._ask("ListLeases", pb.ListLeasesRequest(engine_id=name))

    def _ask_to_release(self, engine_id: str) -> Call:
        return self._ask("ReleaseEngine", pb.ReleaseEngineRequest(engine_id=check_name(engine_id, "engine_id")))

    def _check_seq(self, seq: int | None) -> None:
        """Raise `InvalidArgument` for what is no number of a batch, before anything is written down for it."""
        if seq is not None:
            check_count(seq, "seq", 1, 2**64 - 1)
            if self.engine_id is None:
                raise InvalidArgument(f"seq {seq} is of no use without an engine_id")

    def _batch_exchange(
        self, operations: Sequence[Operation], given: dict[str, Lease], seq: int | None, strict: bool
    ) -> Exchange:
        """Return a batch of the caller's, numbered by the caller, or else as the engine's next."""
        number = self._books.next_seq() if seq is None and self.engine_id is not None else seq
        return Exchange.of_batch(self._books, operations, given, self.timeout_s, number, seq, strict)

    def _heartbeat(self, engine_id: str | None) -> Call:
        named = self.engine_id if engine_id is None else check_name(engine_id, "engine_id")
        if named is None:
            raise InvalidArgument("a heartbeat needs an engine_id")
        return self._ask("Renew", pb.RenewRequest(engine_id=named))

    def _beaten(self, call: Call) -> None:
        """A heartbeat was answered."""
        if getattr(call.request, "engine_id", None) == self.engine_id:
            self._books.heard(call.sent_at)

    # Giving back what nobody here has.

    def _releases(self, lease_ids: Iterable[str]) -> Call:
        request = batch_request(map(Release, lease_ids), self.engine_id)
        return Call(self._books, "Batch", request, max(self.timeout_s, _RELEASE_TIMEOUT_S))

    def _settle(self, lease_ids: list[str], call: Call, answer: pb.BatchResponse | None) -> None:
        """Note what became of the release of orphans; None: there was no answer."""
        operations = [Release(lease_id) for lease_id in lease_ids]
        lost = [Outcome(error=ServiceUnavailable("no answer"))] * len(lease_ids)
        outcomes = lost if answer is None else read_batch(operations, answer)
        for lease_id, outcome in zip(lease_ids, outcomes, strict=True):
            self._books.settle(lease_id, outcome.error, call.sent_at)

    def _to_give_back(self) -> list[list[str]]:
        """Return what an orderly close releases, a list for each message."""
        owned = self._books.owned()
        most = min(_NUM_RELEASES_AT_ONCE, (self._books.description and self._books.description.max_operations) or 1)
        return [owned[start : start + most] for start in range(0, len(owned), most)]
