"""Replay through a real server finds exactly what it finds in process."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from test_cli_serve import running_server
from test_lab_replay import BY_HAND, plain

from radix_cache import PrefixCache
from radix_cache.lab import RecordingCache, read_trace, replay
from radix_cache_service import Client


def test_by_hand() -> None:
    with running_server("--num-blocks", "4", "--block-size", "1") as address, Client(address) as client:
        expected = replay(BY_HAND, PrefixCache(4, block_size=1), clock=lambda: 0.0)
        assert replay(BY_HAND, client, clock=lambda: 0.0) == expected
        client.reset()
        with client.session() as session:
            again = replay(BY_HAND, client, batch=session.batch, clock=lambda: 0.0)
        assert (again.whole, again.num_calls) == (expected.whole, expected.num_calls)
        assert (client.stats().num_leases, client.stats().num_leased_blocks) == (0, 0)


def test_a_call_is_one_message() -> None:
    requests = [plain(list(range(start, start + 40)), [1, 2, 3]) for start in range(5)]
    with running_server("--num-blocks", "50", "--block-size", "4") as address, Client(address) as client:
        before = sum(client.stats().num_calls.values())
        result = replay(requests, client)
        # describe, and stats before and after, are the only others.
        assert sum(client.stats().num_calls.values()) - before <= result.num_calls + 4
        assert result.num_calls == 5


def test_a_client_is_recorded() -> None:
    """Its own verbs, its batches, and a session's."""
    out = io.StringIO()
    with running_server("--num-blocks", "8", "--block-size", "2") as address, Client(address) as client:
        cache = RecordingCache(client, out, clock=lambda: 0.0)
        cache.release(cache.match_prefix([1, 2], num_tokens=2))
        with cache.batch() as batch:
            lease = batch.match_prefix([1, 2, 3, 4], num_tokens=4)
            batch.insert(lease, [1, 2, 3, 4, 5])
        with client.session() as session, cache.record(session.batch()) as batch:
            batch.release(lease)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["input_length"], line["output_length"], line["hash_ids"]) for line in lines] == [
        (2, 0, [0]),
        (4, 1, [0, 1]),
    ]


@pytest.mark.parametrize(
    ("name", "num_blocks", "num_hit_tokens"),
    [("conversation_trace", 9_139, 13_865_669), ("synthetic_trace", 4_392, 14_363_087)],
)
def test_exact_hit_tokens(traces: Path, name: str, num_blocks: int, num_hit_tokens: int) -> None:
    with (
        running_server("--num-blocks", str(num_blocks), "--block-size", "1") as address,
        Client(address, timeout_s=30.0) as client,
        client.session() as session,
    ):
        result = replay(read_trace(traces / f"{name}.jsonl.gz"), client, batch=session.batch)
        stats = client.stats()
    assert result.last_half.num_hit_tokens == num_hit_tokens
    assert stats.num_leases == stats.num_leased_blocks == stats.num_protected_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == num_blocks
