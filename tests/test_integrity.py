"""Each invariant of docs/design.md, broken on purpose: the integrity check must see it and say which one it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from radix_cache import Lease, NamespaceLimit, PrefixCache
from radix_cache.errors import IntegrityError

DESIGN = Path(__file__).parent.parent / "docs" / "design.md"


class Scene(NamedTuple):
    """A cache with a shared node and two leaves, a lease that ends in one of them, and a pin on the shared node."""

    cache: PrefixCache
    index: Any
    root: Any
    shared: Any
    held: Any
    loose: Any
    lease: Lease

    @classmethod
    def new(cls) -> Scene:
        """Build it, whole."""
        cache = PrefixCache(24, 1, limits={("a",): NamespaceLimit(max_blocks=16)}, lease_ttl_s=60, clock=lambda: 0.0)
        for tail in ([3, 4], [5, 6]):
            lease = cache.match_prefix([1, 2, *tail], ("a",), num_tokens=4)
            cache.insert(lease, [1, 2, *tail])
            cache.release(lease)
        cache.pin([1, 2], 3600, ("a",))
        lease = cache.match_prefix([1, 2, 3, 4, 7], ("a",), num_tokens=5, engine_id="E")
        cache.check_integrity()
        executor: Any = cache._executor
        root = executor.index.roots[("a",)]
        (shared,) = root.children.values()
        held, loose = shared.children.values()
        return cls(cache, executor.index, root, shared, held, loose, lease)


def lose_a_block(scene: Scene) -> None:
    scene.cache._executor.pool.take(1)


def leak_at_a_release(scene: Scene) -> None:
    scene.lease._private.pop()


def give_a_cached_block_to_a_lease(scene: Scene) -> None:
    scene.lease._private[0] = memoryview(scene.loose.block_ids).cast("i")[0]


def cache_a_block_twice(scene: Scene) -> None:
    scene.loose.block_ids = scene.loose.block_ids[:4] * 2


def drop_an_id(scene: Scene) -> None:
    scene.loose.block_ids = scene.loose.block_ids[:4]


def fill_a_root(scene: Scene) -> None:
    scene.root.tokens, scene.root.block_ids = scene.shared.tokens, scene.shared.block_ids


def misplace_a_child(scene: Scene) -> None:
    scene.loose.tokens = scene.held.tokens


def lose_a_parent(scene: Scene) -> None:
    scene.loose.parent = scene.root


def touch_a_child_alone(scene: Scene) -> None:
    scene.loose.last_access = scene.index.now + 1


def end_too_far(scene: Scene) -> None:
    scene.loose.end += 4


def keep_a_way_to_what_is_gone(scene: Scene) -> None:
    scene.loose.recent = scene.held


def move_to_another_namespace(scene: Scene) -> None:
    scene.loose.root = None


def unlock_too_much(scene: Scene) -> None:
    scene.shared.num_locks -= 1


def end_elsewhere(scene: Scene) -> None:
    scene.lease.num_published_tokens -= 1


def name_other_blocks(scene: Scene) -> None:
    scene.lease._parts = [bytes(len(scene.lease._published_ids()))]


def forget_a_leaf(scene: Scene) -> None:
    scene.index.policy.discard(scene.loose)


def order_an_inner_node(scene: Scene) -> None:
    scene.index.policy.touch(scene.shared)


def keep_an_empty_dict(scene: Scene) -> None:
    scene.loose.children = {}


def keep_an_empty_namespace(scene: Scene) -> None:
    scene.index.open_root(("b",))


def miscount_nodes(scene: Scene) -> None:
    scene.index.num_nodes += 1


def miscount_a_namespace(scene: Scene) -> None:
    scene.root.num_cached_blocks += 1


def miscount_leases(scene: Scene) -> None:
    scene.root.num_leases += 1


def miscount_a_share(scene: Scene) -> None:
    scene.root.share.num_leased_blocks += 1


def miscount_what_is_withheld(scene: Scene) -> None:
    scene.root.share.min_blocks = 16


def break_a_limit(scene: Scene) -> None:
    scene.root.share.max_blocks = 5


def miscount_pins(scene: Scene) -> None:
    scene.cache._executor.num_pinned_blocks += 1


def lose_a_lease_of_an_engine(scene: Scene) -> None:
    scene.cache._executor.leases._engines["E"].leases["stranger"] = scene.lease


BROKEN: list[tuple[int, Callable[[Scene], None], str]] = [
    (1, lose_a_block, "have an owner"),
    (1, leak_at_a_release, "not as it says"),
    (2, give_a_cached_block_to_a_lease, "has 2 owners"),
    (2, cache_a_block_twice, "in the tree twice"),
    (3, drop_an_id, "8 bytes of tokens and 1 blocks"),
    (3, fill_a_root, "empty exactly in a root"),
    (4, misplace_a_child, "not where its first block"),
    (4, lose_a_parent, "not where its first block"),
    (4, touch_a_child_alone, "touched after its parent"),
    (4, end_too_far, "ends at byte 20, not where its span does"),
    (4, keep_a_way_to_what_is_gone, "shortcut leads to what is not its child"),
    (4, move_to_another_namespace, "not of its parent's namespace"),
    (5, unlock_too_much, "1 locks on a node with 1 leases and 1 locked below"),
    (6, end_elsewhere, "not its path"),
    (6, name_other_blocks, "not its path"),
    (7, forget_a_leaf, "missing in the eviction order"),
    (7, order_an_inner_node, "what is no leaf"),
    (8, keep_an_empty_dict, "an empty dict"),
    (8, keep_an_empty_namespace, "kept with nothing in it"),
    (9, miscount_nodes, "the books say"),
    (9, miscount_a_namespace, "not what its root says"),
    (9, miscount_leases, "not as it says"),
    (9, miscount_pins, "the books say otherwise"),
    (9, lose_a_lease_of_an_engine, "in the books of engine 'E' only"),
    (10, miscount_a_share, "leased in a share"),
    (10, miscount_what_is_withheld, "do not withhold 0 blocks"),
    (10, break_a_limit, "more blocks than its limit"),
]


@pytest.mark.parametrize(("number", "harm", "said"), BROKEN, ids=[f"{n}-{harm.__name__}" for n, harm, _ in BROKEN])
def test_a_broken_invariant_is_seen(number: int, harm: Callable[[Scene], None], said: str) -> None:
    scene = Scene.new()
    harm(scene)
    with pytest.raises(IntegrityError, match=re.escape(said)):
        scene.cache.check_integrity()


def test_a_lost_block_ends_the_call_in_which_it_is_lost() -> None:
    """The sums are checked after each operation, not only by the walk."""
    scene = Scene.new()
    scene.cache._executor.pool.take(1)
    with pytest.raises(IntegrityError, match="blocks were lost or doubled: 16 free"):
        scene.cache.probe([1])


def test_every_invariant_of_the_design_is_here() -> None:
    """The numbers of docs/design.md that the check is said to walk."""
    section = DESIGN.read_text(encoding="utf-8").partition("## Invariants")[2].partition("\n## ")[0]
    numbered = {int(number) for number in re.findall(r"^\| (\d+) \|.*check_integrity", section, re.MULTILINE)}
    assert numbered == {number for number, _, _ in BROKEN}
