"""Requests into operations, outcomes into answers: the server's side of the schema.

A request is checked against the server's limits here, before anything is locked. The answer uses the id format of its
request.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from google.protobuf.message import Message

from radix_cache import Lease, operations
from radix_cache.errors import InvalidArgument, InvalidTokens, RadixCacheError
from radix_cache.hints import Hints, check_hints
from radix_cache.operations import InsertResult, Invalid, MatchPrefix, Operation, Outcome, check_seconds
from radix_cache.stats import LeaseInfo, NamespaceStats, Stats, TreeNode
from radix_cache.tokens import TOKEN_BYTES
from radix_cache_service.errors import to_status
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.wire import read_block_ids, read_tokens

__all__ = [
    "Limits",
    "answer",
    "lease_info_of",
    "namespace_stats_of",
    "node_of",
    "read_batch",
    "read_request",
    "result_of",
    "stats_of",
]

_ANSWER_BYTES = 512
_MOST_ID_BYTES = 5  # one listed by itself


class Limits(NamedTuple):
    """What a request may ask for at most, and the pool that it asks."""

    max_tokens: int
    max_operations: int
    max_message_bytes: int
    block_size: int
    num_blocks: int
    max_renew_s: float = operations.MAX_SECONDS

    def check_tokens(self, num_tokens: int, what: str) -> None:
        """Raise `InvalidArgument` where a request goes beyond the longest prompt."""
        if num_tokens > self.max_tokens:
            raise InvalidArgument(f"{what} is at most {self.max_tokens} here, not {num_tokens}")

    def check_table(self, num_tokens: int | None, num_blocks: int | None) -> None:
        """Raise `InvalidArgument` for a table that the pool could fill but no answer could carry."""
        if num_tokens is not None and num_tokens <= self.num_blocks * self.block_size:
            self.check_tokens(num_tokens, "num_tokens")
        if num_tokens is None and num_blocks is not None and num_blocks <= self.num_blocks:
            self.check_tokens(num_blocks * self.block_size, "num_blocks * block_size")

    def most_added(self, num_tokens: int | None, num_blocks: int | None) -> int:
        """How many blocks an allocation can add at most."""
        wanted = self.num_blocks if num_tokens is None else -(-num_tokens // self.block_size)
        return min(wanted, self.num_blocks if num_blocks is None else num_blocks, self.num_blocks)


def _optional(request: Any, name: str) -> Any:
    return getattr(request, name) if request.HasField(name) else None


def _tokens(request: Any, limits: Limits) -> bytes:
    num_tokens = max(len(request.tokens) // TOKEN_BYTES, len(request.token_ids))
    if num_tokens > limits.max_tokens:
        raise InvalidTokens(f"a prompt has at most {limits.max_tokens} tokens here, not {num_tokens}")
    return read_tokens(request.tokens, request.token_ids)


def _match_prefix(request: pb.MatchPrefixRequest, limits: Limits) -> Operation:
    operation = operations.match_prefix(
        _tokens(request, limits),
        tuple(request.namespace),
        _optional(request, "max_tokens"),
        _optional(request, "num_tokens"),
        _optional(request, "num_blocks"),
        request.parent_lease_id or None,
        request.lease_id or os.urandom(16).hex(),  # not the server's own series: its clients could guess each other's
    )
    limits.check_table(operation.num_tokens, operation.num_blocks)
    if request.HasField("hints"):
        operation = operation._replace(hints=_hints(request.hints))
    if request.partial:
        operation = operation._replace(partial=True)
    if request.HasField("pin_s"):
        operation = operation._replace(pin_s=check_seconds(request.pin_s, "pin_s"))
    return operation


def _hints(message: pb.Hints) -> Hints:
    """Return a request's hints; what it leaves out is None or empty."""
    said = {field.name: value for field, value in message.ListFields()}
    return check_hints(Hints(**said))


def _allocate(request: pb.AllocateRequest, limits: Limits) -> Operation:
    operation = operations.allocate(
        request.lease_id, _optional(request, "num_tokens"), _optional(request, "num_blocks")
    )
    limits.check_table(operation.num_tokens, operation.num_blocks)
    return operation


def _insert(request: pb.InsertRequest, limits: Limits) -> Operation:
    hints = _hints(request.hints) if request.HasField("hints") else None
    operation = operations.insert(request.lease_id, _tokens(request, limits), request.offset, hints)
    limits.check_tokens(operation.offset + len(operation.tokens) // TOKEN_BYTES, "offset and tokens together")
    return operation


def _free(request: pb.FreeRequest, limits: Limits) -> Operation:
    return operations.Free(request.lease_id, read_block_ids(request.blocks, request.block_ids))


def _release(request: pb.ReleaseRequest, limits: Limits) -> Operation:
    return operations.unpin(request.lease_id) if request.pin_only else operations.release(request.lease_id)


def _renew(request: pb.RenewRequest, limits: Limits) -> Operation:
    operation = operations.renew(request.lease_id, _optional(request, "ttl_s"))
    if operation.ttl_s is not None and operation.ttl_s > limits.max_renew_s:
        raise InvalidArgument(f"ttl_s is at most {limits.max_renew_s:g} here, not {operation.ttl_s:g}")
    return operation


def _probe(request: pb.ProbeRequest, limits: Limits) -> Operation:
    return operations.probe(_tokens(request, limits), tuple(request.namespace))


def _evict(request: pb.EvictRequest, limits: Limits) -> Operation:
    return operations.evict(min(request.num_blocks, operations.MAX_BLOCKS))


def _reset(request: pb.ResetRequest, limits: Limits) -> Operation:
    return operations.reset(tuple(request.namespace), _tokens(request, limits))


_READERS: dict[type[Message], Callable[[Any, Limits], Operation]] = {
    pb.MatchPrefixRequest: _match_prefix,
    pb.AllocateRequest: _allocate,
    pb.InsertRequest: _insert,
    pb.FreeRequest: _free,
    pb.ReleaseRequest: _release,
    pb.RenewRequest: _renew,
    pb.ProbeRequest: _probe,
    pb.EvictRequest: _evict,
    pb.ResetRequest: _reset,
}


_NAMES = ("lease_id", "parent_lease_id", "engine_id")


def read_request(request: Message, limits: Limits) -> Operation:
    """Return the operation that a request asks for. Raises `InvalidArgument` and its kinds."""
    for name in _NAMES:
        if len(getattr(request, name, "")) > operations.MAX_NAME_LENGTH:  # would come back in a status, which is short
            operations.check_name(getattr(request, name), name)
    return _READERS[type(request)](request, limits)


def read_batch(batch: pb.BatchRequest, limits: Limits) -> tuple[list[Any], list[Operation]]:
    """Return the requests of a batch and what they ask for; one that cannot be read is an `Invalid` operation.

    Raises `InvalidArgument` for the batch as a whole where it is too long, or its answer could be.
    """
    if len(batch.operations) > limits.max_operations:
        raise InvalidArgument(f"a batch has at most {limits.max_operations} operations, not {len(batch.operations)}")
    requests: list[Any] = []
    asked: list[Operation] = []
    for item in batch.operations:
        verb = item.WhichOneof("verb")
        request = getattr(item, verb) if verb else None
        requests.append(request)
        asked.append(_read_item(request, limits))
    num_bytes = sum(_answer_bytes(operation, limits) for operation in asked)
    if num_bytes > limits.max_message_bytes:
        raise InvalidArgument(
            f"the answer to this batch could have {num_bytes} bytes, at most {limits.max_message_bytes} are sent"
        )
    return requests, asked


def _read_item(request: Any, limits: Limits) -> Operation:
    if request is None:
        return Invalid(InvalidArgument("an operation of the batch names no verb that this server knows"))
    try:
        return read_request(request, limits)
    except RadixCacheError as error:
        return Invalid(error, request.lease_id if isinstance(request, pb.MatchPrefixRequest) else None)


def _answer_bytes(operation: Operation, limits: Limits) -> int:
    """How long the answer can get at most, about."""
    num_ids = 0
    if isinstance(operation, MatchPrefix):
        num_ids = len(operation.tokens) // TOKEN_BYTES // limits.block_size
        if operation.parent_id:
            num_ids += min(limits.max_tokens // limits.block_size, limits.num_blocks)
        if operation.num_tokens is not None or operation.num_blocks is not None:
            num_ids += limits.most_added(operation.num_tokens, operation.num_blocks)
    elif isinstance(operation, operations.Insert):
        num_ids = 2 * (len(operation.tokens) // TOKEN_BYTES // limits.block_size)
    elif isinstance(operation, operations.Allocate):
        num_ids = limits.most_added(operation.num_tokens, operation.num_blocks)
    return _ANSWER_BYTES + _MOST_ID_BYTES * num_ids


# Answers.


def _is_repeated(request: Any) -> bool:
    """Tell whether the answer lists its ids one by one."""
    stated = getattr(request, "id_format", pb.ID_FORMAT_UNSPECIFIED)
    if stated != pb.ID_FORMAT_UNSPECIFIED:
        return bool(stated == pb.ID_FORMAT_REPEATED)
    return bool(getattr(request, "token_ids", ())) and not request.tokens


def _ids(request: Any, names: tuple[str, str], ids: array[int]) -> dict[str, Any]:
    """Return the ids under the field of the request's format; ``names`` are the packed and the repeated one."""
    return {names[1]: ids} if _is_repeated(request) else {names[0]: ids.tobytes()}


def _matched(request: Any, lease: Lease) -> Message:
    ids = _ids(request, ("block_table", "block_table_ids"), lease.block_table)
    namespace = lease.namespace if request.parent_lease_id else ()
    return pb.MatchPrefixResponse(
        lease_id=lease.lease_id,
        num_cached_tokens=lease.num_cached_tokens,
        namespace=namespace,
        partial_block_id=lease.partial_block_id,
        num_partial_tokens=lease.num_partial_tokens,
        **ids,
    )


def _allocated(request: Any, added: array[int]) -> Message:
    return pb.AllocateResponse(**_ids(request, ("added_blocks", "added_block_ids"), added))


def _inserted(request: Any, result: InsertResult) -> Message:
    return pb.InsertResponse(
        num_cached_tokens=result.num_cached_tokens,
        **_ids(request, ("blocks", "block_ids"), result.block_ids),
        **_ids(request, ("redundant_blocks", "redundant_block_ids"), result.redundant_block_ids),
    )


_ANSWERS: dict[type[Message], tuple[str, Callable[[Any, Any], Message]]] = {
    pb.MatchPrefixRequest: ("match_prefix", _matched),
    pb.AllocateRequest: ("allocate", _allocated),
    pb.InsertRequest: ("insert", _inserted),
    pb.FreeRequest: ("free", lambda _, __: pb.FreeResponse()),
    pb.ReleaseRequest: ("release", lambda _, __: pb.ReleaseResponse()),
    pb.RenewRequest: ("renew", lambda _, __: pb.RenewResponse()),
    pb.ProbeRequest: ("probe", lambda _, num_tokens: pb.ProbeResponse(num_cached_tokens=num_tokens)),
    pb.EvictRequest: ("evict", lambda _, num_blocks: pb.EvictResponse(num_evicted_blocks=num_blocks)),
    pb.ResetRequest: ("reset", lambda _, __: pb.ResetResponse()),
}


def answer(request: Any, value: Any) -> Any:
    """Return the answer message for what an operation returned, without the server's state."""
    return _ANSWERS[type(request)][1](request, value)


def node_of(row: TreeNode) -> pb.TreeNode:
    """Return one row of a dumped tree."""
    return pb.TreeNode(
        namespace=row.namespace,
        depth=row.depth,
        num_tokens=row.num_tokens,
        num_blocks=row.num_blocks,
        num_locks=row.num_locks,
        num_children=row.num_children,
        age=row.age,
        tokens=row.tokens,
        blocks=row.block_ids,
    )


def stats_of(stats: Stats) -> pb.GetStatsResponse:
    """Return what the cache says of itself, without what the server adds."""
    return pb.GetStatsResponse(
        num_free_blocks=stats.num_free_blocks,
        num_leased_blocks=stats.num_leased_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_evictable_blocks=stats.num_evictable_blocks,
        num_protected_blocks=stats.num_protected_blocks,
        num_leases=stats.num_leases,
        num_nodes=stats.num_nodes,
        num_namespaces=stats.num_namespaces,
        counters=stats.counters,
        oldest_lease_age_s=stats.oldest_lease_age_s,
        num_pins=stats.num_pins,
        num_pinned_blocks=stats.num_pinned_blocks,
    )


def namespace_stats_of(stats: NamespaceStats) -> pb.NamespaceStats:
    """Return what one namespace has and had."""
    return pb.NamespaceStats(**{item.name: getattr(stats, item.name) for item in fields(stats)})


def lease_info_of(info: LeaseInfo) -> pb.LeaseInfo:
    """Return one row of a list of leases."""
    return pb.LeaseInfo(**{item.name: getattr(info, item.name) for item in fields(info)})


def result_of(request: Any, outcome: Outcome) -> pb.OperationResult:
    """Return one item of a batch's answer."""
    if outcome.error is not None:
        return pb.OperationResult(error=to_status(outcome.error))
    field, make = _ANSWERS[type(request)]
    return pb.OperationResult(**{field: make(request, outcome.value)})  # type: ignore[arg-type]
