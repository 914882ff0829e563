"""Numbers that rise from one start of a server to the next, though its clock be set back in between.

They start at the clock, in microseconds, and a state directory has a file that says what all of them lie below. It is
replaced before a number comes that is as high: so that this is rare, it says half a second more than it needs to, which
is less than a start takes. With a clock that was let alone, numbers start at the clock therefore.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from radix_cache_service.state.directory import replace_file
from radix_cache_service.state.journal import StateError

__all__ = ["Numbers"]

FILE = "events.seq"
STEP = 500_000
_MAX = 2**62  # readers take them for 64 bits with a sign

_log = logging.getLogger(__name__)


def clock_us() -> int:
    """Return the microseconds since 1970."""
    return time.time_ns() // 1000


class Numbers:
    """The numbers of a server's events. start: below all that come.

    state_dir: None: they go by the clock alone. now_us: the clock. Raises `StateError` for a file that is damaged.
    """

    def __init__(self, state_dir: str | None = None, now_us: Callable[[], int] = clock_us) -> None:
        self._path = None if state_dir is None else Path(state_dir) / FILE
        self._bound = _read(self._path)
        self.start = max(now_us(), self._bound)

    def after(self, number: int) -> int:
        """Return the next number, once the file says more. Mutates the file, once in ``STEP`` numbers.

        One that cannot be written is logged: numbers go on, and after a restart they go by the clock.
        """
        following = number + 1
        if self._path is not None and following >= self._bound:
            self._bound = following + STEP
            try:
                replace_file(self._path, f"{self._bound}\n")
            except OSError as error:
                _log.error("%s cannot be written: %s", self._path, error.strerror)
        return following


def _read(path: Path | None) -> int:
    try:
        text = "0" if path is None else path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: {error}") from error
    if not text.isdecimal() or len(text) > 19 or int(text) > _MAX:
        raise StateError(f"{path} is damaged: it holds a number from 0 to {_MAX}; without it, events go by the clock")
    return int(text)
