"""Bad input and lost leases on every verb and every route: the right error, its attributes, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import Counters, counters
from routes import Caller
from scenarios import OpenRoute

from radix_cache import PrefixCache, errors
from radix_cache.errors import (
    InvalidArgument,
    InvalidBlocks,
    InvalidTokens,
    LeaseExpired,
    PoolExhausted,
    RadixCacheError,
    StaleLease,
    UnknownLease,
)

Act = Callable[[Caller, Any], object]

BAD_TOKENS = [[2**32], [-1], [1.5], [True], "a", b"12345", None, [[1]], np.array([1.0]), {1: 2}]
BAD_COUNTS = [-1, 1.5, True, "3", 2**70]
BAD_BLOCKS = [[-1], [2**31], [2**32], [1.5], [True], "a", None, b"\0\0\0\0", [[1]]]
NO_LEASES = [None, 5, True, b"lease", ["lease"], object()]
BAD_NAMESPACES = ["m", None, 5, (1,), ("a", None), ("x" * 2000,), ("x",) * 100]
BAD_NAMES = ["", "x" * 300, 5, b"x", True]
BAD_SECONDS = [-1, 0, float("nan"), float("inf"), "5", True, [5]]


LEASE_VERBS: dict[str, Act] = {
    "fork": lambda cache, lease: cache.match_prefix([9], parent=0 if lease is None else lease),
    "allocate": lambda cache, lease: cache.allocate(lease, num_blocks=1),
    "insert": lambda cache, lease: cache.insert(lease, [1, 2]),
    "free": lambda cache, lease: cache.free(lease, []),
    "renew": lambda cache, lease: cache.renew(lease),
    "release": lambda cache, lease: cache.release(lease),
}


class Held:
    """A cache with one lease on it: one block published, two private, one of them for a ragged tail."""

    def __init__(self, open_route: OpenRoute) -> None:
        self.caller = open_route(num_blocks=8, block_size=2).caller()
        self.lease = self.caller.match_prefix([1, 2, 3], num_tokens=6)
        self.caller.insert(self.lease, [1, 2])

    def state(self) -> tuple[Counters, int, int, list[int], int]:
        """Return all that a caller can see."""
        stats = self.caller.stats()
        probed = self.caller.probe([1, 2, 3, 4])
        return counters(stats), stats.num_leases, probed, list(self.lease.block_table), self.lease.num_published_tokens

    def refuses(self, error: type[RadixCacheError], act: Act, value: Any) -> RadixCacheError:
        """Check that ``act`` raises just this error and changes nothing."""
        before = self.state()
        with pytest.raises(error) as caught:
            act(self.caller, value)
        assert type(caught.value) is error
        assert self.state() == before
        return caught.value


@pytest.fixture
def held(open_route: OpenRoute) -> Held:
    """A cache with one lease on it."""
    return Held(open_route)


def check_all(
    held: Held, subtests: pytest.Subtests, error: type[RadixCacheError], acts: dict[str, Act], bad: list[Any]
) -> None:
    """Do each of ``acts`` with each bad value."""
    for name, act in acts.items():
        for value in bad:
            with subtests.test(act=name, value=repr(value)[:20]):
                held.refuses(error, act, value)


def test_bad_tokens(held: Held, subtests: pytest.Subtests) -> None:
    """2**32 + 5 never becomes 5, a str is no prompt, a message that was cut off is none either.

    A reset may come without tokens, but not with half a block.
    """
    acts: dict[str, Act] = {
        "match_prefix": lambda cache, tokens: cache.match_prefix(tokens, num_blocks=1),
        "fork": lambda cache, tokens: cache.match_prefix(tokens, parent=held.lease, num_blocks=1),
        "insert": lambda cache, tokens: cache.insert(held.lease, tokens),
        "insert at an offset": lambda cache, tokens: cache.insert(held.lease, tokens, offset=2),
        "probe": lambda cache, tokens: cache.probe(tokens),
        "reset": lambda cache, tokens: cache.reset((), [1, 2, 3] if tokens is None else tokens),
    }
    check_all(held, subtests, InvalidTokens, acts, BAD_TOKENS)


def test_a_bad_token_is_named(held: Held) -> None:
    """By its index in what was given."""
    error = held.refuses(InvalidTokens, lambda cache, tokens: cache.match_prefix(tokens), [1, 2, 2**32 + 5])
    assert isinstance(error, InvalidTokens)
    assert error.index == 2
    assert str(2**32 + 5) in str(error)


def test_bad_counts(held: Held, subtests: pytest.Subtests) -> None:
    """Negative numbers never count from the end, a bool is no number, and no huge one overflows."""
    acts: dict[str, Act] = {
        "max_tokens": lambda cache, count: cache.match_prefix([1, 2], max_tokens=count),
        "num_tokens": lambda cache, count: cache.match_prefix([1, 2], num_tokens=count),
        "num_blocks": lambda cache, count: cache.match_prefix([1, 2], num_blocks=count),
        "allocate tokens": lambda cache, count: cache.allocate(held.lease, num_tokens=count),
        "allocate blocks": lambda cache, count: cache.allocate(held.lease, num_blocks=count),
        "offset": lambda cache, count: cache.insert(held.lease, [1, 2], offset=count),
        "evict": lambda cache, count: cache.evict(count),
    }
    check_all(held, subtests, InvalidArgument, acts, BAD_COUNTS)


def test_bad_block_ids(held: Held, subtests: pytest.Subtests) -> None:
    """Whatever cannot be a block."""
    check_all(held, subtests, InvalidBlocks, {"free": lambda cache, ids: cache.free(held.lease, ids)}, BAD_BLOCKS)


def test_what_is_no_lease(held: Held, subtests: pytest.Subtests) -> None:
    """A lease or its id, nothing else."""
    check_all(held, subtests, InvalidArgument, LEASE_VERBS, NO_LEASES)


def test_bad_namespaces(held: Held, subtests: pytest.Subtests) -> None:
    """A str is a sequence of strings too, and would be its letters."""
    acts: dict[str, Act] = {
        "match_prefix": lambda cache, name: cache.match_prefix([1, 2], name, num_blocks=1),
        "probe": lambda cache, name: cache.probe([1, 2], name),
        "reset": lambda cache, name: cache.reset(5 if name is None else name),
    }
    check_all(held, subtests, InvalidArgument, acts, BAD_NAMESPACES)


def test_bad_seconds_and_names(held: Held, subtests: pytest.Subtests) -> None:
    """A promise is a finite time to come, an id a string of bounded length."""
    renew: dict[str, Act] = {"renew": lambda cache, ttl_s: cache.renew(held.lease, ttl_s=ttl_s)}
    check_all(held, subtests, InvalidArgument, renew, BAD_SECONDS)
    match: dict[str, Act] = {"match_prefix": lambda cache, name: cache.match_prefix([1, 2], lease_id=name)}
    check_all(held, subtests, InvalidArgument, match, BAD_NAMES)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("block_size", [0, -1, 1.5, "16", True, None]),
        ("num_blocks", [0, -1, 1.5, "8", None]),
        ("num_reserved_blocks", [-1, 8, 9, 0.5]),
        ("lease_ttl_s", [0, -1, float("nan"), "60", True]),
        ("growth_share", [-0.1, 1, 1.5, "1 %", True, float("nan")]),
        ("policy", ["no such policy", 5, "no_such_module:Class"]),
    ],
)
def test_a_cache_that_cannot_work_is_not_made(field: str, values: list[object]) -> None:
    """The error names the field; nothing divides by zero at the first request."""
    for value in values:
        with pytest.raises(InvalidArgument, match=field):
            PrefixCache(**{"num_blocks": 8, "block_size": 2, field: value})  # type: ignore[arg-type]


def test_a_lease_that_never_was(held: Held) -> None:
    """The error names it."""
    for act in LEASE_VERBS.values():
        error = held.refuses(UnknownLease, act, "never")
        assert isinstance(error, UnknownLease)
        assert error.lease_id == "never"
        assert isinstance(error, KeyError)
        assert "never" in str(error)


def test_a_lease_that_was_released(held: Held) -> None:
    """On a retry that means success, and nothing is decremented twice."""
    lease = held.caller.match_prefix([1, 2, 3], num_tokens=4)
    held.caller.release(lease)
    for act in LEASE_VERBS.values():
        for name in (lease, lease.lease_id):
            error = held.refuses(UnknownLease, act, name)
            assert isinstance(error, UnknownLease)
            assert error.lease_id == lease.lease_id


def test_a_lease_that_expired(open_route: OpenRoute) -> None:
    """It is told from one that was released: what its blocks hold may be overwritten by now."""
    route = open_route(num_blocks=8, block_size=2, lease_ttl_s=10)
    cache = route.caller()
    lease = cache.match_prefix([1, 2, 3], num_tokens=4)
    cache.insert(lease, [1, 2, 3])
    route.advance(10)
    for act in LEASE_VERBS.values():
        with pytest.raises(LeaseExpired) as caught:
            act(cache, lease)
        assert caught.value.lease_id == lease.lease_id
        assert isinstance(caught.value, UnknownLease)
        assert isinstance(caught.value, TimeoutError)
        assert counters(cache.stats()) == Counters(free=7, leased=0, cached=1, evictable=1, protected=0)


def test_a_stale_lease_can_still_be_wound_up(held: Held) -> None:
    """A request that runs with old weights may end in its own time."""
    held.caller.reset()
    for verb in ("allocate", "free", "renew", "release"):
        LEASE_VERBS[verb](held.caller, held.lease)
    assert counters(held.caller.stats()) == Counters(free=8, leased=0, cached=0, evictable=0, protected=0)


def test_a_stale_lease_publishes_nothing(held: Held) -> None:
    """Nor is anything matched through it."""
    held.caller.reset()
    for verb in ("insert", "fork"):
        error = held.refuses(StaleLease, LEASE_VERBS[verb], held.lease)
        assert isinstance(error, StaleLease)
        assert error.lease_id == held.lease.lease_id
        assert isinstance(error, RuntimeError)


def test_a_lease_goes_by_its_id_as_well(held: Held) -> None:
    """From any client, who may not have the object."""
    for act in LEASE_VERBS.values():
        act(held.caller, held.lease.lease_id)
    assert held.caller.stats().num_leases == 1, "only the fork is left"


def test_exhausted_says_what_was_needed_and_what_there_is(held: Held) -> None:
    """So that a scheduler can wait for the right number."""
    for act in (
        lambda cache, n: cache.match_prefix([5], num_blocks=n),
        lambda cache, n: cache.allocate(held.lease, num_blocks=n),
    ):
        error = held.refuses(PoolExhausted, act, 6)
        assert isinstance(error, PoolExhausted)
        assert (error.needed, error.available) == (6, 5)


def test_the_error_tree() -> None:
    """Each is one of ours and a fitting builtin, and all that is exported is one of them."""
    builtin = {
        "InvalidArgument": ValueError,
        "InvalidTokens": ValueError,
        "InvalidBlocks": ValueError,
        "PoolExhausted": MemoryError,
        "UnknownLease": KeyError,
        "LeaseExpired": TimeoutError,
        "StaleLease": RuntimeError,
        "Unauthenticated": PermissionError,
        "PermissionDenied": PermissionError,
        "LimitExceeded": RuntimeError,
        "IntegrityError": AssertionError,
        "ServiceUnavailable": ConnectionError,
        "DeadlineExceeded": TimeoutError,
    }
    for name, base in builtin.items():
        assert issubclass(getattr(errors, name), base)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), RadixCacheError)
    assert issubclass(LeaseExpired, UnknownLease)
