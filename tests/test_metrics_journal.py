"""What a scrape says of the journal: how long it is, and whether it is compacted."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from client_help import wait_until
from scraping import samples
from service_process import ServerProcess

from radix_cache_service import Client

LIMIT = 20_000
DEADLINE_S = 60


def grown(server: ServerProcess, name: str) -> dict[tuple[str, ...], float]:
    """Call until ``name`` is more than 0, and return the samples of then."""
    deadline = time.monotonic() + DEADLINE_S
    with Client(server.address, engine_id="E") as client:
        while not (seen := samples(server.metrics_address))[name,]:
            assert time.monotonic() < deadline
            for _ in range(20):
                client.release(client.match_prefix([1] * 200))
    return seen


def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "state_dir": tmp_path / "state",
        "metrics_listen": "127.0.0.1:0",
        "max_journal_bytes": LIMIT,
    }


def test_a_journal_that_is_compacted(tmp_path: Path) -> None:
    with ServerProcess(**settings(tmp_path)) as server:
        at_first = samples(server.metrics_address)
        assert 0 < at_first["radix_cache_journal_bytes",] < 1000
        assert at_first["radix_cache_journal_limit_bytes",] == LIMIT
        assert at_first["radix_cache_last_compaction_timestamp_seconds",] == 0
        before = time.time()
        seen = grown(server, "radix_cache_compactions_total")
        assert before < seen["radix_cache_last_compaction_timestamp_seconds",] <= time.time()
        assert seen["radix_cache_compaction_failures_total",] == 0
        wait_until(lambda: samples(server.metrics_address)["radix_cache_journal_bytes",] >= num_written(tmp_path))


def num_written(tmp_path: Path) -> int:
    """How many bytes of a journal there are; the next compaction may just remove some."""
    num_bytes = 0
    for path in (tmp_path / "state").glob("journal-*"):
        with suppress(FileNotFoundError):
            num_bytes += path.stat().st_size
    return num_bytes


def test_a_journal_that_is_not_compacted(tmp_path: Path) -> None:
    with ServerProcess(**settings(tmp_path)) as server:
        (tmp_path / "state" / "snapshot-00000002.tmp").mkdir()  # in the way
        seen = grown(server, "radix_cache_compaction_failures_total")
        assert seen["radix_cache_journal_bytes",] > seen["radix_cache_journal_limit_bytes",]
        assert seen["radix_cache_compactions_total",] == seen["radix_cache_last_compaction_timestamp_seconds",] == 0
