"""Whether a node's events can be heard from here, which the selection service does not tell: it tries for ever.

Of each port it is seen whether it takes a connection and begins to speak ZeroMQ, as it would to whoever listens.
Nothing is asked for and nothing is sent, so the node's figures do not move.
"""

from __future__ import annotations

import asyncio

__all__ = ["why_unheard"]

_NUM_GREETING_BYTES = 10  # a length of 8 bytes between these two: so does each version of ZeroMQ begin
_FIRST, _LAST = 0xFF, 0x7F


async def why_unheard(place: str, patience_s: float) -> str:
    """Return why nobody here hears what is told at a place, ``host:port``; empty where it is heard."""
    host, _, port = place.rpartition(":")
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                greeting = await reader.readexactly(_NUM_GREETING_BYTES)
            finally:
                writer.transport.abort()
    except (OSError, EOFError, ValueError, OverflowError) as error:  # time that is up, and what is no place, with them
        return f"{place} can't be reached: {type(error).__name__}"
    return "" if (greeting[0], greeting[-1]) == (_FIRST, _LAST) else f"{place} does not speak ZeroMQ"
