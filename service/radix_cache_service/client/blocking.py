"""The client: `radix_cache.PrefixCache` over gRPC.

A verb becomes an `Exchange`, is sent with a deadline, and its answer goes into the books
(`radix_cache_service.client.books`), which keep the caller's `Lease` objects as the cache in process would. Only what
may be done twice is tried a second time, and only if the first try did not reach a server or was cut off: match,
release, renew, probe, what only asks, and numbered batches.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import grpc

from radix_cache.errors import RadixCacheError, ServiceUnavailable, UnknownLease
from radix_cache.leases import Lease
from radix_cache.operations import Operation, Outcome
from radix_cache.stats import Description, LeaseInfo, NamespaceStats, TreeNode
from radix_cache_service.calls import ServerStats, read_leases, read_namespace_stats, read_nodes, read_stats
from radix_cache_service.client.batches import Batch
from radix_cache_service.client.connection import RECONNECT_S
from radix_cache_service.client.exchange import TRANSIENT, Call, Exchange
from radix_cache_service.client.remote import Remote
from radix_cache_service.client.session import Session
from radix_cache_service.client.verbs import Verbs
from radix_cache_service.client.watches import WatchedEvents, watch_request, watched
from radix_cache_service.errors import from_call_error
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc

__all__ = ["Client"]

_log = logging.getLogger(__name__)


class Client(Remote, Verbs):
    """A remote `radix_cache.PrefixCache`: the same verbs, results and errors. Thread-safe, like it.

    A lease is for one thread at a time: of two calls at once nobody knows which one the server answered first. Use the
    client as a context manager, or `close` it: that gives its leases back. See `Remote` for the arguments.
    """

    def _reset(self) -> None:
        super()._reset()
        self._lock = threading.Lock()
        self._batch_lock = threading.Lock()  # numbers must arrive in order
        self._heart: _Heart | None = None

    # Calls.

    def _do(self, operation: Operation, lease: object = None, wait_s: float | None = None) -> Any:
        self._prepare()
        exchange = Exchange.of_verb(self._books, operation, lease, self.timeout_s, wait_s)
        try:
            with exchange:
                return exchange.value(self._send(exchange))
        except UnknownLease as error:
            if not exchange.is_success(error):
                raise

    def _prepare(self) -> None:
        """Know the server, and begin to keep the engine alive: before each call."""
        self._check_open()
        if self._books.description is None:
            self.describe()
        if self._heart is None and self._interval_s is not None:
            self._start_heart()

    def _send(self, call: Call) -> Any:
        """Return the answer, of a later try if need be; raise the library's errors."""
        self._check_size(call.request)
        self._release_orphans()
        answer = self._try(call)
        if call.method != "Describe" and self._is_news(call, answer.state):
            self.describe()
        return answer

    def _try(self, call: Call) -> Any:
        while True:
            try:
                return self._send_once(call)
            except TRANSIENT as error:
                self._check_open()
                pause_s = call.repeat_after(error)
            time.sleep(pause_s)

    def _send_once(self, call: Call) -> Any:
        try:
            method = getattr(self._connected(), call.method)
            return method(call.request, timeout=call.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_call_error(error) from None

    def _connected(self) -> Any:
        """Return the stub, on a channel that is opened now if there is none."""
        with self._lock:
            return self._open(grpc, pb_grpc.PrefixCacheServiceStub)

    # Many at once.

    def batch(self, seq: int | None = None, strict: bool = False) -> Batch:
        """Return a context manager whose verbs go to the server as one message when it ends.

        As `radix_cache.PrefixCache.batch`. An engine's batches are numbered; with ``seq`` the caller numbers them, from
        1 on, and can send one again whose answer was lost: the same number gets the same answers.
        """
        self._check_seq(seq)
        return Batch(partial(self._books.check, seq=seq), partial(self._run, seq=seq, strict=strict), seq)

    def _run(
        self, operations: Sequence[Operation], given: dict[str, Lease], seq: int | None, strict: bool
    ) -> list[Outcome]:
        self._prepare()
        with self._batch_lock, self._batch_exchange(operations, given, seq, strict) as exchange:
            return exchange.answered(self._send(exchange))

    def session(self) -> Session:
        """Return a context manager with the same verbs, over a stream: less latency, and the next may be sent early."""
        return Session(self)

    # What the server says of itself.

    @property
    def block_size(self) -> int:
        """Tokens in a block. Asks the server if nothing else has so far."""
        description = self._books.description or self.describe()
        return description.block_size

    def describe(self) -> Description:
        """Ask the server what it was started with. Raises `LayoutMismatch` if that is not what this client wants."""
        self._check_open()
        return self._described(self._send(self._ask("Describe", self._wanted)))

    def stats(self) -> ServerStats:
        """Ask for blocks by state, leases and counters, and how the server does."""
        self._prepare()
        return read_stats(self._send(self._ask("GetStats", pb.GetStatsRequest())))

    def namespace_stats(self, namespace: Iterable[str] = (), max_namespaces: int = 1000) -> list[NamespaceStats]:
        """Return what each namespace that begins with ``namespace`` has: `radix_cache.PrefixCache.namespace_stats`."""
        request = self._ask_for_namespaces(namespace, max_namespaces)
        return read_namespace_stats(self._send(request))

    def dump(self, namespace: Iterable[str] = (), max_nodes: int = 1000, max_span_tokens: int = 16) -> list[TreeNode]:
        """Return up to ``max_nodes`` rows of the tree, parents first: `radix_cache.PrefixCache.dump`."""
        call = self._ask_for_tree(namespace, max_nodes, max_span_tokens)
        self._prepare()
        try:
            return [node for part in self._send_once(call) for node in read_nodes(part)][:max_nodes]
        except grpc.RpcError as error:
            raise from_call_error(error) from None

    def leases(self, engine_id: str | None = None) -> list[LeaseInfo]:
        """Return all leases of the server, or those of one engine: `radix_cache.PrefixCache.leases`."""
        call = self._ask_for_leases(engine_id)
        self._prepare()
        try:
            return [info for part in self._send_once(call) for info in read_leases(part)]
        except grpc.RpcError as error:
            raise from_call_error(error) from None

    def release_engine(self, engine_id: str) -> int:
        """End all leases of an engine that is dead: `radix_cache.PrefixCache.release_engine`."""
        call = self._ask_to_release(engine_id)
        self._prepare()
        answer = self._send(call)
        num_released: int = answer.num_released_leases
        return num_released

    def watch_events(self, after: WatchedEvents | None = None, snapshot: bool = True) -> Iterator[WatchedEvents]:
        """Yield the events of the server's cache, a batch for each call that changes any, and a heartbeat each second.

        It begins with all that is cached; without ``snapshot``, with what comes. ``after``: with what came behind the
        last batch that was seen, or, if that is no longer there or the server was started anew, with all again
        (`WatchedEvents.is_reset`). Raises `LimitExceeded` where the caller was too slow, `ServiceUnavailable` and
        `DeadlineExceeded` where nothing more is heard; each time, ``after`` the last batch goes on from there.
        """
        request = watch_request(after, snapshot)
        self._prepare()
        yield from watched(self._connected().WatchEvents(request, metadata=self._metadata), self.timeout_s)

    # Life and death.

    def heartbeat(self, engine_id: str | None = None) -> None:
        """Renew all leases of an engine, this one by default. Done in the background when no call has come for long."""
        self._check_open()
        call = self._heartbeat(engine_id)
        self._send(call)
        self._beaten(call)

    def _start_heart(self) -> None:
        with self._lock:
            if self._heart is None and not self._is_closed:
                self._heart = _Heart(self)
                self._books.wake = self._heart.woken.set
                self._heart.start()

    def _beat(self) -> float:
        """Say that the engine lives if nothing else has; return seconds until the next look."""
        try:
            if self._is_idle:
                self.heartbeat()
            self._release_orphans()
        except RadixCacheError as error:
            _log.debug("no heartbeat to %s: %s", self.target, error)
        return self._until_beat_s

    def _release_orphans(self) -> None:
        """Send the releases that are due, and don't wait for the answer."""
        lease_ids = self._books.due_orphans()
        if lease_ids:
            call = self._releases(lease_ids)
            batch = self._connected().Batch
            future = batch.future(call.request, timeout=call.timeout_s, metadata=self._metadata)
            future.add_done_callback(partial(self._orphans_released, lease_ids, call))

    def _orphans_released(self, lease_ids: list[str], call: Call, future: Any) -> None:
        try:
            answer = future.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            answer = None
        self._settle(lease_ids, call, answer)

    def close(self) -> None:
        """Give back this client's leases, less those that were promised a time of their own, and hang up.

        If the server can't be reached, they run out there. A second close does nothing.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            stub, heart = self._stub, self._heart
        if heart is not None:
            heart.stop()
        if stub is None:
            return
        try:
            for lease_ids in self._to_give_back():
                self._give_back(stub, self._releases(lease_ids))
        except grpc.RpcError as error:
            _log.info("leases were left to run out: %s", from_call_error(error))
        finally:
            self._channel.close()

    def _give_back(self, stub: Any, call: Call) -> None:
        """Release at the end; where there is no connection, to a server that was just restarted, with a new one."""
        try:
            stub.Batch(call.request, timeout=call.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            if not isinstance(from_call_error(error), ServiceUnavailable):
                raise
            stub.Batch(call.request, timeout=RECONNECT_S, metadata=self._metadata, wait_for_ready=True)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Heart(threading.Thread):
    """Beats for a client until that is closed or forgotten. woken: set when there may be something to do."""

    def __init__(self, client: Client) -> None:
        super().__init__(name="radix-cache heartbeat", daemon=True)
        self.woken = threading.Event()
        woken = self.woken
        self._client = weakref.ref(client, lambda _: woken.set())
        self._wait_s = client._until_beat_s
        self._is_stopped = False

    def run(self) -> None:
        """Look again and again."""
        while not self._is_stopped:
            if self.woken.wait(self._wait_s):
                self.woken.clear()
            client = self._client()
            if client is None:
                return
            if not self._is_stopped:
                self._wait_s = client._beat()
            del client

    def stop(self) -> None:
        """End it, and wait for a beat under way."""
        self._is_stopped = True
        self.woken.set()
        if threading.current_thread() is not self:
            self.join()
