"""Logs on stderr, as text or as one JSON object a line, with nothing of a prompt in them.

An exception that nobody expected may carry token ids in its text (a KeyError does), so what is logged of it is its type
and where it was raised: files, lines, functions.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

__all__ = ["log_loop_error", "set_up_logging"]

_log = logging.getLogger(__name__)

_OWN = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


def set_up_logging(form: str, level: str) -> None:
    """Log to stderr what is of ``level`` or above, and what ends the process or a thread. form: ``"text"``, ``"json"``.

    Changes what the whole process does with an exception that nobody caught.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda thrown: _log_uncaught(thrown.exc_type, thrown.exc_value, thrown.exc_traceback)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    _log.critical("an error that nobody expected", exc_info=(kind, error or kind(), trace))


def log_loop_error(_: object, context: dict[str, Any]) -> None:
    """Log what went wrong in a task: the event loop's own way prints the task, and its error with it."""
    _log.error(context.get("message", "an error in the event loop"), exc_info=context.get("exception"))


class _Formatter(logging.Formatter):
    def formatException(  # noqa: N802 - the name is its base's
        self, ei: tuple[type[BaseException] | None, BaseException | None, TracebackType | None]
    ) -> str:
        """Return types and places, from the cause to the effect."""
        parts: list[str] = []
        error = ei[1]
        while error is not None:
            frames = "".join(traceback.format_tb(error.__traceback__))
            parts.append(f"{frames}{type(error).__module__}.{type(error).__qualname__}")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\n".join(reversed(parts))


class _Text(_Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return a line, with what else there is at its end."""
        more = "".join(f" {name}={value}" for name, value in _extra(record).items())
        return super().format(record) if not more else f"{super().format(record)}{more}"


class _Json(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return an object in one line."""
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    """What a call of the logger gave with ``extra``."""
    return {name: value for name, value in vars(record).items() if name not in _OWN}
