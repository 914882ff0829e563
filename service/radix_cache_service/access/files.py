"""Noticing that a file has changed."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

__all__ = ["Signature", "signature"]

Signature: TypeAlias = tuple[int, int, int] | None


def signature(path: Path) -> Signature:
    """Return what differs once ``path`` was written or replaced, also through a link; None if it can't be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
