"""What is kept of answered batches: bounded, and fairly."""

from __future__ import annotations

import pytest

from radix_cache import PrefixCache
from radix_cache.answers import Answers
from radix_cache.errors import InvalidArgument
from radix_cache.operations import Outcome


def test_the_last_answer_of_each_engine_is_kept() -> None:
    answers = Answers()
    answers.put("a", 1, ["one"])
    answers.put("a", 2, ["two"])
    answers.put("b", 7, [])
    assert answers.get("a") == (2, ["two"])
    assert answers.get("b") == (7, [])
    assert answers.get("c") == (-1, [])
    assert list(answers.items()) == [("a", 2, ["two"]), ("b", 7, [])]


def test_whoever_has_most_engines_loses_the_oldest() -> None:
    """Nobody can push out another's by naming many engines."""
    answers = Answers(max_engines=4)
    answers.put("alice/0", 5, ["hers"])
    for number in range(100):
        answers.put(f"bob/{number}", 1, [number])
    assert answers.get("alice/0") == (5, ["hers"])
    assert [engine for engine, *_ in answers.items()] == ["alice/0", "bob/97", "bob/98", "bob/99"]


def test_whoever_has_most_bytes_loses_the_oldest() -> None:
    """And nothing grows without bound."""
    answers = Answers(max_bytes=100_000)
    answers.put("alice/0", 5, ["hers"])
    cache = PrefixCache(num_blocks=2000)
    for number in range(40):
        lease = cache.match_prefix([], num_blocks=2000)
        answers.put(f"bob/{number}", 1, [Outcome(lease.block_table)])
        cache.release(lease)
    kept = [engine for engine, *_ in answers.items()]
    assert kept[0] == "alice/0"
    assert kept[1:] == [f"bob/{number}" for number in range(28, 40)]


def test_the_newest_is_kept_whatever_its_size() -> None:
    answers = Answers(max_bytes=1)
    answers.put("a", 1, ["x"])
    answers.put("b", 2, ["y"])
    assert list(answers.items()) == [("b", 2, ["y"])]


def test_a_cache_protects_each_party_s_retries() -> None:
    """Thousands of batches of another do not make a lost one run twice."""
    cache = PrefixCache(num_blocks=8)
    with cache.batch(engine_id="alice/e", seq=5) as batch:
        opened = batch.match_prefix([], num_blocks=1)
    for number in range(5000):
        with cache.batch(engine_id=f"bob/{number}", seq=1):
            pass
    with cache.batch(engine_id="alice/e", seq=5) as batch:
        again = batch.match_prefix([], num_blocks=1)
    assert again.result().lease_id == opened.result().lease_id
    assert cache.stats().num_leases == 1
    with pytest.raises(InvalidArgument, match="older"), cache.batch(engine_id="alice/e", seq=4):
        pass
