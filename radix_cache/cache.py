"""The prefix cache: one pool, one tree, and the leases of the requests in flight.

Every block is free (the pool has it), leased (one lease has it) or cached (the tree has it). Each verb is one
method that first finds out whether it can do all of its work, and only then does any: so an error changes nothing, and
what the sums say holds between any two calls. The lock is held for one verb or one batch, never across anything that waits.

The verbs come in pairs: a public one that checks and packs its arguments, and a private one that takes an operation
and runs under the lock. A batch, or the service, brings operations and goes straight to the private ones.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

from radix_cache import operations
from radix_cache.batch import Batch
from radix_cache.errors import (
    IntegrityError,
    InvalidArgument,
    InvalidBlocks,
    InvalidTokens,
    PoolExhausted,
    RadixCacheError,
    StaleLease,
)
from radix_cache.index import PrefixIndex
from radix_cache.leases import Lease, LeaseTable
from radix_cache.node import BLOCK_ID_BYTES, Node
from radix_cache.operations import (
    Allocate,
    Evict,
    Free,
    Insert,
    InsertResult,
    MatchPrefix,
    Operation,
    Outcome,
    Probe,
    Release,
    Renew,
    Reset,
    check_count,
    check_name,
    check_seconds,
)
from radix_cache.policies import EvictionPolicy, make_policy
from radix_cache.pool import BlockPool
from radix_cache.stats import Counters, Description, Stats, TreeNode
from radix_cache.tokens import TOKEN_BYTES, BlockIds, TokenIds

__all__ = ["PrefixCache"]

R = TypeVar("R")
T = TypeVar("T")

_NUM_STEP_BLOCKS = 8192  # evict and reset let others in after this many
_NUM_STEP_NODES = 1024
_NUM_ANSWERS = 4096  # engines whose last batch is remembered


class PrefixCache:
    """A prefix cache over a pool of its own. Thread-safe; see the class's verbs.

    num_blocks: size of the pool. block_size: tokens in a block. policy: a name, ``"module:Class"`` or an object.
    num_reserved_blocks: ids below it are never handed out. lease_ttl_s: seconds that a lease lives unheard of; None: for
    ever. clock: seconds, never going back. growth_share: the part of the pool that `match_prefix` leaves to `allocate`
    while another lease holds private blocks, in [0, 1).

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
    ) -> None:
        self.block_size = check_count(block_size, "block_size", 1)
        self.lease_ttl_s = None if lease_ttl_s is None else check_seconds(lease_ttl_s, "lease_ttl_s")
        if isinstance(growth_share, bool) or not isinstance(growth_share, (int, float)) or not 0 <= growth_share < 1:
            raise InvalidArgument(f"growth_share is at least 0 and below 1, not {growth_share!r}")
        self.growth_share = growth_share
        self._pool = BlockPool(num_blocks, num_reserved_blocks)
        self._num_growth_blocks = int(growth_share * self._pool.num_usable_blocks)
        self._index = PrefixIndex(self.block_size, make_policy(policy))
        self._leases = LeaseTable(self.lease_ttl_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._counters = Counters()
        self._answers: OrderedDict[str, tuple[int, list[Any]]] = OrderedDict()
        self._is_refusing = False  # inside a strict batch that has run out of blocks
        self._verbs: dict[type, Callable[[Any, str | None], Any]] = {
            MatchPrefix: self._match_prefix,
            Allocate: self._allocate,
            Insert: self._insert,
            Free: self._free,
            Release: self._release,
            Renew: self._renew,
            Probe: self._probe,
            Evict: self._evict,
            Reset: self._reset,
        }

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
    ) -> Lease:
        """Find the longest cached prefix of ``tokens``, lock it, and allocate private blocks behind it.

        max_tokens: at most so many are matched; an engine passes ``len(prompt) - 1``. num_tokens: the block table then
        covers positions [0, num_tokens). num_blocks: private blocks; with both, whichever asks for fewer. parent: the
        prompt is what that lease has published, then ``tokens``. lease_id: a name of one's own, not in use.
        engine_id: whose calls keep the lease alive.

        Mutates: touches and locks the match, evicts as many blocks as are missing. O(tokens), a memcmp for each node.
        Raises `PoolExhausted`, `InvalidTokens`, `InvalidArgument`, and for ``parent`` `UnknownLease` and `StaleLease`.
        """
        operation = operations.match_prefix(tokens, namespace, max_tokens, num_tokens, num_blocks, parent, lease_id)
        if engine_id is not None:
            check_name(engine_id, "engine_id")
        with self._lock:
            self._begin(engine_id)
            return self._match_prefix(operation, engine_id)

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
        added: array[int] = self._do(operations.allocate(lease, num_tokens, num_blocks), engine_id)
        return added

    def insert(
        self, lease: Lease | str, tokens: TokenIds, offset: int = 0, engine_id: str | None = None
    ) -> InsertResult:
        """Publish the whole blocks of ``tokens``, which begin at position ``offset``, from the lease's block table.

        A promise that their KV is complete. ``offset``: a multiple of the block size, at most what is published; what
        overlaps must agree with it. Blocks whose tokens are cached already in others become redundant: the table names
        the cached ones, and the lease keeps its own until `free` or `release`. The lock grows over all that is published.
        Mutates; touches all that it covers. O(tokens).
        Raises `InvalidTokens` where they contradict what is published, `InvalidBlocks` where the table is too short,
        `StaleLease`, `UnknownLease`, `InvalidArgument`.
        """
        result: InsertResult = self._do(operations.insert(lease, tokens, offset), engine_id)
        return result

    def free(self, lease: Lease | str, block_ids: BlockIds, engine_id: str | None = None) -> None:
        """Give back redundant blocks, or the private tail of the block table (a trim), or both.

        Raises `InvalidBlocks` for any other id, and for one named twice; `UnknownLease`. O(ids).
        """
        self._do(operations.free(lease, block_ids), engine_id)

    def release(self, lease: Lease | str, engine_id: str | None = None) -> None:
        """End the lease: unlock what it matched and published, return what is still private. Touches nothing. O(depth).

        Raises `UnknownLease` for one that is gone, which on a retry means success.
        """
        self._do(operations.release(lease), engine_id)

    def renew(self, lease: Lease | str, ttl_s: float | None = None, engine_id: str | None = None) -> None:
        """Let the lease live for ``ttl_s`` seconds from now (None: the cache's ttl), whatever becomes of its engine.

        Raises `UnknownLease`, `InvalidArgument`. O(log leases).
        """
        self._do(operations.renew(lease, ttl_s), engine_id)

    def heartbeat(self, engine_id: str) -> None:
        """Renew all leases of the engine. O(1)."""
        with self._lock:
            self._begin(check_name(engine_id, "engine_id"))

    def probe(self, tokens: TokenIds, namespace: Iterable[str] = ()) -> int:
        """Return how many tokens `match_prefix` would match. Changes nothing. O(tokens)."""
        num_tokens: int = self._do(operations.probe(tokens, namespace), None)
        return num_tokens

    def evict(self, num_blocks: int) -> int:
        """Return up to ``num_blocks`` evictable blocks to the pool; the answer is how many. Gives way to other threads."""
        return _drain(self.evict_steps(num_blocks)) or 0

    def reset(self, namespace: Iterable[str] | None = None, tokens: TokenIds | None = None) -> None:
        """Forget all that is cached in namespaces that begin with ``namespace`` (None: everywhere).

        With ``tokens`` (whole blocks), only what extends that prefix. Nothing of it is matched again, from the first moment
        on; evictable blocks are free when the call returns, protected ones when they are released. Older leases in those
        namespaces can no longer insert. Gives way to other threads. Raises `InvalidTokens`. O(what is forgotten).
        """
        _drain(self.reset_steps(namespace, tokens))

    def evict_steps(self, num_blocks: int) -> Iterator[int]:
        """`evict` in pieces: yield how many blocks are evicted so far, holding the lock during a piece only."""
        left = operations.evict(num_blocks).num_blocks
        done = 0
        while True:
            with self._lock:
                self._begin(None)
                piece = self._evict(Evict(min(left - done, _NUM_STEP_BLOCKS)), None)
            done += piece
            yield done
            if done == left or not piece:
                return

    def reset_steps(self, namespace: Iterable[str] | None = None, tokens: TokenIds | None = None) -> Iterator[None]:
        """`reset` in pieces, holding the lock during a piece only. All is out of sight after the first."""
        operation = operations.reset(namespace, tokens)
        with self._lock:
            self._begin(None)
            self._detach(operation)
        while True:
            with self._lock:
                if not self._sweep():
                    return
            yield

    # Many at once.

    def batch(self, engine_id: str | None = None, seq: int | None = None, strict: bool = False) -> Batch:
        """Return a context manager whose verbs run in order when it ends, with nothing of another caller in between.

        Each is all-or-nothing, with its own answer or error. With ``strict``, once one was refused for lack of blocks,
        later ones that need blocks are refused too. ``seq`` rises with each batch of an engine: the same one again
        gets the same answers and changes nothing; an older one raises `InvalidArgument` when the batch ends.
        """
        return Batch(lambda recorded: self.run(recorded, engine_id=engine_id, seq=seq, strict=strict))

    @overload
    def run(
        self,
        operations: Sequence[Operation],
        *,
        engine_id: str | None = None,
        seq: int | None = None,
        strict: bool = False,
    ) -> list[Outcome]: ...
    @overload
    def run(
        self,
        operations: Sequence[Operation],
        *,
        engine_id: str | None = None,
        seq: int | None = None,
        strict: bool = False,
        encode: Callable[[Operation, Outcome], R],
    ) -> list[R]: ...
    def run(
        self,
        operations: Sequence[Operation],
        *,
        engine_id: str | None = None,
        seq: int | None = None,
        strict: bool = False,
        encode: Callable[[Operation, Outcome], R] | None = None,
    ) -> list[Any]:
        """Run ``operations`` in order under one lock; return an `Outcome` for each, or what ``encode`` makes of it.

        ``encode`` is called right after its operation: a lease goes on changing, an answer must not. What it returned is
        what the same ``seq`` gets again. Raises `InvalidArgument` for a ``seq`` that is older, or without an engine.
        """
        if engine_id is not None:
            check_name(engine_id, "engine_id")
        with self._lock:
            self._begin(engine_id)
            if seq is not None and (answers := self._answered(engine_id, check_count(seq, "seq", most=2**64 - 1))):
                return answers[0]
            failed: dict[str, RadixCacheError] = {}
            results: list[Any] = []
            try:
                for operation in operations:
                    outcome = self._attempt(operation, engine_id, failed, strict)
                    results.append(outcome if encode is None else encode(operation, outcome))
            finally:
                self._is_refusing = False
            if seq is not None and engine_id is not None:
                self._remember(engine_id, seq, results)
            return results

    def _attempt(
        self, operation: Operation, engine_id: str | None, failed: dict[str, RadixCacheError], strict: bool
    ) -> Outcome:
        is_match = isinstance(operation, MatchPrefix)
        needed = operation.parent_id if is_match else getattr(operation, "lease_id", None)
        error = failed.get(needed) if needed is not None else None
        if error is None:
            try:
                return Outcome(self._verbs[type(operation)](operation, engine_id))
            except RadixCacheError as refusal:
                error = refusal.with_traceback(None)
                self._is_refusing |= strict and isinstance(error, PoolExhausted)
        if is_match:
            failed[operation.lease_id] = error
        return Outcome(error=error)

    def _answered(self, engine_id: str | None, seq: int) -> tuple[list[Any]] | None:
        """Return the answers that this batch got already, in a tuple, or None if it is new."""
        if engine_id is None:
            raise InvalidArgument(f"seq {seq} is of no use without an engine_id")
        last, answers = self._answers.get(engine_id, (-1, []))
        if seq < last:
            raise InvalidArgument(f"seq {seq} is older than {last}, which engine {engine_id!r} has sent already")
        return (answers,) if seq == last else None

    def _remember(self, engine_id: str, seq: int, answers: list[Any]) -> None:
        self._answers[engine_id] = seq, answers
        self._answers.move_to_end(engine_id)
        if len(self._answers) > _NUM_ANSWERS:
            self._answers.popitem(last=False)

    # What the verbs do, under the lock.

    def _do(self, operation: Operation, engine_id: str | None) -> Any:
        if engine_id is not None:
            check_name(engine_id, "engine_id")
        with self._lock:
            self._begin(engine_id)
            return self._verbs[type(operation)](operation, engine_id)

    def _begin(self, engine_id: str | None) -> None:
        """Let leases run out whose time is up, then renew those of the engine that calls."""
        if self.lease_ttl_s is not None:
            now = self._clock()
            for lease in self._leases.expired(now):
                self._counters.num_expired_leases += 1
                self._end(lease)
            if engine_id is not None:
                self._leases.heartbeat(engine_id, now)

    def _named(self, lease_id: str, engine_id: str | None) -> Lease:
        """Find the lease; a call without an engine renews it."""
        lease = self._leases.get(lease_id)
        if engine_id is None and self.lease_ttl_s is not None:
            self._leases.renew(lease, self._clock())
        return lease

    def _match_prefix(self, operation: MatchPrefix, engine_id: str | None) -> Lease:
        tokens, lease_id, namespace, max_tokens, num_tokens, num_blocks, parent_id = operation
        if lease_id in self._leases:
            raise InvalidArgument(f"lease_id {lease_id!r} is in use")
        index = self._index
        parts: list[bytes] = []
        published = 0
        start: Node | None = None
        if parent_id is not None:
            parent = self._forked(parent_id, namespace, max_tokens, engine_id)
            namespace, published, start = parent.namespace, parent.num_published_tokens, parent._node
            parts.extend(parent._parts)
        start = start or index.roots.get(namespace)
        limit = len(tokens)
        if max_tokens is not None:
            limit = min(limit, (max_tokens - published) * TOKEN_BYTES)
        node, at, child, covered = start, 0, None, 0
        if start is not None:
            node, at, child, covered = index.walk(start, tokens, 0, index.whole(limit), parts)
        num_cached_tokens = published + (at + covered) // TOKEN_BYTES
        num_private = self._num_missing(num_cached_tokens // self.block_size, num_tokens, num_blocks)
        self._check_room(num_private, node, child, covered)

        lease = Lease(lease_id, namespace, self.block_size, num_cached_tokens, parts, engine_id)
        if num_cached_tokens and node is not None:
            lease._node = node = index.cut(child, covered) if child is not None else node
            index.touch(node)
            index.lock(node)
        if num_private:
            lease._grow(self._take(num_private))
        self._leases.add(lease, self._clock() if self.lease_ttl_s is not None else 0.0)
        self._count_lookup(lease, published + len(tokens) // TOKEN_BYTES)
        return lease

    def _forked(
        self, parent_id: str, namespace: operations.Namespace, max_tokens: int | None, engine_id: str | None
    ) -> Lease:
        """Return the parent lease of a match, if it can be one."""
        parent = self._named(parent_id, engine_id)
        if parent._is_stale:
            raise StaleLease(parent_id)
        if namespace and namespace != parent.namespace:
            raise InvalidArgument(f"a fork stays in its parent's namespace {parent.namespace}, not {namespace}")
        if max_tokens is not None and max_tokens < parent.num_published_tokens:
            raise InvalidArgument(
                f"max_tokens {max_tokens} is below the parent's {parent.num_published_tokens} published"
            )
        return parent

    def _num_missing(self, have: int, num_tokens: int | None, num_blocks: int | None) -> int:
        """How many private blocks a table of ``have`` blocks lacks; with both targets, whichever asks for fewer."""
        if num_tokens is None:
            return num_blocks or 0
        missing = max(-(-num_tokens // self.block_size) - have, 0)
        return missing if num_blocks is None else min(missing, num_blocks)

    def _check_room(self, num_private: int, node: Node | None, child: Node | None, covered: int) -> None:
        """Raise `PoolExhausted` unless a match that ends ``covered`` bytes into ``child`` can have its private blocks."""
        if not num_private:
            return
        index, pool = self._index, self._pool
        kept = 0
        if self._num_growth_blocks and pool.num_free_blocks + index.num_cached_blocks < pool.num_usable_blocks:
            kept = self._num_growth_blocks
        if num_private + kept <= pool.num_free_blocks and not self._is_refusing:
            return
        own = 0 if node is None else index.num_evictable_above(node)
        if child is not None and not child.num_locks:
            own += covered // index.block_bytes
        available = max(pool.num_free_blocks + index.num_evictable_blocks - own - kept, 0)
        self._require(num_private, available)

    def _require(self, num_blocks: int, available: int) -> None:
        if num_blocks > available or self._is_refusing:
            self._counters.num_exhausted += 1
            raise PoolExhausted(num_blocks, available)

    def _take(self, num_blocks: int) -> array[int]:
        """Allocate; what is not free is evicted first, and is known to be there."""
        missing = num_blocks - self._pool.num_free_blocks
        if missing > 0:
            self._evict(Evict(missing), None)
        self._counters.num_allocated_blocks += num_blocks
        return self._pool.allocate(num_blocks)

    def _count_lookup(self, lease: Lease, num_tokens: int) -> None:
        lease._num_queried_tokens = num_tokens
        counters = self._counters
        counters.num_lookups += 1
        counters.num_lookup_tokens += num_tokens
        counters.num_lookup_hit_tokens += lease.num_cached_tokens

    def _allocate(self, operation: Allocate, engine_id: str | None) -> array[int]:
        lease = self._named(operation.lease_id, engine_id)
        num_blocks = self._num_missing(lease.num_blocks, operation.num_tokens, operation.num_blocks)
        if not num_blocks:
            return array("i")
        self._require(num_blocks, self._pool.num_free_blocks + self._index.num_evictable_blocks)
        added = self._take(num_blocks)
        lease._grow(added)
        return added

    def _insert(self, operation: Insert, engine_id: str | None) -> InsertResult:
        lease_id, tokens, offset = operation
        lease = self._named(lease_id, engine_id)
        if lease._is_stale:
            raise StaleLease(lease_id)
        published = lease.num_published_tokens
        if offset % self.block_size or offset > published:
            raise InvalidArgument(
                f"offset is a multiple of {self.block_size} up to the {published} tokens published, not {offset}"
            )
        stop = self._index.whole(len(tokens))
        overlap = min((published - offset) * TOKEN_BYTES, stop)
        known = self._overlapping(lease, tokens[:overlap], offset) if overlap else b""
        num_new = (stop - overlap) // self._index.block_bytes
        if num_new > len(lease._private):
            raise InvalidBlocks(
                f"the tokens need {num_new} more blocks, the table has {len(lease._private)} private ones"
            )
        if num_new:
            num_cached_tokens, canonical, redundant = self._publish(lease, tokens, overlap, stop)
        else:
            num_cached_tokens, canonical, redundant = offset + stop // TOKEN_BYTES, b"", array("i")
            self._touch_to(lease, num_cached_tokens)
        self._count_request(lease)
        return InsertResult(num_cached_tokens, array("i", known + canonical), redundant)

    def _overlapping(self, lease: Lease, tokens: bytes, offset: int) -> bytes:
        """Return the published ids of ``tokens`` at ``offset``; they must be what is published there."""
        assert lease._node is not None
        start = offset * TOKEN_BYTES
        depth = lease.num_published_tokens * TOKEN_BYTES
        known, block_ids = self._index.path_slice(lease._node, depth, start, start + len(tokens))
        if known != tokens:
            wrong = next(at for at in range(len(tokens)) if known[at] != tokens[at]) // TOKEN_BYTES
            at = offset + wrong
            raise InvalidTokens(
                f"the tokens contradict what lease {lease.lease_id!r} has published at position {at}", wrong
            )
        return block_ids

    def _publish(self, lease: Lease, tokens: bytes, start: int, stop: int) -> tuple[int, bytes, array[int]]:
        """Take bytes [start, stop) of ``tokens`` into the tree, behind what the lease has published.

        Returns how many tokens from position 0 were cached before, the canonical ids, and the redundant ones.
        """
        index, held = self._index, lease._node
        parts: list[bytes] = []
        node, at, child, covered = index.walk(held or index.open_root(lease.namespace), tokens, start, stop, parts)
        if child is not None:
            node = index.cut(child, covered)
        matched = (at + covered - start) // TOKEN_BYTES
        canonical = b"".join(parts)
        redundant = lease._private[: len(canonical) // BLOCK_ID_BYTES]
        if at + covered < stop:
            adopted = lease._private[len(redundant) : (stop - start) // index.block_bytes].tobytes()
            node = index.graft(node, 1 if node is held else 0, tokens[at + covered : stop], adopted)
            canonical += adopted
            self._counters.num_inserted_blocks += len(adopted) // BLOCK_ID_BYTES
        index.touch(node)
        if node is not held:
            index.lock(node)
            if held is not None:
                index.unlock(held)
            lease._node = node
        num_cached_tokens = lease.num_published_tokens + matched
        lease._publish(canonical, redundant)
        self._counters.num_redundant_blocks += len(redundant)
        return num_cached_tokens, canonical, redundant

    def _touch_to(self, lease: Lease, num_tokens: int) -> None:
        """Touch the first ``num_tokens`` of what the lease has published."""
        if num_tokens and lease._node is not None:
            depth = lease.num_published_tokens * TOKEN_BYTES
            self._index.touch(self._index.node_above(lease._node, depth, num_tokens * TOKEN_BYTES))

    def _count_request(self, lease: Lease) -> None:
        """Count the reuse of a request once, when it first publishes."""
        if lease._num_queried_tokens:
            self._counters.num_requests += 1
            self._counters.num_queried_tokens += lease._num_queried_tokens
            self._counters.num_hit_tokens += lease.num_cached_tokens
            lease._num_queried_tokens = 0

    def _free(self, operation: Free, engine_id: str | None) -> None:
        lease = self._named(operation.lease_id, engine_id)
        num_trimmed = lease._check_return(operation.block_ids)
        lease._return(operation.block_ids, num_trimmed)
        self._pool.free(operation.block_ids)

    def _release(self, operation: Release, engine_id: str | None) -> None:
        lease = self._named(operation.lease_id, engine_id)
        self._leases.remove(lease)
        self._end(lease)

    def _end(self, lease: Lease) -> None:
        """Undo the lock and return what is private; the lease is out of the table already."""
        owned = lease._owned()
        if lease._node is not None:
            owned.frombytes(self._index.unlock(lease._node))
            lease._node = None
        if owned:
            self._pool.free(owned)

    def _renew(self, operation: Renew, engine_id: str | None) -> None:
        lease = self._named(operation.lease_id, engine_id)
        if self.lease_ttl_s is not None:
            ttl_s = self.lease_ttl_s if operation.ttl_s is None else operation.ttl_s
            self._leases.promise(lease, self._clock(), ttl_s)

    def _probe(self, operation: Probe, engine_id: str | None) -> int:
        root = self._index.roots.get(operation.namespace)
        if root is None:
            return 0
        _, at, _, covered = self._index.walk(root, operation.tokens, 0, self._index.whole(len(operation.tokens)), [])
        return (at + covered) // TOKEN_BYTES

    def _evict(self, operation: Evict, engine_id: str | None) -> int:
        num_before = self._pool.num_free_blocks
        for block_ids in self._index.evict(operation.num_blocks):
            self._pool.free(array("i", block_ids))
        num_evicted = self._pool.num_free_blocks - num_before
        self._counters.num_evicted_blocks += num_evicted
        return num_evicted

    def _reset(self, operation: Reset, engine_id: str | None) -> None:
        self._detach(operation)
        while self._sweep():
            pass

    def _detach(self, operation: Reset) -> None:
        """Put what is reset out of sight and make the older leases stale."""
        namespace, tokens = operation
        self._index.detach(namespace, self._index.checked_whole(tokens))
        for lease in self._leases:
            if lease.namespace[: len(namespace)] == namespace:
                lease._is_stale = True
        self._counters.num_resets += 1

    def _sweep(self) -> bool:
        """Free a piece of what was reset; False when there is none left."""
        freed = self._index.sweep(_NUM_STEP_NODES)
        for block_ids in freed or ():
            self._pool.free(array("i", block_ids))
        return freed is not None

    # Reading.

    def stats(self) -> Stats:
        """Return blocks by state, leases, and the counters. O(1)."""
        with self._lock:
            self._begin(None)
            index, pool = self._index, self._pool
            return Stats(
                num_free_blocks=pool.num_free_blocks,
                num_leased_blocks=pool.num_usable_blocks - pool.num_free_blocks - index.num_cached_blocks,
                num_cached_blocks=index.num_cached_blocks,
                num_evictable_blocks=index.num_evictable_blocks,
                num_protected_blocks=index.num_protected_blocks,
                num_leases=len(self._leases),
                num_nodes=index.num_nodes,
                num_namespaces=len(index.roots),
                counters=self._counters.as_dict(),
            )

    def describe(self) -> Description:
        """Return what the cache was made with."""
        return Description(
            block_size=self.block_size,
            num_blocks=self._pool.num_blocks,
            num_reserved_blocks=self._pool.num_reserved_blocks,
            policy=self._index.policy.name,
            lease_ttl_s=self.lease_ttl_s,
            growth_share=self.growth_share,
        )

    def dump(self, namespace: Iterable[str] = (), max_nodes: int = 1000, max_span_tokens: int = 16) -> list[TreeNode]:
        """Return up to ``max_nodes`` rows of the tree, parents first, from namespaces that begin with ``namespace``.

        Each shows up to ``max_span_tokens`` of its span, in whole blocks for the ids. O(rows).
        """
        wanted = operations.check_namespace(namespace)
        limit = check_count(max_nodes, "max_nodes")
        shown = check_count(max_span_tokens, "max_span_tokens", most=operations.MAX_TOKENS)
        with self._lock:
            self._begin(None)
            roots = [root for name, root in self._index.roots.items() if name[: len(wanted)] == wanted]
            return list(self._index.rows(roots, limit, shown))

    def check_integrity(self) -> None:
        """Walk tree, pool and leases; raise `IntegrityError` on the first broken invariant. O(everything)."""
        with self._lock:
            cached = self._index.check_integrity(lease._node for lease in self._leases if lease._node is not None)
            self._pool.check_integrity()
            owners = Counter(cached)
            for lease in self._leases:
                self._check_lease(lease)
                owners.update(lease._owned())
            shared = [block_id for block_id, count in owners.items() if count > 1]
            if shared:
                raise IntegrityError(f"block {shared[0]} has {owners[shared[0]]} owners")
            astray = [block_id for block_id in owners if not self._pool.is_in_use(block_id)]
            if astray:
                raise IntegrityError(f"block {astray[0]} has an owner and is free")
            if len(owners) + self._pool.num_free_blocks != self._pool.num_usable_blocks:
                lost = self._pool.num_usable_blocks - self._pool.num_free_blocks - len(owners)
                raise IntegrityError(f"{lost} blocks are neither free, leased nor cached")
            if wrong := self._leases.check():
                raise IntegrityError(wrong[0])

    def _check_lease(self, lease: Lease) -> None:
        """A lease ends in the tree where its books say, under the ids that its table names."""
        depth = lease.num_published_tokens * TOKEN_BYTES
        if (lease._node is None) is not (depth == 0):
            raise IntegrityError(f"{lease!r} is locked exactly if it has published something")
        if lease._node is None:
            return
        tokens, block_ids = self._index.path_slice(lease._node, depth, 0, depth)
        if len(tokens) != depth or not lease.block_table.tobytes().startswith(block_ids):
            raise IntegrityError(f"the block table of {lease!r} is not its path in the tree")

    def __repr__(self) -> str:
        free, cached = self._pool.num_free_blocks, self._index.num_cached_blocks
        return f"<PrefixCache {free} free and {cached} cached of {self._pool.num_blocks} blocks of {self.block_size} tokens>"


def _drain(steps: Iterator[T]) -> T | None:
    """Run all steps, letting other threads in between; return what the last one said."""
    last = None
    for number, last in enumerate(steps):  # noqa: B007
        if number:
            time.sleep(0)
    return last
