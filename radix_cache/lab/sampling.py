"""LRU's curve from a sample of the blocks, for traces whose blocks do not fit in memory.

SHARDS (Waldspurger et al., FAST'15): a block is in the sample if a hash of it is below a threshold, so either all of
its uses are or none. Among the sampled blocks of a rate R, a depth in the list is R times what it is among all. The
sampled blocks of a path are a path again, so the pass of `radix_cache.lab.curve` runs over them as it is. Few blocks (a
system prompt's) can have very many uses, and whether they fall into the sample tips the sums: what is missing or too
many of the expected uses is counted as hits at every capacity, the paper's SHARDS-adj.

How far off it is shows by itself: several samples are drawn in the same pass, by different hashes, and their spread is
the error of their mean.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean, stdev
from zlib import crc32

from radix_cache.errors import InvalidArgument
from radix_cache.lab.blocks import BlockTrace
from radix_cache.lab.curve import Curve, block_curve
from radix_cache.lab.requests import Request
from radix_cache.operations import check_count
from radix_cache.tokens import TOKEN_BYTES, unpack_tokens

__all__ = ["Estimate", "SampledCurve", "sampled_curve"]

_MASK = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Estimate:
    """Hit rates of one capacity, each with its standard error."""

    block_hit_rate: float
    block_error: float
    token_hit_rate: float
    token_error: float


@dataclass(frozen=True, slots=True)
class SampledCurve:
    """LRU at every capacity, estimated over all requests.

    rate: share of the blocks that are in one sample. samples: their curves, in sampled blocks. num_prompt_blocks,
    num_prompt_tokens: of the trace. num_block_tokens: of those, the tokens in blocks that can be cached.
    """

    rate: float
    samples: tuple[Curve, ...]
    num_prompt_blocks: int
    num_prompt_tokens: int
    num_block_tokens: int

    @property
    def num_blocks(self) -> int:
        """Different blocks in the trace, about."""
        return round(fmean(sample.num_blocks for sample in self.samples) / self.rate)

    def at(self, num_blocks: int) -> Estimate:
        """Return the estimated hit rates of a cache of ``num_blocks``. O(samples)."""
        blocks, tokens = zip(*(self._rates(sample, num_blocks) for sample in self.samples), strict=True)
        return Estimate(fmean(blocks), _error(blocks), fmean(tokens), _error(tokens))

    def _rates(self, sample: Curve, num_blocks: int) -> tuple[float, float]:
        found = sample.whole.at(round(num_blocks * self.rate))
        num_tokens = sample.whole.num_prompt_tokens
        return (
            _adjusted(found.num_hit_blocks, found.num_prompt_blocks, self.num_prompt_blocks, self.rate, 1.0),
            _adjusted(
                found.num_hit_tokens,
                num_tokens,
                self.num_block_tokens,
                self.rate,
                self.num_block_tokens / max(self.num_prompt_tokens, 1),
            ),
        )


def sampled_curve(
    requests: Iterable[Request], rate: float, block_size: int = 16, num_samples: int = 8, seed: int = 0
) -> SampledCurve:
    """Return LRU's curve from ``num_samples`` samples that each hold ``rate`` of the blocks, in (0, 1].

    Reads the requests once and holds one at a time: the memory is that of `lru_curve` for the sampled blocks, and about
    50 bytes a request and sample. Two samples at least, or there would be no error. Raises `InvalidArgument`.
    """
    if not 0 < rate <= 1:
        raise InvalidArgument(f"rate is above 0 and at most 1, not {rate!r}")
    check_count(block_size, "block_size", 1)
    samples = [
        _Sample(rate, seed * 1_000_003 + number, block_size)
        for number in range(check_count(num_samples, "num_samples", 2))
    ]
    num_prompt_blocks = num_prompt_tokens = num_block_tokens = 0
    for request in requests:
        unit = block_size if request.tokens_per_id == 1 else 1
        digests = list(_digests(request.computed, unit))
        num_lookups = request.num_ids // unit
        for sample in samples:
            sample.add(request, num_lookups, digests)
        num_prompt_blocks += num_lookups
        num_prompt_tokens += request.num_prompt_tokens
        num_block_tokens += min(num_lookups * unit * request.tokens_per_id, request.num_prompt_tokens)
    curves = tuple(sample.curve() for sample in samples)
    return SampledCurve(rate, curves, num_prompt_blocks, num_prompt_tokens, num_block_tokens)


class _Sample:
    """The requests with the blocks left out whose hash is too large."""

    def __init__(self, rate: float, seed: int, block_size: int) -> None:
        self._trace = BlockTrace(block_size)
        self._limit = math.ceil(rate * 2**64)
        self._seed = _mixed(seed + 1)
        self._numbers: dict[int, int] = {}

    def add(self, request: Request, num_lookups: int, digests: list[int]) -> None:
        trace, numbers, seed, limit = self._trace, self._numbers, self._seed, self._limit
        sampled = [at for at, digest in enumerate(digests) if _mixed(digest ^ seed) < limit]
        path = array("I", (numbers.setdefault(digests[at], len(numbers)) for at in sampled))
        num_sampled = sum(at < num_lookups for at in sampled)
        block_tokens = trace.block_size if request.tokens_per_id == 1 else request.tokens_per_id
        last_tokens = block_tokens
        if num_lookups - 1 in sampled[num_sampled - 1 : num_sampled]:
            last_tokens = min(request.num_prompt_tokens - (num_lookups - 1) * block_tokens, block_tokens)
        trace.add(request, num_sampled, path, last_tokens)
        trace.num_tokens[-1] = max(num_sampled - 1, 0) * block_tokens + (last_tokens if num_sampled else 0)

    def curve(self) -> Curve:
        self._trace.num_blocks = len(self._numbers)
        return block_curve(self._trace)


def _digests(ids: bytes, unit: int) -> Iterator[int]:
    """Yield 64 bits for each block of ``ids`` that stand for it and all before it; the same in every process."""
    size, digest = unit * TOKEN_BYTES, 0
    words = (
        unpack_tokens(ids) if unit == 1 else (crc32(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size))
    )
    for word in words:
        digest = _mixed(digest ^ (word + 1))
        yield digest


def _mixed(word: int) -> int:
    """Return 64 bits that look random: the finalizer of splitmix64."""
    word = (word + _ODD) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def _adjusted(num_hits: int, num_sampled: int, num_all: int, rate: float, share: float) -> float:
    """Return the hit rate, with what the sample lacks of its expected uses counted as hits. share: the highest rate."""
    expected = num_all * rate
    return min(max((num_hits + expected - num_sampled) / expected, 0.0), 1.0) * share if expected else 0.0


def _error(values: tuple[float, ...]) -> float:
    return stdev(values) / math.sqrt(len(values))
