"""Who has what, and whom to ask: NVIDIA Dynamo's selection service, in this process.

It listens to the events of each node, and knows from them what is cached there. The node of the lowest cost is chosen:

    prefill_weight * tokens that it has yet to compute, with those of this request that it has not cached
    + tokens that its requests in flight hold, shared ones once
    + request_weight * requests in flight

Dynamo's own weights are 1 and 0. So a prefix that one node has would cost nothing there, however many ask for it, and
all would be sent to that node; while among prompts that share nothing, two requests more or less on a node would count
for more than all that it has cached. A tie goes to any of the cheapest.

Which node is called what is not known here: a worker is a number, and never used again for another life of a node.

What is booked is forgotten by itself some time after ``expiry_s``: by then whoever booked it should have freed it.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Awaitable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

os.environ.setdefault("DYN_LOG", "off")  # read as it is imported; its log is not ours to answer for

from dynamo.llm import SelectionService

from radix_cache.errors import InvalidArgument

__all__ = ["Choice", "Prompt", "Selection", "Worker"]

_MODEL = "radix-cache"  # one for all: a namespace says more
_PREFILL_WEIGHT = "DYN_ROUTER_PREFILL_LOAD_SCALE"
_REQUEST_WEIGHT = "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT"  # in blocks
_EXPIRY = "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS"  # 300, unless it is set
_SCHEDULABLE = "schedulable"
_NOWHERE = "127.0.0.1:1"
_NOT_FOUND, _UNAVAILABLE = 404, 503


class Worker(NamedTuple):
    """One life of a node. events, replay: where its events are, and those that were missed, ``host:port``."""

    number: int
    events: str
    replay: str
    rank: int


class Prompt(NamedTuple):
    """What is looked for. lora_name: its namespace."""

    tokens: array[int]
    lora_name: str | None

    def as_request(self) -> dict[str, Any]:
        """Return what the service takes."""
        return {"model_name": _MODEL, "token_ids": self.tokens.tolist(), "lora_name": self.lora_name}


class Choice(NamedTuple):
    """The worker that was chosen, and what it has of the prompt."""

    number: int
    num_cached_tokens: int


class Selection:
    """Chooses among workers whose blocks have ``block_size`` tokens. The weights are those of above."""

    def __init__(self, block_size: int, prefill_weight: float, request_weight: int, expiry_s: float) -> None:
        self.block_size = block_size
        said = {_PREFILL_WEIGHT: str(prefill_weight), _REQUEST_WEIGHT: str(request_weight / block_size)}
        with _environ({**said, _EXPIRY: str(math.ceil(expiry_s))}):
            self._service: Any = SelectionService(indexer_threads=2)

    async def add(self, worker: Worker) -> None:
        """Begin to listen to a worker, and to choose it. Raises `InvalidArgument` where that can't be."""
        said = {
            "worker_id": worker.number,
            "model_name": _MODEL,
            "block_size": self.block_size,
            "endpoint": f"node:{worker.number}",  # it wants one, and does not use it
            "kv_events_endpoint": f"tcp://{worker.events}",
            "replay_endpoint": f"tcp://{worker.replay}",
            "data_parallel_start_rank": worker.rank,
        }
        told = await self._service.upsert_worker(said)
        if told["lifecycle"] != _SCHEDULABLE:
            await self.remove(worker.number)
            reasons = "; ".join(told.get("not_schedulable_reasons", ()))
            raise InvalidArgument(f"the selection service does not take it: {reasons or told['lifecycle']}")

    async def listen_anew(self, worker: Worker) -> None:
        """Forget what a worker has, and listen to it from the beginning; what is booked there stays."""
        await self.add(worker._replace(events=_NOWHERE, replay=_NOWHERE))  # the same places again would change nothing
        await self.add(worker)

    async def remove(self, number: int) -> None:
        """Forget a worker, all that it has and all that is booked there."""
        await _if_there(self._service.delete_worker(number))

    async def choose(self, prompt: Prompt, allowed: Collection[int], booking: str) -> Choice | None:
        """Return one of the workers that are ``allowed``, None where none of them is there any more.

        booking: a name under which the prompt is load there from now on; empty: it is none.
        """
        request = {**prompt.as_request(), "allowed_worker_ids": list(allowed)}
        try:
            if booking:
                said = await self._service.select_and_reserve({**request, "selection_id": booking})
            else:
                said = await self._service.select(request)
        except Exception as error:
            if getattr(error, "status_code", None) == _UNAVAILABLE:
                return None
            raise
        return Choice(said["worker_id"], said["overlap"]["gpu"])

    async def scores(self, prompt: Prompt) -> dict[int, int]:
        """Return how many tokens of the prompt each worker has; of none, where none is there any more."""
        try:
            said = await self._service.overlap_scores(prompt.as_request())
        except Exception as error:
            if getattr(error, "status_code", None) == _UNAVAILABLE:
                return {}
            raise
        return {each["worker_id"]: each["device_blocks"] * self.block_size for each in said["workers"]}

    def pending_tokens(self) -> dict[int, int]:
        """Return how many tokens of the prompts that are booked each worker has yet to compute."""
        found = [each for model in self._service.loads() for each in model["loads"]]
        return {each["worker_id"]: each["potential_prefill_tokens"] for each in found}

    async def prefilled(self, booking: str) -> None:
        """Count no more what the prompt took to compute."""
        await _if_there(self._service.prefill_complete(booking))

    async def free(self, booking: str) -> None:
        """Count it no more."""
        await _if_there(self._service.free_reservation(booking))

    async def close(self) -> None:
        """Listen to nobody any more."""
        await self._service.shutdown_async()


async def _if_there(done: Awaitable[object]) -> None:
    """Do it to what is there: a booking goes with its worker."""
    try:
        await done
    except Exception as error:
        if getattr(error, "status_code", None) != _NOT_FOUND:
            raise


@contextmanager
def _environ(said: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the block lasts: the one way to tell the service its weights."""
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
