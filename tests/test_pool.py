"""The block pool: who may free what, in which order ids come back, and that an error takes or gives nothing."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from helpers import assert_fresh_int32
from hypothesis import given
from hypothesis import strategies as st

from radix_cache.errors import IntegrityError, InvalidArgument, InvalidBlocks, PoolExhausted
from radix_cache.operations import check_count
from radix_cache.pool import BlockPool


def test_reserved_ids_are_never_handed_out() -> None:
    """Padding rows of CUDA graphs write to block 0."""
    pool = BlockPool(6, num_reserved_blocks=2)
    assert pool.num_free_blocks == 4
    assert sorted(pool.allocate(4)) == [2, 3, 4, 5]
    pool.check_integrity()


def test_ids_come_back_longest_free_first() -> None:
    """A late engine writes into a block that nobody has yet, if at all possible."""
    pool = BlockPool(6)
    first = pool.allocate(4)
    pool.free(first[2:])
    pool.free(first[:1])
    assert list(pool.allocate(2)) == [4, 5], "never used ones have been free for longest"
    assert list(pool.allocate(3)) == [first[2], first[3], first[0]]


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    """Two blocks popped and then an error would leave blocks that nobody owns."""
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(PoolExhausted, match="3 blocks needed, 2 available") as caught:
        pool.allocate(3)
    assert (caught.value.needed, caught.value.available) == (3, 2)
    assert pool.num_free_blocks == 2
    pool.check_integrity()
    assert len(pool.allocate(2)) == 2


def test_exhausted_is_a_memory_error() -> None:
    """Each error is also a fitting builtin."""
    with pytest.raises(MemoryError):
        BlockPool(1).allocate(2)


@pytest.mark.parametrize("amount", [-1, 1.0, True, "1", None], ids=repr)
def test_allocating_a_senseless_number_is_refused(amount: object) -> None:
    """A bool is no number of blocks, and nothing is taken."""
    pool = BlockPool(4)
    with pytest.raises(InvalidArgument, match="num_blocks"):
        pool.allocate(amount)  # type: ignore[arg-type]
    assert pool.num_free_blocks == 4


def test_allocating_nothing_gives_nothing() -> None:
    """Zero is a number of blocks, also in an empty pool."""
    pool = BlockPool(1)
    pool.allocate(1)
    assert list(pool.allocate(0)) == []


@pytest.mark.parametrize(
    ("ids", "bad", "why"),
    [
        ([2, 2], 2, "named twice"),
        ([2, 5], 5, "free already"),
        ([2, 0], 0, r"not in this pool, whose ids are \[1, 6\)"),
        ([2, 6], 6, r"not in this pool, whose ids are \[1, 6\)"),
        ([2, 2**31 - 1], 2**31 - 1, "not in this pool"),
    ],
)
def test_what_is_not_in_use_cannot_be_freed(ids: list[int], bad: int, why: str) -> None:
    """A double free hands one block to two requests. The good ids of a bad call stay where they are."""
    pool = BlockPool(6, num_reserved_blocks=1)
    pool.allocate(3)
    with pytest.raises(InvalidBlocks, match=why) as caught:
        pool.free(ids)
    assert caught.value.block_id == bad
    assert pool.num_free_blocks == 2
    assert pool.is_in_use(2)
    pool.check_integrity()


@pytest.mark.parametrize("ids", [[-1], array("i", [-1]), [2**32], [1.5], ["a"], [True], "a", None, b"\1\0\0\0"])
def test_what_is_no_block_id_cannot_be_freed(ids: object) -> None:
    """Negative ids never count from the end of the pool."""
    pool = BlockPool(4)
    pool.allocate(4)
    with pytest.raises(InvalidBlocks):
        pool.free(ids)
    assert pool.num_free_blocks == 0
    pool.check_integrity()


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, torch.tensor, lambda ids: array("q", ids), lambda ids: array("i", ids)]
)
def test_ids_are_freed_in_every_form(make: object) -> None:
    """An engine gives back what it holds, a slice of a tensor for one."""
    pool = BlockPool(4)
    ids = pool.allocate(3).tolist()
    pool.free(make(ids))  # type: ignore[operator]
    assert pool.num_free_blocks == 4
    assert not pool.is_in_use(ids[0])


def test_the_freed_array_stays_the_callers() -> None:
    """Writing to it later doesn't change what the pool hands out."""
    pool = BlockPool(2)
    ids = pool.allocate(2)
    pool.free(ids)
    ids[0] = ids[1] = 77
    assert sorted(pool.allocate(2)) == [0, 1]


def test_allocated_ids_are_fresh_arrays() -> None:
    """A view of an answer never blocks a later call, and writing to it changes nothing."""
    pool = BlockPool(8)
    ids = pool.allocate(3)
    assert_fresh_int32(ids)
    view = memoryview(ids)
    pool.free(ids)
    again = pool.allocate(8)
    view[0] = 99
    assert 99 not in again
    pool.check_integrity()


@pytest.mark.parametrize("num_blocks", [0, -1, 1.5, "16", True, None, 2**31], ids=repr)
def test_a_pool_of_no_blocks_is_refused(num_blocks: object) -> None:
    """The error names the field."""
    with pytest.raises(InvalidArgument, match="num_blocks"):
        BlockPool(num_blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_reserved", [4, 5, -1, 0.5, True], ids=repr)
def test_reserving_all_or_less_than_none_is_refused(num_reserved: object) -> None:
    """At least one block is left to hand out."""
    with pytest.raises(InvalidArgument, match="num_reserved_blocks"):
        BlockPool(4, num_reserved)  # type: ignore[arg-type]


def test_counts_name_value_and_limit() -> None:
    """The one check that all counts go through."""
    with pytest.raises(InvalidArgument, match="ttl is at least 3 and at most 9, not 2"):
        check_count(2, "ttl", 3, 9)
    with pytest.raises(InvalidArgument, match=r"ttl is an integer, not 2\.5"):
        check_count(2.5, "ttl")  # type: ignore[arg-type]
    assert check_count(np.int64(5), "ttl") == 5  # type: ignore[arg-type]


@pytest.mark.parametrize("harm", ["in use and free", "counted wrong", "free twice", "lost"])
def test_the_integrity_check_finds_what_is_broken(harm: str) -> None:
    """A check that cannot fail guards nothing."""
    pool = BlockPool(6)
    ids = pool.allocate(3)
    pool.free(ids[:2])
    pool.check_integrity()
    match harm:
        case "in use and free":
            pool._in_use[ids[0]] = 1
        case "counted wrong":
            pool.num_free_blocks += 1
        case "free twice":
            pool.give(ids[:1].tobytes())
            pool.num_free_blocks -= 1
        case "lost":
            pool._in_use[ids[2]] = 0
    with pytest.raises(IntegrityError):
        pool.check_integrity()


@given(st.lists(st.one_of(st.integers(0, 5), st.sets(st.integers(0, 9), min_size=1)), max_size=60))
def test_any_history_equals_a_plain_list(steps: list[int | set[int]]) -> None:
    """Numbers allocate, sets free whatever of them is in use; ids, order and counts follow a list of free ids."""
    pool = BlockPool(10, num_reserved_blocks=1)
    free = list(range(1, 10))
    for step in steps:
        if isinstance(step, int):
            expected, free = (free[:step], free[step:]) if step <= len(free) else (None, free)
            if expected is None:
                with pytest.raises(PoolExhausted):
                    pool.allocate(step)
            else:
                assert list(pool.allocate(step)) == expected
        else:
            giving = [i for i in step if pool.is_in_use(i)]
            pool.free(giving)
            free += giving
        assert pool.num_free_blocks == len(free)
        assert [i for i in range(10) if pool.is_in_use(i)] == sorted(set(range(1, 10)) - set(free))
        pool.check_integrity()


def test_freeing_much_at_once_keeps_the_order() -> None:
    """Arrays that are too long to be merged are handed out in turn, also in pieces."""
    pool = BlockPool(10_000)
    ids = pool.allocate(10_000).tolist()
    for start in range(0, 10_000, 2_500):
        pool.free(ids[start : start + 2_500])
    taken = [block_id for amount in (1, 2_499, 3_000, 4_500) for block_id in pool.allocate(amount)]
    assert taken == ids
