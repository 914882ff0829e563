"""What kind of request it is, type and turn of its conversation, and how soon each kind's nodes are used again.

Both are bounded: 64 kinds are told apart at a time, any other is `OTHER`, and a kind that nothing was heard of for an
hour makes room; 65,536 conversations are known by their turn, the last that were heard of.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

from radix_cache.hints import Hints
from radix_cache.policies.rates import Rate

__all__ = ["OTHER", "Kind", "Kinds"]

Kind: TypeAlias = tuple[str, int]

OTHER: Kind = ("", 0)
_MAX_TURN = 8
_MAX_KINDS = 64
_MAX_CONVERSATIONS = 65_536


class Kinds:
    """Kinds of requests and their rates of reuse. is_unused: tells whether a kind may be forgotten."""

    def __init__(self, is_unused: Callable[[Kind], bool]) -> None:
        self._is_unused = is_unused
        self._reuse: dict[Kind, Rate] = {OTHER: Rate()}
        self._turns: OrderedDict[str, int] = OrderedDict()  # by conversation, the last to be heard of last

    def of(self, hints: Hints, now: float, is_new: bool) -> Kind:
        """Return the kind of a request; ``is_new``: it begins the next turn of its conversation."""
        kind = (hints.request_type, min(self._turn(hints.conversation, is_new), _MAX_TURN))
        if kind not in self._reuse:
            if len(self._reuse) >= _MAX_KINDS and not self._make_room(now):
                return OTHER
            self._reuse[kind] = Rate()
        return kind

    def _turn(self, conversation: str, is_new: bool) -> int:
        if not conversation:
            return 0
        self._turns[conversation] = turn = self._turns.get(conversation, 0) + is_new
        self._turns.move_to_end(conversation)
        if len(self._turns) > _MAX_CONVERSATIONS:
            self._turns.popitem(last=False)
        return turn

    def _make_room(self, now: float) -> bool:
        for kind, rate in self._reuse.items():
            if kind != OTHER and rate.is_empty(now) and self._is_unused(kind):
                del self._reuse[kind]
                return True
        return False

    def known(self, kind: Kind) -> Kind:
        """Return ``kind``, or `OTHER` if it was forgotten."""
        return kind if kind in self._reuse else OTHER

    def reuse_of(self, kind: Kind) -> Rate:
        """Return the rate at which nodes of this kind are used again."""
        return self._reuse[self.known(kind)]

    def saved(self) -> list[Any]:
        """Return rates and turns."""
        return [[(kind, rate.saved()) for kind, rate in self._reuse.items()], list(self._turns.items())]

    def restore(self, saved: list[Any]) -> None:
        """Take up rates and turns."""
        rates, turns = saved
        self._reuse = {(request_type, turn): Rate(slices) for (request_type, turn), slices in rates}
        self._turns = OrderedDict((conversation, turn) for conversation, turn in turns)
