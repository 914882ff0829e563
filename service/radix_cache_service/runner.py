"""Messages in, messages out: what the server does with its cache, and nothing of the transport.

A handler of `radix_cache_service.servicer` calls one of these methods. None but the three coroutines awaits anything,
so each runs as a whole; those give way between two pieces of work that are each whole.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc

from radix_cache import Lease, PrefixCache, settle_gc
from radix_cache.operations import Allocate, MatchPrefix, Operation, Outcome
from radix_cache_service.config import ServerConfig
from radix_cache_service.convert import Limits, answer, read_batch, read_request, result_of
from radix_cache_service.metrics import CallMetrics
from radix_cache_service.openings import Openings
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.waiting import WaitingLine

__all__ = ["Runner"]

_INTERNAL = grpc.StatusCode.INTERNAL.value[0]
_LAST_WORD_S = 0.05
_SETTLED_EVERY = 2000  # calls between two rests of the garbage collector


class Runner:
    """One `PrefixCache`, and what its clients may ask of it. epoch: random, new at each start."""

    def __init__(self, config: ServerConfig, metrics: CallMetrics) -> None:
        self.cache: PrefixCache = config.make_cache()
        self.epoch = os.urandom(8).hex()
        self.line = WaitingLine(config.num_blocks - config.num_reserved_blocks)
        self._limits = Limits(
            config.max_tokens, config.max_operations, config.max_message_bytes, config.block_size, config.num_blocks
        )
        self._metrics = metrics
        self._openings = Openings()
        self._sweeps: set[asyncio.Task[None]] = set()
        self._until_settled = _SETTLED_EVERY

    def state(self) -> pb.ServerState:
        """What is said in every answer."""
        return pb.ServerState(epoch=self.epoch, num_available_blocks=self.cache.num_available_blocks)

    def after_call(self) -> None:
        """To be called after each call, however it ended: let those in line try, and the collector rest."""
        self.line.stir()
        self._until_settled -= 1
        if not self._until_settled:
            self._until_settled = _SETTLED_EVERY
            settle_gc()

    # One operation.

    def verb(self, request: Any) -> Any:
        """Run the operation that ``request`` asks for; return its answer or raise its error."""
        return self._answered(request, self._run(read_request(request, self._limits), request.engine_id))

    async def verb_with_patience(self, request: Any, remaining_s: float | None) -> Any:
        """Do the same, but wait for blocks until shortly before the deadline: the answer has to get through."""
        operation = read_request(request, self._limits)
        timeout_s = None if remaining_s is None else remaining_s - min(_LAST_WORD_S, remaining_s / 10)
        goes_first = isinstance(operation, Allocate)
        value = await self.line.run(lambda: self._run(operation, request.engine_id), timeout_s, goes_first=goes_first)
        return self._answered(request, value)

    def _answered(self, request: Any, value: Any) -> Any:
        response = answer(request, value)
        response.state.CopyFrom(self.state())
        return response

    def _run(self, operation: Operation, engine_id: str) -> Any:
        if isinstance(operation, MatchPrefix):
            opened = self._openings.find(operation, engine_id)
            if opened is not None and self._is_live(opened, engine_id):
                return opened
        outcome = self.cache.run([operation], engine_id=engine_id or None)[0]
        if outcome.error is not None:
            raise outcome.error
        if isinstance(operation, MatchPrefix):
            self._openings.note(operation, engine_id, outcome.value)
        return outcome.value

    def _is_live(self, lease: Lease, engine_id: str) -> bool:
        """Tell whether the cache still has it; to allocate nothing renews it and changes nothing."""
        nothing = Allocate(lease.lease_id, num_blocks=0)
        return self.cache.run([nothing], engine_id=engine_id or None)[0].error is None

    def heartbeat(self, engine_id: str) -> pb.RenewResponse:
        """Renew all leases of an engine."""
        self.cache.heartbeat(engine_id)
        return pb.RenewResponse(state=self.state())

    # Operations that may take long.

    async def evict(self, request: pb.EvictRequest) -> pb.EvictResponse:
        """Evict piece by piece."""
        operation: Any = read_request(request, self._limits)
        self._hear(request.engine_id)
        num_evicted = 0
        for num_evicted in self.cache.evict_steps(operation.num_blocks):  # noqa: B007
            await asyncio.sleep(0)
        return pb.EvictResponse(state=self.state(), num_evicted_blocks=num_evicted)

    async def reset(self, request: pb.ResetRequest) -> pb.ResetResponse:
        """Reset piece by piece, to the end even if the caller leaves: what is out of sight has to be freed."""
        operation: Any = read_request(request, self._limits)
        self._hear(request.engine_id)
        sweep = asyncio.create_task(self._sweep(operation))
        self._sweeps.add(sweep)
        sweep.add_done_callback(self._sweeps.discard)
        await asyncio.shield(sweep)
        return pb.ResetResponse(state=self.state())

    async def _sweep(self, operation: Any) -> None:
        for _ in self.cache.reset_steps(operation.namespace, operation.tokens):
            await asyncio.sleep(0)

    def _hear(self, engine_id: str) -> None:
        if engine_id:
            self.cache.heartbeat(engine_id)

    # Many operations.

    def batch(self, batch: pb.BatchRequest) -> pb.BatchResponse:
        """Run a batch; raise what is wrong with it as a whole."""
        requests, asked = read_batch(batch, self._limits)
        paired = iter(requests)

        def encode(operation: Operation, outcome: Outcome) -> pb.OperationResult:
            if isinstance(operation, MatchPrefix) and outcome.error is None:
                self._openings.note(operation, batch.engine_id, outcome.value)
            result = result_of(next(paired), outcome)
            if result.error.code == _INTERNAL:
                self._metrics.num_calls["Batch.operation/INTERNAL"] += 1
            return result

        results = self.cache.run(
            asked, engine_id=batch.engine_id or None, seq=batch.seq or None, strict=batch.strict, encode=encode
        )
        return pb.BatchResponse(state=self.state(), results=results, seq=batch.seq)
