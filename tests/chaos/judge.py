"""What an engine may conclude from an answer: which errors are fair, and which answers cannot be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radix_cache.errors import PoolExhausted, StaleLease, UnknownLease

from .prompts import is_reset_at_times
from .request import Request, Violation
from .routes import Op


class Judge:
    """clock: the lease clock. A message is begun before it is planned, and its answers are judged after.

    epoch: of the server that was known then.
    """

    def __init__(self, client: Any, clock: Callable[[], float], num_blocks: int, num_reserved: int) -> None:
        self._client = client
        self._clock = clock
        self._num_blocks = num_blocks
        self._num_reserved = num_reserved
        self._valid_until: float | None = None
        self.epoch: str | None = None

    def begin(self) -> None:
        """Note until when the leases surely live, and on which server."""
        self._valid_until = self._client.valid_until
        self.epoch = self._client.epoch

    @property
    def is_same_server(self) -> bool:
        """Tell whether no other server was heard of since the message began."""
        return self.epoch is not None and self._client.epoch == self.epoch

    @property
    def is_surely_alive(self) -> bool:
        """Tell whether the leases that were there when the message began cannot have run out since."""
        return self._valid_until is not None and self._clock() < self._valid_until and self.is_same_server

    def judge_error(self, op: Op) -> None:
        """Raise `Violation` for an error that this op cannot have got."""
        error, is_fair = op.error, False
        if isinstance(error, PoolExhausted):
            is_fair = op.verb in {"match_prefix", "allocate"}
        elif isinstance(error, UnknownLease):  # LeaseExpired too
            is_fair = op.request is None or not self.is_surely_alive
        elif isinstance(error, StaleLease):
            is_fair = op.request is None or is_reset_at_times(op.request.namespace)
        if not is_fair:
            raise Violation(
                f"{op.verb} got an error that it cannot get",
                error=f"{type(error).__name__}: {error}",
                lease=getattr(op.lease, "lease_id", None),
                namespace=op.request and op.request.namespace,
                valid_until=self._valid_until,
                now=self._clock(),
                epoch=self.epoch,
                history=op.request and list(op.request.history),
            )

    def judge_table(self, request: Request, lease: Any, max_tokens: int | None = None) -> None:
        """Raise `Violation` for a block table that cannot be one."""
        table, size = list(lease.block_table), request.block_size
        is_odd = (
            len(set(table)) != len(table)
            or any(not self._num_reserved <= block < self._num_blocks for block in table)
            or lease.num_published_tokens % size
            or lease.num_published_tokens > len(table) * size
            or (max_tokens is not None and lease.num_cached_tokens > max_tokens)
        )
        if is_odd:
            raise Violation(
                "a block table that cannot be one", lease=lease.lease_id, table=table, max_tokens=max_tokens
            )

    def judge_probe(self, op: Op) -> None:
        """What a living lease has published must be found, where nothing is reset."""
        request = op.request
        if request is None or is_reset_at_times(request.namespace) or not self.is_surely_alive:
            return
        if op.value < op.num_before:
            raise Violation(
                "what a lease has published is not found",
                lease=op.lease.lease_id,
                found=op.value,
                published=op.num_before,
                valid_until=self._valid_until,
                now=self._clock(),
                epoch=self.epoch,
                history=list(request.history),
            )
