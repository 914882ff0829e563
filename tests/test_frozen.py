"""A cache that was frozen and thawed goes on as the one that it was: the same answers, the same blocks, the same order
of eviction, whatever the policy."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from helpers import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_cache import Hints, PrefixCache
from radix_cache.errors import RadixCacheError
from radix_cache.frozen import Frozen, FrozenLease, FrozenNode, freeze
from radix_cache.node import MAX_PLAIN_CHILDREN
from radix_cache.policies import BUILT_IN
from radix_cache.shares import NamespaceLimit
from radix_cache.thawing import thaw

TTL_S = 20.0
ENGINES = [None, "E", "F"]
NAMESPACES: list[tuple[str, ...]] = [(), (), ("a",), ("a", "b")]
HINTS = [
    None,
    None,
    Hints(priority=3),
    Hints(priority=5, priority_s=4.0),
    Hints(conversation="c", request_type="chat", next_prompt_tokens=3),
    Hints(request_type="agent", cost_s=2.5, next_use=2.0),
]


class Step(NamedTuple):
    """One call, by small numbers that find something to be about."""

    verb: str
    which: int
    size: int
    other: int


VERBS = ["request", "request", "request", "match", "grow", "insert", "release", "release", "fork", "trim", "renew"]
VERBS += ["pin", "evict", "reset", "reset_tokens", "wait", "batch", "hear"]
steps = st.builds(Step, st.sampled_from(VERBS), st.integers(0, 99), st.integers(0, 12), st.integers(0, 99))


class Driver:
    """Makes the calls of steps on one cache. Two drivers with equal caches make equal calls."""

    def __init__(self, policy: str, *, is_limited: bool) -> None:
        self.clock = Clock()
        self.settings: dict[str, Any] = {
            "num_blocks": 24,
            "block_size": 2,
            "policy": policy,
            "num_reserved_blocks": 1,
            "lease_ttl_s": TTL_S,
            "growth_share": 0.1,
            "limits": {("a",): NamespaceLimit(max_blocks=12, min_blocks=3)} if is_limited else {},
        }
        self.cache = PrefixCache(**self.settings, clock=self.clock)
        self.num_named = 0
        self.seq = 0

    def twin(self) -> Driver:
        """Return a driver at the same point whose cache went through rows."""
        twin = Driver.__new__(Driver)
        twin.__dict__.update(self.__dict__)
        twin.clock = Clock(self.clock.now)
        twin.cache = PrefixCache(**self.settings, clock=twin.clock)
        thaw(twin.cache, through_a_file(freeze(self.cache)))
        twin.cache.check_integrity()
        return twin

    def do(self, step: Step) -> Any:
        """Make the call; return what it answers, as something that compares."""
        try:
            return shown(getattr(self, step.verb)(step))
        except RadixCacheError as error:
            return type(error).__name__, str(error)

    def tokens(self, step: Step) -> list[int]:
        """Return a prompt that begins like many others."""
        branch = step.which % 5
        return ([7] * min(step.size, 2 + branch) + [branch] * step.size)[: step.size + 1]

    def lease(self, step: Step) -> Any:
        """Return some live lease's id, or one that is none."""
        live = list(self.cache._executor.leases.by_id)
        return live[step.which % len(live)] if live else "nobody"

    def named(self) -> str:
        """Return a new name."""
        self.num_named += 1
        return f"lease-{self.num_named}"

    def options(self, step: Step) -> dict[str, Any]:
        """Return what a match may say besides."""
        return {
            "namespace": NAMESPACES[step.other % 4],
            "num_tokens": len(self.tokens(step)) + step.other % 4,
            "hints": HINTS[step.other % 6],
            "partial": step.other % 5 == 0,
        }

    def match(self, step: Step) -> Any:
        return self.cache.match_prefix(
            self.tokens(step), lease_id=self.named(), engine_id=ENGINES[step.other % 3], **self.options(step)
        )

    def request(self, step: Step) -> Any:
        lease = self.match(step)
        result = self.cache.insert(lease, self.tokens(step), engine_id=ENGINES[step.other % 3])
        if step.other % 2:
            self.cache.release(lease)
        return shown(lease), shown(result)

    def grow(self, step: Step) -> Any:
        return self.cache.allocate(self.lease(step), num_blocks=1 + step.size % 3)

    def insert(self, step: Step) -> Any:
        return self.cache.insert(self.lease(step), self.tokens(step), hints=HINTS[step.other % 6])

    def release(self, step: Step) -> Any:
        return self.cache.release(self.lease(step))

    def fork(self, step: Step) -> Any:
        return self.cache.match_prefix(
            self.tokens(step), parent=self.lease(step), lease_id=self.named(), num_blocks=step.other % 3
        )

    def trim(self, step: Step) -> Any:
        lease = self.cache._executor.leases.by_id.get(self.lease(step))
        return None if lease is None else self.cache.free(lease, list(lease.block_table)[-(step.size % 3 + 1) :])

    def renew(self, step: Step) -> Any:
        return self.cache.renew(self.lease(step), ttl_s=1.0 + step.size * 7)

    def pin(self, step: Step) -> Any:
        return self.cache.pin(self.tokens(step), 1.0 + step.size * 3, NAMESPACES[step.other % 4], lease_id=self.named())

    def evict(self, step: Step) -> Any:
        return self.cache.evict(step.size)

    def reset(self, step: Step) -> Any:
        return self.cache.reset(NAMESPACES[step.other % 4]) if step.size > 8 else None

    def reset_tokens(self, step: Step) -> Any:
        return self.cache.reset(NAMESPACES[step.other % 4], self.tokens(step)[: step.size // 2 * 2])

    def wait(self, step: Step) -> Any:
        self.clock.advance(step.size * 0.75)
        return self.cache.stats()

    def hear(self, step: Step) -> Any:
        self.cache.heartbeat("E")

    def batch(self, step: Step) -> Any:
        """Send a numbered batch; or the last one again, which is in what was frozen."""
        self.seq += step.other % 3 > 0
        with self.cache.batch(engine_id="E", seq=max(self.seq, 1)) as batch:
            answers = [batch.evict(step.size), batch.probe(self.tokens(step))]
        return [answer.result() for answer in answers]


def shown(answer: Any) -> Any:
    """Return an answer as it is now."""
    if hasattr(answer, "block_table"):
        partial = answer.partial_block_id, answer.num_partial_tokens
        return answer.lease_id, answer.num_cached_tokens, list(answer.block_table), partial
    if hasattr(answer, "redundant_block_ids"):
        return answer.num_cached_tokens, list(answer.block_ids), list(answer.redundant_block_ids)
    return list(answer) if hasattr(answer, "typecode") else answer


def through_a_file(frozen: Frozen) -> Frozen:
    """Return the rows as JSON brings them back: with lists for tuples."""
    nodes = [FrozenNode(*(listed(value) for value in node)) for node in frozen.nodes]
    leases = [FrozenLease(*(listed(value) for value in lease)) for lease in frozen.leases]
    rest = {name: listed(getattr(frozen, name)) for name in ("policy", "gone")}
    return frozen._replace(nodes=nodes, leases=leases, **rest)


def state(cache: PrefixCache) -> Frozen:
    """Return the rows, without what decides nothing: the running numbers of the rankings, for scores decide before, and
    bounds, which only say where to look for the next leaf.
    """
    frozen = freeze(cache)
    nodes = [node._replace(ranking=node.ranking and node.ranking[:-1]) for node in frozen.nodes]
    return frozen._replace(nodes=nodes, policy=frozen.policy[0] if cache._executor.index.shares else frozen.policy)


def listed(value: Any) -> Any:
    return list(map(listed, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("policy", BUILT_IN)
@settings(max_examples=settings().max_examples // 4)
@given(before=st.lists(steps, max_size=60), after=st.lists(steps, min_size=5, max_size=60), is_limited=st.booleans())
def test_goes_on_as_it_was(policy: str, before: list[Step], after: list[Step], is_limited: bool) -> None:
    driver = Driver(policy, is_limited=is_limited)
    for step in before:
        driver.do(step)
    twin = driver.twin()
    assert state(twin.cache) == state(driver.cache)
    for step in after:
        assert twin.do(step) == driver.do(step), step
    assert state(twin.cache) == state(driver.cache)
    twin.cache.check_integrity()


def test_a_node_with_thousands_of_children_keeps_their_order() -> None:
    driver = Driver("lru", is_limited=False)
    driver.settings |= {"num_blocks": 3 * MAX_PLAIN_CHILDREN, "block_size": 1}
    driver.cache = PrefixCache(**driver.settings, clock=driver.clock)
    for token in range(MAX_PLAIN_CHILDREN + 10):
        lease = driver.cache.match_prefix([token], num_tokens=1)
        driver.cache.insert(lease, [token])
        driver.cache.release(lease)
    driver.cache.evict(20)  # fewer than make a node wide, but wide it is
    twin = driver.twin()
    for each in (driver.cache, twin.cache):
        each.reset()
    assert freeze(twin.cache).free == freeze(driver.cache).free


def test_is_refused_within_a_reset() -> None:
    driver = Driver("lru", is_limited=False)
    driver.do(Step("request", 1, 8, 1))
    pieces = driver.cache.reset_steps()
    driver.cache._executor.index.detach((), b"")
    with pytest.raises(ValueError, match="between resets"):
        freeze(driver.cache)
    pieces.close()


def test_what_was_found_of_tenants_at_their_minimum_comes_back() -> None:
    """A snapshot is compared with what it was made of, to the last word."""
    settings: dict[str, Any] = {"num_blocks": 6, "block_size": 1, "limits": {("a",): NamespaceLimit(min_blocks=1)}}
    cache = PrefixCache(**settings)
    for namespace, tokens in (("a", [1]), ("b", [2, 3])):
        lease = cache.match_prefix(tokens, (namespace,), num_tokens=len(tokens))
        cache.insert(lease, tokens)
        cache.release(lease)
    cache.match_prefix([], ("c",), num_blocks=4)  # looks at the older one first, which may not be had
    assert (cache.probe([1], ("a",)), cache.probe([2, 3], ("b",))) == (1, 1)
    twin = PrefixCache(**settings)
    thaw(twin, through_a_file(freeze(cache)))
    assert freeze(twin) == freeze(cache)
