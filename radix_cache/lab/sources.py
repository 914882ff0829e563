"""Where requests come from, said in words: what a command line says, and what another process can be told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from radix_cache.errors import InvalidArgument
from radix_cache.lab.brought import telling
from radix_cache.lab.formats import Tokenizer
from radix_cache.lab.likeness import Likeness
from radix_cache.lab.playing import file_of, load
from radix_cache.lab.requests import Request, TracePath, in_time_order
from radix_cache.lab.resample import resample
from radix_cache.lab.synth import Profile, synthesize
from radix_cache.lab.trace import read_trace

__all__ = ["TraceSource", "make_requests", "read_profile"]


def read_profile(path: TracePath) -> Profile | Likeness:
    """Return what is in a JSON file: a profile, or the likeness of a trace. Raises `InvalidArgument`, `OSError`."""
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        is_likeness = isinstance(saved, dict) and "conversations" in saved
        return Likeness.from_dict(saved) if is_likeness else Profile(**saved)
    except (ValueError, TypeError, LookupError) as error:
        raise InvalidArgument(f"{path} is no profile: {error}") from error


def make_requests(profile: Profile | Likeness, seed: int = 0) -> Iterator[Request]:
    """Return the requests of a trace that is made up; the same for the same seed."""
    return synthesize(profile, seed) if isinstance(profile, Profile) else resample(profile, seed)


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace and how to read it.

    path: a trace, ``-`` for stdin, or a profile or likeness (``.json``), which makes another trace for each
    ``seed``. tokens_per_block: see `radix_cache.lab.read_trace`. reader, tokenizer: ``"./file.py:name"`` or
    ``"module:name"``. is_sorted: whether to sort by time.
    """

    path: str
    tokens_per_block: int | None = None
    reader: str | None = None
    tokenizer: str | None = None
    is_sorted: bool = False
    seed: int = 0

    @property
    def is_generated(self) -> bool:
        """Whether a seed makes a difference."""
        return Path(self.path).suffix == ".json" and self.reader is None

    def read(self) -> Iterable[Request]:
        """Return the requests; they are read while one iterates, once. Raises what reading raises."""
        requests: Iterable[Request]
        if self.is_generated:
            requests = make_requests(read_profile(self.path), self.seed)
        elif self.reader is not None:
            requests = _read_with(self.reader, load(self.reader), self.path)
        else:
            tokenize = _telling(self.tokenizer, load(self.tokenizer)) if self.tokenizer else None
            requests = read_trace(self.path, self.tokens_per_block, tokenize)
        return in_time_order(requests) if self.is_sorted else requests


def _read_with(name: str, reader: Callable[[str], Iterable[Request]], path: str) -> Iterator[Request]:
    """Yield what somebody's function reads, if it is requests."""
    with telling(f"reader {name!r}", file_of(name)):
        found = reader(path)
        if not isinstance(found, Iterable):
            raise InvalidArgument(f"reader {name!r} returns a {type(found).__name__}, not requests")
        for number, request in enumerate(found, start=1):
            if not isinstance(request, Request):
                raise InvalidArgument(
                    f"reader {name!r} yields a {type(request).__name__} as number {number}, no Request"
                )
            yield request


def _telling(name: str, tokenize: Tokenizer) -> Tokenizer:
    def tokenize_and_tell(text: str) -> Sequence[int]:
        with telling(f"tokenizer {name!r}", file_of(name)):
            return tokenize(text)

    return tokenize_and_tell
