"""What every eviction policy must keep, whatever its order: the built-in ones, with parameters, and a user's own."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import Clock

from radix_cache import Hints, InvalidArgument, PrefixCache, RadixTree
from radix_cache.node import Node
from radix_cache.policies import BUILT_IN, EvictionPolicy, ScoredPolicy, make_policy
from radix_cache.reading import nodes_below
from radix_cache.shares import NamespaceLimit


class Shortest(ScoredPolicy):
    """A user's own: the leaf that ends nearest to the beginning goes first."""

    name = "shortest"

    def update(self, node: Node, end: int, counts: bool, hints: Hints) -> None:
        """Keep where the node ends."""
        node.data = end

    def score(self, leaf: Node) -> tuple[int, int]:
        """Return that, and the last access."""
        return leaf.data, leaf.last_access


POLICIES = [
    *BUILT_IN,
    "slru:protected_hits=3",
    "priority:default=3",
    "two-hit:ghost_blocks=3",
    "tlru:threshold=3,next_prompt_tokens=1",
    "pgdsf:token_s=2,attention_tokens=4",
    "workload-aware:reuse_s=5,life_s=2",
    "flop-aware:alpha=0.5,attention_tokens=2",
    "flop-aware:window=8,attention_tokens=2",
    "steps-to-execution:step_s=0.5,grace_steps=2",
    f"{__name__}:Shortest",
]

every_policy = pytest.mark.parametrize("policy", POLICIES)

HINTS = [
    Hints(priority=7),
    Hints(priority=-2, priority_s=3),
    Hints(priority_s=0.5),
    Hints(conversation="c"),
    Hints(request_type="chat"),
    Hints(conversation="d", request_type="agent"),
    Hints(next_prompt_tokens=2),
    Hints(cost_s=4.5),
    Hints(next_use=3),
    Hints(next_use=0),
    Hints(9, 1, "e", "tool", 0, 0, 0.5),
]


class Holder:
    """Random calls of one who holds several matches, on a tree whose policy reads a clock that moves now and then."""

    def __init__(self, policy: str, seed: int, block_size: int = 1) -> None:
        self.clock = Clock()
        self.policy = make_policy(policy)
        self.policy.clock = self.clock
        self.tree = RadixTree(block_size=block_size, policy=self.policy)
        self.draw = random.Random(seed)
        self.held: list[Any] = []
        self.num_inserted = 0

    def prompt(self) -> list[int]:
        """Draw up to six blocks of three kinds, so that prompts share beginnings."""
        symbols = [self.draw.randrange(3) for _ in range(self.draw.randrange(1, 7))]
        return [token for symbol in symbols for token in [symbol] * self.tree.block_size]

    def step(self) -> list[int]:
        """Make one call; return what it evicted."""
        tokens, hints = self.prompt(), self.draw.choice([None, *HINTS])
        self.clock.advance(self.draw.choice([0, 0, 0.25, 2]))
        match self.draw.randrange(8):
            case 0 | 1 | 2:
                start, self.num_inserted = self.num_inserted, self.num_inserted + len(tokens) // self.tree.block_size
                self.tree.insert(tokens, range(start, self.num_inserted), hints=hints)
            case 3 | 4 if len(self.held) < 4:
                self.held.append(self.tree.match_prefix(tokens, hints=hints))
            case 5 if self.held:
                self.tree.release(self.held.pop(self.draw.randrange(len(self.held))))
            case 6:
                return list(self.tree.evict(self.draw.randrange(4)))
        return []

    def let_go(self) -> None:
        """Release all."""
        while self.held:
            self.tree.release(self.held.pop())


def drain(tree: RadixTree, step: int = 1) -> Iterator[int]:
    """Evict all, a few blocks at a time; yield the ids in order."""
    while tree.num_evictable_blocks:
        yield from tree.evict(step)


def test_all_of_them_are_here() -> None:
    assert {name.partition(":")[0] for name in POLICIES} >= set(BUILT_IN)
    assert all(BUILT_IN[name].name == name for name in BUILT_IN)


@every_policy
@pytest.mark.parametrize("block_size", [1, 2])
def test_a_tree_is_intact_after_every_call(policy: str, block_size: int) -> None:
    """The order has all unlocked leaves, once; what it names next is unlocked; what is held is never evicted."""
    holder = Holder(policy, seed=block_size, block_size=block_size)
    tree = holder.tree
    for _ in range(400):
        num_evictable = tree.num_evictable_blocks
        evicted = holder.step()
        assert len(set(evicted)) == len(evicted) <= num_evictable
        tree.check_integrity()
        victim = holder.policy.victim()
        assert (victim is None) is (tree.num_evictable_blocks == 0)
        assert victim is None or (not victim.num_locks and victim.children is None)
    held = [(list(match.block_ids), match.num_tokens) for match in holder.held]
    assert tree.num_protected_blocks == len({block_id for ids, _ in held for block_id in ids})
    list(drain(tree))
    assert tree.num_cached_blocks == tree.num_protected_blocks
    holder.let_go()
    list(drain(tree))
    tree.check_integrity()
    assert (tree.num_nodes, list(holder.policy.candidates()), holder.policy.victim()) == (0, [], None)


@every_policy
@pytest.mark.parametrize("limits", [{}, {("a",): NamespaceLimit(12, 4)}], ids=["alone", "limited"])
def test_a_cache_keeps_its_books(policy: str, limits: dict[tuple[str, ...], NamespaceLimit]) -> None:
    """Random histories of several leases, with resets; exact amounts are evicted, and never what is locked."""
    draw, clock = random.Random(policy), Clock()
    cache = PrefixCache(num_blocks=24, block_size=2, policy=policy, limits=limits, clock=clock)
    held = []
    for number in range(300):
        clock.advance(draw.choice([0, 0.25, 2]))
        tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
        if held and draw.random() < 0.5:
            cache.release(held.pop(draw.randrange(len(held))))
        elif len(held) < 3:
            lease = cache.match_prefix(
                tokens, draw.choice([(), ("a",)]), num_tokens=len(tokens), hints=draw.choice([None, *HINTS])
            )
            for stop in (2, len(tokens)):  # in two chunks
                cache.insert(lease, tokens[:stop])
            held.append(lease)
        if number % 50 == 49:
            cache.reset(tokens=[draw.randrange(3), draw.randrange(3)])
            for lease in held:
                cache.release(lease)
            held.clear()
        before, amount = cache.stats(), draw.randrange(3)
        assert cache.evict(amount) == min(amount, before.num_evictable_blocks)
        assert cache.stats().num_protected_blocks == before.num_protected_blocks
        cache.check_integrity()
    for lease in held:
        cache.release(lease)
    cache.evict(24)
    assert cache.stats().num_free_blocks == 24


@every_policy
def test_the_same_calls_give_the_same_order(policy: str) -> None:
    first, second = Holder(policy, seed=3), Holder(policy, seed=3)
    assert [first.step() for _ in range(300)] == [second.step() for _ in range(300)]
    assert list(drain(first.tree)) == list(drain(second.tree))


@every_policy
def test_blocks_go_one_by_one_as_they_go_together(policy: str) -> None:
    """How many are asked for at once makes no difference to which ones go."""
    singly, together = Holder(policy, seed=4), Holder(policy, seed=4)
    for _ in range(200):
        singly.step()
        together.step()
    assert list(drain(singly.tree)) == list(drain(together.tree, step=5))


@every_policy
def test_both_halves_of_a_cut_keep_the_record(policy: str) -> None:
    tree = RadixTree(block_size=1, policy=policy)
    for hints in HINTS:
        tree.insert(range(12), range(12), hints=hints)
    (top,) = tree._index.roots[()].children.values()
    had = top.data
    upper = tree._index.cut(top, 4)
    assert upper is not top
    assert upper.data == top.data == had
    tree.check_integrity()
    assert list(drain(tree)) == list(range(11, -1, -1))


@every_policy
@pytest.mark.parametrize("hints", HINTS, ids=str)
def test_any_hint_is_taken(policy: str, hints: Hints) -> None:
    cache = PrefixCache(num_blocks=8, block_size=1, policy=policy)
    for tokens in ([1, 2], [1, 2, 3], [4]):
        lease = cache.match_prefix(tokens, num_tokens=len(tokens), hints=hints)
        cache.insert(lease, tokens)
        cache.release(lease)
    cache.check_integrity()
    assert cache.evict(8) == 4


@every_policy
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_copy_is_empty_and_has_the_parameters(policy: str, clone: Any) -> None:
    holder = Holder(policy, seed=5)
    for _ in range(50):
        holder.step()
    holder.let_go()
    assert holder.policy.victim() is not None
    made: EvictionPolicy = clone(holder.policy)
    assert type(made) is type(holder.policy)
    assert made.__reduce__() == holder.policy.__reduce__()
    assert (list(made.candidates()), made.victim()) == ([], None)
    assert made.saved() == make_policy(policy).saved()


@every_policy
@pytest.mark.parametrize("seed", [6, 7])
def test_a_copied_tree_goes_on_as_the_original(policy: str, seed: int) -> None:
    """Records of the nodes and what the policy says of itself are all there is to an order, and JSON can say them."""
    holder = Holder(policy, seed)
    for _ in range(200):
        holder.step()
    holder.let_go()
    other = Holder(policy, seed)
    other.tree = pickle.loads(pickle.dumps(holder.tree))
    other.clock.now, other.num_inserted = holder.clock.now, holder.num_inserted
    other.draw.setstate(holder.draw.getstate())
    other.tree._index.policy.clock = other.clock
    said = [holder.policy.saved(), [node.data for node in nodes_below(holder.tree._index.roots.values())]]
    assert tupled(json.loads(json.dumps(said))) == tupled(said)
    assert [holder.step() for _ in range(200)] == [other.step() for _ in range(200)]
    holder.let_go()
    other.let_go()
    assert list(drain(holder.tree)) == list(drain(other.tree))


def always_zero() -> float:
    """A clock that a pickle can name."""
    return 0.0


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))])
@pytest.mark.parametrize("clock", [always_zero, Clock(5.0)])
def test_a_copied_tree_goes_by_the_same_clock(clone: Any, clock: Any) -> None:
    """What is due by it stays longer, and would be long past by the machine's own."""
    policy = make_policy("steps-to-execution")
    policy.clock = clock
    tree = RadixTree(block_size=1, policy=policy)
    tree.insert([1], [1], hints=Hints(next_use=1))
    tree.insert([2], [2])
    copied = clone(tree)
    assert copied._index.policy.clock() == clock()
    assert list(copied.evict(1)) == [2]


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy])
def test_a_copy_goes_on_by_a_clock_that_goes_on(clone: Any) -> None:
    clock = Clock()
    policy = make_policy("steps-to-execution")
    policy.clock = clock
    made = clone(policy)
    clock.advance(7.0)
    assert made.clock() == 7.0
    assert "clock" not in clone(make_policy("lru")).__dict__


def test_a_clock_that_cannot_be_pickled_is_no_other_clock_afterwards() -> None:
    policy = make_policy("lru")
    policy.clock = lambda: 0.0
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError), match="lambda"):
        pickle.dumps(policy)


def tupled(value: Any) -> Any:
    """Return lists as tuples: JSON does not tell them apart."""
    return tuple(map(tupled, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("slru:protected_hits=0", "not 0"),
        ("slru:protected_hits=x", "not 'x'"),
        ("slru:hits=2", "'hits'"),
        ("slru:protected_hits=1,protected_hits=2", "protected_hits is given twice"),
        ("tlru:threshold=1,next_prompt_tokens=2, threshold =1", "threshold is given twice"),
        (f"{__name__}:Shortest:size=1,size=1", "size is given twice"),
        ("slru:protected_hits", "name=value"),
        ("lru:size=3", "'size'|no arguments|takes"),
        ("priority:default=0.5", "default is an integer, not 0.5"),
        ("priority:default=2147483648", "default is at least -2147483647 and at most 2147483647, not 2147483648"),
        ("two-hit:ghost_blocks=0", "ghost_blocks is at least 1 and at most 100000000, not 0"),
        ("two-hit:ghost_blocks=many", "ghost_blocks is an integer, not 'many'"),
        ("two-hit:size=5", "'size'"),
        ("tlru:threshold=-1", "threshold is at least 0 .* not -1"),
        ("tlru:next_prompt_tokens=1.5", r"next_prompt_tokens is an integer, not 1\.5"),
        ("pgdsf:token_s=0", "token_s is at least 1e-12 .* not 0"),
        ("pgdsf:token_s=nan", "token_s is at least .* not nan"),
        ("pgdsf:attention_tokens=0.5", r"attention_tokens is at least 1 .* not 0\.5"),
        ("workload-aware:reuse_s=0", r"reuse_s is at least 0\.001 and at most 1e\+09, not 0"),
        ("workload-aware:life_s=inf", "life_s is at least .* not inf"),
        ("flop-aware:alpha=-1", r"alpha is at least 0 and at most 1e\+09, not -1"),
        ("flop-aware:alpha=auto", "alpha is a number, not 'auto'"),
        ("flop-aware:window=0", "window is at least 1 and at most 65536, not 0"),
        ("steps-to-execution:step_s=-1", "step_s is at least 0 .* not -1"),
        ("steps-to-execution:grace_steps=x", "grace_steps is a number, not 'x'"),
    ],
)
def test_wrong_parameters_are_named(policy: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        make_policy(policy)
