"""Who may do what: bearer tokens and what they grant, in a TOML file that is read again when it changes.

    [[token]]
    name = "llama-0"                                  # who it is, in limits and error texts
    sha256 = "9f86d0818..."                           # of the token, in hex; or token = "the token itself"
    namespaces = [["llama-3-8b"], ["llama-70b", "w7"]]  # prefixes of what it may use; [[]]: everything
    rights = ["read", "write"]                        # and "admin"

While a token is replaced by another, ``sha256`` may be a list of both: who it is does not change. With a file that is
no good nothing starts; later on, what was in force stays in force. Tokens are compared by their digests, all of them,
each in constant time. No error or log quotes one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from radix_cache.errors import InvalidArgument
from radix_cache.operations import Namespace, check_namespace
from radix_cache_service.access.files import signature

__all__ = ["EVERYTHING", "RIGHTS", "Grant", "Right", "TokenFile", "digest_of", "is_token"]

Right: TypeAlias = Literal["read", "write", "admin"]
RIGHTS: Final[tuple[Right, ...]] = ("read", "write", "admin")

_KEYS = {"name", "token", "sha256", "namespaces", "rights"}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # no slash: it separates a name from an engine's
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,512}=*")  # RFC 6750, and long enough not to be guessed
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Grant:
    """What one token stands for. namespaces: prefixes of those that it may use."""

    name: str
    rights: frozenset[Right]
    namespaces: tuple[Namespace, ...]
    digests: tuple[bytes, ...] = field(default=(), repr=False)

    def covers(self, namespace: Namespace) -> bool:
        """Tell whether this namespace may be used."""
        return any(namespace[: len(prefix)] == prefix for prefix in self.namespaces)


EVERYTHING = Grant("", frozenset(RIGHTS), ((),))
"""Where there are no tokens."""


def is_token(text: object) -> bool:
    """Tell whether this has the form of a token."""
    return isinstance(text, str) and bool(_TOKEN.fullmatch(text))


def digest_of(token: str) -> bytes:
    """Return what a token is known by."""
    return hashlib.sha256(token.encode()).digest()


class TokenFile:
    """The grants in a file. number: rises with each change. Raises `InvalidArgument` when made of one that is no good.

    Not thread-safe.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen = signature(self._path)
        self._grants = _read(self._path)
        self.number = 0

    def refresh(self) -> None:
        """Read the file if it has changed. Raises nothing: what is wrong with it is logged, once."""
        seen = signature(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            grants = _read(self._path)
            _check_names(self._grants, grants)
        except InvalidArgument as error:
            _log.warning("the tokens of before stay in force: %s", error)
        else:
            self._grants = grants
            self.number += 1
            _log.info("%d tokens read anew from %s", len(self._grants), self._path)

    @property
    def names(self) -> set[str]:
        """What the tokens are called."""
        return {grant.name for grant in self._grants}

    def find(self, digest: bytes) -> Grant | None:
        """Return the grant of the token with this digest. O(tokens), and as long whichever it is, if any."""
        found = None
        for grant in self._grants:
            for known in grant.digests:
                if hmac.compare_digest(known, digest):
                    found = grant
        return found


def _check_names(before: list[Grant], now: list[Grant]) -> None:
    """Raise `InvalidArgument` where a token has another name than before: its engines' leases go by that."""
    names = {digest: grant.name for grant in before for digest in grant.digests}
    for grant in now:
        for old in {names.get(digest, grant.name) for digest in grant.digests} - {grant.name}:
            raise InvalidArgument(
                f"token {grant.name!r} is called {old!r} as long as this server runs: leases are kept under that name"
            )


def _read(path: Path) -> list[Grant]:
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"tokens_file {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise InvalidArgument(f"tokens_file {path}: not UTF-8") from None  # its text could quote a token
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"tokens_file {path}: {error}") from None
    try:
        return list(_grants(said))
    except InvalidArgument as error:
        raise InvalidArgument(f"tokens_file {path}: {error}") from None


def _grants(said: dict[str, Any]) -> Iterator[Grant]:
    entries = said.pop("token", None)
    if said or not isinstance(entries, list) or not entries:
        raise InvalidArgument("it holds tables [[token]], one at least, and nothing else")
    names: set[str] = set()
    digests: set[bytes] = set()
    for number, entry in enumerate(entries, 1):
        try:
            grant = _grant(entry)
        except InvalidArgument as error:
            raise InvalidArgument(f"token {number}: {error}") from None
        if grant.name in names:
            raise InvalidArgument(f"token {number}: another one has the name {grant.name!r}")
        if not digests.isdisjoint(grant.digests):
            raise InvalidArgument(f"token {number}: another one is the same token")
        names.add(grant.name)
        digests.update(grant.digests)
        yield grant


def _grant(entry: Any) -> Grant:
    if not isinstance(entry, dict) or not entry.keys() <= _KEYS:
        raise InvalidArgument(f"its keys are {', '.join(sorted(_KEYS))}")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument("name is 1 to 64 letters, digits, dots, dashes and underscores")
    return Grant(name, _rights(entry.get("rights")), _namespaces(entry.get("namespaces")), tuple(_digests(entry)))


def _rights(said: Any) -> frozenset[Right]:
    if not isinstance(said, list) or not said or not all(right in RIGHTS for right in said):
        raise InvalidArgument(f"rights is a list of some of {', '.join(RIGHTS)}")
    return frozenset(said)


def _namespaces(said: Any) -> tuple[Namespace, ...]:
    if not isinstance(said, list) or not said or not all(isinstance(prefix, list) for prefix in said):
        raise InvalidArgument('namespaces is a list of lists, as in [["model", "tenant"]]; [[]] is everything')
    return tuple(check_namespace(tuple(prefix)) for prefix in said)


def _digests(entry: dict[str, Any]) -> Iterator[bytes]:
    tokens, sums = _texts(entry, "token"), _texts(entry, "sha256")
    if not tokens and not sums:
        raise InvalidArgument("token or sha256 is needed")
    for token in tokens:
        if not is_token(token):
            raise InvalidArgument("token has 16 to 512 characters, of letters, digits and -._~+/ (=, at the end)")
        yield digest_of(token)
    for checksum in sums:
        if not _SHA256.fullmatch(checksum):
            raise InvalidArgument("sha256 has 64 hex digits")
        yield bytes.fromhex(checksum)


def _texts(entry: dict[str, Any], key: str) -> list[str]:
    """Return the texts under ``key``, one or a list."""
    said = entry.get(key, [])
    texts = said if isinstance(said, list) else [said]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(f"{key} is a text, or a list of texts")
    return texts
