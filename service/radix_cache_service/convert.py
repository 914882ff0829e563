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
from radix_cache.operations import InsertResult, Invalid, MatchPrefix, Namespace, Operation, Outcome, check_seconds
from radix_cache.stats import LeaseInfo, NamespaceStats, Stats, TreeNode
from radix_cache.tokens import TOKEN_BYTES
from radix_cache_service.errors import to_status
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.wire import read_block_ids, read_tokens

__all__ = [
    "Limits",
    "answer",
    "fill_result",
    "lease_info_of",
    "namespace_stats_of",
    "node_of",
    "read_batch",
    "read_request",
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


def _namespace(request: Any) -> Namespace:
    return tuple(request.namespace[:])  # a slice is a list made at once; the field itself is asked for each item


def _tokens(request: Any, limits: Limits) -> bytes:
    packed, listed = request.tokens, request.token_ids  # once: each look makes a copy
    num_tokens = len(packed) // TOKEN_BYTES or len(listed)
    if num_tokens > limits.max_tokens:
        raise InvalidTokens(f"a prompt has at most {limits.max_tokens} tokens here, not {num_tokens}")
    return read_tokens(packed, listed)


def _match_prefix(request: pb.MatchPrefixRequest, limits: Limits) -> Operation:
    has = request.HasField
    operation = operations.match_prefix(
        _tokens(request, limits),
        _namespace(request),
        request.max_tokens if has("max_tokens") else None,
        request.num_tokens if has("num_tokens") else None,
        request.num_blocks if has("num_blocks") else None,
        request.parent_lease_id or None,
        request.lease_id or os.urandom(16).hex(),  # not the server's own series: its clients could guess each other's
    )
    limits.check_table(operation.num_tokens, operation.num_blocks)
    if has("hints"):
        operation = operation._replace(hints=_hints(request.hints))
    if request.partial:
        operation = operation._replace(partial=True)
    if has("pin_s"):
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
    return operations.probe(_tokens(request, limits), _namespace(request))


def _evict(request: pb.EvictRequest, limits: Limits) -> Operation:
    return operations.evict(min(request.num_blocks, operations.MAX_BLOCKS))


def _reset(request: pb.ResetRequest, limits: Limits) -> Operation:
    return operations.reset(_namespace(request), _tokens(request, limits))


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


_NAMES: dict[type[Message], tuple[str, ...]] = {
    kind: tuple(name for name in ("lease_id", "parent_lease_id", "engine_id") if name in kind.DESCRIPTOR.fields_by_name)
    for kind in _READERS
}


def read_request(request: Message, limits: Limits) -> Operation:
    """Return the operation that a request asks for. Raises `InvalidArgument` and its kinds."""
    kind = type(request)
    for name in _NAMES[kind]:
        value = getattr(request, name)
        if len(value) > operations.MAX_NAME_LENGTH:  # would come back in a status, which is short
            operations.check_name(value, name)
    return _READERS[kind](request, limits)


def read_batch(batch: pb.BatchRequest, limits: Limits) -> tuple[list[Any], list[Operation]]:
    """Return the requests of a batch and what they ask for; one that cannot be read is an `Invalid` operation.

    Raises `InvalidArgument` for the batch as a whole where it is too long, or its answer could be.
    """
    if len(batch.operations) > limits.max_operations:
        raise InvalidArgument(f"a batch has at most {limits.max_operations} operations, not {len(batch.operations)}")
    requests: list[Any] = []
    asked: list[Operation] = []
    num_bytes = 0
    for item in batch.operations:
        verb = item.WhichOneof("verb")
        request = getattr(item, verb) if verb else None
        requests.append(request)
        operation = _read_item(request, limits)
        asked.append(operation)
        num_bytes += _ANSWER_BYTES + _MOST_ID_BYTES * _most_ids(operation, limits)
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


def _most_ids(operation: Operation, limits: Limits) -> int:
    """How many ids the answer can have at most."""
    kind = type(operation)
    if kind is operations.Allocate:
        return limits.most_added(operation.num_tokens, operation.num_blocks)  # type: ignore[union-attr]
    if kind is operations.Insert:
        return 2 * (len(operation.tokens) // TOKEN_BYTES // limits.block_size)  # type: ignore[union-attr]
    if not isinstance(operation, MatchPrefix):
        return 0
    num_ids = len(operation.tokens) // TOKEN_BYTES // limits.block_size
    if operation.parent_id:
        num_ids += min(limits.max_tokens // limits.block_size, limits.num_blocks)
    if operation.num_tokens is not None or operation.num_blocks is not None:
        num_ids += limits.most_added(operation.num_tokens, operation.num_blocks)
    return num_ids


# Answers.


def _is_repeated(request: Any) -> bool:
    """Tell whether the answer lists its ids one by one."""
    stated = getattr(request, "id_format", pb.ID_FORMAT_UNSPECIFIED)
    if stated != pb.ID_FORMAT_UNSPECIFIED:
        return bool(stated == pb.ID_FORMAT_REPEATED)
    return bool(getattr(request, "token_ids", ())) and not request.tokens


def _fill_match(message: Any, request: Any, lease: Lease) -> None:
    message.lease_id = lease.lease_id
    message.num_cached_tokens = lease.num_cached_tokens
    if _is_repeated(request):
        message.block_table_ids.extend(lease.block_table)
    else:
        message.block_table = lease._packed_table()
    if lease.partial_block_id is not None:
        message.partial_block_id = lease.partial_block_id
        message.num_partial_tokens = lease.num_partial_tokens
    if request.parent_lease_id:
        message.namespace.extend(lease.namespace)


def _fill_allocation(message: Any, request: Any, added: array[int]) -> None:
    if _is_repeated(request):
        message.added_block_ids.extend(added)
    else:
        message.added_blocks = added.tobytes()


def _fill_insert(message: Any, request: Any, result: InsertResult) -> None:
    message.num_cached_tokens = result.num_cached_tokens
    if _is_repeated(request):
        message.block_ids.extend(result.block_ids)
        message.redundant_block_ids.extend(result.redundant_block_ids)
    else:
        message.blocks = result.block_ids.tobytes()
        message.redundant_blocks = result.redundant_block_ids.tobytes()


def _fill_probe(message: Any, _: object, num_tokens: int) -> None:
    message.num_cached_tokens = num_tokens


def _fill_eviction(message: Any, _: object, num_blocks: int) -> None:
    message.num_evicted_blocks = num_blocks


def _fill_nothing(*_: object) -> None:
    pass


class _Answer(NamedTuple):
    """The answer to one kind of request: its message, the field that it has in a batch, and what fills it in.

    It is filled in where it stands, alone or in the answer to a batch: messages are copied wherever they are put.
    """

    kind: type[Message]
    field: str
    fill: Callable[[Any, Any, Any], None]


_ANSWERS: dict[type[Message], _Answer] = {
    pb.MatchPrefixRequest: _Answer(pb.MatchPrefixResponse, "match_prefix", _fill_match),
    pb.AllocateRequest: _Answer(pb.AllocateResponse, "allocate", _fill_allocation),
    pb.InsertRequest: _Answer(pb.InsertResponse, "insert", _fill_insert),
    pb.FreeRequest: _Answer(pb.FreeResponse, "free", _fill_nothing),
    pb.ReleaseRequest: _Answer(pb.ReleaseResponse, "release", _fill_nothing),
    pb.RenewRequest: _Answer(pb.RenewResponse, "renew", _fill_nothing),
    pb.ProbeRequest: _Answer(pb.ProbeResponse, "probe", _fill_probe),
    pb.EvictRequest: _Answer(pb.EvictResponse, "evict", _fill_eviction),
    pb.ResetRequest: _Answer(pb.ResetResponse, "reset", _fill_nothing),
}


def answer(request: Any, value: Any) -> Any:
    """Return the answer message for what an operation returned, without the server's state."""
    kind, _, fill = _ANSWERS[type(request)]
    message = kind()
    fill(message, request, value)
    return message


def fill_result(result: pb.OperationResult, request: Any, outcome: Outcome) -> None:
    """Fill in one item of a batch's answer."""
    if outcome.error is not None:
        result.error.CopyFrom(to_status(outcome.error))
        return
    _, field, fill = _ANSWERS[type(request)]
    message = getattr(result, field)
    message.SetInParent()  # there may be nothing to fill in
    fill(message, request, outcome.value)


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
