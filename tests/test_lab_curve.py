"""LRU's curve from one pass is what replays find, capacity by capacity, in the production tree."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_traces import chats, token_requests, tokens

from radix_cache import PrefixCache
from radix_cache.errors import InvalidArgument
from radix_cache.lab import BlockTrace, Request, lru_curve, read_trace, replay
from radix_cache.tokens import pack_tokens, unpack_tokens


def assert_equal_to_replays(requests: list[Request], block_size: int, capacities: list[int]) -> None:
    curve = lru_curve(requests, block_size)
    for num_blocks in capacities:
        found = replay(requests, PrefixCache(num_blocks, block_size))
        assert (curve.whole.at(num_blocks), curve.last_half.at(num_blocks)) == (found.whole, found.last_half)


@settings(max_examples=50)
@given(token_requests(), st.sampled_from([1, 2, 3]))
def test_token_ids_with_outputs(requests: list[Request], block_size: int) -> None:
    assert_equal_to_replays(requests, block_size, [1, 2, 3, 5, 8, 13, 30])


@pytest.mark.parametrize(("block_size", "num_capacities"), [(1, 200), (16, 40)])
def test_hash_ids_at_many_capacities(block_size: int, num_capacities: int) -> None:
    requests = chats(1, 120)
    num_blocks = lru_curve(requests).num_blocks
    capacities = random.Random(2).sample(range(1, num_blocks + 20), num_capacities)
    assert_equal_to_replays(requests, block_size, sorted(capacities))


@pytest.mark.parametrize("block_size", [1, 16])
def test_tokens_and_hash_ids_are_alike(block_size: int) -> None:
    """The blocks of a trace of hash ids, spelled out as token ids, are the same blocks."""
    hashed = chats(3, 100, size=block_size, is_ragged=False)
    spelled = [
        Request(
            r.timestamp_ms,
            r.num_prompt_tokens,
            0,
            pack_tokens([i for i in unpack_tokens(r.prompt) for _ in range(block_size)]),
        )
        for r in hashed
    ]
    assert lru_curve(spelled, block_size) == lru_curve(hashed, block_size)
    for num_blocks in (7, 60, 200):
        first, second = (replay(trace, PrefixCache(num_blocks, block_size)) for trace in (hashed, spelled))
        assert (first.whole, first.last_half) == (second.whole, second.last_half)
        assert first.whole == lru_curve(hashed, block_size).whole.at(num_blocks)


def test_by_hand() -> None:
    """1 2, then 3, then 1 2 again: 1 lies above 2 though both were used at once, and both below 3."""
    curve = lru_curve([tokens([1, 2]), tokens([3]), tokens([1, 2])], 1)
    assert curve.num_blocks == 3
    assert list(curve.whole.hit_blocks) == [0, 0, 1, 2]
    assert list(curve.whole.hit_tokens) == [0, 0, 1, 2]
    assert list(curve.whole.hit_requests) == [0, 0, 1, 1]
    assert curve.last_half.at(2).num_requests == 2
    assert curve.whole.at(10**9) == curve.whole.at(3)


def test_no_request() -> None:
    curve = lru_curve([])
    assert (curve.num_blocks, curve.whole.at(5).num_requests, curve.whole.at(5).block_hit_rate) == (0, 0, None)


def test_a_path_is_its_blocks_and_all_before_them() -> None:
    trace = BlockTrace.of([tokens([1, 2, 3]), tokens([2, 2]), tokens([1, 2, 9])], 1)
    assert [list(trace.path(number)) for number in range(3)] == [[0, 1, 2], [3, 4], [0, 1, 5]]
    assert (trace.num_blocks, trace.num_prompt_blocks) == (6, 8)


@pytest.mark.parametrize(("text", "num_blocks"), [("7", 7), ("50%", 3), ("0.01%", 1), ("100%", 6)])
def test_capacities(text: str, num_blocks: int) -> None:
    assert BlockTrace(num_blocks=6).capacity(text) == num_blocks


@pytest.mark.parametrize("text", ["", "x", "5 blocks", "%", "nan%", "0", "-3", "1.5"])
def test_no_capacities(text: str) -> None:
    with pytest.raises(InvalidArgument):
        BlockTrace(num_blocks=6).capacity(text)


@pytest.mark.parametrize(
    ("name", "num_blocks", "num_hit_tokens", "ideal"),
    [
        ("conversation_trace", 9_139, 13_865_669, 0.3664),
        ("synthetic_trace", 4_392, 14_363_087, 0.6396),
        ("mooncake_arxiv_1000", 1_000, 1_445_888, 0.3799),
    ],
)
def test_exact_numbers(traces: Path, name: str, num_blocks: int, num_hit_tokens: int, ideal: float) -> None:
    curve = lru_curve(read_trace(traces / f"{name}.jsonl.gz"))
    assert curve.last_half.at(num_blocks).num_hit_tokens == num_hit_tokens
    assert curve.whole.at(curve.num_blocks).block_hit_rate == pytest.approx(ideal, abs=0.00005)


@pytest.mark.parametrize("name", ["conversation_trace", "lmcache_agent_16"])
def test_slices_of_public_traces(traces: Path, name: str) -> None:
    requests = list(islice(read_trace(traces / f"{name}.jsonl.gz"), 400))
    num_blocks = lru_curve(requests).num_blocks
    assert_equal_to_replays(requests, 1, random.Random(4).sample(range(1, num_blocks), 12))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_public_trace_at_200_capacities(traces: Path) -> None:
    requests = list(read_trace(traces / "synthetic_trace.jsonl.gz"))
    assert_equal_to_replays(requests, 1, random.Random(5).sample(range(1, 43_924), 200))


def test_no_cache_is_smaller_than_none() -> None:
    curve = lru_curve(chats(1)).whole
    assert curve.at(0).num_hit_blocks == 0
    with pytest.raises(InvalidArgument, match=r"num_blocks is at least 0 .*, not -1"):
        curve.at(-1)
