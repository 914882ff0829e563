"""Errors in what users bring along, policies, readers and tokenizers: told with the line that has to be mended."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from radix_cache.errors import RadixCacheError

__all__ = ["BroughtCodeFailed", "telling"]


class BroughtCodeFailed(RadixCacheError):
    """A policy, a reader or a tokenizer of the user's raised an exception, which is the cause of this one."""


@contextmanager
def telling(what: str, file: str | None) -> Iterator[None]:
    """Let an exception say that ``what`` failed, and in which line of ``file``, if it passed through that.

    Exceptions of this library and of the operating system say so themselves.
    """
    try:
        yield
    except (RadixCacheError, OSError):
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f", line {lines[-1]}" if lines else ""
        raise BroughtCodeFailed(f"{what}{place}: {type(error).__name__}: {error}") from error
