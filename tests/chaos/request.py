"""One request of an engine: its tokens, its lease, and what its blocks must hold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .memory import NOTHING, Memory, Tag, first_digest, next_digest, record, tag_of


class Violation(Exception):
    """A promise was broken; ``facts`` says which, to whom, and when."""

    def __init__(self, what: str, **facts: Any) -> None:
        super().__init__(what)
        self.facts = {"what": what, **facts}


@dataclass(eq=False)
class Request:
    """See the module.

    tokens: the prompt, then what was sampled. stop_at: their number at the end. number: of its lease in the engine's
    life. epoch: the server's, when the lease was opened. own: for each block that the lease alone owns, what it holds.
    """

    tokens: list[int]
    namespace: tuple[str, ...]
    stop_at: int
    block_size: int
    is_aborted: bool = False
    is_sampled_freely: bool = False
    lease: Any = None
    number: int = 0
    epoch: str | None = None
    num_computed: int = 0
    own: dict[int, bytes] = field(default_factory=dict)
    retried_id: str | None = None  # of a match whose answer was lost, and that is asked for again
    history: deque[str] = field(default_factory=lambda: deque(maxlen=16))  # for the report of a violation
    _digests: list[bytes] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.num_computed >= self.stop_at or self.is_aborted

    def digest(self, position: int) -> bytes:
        """Return what a whole block must hold; the tokens of it are known."""
        while len(self._digests) <= position:
            at = len(self._digests)
            before = self._digests[-1] if at else first_digest(self.namespace)
            self._digests.append(next_digest(before, self.tokens[at * self.block_size : (at + 1) * self.block_size]))
        return self._digests[position]

    def opened(self, lease: Any, number: int, epoch: str | None) -> None:
        """The lease is there."""
        self.lease, self.number, self.epoch = lease, number, epoch
        self.num_computed = lease.num_cached_tokens
        self.retried_id = None
        self.own.clear()

    def closed(self) -> Any:
        """The lease is gone, or given up; return it."""
        lease, self.lease = self.lease, None
        self.own.clear()
        self.num_computed = 0
        return lease

    def published(self, num_before: int) -> list[tuple[int, bytes]]:
        """An insert was answered: what is the tree's now is not the lease's own. Return what the tree adopted."""
        table = self.lease.block_table
        new = range(num_before // self.block_size, self.lease.num_published_tokens // self.block_size)
        adopted = [position for position in new if self.own.pop(table[position], None) is not None]
        return [(table[position], self.digest(position)) for position in adopted]

    # At the memory, inside the fence, while the lease is surely alive.

    def verify(self, memory: Memory) -> int:
        """Check all blocks; return how many. Raises `Violation`."""
        table = self.lease.block_table
        num_published = self.lease.num_published_tokens // self.block_size
        for position in range(num_published):
            if not memory.has(table[position], self.digest(position)):
                raise self._violation("a cached block holds other KV than its tokens demand", memory, table[position])
        for block, content in self.own.items():
            if memory.read(block) != content:
                raise self._violation("a private block was written by somebody else", memory, block, content)
        return num_published + len(self.own)

    def _violation(self, what: str, memory: Memory, block: int, content: bytes | None = None) -> Violation:
        found = memory.read(block)
        table = list(self.lease.block_table)
        return Violation(
            what,
            block=block,
            position=table.index(block) if block in table else "redundant",
            lease=self.lease.lease_id,
            lease_number=self.number,
            namespace=self.namespace,
            num_published_tokens=self.lease.num_published_tokens,
            num_computed_tokens=self.num_computed,
            last_written_by=str(tag_of(found)),
            written_before_by=str(tag_of(content)) if content else None,
            epoch=self.epoch,
            history=list(self.history),
        )

    def claim(self, memory: Memory, engine: int, life: int, now: float) -> None:
        """Put one's name on the blocks that are new in the table."""
        for position, block in enumerate(self.lease.block_table):
            if position * self.block_size >= self.lease.num_published_tokens and block not in self.own:
                self._write(memory, block, Tag(engine, life, self.number, position, 0, now), NOTHING)

    def compute(self, memory: Memory, target: int, engine: int, life: int, now: float) -> None:
        """Write the KV of positions up to ``target``."""
        table, size = self.lease.block_table, self.block_size
        for position in range(self.num_computed // size, -(-target // size)):
            stop = min((position + 1) * size, target)
            if stop == (position + 1) * size:
                digest = self.digest(position)
            else:
                before = self.digest(position - 1) if position else first_digest(self.namespace)
                digest = next_digest(before, self.tokens[position * size : stop])
            tag = Tag(engine, life, self.number, position, stop - position * size, now)
            self._write(memory, table[position], tag, digest)
        self.num_computed = target

    def _write(self, memory: Memory, block: int, tag: Tag, digest: bytes) -> None:
        content = record(tag, digest)
        memory.write(block, content)
        self.own[block] = content
