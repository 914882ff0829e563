"""What the tree asks of an eviction policy: an order of leaves, and nothing else.

The tree decides what may go (unlocked leaves only) and does the removing; a policy only says which of them is next. It
never unlocks, pins or edits a node beyond the slots that are its own (``prev``, ``next``, ``rank``, ``data``).

Locks are not announced: a policy finds a locked leaf when it looks for a victim, forgets it there and then, and hears
of it again through `add` when it is unlocked. So a leaf costs the policy nothing while requests come and go, and a
locked one at the head of the order is looked at once, not at each eviction.

Most policies are a formula: they subclass `radix_cache.policies.ScoredPolicy`, which is this with an order.
"""

from __future__ import annotations

import copy
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Self

from radix_cache.errors import InvalidArgument
from radix_cache.hints import Hints
from radix_cache.node import Node

__all__ = ["EvictionPolicy"]


class EvictionPolicy(ABC):
    """An order of the leaves. Raised exceptions are bugs of the policy; none of these methods is expected to fail.

    name: what users call it.
    merges_touched: whether blocks touched at the same time are alike to it, whenever they came, so that a leaf may grow
    in place. Only recency alone allows that.
    has_lasting_urgency: whether `urgency` of a leaf changes only when it is touched or added, or when `overdue` names
    it; then the victims of many groups with limits are compared in O(log groups) and not one by one.
    clock: seconds, never going back, for policies that need them; a cache puts its own here.
    """

    name: str
    merges_touched = False
    has_lasting_urgency = False
    clock: Callable[[], float] = staticmethod(time.monotonic)

    is_taken = False  # by a tree: the slots of a node have room for one policy's records

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a `victim` of one's own count where groups with limits are compared too, if nothing else is said."""
        super().__init_subclass__(**options)
        for name in ("has_lasting_urgency", "first", "heads") if "victim" in cls.__dict__ else ():
            if name not in cls.__dict__:
                setattr(cls, name, EvictionPolicy.__dict__[name])

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Remember the parameters for copies."""
        policy = super().__new__(cls)
        policy._made_with = arguments, options
        return policy

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    @property
    def spec(self) -> str:
        """Return name and parameters, as in ``"slru:protected_hits=3"``; what has its default is left out."""
        arguments, options = self._made_with
        signature = inspect.signature(type(self).__init__)
        said = signature.bind(self, *arguments, **options).arguments
        said.pop("self", None)
        given = [f"{name}={value}" for name, value in said.items() if value != signature.parameters[name].default]
        return ":".join([self.name, ",".join(given)] if given else [self.name])

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies have the same parameters and the same clock, and are empty: the order belongs to one tree, a copied
        tree fills its own. A clock that cannot be pickled is an error of pickling.
        """
        own_clock = {"clock": self.clock} if "clock" in self.__dict__ else None
        return _made_again, (type(self), *self._made_with), own_clock

    def __deepcopy__(self, memo: object) -> Self:
        """A deep copy goes by the same clock, not by a copy of it."""
        return copy.copy(self)

    def visit(self, node: Node, num_tokens: int, is_insert: bool, counted: Node | None, hints: Hints) -> None:
        """The path through ``node``, ``num_tokens`` long, was covered by a match or an insert at ``node.last_access``.

        ``counted``: the node of this path where the last insert of the same request ended, None for its first. Hits
        that count once a request count below it. ``hints``: the request's.
        """
        if node.children is None:
            self.touch(node)

    @abstractmethod
    def touch(self, leaf: Node) -> None:
        """``leaf``, new or known, locked or not, was covered by a match or an insert at ``leaf.last_access``."""

    @abstractmethod
    def add(self, leaf: Node) -> None:
        """``leaf`` can be evicted from now on: it was unlocked, or it lost its last child. It may be known already."""

    @abstractmethod
    def discard(self, leaf: Node) -> None:
        """``leaf`` is gone, or has a child now. It may be unknown."""

    @abstractmethod
    def victim(self) -> Node | None:
        """Return the unlocked leaf whose tail goes next, or None if there is none; it stays in the order.

        Asked only when blocks of that leaf are evicted right after.
        """

    @abstractmethod
    def candidates(self) -> Iterable[Node]:
        """Yield every leaf in the order, for integrity checks: all unlocked leaves, each once, and maybe locked
        ones.
        """

    # For limits of namespaces, where several orders share all else that the policy knows.

    def empty_order(self) -> dict[str, Any]:
        """Return the attributes that hold an order, as they are while it is empty. They are changed in place only."""
        raise InvalidArgument(f"policy {self.name!r} keeps one order: limits of namespaces need its empty_order()")

    def urgency(self, leaf: Node) -> Any:
        """Return what compares this policy's victim with that of another of its kind; the smallest goes first."""
        return leaf.last_access

    def overdue(self) -> Iterable[Node]:
        """Yield leaves, of any order, whose urgency has changed because time has passed; each is touched before the
        next.
        """
        return ()

    def first(self) -> Node | None:
        """Return the victim, as far as `overdue` is done with."""
        return self.victim()

    def weigh(self) -> None:  # noqa: B027 - optional
        """Leaves of several orders are about to be compared by `urgency`."""

    def heads(self) -> list[Node]:
        """Return leaves of this order, the victim among them, all unlocked; by `urgency` it is found."""
        leaf = self.first()
        return [] if leaf is None else [leaf]

    # Called only where a policy overrides them.

    def boundary(self, node: Node, num_tokens: int, hints: Hints) -> int | None:
        """Return the position in tokens at which the path through ``node``, ``num_tokens`` long, must have a node's
        end.

        Asked before each `visit`, for policies that tell two parts of one path apart; the position is rounded down to
        whole blocks. None: wherever it has one.
        """
        return None

    def evicted(self, leaf: Node, num_blocks: int) -> None:  # noqa: B027 - optional
        """The last ``num_blocks`` blocks of ``leaf`` are about to be evicted; a reset is not announced."""

    def unlocked(self, node: Node) -> None:  # noqa: B027 - optional
        """``node``, which has children, lost its last lock. (A leaf is announced through `add`.)"""

    # For those who keep a cache beyond the life of a process.

    def saved(self) -> Any:
        """Return what the policy knows beyond its nodes, as JSON can say it: an age, evicted blocks it remembers."""
        return None

    def restore(self, saved: Any) -> None:  # noqa: B027 - optional
        """Take up what `saved` returned; the nodes are added afterwards."""

    def ranking(self, leaf: Node) -> Any:
        """Return the place of ``leaf`` in the order, as JSON can say it; None where it has none, or `add` finds it."""
        return None

    def rank_again(self, leaf: Node, ranking: Any) -> None:
        """Put ``leaf`` where `ranking` said that it was."""
        self.add(leaf)

    def take_up(self, leaf: Node, ranking: Any) -> None:
        """Put back a leaf that was in the order, with or without a ``ranking``, after `restore`."""
        if ranking is None:
            self.add(leaf)
        else:
            self.rank_again(leaf, ranking)


def _made_again(kind: type[EvictionPolicy], arguments: tuple[Any, ...], options: dict[str, Any]) -> EvictionPolicy:
    return kind(*arguments, **options)
