"""Which requests of a trace are turns of one conversation."""

from __future__ import annotations

from collections.abc import Sequence

from radix_cache.lab.blocks import BlockTrace
from radix_cache.lab.requests import Request

__all__ = ["conversations_of"]


def conversations_of(requests: Sequence[Request], trace: BlockTrace) -> list[int]:
    """Return a number for each request; equal numbers are one conversation, numbered by first appearance.

    Where the trace names conversations, those. Else a guess: a request goes on with the latest one whose whole blocks
    are the beginning of its own, each continued once. Prompts that were cut to fit a context, and chats that go two
    ways, look like new conversations. O(blocks).
    """
    if any(request.conversation for request in requests):
        names: dict[object, int] = {}
        return [names.setdefault(request.conversation or number, len(names)) for number, request in enumerate(requests)]
    ends: dict[int, int] = {}  # last whole block of a prompt -> its conversation
    found = []
    num_known = 0
    for number in range(len(requests)):
        path = trace.path(number)[: trace.num_lookups[number]]
        before = next((block for block in reversed(path) if block in ends), None)
        if before is None:
            conversation, num_known = num_known, num_known + 1
        else:
            conversation = ends.pop(before)
        is_ragged = trace.last_tokens[number] < trace.block_tokens[number]
        if whole := path[:-1] if is_ragged else path:
            ends[whole[-1]] = conversation
        found.append(conversation)
    return found
