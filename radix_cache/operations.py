"""What can be asked of a cache, as values: one tuple for each verb, and what the verbs answer.

A batch is a list of these; the service turns each request message into one. The functions of the same names in lower
case check what a caller gave and pack it: every route to a cache (in process, remote, batched) goes through them, so
all refuse the same things with the same words.
"""

from __future__ import annotations

import operator
import os
from array import array
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from radix_cache.errors import InvalidArgument, RadixCacheError, UnknownLease
from radix_cache.hints import NO_HINTS, Hints, check_hints
from radix_cache.tokens import TOKEN_BYTES, BlockIds, TokenIds, as_block_ids, pack_tokens, shown

__all__ = [
    "Allocate",
    "Evict",
    "Free",
    "Insert",
    "InsertResult",
    "Invalid",
    "MatchPrefix",
    "Namespace",
    "Operation",
    "Outcome",
    "Probe",
    "Release",
    "Renew",
    "Reset",
    "allocate",
    "check_count",
    "check_flag",
    "check_name",
    "check_namespace",
    "check_seconds",
    "evict",
    "free",
    "insert",
    "lease_id_of",
    "match_prefix",
    "needed_by",
    "new_lease_id",
    "opened_by",
    "pin",
    "probe",
    "release",
    "renew",
    "reset",
    "unpin",
]

Namespace: TypeAlias = tuple[str, ...]

_new: Any = tuple.__new__  # makes a named tuple without its own constructor, which is a Python function

MAX_NAME_LENGTH = 256
MAX_NAMESPACE_PARTS = 32
MAX_NAMESPACE_LENGTH = 1024
MAX_TOKENS = 2**62
MAX_BLOCKS = 2**31 - 1
MAX_SECONDS = 1e9


class MatchPrefix(NamedTuple):
    """Find, lock and allocate. ``lease_id`` names the lease that it opens, ``parent_id`` the one it forks from.

    With ``pin_s``, the lease is a pin: it belongs to no engine, and ends after so many seconds. ``partial``: also name
    the block behind the match that agrees longest.
    """

    tokens: bytes
    lease_id: str
    namespace: Namespace = ()
    max_tokens: int | None = None
    num_tokens: int | None = None
    num_blocks: int | None = None
    parent_id: str | None = None
    hints: Hints = NO_HINTS
    pin_s: float | None = None
    partial: bool = False


class Allocate(NamedTuple):
    """Grow the lease's block table to cover ``num_tokens``, or by ``num_blocks``."""

    lease_id: str
    num_tokens: int | None = None
    num_blocks: int | None = None


class Insert(NamedTuple):
    """Publish the whole blocks of ``tokens``, which begin at position ``offset``."""

    lease_id: str
    tokens: bytes
    offset: int = 0
    hints: Hints = NO_HINTS


class Free(NamedTuple):
    """Give back redundant blocks, or the tail of the block table."""

    lease_id: str
    block_ids: array[int]


class Release(NamedTuple):
    """End the lease; with ``pin_only``, only if it is a pin."""

    lease_id: str
    pin_only: bool = False


class Renew(NamedTuple):
    """Let the lease live for another ``ttl_s`` seconds (None: the cache's own ttl)."""

    lease_id: str
    ttl_s: float | None = None


class Probe(NamedTuple):
    """Count the cached tokens; nothing is locked or touched."""

    tokens: bytes
    namespace: Namespace = ()


class Evict(NamedTuple):
    """Return up to ``num_blocks`` evictable blocks to the pool."""

    num_blocks: int


class Reset(NamedTuple):
    """Forget what is cached under ``namespace``, or only what extends ``tokens`` there."""

    namespace: Namespace = ()
    tokens: bytes = b""


class Invalid(NamedTuple):
    """An operation that was refused before it ran: its outcome is ``error``, as is that of all that need its lease."""

    error: RadixCacheError
    opens: str | None = None


Operation: TypeAlias = Invalid | MatchPrefix | Allocate | Insert | Free | Release | Renew | Probe | Evict | Reset


def opened_by(operation: Operation) -> str | None:
    """Return the id of the lease that the operation opens, if it does."""
    if isinstance(operation, Invalid):
        return operation.opens
    return operation.lease_id if isinstance(operation, MatchPrefix) else None


def needed_by(operation: Operation) -> str | None:
    """Return the id of the lease that must be there for the operation, if one must."""
    if isinstance(operation, MatchPrefix):
        return operation.parent_id
    return getattr(operation, "lease_id", None)


class InsertResult(NamedTuple):
    """What an insert did.

    num_cached_tokens: how many of the tokens, counted from position 0, were cached before.
    block_ids: the canonical id of every whole block of the tokens given, int32.
    redundant_block_ids: of the caller's own ids, those whose tokens the tree holds in other blocks, int32.
    """

    num_cached_tokens: int
    block_ids: array[int]
    redundant_block_ids: array[int]


class Outcome(NamedTuple):
    """The answer to one operation of a batch: a value, or the error that it alone ended in."""

    value: Any = None
    error: RadixCacheError | None = None


def match_prefix(
    tokens: TokenIds,
    namespace: Iterable[str] = (),
    max_tokens: int | None = None,
    num_tokens: int | None = None,
    num_blocks: int | None = None,
    parent: object = None,
    lease_id: str | None = None,
    hints: Hints | None = None,
    partial: bool = False,
) -> MatchPrefix:
    """Check and pack the arguments of a match; a lease id is chosen where none is given."""
    operation: MatchPrefix = _new(
        MatchPrefix,
        (
            tokens if type(tokens) is bytes and not len(tokens) % TOKEN_BYTES else pack_tokens(tokens),
            new_lease_id() if lease_id is None else check_name(lease_id, "lease_id"),
            namespace if type(namespace) is tuple and not namespace else check_namespace(namespace),
            None if max_tokens is None else check_count(max_tokens, "max_tokens", 0, MAX_TOKENS),
            None if num_tokens is None else check_count(num_tokens, "num_tokens", 0, MAX_TOKENS),
            None if num_blocks is None else check_count(num_blocks, "num_blocks"),
            None if parent is None else lease_id_of(parent),
            NO_HINTS if hints is None else check_hints(hints),
            None,
            partial if partial is False else check_flag(partial, "partial"),
        ),
    )
    return operation


def pin(tokens: TokenIds, ttl_s: float, namespace: Iterable[str] = (), lease_id: str | None = None) -> MatchPrefix:
    """Check and pack the arguments of a pin."""
    return match_prefix(tokens, namespace, lease_id=lease_id)._replace(pin_s=check_seconds(ttl_s, "ttl_s"))


def allocate(lease: object, num_tokens: int | None = None, num_blocks: int | None = None) -> Allocate:
    """Check the arguments of an allocation: at least one of the two numbers."""
    if num_tokens is None and num_blocks is None:
        raise InvalidArgument("allocate needs num_tokens or num_blocks")
    return Allocate(
        lease_id_of(lease),
        None if num_tokens is None else check_count(num_tokens, "num_tokens", most=MAX_TOKENS),
        None if num_blocks is None else check_count(num_blocks, "num_blocks"),
    )


def insert(lease: object, tokens: TokenIds, offset: int = 0, hints: Hints | None = None) -> Insert:
    """Check and pack the arguments of an insert."""
    operation: Insert = _new(
        Insert,
        (
            lease_id_of(lease),
            tokens if type(tokens) is bytes and not len(tokens) % TOKEN_BYTES else pack_tokens(tokens),
            offset if type(offset) is int and offset == 0 else check_count(offset, "offset", 0, MAX_TOKENS),
            NO_HINTS if hints is None else check_hints(hints),
        ),
    )
    return operation


def free(lease: object, block_ids: BlockIds) -> Free:
    """Check and pack the arguments of a free."""
    return Free(lease_id_of(lease), as_block_ids(block_ids))


def release(lease: object) -> Release:
    """Check the argument of a release."""
    operation: Release = _new(Release, (lease_id_of(lease), False))
    return operation


def unpin(pin: object) -> Release:
    """Check the argument of the end of a pin."""
    return Release(lease_id_of(pin), pin_only=True)


def renew(lease: object, ttl_s: float | None = None) -> Renew:
    """Check the arguments of a renewal."""
    return Renew(lease_id_of(lease), None if ttl_s is None else check_seconds(ttl_s, "ttl_s"))


def probe(tokens: TokenIds, namespace: Iterable[str] = ()) -> Probe:
    """Check and pack the arguments of a probe."""
    return Probe(pack_tokens(tokens), check_namespace(namespace))


def evict(num_blocks: int) -> Evict:
    """Check the argument of an eviction."""
    return Evict(check_count(num_blocks, "num_blocks"))


def reset(namespace: Iterable[str] | None = None, tokens: TokenIds | None = None) -> Reset:
    """Check and pack the arguments of a reset; no namespace means all of them."""
    return Reset(
        () if namespace is None else check_namespace(namespace),
        b"" if tokens is None else pack_tokens(tokens),
    )


def new_lease_id() -> str:
    """Return 128 random bits as 32 hex digits: safe to choose anywhere, never guessed, never used again."""
    try:
        return _fresh_ids.pop()
    except IndexError:
        _draw_ids()
        return _fresh_ids.pop()


def _draw_ids() -> None:
    """Asking the kernel for each id costs as much as all else that a lease begins with; asking for 256 does not."""
    digits = os.urandom(256 * 16).hex()
    _fresh_ids.extend(digits[at : at + 32] for at in range(0, len(digits), 32))


_fresh_ids: list[str] = []
os.register_at_fork(after_in_child=_fresh_ids.clear)  # parent and child must not draw the same


def lease_id_of(lease: object) -> str:
    """Return the id of a lease, or of a match that is still to run; an id is its own.

    Raises `InvalidArgument` for what is neither, `UnknownLease` for an id that no lease can have, and for a lease that
    has ended, though another may have its id by now.
    """
    lease_id: Any = lease
    if type(lease) is not str:
        try:
            lease_id, ended = lease.lease_id, lease._ended  # type: ignore[attr-defined]
        except AttributeError:
            lease_id, ended = getattr(lease, "lease_id", lease), None
        if ended is not None:
            raise ended(lease_id)
    if type(lease_id) is str and lease_id and lease_id.isascii():
        return lease_id
    if not isinstance(lease_id, str):
        raise InvalidArgument(f"a lease or its id is needed, not {type(lease).__name__}")
    if not lease_id or not lease_id.isascii():
        _check_text(lease_id, "lease_id")
        if not lease_id:
            raise UnknownLease(lease_id)
    return lease_id


def _check_text(text: str, what: str) -> None:
    """Raise `InvalidArgument` for a string that no message can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} is Unicode text, not {text!a:.60}") from None


def check_name(value: str, what: str) -> str:
    """Return ``value`` if it can serve as a lease or engine id, or raise `InvalidArgument`."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_LENGTH:
        found = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
        raise InvalidArgument(f"{what} is a string of 1 to {MAX_NAME_LENGTH} characters, not {found}")
    _check_text(value, what)
    return value


def check_namespace(namespace: Iterable[str]) -> Namespace:
    """Return ``namespace`` as a tuple of strings, or raise `InvalidArgument`: also for what has no order of its own."""
    if type(namespace) is tuple and not namespace:
        return namespace
    parts: tuple[str, ...] | None = None
    if not isinstance(namespace, (str, bytes, bytearray, Set, Mapping)):
        with suppress(TypeError):
            parts = tuple(namespace)
    if parts is None:
        raise InvalidArgument(f"namespace is a tuple of strings, not {type(namespace).__name__}")
    for part in parts:
        if not isinstance(part, str):
            raise InvalidArgument(f"namespace is a tuple of strings, not one with {type(part).__name__} in it")
        _check_text(part, "namespace")
    length = sum(map(len, parts))
    if len(parts) > MAX_NAMESPACE_PARTS or length > MAX_NAMESPACE_LENGTH:
        raise InvalidArgument(
            f"namespace has at most {MAX_NAMESPACE_PARTS} parts and {MAX_NAMESPACE_LENGTH} characters, "
            f"not {len(parts)} and {length}"
        )
    return parts


def check_count(value: int, what: str, least: int = 0, most: int = MAX_BLOCKS) -> int:
    """Return ``value`` as an int in [least, most], or raise `InvalidArgument` that names it and the limit."""
    if type(value) is int and least <= value <= most:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidArgument(f"{what} is an integer, not {shown(value)}")
    if not least <= number <= most:
        raise InvalidArgument(f"{what} is at least {least} and at most {most}, not {shown(number)}")
    return number


def check_flag(value: bool, what: str) -> bool:
    """Return ``value``, or raise `InvalidArgument` where it is not True or False."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{what} is True or False, not {shown(value)}")
    return value


def check_seconds(value: float, what: str) -> float:
    """Return ``value`` as a finite number of seconds above 0, or raise `InvalidArgument`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SECONDS:
        raise InvalidArgument(f"{what} is a number of seconds above 0 and up to {MAX_SECONDS:.0e}, not {shown(value)}")
    return float(value)
