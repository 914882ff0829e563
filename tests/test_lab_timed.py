"""Replay in the trace's time: what overlaps, what waits, what is locked."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import inf
from pathlib import Path

import pytest
from lab_traces import chats, tokens

from radix_cache.errors import InvalidArgument
from radix_cache.lab import Engine, Request, read_trace, replay_in_time, replay_policy
from radix_cache.tokens import pack_tokens

AT_ONCE = Engine(inf, inf)


def at(seconds: float, ids: list[int], num_output_tokens: int = 0, size: int = 10) -> Request:
    return Request(seconds * 1000, size * len(ids), num_output_tokens, pack_tokens(ids), tokens_per_id=size)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_requests_that_end_at_once_are_those_of_a_replay(policy: str) -> None:
    requests = [replace(request, num_output_tokens=0) for request in chats(1, size=16)]
    num_blocks = max(request.num_ids for request in requests)
    timed = replay_in_time(requests, policy, num_blocks, engine=AT_ONCE).replay
    plain = replay_policy(requests, policy, num_blocks)
    assert (timed.whole, timed.last_half) == (plain.whole, plain.last_half)
    assert timed.num_evicted_blocks == plain.num_evicted_blocks > 0


def test_what_is_still_computed_is_not_found() -> None:
    """20 tokens at 10 a second: the second request comes too early, the third in time."""
    engine = Engine(prefill_tokens_per_s=10, decode_tokens_per_s=1)
    result = replay_in_time([at(0, [1, 2]), at(1, [1, 2]), at(2, [1, 2])], "lru", 10, engine=engine)
    assert result.replay.whole.num_hit_blocks == 2
    assert (result.max_running, result.max_leased_blocks, result.max_held_blocks, result.num_waited) == (2, 4, 4, 0)


def test_locked_blocks_stay_and_requests_wait() -> None:
    """The first holds 2 of 3 blocks for 2 s of prefill and 5 of answer; the second needs 2, and waits for its end."""
    engine = Engine(prefill_tokens_per_s=10, decode_tokens_per_s=1)
    requests = [at(0, [1, 2], 1), at(1, [3, 4], 0), at(1.5, [1, 2], 0)]
    requests[0] = replace(requests[0], num_prompt_tokens=15, num_output_tokens=5)
    result = replay_in_time(requests, "lru", 3, engine=engine)
    assert result.num_waited == 2, "the third stands behind the second"
    assert result.wait_s.max == pytest.approx(8.5 - 1.5), "1.5 + 5 s of the first, 2 s of the second"
    assert result.replay.whole.num_hit_blocks == 1, "the second evicts one block of the first's two"


def test_protection_until_the_end_of_prefill_only() -> None:
    requests = [at(0, [1, 2], 50), at(3, [3, 4], 50)]
    held = replay_in_time(requests, "lru", 7, engine=Engine(10, 1, holds="answer"))
    let_go = replay_in_time(requests, "lru", 2, engine=Engine(10, 1, holds="prefill"))
    assert (held.num_waited, held.num_refused) == (1, 0)
    assert (let_go.num_waited, let_go.num_refused, let_go.replay.num_evicted_blocks) == (0, 0, 2)


def test_not_more_than_may_run() -> None:
    requests = [at(number / 10, [number], 1) for number in range(9)]
    result = replay_in_time(requests, "lru", 100, engine=Engine(10, 1, max_running=2))
    assert (result.max_running, result.num_waited) == (2, 7)
    assert result.replay.whole.num_requests == 9


def test_larger_than_the_pool_is_refused() -> None:
    result = replay_in_time([at(0, [1, 2, 3]), at(1, [1])], "lru", 2, engine=AT_ONCE)
    assert (result.num_refused, result.replay.whole.num_requests, result.replay.whole.num_hit_blocks) == (1, 2, 0)


def test_outputs_are_published_where_the_trace_has_them() -> None:
    first = tokens([1, 2, 3], [4, 5])
    second = replace(tokens([1, 2, 3, 4, 9]), timestamp_ms=60_000)
    result = replay_in_time([first, second], "lru", 10, block_size=2)
    assert result.replay.whole.num_hit_tokens == 4


def test_out_of_order() -> None:
    with pytest.raises(InvalidArgument, match=r"request 2 is of 1 s, and one before it of 2 s: .*--sort"):
        replay_in_time([at(2, [1]), at(1, [1])], "lru", 5)


def test_times_before_zero() -> None:
    """As of a trace whose times count from its middle."""
    requests = [at(seconds, [1, 2]) for seconds in (-9, -8, 3)]
    result = replay_in_time(requests, "lru", 5, engine=Engine(10, 1))
    assert (result.num_waited, result.wait_s.max, result.replay.whole.num_hit_blocks) == (0, 0, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("prefill_tokens_per_s", 0), ("decode_tokens_per_s", float("nan")), ("max_running", 0), ("holds", "ever")],
)
def test_bad_engines(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=field):
        Engine(**{field: value})


def test_agents(traces: Path) -> None:
    """Blocks that are still computed are found less often, on a real trace, and all of its requests are counted."""
    requests = list(islice(read_trace(traces / "lmcache_agent_16.jsonl.gz"), 300))
    slow = replay_in_time(requests, "lru", 20_000, engine=Engine(prefill_tokens_per_s=2_000)).replay
    fast = replay_in_time(requests, "lru", 20_000, engine=AT_ONCE).replay
    assert slow.whole.num_requests == fast.whole.num_requests == 300
    assert 0 < slow.whole.num_hit_blocks <= fast.whole.num_hit_blocks
