"""One table between the library's errors and gRPC statuses, read both ways.

An error travels as a status code, a sentence, and a ``google.rpc.ErrorInfo`` that names the reason and carries the
numbers. Whatever is not in the table is a fault of the server: it is logged here, and the caller sees INTERNAL
"internal error" and nothing of the exception's text. Token ids never enter a status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from radix_cache.errors import (
    DeadlineExceeded,
    IntegrityError,
    InvalidArgument,
    InvalidBlocks,
    InvalidTokens,
    LeaseExpired,
    PoolExhausted,
    RadixCacheError,
    ServiceUnavailable,
    StaleLease,
    UnknownLease,
)

__all__ = ["DOMAIN", "LayoutMismatch", "from_call_error", "from_status", "to_status"]

DOMAIN = "radixcache.v1"

_MOST_CHARACTERS = 1000  # a status travels in the trailers, which many a client limits to 8 KiB

_log = logging.getLogger(__name__)


class LayoutMismatch(InvalidArgument):
    """Client and server disagree on the block size or on what the KV blocks look like."""


class _Row(NamedTuple):
    error: type[RadixCacheError]
    code: grpc.StatusCode
    reason: str
    attributes: tuple[str, ...]
    make: Callable[[str, Mapping[str, str]], RadixCacheError]


def _number(details: Mapping[str, str], name: str) -> int | None:
    return int(details[name]) if name in details else None


# Most derived first: the first row that an error is an instance of is its row.
_TABLE = (
    _Row(
        PoolExhausted,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "POOL_EXHAUSTED",
        ("needed", "available"),
        lambda _, details: PoolExhausted(int(details["needed"]), int(details["available"])),
    ),
    _Row(
        LeaseExpired,
        grpc.StatusCode.NOT_FOUND,
        "LEASE_EXPIRED",
        ("lease_id",),
        lambda text, details: LeaseExpired(details["lease_id"], text),
    ),
    _Row(
        UnknownLease,
        grpc.StatusCode.NOT_FOUND,
        "UNKNOWN_LEASE",
        ("lease_id",),
        lambda text, details: UnknownLease(details["lease_id"], text),
    ),
    _Row(
        StaleLease,
        grpc.StatusCode.FAILED_PRECONDITION,
        "STALE_LEASE",
        ("lease_id",),
        lambda text, details: StaleLease(details["lease_id"], text),
    ),
    _Row(
        InvalidBlocks,
        grpc.StatusCode.FAILED_PRECONDITION,
        "INVALID_BLOCKS",
        ("block_id",),
        lambda text, details: InvalidBlocks(text, _number(details, "block_id")),
    ),
    _Row(
        LayoutMismatch,
        grpc.StatusCode.FAILED_PRECONDITION,
        "LAYOUT_MISMATCH",
        (),
        lambda text, _: LayoutMismatch(text),
    ),
    _Row(
        InvalidTokens,
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_TOKENS",
        ("index",),
        lambda text, details: InvalidTokens(text, _number(details, "index")),
    ),
    _Row(
        InvalidArgument,
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        (),
        lambda text, _: InvalidArgument(text),
    ),
)
_BY_REASON = {row.reason: row for row in _TABLE}
_UNREACHED = {
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailable,
    grpc.StatusCode.CANCELLED: ServiceUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def to_status(error: BaseException) -> Status:
    """Return what the caller is told of ``error``; one that is not in the table is logged and masked."""
    row = next((row for row in _TABLE if isinstance(error, row.error)), None)
    if row is None or isinstance(error, IntegrityError):
        _log.error("internal error", exc_info=error)
        return Status(code=grpc.StatusCode.INTERNAL.value[0], message="internal error")
    values = {name: getattr(error, name) for name in row.attributes}
    info = ErrorInfo(
        reason=row.reason,
        domain=DOMAIN,
        metadata={name: str(value) for name, value in values.items() if value is not None},
    )
    packed = AnyMessage()
    packed.Pack(info)
    return Status(code=row.code.value[0], message=str(error)[:_MOST_CHARACTERS], details=[packed])


def from_status(status: Status) -> RadixCacheError:
    """Return the library's error that a status of the service stands for."""
    for detail in status.details:
        info = ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            row = _BY_REASON.get(info.reason)
            if row is not None:
                return row.make(status.message, info.metadata)
    return _plain(_code(status.code), status.message)


def from_call_error(error: grpc.RpcError) -> RadixCacheError:
    """Return the library's error for a call that failed; ``error`` is what grpcio raised, sync or aio."""
    call: Any = error  # grpcio's own errors are calls too, but not typed as such
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return from_status(Status.FromString(value))
    return _plain(call.code(), call.details() or "")


def _plain(code: grpc.StatusCode, text: str) -> RadixCacheError:
    """A status without our details: the transport's own, or a foreign server's."""
    if code in _UNREACHED:
        return _UNREACHED[code](text or code.name)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument(text)
    return RadixCacheError(f"{code.name}: {text}")


def _code(number: int) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == number)
