"""Arguments of types that nearly fit: each is refused by name, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from radix_cache import (
    BatchNotRun,
    InvalidArgument,
    InvalidBlocks,
    InvalidTokens,
    Lease,
    PrefixCache,
    RadixTree,
    UnknownLease,
    pack_tokens,
)

NO_COUNT = {
    "array": np.array([1, 2]),
    "float tensor": torch.tensor(3.0),
    "long tensor": torch.tensor([1, 2]),
    "float": 1.0,
    "text": "1",
    "bool": True,
}
COUNTED: dict[str, Callable[[PrefixCache, Lease, object], object]] = {
    "max_tokens": lambda cache, lease, value: cache.match_prefix([1], max_tokens=value),
    "num_tokens": lambda cache, lease, value: cache.match_prefix([1], num_tokens=value),
    "num_blocks": lambda cache, lease, value: cache.allocate(lease, num_blocks=value),
    "offset": lambda cache, lease, value: cache.insert(lease, [1], offset=value),
    "evict": lambda cache, lease, value: cache.evict(value),
    "block_size": lambda cache, lease, value: PrefixCache(num_blocks=4, block_size=value),
    "seq": lambda cache, lease, value: cache.run([], engine_id="e", seq=value),
}


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(num_blocks=9, block_size=2, lease_ttl_s=5)


@pytest.mark.parametrize("verb", COUNTED)
@pytest.mark.parametrize("value", NO_COUNT)
def test_what_is_no_count(cache: PrefixCache, verb: str, value: str) -> None:
    lease = cache.match_prefix([], num_tokens=2)
    before = cache.stats()
    with pytest.raises(InvalidArgument, match="is an integer"):
        COUNTED[verb](cache, lease, NO_COUNT[value])
    assert cache.stats() == before


def test_a_scalar_of_numpy_or_torch_is_a_count(cache: PrefixCache) -> None:
    assert len(cache.match_prefix([], num_tokens=np.int64(4)).block_table) == 2
    assert len(cache.match_prefix([], num_tokens=torch.tensor(4)).block_table) == 2


@pytest.mark.parametrize("ttl_s", [10**400, 1e10, float("inf"), float("nan"), 0, -1, True, "5"], ids=str)
def test_what_is_no_time_to_live(cache: PrefixCache, ttl_s: float) -> None:
    lease = cache.match_prefix([], num_tokens=2)
    with pytest.raises(InvalidArgument, match="seconds"):
        cache.renew(lease, ttl_s=ttl_s)
    with pytest.raises(InvalidArgument, match="lease_ttl_s"):
        PrefixCache(num_blocks=9, lease_ttl_s=ttl_s)


@pytest.mark.parametrize(
    "namespace", [np.array(3), torch.tensor(3), 3, None, "a"], ids=lambda value: type(value).__name__
)
def test_what_is_no_namespace(cache: PrefixCache, namespace: object) -> None:
    with pytest.raises(InvalidArgument, match="tuple of strings"):
        cache.match_prefix([1], namespace=namespace)


@pytest.mark.parametrize(
    "values",
    [np.array(["2020"], dtype="M8[Y]"), torch.tensor([1, 2]).to_sparse(), np.array([1 + 2j]), np.array(["a"])],
    ids=["dates", "sparse", "complex", "text"],
)
def test_what_are_no_ids(cache: PrefixCache, values: object) -> None:
    lease = cache.match_prefix([], num_tokens=2)
    with pytest.raises(InvalidTokens):
        pack_tokens(values)
    with pytest.raises(InvalidBlocks):
        cache.free(lease, values)
    with pytest.raises(InvalidBlocks):
        RadixTree(block_size=1).insert([1], values)


@pytest.mark.parametrize("namespace", [{"a", "b"}, {"a": "b"}, ("\ud800",)], ids=["set", "dict", "surrogate"])
def test_a_namespace_has_an_order_and_fits_a_message(cache: PrefixCache, namespace: object) -> None:
    with pytest.raises(InvalidArgument, match="namespace"):
        cache.probe([1], namespace=namespace)


def test_names_fit_a_message(cache: PrefixCache) -> None:
    for options in ({"lease_id": "\ud800"}, {"engine_id": "\ud800"}, {"parent": "\ud800"}):
        with pytest.raises(InvalidArgument, match="Unicode"):
            cache.match_prefix([1], **options)
    with pytest.raises(UnknownLease):
        cache.match_prefix([1], parent="")
    with pytest.raises(UnknownLease):
        cache.release("")


def test_an_endless_number_is_refused_in_few_words(cache: PrefixCache) -> None:
    huge = 10**5000
    for refused in (
        lambda: cache.match_prefix([huge]),
        lambda: cache.match_prefix([1], num_tokens=huge),
        lambda: cache.renew("x", ttl_s=huge),
        lambda: cache.evict([0] * 10**5),
    ):
        with pytest.raises(InvalidArgument) as caught:
            refused()
        assert len(str(caught.value)) < 200


def test_a_batch_that_has_ended_takes_no_more(cache: PrefixCache) -> None:
    batch = cache.batch()
    with batch:
        pending = batch.evict(1)
    assert pending.result() == 0
    with pytest.raises(BatchNotRun, match="begin another"):
        batch.evict(1)
    with pytest.raises(BatchNotRun, match="begin another"), batch:
        pass


def test_what_a_caller_writes_into_a_table_stays_with_him(cache: PrefixCache) -> None:
    lease = cache.match_prefix([1, 2], num_tokens=4)
    cache.insert(lease, [1, 2])
    table = lease.block_table
    lease.block_table[0] = 55
    assert lease.block_table == table
    cache.check_integrity()
