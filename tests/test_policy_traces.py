"""Policies on public traces of hash ids, 512 tokens in a block: hit rates that are known from elsewhere, or were found
by the block-by-block model of test_policy_orders.py.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from radix_cache import PrefixCache
from radix_cache.lab.replay import ReplayResult, replay
from radix_cache.lab.trace import Request, read_trace


@lru_cache(2)
def requests(path: Path) -> list[Request]:
    return list(read_trace(path))


def result_of(traces: Path, name: str, num_blocks: int, policy: str) -> ReplayResult:
    return replay(requests(traces / f"{name}.jsonl.gz"), PrefixCache(num_blocks, block_size=1, policy=policy))


@pytest.mark.parametrize(
    ("name", "num_blocks", "policy", "rate"),
    [
        ("conversation_trace", 3_655, "lfu", 0.0834),
        ("conversation_trace", 9_139, "slru", 0.1267),
        # Ageing and ghosts are defined in several ways; these are the model's, within 0.012 of published ones.
        ("conversation_trace", 3_655, "lfu-da", 0.0864),
        ("conversation_trace", 3_655, "two-hit:ghost_blocks=1000000", 0.1436),
        ("synthetic_trace", 4_392, "two-hit:ghost_blocks=1000000", 0.2799),
        ("synthetic_trace", 4_392, "two-hit:ghost_blocks=17568", 0.2812),
    ],
)
def test_block_hit_rates(traces: Path, name: str, num_blocks: int, policy: str, rate: float) -> None:
    result = result_of(traces, name, num_blocks, policy)
    assert result.whole.block_hit_rate == pytest.approx(rate, abs=0.00005)


@pytest.mark.parametrize(
    "policy",
    ["priority", "tlru", "workload-aware", "flop-aware:alpha=0", "steps-to-execution", "slru:protected_hits=99999"],
)
def test_what_has_nothing_to_go_by_is_lru_to_the_token(traces: Path, policy: str) -> None:
    result = result_of(traces, "synthetic_trace", 4_392, policy)
    assert result.last_half.num_hit_tokens == 14_363_087
