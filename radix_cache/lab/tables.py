"""Tables of results as files: JSON lines, CSV or Parquet, told by the suffix. The same rows make the same bytes.

Rows are flat dicts of strings and numbers with the same names. Parquet needs pyarrow, the others only Python.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from radix_cache.errors import InvalidArgument, RadixCacheError
from radix_cache.lab.requests import TraceError

__all__ = ["Row", "check_suffix", "read_rows", "write_atomically", "write_rows"]

Row: TypeAlias = dict[str, Any]

SUFFIXES = (".jsonl", ".csv", ".parquet")


def check_suffix(path: Path) -> None:
    """Raise `InvalidArgument` unless the suffix is one of those known."""
    if path.suffix not in SUFFIXES:
        raise InvalidArgument(f"{path}: results are {', '.join(SUFFIXES)} files")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write ``rows``, all or nothing. Raises `InvalidArgument` for another suffix, `OSError`, and for ``.parquet``
    `ModuleNotFoundError` without pyarrow.
    """
    check_suffix(path)
    if path.suffix == ".parquet":
        data = _parquet(rows)
    elif path.suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        data = text.getvalue().encode()
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    write_atomically(path, data)


def write_atomically(path: Path, data: bytes) -> None:
    """Put ``data`` in place of the file: a reader sees the old one or the new one, never half."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_bytes(data)
    os.replace(aside, path)  # noqa: PTH105 - the same call, and it says that it replaces


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file that `write_rows` wrote. Raises `InvalidArgument` that names what is wrong."""
    check_suffix(path)
    try:
        return _rows(path)
    except RadixCacheError:
        raise
    except (ValueError, TypeError, csv.Error) as error:  # pyarrow's are the first, too
        raise InvalidArgument(f"{path} is no {path.suffix} file: {error}") from error


def _rows(path: Path) -> list[Row]:
    if path.suffix == ".parquet":
        from pyarrow import parquet  # noqa: PLC0415 - only who reads Parquet needs it

        rows: list[Row] = parquet.read_table(path).to_pylist()
        return rows
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(path, number, f"not JSON ({error})") from None
        if not isinstance(row, dict):
            raise TraceError(path, number, f"a JSON object is needed, not {type(row).__name__}")
        rows.append(row)
    return rows


def _parquet(rows: Sequence[Row]) -> bytes:
    import pyarrow as pa  # noqa: PLC0415 - only who writes Parquet needs it
    from pyarrow import parquet  # noqa: PLC0415 - see above

    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(list(rows)), sink)
    return bytes(sink.getvalue().to_pybytes())


def _value(text: str | None) -> Any:
    """Return what a cell of a CSV file says: a number where it is one, None where it is empty."""
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
