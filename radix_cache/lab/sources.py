"""Where requests come from, said in words: what a command line says, and what another process can be told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from radix_cache.lab.playing import load
from radix_cache.lab.requests import Request, in_time_order
from radix_cache.lab.synth import Profile, synthesize
from radix_cache.lab.trace import read_trace

__all__ = ["TraceSource"]


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace and how to read it.

    path: a trace, ``-`` for stdin, or the profile of a generator (``.json``), which makes another trace for each
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
            requests = synthesize(Profile.read(self.path), self.seed)
        elif self.reader is not None:
            requests = load(self.reader)(self.path)
        else:
            tokenize = load(self.tokenizer) if self.tokenizer else None
            requests = read_trace(self.path, self.tokens_per_block, tokenize)
        return in_time_order(requests) if self.is_sorted else requests
