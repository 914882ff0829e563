"""What a trace is like."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from lab_traces import chats, tokens

from radix_cache.lab import Request, Spread, read_trace, trace_info
from radix_cache.tokens import pack_tokens


def at(seconds: float, ids: list[int], num_tokens: int, **others: object) -> Request:
    return Request(seconds * 1000, num_tokens, 5, pack_tokens(ids), tokens_per_id=10, **others)


BY_HAND = [
    at(0, [1, 2, 3], 25),  # the last block is ragged
    at(1, [1, 7], 20),
    at(4, [1, 2, 4, 5], 40),  # goes on with the first
    at(3, [1, 7, 8], 30),  # goes on with the second, and is early
    at(9, [9], 3),
]


def test_by_hand() -> None:
    info = trace_info(BY_HAND)
    assert (info.num_requests, info.num_conversations, info.is_named) == (5, 3, False)
    assert (info.num_blocks, info.num_prompt_blocks, info.tokens_per_block) == (8, 13, 10)
    assert (info.seconds, info.num_out_of_order) == (9.0, 1)
    assert info.ideal.num_hit_blocks == 5
    assert info.turns == Spread(5 / 3, 2, 2, 2, 2)
    assert info.think_s == Spread(3.0, 4.0, 4.0, 4.0, 4.0)
    assert info.gap_s.max == 6.0
    # 1 was above all when it was found first; then 1 and 2 lay at depths 1 and 3; 1 and 7 at 1 and 5.
    assert info.reuse_distance == Spread((1 + 1 + 3 + 1 + 5) / 5, 1, 5, 5, 5)


def test_named_conversations_are_believed() -> None:
    named = [replace(request, conversation=name) for request, name in zip(BY_HAND, "aabb", strict=False)]
    info = trace_info([*named, BY_HAND[4]])
    assert (info.num_conversations, info.is_named) == (3, True)
    assert info.turns.max == 2


def test_as_dict_is_ready_for_json() -> None:
    shown = json.loads(json.dumps(trace_info(chats(1)).as_dict()))
    assert shown["ideal"]["block_hit_rate"] > 0
    assert shown["turns"]["mean"] >= 1
    assert "curve" not in shown


@pytest.mark.parametrize("requests", [[], [tokens([])], [tokens([1, 2, 3])]])
def test_nearly_nothing(requests: list[Request]) -> None:
    info = trace_info(requests)
    assert info.num_requests == len(requests)
    assert info.reuse_distance == Spread(0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "num_blocks", "ideal"),
    [
        ("conversation_trace", 182_790, 0.3664),
        ("synthetic_trace", 43_924, 0.6396),
        ("mooncake_arxiv_1000", 12_207, 0.3799),
        ("lmcache_agent_16", 26_228, 0.8997),
    ],
)
def test_public_traces(traces: Path, name: str, num_blocks: int, ideal: float) -> None:
    info = trace_info(list(read_trace(traces / f"{name}.jsonl.gz")))
    assert info.num_blocks == num_blocks
    assert info.ideal.block_hit_rate == pytest.approx(ideal, abs=0.00005)
    assert info.num_out_of_order == 0
