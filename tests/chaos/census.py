"""The census: while all engines wait between two steps, the server is compared with a full walk, the memory with both.

The clock stands still meanwhile, so nothing expires. What can still come is the release of a lease whose answer was
lost: the figures are taken again until they are the same before and after.
"""

from __future__ import annotations

import json
import os
import signal
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from radix_cache.stats import TreeNode
from radix_cache.tokens import unpack_tokens
from radix_cache_service import Client

from . import books
from .board import Board
from .clock import FileClock
from .memory import Memory, first_digest, next_digest, tag_of
from .mirror import Mirror
from .processes import ServerProcess
from .request import Violation
from .settings import Settings
from .watchers import check_statuses, check_sums

_MAX_NODES = 100_000
_WALK_S = 60.0


class Census:
    """client: one without an engine. mirror: what the events tell."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        server: ServerProcess,
        memory: Memory,
        board: Board,
        mirror: Mirror,
    ) -> None:
        self._settings = settings
        self._client = client
        self._server = server
        self._memory = memory
        self._board = board
        self._size = settings.block_size
        self.num_usable_blocks = settings.num_blocks - settings.num_reserved_blocks
        self._mirror = mirror
        self._clock = FileClock(settings.folder.clock)
        self.num_compared_blocks = 0
        self.num_compared_leases = 0

    def take(self, *, is_last: bool = False) -> dict[str, Any]:
        """Check everything and return figures of it, or raise `Violation`. is_last: nobody may have anything left."""
        num_python_blocks = self._walk()
        stats, rows = self.picture()
        check_sums(stats, self.num_usable_blocks)
        check_statuses(stats)
        cached = self._check_rows(rows)
        self._check_counters(stats, len(cached), is_last)
        if not is_last:
            self._check_books()
        num_kept, gone = self._check_ledger(cached)
        self._mirror.compare(set(cached.values()), gone)
        if is_last and (stats.num_leases or stats.num_leased_blocks or stats.num_protected_blocks):
            raise Violation("something is still leased after all have ended", stats=str(stats))
        return {
            "num_cached_blocks": len(cached),
            "num_nodes": stats.num_nodes,
            "num_leases": stats.num_leases,
            "num_python_blocks": num_python_blocks,
            "num_acknowledged_and_cached": num_kept,
            "num_acknowledged_and_evicted": len(gone),
            "num_inserted_blocks": stats.counters["num_inserted_blocks"],
            "num_evicted_blocks": stats.counters["num_evicted_blocks"],
            "num_reset_blocks": stats.counters["num_reset_blocks"],
        }

    def compare(self, before: tuple[Any, list[TreeNode]]) -> None:
        """Raise `Violation` unless all is as it was before, but for leases whose answer was lost, given back since."""
        (stats, rows), (stats_now, rows_now) = before, self.picture()
        for name in ("num_leases", "num_leased_blocks", "num_protected_blocks"):
            if getattr(stats_now, name) > getattr(stats, name):
                raise Violation("something is leased that was not", before=str(stats), now=str(stats_now))
        if stats.counters != stats_now.counters:
            raise Violation("the counters are not what they were", before=str(stats), now=str(stats_now))
        if [replace(row, num_locks=0) for row in rows] != [replace(row, num_locks=0) for row in rows_now]:
            raise Violation("the tree is not what it was", before=str(stats), now=str(stats_now))
        self._check_books()

    def _walk(self) -> int:
        """Let the server check its own integrity; return how many memory blocks its Python has in use."""
        path = self._settings.folder.walk
        path.unlink(missing_ok=True)
        os.kill(self._server.pid, signal.SIGUSR1)
        for _ in range(int(_WALK_S / 0.01)):
            if path.exists():
                break
            time.sleep(0.01)
        else:
            raise Violation(f"the server did not come round to a walk in {_WALK_S} s")
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["error"] is not None:
            raise Violation("the integrity check failed", error=found["error"])
        num_python_blocks: int = found["num_python_blocks"]
        return num_python_blocks

    def picture(self) -> tuple[Any, list[TreeNode]]:
        """Return the figures and the tree, of one moment."""
        for _ in range(50):
            before = self._client.stats()
            rows = self._client.dump(max_nodes=_MAX_NODES, max_span_tokens=1024)
            after = self._client.stats()
            if _figures(before) == _figures(after):
                return after, rows
            time.sleep(0.05)
        raise Violation("the server does not come to rest", before=str(before), after=str(after))

    def _check_rows(self, rows: Sequence[TreeNode]) -> dict[int, bytes]:
        """Compare the memory with what each cached block must hold; return the digests by block."""
        cached: dict[int, bytes] = {}
        for namespace, tokens, block, digest in self._blocks(rows):
            if block in cached or not self._settings.num_reserved_blocks <= block < self._settings.num_blocks:
                raise Violation("a cached block has two places, or is none of the pool's", block=block)
            cached[block] = digest
            if not self._memory.has(block, digest):
                raise Violation(
                    "a cached block holds other KV than its tokens demand",
                    block=block,
                    namespace=namespace,
                    num_tokens_before=tokens,
                    last_written_by=str(tag_of(self._memory.read(block))),
                )
        self.num_compared_blocks += len(cached)
        return cached

    def _blocks(self, rows: Sequence[TreeNode]) -> Iterator[tuple[tuple[str, ...], int, int, bytes]]:
        """Yield namespace, tokens before it, id and digest of each cached block. Rows come depth first."""
        path: list[tuple[int, bytes]] = []  # for each node above: tokens up to its end, and their digest
        for row in rows:
            del path[row.depth :]
            before, digest = path[-1] if path else (0, first_digest(row.namespace))
            tokens = unpack_tokens(row.tokens)
            for at, block in enumerate(array("i", row.block_ids)):
                digest = next_digest(digest, tokens[at * self._size : (at + 1) * self._size])
                yield row.namespace, before + at * self._size, block, digest
            path.append((before + row.num_tokens, digest))

    def _check_books(self) -> None:
        """Compare the server's leases with those of the engines that wait."""
        now, epoch = self._clock(), self._client.epoch or ""
        paths = self._settings.folder.books.iterdir()
        self.num_compared_leases += books.compare(paths, now, epoch, self._client.leases())

    def _check_counters(self, stats: Any, num_walked: int, is_last: bool) -> None:
        """Compare the counters with the walk, and with what the engines were told."""
        counters = stats.counters
        is_reset = counters["num_resets"] > 0  # a lease keeps what it locks until its end, out of sight
        if num_walked > stats.num_cached_blocks or (
            num_walked != stats.num_cached_blocks and (is_last or not is_reset)
        ):
            raise Violation("the tree has other blocks than are counted", walked=num_walked, stats=str(stats))
        num_gone = counters["num_evicted_blocks"] + counters["num_reset_blocks"]
        if counters["num_inserted_blocks"] != stats.num_cached_blocks + num_gone:
            raise Violation("inserted blocks are neither cached nor evicted nor reset", stats=str(stats))
        num_told = self._board.num_acknowledged_in(self._client.epoch or "")
        if num_told > counters["num_inserted_blocks"]:
            raise Violation("inserts that were answered are not in the counters", answered=num_told, stats=str(stats))

    def _check_ledger(self, cached: dict[int, bytes]) -> tuple[int, list[bytes]]:
        """Find each block that was published in this epoch where it was put, or gone: how many are, and which are not.

        Those that are gone are accounted for, and struck out.
        """
        num_kept, gone = 0, []
        for block in range(self._settings.num_reserved_blocks, self._settings.num_blocks):
            digest = self._memory.acknowledged(block, self._client.epoch or "")
            if digest is None or not self._memory.has(block, digest):
                continue  # somebody has used it since
            if block in cached:
                num_kept += 1
                if cached[block] != digest:
                    raise Violation("a block is cached under other tokens than it was published with", block=block)
            else:
                gone.append(digest)
                self._memory.strike_out(block)
        return num_kept, gone


def _figures(stats: Any) -> tuple[Any, ...]:
    """What must not change while the tree is read."""
    return (
        stats.num_free_blocks,
        stats.num_leased_blocks,
        stats.num_cached_blocks,
        stats.num_protected_blocks,
        stats.num_leases,
        stats.num_nodes,
        stats.counters,
    )
