"""Batches, engines and time on every route: order, independent errors, retries, admission, growth, and who lives until
when.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from helpers import Counters, counters
from routes import Caller
from scenarios import OpenRoute

from radix_cache.errors import (
    BatchNotRun,
    InvalidArgument,
    InvalidBlocks,
    InvalidTokens,
    LeaseExpired,
    OldSeq,
    PoolExhausted,
    UnknownLease,
)


@pytest.fixture
def engine(open_route: OpenRoute) -> Caller:
    """An engine on a new cache of 8 blocks of 2 tokens."""
    return open_route(num_blocks=8, block_size=2).caller("E")


class TestOrder:
    def test_each_sees_what_the_one_before_did(self, engine: Caller) -> None:
        """One message, one step."""
        lease = engine.match_prefix([1, 2, 3, 4], num_tokens=4)
        with engine.batch() as step:
            first = step.probe([1, 2, 3, 4])
            inserted = step.insert(lease, [1, 2, 3, 4])
            second = step.probe([1, 2, 3, 4])
            released = step.release(lease)
            evicted = step.evict(1)
            third = step.probe([1, 2, 3, 4])
            reset = step.reset()
            fourth = step.probe([1, 2, 3, 4])
        assert [answer.result() for answer in (first, second, third, fourth, evicted)] == [0, 4, 2, 0, 1]
        assert [answer.result() for answer in (released, reset)] == [None, None]
        assert inserted.result().num_cached_tokens == 0
        assert counters(engine.stats()) == Counters(free=8, leased=0, cached=0, evictable=0, protected=0)

    def test_one_error_does_not_stop_the_next(self, engine: Caller) -> None:
        """Each is all or nothing, with its own answer or error, bad arguments included."""
        lease = engine.match_prefix([1, 2], num_tokens=4)
        with engine.batch() as step:
            bad = [
                (step.allocate(lease, num_blocks=9), PoolExhausted),
                (step.match_prefix([2**32]), InvalidTokens),
                (step.free(lease, [lease.block_table[0]]), InvalidBlocks),
                (step.release("nobody"), UnknownLease),
                (step.evict(-1), InvalidArgument),
                (step.allocate(lease), InvalidArgument),
                (step.renew(lease, ttl_s=-1), InvalidArgument),
                (step.reset((), [1]), InvalidTokens),
            ]
            good = step.allocate(lease, num_blocks=1)
        for answer, error in bad:
            with pytest.raises(error) as caught:
                answer.result()
            assert type(caught.value) is error
        assert len(good.result()) == 1
        assert counters(engine.stats()) == Counters(free=5, leased=3, cached=0, evictable=0, protected=0)

    def test_an_empty_one_is_nothing(self, engine: Caller) -> None:
        """A scheduler with nothing to do may still send its step."""
        with engine.batch(seq=1):
            pass
        assert engine.stats().num_leases == 0

    def test_answers_are_there_only_afterwards(self, engine: Caller) -> None:
        """And a batch that an exception left never runs."""
        left = []
        with suppress(ZeroDivisionError), engine.batch() as step:
            left.append(step.match_prefix([1], num_blocks=1))
            with pytest.raises(BatchNotRun):
                left[0].result()
            raise ZeroDivisionError
        with pytest.raises(BatchNotRun):
            left[0].result()
        assert engine.stats().num_leases == 0

    def test_answers_can_be_read_again(self, engine: Caller) -> None:
        """The same value, or the same error."""
        with engine.batch() as step:
            opened, refused = step.match_prefix([1], num_blocks=1), step.release("nobody")
        assert opened.result() is opened.result()
        for _ in range(2):
            with pytest.raises(UnknownLease):
                refused.result()


class TestLeasesOpenedInIt:
    def test_can_be_named_at_once(self, engine: Caller) -> None:
        """By the pending answer, or by the id that it has from the beginning."""
        with engine.batch() as step:
            opened = step.match_prefix([1, 2], num_tokens=2)
            grown = step.allocate(opened, num_tokens=4)
            forked = step.match_prefix([5], parent=opened.lease_id, num_blocks=1)
            renewed = step.renew(opened)
            released = step.release(forked)
        assert opened.result().lease_id == opened.lease_id
        assert list(opened.result().block_table)[1:] == list(grown.result())
        assert forked.result().lease_id == forked.lease_id != opened.lease_id
        assert renewed.result() is released.result() is None
        assert counters(engine.stats()).leased == 2
        engine.release(opened.lease_id)

    def test_fail_all_that_names_them_if_they_failed(self, engine: Caller) -> None:
        """With the same error, through forks of forks; the others run."""
        with engine.batch() as step:
            failed = step.match_prefix([1, 2], num_blocks=9)
            bad = step.match_prefix([-1], lease_id="bad")
            named = [
                step.allocate(failed, num_blocks=1),
                step.insert(failed, [1, 2]),
                step.free(failed, []),
                step.release(failed.lease_id),
                child := step.match_prefix([], parent=failed),
                step.allocate(child, num_blocks=1),
            ]
            named_bad = [step.release("bad"), step.match_prefix([], parent="bad")]
            other = step.match_prefix([3, 4], num_blocks=8)
        for answer in [failed, *named]:
            with pytest.raises(PoolExhausted, match="9 blocks needed, 8 available"):
                answer.result()
        for answer in [bad, *named_bad]:
            with pytest.raises(InvalidTokens):
                answer.result()
        assert len(other.result().block_table) == 8

    def test_can_be_opened_at_a_second_try(self, engine: Caller) -> None:
        """Under the same name: what names it then means the lease that is there."""
        with engine.batch() as step:
            step.match_prefix([1, 2], num_blocks=9, lease_id="x")
            early = step.allocate("x", num_blocks=1)
            step.match_prefix([2**32], lease_id="y")
            step.match_prefix([1, 2], lease_id="x")
            step.match_prefix([1, 2], lease_id="y")
            late = [step.allocate("x", num_blocks=1), step.allocate("y", num_blocks=1)]
        with pytest.raises(PoolExhausted):
            early.result()
        assert [len(answer.result()) for answer in late] == [1, 1]


class TestStrict:
    def test_refuses_all_that_needs_blocks_after_the_first_refusal(self, engine: Caller) -> None:
        """Nobody overtakes who waits for more; what needs none goes on."""
        lease = engine.match_prefix([1, 2], num_tokens=4)
        with engine.batch(strict=True) as step:
            first = step.allocate(lease, num_blocks=1)
            refused = [
                step.match_prefix([9], num_blocks=9),
                step.match_prefix([9], num_blocks=1),
                step.allocate(lease, num_blocks=1),
            ]
            fine = [
                step.match_prefix([9]),
                step.allocate(lease, num_tokens=6),
                step.insert(lease, [1, 2]),
                step.free(lease, []),
            ]
            still = step.allocate(lease, num_blocks=1)
        assert len(first.result()) == 1
        for answer in [*refused, still]:
            with pytest.raises(PoolExhausted):
                answer.result()
        for answer in fine:
            answer.result()
        assert len(engine.allocate(lease, num_blocks=1)) == 1, "strictness outlived its batch"

    def test_is_not_the_default(self, engine: Caller) -> None:
        """A small request may go first where that is wanted."""
        with engine.batch() as step:
            step.match_prefix([9], num_blocks=9)
            small = step.match_prefix([9], num_blocks=1)
        assert len(small.result().block_table) == 1

    def test_other_errors_do_not_count(self, engine: Caller) -> None:
        """Only a lack of blocks makes those wait that come later."""
        with engine.batch(strict=True) as step:
            step.release("nobody")
            fine = step.match_prefix([9], num_blocks=1)
        assert len(fine.result().block_table) == 1


class TestSeq:
    def test_the_same_again_gets_the_same_answers_and_changes_nothing(self, engine: Caller) -> None:
        """The answer was lost on the way. Nobody could write into it either."""
        lease = engine.match_prefix([1, 2, 3], num_tokens=4)
        other = engine.match_prefix([1, 2], num_tokens=2)
        engine.insert(other, [1, 2])
        seen = []
        for _ in range(3):
            with engine.batch(seq=7) as step:
                inserted, grown = step.insert(lease, [1, 2, 3]), step.allocate(lease, num_blocks=2)
                opened, failed = step.match_prefix([8], num_blocks=1, lease_id="o"), step.release("nobody")
            result, added = inserted.result(), grown.result()
            seen.append(
                (list(result.block_ids), list(result.redundant_block_ids), list(added), opened.result().lease_id)
            )
            with pytest.raises(UnknownLease):
                failed.result()
            for ids in (result.block_ids, result.redundant_block_ids, added):
                np.frombuffer(ids, dtype=np.int32)[:] = 99
        assert seen[0] == seen[1] == seen[2]
        assert counters(engine.stats()) == Counters(free=2, leased=5, cached=1, evictable=0, protected=1)

    def test_an_older_one_is_refused_whole(self, engine: Caller) -> None:
        """It was overtaken. Gaps are no mistake."""
        for seq in (3, 9):
            with engine.batch(seq=seq) as step:
                step.probe([1])
        for seq in (8, 3, 0):
            with pytest.raises(InvalidArgument, match="seq"), engine.batch(seq=seq) as step:
                late = step.match_prefix([1], num_blocks=1)
            with pytest.raises(InvalidArgument):
                late.result()
        assert engine.stats().num_leases == 0

    def test_is_each_engines_own(self, open_route: OpenRoute) -> None:
        """Two engines count apart; one without a name cannot count."""
        route = open_route(num_blocks=8, block_size=2)
        for engine_id in ("E", "F"):
            with route.caller(engine_id).batch(seq=1) as step:
                opened = step.match_prefix([1], num_blocks=1)
            assert len(opened.result().block_table) == 1
        assert counters(route.caller().stats()).leased == 2

    def test_is_a_number(self, engine: Caller) -> None:
        """One that rises. What is none is noticed before anything is written down."""
        wrong: list[Any] = [0, -1, 1.5, "1", True, 2**64]
        for seq in wrong:
            with pytest.raises(InvalidArgument, match="seq"), engine.batch(seq=seq):
                pytest.fail("the batch began")
        assert engine.stats().num_leases == 0

    def test_the_error_says_where_to_go_on(self, engine: Caller) -> None:
        """An engine that has lost count numbers its next batch behind the last that is known of it."""
        with engine.batch(seq=2**63):
            pass
        with pytest.raises(OldSeq) as caught, engine.batch(seq=5):
            pass
        assert (caught.value.seq, caught.value.last) == (5, 2**63)
        with engine.batch(seq=caught.value.last + 1) as step:
            probed = step.probe([1])
        assert probed.result() == 0

    def test_one_that_is_refused_keeps_nothing_alive(self, open_route: OpenRoute) -> None:
        """It is no word of the engine's that counts: it changes nothing, deadlines included."""
        route = open_route(num_blocks=8, block_size=2, lease_ttl_s=10.0)
        engine = route.caller("E")
        with engine.batch(seq=9) as step:
            step.match_prefix([1], num_blocks=1)
        route.advance(6)
        with pytest.raises(OldSeq), engine.batch(seq=8):
            pass
        route.advance(6)
        assert route.caller().stats().num_leases == 0


class TestGrowthShare:
    def test_is_left_to_those_who_run(self, open_route: OpenRoute) -> None:
        """A match leaves it to allocate as long as another lease holds private blocks, and no longer."""
        cache = open_route(num_blocks=8, block_size=2, growth_share=0.25).caller()
        running = cache.match_prefix([1, 2], num_blocks=2)
        with pytest.raises(PoolExhausted) as caught:
            cache.match_prefix([3, 4], num_blocks=5)
        assert (caught.value.needed, caught.value.available) == (5, 4)
        second = cache.match_prefix([3, 4], num_blocks=4)
        assert len(cache.match_prefix([5]).block_table) == 0
        assert len(cache.allocate(running, num_blocks=2)) == 2
        cache.release(running)
        cache.release(second)
        assert len(cache.match_prefix([3, 4], num_blocks=8).block_table) == 8

    def test_counts_what_could_be_evicted(self, open_route: OpenRoute) -> None:
        """Blocks that are cached and unlocked are as good as free ones, its own match's are not."""
        cache = open_route(num_blocks=8, block_size=2, growth_share=0.25).caller()
        first = cache.match_prefix([1, 2, 3, 4], num_tokens=6)
        cache.insert(first, [1, 2, 3, 4])
        cache.release(first)
        cache.match_prefix([9], num_blocks=1)
        with pytest.raises(PoolExhausted, match="4 blocks needed, 3 available"):
            cache.match_prefix([1, 2, 3, 4, 5], num_blocks=4)
        assert cache.match_prefix([1, 2, 3, 4, 5], num_blocks=3).num_cached_tokens == 4


class TestTime:
    def test_without_an_engine_a_call_renews_the_lease_that_it_names(self, open_route: OpenRoute) -> None:
        """And no other."""
        route = open_route(num_blocks=8, block_size=2, lease_ttl_s=10)
        cache = route.caller()
        named, forgotten = cache.match_prefix([1], num_blocks=1), cache.match_prefix([2], num_blocks=1)
        route.advance(6)
        cache.allocate(named, num_tokens=1)
        route.advance(4)
        with pytest.raises(LeaseExpired):
            cache.allocate(forgotten, num_tokens=1)
        route.advance(5)
        cache.release(named)

    def test_every_call_of_an_engine_renews_all_of_its_leases(self, open_route: OpenRoute) -> None:
        """Whatever it names, also in a batch, also one that is repeated or fails."""
        route = open_route(num_blocks=8, block_size=2, lease_ttl_s=10)
        engine, other = route.caller("E"), route.caller("F")
        leases = [engine.match_prefix([i], num_blocks=1) for i in range(3)]
        foreign = other.match_prefix([9], num_blocks=1)
        route.advance(9)
        engine.allocate(foreign, num_tokens=1)
        route.advance(1)
        assert engine.stats().num_leases == 3, "an engine speaks for its own leases only"
        route.advance(8)
        with engine.batch(seq=1) as step:
            step.probe([1])
        route.advance(9)
        with engine.batch(seq=1) as step:
            step.probe([1])
        route.advance(9)
        with pytest.raises(UnknownLease):
            engine.release("nobody")
        route.advance(9)
        for lease in leases:
            engine.release(lease)

    def test_a_promise_is_kept_and_not_taken_back(self, open_route: OpenRoute) -> None:
        """Whatever becomes of the engine, and whoever promises less later."""
        route = open_route(num_blocks=8, block_size=2, lease_ttl_s=10)
        engine, router = route.caller("E"), route.caller()
        lease = engine.match_prefix([1], num_blocks=1)
        router.renew(lease.lease_id, ttl_s=30)
        router.renew(lease.lease_id, ttl_s=1)
        engine.renew(lease)
        route.advance(29)
        assert router.stats().num_leases == 1
        route.advance(1)
        assert router.stats().num_leases == 0

    def test_an_expired_lease_gives_back_all_it_had(self, open_route: OpenRoute) -> None:
        """Private, redundant and detached blocks, and its locks."""
        route = open_route(num_blocks=8, block_size=2, lease_ttl_s=10)
        cache = route.caller()
        first, second = (cache.match_prefix([1, 2], num_tokens=6) for _ in range(2))
        cache.insert(first, [1, 2])
        cache.insert(second, [1, 2])
        cache.reset()
        assert counters(cache.stats()) == Counters(free=2, leased=5, cached=1, evictable=0, protected=1)
        route.advance(10)
        assert counters(cache.stats()) == Counters(free=8, leased=0, cached=0, evictable=0, protected=0)
