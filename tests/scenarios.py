"""The five acceptance scenarios, written once for every route. Counts are F/L/C/E/P: blocks free, leased, cached, ...

Each function gets ``open_route`` and says with what cache it wants to begin. `test_scenarios` runs them all over each
route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import counters
from routes import Caller, Route

from radix_cache.errors import InvalidArgument, InvalidBlocks, LeaseExpired, PoolExhausted, StaleLease, UnknownLease

OpenRoute = Callable[..., Route]


def expect(caller: Caller, **wanted: int) -> None:
    """Compare some of the counters F, L, C, E, P."""
    found = counters(caller.stats())
    names = {"F": "free", "L": "leased", "C": "cached", "E": "evictable", "P": "protected"}
    assert {name: getattr(found, names[name]) for name in wanted} == wanted


def one_step_in_one_message(open_route: OpenRoute) -> None:
    """S1: a scheduler's step as one batch, the same batch again, strict admission, and what may not be freed."""
    route = open_route(num_blocks=9, block_size=2, num_reserved_blocks=1)
    engine = route.caller("E")
    a = engine.match_prefix([1, 2, 3, 4, 5, 6], num_tokens=7)
    assert (a.num_cached_tokens, len(a.block_table)) == (0, 4)
    b = engine.match_prefix([1, 2, 3, 4, 9, 9], num_tokens=4)
    assert len(b.block_table) == 2
    assert 0 not in [*a.block_table, *b.block_table]
    expect(engine, F=2, L=6, C=0)
    table_of_a, old = list(a.block_table), list(b.block_table)

    answers = [_step_of_s1(engine, a, b) for _ in range(2)]
    assert answers[0] == answers[1]
    published, redundant, added, reused, table = answers[0]
    assert published == (0, table_of_a[:3])
    assert redundant == (4, table_of_a[:2], old)
    assert len(added) == 2
    assert list(b.block_table) == table_of_a[:2] + added
    assert (reused, len(table), table[:3]) == (6, 4, table_of_a[:3])
    expect(engine, F=0, L=5, C=3, P=3)

    with engine.batch(seq=2, strict=True) as step:
        refused = [step.allocate(b, num_tokens=9), step.match_prefix([5, 5], num_tokens=2)]
        freed = step.free(b, old)
    for answer in refused:
        with pytest.raises(PoolExhausted):
            answer.result()
    freed.result()
    expect(engine, F=2, L=3)
    _what_s1_refuses(engine, b, old)
    engine.free(b, list(b.block_table)[2:])
    expect(engine, F=4, L=1)


def _step_of_s1(engine: Caller, a: Any, b: Any) -> tuple[Any, ...]:
    """Run the batch with seq 1 and return all that it answered."""
    with engine.batch(seq=1) as step:
        first = step.insert(a, [1, 2, 3, 4, 5, 6])
        second = step.insert(b, [1, 2, 3, 4])
        added = step.allocate(b, num_tokens=7)
        released = step.release(a)
        c = step.match_prefix([1, 2, 3, 4, 5, 6, 7], max_tokens=6, num_tokens=8, lease_id="c")
    released.result()
    one, two, lease = first.result(), second.result(), c.result()
    assert lease.lease_id == c.lease_id == "c"
    assert list(one.redundant_block_ids) == []
    expect(engine, F=0, L=5, C=3, P=3)
    return (
        (one.num_cached_tokens, list(one.block_ids)),
        (two.num_cached_tokens, list(two.block_ids), list(two.redundant_block_ids)),
        list(added.result()),
        lease.num_cached_tokens,
        list(lease.block_table),
    )


def _what_s1_refuses(engine: Caller, b: Any, old: list[int]) -> None:
    """An older batch, and blocks that were freed already, are shared, or are not at the end."""
    with pytest.raises(InvalidArgument), engine.batch(seq=1) as late:
        late.evict(9)
    for ids in (old, [b.block_table[0]], [b.block_table[2]]):
        with pytest.raises(InvalidBlocks):
            engine.free(b, ids)
    expect(engine, F=2, L=3)


def chunks_drafts_preemption(open_route: OpenRoute) -> None:
    """S2: prefill in chunks, decode past the end, a ragged tail, and a preemption that finds its own prefix again."""
    engine = open_route(num_blocks=6, block_size=2).caller()
    prompt = list(range(1, 11))
    a = engine.match_prefix(prompt[:8], max_tokens=7, num_tokens=9, num_blocks=2)
    assert len(a.block_table) == 2
    engine.insert(a, prompt[:4])
    for _ in range(2):
        engine.allocate(a, num_tokens=8)
        assert len(a.block_table) == 4
    engine.insert(a, prompt[4:8], offset=4)
    expect(engine, F=2, L=0, C=4)
    engine.allocate(a, num_tokens=12)
    expect(engine, F=0, L=2)
    assert list(engine.insert(a, [9], offset=8).block_ids) == []
    expect(engine, C=4, L=2)
    engine.insert(a, [9, 10], offset=8)
    expect(engine, C=5, L=1)
    again = engine.insert(a, [9, 10], offset=8)
    assert (again.num_cached_tokens, list(again.redundant_block_ids)) == (10, [])
    expect(engine, C=5, L=1)

    kept = list(a.block_table)[:3]
    with engine.batch() as step:
        released = step.release(a)
        waiting = step.match_prefix([7] * 5, num_tokens=6)
        probed = step.probe(prompt)
    released.result()
    b = waiting.result()
    assert (len(b.block_table), probed.result()) == (3, 6)

    with pytest.raises(PoolExhausted):
        engine.match_prefix(prompt, max_tokens=9, num_tokens=11)
    expect(engine, F=0, L=3, E=3, P=0)
    with engine.batch() as step:
        step.release(b)
        resumed = step.match_prefix(prompt, max_tokens=9, num_tokens=11)
    lease = resumed.result()
    assert (lease.num_cached_tokens, len(lease.block_table)) == (6, 6)
    assert list(lease.block_table)[:3] == kept
    expect(engine, L=3, P=3)


def fork_and_beam(open_route: OpenRoute) -> None:
    """S3: forks share whole blocks, go their own ways, and outlive the parent."""
    engine = open_route(num_blocks=12, block_size=2).caller()
    a = engine.match_prefix([1, 2, 3, 4, 5], ("m",), num_tokens=6)
    engine.insert(a, [1, 2, 3, 4, 5])
    k = engine.match_prefix([], parent=a, num_tokens=6)
    assert (k.num_cached_tokens, len(k.block_table)) == (4, 3)
    assert list(k.block_table)[:2] == list(a.block_table)[:2]
    assert k.block_table[2] not in list(a.block_table)
    expect(engine, F=8, L=2, C=2, P=2)

    with engine.batch() as step:
        answers = [step.insert(a, [5, 6], offset=4), step.insert(k, [5, 7], offset=4)]
    assert [answer.result().num_cached_tokens for answer in answers] == [4, 4]
    expect(engine, L=0, C=4, P=4)

    with engine.batch() as step:
        forked = step.match_prefix([], parent=k, num_tokens=7)
        released = [step.release(k), step.release(a)]
    k2 = forked.result()
    assert k2.num_cached_tokens == 6
    for answer in released:
        answer.result()
    expect(engine, F=7, L=1, C=4, P=3, E=1)

    assert engine.evict(9) == 1
    assert engine.probe([1, 2, 3, 4, 5, 7], ("m",)) == 6
    assert engine.probe([1, 2, 3, 4, 5, 6], ("m",)) == 4
    with pytest.raises(UnknownLease):
        engine.match_prefix([], parent=k)
    j = engine.match_prefix([9, 9, 9], parent=k2, num_tokens=9)
    assert (j.num_cached_tokens, len(j.block_table)) == (6, 5)
    engine.release(j)
    engine.release(k2)
    expect(engine, F=9, L=0, E=3)


def hand_over_and_silence(open_route: OpenRoute) -> None:
    """S4: a prefill engine falls silent, a decode engine takes over, and falls silent in turn."""
    route = open_route(num_blocks=8, block_size=2, lease_ttl_s=10)
    prefill, decode, router = route.caller("P"), route.caller("D"), route.caller()
    p = prefill.match_prefix([1, 2, 3, 4, 5], num_tokens=6)
    q = prefill.match_prefix([8, 8], num_tokens=2)
    prefill.insert(p, [1, 2, 3, 4, 5])
    router.renew(p.lease_id, ttl_s=100)
    expect(router, F=4, L=2, P=2)

    route.advance(5)
    route.cut("P")
    expect(router, F=4, L=2, P=2)
    route.advance(4.9)
    expect(router, F=4, L=2, P=2)
    route.advance(0.1)  # t = 10
    expect(router, F=5, L=1, P=2)
    for late in (lambda: prefill.insert(q, [8, 8]), lambda: prefill.release(q)):
        with pytest.raises(LeaseExpired):
            late()

    d = decode.match_prefix([1, 2, 3, 4, 5], max_tokens=4, num_tokens=8)
    assert (d.num_cached_tokens, len(d.block_table)) == (4, 4)
    decode.release(p.lease_id)
    with pytest.raises(UnknownLease):
        decode.release(p.lease_id)
    assert router.evict(9) == 0
    expect(router, F=4, L=2, P=2)

    route.advance(9)  # t = 19
    decode.heartbeat()
    route.advance(9.9)
    expect(router, F=4, L=2, P=2)
    route.advance(0.1)  # t = 29
    expect(router, F=6, L=0, E=2)
    with pytest.raises(LeaseExpired):
        decode.insert(d, [1, 2, 3, 4, 5, 6])


def weights_and_lora(open_route: OpenRoute) -> None:
    """S5: new weights reset a family of namespaces while requests run, and late engines harm nobody."""
    engine = open_route(num_blocks=8, block_size=2).caller()
    a = engine.match_prefix([1, 2, 3, 4], ("m", "w7", "lora-a"), num_tokens=6)
    engine.insert(a, [1, 2, 3, 4])
    b = engine.match_prefix([1, 2], ("m", "w7", "lora-b"), num_tokens=2)
    engine.insert(b, [1, 2])
    engine.release(b)
    expect(engine, F=4, L=1, C=3, P=2)

    engine.reset(("m", "w7"))
    assert engine.probe([1, 2, 3, 4], ("m", "w7", "lora-a")) == 0
    assert engine.probe([1, 2], ("m", "w7", "lora-b")) == 0
    expect(engine, F=5, L=1, C=2, P=2)

    with engine.batch() as step:
        grown = step.allocate(a, num_tokens=8)
        late = step.insert(a, [1, 2, 3, 4, 5, 6])
        released = step.release(a)
    assert len(grown.result()) == 1
    with pytest.raises(StaleLease):
        late.result()
    released.result()
    expect(engine, F=8)

    new = engine.match_prefix([1, 2, 3, 4], ("m", "w8", "lora-a"), num_tokens=4)
    assert new.num_cached_tokens == 0
    engine.insert(new, [1, 2, 3, 4])
    old = engine.match_prefix([1, 2, 3, 4], ("m", "w7", "lora-a"), num_tokens=4)
    assert old.num_cached_tokens == 0
    assert list(engine.insert(old, [1, 2, 3, 4]).block_ids) == list(old.block_table)
    names = [("m", "w8", "lora-a"), ("m", "w8lora-a"), ("m", "w8")]
    assert [engine.probe([1, 2, 3, 4], name) for name in names] == [4, 0, 0]
    expect(engine, F=4, C=4, P=4)


SCENARIOS = [one_step_in_one_message, chunks_drafts_preemption, fork_and_beam, hand_over_and_silence, weights_and_lora]
