"""Calls as the payloads of journal records, and back, and their answers as checksums."""

from __future__ import annotations

import struct
import zlib
from array import array
from typing import Any

from radix_cache import Lease
from radix_cache.operations import InsertResult, Invalid, Operation, opened_by
from radix_cache_service.calls import request_of
from radix_cache_service.convert import Limits, read_batch, read_request
from radix_cache_service.errors import from_status, to_status
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.state.journal import Kind

__all__ = ["batch_record", "digest_of", "read_batch_record", "read_verb_record", "verb_record"]

_VERBS: dict[int, Any] = {
    field.number: getattr(pb, field.message_type.name)
    for field in pb.Operation.DESCRIPTOR.fields
    if field.message_type is not None
}
_NUMBERS = {verb: number for number, verb in _VERBS.items()}
_LENGTH = struct.Struct("<I")


def verb_record(operation: Operation, engine_id: str) -> tuple[int, bytes]:
    """Return kind and payload of one operation."""
    request = request_of(operation, engine_id or None)
    return _NUMBERS[type(request)], request.SerializeToString()


def read_verb_record(kind: int, payload: bytes, limits: Limits) -> tuple[Operation, str]:
    """Return the operation and its engine."""
    request = _VERBS[kind].FromString(payload)
    return read_request(request, limits), request.engine_id


def batch_record(batch: pb.BatchRequest, asked: list[Operation]) -> tuple[int, bytes]:
    """Return a batch as it ran: where operations were refused before, their errors go with it."""
    payload = batch.SerializeToString()
    if not any(isinstance(operation, Invalid) for operation in asked):
        return Kind.BATCH, payload
    errors = [to_status(operation.error) if isinstance(operation, Invalid) else None for operation in asked]
    refused = pb.BatchResponse(results=[pb.OperationResult(error=error) for error in errors])
    return Kind.BATCH_IN_PART, _LENGTH.pack(len(payload)) + payload + refused.SerializeToString()


def read_batch_record(kind: int, payload: bytes, limits: Limits) -> tuple[pb.BatchRequest, list[Any], list[Operation]]:
    """Return the batch, its requests, and what they ask for, less what was refused."""
    refused = pb.BatchResponse()
    if kind == Kind.BATCH_IN_PART:
        end = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
        refused = pb.BatchResponse.FromString(payload[end:])
        payload = payload[_LENGTH.size : end]
    batch = pb.BatchRequest.FromString(payload)
    requests, asked = read_batch(batch, limits)
    for place, result in enumerate(refused.results):
        if result.HasField("error"):
            asked[place] = Invalid(from_status(result.error), opened_by(asked[place]))
    return batch, requests, asked


def digest_of(said: Any) -> int:
    """Return a checksum of an answer, by which another one is noticed; of an error its kind counts, not its words."""
    if said is None:
        return 0
    if isinstance(said, Lease):
        rest = said.num_cached_tokens, said.partial_block_id, said.num_partial_tokens
        return zlib.crc32(said.block_table, zlib.crc32(repr(rest).encode()))
    if isinstance(said, array):
        return zlib.crc32(said)
    if isinstance(said, InsertResult):
        return zlib.crc32(said.redundant_block_ids, zlib.crc32(said.block_ids, said.num_cached_tokens & 0xFFFF_FFFF))
    if isinstance(said, list):
        return _digest_of_results(said)
    return zlib.crc32((type(said).__name__ if isinstance(said, Exception) else str(said)).encode())


def _digest_of_results(results: list[pb.OperationResult]) -> int:
    digest = 0
    for result in results:
        said = b"%d" % result.error.code if result.HasField("error") else result.SerializeToString()
        digest = zlib.crc32(said, digest)
    return digest
