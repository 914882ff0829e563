"""Token ids and block ids in every form that a caller may have, and each value that must never be let through."""

from __future__ import annotations

import re
from array import array

import numpy as np
import pytest
import torch
from helpers import assert_fresh_int32, packed
from hypothesis import example, given
from hypothesis import strategies as st

from radix_cache.errors import InvalidArgument, InvalidBlocks, InvalidTokens, RadixCacheError
from radix_cache.tokens import as_block_ids, pack_tokens, unpack_tokens

IDS = [0, 1, 7, 100, 127]  # fit every width, signed or not
FORMS = {
    "list": IDS,
    "tuple": tuple(IDS),
    "list of numpy integers": [np.int64(i) for i in IDS],
    **{f"array {code}": array(code, IDS) for code in "bBhHiIlLqQ"},
    **{f"numpy {kind}": np.array(IDS, dtype=kind) for kind in ("u1", "i1", "u2", "i2", "<u4", "<i4", "<u8", "<i8")},
    "numpy with a stride": np.array([i for token in IDS for i in (token, 99)], dtype=np.int64)[::2],
    "numpy read only": np.frombuffer(np.array(IDS, dtype=np.int32).tobytes(), dtype=np.int32),
    **{
        f"torch {kind}": torch.tensor(IDS, dtype=kind)
        for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    },
    "torch with a stride": torch.tensor([[i, 99] for i in IDS])[:, 0],
    "memoryview of integers": memoryview(array("q", IDS)),
    "a sequence of its own": range(5),
}
PACKED = {
    "bytes": packed(IDS),
    "bytearray": bytearray(packed(IDS)),
    "memoryview": memoryview(packed(IDS)),
    "a slice of a memoryview": memoryview(b"head" + packed(IDS))[4:],
}
NO_SEQUENCE = [None, 5, 1.5, True, "a", "", {1: 2}, {1}, object()]
BAD_VALUES = [2**32, 2**64, 2**200, -1, -(2**63), 1.5, 1.0, float("nan"), True, False, "a", "7", None, b"\0", [1]]
WIDE = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_integers_packs_alike(form: str) -> None:
    """A caller never has to convert, and no width or stride is misread."""
    expected = IDS if "of its own" not in form else range(5)
    assert pack_tokens(FORMS[form]) == packed(expected)
    assert list(as_block_ids(FORMS[form])) == list(expected)


@pytest.mark.parametrize("form", PACKED)
def test_every_form_of_packed_bytes_is_taken_as_tokens(form: str) -> None:
    """The wire form is used as it is."""
    assert pack_tokens(PACKED[form]) == packed(IDS)


def test_bytes_come_back_without_a_copy() -> None:
    """What arrives from the wire costs nothing."""
    data = packed(IDS)
    assert pack_tokens(data) is data


def test_what_can_change_later_is_copied() -> None:
    """A caller may reuse its buffer: the packed form doesn't follow."""
    buffer = bytearray(packed(IDS))
    ids = np.array(IDS, dtype=np.uint32)
    taken = pack_tokens(buffer), pack_tokens(ids)
    buffer[:] = bytes(len(buffer))
    ids[:] = 0
    assert taken == (packed(IDS), packed(IDS))


@pytest.mark.parametrize("make", [list, tuple, lambda w: array("I", w), lambda w: np.array(w, dtype=np.int64)])
def test_the_whole_range_is_exact(make: object) -> None:
    """2**32 - 1 is a token and nothing is cut off or made negative."""
    assert pack_tokens(make(WIDE)) == packed(WIDE)  # type: ignore[operator]
    assert unpack_tokens(packed(WIDE)).tolist() == WIDE


def test_nothing_at_all_is_no_tokens() -> None:
    """The empty prompt is a prompt."""
    for nothing in ([], (), b"", array("I"), np.array([], dtype=np.int64), torch.tensor([], dtype=torch.int64)):
        assert pack_tokens(nothing) == b""
    assert list(as_block_ids([])) == []


@pytest.mark.parametrize("value", BAD_VALUES, ids=repr)
def test_a_bad_value_is_named_with_its_index(value: object) -> None:
    """2**32 + 5 must never become 5, nor True 1, nor 1.0 1."""
    with pytest.raises(InvalidTokens) as caught:
        pack_tokens([5, 6, value])
    assert caught.value.index == 2
    assert "index 2" in str(caught.value)
    with pytest.raises(InvalidBlocks):
        as_block_ids([5, 6, value])


@pytest.mark.parametrize("value", [2**32, 2**64, -1], ids=repr)
def test_the_message_names_value_and_limit(value: int) -> None:
    """An error can be understood without a debugger."""
    with pytest.raises(InvalidTokens, match=rf"\[0, 2\*\*32\), not {value} \(index 1\)"):
        pack_tokens((3, value))
    with pytest.raises(InvalidTokens, match=r"integers, not float \(index 0\)"):
        pack_tokens([0.5])


@pytest.mark.parametrize("values", [[2**32, 1], [1, -1], [1, -(2**40)]], ids=repr)
def test_buffers_out_of_range_are_refused_as_lists_are(values: list[int]) -> None:
    """The fast paths check what the slow one checks."""
    index = next(i for i, value in enumerate(values) if not 0 <= value < 2**32)
    for form in (array("q", values), np.array(values, dtype=np.int64), torch.tensor(values, dtype=torch.int64)):
        with pytest.raises(InvalidTokens) as caught:
            pack_tokens(form)
        assert caught.value.index == index


def shown(value: object) -> str:
    """Return a name for a case that is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@pytest.mark.parametrize("values", NO_SEQUENCE, ids=shown)
def test_what_is_no_sequence_of_integers_is_refused(values: object) -> None:
    """A str is a sequence and a set iterable; neither is a prompt."""
    with pytest.raises(InvalidTokens):
        pack_tokens(values)
    with pytest.raises(InvalidBlocks):
        as_block_ids(values)


@pytest.mark.parametrize(
    "values",
    [
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(1),
        np.array(["a"]),
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor([[1, 2]]),
        torch.tensor(1),
        array("d", [1.0]),
        memoryview(np.array([1.0])),
        [np.True_],
        [np.float32(1)],
    ],
    ids=shown,
)
def test_arrays_of_another_kind_or_shape_are_refused(values: object) -> None:
    """Floats, bools and matrices are never guessed into tokens."""
    with pytest.raises(InvalidTokens):
        pack_tokens(values)
    with pytest.raises(InvalidBlocks):
        as_block_ids(values)


def test_foreign_byte_order_is_not_misread() -> None:
    """Big-endian integers are converted or refused, never taken for little-endian ones."""
    foreign = np.array(IDS, dtype=">u4")
    try:
        taken = pack_tokens(foreign)
    except InvalidTokens:
        taken = packed(IDS)
    assert taken == packed(IDS)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4097])
def test_ragged_bytes_are_refused(length: int) -> None:
    """A cut-off message is no prompt."""
    for make in (bytes, bytearray, lambda n: memoryview(bytes(n))):
        with pytest.raises(InvalidTokens, match=rf"4 bytes each; {length} bytes"):
            pack_tokens(make(length))


def test_bytes_are_no_block_ids() -> None:
    """Block ids have no packed form outside the wire."""
    for data in (b"\1\0\0\0", bytearray(4)):
        with pytest.raises(InvalidBlocks, match="not as bytes"):
            as_block_ids(data)


def test_block_ids_end_where_int32_does() -> None:
    """A block table is int32 in every attention kernel."""
    assert list(as_block_ids([2**31 - 1])) == [2**31 - 1]
    for form in ([1, 2**31], np.array([1, 2**31]), array("I", [1, 2**31])):
        with pytest.raises(InvalidBlocks, match=rf"below 2\*\*31, not {2**31}") as caught:
            as_block_ids(form)
        assert caught.value.block_id == 2**31


def test_block_ids_are_fresh_and_writable() -> None:
    """The caller's own array is neither kept nor changed."""
    mine = array("i", [1, 2, 3])
    taken = as_block_ids(mine)
    assert_fresh_int32(taken)
    taken[0] = 9
    assert mine[0] == 1


def test_bad_tokens_are_value_errors() -> None:
    """``except ValueError`` and ``except RadixCacheError`` both catch them."""
    for kind in (RadixCacheError, InvalidArgument, ValueError):
        with pytest.raises(kind):
            pack_tokens([-1])


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packing_and_unpacking_are_inverse(tokens: list[int]) -> None:
    """Whatever the ids, and whichever way they come."""
    data = pack_tokens(tokens)
    assert data == packed(tokens) == pack_tokens(np.array(tokens, dtype=np.uint64))
    assert unpack_tokens(data).tolist() == tokens


@given(
    st.lists(st.one_of(st.integers(0, 2), st.integers(0, 2**32 - 1)), max_size=200),
    st.integers(0, 200),
    st.sampled_from([True, False, 2**32, -1, 0.0, "1"]),
)
@example([0, 1] * 100, 150, True)
@example([2**32 - 1, 0xD800, 1, 1], 3, False)
@example([0x110000] * 3, 1, True)
def test_one_bad_value_among_many_is_found(tokens: list[int], place: int, bad: object) -> None:
    """The search for bools that hide among zeros and ones misses none, however many there are."""
    place = min(place, len(tokens))
    with pytest.raises(InvalidTokens) as caught:
        pack_tokens([*tokens[:place], bad, *tokens[place:]])
    assert caught.value.index == place
