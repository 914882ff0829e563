"""Reading traces: one JSON object a line, plain or gzipped, from a file or from stdin (``-``).

What a line may be is in `radix_cache.lab.formats`; a file may hold several kinds. Fields that are not named there are
ignored. A line that is none of them ends the reading with a `TraceError` that names it: half a trace measures something
else.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from radix_cache.errors import InvalidArgument
from radix_cache.lab.formats import Fields, RecordParser, Tokenizer, guess_tokens_per_block
from radix_cache.lab.requests import Request, TraceError, TracePath

__all__ = ["TraceReader", "count_requests", "read_records", "read_trace"]

_GZIP_MAGIC = b"\x1f\x8b"
_NUM_LINES_GUESSED_FROM = 100


class TraceReader(Protocol):
    """What reads a format of one's own: any function, or class that is called so. ``-`` should mean stdin.

    For JSON lines in a form of one's own `read_records` does all but the form.
    """

    def __call__(self, path: TracePath, /) -> Iterator[Request]:
        """Yield the requests in the order of the file, holding few at a time. Raises `TraceError` and `OSError`."""
        ...


def read_trace(
    path: TracePath, tokens_per_block: int | None = None, tokenize: Tokenizer | None = None
) -> Iterator[Request]:
    """Yield the requests of a trace in file order, holding one at a time.

    tokens_per_block: of the hash ids in records that don't say it. None: the size that fits the lengths in the first
    100 lines, of those in use (512, then 16, 256, ...). Either way each record must agree: as many ids as its prompt
    has blocks, a ragged last one counted or not. tokenize: makes token ids of the text of chat logs.
    Raises `TraceError` at the first line that cannot be used, and `OSError`.
    """
    lines = _records(path)
    if tokens_per_block is None:
        head = list(islice(lines, _NUM_LINES_GUESSED_FROM))
        tokens_per_block = guess_tokens_per_block([record.fields for record in head])
        lines = chain(head, lines)
    yield from _parsed(path, lines, RecordParser(tokens_per_block, tokenize))


def read_records(path: TracePath, parse: Callable[[Fields], Request]) -> Iterator[Request]:
    """Yield ``parse`` of each JSON object in a file of JSON lines, plain or gzipped; for a reader of one's own.

    An `InvalidArgument` that ``parse`` raises becomes a `TraceError` with the number of the line.
    """
    return _parsed(path, _records(path), parse)


def count_requests(path: TracePath) -> int:
    """Return the number of requests in a file, without looking into them. O(file)."""
    return sum(1 for _ in _lines(path))


class _Record(NamedTuple):
    line: int
    fields: dict[str, Any]


def _parsed(path: TracePath, lines: Iterable[_Record], parse: Callable[[Fields], Request]) -> Iterator[Request]:
    for number, record in lines:
        try:
            request = parse(record)
        except InvalidArgument as error:
            raise TraceError(path, number, str(error)) from None
        yield request


@contextmanager
def _opened(path: TracePath) -> Iterator[io.BufferedReader[Any]]:
    """Yield the bytes of a file, or of stdin, which stays open."""
    if str(path) == "-":
        raw: io.BufferedReader[Any] = io.BufferedReader(sys.stdin.buffer)
        try:
            yield raw
        finally:
            raw.detach()
        return
    with Path(path).open("rb") as file:
        yield file


def _lines(path: TracePath) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number."""
    number = 0
    with _opened(path) as raw:
        is_zipped = raw.peek(2)[:2] == _GZIP_MAGIC
        file: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if is_zipped else raw
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(path, number + 1, f"the compressed data is damaged ({error})") from None


def _records(path: TracePath) -> Iterator[_Record]:
    for number, line in _lines(path):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(path, number, f"not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise TraceError(path, number, f"a JSON object is needed, not {type(fields).__name__}")
        yield _Record(number, fields)
