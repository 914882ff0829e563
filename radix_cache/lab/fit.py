"""A generator's knobs from a real trace, by moments: rates, lengths, turns and the sharing of prompts are kept.

What is not: the time of day, what depends on what (which conversations have long prompts), and how skewed the numbers
of turns are. How far the curve of a fitted trace is from the real one is in docs/experiments.md; where that matters,
`radix_cache.lab.Likeness` keeps them.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from statistics import fmean, pstdev

from radix_cache.errors import InvalidArgument
from radix_cache.lab.blocks import BlockTrace
from radix_cache.lab.requests import Request
from radix_cache.lab.synth import Profile
from radix_cache.lab.turns import conversations_of

__all__ = ["fit"]

_MAX_SPREAD = 2.0  # of a logarithm
_AT_ONCE = 1e9


def fit(requests: Sequence[Request], block_size: int = 16) -> Profile:
    """Return a profile whose traces are like ``requests`` in rate, lengths, turns and sharing. O(blocks).

    Shared prompts are the beginnings that two conversations have in common. Agents are not told from other
    conversations, and the time that an answer takes is part of ``think_s``. Raises
    `InvalidArgument` for fewer than two requests.
    """
    if len(requests) < 2:
        raise InvalidArgument(f"a profile is fitted to two requests or more, not {len(requests)}")
    trace = BlockTrace.of(requests, block_size)
    conversations = conversations_of(requests, trace)
    size = trace.block_tokens[0]
    turns: dict[int, list[int]] = {}
    for number, conversation in enumerate(conversations):
        turns.setdefault(conversation, []).append(number)
    seconds = (requests[-1].timestamp_ms - requests[0].timestamp_ms) / 1000 or 1.0
    shared = _shared_blocks(trace, turns)
    prompts = Counter(path[-1] for path in shared.values() if path)
    lengths = {path[-1]: len(path) * size for path in shared.values() if path}
    firsts = [
        requests[numbers[0]].num_prompt_tokens - len(shared[conversation]) * size
        for conversation, numbers in turns.items()
    ]
    added, thinks = _later_turns(requests, turns)
    answers = [max(request.num_output_tokens, 1) for request in requests]
    return Profile(
        num_requests=len(requests),
        block_tokens=size,
        conversations_per_s=len(turns) / seconds,
        shared_prompts=max(len(prompts), 1),
        popularity=_zipf(sorted(prompts.values(), reverse=True)),
        shared_tokens=fmean(len(path) * size for path in shared.values()),
        shared_spread=_spread(lengths.values()),
        first_tokens=max(fmean(firsts), 1.0),
        first_spread=_spread(firsts),
        turns=len(requests) / len(turns),
        turn_tokens=fmean(added) if added else 0.0,
        turn_spread=_spread(added),
        answer_tokens=fmean(answers),
        answer_spread=_spread(answers),
        answer_tokens_per_s=_AT_ONCE,
        think_s=fmean(thinks) if thinks else 0.0,
        think_spread=_spread(thinks),
        max_tokens=max(request.num_prompt_tokens for request in requests) or 1,
    )


def _shared_blocks(trace: BlockTrace, turns: dict[int, list[int]]) -> dict[int, array[int]]:
    """Return the beginning of each conversation's first prompt that other conversations have, too."""
    users: Counter[int] = Counter()
    for numbers in turns.values():
        users.update(trace.path(numbers[0])[: trace.num_lookups[numbers[0]]])
    found = {}
    for conversation, numbers in turns.items():
        path = trace.path(numbers[0])[: trace.num_lookups[numbers[0]]]
        found[conversation] = path[: sum(users[block] > 1 for block in path)]
    return found


def _later_turns(requests: Sequence[Request], turns: dict[int, list[int]]) -> tuple[list[int], list[float]]:
    """Return what each later turn adds, and the seconds from the turn before it."""
    pairs = [(requests[earlier], requests[later]) for numbers in turns.values() for earlier, later in pairwise(numbers)]
    added = [max(b.num_prompt_tokens - a.num_prompt_tokens - a.num_output_tokens, 1) for a, b in pairs]
    return added, [max(b.timestamp_ms - a.timestamp_ms, 1.0) / 1000 for a, b in pairs]


def _spread(values: Collection[float]) -> float:
    """Return the spread that gives a log-normal distribution the variance of ``values``.

    Not that of their logarithms: a few tiny values would decide it.
    """
    if not values or not (mean := fmean(values)):
        return 0.0
    return min(math.sqrt(math.log1p((pstdev(values) / mean) ** 2)), _MAX_SPREAD)


def _zipf(counts: list[int]) -> float:
    """Return the slope of counts against ranks, both as logarithms."""
    if len(counts) < 2:
        return 0.0
    xs, ys = [math.log(rank) for rank in range(1, len(counts) + 1)], [math.log(count) for count in counts]
    x, y = fmean(xs), fmean(ys)
    return max(-sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs), 0.0)
