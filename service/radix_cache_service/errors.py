"""One table between the library's errors and gRPC statuses, read both ways.

An error travels as a status code, a sentence, and a ``google.rpc.ErrorInfo`` that names the reason and carries the
numbers. Whatever is not in the table is a fault of the server: it is logged here, and the caller sees INTERNAL
"internal error" and nothing of the exception's text. Nor does the log, which has its name and where it came from: the
text could quote a prompt. Token ids never enter a status.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

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
    LimitExceeded,
    NotConnected,
    OldSeq,
    PermissionDenied,
    PoolExhausted,
    RadixCacheError,
    ServiceUnavailable,
    StaleLease,
    Unauthenticated,
    UnknownLease,
)

__all__ = [
    "DOMAIN",
    "REFUSALS",
    "LayoutMismatch",
    "PoolInUse",
    "abort",
    "code_of",
    "from_call_error",
    "from_status",
    "to_status",
]

DOMAIN = "radixcache.v1"

REFUSALS = (Unauthenticated, PermissionDenied, LimitExceeded)
"""What a server says of the caller, before it does anything."""

_MOST_CHARACTERS = 1000  # a status travels in the trailers, which many a client limits to 8 KiB

_log = logging.getLogger(__name__)


class LayoutMismatch(InvalidArgument):
    """Client and server disagree on the block size or on what the KV blocks look like."""


class PoolInUse(PoolExhausted):
    """Nothing is handed out yet: engines of before the server's start may still use the blocks.

    retry_after_s: for so long.
    """

    def __init__(self, needed: int, retry_after_s: float) -> None:
        super().__init__(needed, 0)
        self.retry_after_s = round(retry_after_s, 3)
        self.args = (f"{self}: the pool may still be in use, nothing is handed out for another {retry_after_s:.1f} s",)

    def __reduce__(self) -> tuple[type[PoolInUse], tuple[int, float]]:  # type: ignore[override]  # other arguments
        return type(self), (self.needed, self.retry_after_s)


def _exhausted(message: str, details: Mapping[str, str]) -> PoolExhausted:
    needed = int(details["needed"])
    if "retry_after_s" in details:
        return PoolInUse(needed, float(details["retry_after_s"]))
    return PoolExhausted(needed, int(details["available"]), message.partition(": ")[2])


def _invalid(message: str, details: Mapping[str, str]) -> InvalidArgument:
    if "last" in details:
        return OldSeq(message, int(details["seq"]), int(details["last"]))
    return InvalidArgument(message)


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
        ("needed", "available", "retry_after_s"),
        _exhausted,
    ),
    _Row(
        LimitExceeded,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "LIMIT_EXCEEDED",
        ("limit", "value"),
        lambda _, details: LimitExceeded(details["limit"], int(details["value"])),
    ),
    _Row(
        Unauthenticated,
        grpc.StatusCode.UNAUTHENTICATED,
        "UNAUTHENTICATED",
        (),
        lambda text, _: Unauthenticated(text),
    ),
    _Row(
        PermissionDenied,
        grpc.StatusCode.PERMISSION_DENIED,
        "PERMISSION_DENIED",
        (),
        lambda text, _: PermissionDenied(text),
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
        ("seq", "last"),
        _invalid,
    ),
)
_BY_REASON = {row.reason: row for row in _TABLE}
_PLAIN: dict[grpc.StatusCode, Callable[[str], RadixCacheError]] = {
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailable,
    grpc.StatusCode.CANCELLED: ServiceUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}


def to_status(error: BaseException) -> Status:
    """Return what the caller is told of ``error``; one that is not in the table is logged and masked."""
    row = next((row for row in _TABLE if isinstance(error, row.error)), None)
    if row is None or isinstance(error, IntegrityError):
        said = str(error) if isinstance(error, IntegrityError) else "(its text could quote a prompt)"
        trace = "".join(traceback.format_tb(error.__traceback__))
        _log.error("internal error: %s %s\n%s", type(error).__name__, said, trace.rstrip())
        return Status(code=grpc.StatusCode.INTERNAL.value[0], message="internal error")
    values = {name: getattr(error, name, None) for name in row.attributes}
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
    return _plain(code_of(status.code), status.message)


def from_call_error(error: grpc.RpcError) -> RadixCacheError:
    """Return the library's error for a call that failed; ``error`` is what grpcio raised, sync or aio."""
    call: Any = error  # grpcio's own errors are calls too, but not typed as such
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return from_status(Status.FromString(value))
    return _plain(call.code(), call.details() or "")


_NEVER_SENT = "failed to connect to all addresses"  # how gRPC says that a call has not left this process


def _plain(code: grpc.StatusCode, text: str) -> RadixCacheError:
    """A status without our details: the transport's own, or a foreign server's."""
    if code is grpc.StatusCode.UNAVAILABLE and text.startswith(_NEVER_SENT):
        return NotConnected(text)
    if code in _PLAIN:
        return _PLAIN[code](text or code.name)
    return RadixCacheError(f"{code.name}: {text}")


def code_of(number: int) -> grpc.StatusCode:
    """Return the status code of this number."""
    return next(code for code in grpc.StatusCode if code.value[0] == number)


async def abort(context: Any, status: Status) -> NoReturn:
    """End a call of the server's with ``status``, details and all."""
    details = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code_of(status.code), status.message, details)
    raise AssertionError("to abort raises")
