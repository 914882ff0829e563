"""The window of requests that a policy tunes itself by: what it keeps of them, and what the model finds in them."""

from __future__ import annotations

import json

from radix_cache import PrefixCache
from radix_cache.policies import FlopAware
from radix_cache.policies.replaying import Window

A, B, C, D = ([letter] * 4 for letter in range(4))


def window_of(cache: PrefixCache) -> Window:
    return cache._executor.index.policy._tuner._window


def cache_with(*prompts: list[int], num_chunks: int = 1) -> PrefixCache:
    """Return a cache that was asked for these, each published in so many chunks."""
    cache = PrefixCache(num_blocks=64, block_size=1, policy="flop-aware")
    for tokens in prompts:
        lease = cache.match_prefix(tokens, num_tokens=len(tokens))
        for chunk in range(1, num_chunks + 1):
            cache.insert(lease, tokens[: len(tokens) * chunk // num_chunks])
        cache.release(lease)
    return cache


def test_the_model_has_room_for_half_of_what_the_window_touches() -> None:
    """8 of 16 tokens. With weight 0 it is LRU: A is found once, C takes the place of B, D that of A."""
    window = window_of(cache_with(A, B, A, C, D, A))
    assert window.hit_tokens(FlopAware(0)) == 4


def test_hits_are_contiguous_from_the_start() -> None:
    """C takes the place of B and 8, in 12 of 24 tokens: the second time the prompt's beginning is there alone."""
    window = window_of(cache_with(A, [*A, *B, 8], C, [*A, *B, 8], list(range(50, 61))))
    assert window.hit_tokens(FlopAware(0)) == 4 + 4


def test_a_prompt_in_chunks_is_one_request() -> None:
    whole, chunked = window_of(cache_with(A + B, C, A + B)), window_of(cache_with(A + B, C, A + B, num_chunks=4))
    assert [path[-1] for path in chunked.saved()[0]] == [path[-1] for path in whole.saved()[0]]


def test_it_is_saved() -> None:
    window = window_of(cache_with(A, B, A, C, D, A))
    other = Window(window.num_requests)
    other.restore(json.loads(json.dumps(window.saved())))
    assert other.hit_tokens(FlopAware(0)) == 4
    assert json.dumps(other.saved()) == json.dumps(window.saved())


def test_a_leaf_that_was_trimmed_is_known_by_its_shorter_end() -> None:
    trimmed, short = cache_with([1, 2, 3]), cache_with([1, 2])
    assert trimmed.evict(1) == 1
    lease = trimmed.match_prefix([1, 2])
    trimmed.insert(lease, [1, 2])
    assert window_of(trimmed).saved()[0][-1] == window_of(short).saved()[0][-1]
