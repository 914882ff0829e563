"""Operations into requests, answers into values: the clients' side of the schema.

Nothing here remembers anything; what the answers mean for a client's leases is the business of
`radix_cache_service.client.books`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from google.protobuf.message import Message

from radix_cache.errors import InvalidArgument
from radix_cache.hints import NO_HINTS, Hints
from radix_cache.operations import (
    Allocate,
    Evict,
    Free,
    Insert,
    InsertResult,
    MatchPrefix,
    Namespace,
    Operation,
    Outcome,
    Probe,
    Release,
    Renew,
    Reset,
)
from radix_cache.stats import Description, LeaseInfo, NamespaceStats, Stats, TreeNode
from radix_cache_service.errors import from_status
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.wire import read_block_ids

__all__ = [
    "Latency",
    "Opened",
    "ServerStats",
    "batch_request",
    "method_of",
    "read_answer",
    "read_batch",
    "read_description",
    "read_leases",
    "read_namespace_stats",
    "read_nodes",
    "read_stats",
    "request_of",
]


class Opened(NamedTuple):
    """The answer to a match, before it is a lease."""

    lease_id: str
    num_cached_tokens: int
    block_ids: array[int]
    namespace: Namespace
    partial_block_id: int | None = None
    num_partial_tokens: int = 0


class Latency(NamedTuple):
    """Time spent in the server's handler of one method, not counting the wait for blocks."""

    p50_s: float
    p99_s: float
    max_s: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class ServerStats(Stats):
    """What a server's cache says of itself, and the server.

    uptime_s: seconds since it started. num_calls: calls answered, by method and status, such as ``"MatchPrefix/OK"``.
    latencies: by method. num_operations: those of batches, by verb and status. num_waiting_calls: for blocks, now.
    num_streams: open now.
    """

    uptime_s: float = 0.0
    num_calls: dict[str, int] = field(default_factory=dict)
    latencies: dict[str, Latency] = field(default_factory=dict)
    num_operations: dict[str, int] = field(default_factory=dict)
    num_waiting_calls: int = 0
    num_streams: int = 0


# Requests.


def _match_prefix(operation: MatchPrefix) -> Message:
    return pb.MatchPrefixRequest(
        tokens=operation.tokens,
        lease_id=operation.lease_id,
        namespace=operation.namespace,
        max_tokens=operation.max_tokens,
        num_tokens=operation.num_tokens,
        num_blocks=operation.num_blocks,
        parent_lease_id=operation.parent_id or "",
        hints=_hints(operation.hints),
        pin_s=operation.pin_s,
        partial=operation.partial,
    )


def _hints(hints: Hints) -> pb.Hints | None:
    return None if hints is NO_HINTS else pb.Hints(**hints._asdict())


def _allocate(operation: Allocate) -> Message:
    lease_id, num_tokens, num_blocks = operation
    return pb.AllocateRequest(lease_id=lease_id, num_tokens=num_tokens, num_blocks=num_blocks)


def _insert(operation: Insert) -> Message:
    return pb.InsertRequest(
        lease_id=operation.lease_id, tokens=operation.tokens, offset=operation.offset, hints=_hints(operation.hints)
    )


def _free(operation: Free) -> Message:
    return pb.FreeRequest(lease_id=operation.lease_id, blocks=operation.block_ids.tobytes())


def _release(operation: Release) -> Message:
    return pb.ReleaseRequest(lease_id=operation.lease_id, pin_only=operation.pin_only)


def _renew(operation: Renew) -> Message:
    return pb.RenewRequest(lease_id=operation.lease_id, ttl_s=operation.ttl_s)


def _probe(operation: Probe) -> Message:
    return pb.ProbeRequest(tokens=operation.tokens, namespace=operation.namespace)


def _evict(operation: Evict) -> Message:
    return pb.EvictRequest(num_blocks=operation.num_blocks)


def _reset(operation: Reset) -> Message:
    return pb.ResetRequest(namespace=operation.namespace, tokens=operation.tokens)


# Answers.


def _opened(operation: MatchPrefix, answer: pb.MatchPrefixResponse) -> Opened:
    table = read_block_ids(answer.block_table, answer.block_table_ids)
    namespace = operation.namespace if operation.parent_id is None else tuple(answer.namespace)
    partial = answer.partial_block_id if answer.HasField("partial_block_id") else None
    return Opened(answer.lease_id, answer.num_cached_tokens, table, namespace, partial, answer.num_partial_tokens)


def _added(_: Allocate, answer: pb.AllocateResponse) -> array[int]:
    return read_block_ids(answer.added_blocks, answer.added_block_ids)


def _inserted(_: Insert, answer: pb.InsertResponse) -> InsertResult:
    return InsertResult(
        answer.num_cached_tokens,
        read_block_ids(answer.blocks, answer.block_ids),
        read_block_ids(answer.redundant_blocks, answer.redundant_block_ids),
    )


def _nothing(*_: object) -> None:
    return None


class _Verb(NamedTuple):
    """One row for each operation: the RPC, the field that it has in a batch, and both directions."""

    method: str
    field: str
    request: Callable[[Any], Any]
    value: Callable[[Any, Any], Any]


_VERBS: dict[type, _Verb] = {
    MatchPrefix: _Verb("MatchPrefix", "match_prefix", _match_prefix, _opened),
    Allocate: _Verb("Allocate", "allocate", _allocate, _added),
    Insert: _Verb("Insert", "insert", _insert, _inserted),
    Free: _Verb("Free", "free", _free, _nothing),
    Release: _Verb("Release", "release", _release, _nothing),
    Renew: _Verb("Renew", "renew", _renew, _nothing),
    Probe: _Verb("Probe", "probe", _probe, lambda _, answer: answer.num_cached_tokens),
    Evict: _Verb("Evict", "evict", _evict, lambda _, answer: answer.num_evicted_blocks),
    Reset: _Verb("Reset", "reset", _reset, _nothing),
}


def method_of(operation: Operation) -> str:
    """Return the name of the unary RPC for the operation."""
    return _VERBS[type(operation)].method


def request_of(operation: Operation, engine_id: str | None) -> Any:
    """Return the message that asks for the operation in a call of its own."""
    request = _VERBS[type(operation)].request(operation)
    if engine_id is not None:
        request.engine_id = engine_id
    return request


def batch_request(
    operations: Iterable[Operation], engine_id: str | None, seq: int | None = None, strict: bool = False
) -> pb.BatchRequest:
    """Return the message that asks for all of them, in order."""
    items = []
    for operation in operations:
        verb = _VERBS[type(operation)]
        items.append(pb.Operation(**{verb.field: verb.request(operation)}))
    return pb.BatchRequest(operations=items, engine_id=engine_id or "", seq=seq or 0, strict=strict)


def read_answer(operation: Operation, answer: Any) -> Any:
    """Return what a unary RPC answered: what the verb returns in process, or `Opened` for a match."""
    return _VERBS[type(operation)].value(operation, answer)


def read_batch(operations: Sequence[Operation], answer: pb.BatchResponse) -> list[Outcome]:
    """Return an outcome for each operation; a match's value is `Opened`."""
    return [_outcome(operation, item) for operation, item in zip(operations, answer.results, strict=True)]


def _outcome(operation: Operation, item: pb.OperationResult) -> Outcome:
    if item.HasField("error"):
        return Outcome(error=from_status(item.error))
    verb = _VERBS[type(operation)]
    if not item.HasField(verb.field):  # type: ignore[arg-type]
        return Outcome(
            error=InvalidArgument(f"another batch had this number, with another verb than {verb.field} here")
        )
    return Outcome(verb.value(operation, getattr(item, verb.field)))


def read_description(answer: pb.DescribeResponse) -> Description:
    """Return what the server was started with."""
    return Description(
        block_size=answer.block_size,
        num_blocks=answer.num_blocks,
        num_reserved_blocks=answer.num_reserved_blocks,
        policy=answer.policy,
        lease_ttl_s=answer.lease_ttl_s if answer.HasField("lease_ttl_s") else None,
        growth_share=answer.growth_share,
        max_tokens=answer.max_tokens,
        max_operations=answer.max_operations,
        layout_fingerprint=answer.layout_fingerprint,
        pool_epoch=answer.pool_epoch,
        pool_descriptor=answer.pool_descriptor if answer.HasField("pool_descriptor") else None,
        epoch=answer.state.epoch,
        version=answer.version,
    )


def read_stats(answer: pb.GetStatsResponse) -> ServerStats:
    """Return the server's figures."""
    latencies = {
        name: Latency(said.p50_s, said.p99_s, said.max_s, said.num_samples) for name, said in answer.latencies.items()
    }
    return ServerStats(
        num_free_blocks=answer.num_free_blocks,
        num_leased_blocks=answer.num_leased_blocks,
        num_cached_blocks=answer.num_cached_blocks,
        num_evictable_blocks=answer.num_evictable_blocks,
        num_protected_blocks=answer.num_protected_blocks,
        num_leases=answer.num_leases,
        num_nodes=answer.num_nodes,
        num_namespaces=answer.num_namespaces,
        num_pins=answer.num_pins,
        num_pinned_blocks=answer.num_pinned_blocks,
        oldest_lease_age_s=answer.oldest_lease_age_s if answer.HasField("oldest_lease_age_s") else None,
        counters=dict(answer.counters),
        uptime_s=answer.uptime_s,
        num_calls=dict(answer.num_calls),
        latencies=latencies,
        num_operations=dict(answer.num_operations),
        num_waiting_calls=answer.num_waiting_calls,
        num_streams=answer.num_streams,
    )


def read_namespace_stats(answer: pb.GetStatsResponse) -> list[NamespaceStats]:
    """Return the figures of each namespace that was asked for."""
    names = [item.name for item in fields(NamespaceStats) if item.name != "namespace"]
    return [
        NamespaceStats(tuple(said.namespace), **{name: getattr(said, name) for name in names})
        for said in answer.namespaces
    ]


def read_leases(answer: pb.ListLeasesResponse) -> list[LeaseInfo]:
    """Return one piece of a list of leases."""
    names = [item.name for item in fields(LeaseInfo) if item.name not in {"namespace", "engine_id", "left_s"}]
    return [
        LeaseInfo(
            namespace=tuple(said.namespace),
            engine_id=said.engine_id or None,
            left_s=said.left_s if said.HasField("left_s") else None,
            **{name: getattr(said, name) for name in names},
        )
        for said in answer.leases
    ]


def read_nodes(answer: pb.DumpTreeResponse) -> list[TreeNode]:
    """Return one piece of a dumped tree."""
    return [
        TreeNode(
            namespace=tuple(node.namespace),
            depth=node.depth,
            num_tokens=node.num_tokens,
            num_blocks=node.num_blocks,
            num_locks=node.num_locks,
            num_children=node.num_children,
            age=node.age,
            tokens=node.tokens,
            block_ids=node.blocks,
        )
        for node in answer.nodes
    ]
