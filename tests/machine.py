"""Random histories of a cache, call by call against the naive model, over any route.

Several engines and callers without a name match, fork, allocate, insert, free, release, renew, evict and reset, one by
one and in batches, while time passes. Every answer is compared, and after every step every counter and every block
table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from calls import (
    Drawn,
    Evict,
    Probe,
    Release,
    Reset,
    Who,
    World,
    anything,
    evicts,
    gone,
    inserts,
    live,
    matches,
    matches_by_name,
    naming,
    pins,
    probes,
    requests,
    resets,
)
from helpers import NAMESPACES, counters
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model import OPENING, CacheModel, Call, Inserted
from routes import InProcess, Route

from radix_cache import Lease, NamespaceLimit
from radix_cache.errors import InvalidArgument, PoolExhausted, RadixCacheError, UnknownLease

TTL_S = 10
_, FAMILY, MEMBER, OTHER = NAMESPACES
LIMITS = [
    {MEMBER: NamespaceLimit(max_blocks=3)},
    {FAMILY: NamespaceLimit(max_blocks=4, min_blocks=1), OTHER: NamespaceLimit(min_blocks=2)},
    {(): NamespaceLimit(min_blocks=1), MEMBER: NamespaceLimit(max_blocks=2, min_blocks=2)},
]
LAST = Who(-1)
others = st.sampled_from(["repeat a batch", "send an old batch", "give everything back"])
seldom = st.one_of(probes, evicts, probes, evicts, resets, pins, matches_by_name, inserts(gone), naming(gone), others)
engines = st.sampled_from([None, "E", "F"])


def attempt(act: Callable[[], Any]) -> Any:
    """Return the answer, or the error in its place."""
    try:
        return act()
    except RadixCacheError as error:
        return error


def perform(target: Any, call: Call, lease_of: Callable[[str], Any]) -> Any:
    """Call the verb on a caller, or on the recorder of a batch."""
    options = dict(call.options)
    if call.verb in OPENING:
        if "parent" in options:
            options["parent"] = lease_of(options["parent"])
        return getattr(target, call.verb)(**options)
    first = [lease_of(options.pop("lease_id"))] if "lease_id" in options else []
    return getattr(target, call.verb)(*first, **options)


def plain(answer: Any) -> Any:
    """Return an answer of cache or model as something that can be compared and doesn't change any more."""
    if isinstance(answer, PoolExhausted):
        return PoolExhausted, answer.needed, answer.available
    if isinstance(answer, UnknownLease):
        return type(answer), answer.lease_id
    if isinstance(answer, RadixCacheError):
        return type(answer)
    if hasattr(answer, "num_cached_tokens") and hasattr(answer, "lease_id"):
        partial = answer.partial_block_id, answer.num_partial_tokens
        return answer.lease_id, answer.namespace, answer.num_cached_tokens, *partial
    if hasattr(answer, "redundant_block_ids"):
        return Inserted(answer.num_cached_tokens, list(answer.block_ids), list(answer.redundant_block_ids))
    return list(answer) if hasattr(answer, "__len__") else answer


def calls_of(lease_id: str, calls: list[Call], found: list[Any]) -> Iterator[tuple[Call, Any]]:
    """Yield the calls to a lease that were not refused, up to its end, with their answers."""
    for call, answer in zip(calls, found, strict=True):
        if call.options.get("lease_id") == lease_id and not isinstance(answer, RadixCacheError):
            if call.verb in OPENING:
                return  # the name was free again: what follows is another lease's
            yield call, answer


class CacheMachine(RuleBasedStateMachine):
    """A cache and its model. ``route_class`` is what a subclass changes to drive another way to a cache."""

    route_class: ClassVar[type[Route]] = InProcess

    @initialize(
        block_size=st.sampled_from([1, 2, 3]),
        num_blocks=st.integers(4, 24),
        num_reserved_blocks=st.integers(0, 1),
        lease_ttl_s=st.sampled_from([None, TTL_S]),
        growth_share=st.sampled_from([0.0, 0.0, 0.25]),
        pin_share=st.sampled_from([0.25, 0.5]),
        limits=st.sampled_from([{}, {}, *LIMITS]),
    )
    def start(self, **config: Any) -> None:
        """Begin with an empty cache."""
        self.route = self.route_class(**config)
        self.model = CacheModel(**config)
        self.world = World(self.model)
        self.leases: dict[str, Lease] = {}
        self.sent: dict[str, tuple[int, list[Call], list[Any]]] = {}  # the last numbered batch of each engine

    # One call.

    def one(self, drawn: Drawn, engine: str | None, by_id: bool) -> None:
        """Make a call on both sides and compare what comes of it."""
        call = self.resolve(drawn)
        found = attempt(lambda: perform(self.route.caller(engine), call, lambda i: self.lease_of(i, by_id)))
        self.model.begin(engine)
        self.model.offered = self.chosen(call, found)
        expected = attempt(lambda: getattr(self.model, call.verb)(**call.options, engine_id=engine))
        assert plain(found) == plain(expected), call
        self.take_note(call, found)

    def resolve(self, drawn: Drawn) -> Call:
        """Make real arguments, outside of any batch."""
        self.world.opened, self.world.opened_bare = [], []
        return drawn.resolve(self.world)

    def lease_of(self, lease_id: str, by_id: bool) -> Any:
        """Return the lease, or its id where that is wanted or there is no more than that."""
        return lease_id if by_id and self.route.shares_leases else self.leases.get(lease_id, lease_id)

    def chosen(self, call: Call, found: Any) -> list[int]:
        """Return the ids that the cache chose for this call."""
        if call.verb == "allocate" and not isinstance(found, RadixCacheError):
            return list(found)
        if isinstance(found, Lease):
            return list(found.block_table)[found.num_cached_tokens // self.model.block_size :]
        return []

    def take_note(self, call: Call, found: Any) -> None:
        """Keep the leases that were opened."""
        assert self.model.offered == [], "more blocks were handed out than were needed"
        if isinstance(found, Lease):
            self.leases[call.options["lease_id"]] = found

    @rule(drawn=matches, engine=engines)
    def match(self, drawn: Drawn, engine: str | None) -> None:
        """Begin a request."""
        self.one(drawn, engine, by_id=False)

    @rule(drawn=requests, engine=engines, insert=inserts(st.just(LAST)), ends=st.booleans())
    def whole_request(self, drawn: Drawn, engine: str | None, insert: Drawn, ends: bool) -> None:
        """Begin one, publish, and maybe end it at once."""
        num_before = len(self.leases)
        self.one(drawn, engine, by_id=False)
        if len(self.leases) > num_before:
            self.one(insert, engine, by_id=False)
            if ends:
                self.one(Release(LAST), engine, by_id=False)

    @precondition(lambda self: self.model.leases)
    @rule(drawn=naming(live), engine=engines, by_id=st.booleans())
    def go_on(self, drawn: Drawn, engine: str | None, by_id: bool) -> None:
        """Fork, allocate, insert, free, release or renew."""
        self.one(drawn, engine, by_id)

    @precondition(lambda self: self.model.ttl_s is not None)
    @rule(seconds=st.sampled_from([1, 4, 9, 10, 11, 24]), engine=engines)
    def let_time_pass(self, seconds: int, engine: str | None) -> None:
        """The next call notices, and a heartbeat may be that call."""
        self.route.advance(seconds)
        self.model.now += seconds
        if engine is not None:
            self.route.caller(engine).heartbeat()
            self.model.begin(engine)

    # Many calls at once.

    @rule(
        drawn=st.lists(anything, min_size=1, max_size=6), engine=engines, strict=st.booleans(), skip=st.integers(0, 2)
    )
    def batch(self, drawn: list[Drawn], engine: str | None, strict: bool, skip: int) -> None:
        """Several calls in one message; those of an engine are numbered, with gaps."""
        self.world.opened, self.world.opened_bare = [], []
        calls = [each.resolve(self.world) for each in drawn]
        seq = None if engine is None else self.sent.get(engine, (0,))[0] + 1 + skip
        found = self.send(calls, engine, seq, strict)
        self.model.begin(engine)
        expected = self.model.batch(calls, lambda place: self.chosen_in_batch(calls, found, place), engine, seq, strict)
        assert list(map(plain, found)) == list(map(plain, expected)), calls
        for call, answer in zip(calls, found, strict=True):
            self.take_note(call, answer)
        if engine is not None and seq is not None:
            self.sent[engine] = seq, calls, list(map(plain, found))

    def send(self, calls: list[Call], engine: str | None, seq: int | None, strict: bool = False) -> list[Any]:
        """Run a batch and return a value or an error for each call."""
        pending: list[Any] = []
        with self.route.caller(engine).batch(seq=seq, strict=strict) as recorder:
            opened: dict[str, Any] = {}
            for call in calls:
                pending.append(perform(recorder, call, lambda i: opened.get(i, self.lease_of(i, by_id=False))))
                if call.verb in OPENING:
                    opened[call.options["lease_id"]] = pending[-1]
        return [attempt(answer.result) for answer in pending]

    def chosen_in_batch(self, calls: list[Call], found: list[Any], place: int) -> list[int]:
        """Return the ids that were chosen for one call. A lease's table shows what later calls have made of it: they
        have added blocks, given some back, and replaced those that became redundant. The last of them is undone first.
        """
        opened, size = found[place], self.model.block_size
        if not isinstance(opened, Lease):
            return self.chosen(calls[place], opened)
        table, num_published = list(opened.block_table), opened.num_cached_tokens // size
        redundant: set[int] = set()
        to_undo: list[tuple[str, int, list[int]]] = []
        for call, answer in calls_of(opened.lease_id, calls[place + 1 :], found[place + 1 :]):
            if call.verb == "allocate":
                to_undo.append(("added", 0, list(answer)))
            elif call.verb == "free":
                to_undo.append(("trimmed", 0, [i for i in call.options["block_ids"] if i not in redundant]))
            elif call.verb == "insert":
                replaced = list(answer.redundant_block_ids)
                redundant.update(replaced)
                to_undo.append(("replaced", num_published, replaced))
                end = (call.options["offset"] + len(call.options["tokens"])) // size
                num_published = max(num_published, end)
        for what, at, ids in reversed(to_undo):
            if what == "added":
                del table[len(table) - len(ids) :]
            elif what == "trimmed":
                table += ids
            else:
                table[at : at + len(ids)] = ids
        return table[opened.num_cached_tokens // size :]

    # What should happen more seldom: one rule, since each rule is drawn equally often.

    @rule(what=seldom, engine=engines)
    def something_else(self, what: Drawn | str, engine: str | None) -> None:
        """Ask, make room, forget, use a name that is gone or taken, repeat a batch, send an old one, end it all."""
        if what == "repeat a batch":
            self.repeat_batches()
        elif what == "send an old batch":
            self.send_old_batches()
        elif what == "give everything back":
            self.give_everything_back()
        elif not isinstance(what, str):
            self.one(what, None if isinstance(what, Probe | Evict | Reset) else engine, by_id=True)

    def repeat_batches(self) -> None:
        """The answer was lost: the same number brings the same answers, and nothing changes."""
        for engine, (seq, calls, answers) in self.sent.items():
            found = self.send(calls, engine, seq)
            self.model.begin(engine)
            assert list(map(self.lasting, map(plain, found))) == list(map(self.lasting, answers))

    def lasting(self, said: Any) -> Any:
        """Return of an answer what does not change: a lease that everybody shares may have let go of its partial block
        since.
        """
        is_lease = isinstance(said, tuple) and len(said) == 5 and self.route.shares_leases
        return said[:3] if is_lease else said

    def send_old_batches(self) -> None:
        """Not one of its calls runs."""
        for engine, (seq, _, _) in self.sent.items():
            with pytest.raises(InvalidArgument):
                self.send([Call("evict", {"num_blocks": 99})], engine, seq - 1)

    def give_everything_back(self) -> None:
        """With no lease left, every block can be had back."""
        for _ in range(len(self.leases)):
            self.one(Release(LAST), None, by_id=True)
        self.one(Evict(self.model.num_usable), None, by_id=True)
        assert self.route.caller().stats().num_free_blocks == self.model.num_usable

    # After every step.

    @invariant()
    def all_agrees(self) -> None:
        """Counters, tables, and the cache with itself."""
        if not hasattr(self, "route"):
            return
        stats = self.route.caller().stats()
        self.model.begin(None)
        tree = self.model.tree
        expected = (
            len(self.model.freed_at),
            self.model.num_leased,
            len(tree.cached),
            tree.num_evictable,
            tree.num_protected,
        )
        assert counters(stats) == expected
        assert stats.num_leases == len(self.model.leases)
        assert stats.num_pinned_blocks == self.model.num_pinned
        self.world.gone += [lease_id for lease_id in self.leases if lease_id not in self.model.leases]
        self.leases = {lease_id: self.leases[lease_id] for lease_id in self.model.leases}
        for lease_id, lease in self.leases.items():
            expected_lease = self.model.leases[lease_id]
            assert list(lease.block_table) == self.model.table(expected_lease)
            assert lease.num_published_tokens == len(expected_lease.tokens)
        self.route.check()

    def teardown(self) -> None:
        """End the route."""
        if hasattr(self, "route"):
            self.route.close()
