"""A command in a terminal of its own, as a person sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

# A process that is to hear of a Ctrl-C has to take the terminal as its own.
_RUN = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from radix_cache.cli import main; main()"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """``radix-cache`` with arguments, in a pseudo terminal. text: all that was shown until now, without the colours."""

    def __init__(self, *arguments: str, num_columns: int = 80, num_lines: int = 24) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", num_lines, num_columns, 0, 0))
        environment = {
            name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RUN, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(theirs)
        self.raw = ""

    @property
    def text(self) -> str:
        return _CONTROL.sub("", self.raw).replace("\r", "")

    @property
    def lines(self) -> list[str]:
        """The lines shown last: those since the screen was last begun anew."""
        return _CONTROL.sub("", self.raw.rpartition("\x1b[H")[2]).replace("\r", "").splitlines()

    def press(self, keys: bytes) -> None:
        """Type."""
        os.write(self._ours, keys)

    def wait_until(self, holds: Callable[[], bool], seconds: float = 60) -> None:
        """Read on until it holds."""
        ends = time.monotonic() + seconds
        while not holds():
            left = ends - time.monotonic()
            assert left > 0, self.text
            if select.select([self._ours], [], [], min(left, 0.05))[0]:
                assert self._read(), self.text

    def _read(self) -> bool:
        try:
            read = os.read(self._ours, 65536)
        except OSError:  # the other side is closed
            return False
        self.raw += read.decode(errors="replace")
        return bool(read)

    def finish(self, seconds: float = 60) -> int:
        """Read to the end; return the exit status."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and select.select([self._ours], [], [], seconds)[0] and self._read():
            pass
        os.close(self._ours)
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
