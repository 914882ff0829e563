"""Which requests are the same again: to the last token, whatever of them was cached when the lease was opened."""

from __future__ import annotations

from typing import Any

import pytest

from radix_cache import PrefixCache
from radix_cache.operations import MatchPrefix, match_prefix
from radix_cache_service.state.openings import Openings


@pytest.fixture
def cache() -> PrefixCache:
    """One with [1, 2, 3, 4] cached in namespace n."""
    cache = PrefixCache(num_blocks=64, block_size=2)
    lease = cache.match_prefix([1, 2, 3, 4], ("n",), num_tokens=4)
    cache.insert(lease, [1, 2, 3, 4])
    cache.release(lease)
    return cache


def asked(tokens: list[int], lease_id: str = "a", **more: Any) -> MatchPrefix:
    return match_prefix(tokens, **{"namespace": ("n",), "num_tokens": 8, **more}, lease_id=lease_id)


def opened(cache: PrefixCache, openings: Openings, operation: MatchPrefix, engine_id: str = "E") -> Any:
    lease = cache.do(operation, engine_id)
    openings.note(operation, engine_id, lease)
    return lease


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("prompt", [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 9], [9, 9], []])
def test_only_the_same_request_is_the_same(cache: PrefixCache, lasting: bool, prompt: list[int]) -> None:
    openings = Openings(cache, lasting=lasting)
    lease = opened(cache, openings, asked(prompt))
    assert openings.find(asked(prompt), "E") is lease
    for place in range(len(prompt)):
        other = [*prompt[:place], 77, *prompt[place + 1 :]]
        assert openings.find(asked(other), "E") is None
    assert openings.find(asked([*prompt, 77]), "E") is None
    assert not prompt or openings.find(asked(prompt[:-1]), "E") is None
    for more in ({"namespace": ("m",)}, {"num_tokens": 9}, {"max_tokens": 2}, {"num_blocks": 0}, {"partial": True}):
        assert openings.find(asked(prompt, **more), "E") is None
    assert openings.find(asked(prompt), "F") is None
    assert openings.find(asked(prompt, "b"), "E") is None


@pytest.mark.parametrize("lasting", [False, True])
def test_it_is_the_same_still_when_the_lease_has_gone_on(cache: PrefixCache, lasting: bool) -> None:
    """It published, its path was cut by others, its namespace was reset; once it is released, nothing is found."""
    openings = Openings(cache, lasting=lasting)
    prompt = [1, 2, 3, 4, 5, 6]
    lease = opened(cache, openings, asked(prompt))
    fork = match_prefix([7, 8], parent=lease, lease_id="fork")
    child = opened(cache, openings, fork)
    cache.insert(lease, prompt)
    cache.release(cache.match_prefix([1, 2], ("n",)))
    cache.reset(("n",))
    assert openings.find(asked(prompt), "E") is lease
    assert openings.find(asked([9, 2, 3, 4, 5, 6]), "E") is None
    assert openings.find(fork, "E") is child
    assert openings.find(fork._replace(tokens=fork.tokens[:4] + b"9999"), "E") is None
    cache.release(lease)
    assert openings.find(asked(prompt), "E") is None
    other = opened(cache, openings, asked([5]))
    assert openings.find(asked([5]), "E") is other
    assert openings.find(asked(prompt), "E") is None


def test_what_is_kept_is_of_leases_that_are_open(cache: PrefixCache) -> None:
    """And can be given to a copy of the cache, if it is to last."""
    openings = Openings(cache, lasting=True)
    kept = opened(cache, openings, asked([1, 2], "kept"))
    cache.release(opened(cache, openings, asked([1, 2], "gone")))
    cache.match_prefix([1, 2], ("n",), lease_id="of nobody's request")
    digests = list(openings.digests(["kept", "gone", "of nobody's request", "never"]))
    assert [lease_id for lease_id, _ in digests] == ["kept"]
    kept._opening = None
    again = Openings(cache)
    assert again.find(asked([1, 2], "kept"), "E") is None
    again.restore(digests)
    assert again.find(asked([1, 2], "kept"), "E") is kept
    with pytest.raises(LookupError):
        again.restore([("gone", b"")])
