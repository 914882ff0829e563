"""Start a server as a user would, and stop it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_READY = "listening on "


@contextmanager
def running_server(*options: str) -> Iterator[str]:
    """Run ``python -m radix_cache_service`` on a free port of the loopback interface; yield its address."""
    command = [sys.executable, "-m", "radix_cache_service", "--listen", "127.0.0.1:0", "--log-level", "warning"]
    command += options
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _wait_until_ready(process)
        finally:
            process.terminate()
            process.wait(timeout=10)


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if _READY in line:
            return line.partition(_READY)[2].split()[0]
    raise RuntimeError(f"the server ended with status {process.wait()} before it was ready")
