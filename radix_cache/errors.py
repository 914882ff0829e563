"""Every error that radix-cache raises on purpose, named after what is at fault.

    RadixCacheError
    ├── InvalidArgument (ValueError)      a value that can never work
    │   ├── InvalidTokens                 ... among the token ids
    │   ├── InvalidBlocks                 ... among the block ids
    │   └── OldSeq                        ... as the number of a batch: the engine has used a higher one
    ├── PoolExhausted (MemoryError)       not enough free and evictable blocks
    ├── UnknownLease (KeyError)           no such lease, or no longer
    │   └── LeaseExpired (TimeoutError)   it ran out of time
    ├── StaleLease (RuntimeError)         its namespace was reset since
    ├── BatchNotRun (RuntimeError)        a batch's answer was asked for before it ran
    ├── IntegrityError (AssertionError)   `check_integrity` found a broken invariant: a bug here
    ├── Unauthenticated (PermissionError)      no token that the server knows (remote clients only, like all below)
    ├── PermissionDenied (PermissionError)     the token may not do this, or not there
    ├── LimitExceeded (RuntimeError)      as much is open as the server allows
    └── ServiceUnavailable (ConnectionError)   no answer from the server
        ├── NotConnected                       ... because it was never asked
        └── DeadlineExceeded (TimeoutError)    ... in time

An error changes nothing: the call that raised it did none of its work. Messages name the value and the limit; token ids
appear in them only where the caller's own process raised them, never in what a server sends back.
"""

from __future__ import annotations

__all__ = [
    "BatchNotRun",
    "DeadlineExceeded",
    "IntegrityError",
    "InvalidArgument",
    "InvalidBlocks",
    "InvalidTokens",
    "LeaseExpired",
    "LimitExceeded",
    "NotConnected",
    "OldSeq",
    "PermissionDenied",
    "PoolExhausted",
    "RadixCacheError",
    "ServiceUnavailable",
    "StaleLease",
    "Unauthenticated",
    "UnknownLease",
]


class RadixCacheError(Exception):
    """The root of the tree: ``except RadixCacheError`` catches all that is deliberate."""

    def __str__(self) -> str:
        # KeyError, a base of UnknownLease, would print the repr of its argument.
        return str(self.args[0]) if self.args else self.__class__.__name__


class InvalidArgument(RadixCacheError, ValueError):
    """An argument is out of its range, of the wrong type, or contradicts another."""


class InvalidTokens(InvalidArgument):
    """Token ids that are not unsigned 32-bit integers, ragged bytes, too many, or contradicting what is published.

    ``index`` is the position of the first bad one, where there is one.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class InvalidBlocks(InvalidArgument):
    """Block ids that are out of range, named twice, too few, or not the caller's to give.

    ``block_id`` is the first bad one, where there is one.
    """

    def __init__(self, message: str, block_id: int | None = None) -> None:
        super().__init__(message)
        self.block_id = block_id


class OldSeq(InvalidArgument):
    """A batch's ``seq`` is below ``last``, the highest that its engine has used: the batch has not run.

    An engine that was started again, with a clock that went back, goes on from there.
    """

    def __init__(self, message: str, seq: int, last: int) -> None:
        super().__init__(message)
        self.seq = seq
        self.last = last

    def __reduce__(self) -> tuple[type[OldSeq], tuple[str, int, int]]:
        return type(self), (str(self), self.seq, self.last)


class PoolExhausted(RadixCacheError, MemoryError):
    """``needed`` blocks were asked for, ``available`` could have been had (free and evictable, less what is kept
    back).

    because: what else there is to say. is_own_limit: the pool would have had them; what stands against it is the limit
    of the caller's own namespaces.
    """

    def __init__(self, needed: int, available: int, because: str = "", is_own_limit: bool = False) -> None:
        super().__init__(f"{needed} blocks needed, {available} available{because and ': '}{because}")
        self.because = because
        self.is_own_limit = is_own_limit
        self.needed = needed
        self.available = available

    def __reduce__(self) -> tuple[type[PoolExhausted], tuple[int, int, str, bool]]:
        return type(self), (self.needed, self.available, self.because, self.is_own_limit)


class UnknownLease(RadixCacheError, KeyError):
    """No lease has this id: it was released, or never was. ``lease_id`` names it."""

    def __init__(self, lease_id: str, message: str | None = None) -> None:
        super().__init__(message or f"no lease {lease_id!r}: released already, or never opened here")
        self.lease_id = lease_id

    def __reduce__(self) -> tuple[type[UnknownLease], tuple[str, str]]:
        return type(self), (self.lease_id, str(self))


class LeaseExpired(UnknownLease, TimeoutError):
    """The lease ran out: its locks and private blocks are gone, so what its blocks hold may be overwritten by now."""

    def __init__(self, lease_id: str, message: str | None = None) -> None:
        super().__init__(lease_id, message or f"lease {lease_id!r} expired: its blocks are no longer its own")


class StaleLease(RadixCacheError, RuntimeError):
    """The lease's namespace was reset after it was opened; it can only be released. ``lease_id`` names it."""

    def __init__(self, lease_id: str, message: str | None = None) -> None:
        super().__init__(message or f"lease {lease_id!r} is older than a reset of its namespace: release it")
        self.lease_id = lease_id

    def __reduce__(self) -> tuple[type[StaleLease], tuple[str, str]]:
        return type(self), (self.lease_id, str(self))


class BatchNotRun(RadixCacheError, RuntimeError):
    """The answer of an operation was read before its batch ran, or the batch was left by an exception and never did."""


class Unauthenticated(RadixCacheError, PermissionError):
    """The server wants a token and was given none, or one that it does not know."""


class PermissionDenied(RadixCacheError, PermissionError):
    """The token that came with the call does not carry the right, or not for this namespace."""


class LimitExceeded(RadixCacheError, RuntimeError):
    """A server's limit is reached: ``limit`` is the name of its setting, ``value`` what that is set to."""

    def __init__(self, limit: str, value: int) -> None:
        super().__init__(f"{limit} is {value} here, and that is reached")
        self.limit = limit
        self.value = value

    def __reduce__(self) -> tuple[type[LimitExceeded], tuple[str, int]]:
        return type(self), (self.limit, self.value)


class IntegrityError(RadixCacheError, AssertionError):
    """A broken invariant, in words. Never expected: please report it."""


class ServiceUnavailable(RadixCacheError, ConnectionError):
    """The server could not be reached or did not answer: whether the call took effect is unknown."""


class NotConnected(ServiceUnavailable):
    """No connection to the server could be made: the call took no effect, and can be made again."""


class DeadlineExceeded(ServiceUnavailable, TimeoutError):
    """No answer within the call's timeout: whether it took effect is unknown."""
