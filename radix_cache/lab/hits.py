"""What is counted of a replay, whoever plays it: a row for each request, and sums of rows."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass
from typing import Any

from radix_cache.lab.requests import Request

__all__ = ["Hits", "ReplayResult", "Tally"]

RATES = ("token_hit_rate", "block_hit_rate", "request_hit_rate")


@dataclass(frozen=True, slots=True)
class Hits:
    """What was asked of a cache, and how much of it was there. Rates are in [0, 1], or None where nothing was asked."""

    num_requests: int
    num_prompt_tokens: int
    num_prompt_blocks: int
    num_hit_requests: int
    num_hit_tokens: int
    num_hit_blocks: int

    @property
    def token_hit_rate(self) -> float | None:
        """Cached share of the prompt tokens: the share of prefill that is saved."""
        return _rate(self.num_hit_tokens, self.num_prompt_tokens)

    @property
    def block_hit_rate(self) -> float | None:
        """Cached share of the prompts' blocks."""
        return _rate(self.num_hit_blocks, self.num_prompt_blocks)

    @property
    def request_hit_rate(self) -> float | None:
        """Share of the requests that found anything."""
        return _rate(self.num_hit_requests, self.num_requests)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures and rates by name."""
        return {**asdict(self), **{name: getattr(self, name) for name in RATES}}


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay came to.

    whole, last_half: hits over all requests, and over those from number ``num_requests // 2`` on, when the cache is
    warm. num_evicted_blocks: by the cache meanwhile. num_calls: batches run. seconds: spent in them, reading the trace
    not included.
    """

    whole: Hits
    last_half: Hits
    num_evicted_blocks: int
    num_calls: int
    seconds: float

    @property
    def requests_per_s(self) -> float | None:
        """Requests played in a second of calls."""
        return self.whole.num_requests / self.seconds if self.seconds else None

    @property
    def seconds_per_call(self) -> float | None:
        """What a call cost, on average."""
        return self.seconds / self.num_calls if self.num_calls else None

    def as_dict(self) -> dict[str, Any]:
        """Return all figures and rates by name, ready for JSON."""
        return {
            **asdict(self),
            "whole": self.whole.as_dict(),
            "last_half": self.last_half.as_dict(),
            "requests_per_s": self.requests_per_s,
        }


class Tally:
    """The hits of each request, kept because nobody knows where the last half begins before the end. 40 bytes each."""

    _NUM_COLUMNS = 5

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows = array("q")

    def __len__(self) -> int:
        return len(self._rows) // self._NUM_COLUMNS

    def add(self, request: Request, num_hit_blocks: int) -> None:
        """Count a request whose first ``num_hit_blocks`` blocks were there."""
        tokens_per_block = self._block_size if request.tokens_per_id == 1 else request.tokens_per_id
        num_prompt_blocks = request.num_ids // (self._block_size if request.tokens_per_id == 1 else 1)
        self.add_row(request.num_prompt_tokens, num_prompt_blocks, num_hit_blocks * tokens_per_block, num_hit_blocks)

    def add_row(self, num_prompt_tokens: int, num_prompt_blocks: int, num_hit_tokens: int, num_hit_blocks: int) -> None:
        """The same in figures; no more tokens are hit than the prompt has, since its last block may be ragged."""
        num_hit_tokens = min(num_hit_tokens, num_prompt_tokens)
        self._rows.extend((num_prompt_tokens, num_prompt_blocks, num_hit_tokens > 0, num_hit_tokens, num_hit_blocks))

    def hits_from(self, first: int) -> Hits:
        """Add up the requests from number ``first`` on."""
        start = first * self._NUM_COLUMNS
        sums = [sum(self._rows[start + column :: self._NUM_COLUMNS]) for column in range(self._NUM_COLUMNS)]
        return Hits(len(self) - first, *sums)

    def result(self, num_evicted_blocks: int, num_calls: int, seconds: float) -> ReplayResult:
        """Return the sums of all rows and of their last half."""
        return ReplayResult(self.hits_from(0), self.hits_from(len(self) // 2), num_evicted_blocks, num_calls, seconds)


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None
