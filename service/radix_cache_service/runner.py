"""Messages in, messages out: what the server does with its cache, and nothing of the transport.

A handler of `radix_cache_service.servicer` calls one of these methods. None but the three coroutines awaits anything,
so each runs as a whole; those give way between two pieces of work that are each whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from radix_cache import PrefixCache, settle_gc
from radix_cache.errors import PoolExhausted, UnknownLease
from radix_cache.operations import Allocate, Evict, Namespace, Operation, Outcome, Release, check_name
from radix_cache.stats import LeaseInfo, TreeNode
from radix_cache_service.access.guard import make_guard
from radix_cache_service.config import ServerConfig
from radix_cache_service.convert import Limits, answer, read_batch, read_request
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.recording import Recording
from radix_cache_service.state.opening import new_epoch, open_ledger
from radix_cache_service.telemetry.metrics import CallMetrics
from radix_cache_service.waiting import WaitingLine

__all__ = ["Runner"]

_LAST_WORD_S = 0.25
_NUM_STEP_BLOCKS = 8192  # an eviction lets others in after this many
_NUM_STEP_LEASES = 256  # and so does the end of an engine
_SETTLED_EVERY = 2000  # calls between two rests of the garbage collector


class Runner:
    """One `PrefixCache`, and what its clients may ask of it.

    epoch: random, new at each start but one that took up the state of before. guard: says who may ask for what; None
    where everybody may ask for everything. recording: told of each operation that was done, if it is set.
    """

    def __init__(self, config: ServerConfig, metrics: CallMetrics) -> None:
        self.ledger, self.keeper = open_ledger(config)
        self.cache: PrefixCache = self.ledger.cache
        self.guard = make_guard(config, self.cache, None if self.keeper is None else self.keeper.had_tokens)
        self.epoch = new_epoch() if self.keeper is None else self.keeper.epoch
        self.line = WaitingLine(config.num_blocks - config.num_reserved_blocks, config.max_waiting_calls)
        self._limits = Limits(
            config.max_tokens,
            config.max_operations,
            config.max_message_bytes,
            config.block_size,
            config.num_blocks,
            config.max_renew_s,
        )
        self._metrics = metrics
        self.recording: Recording | None = None
        self.ledger.watch = self._watch
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
        if self.keeper is not None and not self.ledger.is_sweeping:
            self.keeper.tend()

    def tick(self) -> None:
        """Let leases expire whose time is up."""
        if self.cache.stats().num_leases:
            self.ledger.heard("")
        if self.recording is not None:
            self.recording.tick()

    async def close(self) -> None:
        """Let go of the state directory; no call may follow. What a reset has not freed yet, the next start frees."""
        for sweep in self._sweeps:
            sweep.cancel()
        if self.recording is not None:
            self.recording.close()
        if self.keeper is not None:
            await self.keeper.close()

    # One operation.

    def verb(self, request: Any) -> Any:
        """Run the operation that ``request`` asks for; return its answer or raise its error."""
        return self._answered(request, self._run(read_request(request, self._limits), request.engine_id))

    async def verb_with_patience(
        self, request: Any, remaining_s: float | None, waited: Callable[[float], None] = lambda _: None
    ) -> Any:
        """Do the same, but wait for blocks until shortly before the deadline: the answer has to get through.

        waited: told the seconds of each wait.
        """
        operation = read_request(request, self._limits)
        timeout_s = None if remaining_s is None else remaining_s - min(_LAST_WORD_S, remaining_s / 10)
        goes_first = isinstance(operation, Allocate)
        if len(self.line):
            try:
                return self._answered(request, self._arrive(operation, request.engine_id))
            except PoolExhausted as error:
                if error.needed > self.line.num_usable_blocks:
                    return self._answered(request, self._run(operation, request.engine_id))
        value = await self.line.run(
            lambda: self._run(operation, request.engine_id), timeout_s, goes_first=goes_first, waited=waited
        )
        return self._answered(request, value)

    def _arrive(self, operation: Any, engine_id: str) -> Any:
        """Serve at once what needs no blocks, and refuse what waiting does not help; else raise `PoolExhausted`."""
        return self._run(operation, engine_id, self.ledger.without_blocks)

    def _answered(self, request: Any, value: Any) -> Any:
        response = answer(request, value)
        self._say_state(response)
        return response

    def _say_state(self, response: Any) -> None:
        state = response.state
        state.epoch, state.num_available_blocks = self.epoch, self.cache.num_available_blocks

    def _run(self, operation: Any, engine_id: str, call: Callable[[Any, str], Any] | None = None) -> Any:
        run = call or self.ledger.one
        if self.guard is None:
            value = run(operation, engine_id)
        else:
            engine_id = self.guard.engine(engine_id)
            self.guard.check(operation)
            value = run(operation, engine_id)
            self.guard.done(operation, value)
        if self.recording is not None:
            self.recording.done(operation, value)
        return value

    def heartbeat(self, engine_id: str) -> pb.RenewResponse:
        """Renew all leases of an engine."""
        self.ledger.heard(self._engine(check_name(engine_id, "engine_id")))
        return pb.RenewResponse(state=self.state())

    def dump(self, namespace: Namespace, max_nodes: int, max_span_tokens: int) -> list[TreeNode]:
        """Return rows of the tree: of what the caller may see of it."""
        if self.guard is None:
            return self.cache.dump(namespace, max_nodes, max_span_tokens)
        rows: list[TreeNode] = []
        for prefix in self.guard.visible(namespace):
            rows += self.cache.dump(prefix, max_nodes - len(rows), max_span_tokens)
        return self.guard.veiled(rows)

    def leases(self, engine_id: str) -> list[LeaseInfo]:
        """Return the leases of an engine, or all: those that the caller may see."""
        self.tick()
        found = self.cache.leases(check_name(engine_id, "engine_id") if engine_id else None)
        if self.guard is None:
            return found
        prefixes = self.guard.visible(())
        return [info for info in found if any(info.namespace[: len(prefix)] == prefix for prefix in prefixes)]

    # Operations that may take long.

    async def release_engine(self, engine_id: str) -> pb.ReleaseEngineResponse:
        """Release an engine's leases one by one, and let others in between."""
        num_released = 0
        for number, info in enumerate(self.leases(check_name(engine_id, "engine_id")), start=1):
            num_released += not info.is_promised and self._is_released(info.lease_id)
            if number % _NUM_STEP_LEASES == 0:
                await asyncio.sleep(0)
        return pb.ReleaseEngineResponse(state=self.state(), num_released_leases=num_released)

    def _is_released(self, lease_id: str) -> bool:
        """Release a lease; tell whether it was still there."""
        operation = Release(lease_id)
        try:
            self.ledger.one(operation, "")
        except UnknownLease:
            return False
        if self.guard is not None:
            self.guard.done(operation, None)
        return True

    async def evict(self, request: pb.EvictRequest) -> pb.EvictResponse:
        """Evict piece by piece."""
        operation: Any = self._allowed(request)
        num_evicted = 0
        while num_evicted < operation.num_blocks:
            piece: int = self.ledger.one(Evict(min(operation.num_blocks - num_evicted, _NUM_STEP_BLOCKS)), "")
            num_evicted += piece
            if not piece:
                break
            await asyncio.sleep(0)
        return pb.EvictResponse(state=self.state(), num_evicted_blocks=num_evicted)

    async def reset(self, request: pb.ResetRequest) -> pb.ResetResponse:
        """Reset piece by piece, to the end even if the caller leaves: what is out of sight has to be freed."""
        operation: Any = self._allowed(request)
        sweep = asyncio.create_task(self._sweep(operation))
        self._sweeps.add(sweep)
        sweep.add_done_callback(self._sweeps.discard)
        await asyncio.shield(sweep)
        return pb.ResetResponse(state=self.state())

    async def _sweep(self, operation: Any) -> None:
        for _ in self.ledger.reset(operation):
            await asyncio.sleep(0)

    def _allowed(self, request: Any) -> Operation:
        """Return what a request asks for, if it may; its engine has been heard of then."""
        operation = read_request(request, self._limits)
        engine_id = self._engine(request.engine_id)
        if self.guard is not None:
            self.guard.check(operation)
        if engine_id:
            self.ledger.heard(engine_id)
        return operation

    def _engine(self, engine_id: str) -> str:
        return engine_id if self.guard is None else self.guard.engine(engine_id)

    # Many operations.

    def batch(self, batch: pb.BatchRequest, response: pb.BatchResponse) -> None:
        """Run a batch and fill in its answer; raise what is wrong with it as a whole."""
        requests, asked = read_batch(batch, self._limits)
        if self.guard is not None:
            batch.engine_id = self._engine(batch.engine_id)
            asked = self.guard.check_all(asked)
        self.ledger.batch(batch, requests, asked, response)
        self._say_state(response)
        response.seq = batch.seq

    def _watch(self, operation: Operation, outcome: Outcome, result: pb.OperationResult) -> None:
        if self.guard is not None and outcome.error is None:
            self.guard.done(operation, outcome.value)
        if self.recording is not None and outcome.error is None:
            self.recording.done(operation, outcome.value)
        code = 0 if outcome.error is None else result.error.code
        self._metrics.record_operation(type(operation).__name__, code)
