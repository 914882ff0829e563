"""An engine process at full load: every step is one message, and every block is looked at before it is used.

``python -m chaos.engine settings.json NUMBER LIFE``; NUMBER names its row on the board, LIFE counts its replacements.
Exit status: 0 after an orderly end (SIGTERM), 3 after a violation, which then lies in the folder of reports.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from radix_cache.errors import PoolExhausted, RadixCacheError, StaleLease, UnknownLease

from .board import Board
from .books import lay_open
from .clock import FileClock
from .judge import Judge
from .mailbox import Mailbox
from .memory import Fence, Memory
from .planner import Planner
from .request import Request, Violation
from .routes import Op, Routes
from .settings import Settings
from .unreliable import UnreliableClient

VIOLATED = 3
_MOST_WAITING = 4


class Engine:
    """One life of an engine."""

    def __init__(self, settings: Settings, number: int, life: int) -> None:
        folder = settings.folder
        self.settings, self.number, self.life = settings, number, life
        self.dice = random.Random(f"{settings.seed}/engine/{number}/{life}")
        self.board = Board(folder.board, settings.num_engines)
        self.memory = Memory(folder.memory, settings.num_blocks)
        self.fence = Fence(folder.fence)
        self.clock = FileClock(folder.clock)
        self.client = UnreliableClient(
            settings.address_of(number),
            self._name(life),
            self.clock,
            random.Random(f"{settings.seed}/calls/{number}/{life}"),
            settings.call_fault_share,
            self.count,
            timeout_s=settings.timeout_s,
        )
        self.judge = Judge(self.client, self.clock, settings.num_blocks, settings.num_reserved_blocks)
        self.routes = Routes(self.client, self.dice, self._look_meanwhile, self.count)
        self.mailbox = Mailbox(folder.mailbox)
        self.planner = Planner(self)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.doomed: list[str] = []  # leases to release, whatever they are
        self.acknowledged: list[tuple[int, bytes, str]] = []
        self.released: dict[int, bytes] = {}  # for a planted fault: what was private to a lease that is gone
        self.is_leaving = False
        self.is_cut_off = False
        self._num_leases = 0

    def count(self, name: str, amount: int = 1) -> None:
        """Add to this engine's totals."""
        self.board.add(self.number, name, amount)

    def run(self) -> None:
        """Step until told to leave, then give everything back."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "is_leaving", True))
        with self.client:
            self._meet_server()
            while not self.is_leaving:
                self._wait_at_gate()
                self.step()
            self.routes.close()

    def _meet_server(self) -> None:
        """Wait for it. Every second life gives back what the one before it had; else that runs out."""
        while not self.is_leaving:
            try:
                self.client.describe()
                if self.life % 2 == 0:
                    self.count("num_released_after_death", self.client.release_engine(self._name(self.life - 1)))
                return
            except RadixCacheError:
                time.sleep(0.05)

    def _name(self, life: int) -> str:
        return f"engine-{self.number}.{life}"  # a new one in each life, or the leases of the last would live on

    def _wait_at_gate(self) -> None:
        if self.board.is_gate_closed:
            self._lay_open_books()
        while self.board.is_gate_closed and not self.is_leaving:
            self.board.set(self.number, "is_parked", 1)
            time.sleep(0.005)
        self.board.set(self.number, "is_parked", 0)

    def _lay_open_books(self) -> None:
        until, epoch = self.client.valid_until, self.client.epoch
        known = [request for request in self.running if request.epoch == epoch]
        lay_open(self.settings.folder.books / f"{self.number}.json", until or 0.0, epoch or "", known)

    def step(self) -> None:
        """One message, what its answers mean, and the kernels that it found blocks for."""
        while len(self.waiting) < _MOST_WAITING:
            self.waiting.append(self.planner.new_request())
        self.judge.begin()
        self._forget_strangers(self.judge.epoch)
        again, ops = self.planner.plan_again(), self.planner.plan()
        self.routes.send_alone(again)  # it may be refused while the client gives the lease back
        self.routes.send(ops, is_strict=self.dice.random() < 0.5)
        for op in (*again, *ops):
            self._settle(op)
        self.count("num_steps")
        self.count("num_operations", len(ops))
        if not self._run_kernels():
            time.sleep(0.001)  # others have all the blocks

    # What the answers mean.

    def _settle(self, op: Op) -> None:
        request = op.request
        if request is not None:
            said = "done" if op.error is None else type(op.error).__name__
            request.history.append(f"{self.clock():.3f} {op.verb} {op.route}: {said}")
        if request is not None and op.verb != "match_prefix" and (op.lease is None or request.lease is not op.lease):
            return  # given up since it was sent
        if op.error is None:
            getattr(self, f"_settle_{op.verb}", lambda _: None)(op)
        else:
            self._settle_error(op)

    def _settle_error(self, op: Op) -> None:
        request = op.request
        if op.is_answered and not (op.verb == "match_prefix" and self.planner.is_fair_refusal(op)):
            self.judge.judge_error(op)
        if request is None:
            return
        if op.verb == "match_prefix":
            self._lose_parent(op)
            self.planner.match_failed(op)
        elif isinstance(op.error, PoolExhausted):
            self.count("num_refused")
            self.planner.is_short = True
        elif op.verb == "release":
            self.forget(request)
        else:
            self._lose(request, op)

    def _lose_parent(self, op: Op) -> None:
        """A fork whose parent is gone says so of the parent too."""
        if isinstance(op.error, UnknownLease):
            for parent in [each for each in self.running if each.lease.lease_id == op.error.lease_id]:
                self._lose(parent, op)

    def _lose(self, request: Request, op: Op) -> None:
        """The lease is gone, stale or in doubt: give it up, and begin again."""
        self.count("num_stale_leases" if isinstance(op.error, StaleLease) else "num_lost_leases")
        self.give_up(request)

    def give_up(self, request: Request) -> None:
        """Release the lease whatever it is, and let the request start anew or go."""
        if request.lease is not None:
            self.doomed.append(request.lease.lease_id)
        self.forget(request)
        if self.dice.random() < 0.7:
            self.waiting.appendleft(request)

    def forget(self, request: Request) -> None:
        """The request is not running any more."""
        if request in self.running:
            self.running.remove(request)
        request.closed()

    def _settle_match_prefix(self, op: Op) -> None:
        request, lease = op.request, op.value
        if request is None or not self.judge.is_same_server:
            self.doomed.append(lease.lease_id)  # which server opened it is not known
            if request is not None:
                self.waiting.append(request)
            return
        self.judge.judge_table(request, lease, op.options.get("max_tokens"))
        self._num_leases += 1
        request.opened(lease, self._num_leases, self.client.epoch)
        self.count("num_reused_tokens", request.num_computed)
        self.running.append(request)

    def _settle_allocate(self, op: Op) -> None:
        assert op.request is not None
        self.judge.judge_table(op.request, op.lease)

    def _settle_insert(self, op: Op) -> None:
        assert op.request is not None
        self.judge.judge_table(op.request, op.lease)
        adopted = op.request.published(op.num_before)
        epoch = op.request.epoch or ""
        self.board.acknowledge(self.number, epoch, len(adopted))
        self.acknowledged += [(block, digest, epoch) for block, digest in adopted]

    def _settle_release(self, op: Op) -> None:
        request = op.request
        if request is None:
            return
        self.planner.has_ended(request)
        if self.settings.plant == "write-after-release" and request.own:
            self.released = dict(request.own)
        self.forget(request)

    def _settle_probe(self, op: Op) -> None:
        self.count("num_probed")
        self.judge.judge_probe(op)

    def _settle_renew(self, op: Op) -> None:
        if op.request is not None and "ttl_s" in op.options:
            self.planner.hand_over(op.request)

    # At the memory.

    def may_touch(self) -> bool:
        """Tell whether the leases are surely alive. Inside the fence, so until it is left."""
        until = self.client.valid_until  # before the epoch, which the client hears of first
        is_valid = until is not None and self.clock() < until
        self._forget_strangers(self.client.epoch)
        return is_valid or self.settings.plant == "ignore-valid-until"

    def _forget_strangers(self, epoch: str | None) -> None:
        """Forget what another server opened: it is gone."""
        for request in [request for request in self.running if request.epoch != epoch]:
            self.count("num_lost_leases")
            self.forget(request)

    def _run_kernels(self) -> int:
        """Look at everything, then compute. Return how many requests got on."""
        with self.fence.shared():
            for block, digest, epoch in self.acknowledged:
                if self.memory.has(block, digest):
                    self.memory.acknowledge(block, digest, epoch)
            self.acknowledged.clear()
            self.is_cut_off = not self.may_touch()
            if self.is_cut_off:
                self.count("num_cut_off")
                return 0
            self._verify(self.running)
            for block, content in self.released.items():
                self.memory.write(block, content)
            return sum(self._compute(request) for request in self.running)

    def _look_meanwhile(self) -> None:
        """While an answer is on its way, look at what it cannot have taken."""
        with self.fence.shared():
            if self.may_touch():
                self._verify([request for request in self.running if request not in self.planner.leaving])

    def _verify(self, requests: list[Request]) -> None:
        for request in requests:
            self.count("num_checked_blocks", request.verify(self.memory))

    def _compute(self, request: Request) -> bool:
        now = self.clock()
        request.claim(self.memory, self.number, self.life, now)
        target = self.planner.kernel_target(request)
        if target <= request.num_computed:
            return False
        self.count("num_computed_tokens", target - request.num_computed)
        request.compute(self.memory, target, self.number, self.life, now)
        self.planner.sample(request)
        return True


def main() -> None:
    """Run one life."""
    faulthandler.register(signal.SIGUSR1)  # for a look at one that is stuck
    settings, number, life = Settings.read(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    engine = Engine(settings, number, life)
    try:
        engine.run()
    except Violation as violation:
        facts: dict[str, Any] = {"who": f"engine {number}.{life}", "when": engine.clock(), **violation.facts}
        report = settings.folder.reports / f"engine-{number}.{life}.json"
        report.write_text(json.dumps(facts, default=str), encoding="utf-8")
        sys.exit(VIOLATED)


if __name__ == "__main__":
    main()
