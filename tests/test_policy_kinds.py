"""Kinds of requests and their rates, which the policy workload-aware goes by."""

from __future__ import annotations

from radix_cache import Hints
from radix_cache.policies.kinds import OTHER, Kinds
from radix_cache.policies.rates import Rate


def test_kinds_are_bounded_and_make_room_after_an_hour() -> None:
    used = {("t0", 0)}
    kinds = Kinds(lambda kind: kind not in used)
    for number in range(63):
        kind = kinds.of(Hints(request_type=f"t{number}"), 0, is_new=True)
        assert kind == (f"t{number}", 0)
        kinds.reuse_of(kind).add(0, 1, 1)
    assert kinds.of(Hints(request_type="late"), 0, is_new=True) == OTHER
    assert kinds.of(Hints(request_type="late"), 3600, is_new=True) == OTHER
    assert kinds.of(Hints(request_type="late"), 3900, is_new=True) == ("late", 0)
    assert kinds.known(("t0", 0)) == ("t0", 0), "it has leaves"
    assert kinds.known(("t1", 0)) == OTHER


def test_turns_are_counted_by_conversation() -> None:
    kinds = Kinds(lambda kind: True)
    talk, other = Hints(conversation="a"), Hints(conversation="b")
    turns = [kinds.of(hints, 0, is_new)[1] for hints, is_new in ((talk, True), (talk, False), (other, True))]
    assert turns == [1, 1, 1]
    assert [kinds.of(talk, 0, is_new=True)[1] for _ in range(9)] == [2, 3, 4, 5, 6, 7, 8, 8, 8]


def test_a_rate_is_of_the_last_hour() -> None:
    """Events over seconds of waiting, one in ``guess_s`` counted in."""
    rate = Rate()
    assert rate.at(0, 50) == 1 / 50
    rate.add(0, 1, 10)
    rate.add(299, 1, 20)
    rate.add(400, 0, 30)
    assert rate.saved() == [(0, 2, 30.0), (1, 0, 30.0)]
    assert rate.at(3700, 50) == 3 / 110
    assert rate.at(3900, 50) == 1 / 80, "the first slice is over an hour old"
    assert Rate(rate.saved()).at(3900, 50) == 1 / 80
    assert rate.is_empty(1e6)
