"""The end of a server that could only go on by breaking promises. What it has answered is in its state directory, if it
has one, and is there again when it is started.
"""

from __future__ import annotations

import logging
import os
from typing import NoReturn

__all__ = ["end_at_once"]


def end_at_once(log: logging.Logger, status: int, why: str, error: Exception) -> NoReturn:
    """End the process with ``status``, nothing more said to anybody; ``why`` and the place of ``error`` are logged."""
    log.critical("%s, so this server ends", why, exc_info=error)
    logging.shutdown()
    os._exit(status)
