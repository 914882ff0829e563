"""Replay in process: every figure of a tiny trace by hand, and the exact ones of the public traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from radix_cache import PrefixCache
from radix_cache.batch import Recorder
from radix_cache.errors import PoolExhausted
from radix_cache.lab import Hits, ReplayResult, Request, read_trace, replay, replay_in_time, replay_policy
from radix_cache.tokens import pack_tokens


def hashed(ids: list[int], num_tokens: int, size: int = 10) -> Request:
    return Request(0, num_tokens, 0, pack_tokens(ids), tokens_per_id=size)


def plain(prompt: list[int], output: list[int] | None = None) -> Request:
    return Request(0, len(prompt), len(output or ()), pack_tokens(prompt), pack_tokens(output or []))


BY_HAND = [
    hashed([1, 2, 3], 25),  # nothing cached; 1 2 3 after it
    hashed([1, 2, 4], 30),  # 1 2: 20 tokens; now the four blocks are full
    hashed([1, 2, 3], 25),  # all three, but the last is ragged: 25 tokens
    hashed([5], 3),  # nothing; evicts 4, the older leaf
    hashed([1, 2, 4], 30),  # 1 2: 20 tokens; evicts 3
    hashed([6, 7, 8, 9, 10, 11], 60),  # larger than the pool: evicts all four, publishes 6 7 8 9
    hashed([6, 7, 8, 9, 10, 11], 60),  # these four: 40 tokens; no room for more
]


def test_by_hand() -> None:
    cache = PrefixCache(4, block_size=1)
    result = replay(BY_HAND, cache)
    assert result.whole == Hits(
        num_requests=7,
        num_prompt_tokens=233,
        num_prompt_blocks=25,
        num_hit_requests=4,
        num_hit_tokens=105,
        num_hit_blocks=11,
    )
    assert result.last_half == Hits(4, 153, 16, 2, 60, 6)
    assert (result.whole.token_hit_rate, result.whole.block_hit_rate) == (105 / 233, 11 / 25)
    assert result.whole.request_hit_rate == 4 / 7
    assert result.num_evicted_blocks == 6
    assert result.num_calls == 5 + 2 * 3, "two requests had to ask again for what there was"
    cache.check_integrity()
    assert (cache.stats().num_leases, cache.stats().num_leased_blocks) == (0, 0)


def test_figures_are_those_of_this_replay_only() -> None:
    cache = PrefixCache(4, block_size=1)
    replay(BY_HAND, cache)
    again = replay(BY_HAND[:3], cache, namespace=("second",))
    assert again.whole.num_hit_tokens == 45
    assert again.num_evicted_blocks == 4


def test_the_cache_is_told_the_requests_of_the_trace() -> None:
    cache = PrefixCache(100, block_size=1)
    result = replay(BY_HAND, cache)
    counters = cache.stats().counters
    assert counters["num_requests"] == result.whole.num_requests
    assert counters["num_hit_tokens"] == result.whole.num_hit_blocks, "a token of the cache is a block of the trace"


def test_token_ids_and_their_outputs() -> None:
    cache = PrefixCache(100, block_size=2)
    result = replay([plain([1, 2, 3, 4], [5, 6]), plain([1, 2, 3, 4, 5, 6, 7]), plain([1, 2, 3, 4, 5, 6, 7])], cache)
    # The first publishes 1 to 5, four of them in whole blocks; its last output token has no KV.
    assert result.whole == Hits(3, 18, 2 + 3 + 3, 2, 4 + 6, 2 + 3)
    assert cache.probe([1, 2, 3, 4, 5, 6]) == 6


def test_one_output_token_is_never_published() -> None:
    cache = PrefixCache(100, block_size=1)
    replay([plain([1, 2], [3])], cache)
    assert cache.probe([1, 2, 3]) == 2


def test_nothing_to_divide_by() -> None:
    nothing = replay([], PrefixCache(4, block_size=1), clock=lambda: 0.0)
    assert nothing.whole == Hits(0, 0, 0, 0, 0, 0)
    assert nothing.requests_per_s is None
    assert nothing.whole.token_hit_rate is nothing.whole.block_hit_rate is nothing.whole.request_hit_rate is None
    empty = replay([plain([])], PrefixCache(4, block_size=1))
    assert (empty.whole.token_hit_rate, empty.whole.request_hit_rate) == (None, 0.0)


def test_seconds_are_those_of_the_calls() -> None:
    ticks = iter(range(100))
    result = replay(BY_HAND[:4], PrefixCache(4, block_size=1), clock=lambda: float(next(ticks)))
    assert (result.seconds, result.requests_per_s) == (4.0, 1.0)


def test_as_dict_is_ready_for_json() -> None:
    shown = json.loads(json.dumps(replay(BY_HAND, PrefixCache(4, block_size=1)).as_dict()))
    assert shown["whole"]["num_hit_tokens"] == 105
    assert shown["last_half"]["block_hit_rate"] == 6 / 16
    assert shown["requests_per_s"] > 0


@pytest.mark.parametrize("block_size", [2, 16])
def test_a_hash_id_is_a_block_of_any_size(block_size: int) -> None:
    cache = PrefixCache(4, block_size)
    expected = replay(BY_HAND, PrefixCache(4, block_size=1), clock=lambda: 0.0)
    assert replay(BY_HAND, cache, clock=lambda: 0.0) == expected
    cache.check_integrity()


def test_no_room_at_all_still_counts_the_hits() -> None:
    cache = PrefixCache(4, block_size=1)
    replay(BY_HAND[:1], cache)
    other = cache.match_prefix([9], num_tokens=1)
    assert replay([hashed([1, 2, 3, 4], 40)], cache).whole.num_hit_tokens == 30
    assert cache.stats().counters["num_evicted_blocks"] == 0
    cache.release(other)


def test_blocks_that_others_took_meanwhile() -> None:
    """Between the refusal and the second try someone takes what was left."""
    cache = PrefixCache(4, block_size=1)
    taken = []

    @contextmanager
    def batch() -> Iterator[Recorder]:
        with cache.batch() as recorder:
            yield recorder
        if not taken:
            taken.append(cache.match_prefix([9], num_tokens=4))

    result = replay([hashed([1, 2, 3, 4, 5], 50)], cache, batch=batch)
    assert (result.whole.num_hit_tokens, result.num_calls) == (0, 4)
    cache.check_integrity()


def test_a_cache_that_refuses_even_nothing_is_an_error() -> None:
    class Stubborn(PrefixCache):
        @contextmanager
        def batch(self) -> Iterator[Recorder]:  # type: ignore[override]
            with super().batch() as recorder:
                yield recorder
            for _, pending in recorder._recorded:
                pending._resolve(type(pending._outcome)(error=PoolExhausted(1, 0)))

    with pytest.raises(PoolExhausted):
        replay(BY_HAND, Stubborn(4, block_size=1))


@pytest.mark.parametrize(
    ("name", "num_blocks", "num_hit_tokens"),
    [("conversation_trace", 9_139, 13_865_669), ("synthetic_trace", 4_392, 14_363_087)],
)
def test_exact_hit_tokens(traces: Path, name: str, num_blocks: int, num_hit_tokens: int) -> None:
    cache = PrefixCache(num_blocks, block_size=1)
    result = replay(read_trace(traces / f"{name}.jsonl.gz"), cache)
    assert result.last_half.num_hit_tokens == num_hit_tokens
    cache.check_integrity()


@pytest.mark.parametrize(
    ("name", "num_blocks", "rate"),
    [
        ("conversation_trace", 3_655, 0.0793),
        ("conversation_trace", 18_279, 0.2789),
        ("synthetic_trace", 4_392, 0.2623),
        ("conversation_trace", 182_790, 0.3664),
        ("synthetic_trace", 43_924, 0.6396),
        ("mooncake_arxiv_1000", 12_207, 0.3799),
    ],
)
def test_block_hit_rates(traces: Path, name: str, num_blocks: int, rate: float) -> None:
    result = replay(read_trace(traces / f"{name}.jsonl.gz"), PrefixCache(num_blocks, block_size=1))
    assert result.whole.block_hit_rate == pytest.approx(rate, abs=0.00005)


@pytest.mark.parametrize("play", [replay_policy, lambda *args: replay_in_time(*args).replay])
def test_policies_see_positions_in_tokens(play: Callable[..., ReplayResult]) -> None:
    """Of a prompt and 10 tokens more, all but 20 is kept: blocks of 10 tokens, so all but the last block of each."""
    paths = [[5, 6], [1, 2, 3, 4], [7, 8], [1, 2, 3, 4]]
    requests = [replace(hashed(path, 10 * len(path)), timestamp_ms=at * 1e6) for at, path in enumerate(paths)]
    assert play(requests, "lru", 6).whole.num_hit_tokens == 40, "7 and 8 come for 6 and 5"
    assert play(requests, "tlru:threshold=20,next_prompt_tokens=10", 6).whole.num_hit_tokens == 30, "for 6 and 4"
