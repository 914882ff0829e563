"""Token ids and block ids, from whatever a caller has to the one packed form that the tree compares.

Packed tokens are little-endian uint32 ``bytes``: comparing two spans is one memcmp, slicing one memcpy, and what
arrives from the wire is used as it is. Block ids are int32 ``array('i')``, which numpy and torch wrap without a copy.

Everything that checks a value range lives here. What it does not do: it never guesses. A float, a bool, a string or a
number outside its range is refused with its position, however easily it could be converted.
"""

from __future__ import annotations

import sys
from array import array, typecodes
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

from radix_cache.errors import InvalidBlocks, InvalidTokens

__all__ = ["BlockIds", "TokenIds", "as_block_ids", "pack_tokens", "shown", "unpack_tokens"]

TOKEN_BYTES = 4
_BIG_ENDIAN = sys.byteorder == "big"
_MAX_BLOCK_ID = 2**31 - 1
_WIDE = "w" if "w" in typecodes else "u"  # 32-bit characters; "u" left Python in 3.16, "w" came in 3.13
_MAX_ASKED = 64
_SCANNED_BYTES = 32 * 1024


TokenIds: TypeAlias = "bytes | bytearray | memoryview | Sequence[int] | array[int] | Any"
"""A list or tuple of ints, an ``array``, a 1-D numpy array, a 1-D CPU torch tensor, or LE uint32 ``bytes``."""
BlockIds: TypeAlias = "Sequence[int] | array[int] | Any"
"""A list or tuple of ints, an ``array``, a 1-D numpy array or a 1-D CPU torch tensor."""


def pack_tokens(tokens: TokenIds) -> bytes:
    """Return ``tokens`` as LE uint32 bytes, 4 for each token; `bytes` of whole tokens come back as they are.

    Costs nothing for ``bytes``, one copy for uint32 buffers, and about what ``array('I', tokens)`` costs for a list
    (0.5 ms for 32k tokens). Raises `InvalidTokens` with the ``index`` of the first id that is not in [0, 2**32).
    """
    if isinstance(tokens, (bytes, bytearray)) or _is_raw(tokens):
        if len(tokens) % TOKEN_BYTES:
            raise InvalidTokens(f"packed tokens are 4 bytes each; {len(tokens)} bytes are not a whole number of them")
        return tokens if type(tokens) is bytes else bytes(tokens)
    ids = _integers(tokens, InvalidTokens, "token ids")
    if _BIG_ENDIAN:  # pragma: no cover - no such machine in our CI
        ids.byteswap()
    return ids.tobytes()


def unpack_tokens(packed: bytes) -> array[int]:
    """Return packed tokens as a fresh ``array('I')``."""
    ids = array("I", packed)
    if _BIG_ENDIAN:  # pragma: no cover
        ids.byteswap()
    return ids


def as_block_ids(block_ids: BlockIds) -> array[int]:
    """Return ``block_ids`` as an int32 array: a fresh one, the caller's is neither kept nor changed.

    Raises `InvalidBlocks` for what is not an integer in [0, 2**31).
    """
    if isinstance(block_ids, (bytes, bytearray)):
        raise InvalidBlocks("block ids come as integers, not as bytes")
    ids = _integers(block_ids, InvalidBlocks, "block ids")
    packed = ids.tobytes()
    if not _high_bytes(packed).isascii():
        bad = next(i for i in ids if i > _MAX_BLOCK_ID)
        raise InvalidBlocks(f"block ids are below 2**31, not {bad}", bad)
    return array("i", packed)


def _is_raw(tokens: object) -> bool:
    """A memoryview of plain bytes is packed; of anything wider it is a buffer of integers."""
    return type(tokens) is memoryview and tokens.format == "B"


_Error: TypeAlias = type[InvalidTokens] | type[InvalidBlocks]


def _integers(values: Any, error: _Error, what: str) -> array[int]:
    """Return a fresh uint32 array of ``values``, or raise ``error`` naming the first bad one."""
    if isinstance(values, (list, tuple)):
        return _from_sequence(values, error, what)
    if hasattr(values, "detach"):  # a torch tensor; torch itself is never imported here
        return _from_tensor(values, error, what)
    try:
        view = memoryview(values)
    except (TypeError, ValueError):  # no buffer, or one of something else than numbers
        if isinstance(values, (str, Mapping, Set)) or not isinstance(values, Iterable):
            raise error(f"{what} are a sequence of integers, not {type(values).__name__}") from None
        return _from_sequence(list(values), error, what)
    return _from_buffer(view, error, what)


def _from_sequence(values: Sequence[Any], error: _Error, what: str) -> array[int]:
    try:
        ids = array("I", values)
    except (TypeError, OverflowError, ValueError):
        raise _first_bad(values, error, what) from None
    if _has_bool(values, ids.tobytes()):
        raise _first_bad(values, error, what)
    return ids


def _has_bool(values: Sequence[Any], packed: bytes) -> bool:
    """Tell whether a bool hides among ``values``: ``array`` takes True for 1 and False for 0.

    Asking each value for its type costs four times what packing did, so only those that came out as 0 or 1 are asked.
    They are found by reading the ids as the code points of a string, the one built-in that searches 32-bit items fast;
    in slices, because buffers above 128 KiB come fresh from the kernel each time, and page by page.
    """
    num_asked = 0
    for start in range(0, len(packed), _SCANNED_BYTES):
        try:
            text = array(_WIDE, packed[start : start + _SCANNED_BYTES]).tounicode()
        except ValueError:  # an id beyond the last code point
            return bool in set(map(type, values))
        for suspect in "\0\1":
            at = text.find(suspect)
            while at >= 0:
                num_asked += 1
                if isinstance(values[start // TOKEN_BYTES + at], bool):
                    return True
                if num_asked > _MAX_ASKED:
                    return bool in set(map(type, values))
                at = text.find(suspect, at + 1)
    return False


def _from_tensor(tensor: Any, error: _Error, what: str) -> array[int]:
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device != "cpu":
        raise error(f"{what} are in a tensor on {device}: move it to the CPU first")
    plain = tensor.detach()
    try:
        view = memoryview(plain.numpy())
    except (RuntimeError, TypeError, ImportError):  # numpy is missing, or has no such dtype
        return _from_sequence(_listed(plain, error, what), error, what)
    return _from_buffer(view, error, what)


def _listed(tensor: Any, error: _Error, what: str) -> list[Any]:
    try:
        values = tensor.tolist()
    except (RuntimeError, TypeError) as refusal:  # a sparse tensor, say
        raise error(f"{what} are in a tensor that cannot be listed") from refusal
    if not isinstance(values, list) or (values and isinstance(values[0], list)):
        raise error(f"{what} are one-dimensional")
    return values


def _from_buffer(view: memoryview, error: _Error, what: str) -> array[int]:
    """Convert a one-dimensional buffer of integers; the common widths without a Python-level loop."""
    if view.ndim != 1:
        raise error(f"{what} are one-dimensional, not of shape {view.shape}")
    kind = view.format.lstrip("@=<" if not _BIG_ENDIAN else "@=>")
    if kind not in "bBhHiIlLqQnN" or len(kind) != 1:
        raise error(f"{what} are integers, not a buffer of format {view.format!r}")
    raw = view.tobytes()
    if view.itemsize == TOKEN_BYTES and (kind in "IL" or _high_bytes(raw).isascii()):
        return array("I", raw)
    if view.itemsize == 2 * TOKEN_BYTES:
        halves = memoryview(raw).cast("I")
        high, low = (halves[0::2], halves[1::2]) if _BIG_ENDIAN else (halves[1::2], halves[0::2])
        if not any(high.tobytes()):
            return array("I", low.tobytes())
    native = {1: "b", 2: "h", 4: "i", 8: "q"}[view.itemsize]
    values = array(native if kind.islower() else native.upper(), raw)
    return _from_sequence(values, error, what)


def _high_bytes(packed: bytes) -> bytes:
    """The most significant byte of each packed 32-bit integer: all ASCII exactly if no sign bit is set."""
    return packed[0 if _BIG_ENDIAN else 3 :: TOKEN_BYTES]


def shown(value: object) -> str:
    """Return ``value`` as an error names it: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number beyond all bounds"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _first_bad(values: Sequence[Any], error: _Error, what: str) -> InvalidTokens | InvalidBlocks:
    limit = 2**32
    for index, value in enumerate(values):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            wrong = f"{what} are integers, not {type(value).__name__} (index {index})"
        elif not 0 <= value < limit:
            wrong = f"{what} are in [0, 2**32), not {shown(value)} (index {index})"
        else:
            continue
        return InvalidTokens(wrong, index) if error is InvalidTokens else InvalidBlocks(wrong, None)
    return error(f"{what} are integers in [0, 2**32)")
