"""Having a journal compacted: the server's side of `radix_cache_service.state.compact`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import NamedTuple

from radix_cache.errors import RadixCacheError
from radix_cache_service.state.directory import StateDir

__all__ = ["Compacted", "CompactionFailed", "compact"]

_LONGEST_S = 900.0


class CompactionFailed(RadixCacheError):
    """The process that was to write a snapshot did not."""


class Compacted(NamedTuple):
    """What a snapshot is called, and what it holds: all before record ``next_number``."""

    snapshot: str
    sha256: str
    next_number: int
    num_bytes: int


async def compact(state: StateDir, through: int) -> Compacted:
    """Have all up to the end of segment ``through`` written as a snapshot. Raises `CompactionFailed`.

    The process shares a lock on the directory, so no other server begins while it lives; and it ends when its standard
    input does, which is this process's to close.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "radix_cache_service.state.compact", str(state.path.absolute()), str(through)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=(state.shared,),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(_LONGEST_S):
            said, wrong = await asyncio.gather(process.stdout.read(), process.stderr.read())
            status = await process.wait()
    except TimeoutError:
        raise CompactionFailed(f"it took longer than {_LONGEST_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status:
        raise CompactionFailed(wrong.decode(errors="replace").strip().rpartition("\n")[2] or f"exit status {status}")
    return Compacted(**json.loads(said))
