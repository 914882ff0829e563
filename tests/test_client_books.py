"""The bookkeeping of lost answers, without any I/O, at times of the test's choice."""

from __future__ import annotations

import pytest

from radix_cache.errors import InvalidArgument, LeaseExpired, ServiceUnavailable, UnknownLease
from radix_cache.operations import Allocate, MatchPrefix, Release
from radix_cache_service.client.losses import Losses


def match(lease_id: str) -> MatchPrefix:
    return MatchPrefix(b"", lease_id)


def test_orphans_are_due_at_once_then_once_a_second_then_when_it_is_certain() -> None:
    losses = Losses()
    losses.lose([match("a"), Release("b"), match("c"), Release("c")], (), frozenset(), 9.0, None, 1.0)
    assert losses.next_due() == 1.0
    assert losses.take_due(1.0, 2) == ["a", "c"] or sorted(losses.orphans) == ["a", "b", "c"]
    losses.take_due(1.0, 99)
    assert losses.take_due(1.5, 99) == []
    for name in "abc":
        losses.settle(name, ServiceUnavailable("?"), 1.0)
    assert sorted(losses.take_due(2.0, 99)) == ["a", "b", "c"]
    losses.settle("a", None, 2.0)
    losses.settle("b", LeaseExpired("b"), 2.0)
    losses.settle("c", UnknownLease("c"), 2.0)
    assert list(losses.orphans) == ["c"]
    assert losses.take_due(8.9, 99) == []
    assert losses.take_due(9.0, 99) == ["c"]
    losses.settle("c", UnknownLease("c"), 9.0)
    losses.settle("c", None, 9.0)
    assert losses.next_due() is None


def test_the_name_of_an_orphan_is_in_use_while_it_is_being_released() -> None:
    losses = Losses()
    losses.lose([match("a")], (), frozenset(), 9.0, None, 1.0)
    assert losses.begin([match("a")], None, False, 1.0) == {"a"}
    assert list(losses.orphans) == []
    losses.lose([match("a")], (), frozenset("a"), 9.0, None, 1.0)
    losses.take_due(1.0, 99)
    with pytest.raises(InvalidArgument, match="in use"):
        losses.begin([match("a")], None, False, 1.0)
    losses.settle("a", ServiceUnavailable("?"), 1.0)
    assert losses.begin([match("a")], None, False, 1.0) == {"a"}


def test_a_lease_of_a_lost_batch_can_be_asked_for_alone() -> None:
    losses = Losses()
    losses.lose([match("a"), match("b"), Allocate("c", 1)], (), frozenset(), 9.0, 7, 1.0)
    assert losses.begin([match("a")], None, False, 1.0) == {"a"}
    losses.give_up(1.0)
    assert list(losses.orphans) == ["b"]
    assert losses.is_given_up("b", 7)
    assert not losses.is_given_up("b", 8)
