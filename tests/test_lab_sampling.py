"""LRU's curve from samples: exact at rate 1, near with small rates, and as far off as it says."""

from __future__ import annotations

from itertools import islice
from math import sqrt
from pathlib import Path

import pytest
from lab_traces import chats, tokens

from radix_cache.errors import InvalidArgument
from radix_cache.lab import lru_curve, read_trace, sampled_curve


@pytest.mark.parametrize("block_size", [1, 2])
def test_all_blocks_are_the_exact_curve(block_size: int) -> None:
    for requests in (chats(1), [tokens([1, 2, 3], [4, 5]), tokens([1, 2, 3, 4, 9]), tokens([1]), tokens([1, 2, 3])]):
        exact, sampled = lru_curve(requests, block_size), sampled_curve(requests, 1.0, block_size, num_samples=2)
        assert sampled.num_blocks == exact.num_blocks
        for num_blocks in range(0, exact.num_blocks + 1, 7):
            found, hits = sampled.at(num_blocks), exact.whole.at(num_blocks)
            assert found.block_hit_rate == pytest.approx(hits.block_hit_rate, abs=1e-12)
            assert found.token_hit_rate == pytest.approx(hits.token_hit_rate, abs=1e-12)
            assert found.block_error == found.token_error == 0


def test_the_error_is_about_what_it_says() -> None:
    """Over many capacities and seeds, the distance from the truth is one to two of the errors that are shown."""
    requests = chats(2, 1_500)
    exact = lru_curve(requests)
    squares, said = [], []
    for seed in range(6):
        sampled = sampled_curve(requests, 0.2, seed=seed)
        for num_blocks in (50, 200, 800):
            found = sampled.at(num_blocks)
            squares.append((found.block_hit_rate - (exact.whole.at(num_blocks).block_hit_rate or 0)) ** 2)
            said.append(found.block_error**2)
    assert 0.3 < sqrt(sum(squares) / sum(said)) < 2.5


@pytest.mark.parametrize(("name", "rate", "off"), [("conversation_trace", 0.1, 0.03), ("lmcache_agent_16", 0.1, 0.04)])
def test_slices_of_public_traces(traces: Path, name: str, rate: float, off: float) -> None:
    requests = list(islice(read_trace(traces / f"{name}.jsonl.gz"), 1_000))
    exact, sampled = lru_curve(requests), sampled_curve(iter(requests), rate, num_samples=4)
    for share in (0.05, 0.2, 0.5, 1.0):
        num_blocks = int(exact.num_blocks * share)
        assert sampled.at(num_blocks).block_hit_rate == pytest.approx(
            exact.whole.at(num_blocks).block_hit_rate, abs=off
        )


def test_the_same_seed_draws_the_same_blocks() -> None:
    assert sampled_curve(chats(3), 0.3, seed=1) == sampled_curve(chats(3), 0.3, seed=1)
    assert sampled_curve(chats(3), 0.3, seed=1) != sampled_curve(chats(3), 0.3, seed=2)


@pytest.mark.parametrize("rate", [0, -0.1, 1.1, float("nan")])
def test_bad_rates(rate: float) -> None:
    with pytest.raises(InvalidArgument, match="rate is above 0"):
        sampled_curve([], rate)


def test_one_sample_has_no_error() -> None:
    with pytest.raises(InvalidArgument, match="num_samples"):
        sampled_curve([], 0.5, num_samples=1)


def test_nothing_to_sample() -> None:
    found = sampled_curve([], 0.5).at(10)
    assert (found.block_hit_rate, found.block_error) == (0, 0)
