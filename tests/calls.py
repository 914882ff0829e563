"""Calls of a cache as plain data that hypothesis draws: which lease by its place, tokens by symbols, targets by
distance.

A drawn call knows nothing of the cache. `resolve` makes real arguments of it, against what the model says is there at
that moment; so a history stays sensible when it is shrunk, and its printed form can be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from helpers import NAMESPACES, Prompt, namespaces, prompts
from hypothesis import strategies as st
from model import CacheModel, Call, LeaseModel
from tree_model import Namespace

NOBODY = "nobody"


@dataclass
class World:
    """What calls are resolved against: the model, the ids that are gone, and what the batch under way has opened."""

    model: CacheModel
    gone: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)  # by earlier calls of the same batch
    opened_bare: list[str] = field(default_factory=list)  # ... without private blocks
    prompts: dict[str, list[int]] = field(default_factory=dict)  # what each lease was opened for
    num_named: int = 0

    def new_id(self) -> str:
        """Return a lease id that was never used."""
        self.num_named += 1
        return f"lease-{self.num_named}"

    def pick(self, who: Who, opened: list[str] | None = None) -> str:
        """Return the id of some lease: a live one, one of ``opened``, or one that is gone."""
        ids = self.gone if who.is_gone else [*self.model.leases, *(opened or [])]
        return ids[who.place % len(ids)] if ids else NOBODY

    def known(self, lease_id: str) -> LeaseModel:
        """Return what the model has of it, or an empty record."""
        return self.model.leases.get(lease_id) or LeaseModel(lease_id, (), None, 0, [])


class Who(NamedTuple):
    """Which lease: its place among the live ones, or among those that are gone."""

    place: int
    is_gone: bool = False


class Drawn(Protocol):
    """One of the classes below."""

    def resolve(self, world: World) -> Call:
        """Return the verb with its arguments."""


class Match(NamedTuple):
    """``spare``: tokens that the table covers beyond the prompt. ``cut``: tokens at its end that may not be matched."""

    prompt: Prompt
    namespace: Namespace = ()
    spare: int | None = None
    num_blocks: int | None = None
    cut: int | None = None
    reuse: Who | None = None
    partial: bool = False

    def resolve(self, world: World) -> Call:
        """Match under a new name, or under one that is in use or was."""
        tokens = self.prompt.tokens(world.model.block_size)
        lease_id = world.new_id() if self.reuse is None else world.pick(self.reuse)
        options = {
            "tokens": tokens,
            "lease_id": lease_id,
            "namespace": self.namespace,
            "max_tokens": None if self.cut is None else max(0, len(tokens) - self.cut),
            "num_tokens": None if self.spare is None else len(tokens) + self.spare,
            "num_blocks": self.num_blocks,
            "partial": self.partial,
        }
        world.prompts[lease_id] = tokens
        return _opening(world, options, self.spare, self.num_blocks)


class Fork(NamedTuple):
    """``prompt`` follows what the parent has published."""

    parent: Who
    prompt: Prompt
    spare: int | None = None
    num_blocks: int | None = None
    namespace: Namespace = ()
    cap: int | None = None
    partial: bool = False

    def resolve(self, world: World) -> Call:
        """Fork; a cap may lie below what the parent has published, a namespace may be another one."""
        parent = world.pick(self.parent, world.opened)
        tokens = self.prompt.tokens(world.model.block_size)
        whole = world.known(parent).tokens + tokens
        options = {
            "tokens": tokens,
            "lease_id": world.new_id(),
            "namespace": self.namespace,
            "parent": parent,
            "max_tokens": self.cap,
            "num_tokens": None if self.spare is None else len(whole) + self.spare,
            "num_blocks": self.num_blocks,
            "partial": self.partial,
        }
        world.prompts[options["lease_id"]] = whole
        return _opening(world, options, self.spare, self.num_blocks)


def _opening(world: World, options: dict[str, Any], spare: int | None, num_blocks: int | None) -> Call:
    world.opened.append(options["lease_id"])
    if spare is None and num_blocks is None:
        world.opened_bare.append(options["lease_id"])
    return Call("match_prefix", options)


class Allocate(NamedTuple):
    """``more``: tokens beyond what the table covers."""

    lease: Who
    more: int | None
    num_blocks: int | None

    def resolve(self, world: World) -> Call:
        """Ask for a target, for so many blocks, or both."""
        lease_id = world.pick(self.lease, world.opened)
        covered = len(world.model.table(world.known(lease_id))) * world.model.block_size
        num_tokens = None if self.more is None else max(0, covered + self.more)
        num_blocks = 1 if self.more is None and self.num_blocks is None else self.num_blocks
        return Call("allocate", {"lease_id": lease_id, "num_tokens": num_tokens, "num_blocks": num_blocks})


class Insert(NamedTuple):
    """What the lease was opened for, then ``prompt``, as far as the table reaches.

    ``back``: published blocks that are said again. ``stray``: leave out what the lease was opened for. ``over``: go on
    beyond the end of the table.
    """

    lease: Who
    prompt: Prompt
    back: int = 0
    stray: bool = False
    over: bool = False
    twist: str = ""

    def resolve(self, world: World) -> Call:
        """Publish, with a contradiction or a senseless offset where the twist says so."""
        lease_id, block_size = world.pick(self.lease), world.model.block_size
        lease = world.known(lease_id)
        offset = max(0, len(lease.tokens) - self.back * block_size)
        own = [] if self.stray else world.prompts.get(lease_id, [])[len(lease.tokens) :]
        more = own + self.prompt.tokens(block_size)
        if not self.over:
            more = more[: len(lease.private) * block_size + self.prompt.num_ragged % block_size]
        said_again = lease.tokens[offset:]
        tokens = said_again + more
        if self.twist == "contradiction" and said_again:
            place = (7 * len(more) + self.prompt.num_ragged) % len(said_again)
            tokens[place] += 7
            tokens = tokens[: place + 1 + len(self.prompt.symbols)]
        offset += {"odd offset": 1, "offset too far": block_size}.get(self.twist, 0)
        return Call("insert", {"lease_id": lease_id, "tokens": tokens, "offset": offset})


class Free(NamedTuple):
    """``num_tail``: blocks off the end of the table; ``redundant``: those too; ``twist``: something that may not be
    freed.
    """

    lease: Who
    num_tail: int = 0
    redundant: bool = True
    twist: str = ""

    def resolve(self, world: World) -> Call:
        """Give back."""
        lease_id = world.pick(self.lease)
        lease = world.known(lease_id)
        block_ids = lease.private[max(0, len(lease.private) - self.num_tail) :]
        block_ids += lease.redundant if self.redundant else []
        return Call(
            "free", {"lease_id": lease_id, "block_ids": block_ids + self.spoiled(world.model, lease, block_ids)}
        )

    def spoiled(self, model: CacheModel, lease: LeaseModel, block_ids: list[int]) -> list[int]:
        """Return an id that spoils it all, if there is one of the kind."""
        match self.twist:
            case "twice":
                return block_ids[:1]
            case "published":
                return [block.block_id for block in model.path(lease)][-1:]
            case "not the tail":
                return [i for i in lease.private[:1] if i not in block_ids and lease.private[1:]]
            case "another's":
                return [i for other in model.leases.values() if other is not lease for i in other.private][:1]
            case "free":
                return sorted(model.freed_at)[:1]
        return []


class Release(NamedTuple):
    """The end of a lease."""

    lease: Who

    def resolve(self, world: World) -> Call:
        """Release."""
        return Call("release", {"lease_id": world.pick(self.lease, world.opened_bare)})


class Pin(NamedTuple):
    """A prefix to keep, for less or more than the ttl of the machine."""

    prompt: Prompt
    ttl_s: float
    namespace: Namespace = ()

    def resolve(self, world: World) -> Call:
        """Pin under a new name."""
        tokens, lease_id = self.prompt.tokens(world.model.block_size), world.new_id()
        world.opened.append(lease_id)
        options = {"tokens": tokens, "ttl_s": self.ttl_s, "lease_id": lease_id, "namespace": self.namespace}
        return Call("pin", options)


class Renew(NamedTuple):
    """A promise."""

    lease: Who
    ttl_s: float | None

    def resolve(self, world: World) -> Call:
        """Renew."""
        return Call("renew", {"lease_id": world.pick(self.lease, world.opened), "ttl_s": self.ttl_s})


class Probe(NamedTuple):
    """A question."""

    prompt: Prompt
    namespace: Namespace

    def resolve(self, world: World) -> Call:
        """Probe."""
        return Call("probe", {"tokens": self.prompt.tokens(world.model.block_size), "namespace": self.namespace})


class Evict(NamedTuple):
    """A wish for free blocks."""

    num_blocks: int

    def resolve(self, _: World) -> Call:
        """Evict."""
        return Call("evict", {"num_blocks": self.num_blocks})


class Reset(NamedTuple):
    """Of everything, a family of namespaces, or what extends a prefix there."""

    namespace: Namespace | None
    prompt: Prompt

    def resolve(self, world: World) -> Call:
        """Reset."""
        return Call("reset", {"namespace": self.namespace, "tokens": self.prompt.tokens(world.model.block_size)})


def now_and_then(*twists: Any) -> st.SearchStrategy[Any]:
    """Draw the first mostly, and one of the others now and then."""
    return st.sampled_from([twists[0]] * 3 * len(twists) + list(twists[1:]))


live = st.builds(Who, st.integers(0, 5), st.just(False))
gone = st.builds(Who, st.integers(0, 5), st.just(True))
anyone = st.builds(Who, st.integers(0, 5), now_and_then(False, True))
targets = st.none() | st.integers(0, 4)
few_blocks = now_and_then(None, 0, 1, 2, 3)
cuts = now_and_then(None, 0, 1, 2, 3)


def forks(who: st.SearchStrategy[Who]) -> st.SearchStrategy[Fork]:
    """Draw forks of such leases."""
    return st.builds(
        Fork,
        who,
        prompts(2),
        targets,
        few_blocks,
        now_and_then((), *NAMESPACES),
        now_and_then(None, 0, 1, 6),
        st.booleans(),
    )


def allocates(who: st.SearchStrategy[Who]) -> st.SearchStrategy[Allocate]:
    """Draw allocations for such leases."""
    return st.builds(Allocate, who, st.none() | st.integers(-2, 6), st.none() | st.integers(0, 3))


def inserts(who: st.SearchStrategy[Who]) -> st.SearchStrategy[Insert]:
    """Draw inserts on such leases."""
    twists = now_and_then("", "contradiction", "odd offset", "offset too far")
    rarely = now_and_then(False, True)
    return st.builds(Insert, who, prompts(2), st.integers(0, 3), rarely, rarely, twists)


def frees(who: st.SearchStrategy[Who]) -> st.SearchStrategy[Free]:
    """Draw frees on such leases."""
    twists = now_and_then("", "twice", "published", "not the tail", "another's", "free")
    return st.builds(Free, who, st.integers(0, 3), st.booleans(), twists)


def renews(who: st.SearchStrategy[Who]) -> st.SearchStrategy[Renew]:
    """Draw promises shorter and longer than the ttl of the machine, which is 10."""
    return st.builds(Renew, who, st.sampled_from([25, None, 25, 3]))


matches = st.builds(Match, prompts(), namespaces(), targets, few_blocks, cuts, st.none(), st.booleans())
requests = st.builds(Match, prompts(), namespaces(), st.integers(0, 4), st.none(), cuts, st.none(), st.booleans())
matches_by_name = st.builds(Match, prompts(), namespaces(), targets, few_blocks, cuts, live | gone)
releases = st.builds(Release, live)
probes = st.builds(Probe, prompts(), namespaces())
evicts = st.builds(Evict, st.integers(0, 6))
pins = st.builds(Pin, prompts(4), st.sampled_from([4, 25]), namespaces())
resets = st.builds(Reset, st.none() | st.sampled_from(NAMESPACES), prompts(2))


def naming(who: st.SearchStrategy[Who]) -> st.SearchStrategy[Drawn]:
    """Draw any call that names a lease."""
    ends = st.builds(Release, who)
    return st.one_of(forks(who), allocates(who), inserts(who), inserts(who), frees(who), ends, renews(who))


anything = st.one_of(matches, requests, naming(anyone), naming(live), matches_by_name, pins, probes, evicts, resets)
