"""A lease that has ended stays ended, though its id may be another's by now: its object never acts on that one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import Clock

from radix_cache import Lease, PrefixCache
from radix_cache.errors import LeaseExpired, UnknownLease

PROMPT = [1, 2, 3, 4]


def opened(cache: PrefixCache) -> Lease:
    return cache.match_prefix(PROMPT, num_tokens=6, lease_id="request-1")


VERBS: dict[str, Callable[[Any, Lease], object]] = {
    "allocate": lambda cache, lease: cache.allocate(lease, num_tokens=8),
    "insert": lambda cache, lease: cache.insert(lease, PROMPT),
    "free": lambda cache, lease: cache.free(lease, lease.block_table[-1:]),
    "release": lambda cache, lease: cache.release(lease),
    "renew": lambda cache, lease: cache.renew(lease, 5.0),
    "unpin": lambda cache, lease: cache.unpin(lease),
    "fork": lambda cache, lease: cache.match_prefix([5], parent=lease),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_released_one_is_unknown(verb: str) -> None:
    """Alone and in a batch, and the new one is as it was."""
    cache = PrefixCache(num_blocks=8, block_size=2)
    old = opened(cache)
    cache.release(old)
    new = opened(cache)
    before = cache.stats(), list(new.block_table)
    with pytest.raises(UnknownLease, match="request-1") as caught:
        VERBS[verb](cache, old)
    assert not isinstance(caught.value, LeaseExpired)
    with cache.batch() as batch:
        pending: Any = VERBS[verb](batch, old)
    with pytest.raises(UnknownLease, match="request-1"):
        pending.result()
    assert (cache.stats(), list(new.block_table)) == before
    cache.check_integrity()


def test_an_expired_one_has_expired() -> None:
    """Also when its id lives again."""
    clock = Clock()
    cache = PrefixCache(num_blocks=8, block_size=2, lease_ttl_s=10.0, clock=clock)
    old = opened(cache)
    clock.advance(10.0)
    new = opened(cache)
    with pytest.raises(LeaseExpired, match="request-1"):
        cache.release(old)
    cache.release(new)


@pytest.mark.parametrize("end", ["unpin", "reset", "release_engine"])
def test_however_it_ended(end: str) -> None:
    """A pin that a reset took, a lease of an engine that is dead."""
    cache = PrefixCache(num_blocks=8, block_size=2)
    first = cache.match_prefix(PROMPT, num_tokens=4)
    cache.insert(first, PROMPT)
    if end == "release_engine":
        old = cache.match_prefix(PROMPT, lease_id="request-1", engine_id="E")
        cache.release_engine("E")
    else:
        old = cache.pin(PROMPT, 60.0, lease_id="request-1")
        cache.reset() if end == "reset" else cache.unpin(old)
    new = cache.pin(PROMPT, 60.0, lease_id="request-1")
    with pytest.raises(UnknownLease):
        cache.release(old)
    cache.release(new)


def test_an_id_given_anew_within_one_batch() -> None:
    """What the batch opens is named by its pending answer or by the id, never by the object that had the id before."""
    cache = PrefixCache(num_blocks=8, block_size=2)
    old = opened(cache)
    with cache.batch() as batch:
        batch.release(old)
        new = batch.match_prefix(PROMPT, num_tokens=6, lease_id="request-1")
        late = batch.release(old)
        grown = batch.allocate(new, num_tokens=8)
        named = batch.allocate("request-1", num_tokens=10)
    with pytest.raises(UnknownLease, match="request-1"):
        late.result()
    assert [len(grown.result()), len(named.result())] == [1, 1]
    assert len(new.result().block_table) == 5
    cache.release(new.result())


def test_the_id_alone_names_whoever_has_it() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    cache.release(opened(cache))
    opened(cache)
    cache.release("request-1")
    assert cache.stats().num_leases == 0


# In batches with a number of the caller's, which are to be the same when they are sent again.


def test_a_number_lets_no_ended_lease_through() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    old = opened(cache)
    cache.release(old)
    new = opened(cache)
    with cache.batch(engine_id="E", seq=1) as batch:
        refused = [batch.allocate(old, num_blocks=1), batch.release(old)]
    for pending in refused:
        with pytest.raises(UnknownLease, match="request-1"):
            pending.result()
    assert len(cache.allocate(new, num_blocks=1)) == 1


def test_a_batch_that_is_sent_again_is_the_same_though_it_ended_what_it_names() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    old, other = opened(cache), cache.match_prefix([5, 6], num_tokens=2)

    def answers() -> list[object]:
        with cache.batch(engine_id="E", seq=7) as batch:
            pending = [
                batch.release(old),
                batch.match_prefix(PROMPT, num_tokens=4, lease_id="request-1"),
                batch.insert(old, PROMPT),  # not this one's name any more: refused before it is sent
                batch.allocate(other, num_blocks=1),
                batch.release(other),
            ]
        return [attempt(each.result) for each in pending]

    first, stats = answers(), cache.stats()
    assert isinstance(first[2], UnknownLease)
    assert [str(answer) for answer in answers()] == [str(answer) for answer in first]
    assert cache.stats() == stats


def attempt(result: Callable[[], object]) -> object:
    try:
        return result()
    except UnknownLease as error:
        return error


def test_an_answer_stands_for_its_own_lease_only() -> None:
    """Also in a later batch, and when its lease has ended and the name is another's."""
    cache = PrefixCache(num_blocks=8, block_size=2)
    with cache.batch() as batch:
        pending = batch.match_prefix(PROMPT, num_tokens=4, lease_id="request-1")
    assert len(cache.allocate(pending, num_blocks=1)) == 1
    cache.release(pending)
    new = opened(cache)
    with pytest.raises(UnknownLease, match="request-1"):
        cache.allocate(pending, num_blocks=1)
    with cache.batch() as batch:
        late = batch.release(pending)
    with pytest.raises(UnknownLease, match="request-1"):
        late.result()
    cache.release(new)
