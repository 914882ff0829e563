"""The prefix cache as its users see it: the verbs, one lock around them, batches and their retries.

Every block is free (the pool has it), leased (one lease has it) or cached (the tree has it). A verb checks and packs
its arguments here and becomes an operation; `radix_cache.executor` knows what that does. A batch, or the service,
brings operations of its own. The lock is held for one verb or one batch, never across anything that waits.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, overload

from radix_cache import operations
from radix_cache.answers import Answers
from radix_cache.batch import Batch
from radix_cache.errors import InvalidArgument, OldSeq
from radix_cache.events import Change
from radix_cache.executor import Executor
from radix_cache.hints import Hints
from radix_cache.index import PrefixIndex
from radix_cache.inspected import Inspected
from radix_cache.leases import Lease, LeaseTable
from radix_cache.operations import (
    Evict,
    InsertResult,
    Namespace,
    Operation,
    Outcome,
    Release,
    check_count,
    check_name,
    check_seconds,
)
from radix_cache.policies import EvictionPolicy, make_policy
from radix_cache.pool import FreeList
from radix_cache.shares import NamespaceLimit, SharedPolicy, make_shares
from radix_cache.tokens import BlockIds, TokenIds

__all__ = ["PrefixCache"]

_log = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")

_NUM_STEP_BLOCKS = 8192  # evict and reset let others in after this many


class PrefixCache(Inspected):
    """A prefix cache over a pool of its own. Thread-safe; see the class's verbs.

    num_blocks: size of the pool. block_size: tokens in a block. policy: a name, ``"module:Class"`` or an object.
    num_reserved_blocks: ids below it are never handed out. lease_ttl_s: seconds that a lease lives unheard of; None:
    for ever. clock: seconds, never going back. growth_share: the part of the pool that `match_prefix` leaves to
    `allocate` while another lease holds private blocks, in [0, 1). pin_share: the part of the pool that `pin` may keep,
    in [0, 1). limits: prefix of a namespace -> what all namespaces under it may have, together; where several
    prefixes fit one, the longest counts.

    >>> cache = PrefixCache(num_blocks=8, block_size=2)
    >>> lease = cache.match_prefix([1, 2, 3, 4, 5], max_tokens=4, num_tokens=6)
    >>> lease.num_cached_tokens, list(lease.block_table)
    (0, [0, 1, 2])
    >>> cache.insert(lease, [1, 2, 3, 4, 5]).num_cached_tokens
    0
    >>> cache.release(lease)
    >>> cache.probe([1, 2, 3, 4, 9])
    4
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        policy: str | EvictionPolicy = "lru",
        num_reserved_blocks: int = 0,
        lease_ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        growth_share: float = 0.0,
        pin_share: float = 0.25,
        limits: Mapping[Namespace, NamespaceLimit] | None = None,
    ) -> None:
        self.block_size = check_count(block_size, "block_size", 1)
        self.lease_ttl_s = None if lease_ttl_s is None else check_seconds(lease_ttl_s, "lease_ttl_s")
        if not callable(clock):
            raise InvalidArgument(f"clock is a function that returns seconds, not {type(clock).__name__}")
        self.growth_share = _checked_share(growth_share, "growth_share")
        self.pin_share = _checked_share(pin_share, "pin_share")
        pool = FreeList(num_blocks, num_reserved_blocks)
        order = make_policy(policy)
        order.clock = clock
        shares = make_shares(limits or {}, pool.num_usable_blocks)
        self._executor = Executor(
            pool,
            PrefixIndex(self.block_size, SharedPolicy(order, shares) if shares else order, shares),
            LeaseTable(self.lease_ttl_s),
            clock,
            int(growth_share * pool.num_usable_blocks),
            int(pin_share * pool.num_usable_blocks),
        )
        self._lock = threading.Lock()
        self._answers = Answers()
        self._listener: Callable[[list[Change]], object] | None = None

    # The verbs.

    def match_prefix(
        self,
        tokens: TokenIds,
        namespace: Iterable[str] = (),
        max_tokens: int | None = None,
        num_tokens: int | None = None,
        num_blocks: int | None = None,
        parent: Lease | str | None = None,
        lease_id: str | None = None,
        engine_id: str | None = None,
        hints: Hints | None = None,
        partial: bool = False,
    ) -> Lease:
        """Find the longest cached prefix of ``tokens``, lock it, and allocate private blocks behind it.

        max_tokens: at most so many are matched; an engine passes ``len(prompt) - 1``. num_tokens: the block table then
        covers positions [0, num_tokens). num_blocks: private blocks; with both, whichever asks for fewer. parent: the
        prompt is what that lease has published, then ``tokens``. lease_id: a name of one's own, not in use.
        engine_id: whose calls keep the lease alive. hints: what the eviction policy may know of the request.
        partial: also name the cached block that agrees longest behind the match, for a copy (`Lease.partial_block_id`);
        not where its blocks are needed for the request itself.

        Mutates: touches and locks the match, evicts as many blocks as are missing. O(tokens), a memcmp for each node.
        Raises `PoolExhausted`, `InvalidTokens`, `InvalidArgument`, and for ``parent`` `UnknownLease` and `StaleLease`.
        """
        operation = operations.match_prefix(
            tokens, namespace, max_tokens, num_tokens, num_blocks, parent, lease_id, hints, partial
        )
        lease: Lease = self.do(operation, engine_id)
        return lease

    def allocate(
        self,
        lease: Lease | str,
        num_tokens: int | None = None,
        num_blocks: int | None = None,
        engine_id: str | None = None,
    ) -> array[int]:
        """Grow the lease's block table to cover positions [0, num_tokens), or by ``num_blocks``; with both, the fewer.

        Returns the ids added, int32; none where the table covers that already. Evicts as many blocks as are missing.
        Raises `PoolExhausted`, `UnknownLease`, `InvalidArgument`. O(blocks added).
        """
        added: array[int] = self.do(operations.allocate(lease, num_tokens, num_blocks), engine_id)
        return added

    def insert(
        self,
        lease: Lease | str,
        tokens: TokenIds,
        offset: int = 0,
        engine_id: str | None = None,
        hints: Hints | None = None,
    ) -> InsertResult:
        """Publish the whole blocks of ``tokens``, which begin at position ``offset``, from the lease's block table.

        A promise that their KV is complete. ``offset``: a multiple of the block size, at most what is published; what
        overlaps must agree with it. Blocks whose tokens are cached already in others become redundant: the table names
        the cached ones, and the lease keeps its own until `free` or `release`. The lock grows over all that is
        published. ``hints``: in place of those of the match.
        Mutates; touches all that it covers. O(tokens).
        Raises `InvalidTokens` where they contradict what is published, `InvalidBlocks` where the table is too short,
        `StaleLease`, `UnknownLease`, `InvalidArgument`.
        """
        result: InsertResult = self.do(operations.insert(lease, tokens, offset, hints), engine_id)
        return result

    def free(self, lease: Lease | str, block_ids: BlockIds, engine_id: str | None = None) -> None:
        """Give back redundant blocks, or the private tail of the block table (a trim), or both.

        Raises `InvalidBlocks` for any other id, and for one named twice; `UnknownLease`. O(ids).
        """
        self.do(operations.free(lease, block_ids), engine_id)

    def release(self, lease: Lease | str, engine_id: str | None = None) -> None:
        """End the lease: unlock what it matched and published, return what is still private. Touches nothing. O(depth).

        Raises `UnknownLease` for one that is gone, which on a retry means success.
        """
        self.do(operations.release(lease), engine_id)

    def renew(self, lease: Lease | str, ttl_s: float | None = None, engine_id: str | None = None) -> None:
        """Let the lease live for ``ttl_s`` seconds from now (None: the cache's ttl), whatever becomes of its engine.

        Raises `UnknownLease`, `InvalidArgument`. O(log leases).
        """
        self.do(operations.renew(lease, ttl_s), engine_id)

    def pin(
        self,
        tokens: TokenIds,
        ttl_s: float,
        namespace: Iterable[str] = (),
        lease_id: str | None = None,
        engine_id: str | None = None,
    ) -> Lease:
        """Keep the cached part of ``tokens`` resident for ``ttl_s`` seconds, without a request: a system prompt, say.

        Returns a lease of no engine, whose ``num_cached_tokens`` are kept; `renew` with a ``ttl_s`` keeps it longer,
        `unpin` ends it, and so does a reset of what it keeps. All pins together keep at most ``pin_share`` of the pool,
        a block under two pins counted twice; what goes beyond raises `PoolExhausted`. Touches what it keeps.
        ``engine_id``: who calls; the pin outlives it.
        """
        lease: Lease = self.do(operations.pin(tokens, ttl_s, namespace, lease_id), engine_id)
        return lease

    def unpin(self, pin: Lease | str) -> None:
        """End a pin. Raises `UnknownLease` for one that is gone, `InvalidArgument` for a lease that is none."""
        self.do(operations.unpin(pin), None)

    def heartbeat(self, engine_id: str) -> None:
        """Renew all leases of the engine. O(1)."""
        with self._lock:
            self._executor.begin(check_name(engine_id, "engine_id"))

    def release_engine(self, engine_id: str) -> int:
        """End all leases of an engine that is dead, without waiting for them to run out; return how many.

        Those that `renew` promised a time of their own stay for that time: they were handed over. None of the engine's
        kernels may be running. O(leases).
        """
        check_name(engine_id, "engine_id")
        with self._lock:
            executor = self._executor
            executor.begin(None)
            infos = [executor.leases.info(lease, executor.now) for lease in executor.leases.of_engine(engine_id)]
            ended = [info.lease_id for info in infos if not info.is_promised]
            for lease_id in ended:
                executor.do(Release(lease_id), None)
            return len(ended)

    def probe(self, tokens: TokenIds, namespace: Iterable[str] = ()) -> int:
        """Return how many tokens `match_prefix` would match. Changes nothing. O(tokens)."""
        num_tokens: int = self.do(operations.probe(tokens, namespace), None)
        return num_tokens

    def evict(self, num_blocks: int) -> int:
        """Return up to ``num_blocks`` evictable blocks to the pool; the answer is how many. Gives way to other
        threads.
        """
        return _drain(self.evict_steps(num_blocks)) or 0

    def reset(self, namespace: Iterable[str] | None = None, tokens: TokenIds | None = None) -> None:
        """Forget all that is cached in namespaces that begin with ``namespace`` (None: everywhere).

        With ``tokens`` (whole blocks), only what extends that prefix. Nothing of it is matched again, from the first
        moment on; evictable blocks are free when the call returns, protected ones when they are released. Older leases
        in those namespaces can no longer insert. Gives way to other threads. Raises `InvalidTokens`. O(what is
        forgotten).
        """
        _drain(self.reset_steps(namespace, tokens))

    def evict_steps(self, num_blocks: int) -> Iterator[int]:
        """`evict` in pieces: yield how many blocks are evicted so far, holding the lock during a piece only."""
        left = operations.evict(num_blocks).num_blocks
        done = 0
        while True:
            with self._lock:
                self._executor.begin(None)
                piece = self._executor.do(Evict(min(left - done, _NUM_STEP_BLOCKS)), None)
                self._tell()
            done += piece
            yield done
            if done == left or not piece:
                return

    def reset_steps(self, namespace: Iterable[str] | None = None, tokens: TokenIds | None = None) -> Iterator[None]:
        """`reset` in pieces, holding the lock during a piece only. All is out of sight after the first."""
        operation = operations.reset(namespace, tokens)
        with self._lock:
            self._executor.begin(None)
            self._executor.detach(operation)
            self._tell()
        while True:
            with self._lock:
                if not self._executor.sweep():
                    return
            yield

    # Many at once.

    def batch(self, engine_id: str | None = None, seq: int | None = None, strict: bool = False) -> Batch:
        """Return a context manager whose verbs run in order when it ends, with nothing of another caller in between.

        Each is all-or-nothing, with its own answer or error. With ``strict``, once one was refused for lack of blocks,
        later ones that need blocks are refused too. ``seq`` rises with each batch of an engine: the same one again
        gets the same answers and changes nothing; an older one raises `OldSeq` when the batch ends. Raises
        `InvalidArgument` for what is no such number.
        """
        _check_seq(seq, engine_id)
        number = None if seq is None else (engine_id, seq)
        return Batch(lambda recorded: self.run(recorded, engine_id=engine_id, seq=seq, strict=strict), number)

    @overload
    def run(
        self,
        operations: Sequence[Operation],
        *,
        engine_id: str | None = None,
        seq: int | None = None,
        strict: bool = False,
        without_blocks: bool = False,
    ) -> list[Outcome]: ...
    @overload
    def run(
        self,
        operations: Sequence[Operation],
        *,
        engine_id: str | None = None,
        seq: int | None = None,
        strict: bool = False,
        without_blocks: bool = False,
        encode: Callable[[Operation, Outcome], R],
    ) -> list[R]: ...
    def run(
        self,
        operations: Sequence[Operation],
        *,
        engine_id: str | None = None,
        seq: int | None = None,
        strict: bool = False,
        without_blocks: bool = False,
        encode: Callable[[Operation, Outcome], R] | None = None,
    ) -> list[Any]:
        """Run ``operations`` in order under one lock; return an `Outcome` for each, or what ``encode`` makes of it.

        ``encode`` is called right after its operation: a lease goes on changing, an answer must not. What it returned
        is what the same ``seq`` gets again. ``without_blocks``: an operation that needs any is refused. Raises
        `OldSeq` for a ``seq`` that is older, `InvalidArgument` for one without an engine.
        """
        if engine_id is not None:
            check_name(engine_id, "engine_id")
        _check_seq(seq, engine_id)
        with self._lock:
            answers = None if seq is None or engine_id is None else self._answered(engine_id, seq, len(operations))
            self._executor.begin(engine_id)
            if answers is not None:
                return [_fresh(answer) for answer in answers]
            self._executor.allocator.is_refusing = without_blocks
            results = self._executor.do_all(operations, engine_id, strict, encode or _as_it_is)
            if self._listener is not None:
                self._tell()
            if seq is not None and engine_id is not None:
                self._answers.put(engine_id, seq, [_fresh(result) for result in results])
            return results

    def _answered(self, engine_id: str, seq: int, num_operations: int) -> list[Any] | None:
        """Return the answers that this batch got already, or None if it is new."""
        last, answers = self._answers.get(engine_id)
        if seq < last:
            text = f"seq {seq} is older than {last}, which engine {engine_id!r} has sent already"
            raise OldSeq(text, seq, last)
        if seq == last and len(answers) != num_operations:
            raise InvalidArgument(f"seq {seq} was a batch of {len(answers)} operations, not of {num_operations}")
        return answers if seq == last else None

    def do(self, operation: Operation, engine_id: str | None = None) -> Any:
        """Run one operation; return its value or raise its error."""
        if engine_id is not None:
            check_name(engine_id, "engine_id")
        with self._lock:
            executor = self._executor
            if executor.leases.is_timed:
                executor.begin(engine_id)
            value = executor.do(operation, engine_id)
            if self._listener is not None:
                self._tell()
            return value

    # Being listened to.

    def subscribe(self, listener: Callable[[list[Change]], object]) -> None:
        """Tell ``listener`` from now on what each call brings into the tree and takes out of it, in order.

        It gets one list a call, its own, of calls that change anything: see `radix_cache.events`. It is called under
        the cache's lock: it must be quick, and not call the cache. One that raises is unsubscribed, and the call goes
        on. Raises `InvalidArgument` while there is one.
        """
        with self._lock:
            if self._listener is not None:
                raise InvalidArgument("a cache has one listener, and this one has it already")
            self._listener = listener
            self._executor.index.changes = []

    def unsubscribe(self) -> None:
        """Tell the listener no more, if there is one."""
        with self._lock:
            self._listener = self._executor.index.changes = None

    def snapshot(self, stamp: Callable[[], object] | None = None) -> list[Change]:
        """Return the changes that would make all that can be matched now out of nothing: parents first, one a node.

        ``stamp`` is called at that moment, when no change is under way. O(nodes).
        """
        with self._lock:
            if stamp is not None:
                stamp()
            grafts = self._executor.index.grafts()
        return list(grafts)

    def _tell(self) -> None:
        """Hand over what was noted since the last time."""
        index, listener = self._executor.index, self._listener
        changes = index.changes
        if changes and listener is not None:
            index.changes = []
            try:
                listener(changes)
            except Exception:  # noqa: BLE001 - whatever it is, the call has done its work
                _log.exception("a listener failed, and is told nothing more")
                self._listener = index.changes = None

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: the leases belong to requests in flight, the blocks to one pool."""
        raise TypeError("a PrefixCache cannot be copied or pickled: its blocks and leases exist once")

    def __repr__(self) -> str:
        pool, num_cached = self._executor.pool, self._executor.index.num_cached_blocks
        return (
            f"<PrefixCache {pool.num_free_blocks} free and {num_cached} cached of {pool.num_blocks} blocks "
            f"of {self.block_size} tokens>"
        )


def _check_seq(seq: int | None, engine_id: str | None) -> None:
    if seq is not None:
        check_count(seq, "seq", 1, most=2**64 - 1)
        if engine_id is None:
            raise InvalidArgument(f"seq {seq} is of no use without an engine_id")


def _checked_share(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise InvalidArgument(f"{what} is at least 0 and below 1, not {value!r}")
    return value


def _as_it_is(operation: Operation, outcome: Outcome) -> Outcome:
    return outcome


def _fresh(answer: Any) -> Any:
    """Copy the arrays in an answer: they are the caller's to write to, and the answer is kept."""
    if isinstance(answer, array):
        return answer[:]
    if isinstance(answer, InsertResult | Outcome):
        return type(answer)(*map(_fresh, answer))
    return answer


def _drain(steps: Iterator[T]) -> T | None:
    """Run all steps, letting other threads in between; return what the last one said."""
    last = None
    for number, last in enumerate(steps):  # noqa: B007
        if number:
            time.sleep(0)
    return last
