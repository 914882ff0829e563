"""Traces of requests, one JSON object a line, plain or gzipped.

Two kinds of lines are read, and a file may hold both:

- Mooncake (Qin et al., FAST'25): ``{"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [...]}``. An
  id stands for one block of tokens *and all before it*, so equal ids mean equal prefixes. How many tokens a block has
  may be said in each record (``block_size``); most files don't say, see `read_trace`.
- Token ids: ``{"timestamp": ms, "tokens": [...], "output_tokens": [...]}``, the last one optional.

Other fields are ignored. A line that is neither ends the reading with a `TraceError` that names it: half a trace
measures something else.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from radix_cache.errors import InvalidArgument, InvalidTokens
from radix_cache.tokens import TOKEN_BYTES, pack_tokens

__all__ = ["Request", "TraceError", "count_requests", "read_trace"]

TracePath: TypeAlias = "str | PathLike[str]"

_GZIP_MAGIC = b"\x1f\x8b"
_NUM_LINES_GUESSED_FROM = 100
_COMMON_SIZES = (512, 16, 256, 128, 64, 32, 1024, 2048)


class TraceError(InvalidArgument):
    """A line of a trace cannot be used. path, line: where it is, counted from 1."""

    def __init__(self, path: TracePath, line: int, why: str) -> None:
        super().__init__(f"{path}, line {line}: {why}")
        self.path = path
        self.line = line
        self._why = why

    def __reduce__(self) -> tuple[type[TraceError], tuple[TracePath, int, str]]:
        return type(self), (self.path, self.line, self._why)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    prompt: what is looked up, packed: token ids, or the hash ids of blocks. output: the token ids that were generated,
    packed; empty where the trace doesn't have them. tokens_per_id: 1 for token ids, else the tokens of a block.
    """

    timestamp_ms: float
    num_prompt_tokens: int
    num_output_tokens: int
    prompt: bytes
    output: bytes = b""
    tokens_per_id: int = 1

    @property
    def num_ids(self) -> int:
        """Length of the prompt in ids."""
        return len(self.prompt) // TOKEN_BYTES


def read_trace(path: TracePath, tokens_per_block: int | None = None) -> Iterator[Request]:
    """Yield the requests of a trace in file order, holding one at a time.

    tokens_per_block: of the hash ids in records that don't say it. None: the size that fits the lengths in the first
    100 lines, of those in use (512, then 16, 256, ...). Either way each record must agree: as many ids as its prompt
    has blocks, a ragged last one counted or not. Raises `TraceError` at the first line that cannot be used, and
    `OSError`.
    """
    lines = _records(path)
    if tokens_per_block is None:
        head = list(islice(lines, _NUM_LINES_GUESSED_FROM))
        tokens_per_block = _guess_size(head)
        lines = chain(head, lines)
    for number, record in lines:
        try:
            yield _to_request(record, tokens_per_block)
        except InvalidArgument as error:
            raise TraceError(path, number, str(error)) from None


def count_requests(path: TracePath) -> int:
    """Return the number of requests in a trace, without looking into them. O(file)."""
    return sum(1 for _ in _lines(path))


class _Record(NamedTuple):
    line: int
    fields: dict[str, Any]


def _lines(path: TracePath) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number."""
    number = 0
    with Path(path).open("rb") as raw:
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


def _guess_size(head: list[_Record]) -> int:
    """Return the common size that fits all records which need one; the commonest where none does."""
    unsized = [r.fields for r in head if "hash_ids" in r.fields and "block_size" not in r.fields]
    lengths = [(f.get("input_length"), f["hash_ids"]) for f in unsized]
    counted = [(n, len(ids)) for n, ids in lengths if isinstance(n, int) and isinstance(ids, list)]
    fitting = (size for size in _COMMON_SIZES if all(_fits(n, num_ids, size) for n, num_ids in counted))
    return next(fitting, _COMMON_SIZES[0])


def _fits(num_tokens: int, num_ids: int, size: int) -> bool:
    """Tell whether ``num_ids`` are the blocks of a prompt, the ragged last one counted or not."""
    return num_tokens // size <= num_ids <= -(-num_tokens // size)


def _to_request(fields: dict[str, Any], tokens_per_block: int) -> Request:
    timestamp_ms = fields.get("timestamp", 0)
    if isinstance(timestamp_ms, bool) or not isinstance(timestamp_ms, (int, float)) or not math.isfinite(timestamp_ms):
        raise InvalidArgument(f"timestamp is a number of milliseconds, not {timestamp_ms!r}")
    if "tokens" in fields:
        return _from_tokens(timestamp_ms, fields)
    if "hash_ids" in fields:
        return _from_hash_ids(timestamp_ms, fields, tokens_per_block)
    raise InvalidArgument("neither hash_ids nor tokens is there")


def _from_tokens(timestamp_ms: float, fields: dict[str, Any]) -> Request:
    prompt = _packed(fields, "tokens")
    output = _packed(fields, "output_tokens") if fields.get("output_tokens") is not None else b""
    return Request(timestamp_ms, len(prompt) // TOKEN_BYTES, len(output) // TOKEN_BYTES, prompt, output)


def _from_hash_ids(timestamp_ms: float, fields: dict[str, Any], tokens_per_block: int) -> Request:
    num_tokens = _count(fields, "input_length")
    size = _count(fields, "block_size", least=1) if "block_size" in fields else tokens_per_block
    prompt = _packed(fields, "hash_ids")
    num_ids = len(prompt) // TOKEN_BYTES
    if not _fits(num_tokens, num_ids, size):
        raise InvalidArgument(
            f"input_length {num_tokens} does not make {num_ids} hash_ids with {size} tokens in a block"
        )
    num_output_tokens = _count(fields, "output_length") if "output_length" in fields else 0
    return Request(timestamp_ms, num_tokens, num_output_tokens, prompt, tokens_per_id=size)


def _packed(fields: dict[str, Any], name: str) -> bytes:
    values = fields[name]
    if not isinstance(values, list):
        raise InvalidArgument(f"{name} is a list of integers, not {type(values).__name__}")
    try:
        return pack_tokens(values)
    except InvalidTokens as error:
        raise InvalidArgument(f"{name}: {error}") from None


def _count(fields: dict[str, Any], name: str, least: int = 0) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        shown = "missing" if value is None else f"{value!r}"
        raise InvalidArgument(f"{name} is an integer of at least {least}, not {shown}")
    return value
