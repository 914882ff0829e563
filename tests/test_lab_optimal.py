"""The offline optimum: equal to an exhaustive search, to the simulator of KVCache.AI, and never below a policy."""

from __future__ import annotations

import random
from functools import cache as memo
from itertools import combinations, islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import TraceData, parse_trace_lines
from lab_traces import chats, token_requests, tokens

from radix_cache.errors import InvalidArgument
from radix_cache.lab import BlockTrace, Request, lru_curve, optimal, read_trace, replay_policy
from radix_cache.policies import BUILT_IN
from radix_cache.tokens import pack_tokens, unpack_tokens


def exhaustive(requests: list[Request], num_blocks: int, block_size: int) -> int:
    """Return the most blocks that any choice of what to keep can hit: all sets of blocks closed towards the root."""
    trace = BlockTrace.of(requests, block_size)
    paths = [list(trace.path(number)) for number in range(len(trace))]

    @memo
    def best(number: int, kept: frozenset[int]) -> int:
        if number == len(paths):
            return 0
        path = paths[number]
        num_hits = next((at for at, block in enumerate(path) if block not in kept), len(path))
        num_hits = min(num_hits, trace.num_lookups[number])
        known = sorted(kept | set(path))
        return num_hits + max(
            best(number + 1, frozenset(chosen))
            for size in range(min(num_blocks, len(known)) + 1)
            for chosen in combinations(known, size)
        )

    return best(0, frozenset())


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 2), max_size=3), st.lists(st.integers(1, 2), max_size=2)), max_size=5),
    st.integers(1, 3),
)
def test_exhaustive_search_finds_no_more(pairs: list[tuple[list[int], list[int]]], num_blocks: int) -> None:
    requests = [tokens(*pair) for pair in pairs]
    assert optimal(requests, num_blocks, 1).whole.num_hit_blocks == exhaustive(requests, num_blocks, 1)


@given(token_requests(), st.sampled_from([1, 2]), st.integers(1, 12))
def test_never_below_lru(requests: list[Request], block_size: int, num_blocks: int) -> None:
    best, lru = optimal(requests, num_blocks, block_size).whole, lru_curve(requests, block_size).whole.at(num_blocks)
    assert best.num_hit_blocks >= lru.num_hit_blocks
    assert best.num_prompt_tokens == lru.num_prompt_tokens
    assert best.num_prompt_blocks == lru.num_prompt_blocks


@pytest.mark.parametrize("policy", BUILT_IN)
def test_never_below_any_policy(policy: str) -> None:
    requests = chats(7)
    found, best = (replay_policy(requests, name, 60).whole for name in (policy, "optimal"))
    assert 0 < found.num_hit_blocks <= best.num_hit_blocks


def test_by_hand() -> None:
    """Two blocks: 1 is used again at once, 2 later, 3 never; 3 is not kept, 2 goes when 4 comes that is sooner."""
    requests = [tokens([1]), tokens([2]), tokens([1]), tokens([3]), tokens([1]), tokens([4]), tokens([4]), tokens([2])]
    result = optimal(requests, 2, 1)
    assert result.whole.num_hit_blocks == 4
    assert result.num_evicted_blocks == 0
    assert optimal(requests, 1, 1).whole.num_hit_blocks == 3
    assert optimal(requests, 1, 1).num_evicted_blocks == 0, "2 waits longer than 1, so it is not kept"


def test_what_is_computed_anew_before_it_is_looked_up_is_worth_nothing() -> None:
    """1 2 comes out of the second request as output: no room is spent on it before."""
    requests = [tokens([1, 2]), tokens([7]), tokens([1], [2, 9]), tokens([7]), tokens([1, 2])]
    assert optimal(requests, 3, 1).whole.num_hit_blocks == 1 + 1 + 2
    assert optimal(requests, 2, 1).whole.num_hit_blocks == exhaustive(requests, 2, 1)


def test_at_least_one_block() -> None:
    with pytest.raises(InvalidArgument, match="num_blocks"):
        optimal([], 0)


@pytest.mark.parametrize(
    ("name", "num_blocks", "num_hit_tokens", "rate"),
    [
        ("conversation_trace", 9_139, 27_038_068, 0.3664),
        ("conversation_trace", 3_655, None, 0.3142),
        ("synthetic_trace", 4_392, 24_340_068, 0.5063),
    ],
)
def test_exact_numbers(traces: Path, name: str, num_blocks: int, num_hit_tokens: int | None, rate: float) -> None:
    result = replay_policy(read_trace(traces / f"{name}.jsonl.gz"), "optimal", num_blocks)
    assert result.whole.block_hit_rate == pytest.approx(rate, abs=0.00005)
    if num_hit_tokens is not None:
        assert result.last_half.num_hit_tokens == num_hit_tokens


def as_lines(requests: list[Request]) -> TraceData:
    """The same requests in the words of kvcache-simulator."""
    return parse_trace_lines(
        f'{{"block_size": {r.tokens_per_id}, "input_length": {r.num_prompt_tokens}, '
        f'"hash_ids": {list(unpack_tokens(r.prompt))}}}'
        for r in requests
    )


def assert_equal_to_simulator(requests: list[Request], num_blocks: int) -> None:
    """Requests without a block are left out: theirs skips them, and begins its last half elsewhere."""
    requests = [request for request in requests if request.num_ids]
    plan = build_execution_plan(as_lines(requests), warmup_fraction=0.5)
    for policy in ("lru", "optimal"):
        theirs = simulate_policy(plan, policy, num_blocks)
        ours = replay_policy(requests, policy, num_blocks).last_half
        assert theirs.measurementMode == "fixed_window", "theirs counts only what a full cache finds"
        assert ours.num_hit_tokens == theirs.hitTokens


@pytest.mark.parametrize("seed", range(20))
def test_kvcache_simulator_finds_the_same(seed: int) -> None:
    draw = random.Random(seed)
    requests = chats(seed, draw.randint(100, 400), draw.choice([2, 7, 16, 512]))
    longest = max(request.num_ids for request in requests)
    num_blocks = lru_curve(requests[: len(requests) // 2]).num_blocks
    assert_equal_to_simulator(requests, draw.randint(longest, num_blocks))


def test_where_kvcache_simulator_differs() -> None:
    """A request that is longer than the cache: theirs evicts its last block for the next, which then has no parent."""
    requests = [hashed([1, 2, 3, 4]), hashed([1, 2, 3, 4])]
    theirs = simulate_policy(build_execution_plan(as_lines(requests), warmup_fraction=0.5), "lru", 3)
    assert theirs.hitTokens == 2 * 10
    assert replay_policy(requests, "lru", 3).last_half.num_hit_tokens == 3 * 10


def hashed(ids: list[int]) -> Request:
    return Request(0, 10 * len(ids), 0, pack_tokens(ids), tokens_per_id=10)


@pytest.mark.parametrize(
    ("name", "start", "num_blocks"),
    [
        ("conversation_trace", 3_000, 1_000),
        ("conversation_trace", 9_000, 3_000),
        ("synthetic_trace", 0, 500),
        ("synthetic_trace", 2_000, 2_500),
        ("mooncake_arxiv_1000", 0, 2_000),
        ("lmcache_agent_16", 1_000, 3_000),
    ],
)
def test_kvcache_simulator_on_public_traces(traces: Path, name: str, start: int, num_blocks: int) -> None:
    requests = list(islice(read_trace(traces / f"{name}.jsonl.gz"), start, start + 600))
    assert_equal_to_simulator(requests, num_blocks)
